"""``load``: one layer of a checkpoint, this rank's share of it, as a MoEWeights."""

from __future__ import annotations

from pathlib import Path

import torch

from megamoe.checkpoint.config import Config, Key
from megamoe.checkpoint.experts import Legs, find_experts, load_experts
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.layer import Layer, check_block_names, find_layer
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.router import find_router, load_router
from megamoe.checkpoint.shared import load_shared
from megamoe.checkpoint.stated import check_stated
from megamoe.errors import bad_input
from megamoe.formats import CATALOGUE, E2M1, E4M3, MXFP4, Format, rn32
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
    """One MoE layer of the checkpoint directory ``path``, with the experts that ``rank`` holds.

    layer: a number, or "mtp.N" for a multi-token-prediction stage (also the numbers past the last
    layer). placement: which experts each rank holds; without one they are spread in order over
    ``world_size``. Only this rank's experts are read, from the shards that hold them.

    Weights keep the bytes of the files. quantise: a format, or its name, that BF16 or float32
    experts are rounded to on loading; MXFP4 experts may become NVFP4, which is exact. The result
    says so in ``family``. Router and shared experts stay as stored.

    Raises BadInput for what is missing, misnamed, left over, misshapen, of another convention, or
    not expressible by the layer. Not checked: that other ranks' experts are well formed, and that
    weights (other than their scales) are finite.
    """
    directory, target = Path(path), format_of(quantise)
    with Files(directory) as files:
        return load_layer(
            find_layer(files, Config(directory), layer), rank=rank, world_size=world_size,
            placement=placement, device=torch.device(device), target=target,
        )  # fmt: skip


def load_layer(
    layer: Layer,
    *,
    rank: int,
    world_size: int,
    placement: Placement | None,
    device: torch.device,
    target: Format | None,
) -> MoEWeights:
    """``load`` for a layer that is already found."""
    config, family = layer.config, layer.family
    hidden = config.integer(HIDDEN)
    placement = _placement(placement, layer.num_experts, rank, world_size)
    check_stated(layer)
    check_block_names(layer)
    activation = activation_of(layer)
    slots = placement.slots[rank]
    # A rank without experts still needs to know their format.
    legs = find_experts(layer, sorted({e for e in slots if e >= 0}) or [0], hidden)
    check_declared(layer, legs)
    router = find_router(layer, hidden)
    return MoEWeights(
        experts=load_experts(layer, legs, slots, device, target),
        placement=placement,
        rank=rank,
        router=load_router(layer, router, device),
        activation=activation,
        routed_scaling_factor=scaling_of(layer),
        scale_at=family.scale_at,
        weight_at=family.weight_at,
        shared=load_shared(layer, hidden, activation, device),
        family=family.name if target is None else f"{family.name}, {target} on loading",
    )


def format_of(quantise: Format | str | None) -> Format | None:
    """The format that ``quantise`` names; refuses one that has no rule to make scales by."""
    if quantise is None:
        return None
    known = {fmt.name: fmt for fmt in CATALOGUE}
    fmt = known.get(quantise) if isinstance(quantise, str) else quantise
    if not isinstance(fmt, Format) or (fmt.scale is not None and fmt.rule is None):
        raise bad_input(
            "quantise", repr(quantise), "is not a format that weights can be rounded to",
            f"pass one of {', '.join(known)}",
        )  # fmt: skip
    return fmt


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
    if not isinstance(rank, int) or not 0 <= rank < placement.world_size:
        raise bad_input(
            "rank", rank, f"is not in [0, {placement.world_size})", "pass this process's rank"
        )
    return placement


def check_declared(layer: Layer, legs: Legs) -> None:
    """Refuse experts in another element than config.json declares for them.

    The tensors decide the format; a declaration is only held against them. A prediction stage may
    have been left as it was, so nothing is declared for it.
    """
    config, quantization = layer.config, layer.config.quantization
    if layer.stage is not None or "moe_quant_algo" in quantization:
        return
    key, value = "expert_dtype", config.values.get("expert_dtype")
    value = value or config.root.get(key) or quantization.get(key)
    if value is None and quantization.get("quant_method") == "mxfp4":
        key, value = "quant_method", "mxfp4"
    if value is not None and not isinstance(value, str):
        raise refuse(config.file, key, repr(value), "a name", "correct the config")
    expected = {"fp4": E2M1, "mxfp4": MXFP4.element, "fp8": E4M3}
    for fmt in legs.formats:
        if value in expected and fmt.element != expected[value]:
            raise refuse(
                config.file, key, repr(value), f"what the experts of layer {layer.name} are: {fmt}",
                "take config.json and shards of the same revision",
            )  # fmt: skip


def activation_of(layer: Layer) -> Activation:
    """The experts' activation; refuses one that the layer cannot express."""
    config, family = layer.config, layer.family
    name, act = config.value(Key(("hidden_act", "hidden_activation")))
    if act not in family.activations:
        raise refuse(
            config.file, name, repr(act), f"{' or '.join(family.activations)} for {family.name}",
            "the layer computes SwiGLU and its clamped forms only",
        )  # fmt: skip
    limit = None if family.limit is None else config.number(family.limit)
    if limit is not None and not limit >= 0:
        raise refuse(config.file, "swiglu_limit", limit, "a number >= 0", "correct the config")
    alpha = config.number(family.alpha) if isinstance(family.alpha, Key) else family.alpha
    return Activation(
        limit=limit,
        alpha=float(rn32(torch.tensor(alpha, dtype=torch.float64))),
        up_offset=family.up_offset,
    )


def scaling_of(layer: Layer) -> float:
    """routed_scaling_factor; 1 where the family has none."""
    fact = layer.family.routed_scaling_factor
    if not isinstance(fact, Key):
        return fact
    value = layer.config.number(fact)
    if not 0 < value < float("inf"):
        raise refuse(
            layer.config.file, fact.names[0], value, "a finite number above 0", "correct the config"
        )
    return value
