"""Correctly rounded dot products: the float32 nearest to the exact real sum, whatever the machine.

One float64 product and a proven bound on its error settle almost every element: where both ends of
the interval round to the same float32, that is the answer, whichever order the library summed in.
The few others are summed again without error. The result is defined by mathematics alone, so it
cannot depend on device, thread count, batch size or library version.

Shapes: G pairs, M rows of a, N rows of b, K terms; R elements to repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.formats import F64, exponent_of, last_bit_of, power_of_two, rn32

UNIT = 2.0**-53  # float64's unit roundoff
BLOCK = 256  # terms summed by one matrix product; shorter blocks tighten the bound
REPAIR_TERMS = 1 << 21  # terms gathered at once while repairing: bounds its memory


Range = tuple[Tensor, Tensor]  # exponents (low, high) of each row, as `formats.bit_range` gives


class Product(NamedTuple):
    """G pairs of matrices whose rows' dots are wanted.

    a: float64 [G, M, K]; b: float64 [G, N, K]. Element (i, j) of pair g goes to
    ``out[token[g, i], j]``; a token of -1 is padding, a row of zeros that goes nowhere.
    range_b: gives the ranges [G, N] of b's rows, where they are known.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    token: Tensor
    range_b: Callable[[], Range | None] | None = None

    def put(self, values: Tensor) -> None:
        """Write [G, M, N] where it belongs."""
        live = self.token >= 0
        self.out[self.token[live]] = values[live]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """RN32 of the exact dot product of each row of ``a`` with each row of ``b``: float32 [M, N].

    a: float64 [M, K], b: float64 [N, K]; finite magnitudes zero or within [2**-400, 2**400], so
    that products neither overflow nor underflow (every number format here is far inside). NaN and
    infinities follow IEEE in the elements they enter. A zero comes out as +0.
    """
    out = torch.empty(len(a), len(b), dtype=torch.float32, device=a.device)
    dots([Product(a[None], b[None], out, torch.arange(len(a), device=a.device)[None])])
    return out


def dots(products: Iterable[Product]) -> None:
    """:func:`dot` of many pairs, each into its own ``out``; their repairs are made together.

    The products are taken one by one, so that a generator need not hold all operands at once; K may
    differ from one call to the next, not within one.
    """
    waiting: list[_Undecided] = []
    held = 0
    for product in products:
        pair, row, column = _estimate(product)
        step = max(1, REPAIR_TERMS // max(1, product.a.shape[2]))
        for start in range(0, len(pair), step):
            g, i, j = (index[start : start + step] for index in (pair, row, column))
            waiting.append(
                _Undecided(product.a[g, i], product.b[g, j], product.out, product.token[g, i], j)
            )
            held += waiting[-1].a.numel()
            if held >= REPAIR_TERMS:
                _repair(waiting)
                held = 0
    _repair(waiting)


class _Undecided(NamedTuple):
    """Row-wise pairs [R, K] whose dots go to ``out[row, column]``."""

    a: Tensor
    b: Tensor
    out: Tensor
    row: Tensor
    column: Tensor


def _estimate(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """Fill ``out``; indices (pair, row, column) of what one float64 product leaves undecided."""
    a, b = product.a, product.b
    sums = [_blocked_product(a[g], b[g]) for g in range(len(a))]
    total = torch.stack([t for t, _ in sums]) if len(sums) > 1 else sums[0][0][None]
    bound = _error_bound(a, b, sums[0][1])
    known = None if product.range_b is None else product.range_b()
    if known is not None:
        bound = torch.where(_plain_sum_is_exact(a, known), 0.0, bound)
    low, high = rn32(total - bound), rn32(total + bound)
    product.put(torch.where(low == high, low, rn32(total)) + 0.0)  # -0 + 0 is +0
    undecided = (low != high) & total.isfinite() & (product.token >= 0)[:, :, None]
    pair, row, column = undecided.nonzero().unbind(1)
    return pair, row, column


def _repair(waiting: list[_Undecided]) -> None:
    """Sum the elements that wait without error, write them where they belong, empty the list."""
    if not waiting:
        return
    exact = _exact_dot(torch.cat([w.a for w in waiting]), torch.cat([w.b for w in waiting]))
    counts = [len(w.a) for w in waiting]
    for w, part in zip(waiting, exact.split(counts), strict=True):
        w.out[w.row, w.column] = part + 0.0
    waiting.clear()


def _blocked_product(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """float64 [M, N] and the number of roundings on the longest path to an element."""
    k = a.shape[1]
    blocks, rest = divmod(k, BLOCK)
    if blocks < 2:
        return a @ b.T, k
    a_blocks = a[:, : k - rest].unflatten(1, (blocks, BLOCK)).transpose(0, 1)
    b_blocks = b[:, : k - rest].unflatten(1, (blocks, BLOCK)).permute(1, 2, 0)
    total = torch.bmm(a_blocks, b_blocks).sum(0)
    if rest:
        total = total + a[:, k - rest :] @ b[:, k - rest :].T
    return total, BLOCK + blocks + 1


def _error_bound(a: Tensor, b: Tensor, terms: int) -> Tensor:
    """An upper bound of |float64 sum - exact sum|, float64 [..., M, N].

    Each element passes at most ``terms`` + 1 roundings of partial sums that |a| |b| bounds
    (Cauchy-Schwarz), whatever the order. The last 2 and the factor 1.01 cover the norms' own
    roundings and those of the interval's ends.
    """
    norm_a: Tensor = torch.linalg.vector_norm(a, dim=-1)[..., :, None]
    norm_b: Tensor = torch.linalg.vector_norm(b, dim=-1)[..., None, :]
    return norm_a * norm_b * ((terms + 4) * UNIT * 1.01)


def _plain_sum_is_exact(a: Tensor, range_b: Range) -> Tensor:
    """Where the operands' bits leave nothing to round in any order of summation, bool [..., M, N].

    Low-precision weights put every product on one coarse grid: there float32 ties abound, which no
    interval could decide, and the float64 sum is the exact one.
    """
    used = a != 0
    low_a = torch.where(used, last_bit_of(a), 1 << 20).amin(-1)
    high_a = torch.where(used, exponent_of(a) + 1, -(1 << 20)).amax(-1)
    low = low_a[..., :, None] + range_b[0][..., None, :]
    high = high_a[..., :, None] + range_b[1][..., None, :]
    return high + a.shape[-1].bit_length() - low <= 53


def _exact_dot(a: Tensor, b: Tensor) -> Tensor:
    """RN32 of row-wise dots of float64 [R, K] pairs, float32 [R]."""
    product = a * b
    error = _product_error(a, b, product)
    terms = torch.cat([product, error], dim=1) if bool((error != 0).any()) else product
    return rn32(sum_to_odd(terms))


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """a * b - product exactly (Dekker, with Veltkamp's splitting)."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = a_high * b_high - product
    error = error + a_high * b_low
    error = error + a_low * b_high
    return error + a_low * b_low


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * 134217729.0  # 2 ** 27 + 1
    high = c - (c - a)
    return high, a - high


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 sum and its rounding error, exactly (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def sum_to_odd(terms: Tensor) -> Tensor:
    """The exact sum of each row of float64 [R, n], rounded to odd in float64.

    Rounding to odd keeps whether anything was lost in the last bit, so a second rounding to float32
    (or fewer bits) gives what one rounding of the exact sum gives (Boldo and Melquiond).
    """
    parts = _exact_parts(terms)
    for _ in parts:  # each sweep moves one more part to its place; then parts do not overlap
        for i in range(len(parts) - 1, 0, -1):
            parts[i - 1], parts[i] = two_sum(parts[i - 1], parts[i])
    head = parts[0]
    rest = torch.zeros_like(head)
    for part in reversed(parts[1:]):
        rest = torch.where(part != 0, part, rest)
    bits = head.view(torch.int64)
    even = (bits & 1) == 0
    away = torch.where((rest > 0) == (head > 0), 1, -1)
    return torch.where((rest != 0) & even, bits + away, bits).view(F64)


def _exact_parts(terms: Tensor) -> list[Tensor]:
    """A few float64 [R] that add up to each row's exact sum (extraction of Rump, Ogita and Oishi).

    Adding and subtracting a power of two above n times the greatest term cuts every term at one bit
    position; the upper pieces then add without error in any order, the lower ones go round again.
    """
    headroom = (terms.shape[1] + 2).bit_length()
    parts: list[Tensor] = []
    while not parts or bool((terms.abs() > 0).any()):  # false for NaN: out of range, but it ends
        greatest = terms.abs().amax(dim=1, keepdim=True)
        sigma = power_of_two((exponent_of(greatest) + 1 + headroom).clamp(min=-1022))
        upper = (sigma + terms) - sigma
        parts.append(upper.sum(dim=1))
        terms = terms - upper
    return parts
