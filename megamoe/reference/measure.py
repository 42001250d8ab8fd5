"""How far an output lies from the truth, token by token: errors, norms and classes of numbers.

Shapes: T tokens, H hidden_size, C tiles of ``TILE`` columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import BF16, F64, FP32, exponent_of, power_of_two, rn32, rnbf16
from megamoe.reference.case import Truth

TILE = 128  # columns that scales and matrix instructions share: a fault may sit in one tile alone


@dataclass(frozen=True, slots=True, eq=False)
class Ruler:
    """What errors are divided by, and what the output's own rounding may add to them.

    counted: elements that are finite in EXACT and in the recipe; the others are judged by class.
    size [T] and tile_size [T, C]: the norm of sum |w y| plus that of |shared|, over counted
    elements. floor, tile_floor: the most that rounding the output and summing its slots in float32
    can add: the norm of half a unit in the last place of BF16 at each element of EXACT, over that
    size, and half a unit of float32 for each slot. norm: that of EXACT. lost: elements that are
    finite in EXACT and not in the recipe; lost_size, lost_floor [T]: likewise over these.
    """

    truth: Truth
    counted: Tensor
    size: Tensor
    tile_size: Tensor
    floor: Tensor
    tile_floor: Tensor
    norm: Tensor
    lost: Tensor
    lost_size: Tensor
    lost_floor: Tensor

    @classmethod
    def of(cls, truth: Truth, emulated: Tensor, slots: int) -> Ruler:
        counted = truth.exact.isfinite() & emulated.isfinite()
        size, tile_size = _sizes(truth, counted)
        exact = torch.where(counted, truth.exact, 0.0)
        rounding, tile_rounding = norms(half_unit(exact))
        lost = truth.exact.isfinite() & ~emulated.isfinite()
        lost_size = _sizes(truth, lost)[0]
        lost_rounding = norms(half_unit(torch.where(lost, truth.exact, 0.0)))[0]
        return cls(
            truth=truth,
            counted=counted,
            size=size,
            tile_size=tile_size,
            floor=_floor(rounding, size, slots),
            tile_floor=_floor(tile_rounding, tile_size, slots),
            norm=norms(exact)[0],
            lost=lost,
            lost_size=lost_size,
            lost_floor=_floor(lost_rounding, lost_size, slots),
        )

    def measure(self, y: Tensor) -> Errors:
        """The errors of an output [T, H] of any float type."""
        wide = torch.where(self.counted, y.to(F64), 0.0)
        error, tile_error = norms(wide - torch.where(self.counted, self.truth.exact, 0.0))
        shift = norms(wide)[0] - self.norm
        return Errors(
            error=over(error, self.size),
            tile_error=over(tile_error, self.tile_size),
            shift=over(shift, self.size),
        )

    def misplaced(self, y: Tensor, emulated: Tensor, budget: float) -> Tensor:
        """How many elements [T] are of the wrong class where numbers alone cannot be compared.

        The class is EXACT's, rounded to BF16, or the recipe's: it may overflow on the way. Where it
        does and y does not, y's numbers are held to EXACT. budget: a relative error.
        """
        exact = rnbf16(rn32(self.truth.exact))
        fits = same_class(y, exact) | same_class(y, emulated)
        found = self.lost & y.isfinite()
        error = norms(torch.where(found, y.to(F64) - self.truth.exact, 0.0))[0]
        far = ~(over(error, self.lost_size) <= budget + self.lost_floor)
        return (~self.counted & ~fits | found & far[:, None]).sum(1)

    def displaced(self, y: Tensor, emulated: Tensor) -> Tensor:
        """How many elements [T] that are no numbers in EXACT or in the recipe are not the recipe's
        class.
        """
        return (~self.counted & ~same_class(y, emulated)).sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """error, shift [T] and tile_error [T, C], relative to a :class:`Ruler`'s sizes.

    shift is the norm of y less that of EXACT: an error that turns nothing but scales shows here.
    """

    error: Tensor
    tile_error: Tensor
    shift: Tensor


def _sizes(truth: Truth, among: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of sum |w y| plus those of |shared| over some elements, as :func:`norms` has
    them.
    """
    size, tile_size = norms(torch.where(among, truth.routed, 0.0))
    if truth.shared is None:
        return size, tile_size
    also, tile_also = norms(torch.where(among, truth.shared, 0.0))
    return size + also, tile_size + tile_also


def norms(values: Tensor) -> tuple[Tensor, Tensor]:
    """Euclidean norms of float64 [T, H]: of each row [T], and of each of its tiles [T, C]."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % TILE))
    tiles = padded.unflatten(1, (-1, TILE)).square().sum(2)
    return tiles.sum(1).sqrt(), tiles.sqrt()


def over(value: Tensor, size: Tensor) -> Tensor:
    """value / size; where the size is 0, 0 for a value of 0 and infinity for any other."""
    nothing = torch.where(value == 0, 0.0, torch.inf)
    return torch.where(size > 0, value / torch.where(size > 0, size, 1.0), nothing)


def _floor(rounding: Tensor, size: Tensor, slots: int) -> Tensor:
    summing = slots * 2.0 ** -(FP32.mantissa_bits + 1)
    return torch.where(size > 0, over(rounding, size) + summing, 0.0)


def half_unit(values: Tensor) -> Tensor:
    """Half of BF16's unit in the last place at float64 values; 0 at 0."""
    exponent = exponent_of(values).clamp(BF16.min_exponent, BF16.max_exponent)
    half = power_of_two(exponent - BF16.mantissa_bits - 1)
    return torch.where(values == 0, 0.0, half)


def same_class(a: Tensor, b: Tensor) -> Tensor:
    """Both NaN, both the same infinity, or both finite."""
    infinite = (a.isinf() & (a == b)) | (a.isfinite() & b.isfinite())
    return infinite | (a.isnan() & b.isnan())


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Equal as torch.equal has it, and NaN equal to NaN: a zero's sign is not compared."""
    return (a == b) | (a.isnan() & b.isnan())
