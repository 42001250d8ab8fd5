"""E4M3 tables and nearest rounding, against scalars and against ml_dtypes."""

import bisect
import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.kernels.layout.e4m3 import (
    FP4_MAGNITUDES,
    fp4_product_errors,
    fp4_products,
    nearest,
    values,
)

FINITE = [Fraction(float(v)) for v in values()[:127]]


def scalar_nearest(x: Fraction) -> int:
    """The code of the nearest non-negative E4M3 number, ties to the even code, saturating."""
    above = bisect.bisect_left(FINITE, x)
    near = [code for code in (above - 1, above) if 0 <= code < 127]
    closest = min(abs(FINITE[code] - x) for code in near)
    codes = [code for code in near if abs(FINITE[code] - x) == closest]
    return next((code for code in codes if code % 2 == 0), codes[0])


def test_values() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(values().numpy(), expected)


def test_nearest_at_every_value_and_every_middle() -> None:
    points = FINITE + [(a + b) / 2 for a, b in itertools.pairwise(FINITE)]
    nudged = [p * (1 + sign * Fraction(1, 2**50)) for p in points for sign in (-1, 1)]
    every = [float(p) for p in points + nudged]
    got = nearest(torch.tensor(every, dtype=torch.float64)).view(torch.uint8).tolist()
    assert got == [scalar_nearest(Fraction(x)) for x in every]


@given(st.floats(-600, 600))
def test_nearest_of_anything(x: float) -> None:
    got = int(nearest(torch.tensor([x], dtype=torch.float64)).view(torch.uint8))
    assert got & 127 == scalar_nearest(abs(Fraction(x)))
    assert got >> 7 == (np.signbit(x))


def test_nearest_keeps_nan_and_saturates() -> None:
    x = torch.tensor([float("nan"), float("inf"), -1e300, 0.0, -0.0], dtype=torch.float64)
    assert nearest(x).view(torch.uint8).tolist() == [0x7F, 0x7E, 0xFE, 0x00, 0x80]


@pytest.mark.parametrize("shift", [-3, 0])
def test_every_product(shift: int) -> None:
    products, errors = fp4_products(shift), fp4_product_errors(shift)
    for code in range(127):
        for q, magnitude in enumerate(FP4_MAGNITUDES):
            true = FINITE[code] * Fraction(magnitude) * Fraction(2) ** shift
            if true > 464:
                assert products[code, q] == 0x7F
                assert errors[code, q] == float("inf")
                continue
            assert products[code, q] == scalar_nearest(true)
            error = FINITE[int(products[code, q])] - true
            assert errors[code, q] == (float(error / true) if true else 0.0)
