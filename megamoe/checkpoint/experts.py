"""This rank's experts, read slice by slice into the stacked tensors of an ExpertWeights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamoe.checkpoint.detect import Matrix, detect, scale_grid
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.layer import Layer
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.scales import check_scales
from megamoe.formats import Format, Quantised
from megamoe.problem import ExpertWeights


def codes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A stored tensor as the codes of a format: the same bytes under the format's dtype.

    Only a per-tensor scale in BF16 becomes float32, which is exact.
    """
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.uint8:
        return tensor.contiguous().view(torch.uint8)
    assert (tensor.dtype, dtype) == (torch.bfloat16, torch.float32), (tensor.dtype, dtype)
    return tensor.to(torch.float32)


def load_experts(
    layer: Layer,
    slots: Sequence[int],
    hidden: int,
    intermediate: int,
    device: torch.device,
) -> ExpertWeights:
    """One expert per slot, in order; a slot of -1 is all zeros."""
    kinds = layer.family.projections
    # A rank without experts still needs to know their format.
    ids = sorted({e for e in slots if e >= 0}) or [0]
    found = {
        (e, p): detect(layer.files, layer.config, f"{layer.experts}{e}.{p}")
        for e in ids
        for p in (kinds.gate, kinds.up, kinds.down)
    }
    for (_, projection), matrix in found.items():
        shape = (hidden, intermediate) if projection == kinds.down else (intermediate, hidden)
        check_shape(matrix, shape)
    w13 = {e: (found[e, kinds.gate], found[e, kinds.up]) for e in ids}
    w2 = {e: (found[e, kinds.down],) for e in ids}
    return ExpertWeights(
        w13=stack(layer.files, w13, slots, device), w2=stack(layer.files, w2, slots, device)
    )


def check_shape(matrix: Matrix, shape: tuple[int, int]) -> None:
    if (matrix.rows, matrix.columns) != shape:
        raise refuse(
            matrix.data.file, matrix.data.name, f"{matrix.data} ({matrix.format})",
            f"{list(shape)} values, as config.json says", "take both from the same repository",
        )  # fmt: skip


def check_one_format(matrices: Sequence[Matrix]) -> Format:
    """The format of all; refuses the first that differs, by name."""
    first = matrices[0]
    for matrix in matrices[1:]:
        if matrix.format != first.format:
            raise refuse(
                matrix.data.file, matrix.stem, f"in {matrix.format}",
                f"{first.format}, as {first.stem} is",
                "export the layer in one format: megamoe does not round weights on loading",
            )  # fmt: skip
    return first.format


def stack(
    files: Files,
    parts: Mapping[int, tuple[Matrix, ...]],
    slots: Sequence[int],
    device: torch.device,
) -> Quantised:
    """Matrices below each other within an expert, experts along the first dimension.

    Every part keeps its own scales: they are the row groups of the result. Each tensor is read once
    and copied straight to its place.
    """
    every = [m for expert in parts.values() for m in expert]
    fmt = check_one_format(every)
    groups, rows, columns = len(next(iter(parts.values()))), every[0].rows, every[0].columns
    count, packed = len(slots), fmt.element.packed
    data = torch.zeros(
        count, groups * rows, columns // packed, dtype=fmt.element.dtype, device=device
    )
    scale = factor = None
    tiles, across = scale_grid(fmt, rows, columns)
    if fmt.scale is not None:
        scale = torch.zeros(count, groups * tiles, across, dtype=fmt.scale.dtype, device=device)
    if fmt.global_scale != "none":
        factor = torch.ones(count, groups, dtype=torch.float32, device=device)
    first: dict[int, int] = {}
    for slot, expert in enumerate(slots):
        if expert < 0:
            continue
        if expert in first:
            for tensor in (data, scale, factor):
                if tensor is not None:
                    tensor[slot] = tensor[first[expert]]
            continue
        first[expert] = slot
        for group, matrix in enumerate(parts[expert]):
            data[slot, group * rows : (group + 1) * rows] = codes(
                files.read(matrix.data), data.dtype
            )
            if scale is None or matrix.scale is None:
                continue
            own = codes(files.read(matrix.scale), scale.dtype).reshape(tiles, across)
            one = None
            if factor is not None and matrix.global_scale is not None:
                one = files.read(matrix.global_scale).reshape(())
                factor[slot, group] = one
            check_scales(matrix, own, one)
            scale[slot, group * tiles : (group + 1) * tiles] = own
    plain = fmt.scale is None
    return Quantised(
        format=fmt, data=data, scale=scale, global_scale=factor, row_groups=1 if plain else groups
    )
