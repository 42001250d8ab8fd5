"""Matrices read one by one into the stacked tensors of a Quantised; nothing is rounded unasked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamoe.checkpoint.cast import first_inexact, mxfp4_to_nvfp4
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.scales import check_scales
from megamoe.formats import MXFP4, NVFP4, Format, Quantised, quantise, rn32

# Rows quantised at once: the greatest block height. The quantiser works in float64, and takes about
# twenty times a strip's float64 values.
STRIP = 128


def check_one_format(matrices: Sequence[Matrix]) -> Format:
    """The format of all; refuses the first that differs, by name."""
    first = matrices[0]
    for matrix in matrices[1:]:
        if matrix.format != first.format:
            raise refuse(
                matrix.data.file, matrix.stem, f"in {matrix.format}",
                f"{first.format}, as {first.stem} is",
                "export the layer in one format: weights are not rounded on loading",
            )  # fmt: skip
    return first.format


def check_target(matrix: Matrix, target: Format | None) -> None:
    """Refuse a format to load into that would round weights which are rounded already."""
    source = matrix.format
    if target is None or source == target or source.scale is None:
        return
    if (source, target) == (MXFP4, NVFP4):
        return
    raise refuse(
        matrix.data.file, matrix.stem, f"in {source}, with quantise={target}",
        "bf16 or f32 weights (or mxfp4 for nvfp4, which is exact)",
        "load it as it is, or quantise the original checkpoint",
    )  # fmt: skip


def stack(
    files: Files,
    parts: Mapping[int, tuple[Matrix, ...]],
    slots: Sequence[int],
    device: torch.device,
    target: Format | None = None,
) -> Quantised:
    """One expert per slot, its matrices below each other; a slot of -1 is all zeros.

    parts: by expert; those of one expert are its row groups and keep their own scales. Each tensor
    is read once and copied straight to its place. target: a format to put plain weights into.
    """
    every = [matrix for expert in parts.values() for matrix in expert]
    source = check_one_format(every)
    check_target(every[0], target)
    held = _empty(target or source, next(iter(parts.values())), len(slots), device)
    first: dict[int, int] = {}
    for slot, expert in enumerate(slots):
        if expert < 0:
            continue
        if expert in first:
            for tensor in held.tensors:
                tensor[slot] = tensor[first[expert]]
            continue
        first[expert] = slot
        if target in (None, source):
            _copy(held[slot : slot + 1], parts[expert], files)
        elif source == MXFP4:
            _cast(held[slot : slot + 1], source, parts[expert], files)
        else:
            _quantise(held[slot : slot + 1], parts[expert], files)
    return held


def _empty(fmt: Format, parts: Sequence[Matrix], count: int, device: torch.device) -> Quantised:
    """All zeros, and 1 for global scales, which may divide."""
    groups = sum(m.groups for m in parts)
    rows, columns = sum(m.rows for m in parts), parts[0].columns
    row_groups = 1 if fmt.scale is None else groups
    data = torch.zeros(
        count, rows, columns // fmt.element.packed, dtype=fmt.element.dtype, device=device
    )
    scale = factor = None
    if fmt.scale is not None:
        height, width = fmt.block[0] or rows // groups, fmt.block[1] or columns
        tiles = groups * -(-(rows // groups) // max(height, 1))
        scale = torch.zeros(
            count, tiles, -(-columns // max(width, 1)), dtype=fmt.scale.dtype, device=device
        )
    if fmt.global_scale != "none":
        factor = torch.ones(count, groups, dtype=torch.float32, device=device)
    return Quantised(format=fmt, data=data, scale=scale, global_scale=factor, row_groups=row_groups)


def _place(into: Tensor, stored: Tensor, matrix: Matrix) -> None:
    """Copy rows in the canonical order: those of one projection together."""
    if not matrix.interleaved:
        into.copy_(stored)
        return
    count = into.shape[0] // matrix.groups
    for group in range(matrix.groups):
        into[group * count : (group + 1) * count].copy_(stored[group :: matrix.groups])


def _copy(held: Quantised, parts: Sequence[Matrix], files: Files) -> None:
    """Fill one expert with the bytes of the files."""
    row = tile = group = 0
    for matrix in parts:
        _place(held.data[0, row : row + matrix.rows], matrix.codes(files), matrix)
        row += matrix.rows
        if held.scale is not None:
            scales, factor = matrix.scales(files), None
            if held.global_scale is not None:
                assert matrix.global_scale is not None
                factor = float(files.read(matrix.global_scale).reshape(()))
                held.global_scale[0, group : group + matrix.groups] = factor
            check_scales(matrix, scales, factor)
            _place(held.scale[0, tile : tile + len(scales)], scales, matrix)
            tile += len(scales)
        group += matrix.groups


def _cast(held: Quantised, source: Format, parts: Sequence[Matrix], files: Files) -> None:
    """Fill one expert with NVFP4 of its MXFP4, or refuse by name where that is not exact."""
    whole = _empty(source, parts, 1, held.device)
    _copy(whole, parts, files)
    place = first_inexact(whole)
    if place is not None:
        part, row = divmod(place[1], parts[0].rows)
        matrix = parts[part]
        raise refuse(
            matrix.data.file, matrix.stem,
            f"out of nvfp4's range in row {row}, block {place[2]}",
            "scales within 2^17 of the expert's greatest, which cast exactly", "load it as mxfp4",
        )  # fmt: skip
    for into, made in zip(held.tensors, mxfp4_to_nvfp4(whole).tensors, strict=True):
        into.copy_(made)


def _quantise(held: Quantised, parts: Sequence[Matrix], files: Files) -> None:
    """Fill one expert with plain weights rounded to its format, in strips of rows."""
    fmt, device = held.format, held.device
    rows: list[Tensor] = []
    for matrix in parts:
        stored = matrix.codes(files)
        values = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        _place(values, stored, matrix)
        rows += values.chunk(matrix.groups)
    factor = None
    if held.global_scale is not None:
        # One for the expert, so that gate and up can share a kernel's scalar.
        factor = _global_scale(torch.stack([r.abs().amax() for r in rows]).amax(), fmt)
        held.global_scale[0] = factor
        factor = factor[None]
    row = tile = 0
    for values in rows:
        for strip in values.split(STRIP if fmt.block[0] else max(len(values), 1)):
            made = quantise(strip, fmt, global_scale=factor)
            held.data[0, row : row + len(strip)] = made.data
            row += len(strip)
            if made.scale is not None and held.scale is not None:
                held.scale[0, tile : tile + len(made.scale)] = made.scale
                tile += len(made.scale)


def _global_scale(amax: Tensor, fmt: Format) -> Tensor:
    """float32, as the format's own quantiser makes it from that greatest magnitude."""
    assert fmt.rule is not None
    assert fmt.scale is not None
    top = torch.tensor(fmt.rule.top * fmt.scale.max, dtype=torch.float64, device=amax.device)
    whole = torch.where(amax == 0, top, amax.to(torch.float64))
    return rn32(whole / top) if fmt.global_scale == "multiply" else rn32(top / whole)
