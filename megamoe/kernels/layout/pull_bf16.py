"""Weights of the SM90 pull BF16 kernel: 8-row gate/up groups, seen column-major.

Source: FlashInfer 0.7.4,
moe_ep/backends/mega/kernel/sm90/bf16_bf16_bf16_pull_cutedsl/weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.kernels.layout._checks import check_dtype, check_shape
from megamoe.kernels.layout.records import CanonicalExperts
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullBf16Weights:
    """`fc1` bf16 [E, H, 2I] and `fc2` bf16 [E, I, H], both with stride 1 in dimension 1."""

    fc1: torch.Tensor
    fc2: torch.Tensor

    def transformed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `MegaConfig.transformed_weights` takes."""
        return self.fc1, self.fc2


def pack_pull_bf16(experts: CanonicalExperts) -> PullBf16Weights:
    """Return the kernel's weights from bf16 w13 [E, 2I, H] and w2 [E, H, I], I a multiple of 8.

    Exact. w13 is copied, w2 is a view.
    """
    check_bf16(experts)
    return PullBf16Weights(
        fc1=interleave_gate_up(experts.w13, PULL_ROWS).transpose(1, 2),
        fc2=experts.w2.contiguous().transpose(1, 2),
    )


def unpack_pull_bf16(weights: PullBf16Weights) -> CanonicalExperts:
    """Inverse of `pack_pull_bf16`."""
    return CanonicalExperts(
        w13=deinterleave_gate_up(weights.fc1.transpose(1, 2), PULL_ROWS),
        w2=weights.fc2.transpose(1, 2),
    )


def check_bf16(experts: CanonicalExperts) -> None:
    """Refuse experts that are not bf16 [E, 2I, H] and [E, H, I]."""
    check_dtype("w13", experts.w13, torch.bfloat16)
    check_dtype("w2", experts.w2, torch.bfloat16)
    check_expert_shapes(experts)


def check_expert_shapes(experts: CanonicalExperts, *, packing: int = 1) -> None:
    """Refuse w13 and w2 whose shapes are not [E, 2I, H / packing] and [E, H, I / packing]."""
    w13, w2 = experts.w13, experts.w2
    check_shape("w2", w2, (w13.shape[0], w13.shape[2] * packing, w13.shape[1] // 2 // packing))
