"""The two nouns of this package: experts as a checkpoint stores them, and what a layout loses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.kernels.layout.nibbles import unpack_codes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanonicalExperts:
    """One rank's routed experts in logical order, as checkpoints store them.

    `w13` is [E, 2I, H] with all gate rows before all up rows, `w2` is [E, H, I]; FP4 data is uint8
    with two codes a byte, the even column in the low nibble, so its last dimension is halved.
    Scales and the fp32 global scales of NVFP4 are None where the format has none; `w13_global` is
    [E], or [E, 2] where gate and up have their own, which only `balance_nvfp4` and the packs built
    on it take. Which format the bytes are in is the caller's knowledge: the function that takes the
    record names it.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_global: torch.Tensor | None = None
    w2_global: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exactness:
    """Which blocks of a weight the kernel computes with another value than the checkpoint's.

    `counts` is int64, one entry per scale block: how many of its elements change. `elements` counts
    all elements, `worst` is the largest |changed - true| / |true| among them (1.0: flushed to zero,
    inf: overflowed).
    """

    counts: torch.Tensor
    elements: int
    worst: float

    @property
    def inexact(self) -> int:
        """How many elements change."""
        return int(self.counts.sum())

    @property
    def exact(self) -> bool:
        """Whether the kernel computes with the checkpoint's values, every one."""
        return self.inexact == 0


def fp4_exactness(
    payload: torch.Tensor, rows: torch.Tensor, errors: torch.Tensor, block: int
) -> Exactness:
    """Look up the relative error of every FP4 element in a table by block and by magnitude.

    `payload` is uint8 [E, N, K/2], `rows` integer [E, N, K/block] (the row of `errors` that holds
    for the block), `errors` fp64 [R, 8] by magnitude code. One expert at a time, to bound the
    temporaries.
    """
    table = errors.to(payload.device)
    fallible = (table != 0).any(-1)
    counts = torch.zeros(rows.shape, dtype=torch.int64, device=payload.device)
    worst = 0.0
    for expert in range(payload.shape[0]):
        row = rows[expert].long()
        which = fallible[row]
        if not bool(which.any()):
            continue
        bytes_ = payload[expert].reshape(*row.shape, block // 2)[which]
        error = table.flatten()[row[which].unsqueeze(-1) * 8 + (unpack_codes(bytes_) & 7)]
        counts[expert][which] = (error != 0).sum(-1)
        worst = max(worst, float(error.abs().max()))
    return Exactness(counts=counts, elements=payload.numel() * 2, worst=worst)
