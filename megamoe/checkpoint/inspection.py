"""What a checkpoint holds, layer by layer, from config.json and headers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from megamoe.checkpoint.config import Config
from megamoe.checkpoint.experts import find_experts
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.layer import (
    LAYERS,
    Layer,
    check_block_names,
    expert_width,
    family_of,
    find_layer,
    has_tensors,
    is_dense,
)
from megamoe.checkpoint.loading import HIDDEN, activation_of, check_declared, scaling_of
from megamoe.checkpoint.router import describe_router, find_router
from megamoe.checkpoint.shared import find_shared
from megamoe.checkpoint.stated import check_stated
from megamoe.errors import BadInput
from megamoe.formats import Format
from megamoe.problem import Activation, Placement, Request, WeightAt

Judge = Callable[[Request], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRecord:
    """The shared experts as one FFN."""

    w13: Format
    w2: Format
    intermediate_size: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoERecord:
    """An MoE layer: what a request for it would ask. nbytes: all experts as stored."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    w13: Format
    w2: Format
    bias: bool
    nbytes: int
    router: str
    activation: Activation
    routed_scaling_factor: float
    scale_at: Literal["weights", "output"]
    weight_at: WeightAt
    shared: SharedRecord | None

    def request(self, *, world_size: int, max_tokens_per_rank: int) -> Request:
        """The problem this layer poses, its experts spread in order."""
        return Request(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            placement=Placement.contiguous(self.num_experts, world_size),
            top_k=self.top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            weights=self.w13,
            w2_weights=self.w2,
            activation=self.activation,
            expert_bias=self.bias,
            weight_at=self.weight_at,
            routed_scaling_factor=self.routed_scaling_factor,
            scale_at=self.scale_at,
            shared=self.shared is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One layer: an MoE layer, a dense one, or one that is refused, with the reason.

    verdicts: what ``judge`` said of it.
    """

    name: str
    moe: MoERecord | None = None
    refusal: str | None = None
    verdicts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint: its family, then its layers in order, prediction stages last."""

    path: Path
    family: str
    model_types: tuple[str, ...]
    layers: tuple[LayerRecord, ...]

    def __str__(self) -> str:
        return "\n".join(_render(self))


def inspect(
    path: str | Path,
    *,
    judge: Judge | None = None,
    world_size: int = 1,
    max_tokens_per_rank: int = 512,
) -> CheckpointRecord:
    """What the checkpoint directory holds; ``str`` of the result is for people.

    judge: given the request of an MoE layer, says in lines which kernels could take it and why the
    others not; it is asked once per kind of layer. No tensor is read. A layer that ``load`` would
    refuse is recorded with its reason. Raises BadInput where config.json or the index is unusable.
    """
    directory = Path(path)
    with Files(directory) as files:
        return _inspect(files, Config(directory), judge, world_size, max_tokens_per_rank)


def _inspect(
    files: Files, config: Config, judge: Judge | None, world_size: int, max_tokens_per_rank: int
) -> CheckpointRecord:
    family = family_of(config)
    names: list[int | str] = list(range(config.integer(LAYERS)))
    stage = 0
    while has_tensors(files, config, f"mtp.{stage}"):
        names.append(f"mtp.{stage}")
        stage += 1
    said: dict[MoERecord, tuple[str, ...]] = {}
    records = []
    for name in names:
        try:
            if is_dense(files, config, name):
                records.append(LayerRecord(name=str(name)))
                continue
            moe = record_of(find_layer(files, config, name))
        except BadInput as refusal:
            records.append(LayerRecord(name=str(name), refusal=str(refusal)))
            continue
        if judge is not None and moe not in said:
            request = moe.request(world_size=world_size, max_tokens_per_rank=max_tokens_per_rank)
            said[moe] = tuple(judge(request))
        records.append(LayerRecord(name=str(name), moe=moe, verdicts=said.get(moe, ())))
    return CheckpointRecord(
        path=files.root, family=family.name, model_types=config.model_types, layers=tuple(records)
    )


def record_of(layer: Layer) -> MoERecord:
    """An MoE layer, from headers alone; refuses what ``load`` would refuse by them."""
    config, family = layer.config, layer.family
    hidden = config.integer(HIDDEN)
    check_stated(layer)
    check_block_names(layer)
    legs = find_experts(layer, range(layer.num_experts), hidden)
    check_declared(layer, legs)
    shared = find_shared(layer, hidden)
    w13, w2 = legs.formats
    matrices = [m for leg in (legs.w13, legs.w2) for parts in leg.values() for m in parts]
    return MoERecord(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=hidden,
        intermediate_size=expert_width(config),
        w13=w13,
        w2=w2,
        bias=family.fused.bias,
        nbytes=sum(m.nbytes for m in matrices),
        router=describe_router(find_router(layer, hidden)),
        activation=activation_of(layer),
        routed_scaling_factor=scaling_of(layer),
        scale_at=family.scale_at,
        weight_at=family.weight_at,
        shared=None
        if shared is None
        else SharedRecord(
            w13=shared[0].format,
            w2=shared[2].format,
            intermediate_size=shared[0].rows,
            nbytes=sum(m.nbytes for m in shared),
        ),
    )


def _render(record: CheckpointRecord) -> list[str]:
    moe = [layer for layer in record.layers if layer.moe is not None]
    total = sum(layer.moe.nbytes for layer in moe if layer.moe is not None)
    lines = [
        f"{record.path}",
        f"family {record.family} (model_type {', '.join(record.model_types)}): "
        f"{len(moe)} MoE layers of {len(record.layers)}, experts {_size(total)}",
    ]
    # Layers alike in all but their name are told together.
    for _, same in groupby(record.layers, key=_told_apart):
        group = list(same)
        first, last = group[0].name, group[-1].name
        title = f"layer {first}" if first == last else f"layers {first} to {last}"
        lines += ["", f"{title}: {_kind(group[0])}", *_details(group[0])]
    return lines


def _told_apart(layer: LayerRecord) -> tuple[object, ...]:
    """Each refusal has its own names, and a prediction stage is not one of the layers."""
    refused = None if layer.refusal is None else layer.name
    return layer.moe, layer.verdicts, layer.name.startswith("mtp."), refused


def _kind(layer: LayerRecord) -> str:
    if layer.refusal is not None:
        return f"REFUSED: {layer.refusal}"
    if layer.moe is None:
        return "dense"
    moe = layer.moe
    return (
        f"{moe.num_experts} experts, top {moe.top_k}, hidden_size {moe.hidden_size}, "
        f"intermediate_size {moe.intermediate_size}"
    )


def _details(layer: LayerRecord) -> list[str]:
    moe = layer.moe
    if moe is None:
        return []
    width, hidden = moe.intermediate_size, moe.hidden_size
    clamp = moe.activation.limit
    scaling = f"{moe.routed_scaling_factor:g} at the {moe.scale_at}"
    details = [
        f"experts     {_size(moe.nbytes)}, {_size(moe.nbytes // moe.num_experts)} each"
        + (", with biases" if moe.bias else ""),
        f"  w13       {moe.w13} [{2 * width}, {hidden}]",
        f"  w2        {moe.w2} [{hidden}, {width}]",
        f"router      {moe.router}",
        f"scaling     {scaling}; routing weight at {moe.weight_at}",
        f"activation  {moe.activation}" + ("" if clamp else ", no clamp"),
        "shared      none"
        if moe.shared is None
        else f"shared      {moe.shared.w13} and {moe.shared.w2}, intermediate_size "
        f"{moe.shared.intermediate_size}, {_size(moe.shared.nbytes)}",
        *layer.verdicts,
    ]
    return ["  " + line for line in details]


def _size(count: int) -> str:
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"
