"""Checks of scales as they are read: a NaN or another convention must not reach a product."""

from __future__ import annotations

import math

from torch import Tensor

from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.formats import decode

# No model has weights beyond this; a reciprocal taken for a scale gives far more (a tensor whose
# greatest weight is 0.1 has the scale 2.2e-4, and its reciprocal would make 2e6 of the same codes).
GREATEST_WEIGHT = 2.0**15


def check_scales(matrix: Matrix, scales: Tensor, factor: float | None) -> None:
    """scales: the codes as held; factor: the global scale. Refuses by file and tensor."""
    entry, element = matrix.scale, matrix.format.scale
    assert entry is not None
    assert element is not None
    where = "" if matrix.index is None else f" of expert {matrix.index}"
    values = decode(scales, element)
    bad = ~(values.isfinite() & (values >= 0))
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise refuse(
            entry.file, entry.name, f"{float(values[tuple(place)])} at {place}{where}",
            "finite scales of at least 0", "download the shard again, or export it again",
        )  # fmt: skip
    greatest = float(values.max()) * matrix.format.element.max if values.numel() else 0.0
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
