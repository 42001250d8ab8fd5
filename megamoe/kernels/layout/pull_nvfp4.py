"""Weights of the SM90 pull NVFP4 kernel (`sm90_fp8_nvfp4_bf16_pull_cutedsl`).

Bytes only move: columns into the kernel's order, gate and up rows into the same order and then into
groups of 8, FP4 into matrix fragments, E4M3 scales into folded tiles. The kernel multiplies with
RN_E4M3(code * scale / 8) and puts 8 * global scale on the accumulators, so exactness is a property
of the values (`pull_nvfp4_exactness`), not of this layout. Source: FlashInfer 0.7.4,
moe_ep/backends/mega/kernel/sm90/fp8_nvfp4_bf16_pull_cutedsl/weights.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.kernels.layout._checks import check_dtype, check_shape
from megamoe.kernels.layout.e4m3 import fp4_product_errors, fp4_products
from megamoe.kernels.layout.fragment import from_fragments, to_fragments
from megamoe.kernels.layout.kperm import (
    permute_columns,
    permute_payload,
    swap_scale_pairs,
    unpermute_columns,
    unpermute_payload,
)
from megamoe.kernels.layout.nibbles import unpack_codes
from megamoe.kernels.layout.nvfp4_balance import (
    NVFP4_BLOCK,
    check_e4m3_scales,
    check_global_scale,
)
from megamoe.kernels.layout.pull_mxfp4 import (
    Leg,
    PullFp4Leg,
    allocate_leg,
    check_fp4_experts,
    chunks,
)
from megamoe.kernels.layout.records import CanonicalExperts, Exactness, fp4_exactness
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layout.scale_planes import fold_k16, unfold_k16

NVFP4_KPERM: Final = 64
"""FlashInfer's default; 0 and 32 are the others."""

_SHIFT: Final = -3
_DECODE: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullNvfp4Weights:
    """Both matrices of the pull NVFP4 kernel, and the column order they are in."""

    fc1: PullFp4Leg
    fc2: PullFp4Leg
    kperm: int

    def legs(self) -> tuple[Leg, Leg]:
        """Return what FlashInfer's `TransformedMegaWeights` takes, besides `nvfp4_kperm`."""
        return self.fc1.slots(), self.fc2.slots()


def pack_pull_nvfp4(experts: CanonicalExperts, *, kperm: int = NVFP4_KPERM) -> PullNvfp4Weights:
    """Return the kernel's weights from an NVFP4 checkpoint, losing nothing.

    w13 uint8 [E, 2I, H/2] with E4M3 bytes uint8 [E, 2I, H/16] and `w13_global` fp32 [E] (shared by
    gate and up: see `balance_nvfp4`), w2 uint8 [E, H, I/2] with [E, H, I/16] and `w2_global`;
    global scales of None are 1. H and I multiples of 128.
    """
    w13_scale, w2_scale = check_fp4_experts(experts)
    return PullNvfp4Weights(
        fc1=_pack("w13", experts.w13, w13_scale, experts.w13_global, kperm, gate_up=True),
        fc2=_pack("w2", experts.w2, w2_scale, experts.w2_global, kperm, gate_up=False),
        kperm=kperm,
    )


def unpack_pull_nvfp4(weights: PullNvfp4Weights) -> CanonicalExperts:
    """Inverse of `pack_pull_nvfp4`: every byte."""
    w13, w13_scale, w13_global = _unpack(weights.fc1, weights.kperm, gate_up=True)
    w2, w2_scale, w2_global = _unpack(weights.fc2, weights.kperm, gate_up=False)
    return CanonicalExperts(
        w13=w13,
        w13_scale=w13_scale,
        w13_global=w13_global,
        w2=w2,
        w2_scale=w2_scale,
        w2_global=w2_global,
    )


def pull_nvfp4_exactness(payload: torch.Tensor, scales: torch.Tensor) -> Exactness:
    """Report the elements whose code * scale / 8 is no E4M3 number; counts [E, N, K/16].

    `payload` uint8 [E, N, K/2], `scales` E4M3 bytes [E, N, K/16]. A scale that is a power of two is
    exact from 2**-5 up; of the others only significands 1.25 and 1.5 survive codes 1.5, 3 and 6.
    """
    check_e4m3_scales("block scales", scales)
    return fp4_exactness(payload, scales, fp4_product_errors(_SHIFT), NVFP4_BLOCK)


def pull_nvfp4_operand(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what the kernel multiplies with, RN_E4M3(code * scale / 8), in logical order.

    `payload` uint8 [..., K/2], `scales` E4M3 bytes [..., K/16], to float8_e4m3fn [..., K].
    """
    return nvfp4_operand(payload, scales, _SHIFT)


def nvfp4_operand(payload: torch.Tensor, scales: torch.Tensor, shift: int) -> torch.Tensor:
    """Return RN_E4M3(code * scale * 2**shift) as float8_e4m3fn [..., K]."""
    check_e4m3_scales("block scales", scales)
    codes = unpack_codes(payload)
    rows = scales.long().repeat_interleave(NVFP4_BLOCK, dim=-1)
    magnitude = fp4_products(shift).to(payload.device)[rows, (codes & 7).long()]
    return (magnitude | ((codes & 8) << 4)).view(torch.float8_e4m3fn)


def _pack(
    name: str,
    payload: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    kperm: int,
    *,
    gate_up: bool,
) -> PullFp4Leg:
    check_dtype(name, payload, torch.uint8)
    check_e4m3_scales(f"{name}_scale", scales)
    experts, rows, row_bytes = payload.shape
    check_shape(f"{name}_scale", scales, (experts, rows, row_bytes * 2 // NVFP4_BLOCK))
    weight, tiles, unit, decode = allocate_leg(payload, 32)
    for part in chunks(experts):
        codes, bytes_ = permute_payload(payload[part], kperm), scales[part]
        if gate_up:
            codes, bytes_ = (
                interleave_gate_up(_halves(x, kperm, permute_columns), PULL_ROWS)
                for x in (codes, bytes_)
            )
        if kperm:
            bytes_ = swap_scale_pairs(bytes_)
        weight[part] = to_fragments(codes)
        tiles[part] = fold_k16(bytes_)
    if global_scale is None:
        global_scale = torch.ones(experts, dtype=torch.float32, device=payload.device)
    check_dtype(f"{name}_global", global_scale, torch.float32)
    check_shape(f"{name}_global", global_scale, (experts,))
    decode.copy_(global_scale * _DECODE)
    check_global_scale(f"8 * {name}_global", decode)
    return PullFp4Leg(weight=weight.transpose(1, 2), scales=tiles, unit=unit, decode=decode)


def _unpack(
    leg: PullFp4Leg, kperm: int, *, gate_up: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    payload, scales = from_fragments(leg.weight.transpose(1, 2)), unfold_k16(leg.scales)
    if kperm:
        scales = swap_scale_pairs(scales)
    if gate_up:
        payload, scales = (
            _halves(deinterleave_gate_up(x, PULL_ROWS), kperm, unpermute_columns)
            for x in (payload, scales)
        )
    # A power of two: exact, as the multiplication was.
    return unpermute_payload(payload, kperm), scales, leg.decode * (1 / _DECODE)


def _halves(
    x: torch.Tensor, kperm: int, permute: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> torch.Tensor:
    """Permute the gate rows among themselves and the up rows among themselves."""
    split = x.reshape(x.shape[0], 2, x.shape[1] // 2, x.shape[2])
    return permute(split, kperm, 2).view(x.shape)
