"""Checks of scales as they are read: a NaN or another convention must not reach a product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.formats import Element, decode

# No model has weights beyond this; a reciprocal taken for a scale gives far more (a tensor whose
# greatest weight is 0.1 has the scale 2.2e-4, and its reciprocal would make 2e6 of the same codes).
GREATEST_WEIGHT = 2.0**15


def check_scales(matrix: Matrix, scales: Tensor, factor: float | None) -> None:
    """scales: the codes as held; factor: the global scale. Refuses by file and tensor."""
    entry, element = matrix.scale, matrix.format.scale
    assert entry is not None
    assert element is not None
    where = "" if matrix.index is None else f" of expert {matrix.index}"
    least, most = _extremes(scales, element)
    if not (least >= 0 and math.isfinite(most)):
        values = decode(scales, element)
        place = (~(values.isfinite() & (values >= 0))).nonzero()[0].tolist()
        raise refuse(
            entry.file, entry.name, f"{float(values[tuple(place)])} at {place}{where}",
            "finite scales of at least 0", "download the shard again, or export it again",
        )  # fmt: skip
    greatest = most * matrix.format.element.max
    if factor is not None:
        assert matrix.global_scale is not None
        entry = matrix.global_scale
        if not (math.isfinite(factor) and factor > 0):
            raise refuse(
                entry.file, entry.name, factor, "a finite number above 0", "export it again"
            )
        multiplies = matrix.format.global_scale == "multiply"
        greatest = greatest * factor if multiplies else greatest / factor
    if greatest > GREATEST_WEIGHT:
        raise refuse(
            entry.file, entry.name, f"large enough for weights of {greatest:.3g}{where}",
            f"scales that keep {matrix.format} weights below {GREATEST_WEIGHT:g}",
            "it may be the reciprocal of what the format asks for: export it the other way",
        )  # fmt: skip


def _extremes(scales: Tensor, element: Element) -> tuple[float, float]:
    """The least and the greatest value, NaN where one is: E8M0's NaN is its greatest code."""
    if not scales.numel():
        return 0.0, 0.0
    ordered = scales.to(torch.float32) if element.dtype.is_floating_point else scales
    least, most = decode(torch.stack(torch.aminmax(ordered)).to(element.dtype), element).tolist()
    return least, most
