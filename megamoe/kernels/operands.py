"""What enters a kernel besides its layout: experts under a checkpoint's names, activations in codes.

A kernel that takes quantised activations gets them from here, never from its own staging, so that
what it computes with is what the reference judges.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from megamoe.errors import Unsupported
from megamoe.formats import (
    BF16,
    E4M3,
    E8M0,
    FP32,
    FP8_BLOCK128,
    Format,
    Quantised,
    ScaleRule,
    dequantise,
    quantise,
)
from megamoe.kernels.layout import CanonicalExperts
from megamoe.problem import ExpertWeights

PIECE: Final = 1 << 24  # elements held in float64 at once

PULL_MID: Final = Format(
    name="fp8_1x64_reciprocal",
    element=E4M3,
    block=(1, 64),
    scale=FP32,
    rule=ScaleRule(
        kind="amax", top=448.0, quotient="reciprocal", apply="reciprocal", scale_floor=1e-30
    ),
)
"""How the SM90 pull kernels requantise FC2's input: amax times the rounded reciprocal of 448, at
least 1e-30, elements times the scale's rounded reciprocal.
(moe_hopper_fp8/epilogue_fp8.py `_run_fc1_epilogue_blockwise`, epilogue_fp8_swapab.py)"""

FP8_MATRIX: Final = Format(name="fp8_matrix", element=E4M3, scale=FP32)
"""E4M3 under one scale a matrix, gate and up together: as kernels hold what they decode."""

FP8_64X128: Final = Format(name="fp8_64x128", element=E4M3, block=(64, 128), scale=FP32)
"""Gate and up blocks of 64 rows that share scales: what the pull FP8 kernel holds."""


def coded(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """BF16 rows [n, H] as codes [n, H] and scales [n, H / block], by the format's own rule."""
    q = quantise(x, fmt)
    assert q.scale is not None
    return q.data, q.scale


# --- experts --------------------------------------------------------------------------------------


def canonical(experts: ExpertWeights) -> CanonicalExperts:
    """The same storage under the names and dtypes of a checkpoint: views, no copies."""
    return CanonicalExperts(
        w13=experts.w13.data,
        w2=experts.w2.data,
        w13_scale=_scale(experts.w13),
        w2_scale=_scale(experts.w2),
        w13_global=experts.w13.global_scale,
        w2_global=None if experts.w2.global_scale is None else experts.w2.global_scale[:, 0],
    )


def _scale(q: Quantised) -> Tensor | None:
    """FP4 scales as bytes; E8M0 scales of FP8 as the torch type that says so; one a matrix as [E]
    or [E, groups]."""
    scale = q.scale
    if scale is None:
        return None
    if q.format.element.bits == 4:
        return scale.view(torch.uint8)
    if q.format.block == (0, 0):
        return scale[..., 0] if q.row_groups > 1 else scale[:, 0, 0]
    return scale.view(torch.float8_e8m0fnu) if q.format.scale is E8M0 else scale


def block_fp8(found: CanonicalExperts, w13: Format, w2: Format = FP8_BLOCK128) -> ExpertWeights:
    """Block-FP8 experts read back from a pack."""
    return ExpertWeights(
        w13=Quantised(format=w13, data=found.w13, scale=found.w13_scale),
        w2=Quantised(format=w2, data=found.w2, scale=found.w2_scale),
    )


def fp4(found: CanonicalExperts, fmt: Format) -> ExpertWeights:
    """FP4 experts read back from a pack."""
    return ExpertWeights(
        w13=Quantised(format=fmt, data=found.w13, scale=found.w13_scale),
        w2=Quantised(format=fmt, data=found.w2, scale=found.w2_scale),
    )


def matrix_fp8(codes: tuple[Tensor, Tensor], factors: tuple[Tensor, Tensor]) -> ExpertWeights:
    """Experts as E4M3 operands [E, rows, columns] and one factor [E] each, w13 first."""
    w13, w2 = (
        Quantised(format=FP8_MATRIX, data=data, scale=factor[:, None, None])
        for data, factor in zip(codes, factors, strict=True)
    )
    return ExpertWeights(w13=w13, w2=w2)


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
