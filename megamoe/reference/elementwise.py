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
# ln 2 in two parts: the first has its last 21 bits zero, so n * LN2_HIGH is exact for |n| < 2 ** 20.
LN2_HIGH = 0.6931471803691238
LN2_LOW = 1.9082149292705877e-10
# 1 / n!, highest first: the remainder past degree 13 is below 2 ** -57 for |r| <= ln(2) / 2.
COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
OVERFLOW = 709.0  # past it exp is taken as infinite, and as zero below its negative


def exp(x: Tensor) -> Tensor:
    """e ** x for float64 x, within about one unit in the last place; infinite past 709, 0 below -709.

    n = rint(x * LOG2_E); r = (x - n * LN2_HIGH) - n * LN2_LOW; Horner in r; times 2 ** n by bits.
    """
    n = (x.clamp(-OVERFLOW, OVERFLOW).nan_to_num(0.0) * LOG2_E).round()
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    value = torch.full_like(r, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        value = value * r
        value = value + coefficient
    value = value * power_of_two(n.to(torch.int64).clamp(-1022, 1023))
    value = torch.where(x > OVERFLOW, math.inf, value)
    return torch.where(x < -OVERFLOW, 0.0, value)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float64."""
    one = torch.ones_like(x)
    return one / (one + exp(-x))


def log1p_exp(x: Tensor) -> Tensor:
    """ln(1 + exp(x)), float64: max(x, 0) + ln1p(exp(-|x|)), the logarithm by Newton steps on exp."""
    z = exp(-x.abs())  # in (0, 1]
    # A series start (atanh form), then two Newton steps y -= 1 - (1 + z) / exp(y).
    s = z / (z + 2.0)
    s2 = s * s
    y = 2.0 * s * (1.0 + s2 * (1.0 / 3.0 + s2 * (0.2 + s2 * (1.0 / 7.0))))
    one_z = z + 1.0
    for _ in range(2):
        y = y - (torch.ones_like(y) - one_z / exp(y))
    # For tiny z, 1 + z loses its bits: there ln1p(z) = z - z * z / 2 is exact to the last place.
    y = torch.where(z < 2.0**-27, z - z * z * 0.5, y)
    return x.clamp(min=0.0) + y


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

