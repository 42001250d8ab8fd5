"""``load``: one layer of a checkpoint, this rank's share of it, as a MoEWeights."""

from __future__ import annotations

from pathlib import Path

import torch

from megamoe.checkpoint.config import Config, Key
from megamoe.checkpoint.experts import load_experts
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.layer import Layer, check_expert_names, find_layer
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.router import load_router
from megamoe.errors import bad_input
from megamoe.formats import Format, rn32
from megamoe.problem import Activation, MoEWeights, Placement

HIDDEN = Key(("hidden_size",))


def load(
    path: str | Path,
    layer: int | str,
    *,
    rank: int = 0,
    world_size: int = 1,
    placement: Placement | None = None,
    device: torch.device | str = "cpu",
    quantise: Format | str | None = None,
) -> MoEWeights:
    """The MoE layer ``layer`` of the checkpoint directory ``path``, with this rank's experts.

    layer: a number, or "mtp.N". placement: which experts each rank holds, in order where not given.
    """
    directory = Path(path)
    config = Config(directory)
    place = find_layer(Files(directory), config, layer)
    return load_layer(
        place, rank=rank, world_size=world_size, placement=placement, device=torch.device(device)
    )


def load_layer(
    layer: Layer,
    *,
    rank: int,
    world_size: int,
    placement: Placement | None,
    device: torch.device,
) -> MoEWeights:
    config, family = layer.config, layer.family
    num_experts, hidden = config.integer(family.experts), config.integer(HIDDEN)
    intermediate = expert_width(config)
    placement = _placement(placement, num_experts, rank, world_size)
    check_stated(layer)
    check_expert_names(layer, num_experts)
    activation = activation_of(layer)
    return MoEWeights(
        experts=load_experts(layer, placement.slots[rank], hidden, intermediate, device),
        placement=placement,
        rank=rank,
        router=load_router(layer, num_experts, hidden, device),
        activation=activation,
        routed_scaling_factor=_number(config, family.routed_scaling_factor),
        scale_at=family.scale_at,
        weight_at=family.weight_at,
        family=family.name,
    )


def expert_width(config: Config) -> int:
    """I: intermediate_size is the experts' only where moe_intermediate_size is absent."""
    key = Key(("moe_intermediate_size",))
    return config.integer(key if config.find(key.names) else Key(("intermediate_size",)))


def _number(config: Config, fact: float | Key) -> float:
    return config.number(fact) if isinstance(fact, Key) else fact


def _placement(
    placement: Placement | None, num_experts: int, rank: int, world_size: int
) -> Placement:
    if placement is None:
        placement = Placement.contiguous(num_experts, world_size)
    elif world_size not in (1, placement.world_size):
        raise bad_input(
            "world_size", world_size, f"is not the placement's {placement.world_size}",
            "leave world_size out where a placement is given",
        )  # fmt: skip
    if placement.num_experts != num_experts:
        raise bad_input(
            "placement", f"of {placement.num_experts} experts",
            f"does not place the layer's {num_experts}", "make one for this model",
        )  # fmt: skip
    if not 0 <= rank < placement.world_size:
        raise bad_input(
            "rank", rank, f"is not in [0, {placement.world_size})", "pass this process's rank"
        )
    return placement


def check_stated(layer: Layer) -> None:
    """Refuse a config that states another function than the family's row computes."""
    config, family = layer.config, layer.family
    for key, accepted in family.stated:
        value = config.values.get(key)
        if value is not None and value not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise refuse(
                config.file, key, repr(value), f"{expected} for {family.name}",
                "this is another function, which has no row in megamoe.checkpoint.families",
            )  # fmt: skip


def activation_of(layer: Layer) -> Activation:
    """The routed experts' activation; refuses one that the layer cannot express."""
    config, family = layer.config, layer.family
    name, act = config.value(Key(("hidden_act", "hidden_activation")))
    if act not in family.activations:
        raise refuse(
            config.file, name, repr(act), f"{' or '.join(family.activations)} for {family.name}",
            "the layer computes SwiGLU and its clamped forms only",
        )  # fmt: skip
    if family.limit is None:
        stated = config.find(("swiglu_limit",))
        if stated is not None:
            raise refuse(
                config.file, *stated, f"no clamp: {family.name} has none",
                "the clamp must not be dropped; check model_type",
            )  # fmt: skip
    return Activation(
        limit=None if family.limit is None else config.number(family.limit),
        alpha=float(rn32(torch.tensor(_number(config, family.alpha), dtype=torch.float64))),
        up_offset=family.up_offset,
    )
