"""MXFP4 experts in the exponent window of the SM90 kernels: 12 powers of two for a whole expert.

The kernels turn an FP4 code and its block's scale into one E4M3 code, whose normal exponents hold
FP4 times 12 consecutive powers of two. What all blocks of an expert share goes into an fp32
factor; blocks more than `WINDOW` binades below the expert's largest scale are raised to the
window's floor and their codes divided accordingly, nearest, ties away from zero. Source:
FlashInfer 0.7.4, fused_moe/prepare.py, preprocess_moe_weights_for_sm90_mixed_gemm_humming.

One difference: FlashInfer's table of divided codes is wrong for blocks raised by 128 binades or
more (its power of two wraps around: zeros raised by 128 become codes of magnitude 6); ours holds
zeros there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_multiple, check_shape
from megamoe.kernels.layout.nibbles import pack_codes, unpack_codes
from megamoe.kernels.layout.records import Exactness, fp4_exactness

MXFP4_BLOCK: Final = 32
WINDOW: Final = 11

_BYTES: Final = MXFP4_BLOCK // 2
# Twice the value of each magnitude code.
_HALVES: Final = (0, 1, 2, 3, 4, 6, 8, 12)
# Raised by five binades or more, every code is zero.
_FLUSHED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedMxfp4:
    """One matrix of MXFP4 experts inside the window; value = code * 2**(offset - 1) * floor.

    `payload` uint8 [E, N, K/2], `offset` uint8 [E, N, K/32] in 1 .. WINDOW + 1, `floor_byte` uint8
    [E]: the E8M0 byte of the factor that the expert's blocks share.
    """

    payload: torch.Tensor
    offset: torch.Tensor
    floor_byte: torch.Tensor


def fold_window(payload: torch.Tensor, scales: torch.Tensor) -> FoldedMxfp4:
    """Bring MXFP4 experts into the window.

    `payload` uint8 [E, N, K/2], `scales` E8M0 bytes uint8 [E, N, K/32], K a multiple of 32. Codes
    of -0 become +0. `window_exactness` tells what was rounded. Reads device memory (which blocks
    are below the window), so load time only; a NaN scale is `BadInput`.
    """
    raised, offset, floor = _raised(payload, scales)
    low, high = (payload & 0x0F) == 0x08, (payload & 0xF0) == 0x80
    folded = payload - (low.to(torch.uint8) * 0x08) - (high.to(torch.uint8) * 0x80)
    below = raised > 0
    if payload.numel() and bool(below.any()):
        blocks = folded.view(*raised.shape, _BYTES)
        index = raised[below].clamp(max=_FLUSHED).long()[:, None] * 256 + blocks[below].long()
        blocks[below] = _divided_bytes().to(payload.device)[index]
    return FoldedMxfp4(payload=folded, offset=offset, floor_byte=floor)


def unfold_window(folded: FoldedMxfp4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the canonical payload and E8M0 scales with exactly the values that `folded` holds.

    The inverse of `fold_window` on its image: where nothing was rounded, the values of the original
    (its bytes too, save for -0).
    """
    scales = folded.floor_byte.view(-1, 1, 1) + (folded.offset - 1)
    return folded.payload, scales


def window_exactness(payload: torch.Tensor, scales: torch.Tensor) -> Exactness:
    """Report the elements that `fold_window` of the same tensors changes; counts [E, N, K/32]."""
    raised, _, _ = _raised(payload, scales)
    return fp4_exactness(payload, raised.clamp(max=_FLUSHED), _divided_errors(), MXFP4_BLOCK)


def neutral_zero_blocks(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `scales` with those of all-zero blocks replaced by the expert's largest other scale.

    No value changes, but a scale that scales nothing no longer widens the expert's range: some
    quantisers give zero blocks the scale 1.0, far above the others. Shapes as `fold_window`.
    """
    _check(payload, scales)
    if payload.numel() == 0:
        return scales
    magnitudes = payload.reshape(*scales.shape, _BYTES) & 0x77
    zero = (magnitudes == 0).all(-1)
    largest = scales.masked_fill(zero, 0).flatten(1).amax(1)
    return torch.where(zero, largest.view(-1, 1, 1), scales)


def _check(payload: torch.Tensor, scales: torch.Tensor) -> None:
    check_dtype("payload", payload, torch.uint8)
    check_dtype("E8M0 scales", scales, torch.uint8)
    check_multiple("the number of FP4 columns", payload.shape[-1] * 2, MXFP4_BLOCK)
    check_shape("E8M0 scales", scales, (*payload.shape[:-1], payload.shape[-1] // _BYTES))


def _raised(
    payload: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how many binades each block is raised, its offset, and each expert's floor."""
    _check(payload, scales)
    if scales.numel() == 0:
        floor = torch.full((scales.shape[0],), 127, dtype=torch.uint8, device=scales.device)
        return torch.zeros_like(scales), torch.ones_like(scales), floor
    flat = scales.flatten(1)
    largest = flat.amax(1)
    if bool((largest == 255).any()):
        expert = int((largest == 255).nonzero()[0])
        raise bad_input("an E8M0 scale of expert", expert, "is NaN", "requantise the checkpoint")
    floor = torch.maximum(flat.amin(1), largest - largest.clamp(max=WINDOW))
    clamped = torch.maximum(scales, floor.view(-1, 1, 1))
    return clamped - scales, clamped - floor.view(-1, 1, 1) + 1, floor


@functools.cache
def _divided_codes() -> torch.Tensor:
    """Return code / 2**raised as a code: uint8 [_FLUSHED + 1, 16]; ties away from zero."""
    table = torch.zeros(_FLUSHED + 1, 16, dtype=torch.uint8, device="cpu")
    for raised in range(_FLUSHED + 1):
        for code, halves in enumerate(_HALVES):
            distance = [abs((h << raised) - halves) for h in _HALVES]
            nearest = max(c for c in range(8) if distance[c] == min(distance))
            table[raised, code] = nearest
            # -0 is written as +0, but a negative value that rounds to zero stays -0.
            table[raised, code + 8] = nearest | 8 if code else 0
    return table


@functools.cache
def _divided_bytes() -> torch.Tensor:
    """Return `_divided_codes` for two codes at once: uint8, flat [(_FLUSHED + 1) * 256]."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu")
    codes = unpack_codes(every).view(256, 2).long()
    return pack_codes(_divided_codes()[:, codes]).flatten()


@functools.cache
def _divided_errors() -> torch.Tensor:
    """Return the relative error of each divided magnitude: fp64 [_FLUSHED + 1, 8]."""
    halves = torch.tensor(_HALVES, dtype=torch.float64, device="cpu")
    powers = torch.tensor(
        [[2.0**raised] for raised in range(_FLUSHED + 1)], dtype=torch.float64, device="cpu"
    )
    got = halves[_divided_codes()[:, :8].long()] * powers
    return torch.where(halves == 0, 0.0, (got - halves) / halves)
