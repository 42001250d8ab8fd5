"""Seeded numbers from integer arithmetic alone: the same bytes on every device and torch version.

Library generators promise no such thing. Every product stays below 2 ** 63, so int64 never wraps.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # values are 32-bit, held in int64
BELL_SIGMA = (4 * (256**2 - 1) / 12) ** 0.5 / 128  # the standard deviation of `bell`, about 1.15


def _scramble_(h: Tensor) -> Tensor:
    """A bijection of 32-bit values that spreads each bit over all others, in place."""
    for multiplier, shift in ((0x2C1B3C6D, 12), (0x297A2D39, 15)):
        h.bitwise_xor_(h >> 16)
        h.mul_(multiplier).bitwise_and_(MASK)
        h.bitwise_xor_(h >> shift)
    return h


def hashed(index: Tensor, *seeds: int) -> Tensor:
    """32 pseudo-random bits, as int64, for each index in [0, 2 ** 32); ``seeds`` name a stream."""
    h = torch.zeros((), dtype=torch.int64, device=index.device)
    for seed in seeds:
        h = _scramble_((h + (seed & MASK) + 0x1E3779B9) & MASK)
    return _scramble_(_scramble_((index ^ h) & MASK))


def bits(shape: tuple[int, ...], *seeds: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 of ``shape``, each 32 pseudo-random bits."""
    count = torch.Size(shape).numel()
    return hashed(torch.arange(count, dtype=torch.int64, device=device), *seeds).view(shape)


def bell(shape: tuple[int, ...], *seeds: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 of ``shape``, bell-shaped: multiples of 2 ** -7 within +-4, deviation ``BELL_SIGMA``.

    The sum of four bytes about its mean: small integers, so that every step is exact.
    """
    word = bits(shape, *seeds, device=device)
    total = word & 255
    for shift in (8, 16, 24):
        total += (word >> shift) & 255
    return (total - 510).to(torch.float32) * 2.0**-7
