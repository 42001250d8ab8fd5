"""Weights of the SM90 pull MXFP4 kernel (`sm90_fp8_mxfp4_bf16_pull_cutedsl`).

Per matrix: gate/up rows in groups of 8 (w13 only), every expert folded into its exponent window,
the bytes rearranged into matrix fragments, the block offsets folded, and one fp32 factor per
expert. Source: FlashInfer 0.7.4,
moe_ep/backends/mega/kernel/sm90/fp8_mxfp4_bf16_pull_cutedsl/weights.py and fused_moe/prepare.py.
The kernel multiplies with E4M3(code * 2**(offset - 6)), which is exact, so all that is lost is
lost in the window (`window_exactness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_multiple
from megamoe.kernels.layout.fragment import from_fragments, to_fragments
from megamoe.kernels.layout.mxfp4_window import FoldedMxfp4, fold_window, unfold_window
from megamoe.kernels.layout.pull_bf16 import check_expert_shapes
from megamoe.kernels.layout.records import CanonicalExperts
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layout.scale_planes import fold_k32, unfold_k32

# The kernel's E4M3 code is 2**5 below code * 2**(offset - 1); E8M0's bias is 127.
_DECODE_BIAS: Final = 127 - 5
_FP32_BIAS: Final = 127
# How many experts are rearranged at a time: bounds the temporaries, changes nothing.
_EXPERTS_AT_ONCE: Final = 8

Leg = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullFp4Leg:
    """One matrix of the pull MXFP4 or NVFP4 kernel.

    `weight` uint8 [E, K/2, N] with stride 1 in dimension 1; `scales` uint8 [E, N/64, K/128, 16,
    16] (MXFP4 offsets) or [E, N/64, K/128, 32, 16] (NVFP4 E4M3 bytes); `unit` fp32 [1], a
    placeholder of one; `decode` fp32 [E], multiplied into the expert's accumulators.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    unit: torch.Tensor
    decode: torch.Tensor

    def slots(self) -> Leg:
        """Return the four launch slots in the kernel's order."""
        return self.weight, self.scales, self.unit, self.decode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullMxfp4Weights:
    """Both matrices of the pull MXFP4 kernel."""

    fc1: PullFp4Leg
    fc2: PullFp4Leg

    def transformed(self) -> tuple[Leg, Leg]:
        """Return what `MegaConfig.transformed_weights` takes."""
        return self.fc1.slots(), self.fc2.slots()


def pack_pull_mxfp4(experts: CanonicalExperts) -> PullMxfp4Weights:
    """Return the kernel's weights from an MXFP4 checkpoint.

    w13 uint8 [E, 2I, H/2] with E8M0 bytes uint8 [E, 2I, H/32], w2 uint8 [E, H, I/2] with
    [E, H, I/32]; H and I multiples of 128. Blocks below an expert's window are rounded: see
    `window_exactness`, and `neutral_zero_blocks` for scales of blocks that are zero.
    """
    w13_scale, w2_scale = check_fp4_experts(experts)
    return PullMxfp4Weights(
        fc1=_pack(experts.w13, w13_scale, gate_up=True),
        fc2=_pack(experts.w2, w2_scale, gate_up=False),
    )


def unpack_pull_mxfp4(weights: PullMxfp4Weights) -> CanonicalExperts:
    """Return the canonical bytes that hold exactly what the kernel computes with.

    The inverse of `pack_pull_mxfp4` on its image: the original bytes wherever the window rounded
    nothing, save that -0 was written as +0.
    """
    w13, w13_scale = _unpack(weights.fc1, gate_up=True)
    w2, w2_scale = _unpack(weights.fc2, gate_up=False)
    return CanonicalExperts(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)


def check_fp4_experts(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Refuse FP4 experts without scales or unaligned; return the scales. Dtypes: by the caller."""
    if experts.w13_scale is None or experts.w2_scale is None:
        raise bad_input("FP4 experts", "", "carry no scales", "pass w13_scale and w2_scale")
    check_expert_shapes(experts, packing=2)
    check_multiple("hidden_size", experts.w13.shape[2] * 2, 128)
    check_multiple("intermediate_size", experts.w2.shape[2] * 2, 128)
    return experts.w13_scale, experts.w2_scale


def allocate_leg(
    payload: torch.Tensor, scale_lines: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty storage of a leg: bytes [E, N, K/2], scale tiles, the unit, decode [E]."""
    experts, rows, row_bytes = payload.shape
    device = payload.device
    tiles = (experts, rows // 64, row_bytes // 64, scale_lines, 16)
    return (
        torch.empty_like(payload, memory_format=torch.contiguous_format),
        torch.empty(tiles, dtype=torch.uint8, device=device),
        torch.ones(1, dtype=torch.float32, device=device),
        torch.empty(experts, dtype=torch.float32, device=device),
    )


def chunks(experts: int) -> list[slice]:
    """Return the experts in runs that are rearranged together."""
    return [slice(i, i + _EXPERTS_AT_ONCE) for i in range(0, experts, _EXPERTS_AT_ONCE)]


def _pack(payload: torch.Tensor, scales: torch.Tensor, *, gate_up: bool) -> PullFp4Leg:
    weight, tiles, unit, decode = allocate_leg(payload, 16)
    for part in chunks(payload.shape[0]):
        codes, bytes_ = payload[part], scales[part]
        if gate_up:
            codes, bytes_ = (interleave_gate_up(x, PULL_ROWS) for x in (codes, bytes_))
        folded = fold_window(codes, bytes_)
        weight[part] = to_fragments(folded.payload)
        tiles[part] = fold_k32(folded.offset)
        decode[part] = decode_factor(folded.floor_byte)
    return PullFp4Leg(weight=weight.transpose(1, 2), scales=tiles, unit=unit, decode=decode)


def _unpack(leg: PullFp4Leg, *, gate_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    folded = FoldedMxfp4(
        payload=from_fragments(leg.weight.transpose(1, 2)),
        offset=unfold_k32(leg.scales),
        floor_byte=floor_byte(leg.decode),
    )
    payload, scales = unfold_window(folded)
    if gate_up:
        payload, scales = (deinterleave_gate_up(x, PULL_ROWS) for x in (payload, scales))
    return payload, scales


def decode_factor(floor: torch.Tensor) -> torch.Tensor:
    """Return 2**(floor - 122) as fp32, by its exponent bits: what scales an expert's accumulators.

    `floor` is the E8M0 byte of the window's floor, uint8 [E]; above 249 it leaves fp32, `BadInput`.
    """
    exponent = floor.to(torch.int32) - _DECODE_BIAS + _FP32_BIAS
    if floor.numel() and int(exponent.max()) > 254:
        raise bad_input(
            "an E8M0 scale byte", int(floor.max()), "is above 249", "requantise the checkpoint"
        )
    return (exponent << 23).view(torch.float32)


def floor_byte(decode: torch.Tensor) -> torch.Tensor:
    """Inverse of `decode_factor`: fp32 [E], powers of two, to uint8 [E]."""
    exponent = decode.contiguous().view(torch.int32) >> 23
    return (exponent - _FP32_BIAS + _DECODE_BIAS).to(torch.uint8)
