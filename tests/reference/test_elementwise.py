"""The portable exponential and what is built on it: accurate, monotone, the same bits in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import scalar_layer
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import hashed
from torch import Tensor

from megamoe.formats import F64
from megamoe.problem import BF16_COMBINE, GPT_OSS_ALPHA, Activation
from megamoe.reference import elementwise
from megamoe.reference.elementwise import (
    EXP_LIMIT,
    canonical_nan,
    clamp,
    exp,
    gated,
    log1p_exp,
    sigmoid,
)


def uniform(seed: int, count: int, reach: float) -> Tensor:
    """float64 within +-reach, all 53 bits used."""
    z = (hashed(seed, count) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return torch.from_numpy(z) * reach


def points() -> Tensor:
    """Dense where gates are, the whole range, around every change of n, and the edges."""
    steps = torch.arange(-30, 31, dtype=F64) * math.log(2) + math.log(2) / 2
    near = torch.cat([torch.nextafter(steps, steps + s) for s in (-1.0, 1.0)])
    edges = [0.0, -0.0, 2.0**-1074, -(2.0**-60), 2.0**-30, EXP_LIMIT, -EXP_LIMIT, 1.0, -1.0]
    return torch.cat(
        [
            uniform(1, 3000, 1.0),
            uniform(2, 2000, 20.0),
            uniform(3, 1000, EXP_LIMIT),
            steps,
            near,
            torch.tensor(edges, dtype=F64),
        ]
    )


def worst_ulps(
    function: Callable[[Tensor], Tensor], truth: Callable[[Decimal], Decimal], x: Tensor
) -> float:
    """The greatest error in units of the true value's last place, against 60 decimal digits."""
    worst = Decimal(0)
    with localcontext() as context:
        context.prec = 60
        for argument, value in zip(x.tolist(), function(x).tolist(), strict=True):
            true = truth(Decimal(argument))
            worst = max(worst, abs(Decimal(value) - true) / Decimal(math.ulp(float(true))))
    return float(worst)


def true_sigmoid(x: Decimal) -> Decimal:
    return 1 / (1 + (-x).exp())


def true_log1p_exp(x: Decimal) -> Decimal:
    z = x.exp()
    if x < -40:  # 60 digits do not hold 1 + z: the series does, to 2**-200
        return z - z**2 / 2 + z**3 / 3 - z**4 / 4
    return (1 + z).ln()


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    assert worst_ulps(exp, Decimal.exp, points()) < 1


def test_sigmoid_is_accurate() -> None:
    """Two roundings after exp's own, of which the sum's counts twice where exp is large."""
    assert worst_ulps(sigmoid, true_sigmoid, points()) < 2.5


def test_log1p_exp_is_accurate_also_where_it_is_tiny() -> None:
    assert worst_ulps(log1p_exp, true_log1p_exp, points()) < 4


def test_a_less_accurate_exp_is_caught(monkeypatch) -> None:
    shorter = elementwise.EXP_COEFFICIENTS[3:]
    monkeypatch.setattr(elementwise, "EXP_COEFFICIENTS", shorter)
    assert worst_ulps(exp, Decimal.exp, uniform(1, 300, 1.0)) > 1


@pytest.mark.parametrize("function", [exp, sigmoid, log1p_exp], ids=lambda f: f.__name__)
def test_monotone(function: Callable[[Tensor], Tensor]) -> None:
    """Over neighbouring float32 gates, whose results are many float64 places apart."""
    bits = torch.arange(0x41200000 - 4000, 0x41200000 + 4000, dtype=torch.int32)
    gates = bits.view(torch.float32).to(F64)
    grid = torch.arange(-3000, 3001, dtype=F64) / 128
    for x in (gates, -gates.flip(0), gates / 16, grid):
        y = function(x)
        assert bool((y.diff() >= 0).all())
        assert bool((y.diff() > 0).any())


@pytest.mark.parametrize("name", ["exp", "sigmoid", "log1p_exp"])
def test_scalar_python_gives_the_same_bits(name: str) -> None:
    x = torch.cat([points()[::3], torch.tensor([math.inf, -math.inf, 709.0, -709.0], dtype=F64)])
    y = getattr(elementwise, name)(x)
    again = getattr(scalar_layer, name)
    with np.errstate(over="ignore"):
        expected = torch.tensor([float(again(np.float64(v))) for v in x.tolist()], dtype=F64)
    assert torch.equal(y.view(torch.int64), expected.view(torch.int64))


@pytest.mark.parametrize(
    ("function", "at_minus_infinity", "at_zero", "at_infinity"),
    [
        (exp, 0.0, 1.0, math.inf),
        (sigmoid, 0.0, 0.5, 1.0),
        (log1p_exp, 0.0, 0.6931471805599452, math.inf),  # one place below ln 2: bits, not luck
    ],
    ids=["exp", "sigmoid", "log1p_exp"],
)
def test_the_ends(function, at_minus_infinity, at_zero, at_infinity) -> None:
    x = torch.tensor([-math.inf, -1e308, -0.0, 0.0, 1e308, math.inf, math.nan], dtype=F64)
    y = function(x).tolist()
    assert y[0] == y[1] == at_minus_infinity
    assert y[2] == y[3] == at_zero
    assert y[5] == at_infinity
    assert y[4] == (1e308 if function is log1p_exp else at_infinity)
    assert math.isnan(y[6])


def test_strides_do_not_matter() -> None:
    x = uniform(9, 6000, 30.0)
    whole = exp(x)
    assert torch.equal(exp(x.view(60, 100).T), whole.view(60, 100).T)
    assert torch.equal(exp(x[::7]), whole[::7])
    assert torch.equal(torch.cat([exp(v) for v in x[:40].split(1)]), whole[:40])


# --- the clamp: K1 to K7 of the field's known failures --------------------------------------------


def act(gate: float, up: float, **activation: float | bool | None) -> float:
    """One gate and one up, clamped and multiplied, rounded to float32."""
    form = Activation(**activation)  # type: ignore[arg-type]
    h = torch.tensor([[gate, up]], dtype=torch.float32)
    return gated(*clamp(h, form), form).to(torch.float32).item()


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "activation", "expected"),
    [
        (20, 1, {"limit": 10}, silu(10)),  # K1: 20 where the clamp is dropped
        (-2, 1, {"limit": 1}, silu(-2)),  # K2: the gate has no lower limit
        (-2, 1, {"limit": 1, "symmetric": True}, silu(-1)),
        (1, 20, {"limit": 10}, 10 * silu(1)),  # K3: up is clamped from both sides
        (1, -20, {"limit": 10}, -10 * silu(1)),
        (20, 1, {"limit": 1}, silu(1)),  # K4: before the activation; 1.0 after it
        (20, 1, {"limit": 0}, silu(20)),  # K6: 0 and None are no clamp
        (20, 1, {"limit": None}, silu(20)),
        (20, -30, {"limit": math.inf}, -30 * silu(20)),
        (3, -2, {}, -5.715444518),  # K8: -0.715218 with gate and up swapped
        (1, 1, {"limit": 7}, 0.7310585786),  # K11: alpha and the offset are arguments
        (1, 1, {"limit": 7, "alpha": 1.702, "up_offset": 1}, 1.6915918),
        (1, 1, {"limit": 7, "up_offset": 1}, 1.4621171573),
        (9, -9, {"limit": 7, "alpha": GPT_OSS_ALPHA, "up_offset": 1}, -41.99972),
    ],
)
def test_known_values(gate: float, up: float, activation: dict, expected: float) -> None:
    assert act(gate, up, **activation) == pytest.approx(expected, rel=2.0**-20)


def test_the_limit_itself_passes_and_the_next_number_does_not() -> None:
    above = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0)).item()
    for limit in (7.0, 0.1):
        h = torch.tensor([[limit, -limit], [above, -above]], dtype=torch.float32)
        gate, up = clamp(h, Activation(limit=limit))
        assert gate.flatten().tolist() == [f32(limit)] * 2
        assert up.flatten().tolist() == [-f32(limit)] * 2


def test_nan_passes_the_clamp() -> None:
    """A kernel's fmin turns a NaN gate into the limit; the reference does not."""
    h = torch.tensor([[math.nan, 1.0], [1.0, math.nan]])
    for symmetric in (False, True):
        gate, up = clamp(h, Activation(limit=1.0, symmetric=symmetric))
        assert math.isnan(gate[0, 0])
        assert math.isnan(up[1, 0])
        assert (gate[1, 0], up[0, 0]) == (1.0, 1.0)


def test_infinities() -> None:
    inf = math.inf
    assert act(inf, -inf, limit=7.0) == pytest.approx(-7 * silu(7), rel=2.0**-20)
    assert act(inf, 2.0) == inf
    assert math.isnan(act(-inf, 2.0))  # -inf * sigmoid(-inf) is -inf * 0
    assert math.isnan(act(inf, 0.0))


def test_the_input_is_not_written() -> None:
    h = torch.tensor([[20.0, 20.0]])
    clamp(h, Activation(limit=1.0))
    assert h.tolist() == [[20.0, 20.0]]


@given(
    st.floats(-1e4, 1e4, width=32),
    st.floats(-1e4, 1e4, width=32),
    st.sampled_from([None, 0.5, 7.0, 10.0]),
    st.booleans(),
    st.sampled_from([(1.0, 0.0), (GPT_OSS_ALPHA, 1.0), (0.5, -2.0)]),
)
def test_one_number_at_a_time_gives_the_same_bits(gate, up, limit, symmetric, form) -> None:
    activation = Activation(limit=limit, symmetric=symmetric, alpha=form[0], up_offset=form[1])
    h = torch.tensor([[gate, up]], dtype=torch.float32)
    value = gated(*clamp(h, activation), activation).item()
    pair = scalar_layer.clamped(Fraction(gate), Fraction(up), activation)
    again = float(scalar_layer.swiglu(*pair, activation, BF16_COMBINE))
    assert value == again  # a zero's sign is lost in a Fraction


def test_nan_has_one_spelling() -> None:
    bits = torch.tensor([0x7FC0, 0x7F81, -1, -64, 0x7F80, -128, 0x3F80], dtype=torch.int16)
    out = canonical_nan(bits.view(torch.bfloat16)).view(torch.int16)
    assert out.tolist() == [0x7FC0] * 4 + [0x7F80, -128, 0x3F80]
