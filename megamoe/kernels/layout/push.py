"""Weights of the two SM90 push kernels: BF16 in 32-row groups, FP8 as the checkpoint has it.

Source: FlashInfer 0.7.4, moe_ep/kernel_src/sm90/cake_bf16_megamoe/shim/cake_weights.py and
moe_ep/kernel_src/sm90/push_style_megamoe/shim/weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.kernels.layout.fp8_blocks import check_block_fp8
from megamoe.kernels.layout.pull_bf16 import check_bf16
from megamoe.kernels.layout.records import CanonicalExperts
from megamoe.kernels.layout.rows import (
    PUSH_BF16_ROWS,
    PUSH_FP8_ROWS,
    deinterleave_gate_up,
    interleave_gate_up,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushBf16Weights:
    """`w13` bf16 [E, 2I, H] in 32-row gate/up groups and `w2` bf16 [E, H, I], both contiguous."""

    w13: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushFp8Weights:
    """The fields of FlashInfer's `Sm90PushWeights`.

    `w13_fp8` e4m3 [E, 2I, H], `w13_sf` fp32 [E, 2I/128, H/128], `w2_fp8` e4m3 [E, H, I], `w2_sf`
    fp32 [E, H/128, I/128]. `w13_interleaved`: 128 gate rows, 128 up rows, ... (the kernel with
    `fuse_fc1_epilogue`) instead of all gate rows first.
    """

    w13_fp8: torch.Tensor
    w13_sf: torch.Tensor
    w2_fp8: torch.Tensor
    w2_sf: torch.Tensor
    w13_interleaved: bool


def pack_push_bf16(experts: CanonicalExperts) -> PushBf16Weights:
    """Return the kernel's weights from bf16 w13 [E, 2I, H] and w2 [E, H, I], I a multiple of 32.

    Exact. w13 is copied, w2 is not.
    """
    check_bf16(experts)
    w13 = interleave_gate_up(experts.w13, PUSH_BF16_ROWS)
    return PushBf16Weights(w13=w13, w2=experts.w2.contiguous())


def unpack_push_bf16(weights: PushBf16Weights) -> CanonicalExperts:
    """Inverse of `pack_push_bf16`."""
    return CanonicalExperts(w13=deinterleave_gate_up(weights.w13, PUSH_BF16_ROWS), w2=weights.w2)


def pack_push_fp8(experts: CanonicalExperts, *, fuse_fc1_epilogue: bool = False) -> PushFp8Weights:
    """Return the kernel's weights from a block-FP8 checkpoint, every byte kept.

    w13 e4m3 [E, 2I, H] with one scale per 128x128 block ([E, 2I/128, H/128]; fp32, bf16 or E8M0,
    widened exactly), w2 likewise; H and I multiples of 128. Views, except where
    `fuse_fc1_epilogue` asks for interleaved rows.
    """
    w13_sf, w2_sf = check_block_fp8(experts)
    w13 = experts.w13.contiguous()
    if fuse_fc1_epilogue:
        w13, w13_sf = interleave_gate_up(w13, PUSH_FP8_ROWS), interleave_gate_up(w13_sf, 1)
    return PushFp8Weights(
        w13_fp8=w13,
        w13_sf=w13_sf.contiguous(),
        w2_fp8=experts.w2.contiguous(),
        w2_sf=w2_sf.contiguous(),
        w13_interleaved=fuse_fc1_epilogue,
    )


def unpack_push_fp8(weights: PushFp8Weights) -> CanonicalExperts:
    """Inverse of `pack_push_fp8`; scales come back as fp32."""
    w13, w13_sf = weights.w13_fp8, weights.w13_sf
    if weights.w13_interleaved:
        w13, w13_sf = deinterleave_gate_up(w13, PUSH_FP8_ROWS), deinterleave_gate_up(w13_sf, 1)
    return CanonicalExperts(w13=w13, w13_scale=w13_sf, w2=weights.w2_fp8, w2_scale=weights.w2_sf)
