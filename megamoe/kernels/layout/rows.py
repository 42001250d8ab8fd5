"""The order of the gate and up rows of w13: all gate rows first, or the two in alternating groups.

The groups in use (FlashInfer 0.7.4): 8 rows for the pull, standalone and SM120 kernels
(megamoe/weights.py, kernel_src/sm90/pull_style_cutedsl_megakernel/src/common/megamoe_constants.py),
32 for push BF16 (kernel_src/sm90/cake_bf16_megamoe/shim/cake_weights.py), 128 for push FP8 with a
fused first epilogue (kernel_src/sm90/push_style_megamoe/shim/weights.py).
"""

from __future__ import annotations

from typing import Final

import torch

from megamoe.errors import bad_input

PULL_ROWS: Final = 8
PUSH_BF16_ROWS: Final = 32
PUSH_FP8_ROWS: Final = 128


def interleave_gate_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return w13, or a plane with one row per row of it, as `rows` gate rows, `rows` up rows, ...

    [..., 2I, C] of any dtype, gate rows first, I a multiple of `rows`, to a contiguous copy of the
    same shape. A scale grid with one row per block is interleaved with `rows=1`.
    """
    half = _half(x, rows)
    return (
        x.reshape(*x.shape[:-2], 2, half // rows, rows, x.shape[-1])
        .transpose(-4, -3)
        .contiguous()
        .view(x.shape)
    )


def deinterleave_gate_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Inverse of `interleave_gate_up`: [..., 2I, C] to a contiguous copy of the same shape."""
    half = _half(x, rows)
    return (
        x.reshape(*x.shape[:-2], half // rows, 2, rows, x.shape[-1])
        .transpose(-4, -3)
        .contiguous()
        .view(x.shape)
    )


def _half(x: torch.Tensor, rows: int) -> int:
    if x.ndim < 2:
        raise bad_input("w13", tuple(x.shape), "has no rows", "pass [..., 2I, C]")
    if x.shape[-2] % (2 * rows):
        raise bad_input(
            "the number of gate and up rows",
            x.shape[-2],
            f"is not a multiple of {2 * rows}",
            "pad intermediate_size",
        )
    return x.shape[-2] // 2
