"""Experts as checkpoints name them, and the formats in which kernels hold what lies between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from megamoe.errors import Unsupported
from megamoe.formats import (
    BF16,
    E4M3,
    E8M0,
    FP8_BLOCK128,
    FP32,
    Format,
    Quantised,
    ScaleRule,
    dequantise,
)
from megamoe.kernels.layout import CanonicalExperts, balance_nvfp4, neutral_zero_blocks
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

STANDALONE_MID: Final = Format(
    name="fp8_1x128_up",
    element=E4M3,
    block=(1, 128),
    scale=FP32,
    rule=ScaleRule(kind="power_of_two_up", top=448.0, quotient="reciprocal"),
)
"""How the SM90 standalone kernels requantise FC2's input: the power of two at or above amax times
the rounded reciprocal of 448. (data/include/flashinfer/megamoe/detail/common.cuh
`get_e4m3_sf_and_sf_inv`)"""

SM120_MID: Final = Format(
    name="mxfp8_reciprocal",
    element=E4M3,
    block=(1, 32),
    scale=E8M0,
    rule=ScaleRule(kind="power_of_two_up", top=448.0, quotient="reciprocal"),
)
"""How the SM120 kernels requantise FC2's input: the power of two at or above amax times the rounded
reciprocal of 448. (kernel_fc12.py of moe_sm120_mxfp4mxfp8_split and of moe_sm120_mxfp8_swapab,
cake_sm120_megamoe_kernel_part008.cuh)"""

FP8_MATRIX: Final = Format(name="fp8_matrix", element=E4M3, scale=FP32)
"""E4M3 under one scale a matrix, gate and up together: as kernels hold what they decode."""

FP8_64X128: Final = Format(name="fp8_64x128", element=E4M3, block=(64, 128), scale=FP32)
"""Gate and up blocks of 64 rows that share scales: what the pull FP8 kernel holds."""


# --- experts --------------------------------------------------------------------------------------


def canonical(experts: ExpertWeights) -> CanonicalExperts:
    """The same storage under the names and dtypes of a checkpoint: views, no copies."""
    return CanonicalExperts(
        w13=experts.w13.data,
        w2=experts.w2.data,
        w13_scale=_scale(experts.w13),
        w2_scale=_scale(experts.w2),
        w13_global=_global(experts.w13),
        w2_global=_global(experts.w2),
    )


def _global(q: Quantised) -> Tensor | None:
    """Global scales [E, groups], or [E] of one group; 1 for experts of zeros, where it is free: the
    padding of a rank that holds none has 0, which kernels refuse."""
    if q.global_scale is None:
        return None
    zero = (q.data == 0).flatten(1).all(1)
    scale = torch.where(zero[:, None], 1.0, q.global_scale)
    return scale if q.row_groups > 1 else scale[:, 0]


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


def neutral(experts: CanonicalExperts) -> CanonicalExperts:
    """The same MXFP4 values; the scales of all-zero blocks do not widen an expert's range."""
    return dataclasses.replace(
        experts,
        w13_scale=neutral_zero_blocks(experts.w13, _given(experts.w13_scale)),
        w2_scale=neutral_zero_blocks(experts.w2, _given(experts.w2_scale)),
    )


def balanced(experts: CanonicalExperts, top: float) -> CanonicalExperts:
    """NVFP4 with one global scale a matrix, gate and up together; block scales up to ``top``."""
    w13, w2 = (
        balance_nvfp4(payload, _given(scale), _given(shared), top=top)
        for payload, scale, shared in (
            (experts.w13, experts.w13_scale, experts.w13_global),
            (experts.w2, experts.w2_scale, experts.w2_global),
        )
    )
    return CanonicalExperts(
        w13=w13.payload,
        w13_scale=w13.scales,
        w13_global=w13.global_scale,
        w2=w2.payload,
        w2_scale=w2.scales,
        w2_global=w2.global_scale,
    )


def nvfp4_operands(
    experts: CanonicalExperts, operand: Callable[[Tensor, Tensor], Tensor], gain: float
) -> ExpertWeights:
    """NVFP4 experts as a kernel multiplies with them: ``operand`` codes under gain * global."""
    return matrix_fp8(
        (
            operand(experts.w13, _given(experts.w13_scale)),
            operand(experts.w2, _given(experts.w2_scale)),
        ),
        (gain * _given(experts.w13_global), gain * _given(experts.w2_global)),
    )


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def matrix_fp8(
    codes: tuple[Tensor, Tensor], factors: tuple[Tensor | None, Tensor | None]
) -> ExpertWeights:
    """Experts as E4M3 operands [E, rows, columns] and one factor [E] each, w13 first."""
    w13, w2 = (
        Quantised(format=FP8_MATRIX, data=data, scale=_given(factor)[:, None, None])
        for data, factor in zip(codes, factors, strict=True)
    )
    return ExpertWeights(w13=w13, w2=w2)


def exact_bf16(experts: ExpertWeights) -> CanonicalExperts:
    """The experts in BF16, every value kept; Unsupported naming the first expert that rounds."""
    return CanonicalExperts(
        w13=_bf16("w13", experts.w13, exact=True), w2=_bf16("w2", experts.w2, exact=True)
    )


def rounded_bf16(experts: ExpertWeights) -> CanonicalExperts:
    """The experts in BF16, each value rounded once where it is no BF16 number."""
    return CanonicalExperts(
        w13=_bf16("w13", experts.w13, exact=False), w2=_bf16("w2", experts.w2, exact=False)
    )


def _bf16(name: str, q: Quantised, *, exact: bool) -> Tensor:
    if q.data.dtype == torch.bfloat16:
        return q.data
    count, rows, columns = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    step = max(1, PIECE // max(1, columns))
    for expert in range(count):
        lost = 0
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            narrow = dequantise(q[expert : expert + 1], to=BF16, rows=part)[0]
            if exact:
                values = dequantise(q[expert : expert + 1], rows=part)[0]
                same = (narrow.to(torch.float64) == values) | values.isnan()
                lost += int((~same).sum())
            out[expert, part] = narrow
        if lost:
            raise Unsupported(
                f"{name} of expert slot {expert}: {lost} of {rows * columns} {q.format} values are "
                "no BF16 numbers, so a BF16 kernel would compute with others; choose a kernel that "
                f"takes {q.format} weights"
            )
    return out
