"""A layer's experts as the layout functions take them, and as BF16 where that is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import Unsupported
from megamoe.formats import BF16, E8M0, Quantised, dequantise
from megamoe.kernels.layout import CanonicalExperts
from megamoe.problem import ExpertWeights

PIECE = 1 << 24  # elements held in float64 at once


def canonical(experts: ExpertWeights) -> CanonicalExperts:
    """The same storage under the names and dtypes of a checkpoint: views, no copies."""
    return CanonicalExperts(
        w13=experts.w13.data,
        w2=experts.w2.data,
        w13_scale=_scale(experts.w13),
        w2_scale=_scale(experts.w2),
        w13_global=experts.w13.global_scale,
        w2_global=_one_global(experts.w2),
    )


def _scale(q: Quantised) -> Tensor | None:
    """FP4 scales as bytes; E8M0 scales of FP8 as the torch type that says so."""
    if q.scale is None or q.scale.dtype.itemsize > 1:
        return q.scale
    if q.format.element.bits == 4:
        return q.scale.view(torch.uint8)
    return q.scale.view(torch.float8_e8m0fnu) if q.format.scale is E8M0 else q.scale


def _one_global(q: Quantised) -> Tensor | None:
    return None if q.global_scale is None else q.global_scale[:, 0]


def exact_bf16(experts: ExpertWeights) -> CanonicalExperts:
    """The experts in BF16, every value kept; Unsupported naming the first expert that rounds."""
    return CanonicalExperts(w13=_exact("w13", experts.w13), w2=_exact("w2", experts.w2))


def _exact(name: str, q: Quantised) -> Tensor:
    if q.data.dtype == torch.bfloat16:
        return q.data
    count, rows, columns = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    step = max(1, PIECE // max(1, columns))
    for expert in range(count):
        lost = 0
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            exact = dequantise(q[expert : expert + 1], rows=part)[0]
            narrow = dequantise(q[expert : expert + 1], to=BF16, rows=part)[0]
            same = (narrow.to(torch.float64) == exact) | exact.isnan()
            lost += int((~same).sum())
            out[expert, part] = narrow
        if lost:
            raise Unsupported(
                f"{name} of expert slot {expert}: {lost} of {rows * columns} {q.format} values are "
                "no BF16 numbers, so a BF16 kernel would compute with others; choose a kernel that "
                f"takes {q.format} weights"
            )
    return out
