"""Experts stacked in one tensor per leg: gpt-oss, and the layout transformers holds in memory."""

from __future__ import annotations

import math

from megamoe.checkpoint.files import Entry
from megamoe.checkpoint.layer import Layer
from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.formats import MXFP4, PLAIN_BF16, PLAIN_F32

PLAIN = {"BF16": PLAIN_BF16, "F32": PLAIN_F32}
GROUP = MXFP4.block[1]


def is_fused(layer: Layer) -> bool:
    return bool(layer.files.under(layer.experts + layer.family.fused.gate_up))


def check_fused_names(layer: Layer) -> None:
    """Refuse what is not one of the layout's tensors: nothing of an expert may be dropped."""
    fused = layer.family.fused
    legs = (fused.gate_up, fused.down)
    known = {leg + suffix for leg in legs for suffix in ("", "_blocks", "_scales")}
    if fused.bias:
        known |= {leg + "_bias" for leg in legs}
    for name in layer.files.under(layer.experts):
        if name[len(layer.experts) :] not in known:
            raise refuse(
                layer.files.file_of(name), name, "an extra tensor",
                f"{layer.experts}{{{','.join(sorted(known))}}}",
                "no part of an expert may be dropped: export without it",
            )  # fmt: skip


def fused_matrices(
    layer: Layer, num_experts: int, hidden: int, intermediate: int
) -> tuple[Matrix, Matrix]:
    """Expert 0's w13 and w2; ``replace(index=e)`` gives another's."""
    fused = layer.family.fused
    gate_up = _leg(layer, fused.gate_up, num_experts, 2 * intermediate, hidden, groups=2)
    return gate_up, _leg(layer, fused.down, num_experts, hidden, intermediate, groups=1)


def fused_bias(layer: Layer, leg: str, num_experts: int, width: int) -> Entry:
    entry = layer.files.entry(f"{layer.experts}{leg}_bias")
    _check(entry, (num_experts, width), tuple(PLAIN))
    return entry


def _leg(layer: Layer, leg: str, experts: int, rows: int, columns: int, *, groups: int) -> Matrix:
    stem, files, fused = layer.experts + leg, layer.files, layer.family.fused
    interleaved = fused.interleaved and groups > 1
    if stem in files and f"{stem}_blocks" in files:
        raise refuse(
            files.file_of(stem), stem, f"there beside {stem}_blocks", "one of the two",
            "remove the one that does not belong",
        )  # fmt: skip
    if f"{stem}_blocks" in files or f"{stem}_scales" in files:
        data, scale = files.entry(f"{stem}_blocks"), files.entry(f"{stem}_scales")
        tiles = math.ceil(columns / GROUP)
        _check(data, (experts, rows, tiles, GROUP // 2), ("U8",))
        _check(scale, (experts, rows, tiles), ("U8", "F8_E8M0"))
        if columns % GROUP:
            raise refuse(
                data.file, data.name, f"{data}, padded past {columns} columns",
                f"columns that are a multiple of {GROUP}", "this padding has no row in the table",
            )  # fmt: skip
        return Matrix(
            stem=stem, format=MXFP4, rows=rows, columns=columns, data=data, scale=scale, index=0,
            groups=groups, interleaved=interleaved,
        )  # fmt: skip
    data = files.entry(stem)
    shape = (columns, rows) if fused.transposed else (rows, columns)
    _check(data, (experts, *shape), tuple(PLAIN))
    return Matrix(
        stem=stem, format=PLAIN[data.dtype], rows=rows, columns=columns, data=data, index=0,
        groups=groups, interleaved=interleaved, transposed=fused.transposed,
    )  # fmt: skip


def _check(entry: Entry, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if entry.shape != shape or entry.dtype not in dtypes:
        raise refuse(
            entry.file, entry.name, entry, f"{' or '.join(dtypes)} {list(shape)}",
            "take config.json and shards of the same model",
        )  # fmt: skip
