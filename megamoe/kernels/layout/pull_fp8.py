"""Weights of the SM90 pull FP8 kernel: 8-row gate/up groups, gate and up under one scale.

The kernel scales 128 interleaved rows at a time, 64 gate rows and the same 64 up rows, so a
checkpoint's gate block and up block must agree on a scale before its bytes can be kept. Source:
FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_fp8_bf16_pull_cutedsl/weights.py (there,
FP8 checkpoints are refused: only this 4-tuple reaches the kernel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from megamoe.kernels.layout._checks import check_multiple
from megamoe.kernels.layout.fp8_blocks import (
    FP8_BLOCK,
    check_block_fp8,
    check_tensor_fp8,
    merge_gate_up,
)
from megamoe.kernels.layout.records import CanonicalExperts, Exactness
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layout.scale_planes import to_blocked

_BAND: Final = FP8_BLOCK // 2
_UNIT_E8M0: Final = 127
_UNIT_COLUMNS: Final = 32

Leg = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullFp8Leg:
    """One matrix: `weight` e4m3 [E, K, N] with stride 1 in dimension 1.

    Blockwise: `scale` fp32 [E, N/128, K/128] and no others. Per tensor: `scale` a plane of E8M0
    ones that only fills a descriptor, `activation_scale` fp32 [1], `weight_scale` fp32 [E].
    """

    weight: torch.Tensor
    scale: torch.Tensor
    activation_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullFp8Weights:
    """Both matrices, and what sharing a scale between gate and up changed in the first."""

    fc1: PullFp8Leg
    fc2: PullFp8Leg
    exactness: Exactness

    def transformed(self) -> tuple[Leg, Leg]:
        """Return what `MegaConfig.transformed_weights` takes."""
        legs = (self.fc1, self.fc2)
        first, second = (
            (leg.weight, leg.scale, leg.activation_scale, leg.weight_scale) for leg in legs
        )
        return first, second


def pack_pull_fp8(experts: CanonicalExperts) -> PullFp8Weights:
    """Return blockwise weights from a block-FP8 checkpoint.

    w13 e4m3 [E, 2I, H] with one scale per 128x128 block ([E, 2I/128, H/128]; fp32, bf16 or E8M0),
    w2 likewise; I and H multiples of 128. w2 is kept byte for byte (a view). In w13 each pair of
    gate and up blocks gets the larger of its two scales; `exactness` says which elements that
    rounded.
    """
    w13_scale, w2_scale = check_block_fp8(experts)
    count, hidden, width = experts.w2.shape
    bands, blocks = width // FP8_BLOCK, hidden // FP8_BLOCK
    tiles = experts.w13.reshape(count, 2, bands, FP8_BLOCK, blocks, FP8_BLOCK)
    merged, shared, exactness = merge_gate_up(tiles, w13_scale.reshape(count, 2, bands, blocks))
    return PullFp8Weights(
        fc1=PullFp8Leg(
            weight=interleave_gate_up(merged.view(experts.w13.shape), PULL_ROWS).transpose(1, 2),
            # Two interleaved blocks of 64 + 64 rows in each gate block of 128.
            scale=shared.repeat_interleave(2, dim=1),
        ),
        fc2=PullFp8Leg(weight=experts.w2.contiguous().transpose(1, 2), scale=w2_scale.contiguous()),
        exactness=exactness,
    )


def unpack_pull_fp8(weights: PullFp8Weights) -> CanonicalExperts:
    """Return the experts the kernel computes with, gate rows first.

    The inverse of `pack_pull_fp8` on its image, with one difference: `w13_scale` is fp32
    [E, 2I/64, H/128], one scale for *64* rows, the finest that any blockwise pack can hold.
    """
    count, bands, blocks = weights.fc1.scale.shape
    scale = weights.fc1.scale[:, None].expand(count, 2, bands, blocks)
    return CanonicalExperts(
        w13=deinterleave_gate_up(weights.fc1.weight.transpose(1, 2), PULL_ROWS),
        w13_scale=scale.reshape(count, 2 * bands, blocks),
        w2=weights.fc2.weight.transpose(1, 2),
        w2_scale=weights.fc2.scale,
    )


def pack_pull_fp8_per_tensor(
    experts: CanonicalExperts, *, fc1_activation_scale: float, fc2_activation_scale: float
) -> PullFp8Weights:
    """Return per-tensor weights from FP8 experts with one scale a matrix.

    w13 e4m3 [E, 2I, H], `w13_scale` [E] or [E, 2] (gate and up apart), w2 e4m3 [E, H, I],
    `w2_scale` [E]; I and H multiples of 64. The activation scales are the static ones of the
    calibration, equal on every rank (not checked here). Different gate and up scales are merged as
    in `pack_pull_fp8`.
    """
    w13_scale, w2_scale = check_tensor_fp8(experts)
    count, hidden, width = experts.w2.shape
    check_multiple("intermediate_size", width, _BAND)
    check_multiple("hidden_size", hidden, _BAND)
    whole = experts.w13.reshape(count, 2, 1, width, 1, hidden)
    merged, shared, exactness = merge_gate_up(whole, w13_scale.reshape(count, 2, 1, 1))
    device = experts.w13.device
    return PullFp8Weights(
        fc1=PullFp8Leg(
            weight=interleave_gate_up(merged.view(experts.w13.shape), PULL_ROWS).transpose(1, 2),
            scale=_unit_plane(count, 2 * width, hidden, device),
            activation_scale=_fp32(fc1_activation_scale, device),
            weight_scale=shared.view(count),
        ),
        fc2=PullFp8Leg(
            weight=experts.w2.contiguous().transpose(1, 2),
            scale=_unit_plane(count, hidden, width, device),
            activation_scale=_fp32(fc2_activation_scale, device),
            weight_scale=w2_scale.contiguous(),
        ),
        exactness=exactness,
    )


def unpack_pull_fp8_per_tensor(weights: PullFp8Weights) -> CanonicalExperts:
    """Return the experts the kernel computes with, gate rows first, one scale a matrix ([E])."""
    return CanonicalExperts(
        w13=deinterleave_gate_up(weights.fc1.weight.transpose(1, 2), PULL_ROWS),
        w13_scale=weights.fc1.weight_scale,
        w2=weights.fc2.weight.transpose(1, 2),
        w2_scale=weights.fc2.weight_scale,
    )


def _fp32(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


def _unit_plane(experts: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return E8M0 ones for a [rows, columns] matrix in blocks of 32 columns, [E, bytes]."""
    plane = torch.full(
        (experts, rows, -(-columns // _UNIT_COLUMNS)), _UNIT_E8M0, dtype=torch.uint8, device=device
    )
    return to_blocked(plane).view(torch.float8_e8m0fnu)
