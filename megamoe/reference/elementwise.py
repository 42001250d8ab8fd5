"""Portable elementwise arithmetic in float64: the same bits on every device, from +, -, *, / alone.

Library exponentials differ between devices and versions; this one is a written sequence of IEEE
operations, so a second implementation (numpy, or scalar Python) can match it bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamoe.formats import F64, power_of_two
from megamoe.problem import Activation

LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first ends in 21 zero bits, so n * LN2_HIGH is exact for |n| < 2 ** 20.
LN2_HIGH = 0.6931471803691238
LN2_LOW = 1.9082149292705877e-10
# 1 / n! for n = 13 ... 2: the remainder past degree 13 is below 2 ** -57 for |r| <= ln(2) / 2.
EXP_COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(13, 1, -1))
# 1 / (2 n + 1) for n = 16 ... 0: the remainder is below 2 ** -58 of the sum for s <= 1 / 3.
ATANH_COEFFICIENTS = tuple(1.0 / (2 * n + 1) for n in range(16, -1, -1))
EXP_LIMIT = 708.0  # beyond it exp is taken as infinite, and as zero below its negative


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's scheme, highest coefficient first, each product and each sum rounded."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x
        value = value + coefficient
    return value


def exp(x: Tensor) -> Tensor:
    """e ** x for float64 x, within one unit in the last place; 0 or infinite beyond EXP_LIMIT.

    n = rint(x * LOG2_E); high = x - n * LN2_HIGH, exact; low = n * LN2_LOW; r = high - low, and
    what that rounding lost enters late: 1 + (r + (lost + r * (r * polynomial(r)))), times 2 ** n
    by bits.
    """
    n = (x.clamp(-EXP_LIMIT, EXP_LIMIT).nan_to_num(0.0) * LOG2_E).round()
    high = x - n * LN2_HIGH
    low = n * LN2_LOW
    r = high - low
    lost = (high - r) - low
    value = 1.0 + (r + (lost + r * (r * _polynomial(r, EXP_COEFFICIENTS))))
    value = value * power_of_two(n.to(torch.int64))
    value = torch.where(x > EXP_LIMIT, math.inf, value)
    return torch.where(x < -EXP_LIMIT, 0.0, value)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float64."""
    one = torch.ones_like(x)
    return one / (one + exp(-x))


def log1p_exp(x: Tensor) -> Tensor:
    """ln(1 + exp(x)), float64: max(x, 0) + 2 atanh(s), with z = exp(-|x|) and s = z / (z + 2)."""
    z = exp(-x.abs())  # in [0, 1], so s is at most 1 / 3
    s = z / (z + 2.0)
    return x.clamp(min=0.0) + 2.0 * (s * _polynomial(s * s, ATANH_COEFFICIENTS))


def clamp(h: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """float [n, 2I], gate rows first, to (gate, up) with the limit applied; NaN passes."""
    gate, up = h.chunk(2, dim=-1)
    limit = activation.limit
    if limit is not None:
        gate = gate.clamp(max=limit)
        if activation.symmetric:
            gate = gate.clamp(min=-limit)
        up = up.clamp(-limit, limit)
    return gate, up


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """((up + up_offset) * gate) * sigmoid(alpha * gate) in float64, in this order."""
    gate, up = gate.to(F64), up.to(F64)
    if activation.up_offset:
        up = up + activation.up_offset
    argument = gate * activation.alpha if activation.alpha != 1.0 else gate
    return (up * gate) * sigmoid(argument)


def canonical_nan(values: Tensor) -> Tensor:
    """BF16 with every NaN written as 0x7FC0, so that a digest does not see its payload."""
    return torch.where(values.isnan(), torch.full_like(values, math.nan), values)
