"""Checks of scales as they are read: a NaN or another convention must not reach a product."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.checkpoint.detect import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.formats import decode

# No model has weights beyond this; a reciprocal taken for a scale gives far more (a tensor whose
# greatest weight is 0.1 has the scale 2.2e-4, and its reciprocal would make 2e6 of the same codes).
GREATEST_WEIGHT = 2.0**15


def check_scales(matrix: Matrix, scale: Tensor, factor: Tensor | None) -> None:
    """scale: the codes as held; factor: the global scale. Refuses by file and tensor."""
    entry, element = matrix.scale, matrix.format.scale
    assert entry is not None
    assert element is not None
    values = decode(scale, element)
    if values.numel() and not bool(values.isfinite().all()):
        place = values.isfinite().logical_not().nonzero()[0].tolist()
        raise refuse(
            entry.file, entry.name, f"NaN or infinite at {place}", "finite scales",
            "download the shard again, or export the checkpoint again",
        )  # fmt: skip
    if values.numel() and bool((values < 0).any()):
        place = (values < 0).nonzero()[0].tolist()
        raise refuse(
            entry.file, entry.name, f"negative at {place}", "scales of at least 0",
            "export the checkpoint again",
        )  # fmt: skip
    greatest = float(values.max()) * matrix.format.element.max if values.numel() else 0.0
    if factor is not None:
        assert matrix.global_scale is not None
        entry = matrix.global_scale
        one = float(factor)
        if not (torch.isfinite(factor) and one > 0):
            raise refuse(entry.file, entry.name, one, "a finite number above 0", "export it again")
        multiplies = matrix.format.global_scale == "multiply"
        greatest = greatest * one if multiplies else greatest / one
    if greatest > GREATEST_WEIGHT:
        raise refuse(
            entry.file, entry.name, f"large enough for weights of {greatest:.3g}",
            f"scales that keep {matrix.format} weights below {GREATEST_WEIGHT:g}",
            "it may be the reciprocal of what the format asks for: export it the other way",
        )  # fmt: skip
