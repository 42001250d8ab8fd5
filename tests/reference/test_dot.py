"""Dots equal exact rational arithmetic rounded once, and the check is shown wrong dots.

`check` holds a dot function against Fractions; the mutants at the end are wrong dots that it must
refuse, each of them a way in which a real reference has been wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalar_layer import nearest
from torch import Tensor

from megamoe.formats import (
    E2M1,
    E4M3,
    F64,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    Quantised,
    bit_range,
    code_values,
    dequantise,
    quantise,
    rn32,
)
from megamoe.reference import dot as module
from megamoe.reference.dot import dot, sum_to_odd, two_sum

Dot = Callable[[Tensor, Tensor], Tensor]
OVERFLOW = Fraction(2) ** 128 - Fraction(2) ** 103  # from here on RN32 is infinite


def exact(a: list[float], b: list[float]) -> float:
    """The dot as IEEE has it, rounded once to float32; a zero is +0."""
    special = [x * y for x, y in zip(a, b, strict=True) if not math.isfinite(x * y)]
    if special:
        return math.nan if any(map(math.isnan, special)) else sum(special)
    total = sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0))
    return rounded(total)


@functools.cache
def rounded(total: Fraction) -> float:
    if abs(total) >= OVERFLOW:
        return math.inf if total > 0 else -math.inf
    return float(nearest(total, "fp32"))


def check(function: Dot, a: Tensor, b: Tensor) -> None:
    """Every element of function(a, b), bit for bit; a zero's sign and NaN's place included."""
    out = function(a, b)
    assert out.dtype == torch.float32
    rows, columns = a.tolist(), b.tolist()
    expected = torch.tensor([[exact(r, c) for c in columns] for r in rows], dtype=torch.float32)
    expected = expected.reshape(len(rows), len(columns))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    zeros = out[out == 0]
    assert not bool(zeros.signbit().any())


def rows_of(*rows: list[float]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=F64)


def wide(seed: int, *shape: int, spread: int) -> Tensor:
    """Full 53-bit significands, exponents uniform within +-spread."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator)
    significand = torch.rand(shape, generator=generator, dtype=F64) - 0.5
    return torch.from_numpy(np.ldexp(significand.numpy(), exponent.numpy()))


# --- inputs ---------------------------------------------------------------------------------------


def normal(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(6, 300, generator=g), torch.randn(9, 300, generator=g)
    return a.to(torch.bfloat16).to(F64), b.to(torch.bfloat16).to(F64)


def denormal(seed: int) -> tuple[Tensor, Tensor]:
    """Sums around float32's least normal number, and far below its least one."""
    a, b = normal(seed)
    return a[:, :40] * 2.0 ** -torch.arange(60, 66, dtype=F64)[:, None], b[:, :40] * 2.0**-78


def fp32_denormal_operands(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 10, (5, 17), generator=g).to(F64) * 2.0**-149
    return a, torch.randn(4, 17, generator=g).to(F64)


def wide_range(seed: int) -> tuple[Tensor, Tensor]:
    return wide(seed, 5, 23, spread=60), wide(seed + 1, 6, 23, spread=60)


def widest_range(seed: int) -> tuple[Tensor, Tensor]:
    """The whole range that the contract of `dot` names; most sums overflow or vanish."""
    a, b = wide(seed, 4, 7, spread=399), wide(seed + 1, 5, 7, spread=399)
    return torch.cat([a, a * 2.0**-1]), b


def cancelling(seed: int) -> tuple[Tensor, Tensor]:
    """Pairs that cancel exactly, and a small rest that is the whole answer."""
    a, b = wide(seed, 4, 12, spread=40), wide(seed + 1, 1, 12, spread=40)
    rest = wide(seed + 2, 4, 3, spread=90)
    a, b = torch.cat([a, -a, rest], dim=1), torch.cat([b, b, torch.ones(1, 3, dtype=F64)], dim=1)
    order = torch.randperm(27, generator=torch.Generator().manual_seed(seed))
    return a[:, order], b[:, order].expand(2, -1)


def all_cancels(seed: int) -> tuple[Tensor, Tensor]:
    a, b = wide(seed, 3, 9, spread=100), wide(seed + 1, 2, 9, spread=100)
    return torch.cat([a, a], dim=1), torch.cat([b, -b], dim=1)


def cancelling_in_layers(seed: int) -> tuple[Tensor, Tensor]:
    """Groups that cancel exactly, each far below the last, down to a crumb or to nothing."""
    random = Random(seed)
    rows = []
    for _ in range(24):
        exponent, row = random.randint(0, 60), []
        for _ in range(random.randint(1, 5)):
            size = 1 << random.choice((3, 20, 40, 50))
            group = [random.randrange(-size, size) for _ in range(random.randint(1, 3))]
            row += [math.ldexp(v, exponent) for v in (*group, -sum(group))]
            exponent -= random.choice((1, 10, 25, 40, 50, 53, 54, 60, 100))
        crumbs = [random.choice((1, -1)) * 2.0 ** (exponent - random.choice((0, 1, 53, 60)))]
        row += crumbs * random.randint(0, 2)
        random.shuffle(row)
        rows.append(row)
    a = rows_of(*rows)
    return a, torch.stack([torch.ones(a.shape[1], dtype=F64), torch.full((a.shape[1],), -3.0)])


def product_errors(seed: int) -> tuple[Tensor, Tensor]:
    """What float64 loses of one product is the whole answer."""
    x, y = wide(seed, 40, spread=40), wide(seed + 1, 1, spread=40)
    return torch.stack([x, -(x * y)], dim=1), torch.stack([y, torch.ones(1, dtype=F64)], dim=1)


def ties(seed: int) -> tuple[Tensor, Tensor]:
    """Exact halves of float32's last place, and the same plus and minus next to nothing."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for exponent in (-160, -149, -126, -30, 0, 31, 100):
        m = int(torch.randint(2**23, 2**24, (), generator=g))
        big = float(torch.rand((), generator=g, dtype=F64)) * 2.0 ** (exponent + 40)
        for sign, crumb in itertools.product((1, -1), (0.0, 2.0**-200, -(2.0**-200))):
            head = [sign * m * 2.0**exponent, sign * 2.0 ** (exponent - 1), crumb]
            rows.append([*head, big, -big])
            rows.append([big, *head, -big])
    return rows_of(*rows), torch.ones(1, 5, dtype=F64)


def threshold(seed: int) -> tuple[Tensor, Tensor]:
    """Around float32's overflow, and around half its least number."""
    crumbs = (0.0, 2.0**-50, -(2.0**-50), 2.0**60, -(2.0**60))
    rows = [[s * 2.0**128, -s * 2.0**103, c] for s in (1, -1) for c in crumbs]
    rows += [[s * 2.0**-150, c * 2.0**-300, 0.0] for s in (1, -1) for c in crumbs]
    rows += [[s * 3 * 2.0**-150, c * 2.0**-300, 0.0] for s in (1, -1) for c in crumbs]
    return rows_of(*rows), rows_of([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0])


def design(seed: int) -> tuple[Tensor, Tensor]:
    """The two inputs on which slices summed in float64 and then rounded are wrong."""
    a = [1.0, 2.0**-12, 2.0**-40], [2.0**-30, -1.0, 2.0**-45], [1.0, 2.0**-30, 2.0**-45]
    return rows_of(*a), rows_of(*a)


INPUTS = [
    normal, denormal, fp32_denormal_operands, wide_range, widest_range, cancelling,
    cancelling_in_layers, all_cancels, product_errors,
    ties, threshold, design,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("inputs", INPUTS)
def test_equals_rational_arithmetic(inputs: Callable[[int], tuple[Tensor, Tensor]], seed: int):
    check(dot, *inputs(seed))


@pytest.mark.parametrize("inputs", INPUTS)
def test_repair_alone_gives_the_same(inputs, monkeypatch):
    """With a bound that settles nothing, every element takes the exact path."""
    a, b = inputs(7)
    fast = dot(a, b)
    unsettled = torch.full((len(a), len(b)), math.inf, dtype=F64)
    monkeypatch.setattr(module, "_error_bound", lambda a, b, terms: unsettled)
    monkeypatch.setattr(module, "REPAIR_TERMS", 64)  # several chunks
    assert torch.equal(dot(a, b), fast)


@pytest.mark.parametrize("k", [0, 1, 2, 255, 256, 257, 511, 512, 513, 700])
def test_any_number_of_terms(k: int) -> None:
    """Around the block of one matrix product, and none at all."""
    a, b = wide(k, 2, k, spread=12), wide(k + 1, 3, k, spread=12)
    check(dot, a, b)


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("k", [0, 5, 600])
def test_empty_shapes(m: int, n: int, k: int) -> None:
    out = dot(torch.ones(m, k, dtype=F64), torch.ones(n, k, dtype=F64))
    assert torch.equal(out, torch.full((m, n), float(k)))


@pytest.mark.parametrize("repair_terms", [1, 40, 1 << 21])
def test_many_pairs_at_once(repair_terms: int, monkeypatch) -> None:
    """Pairs of unequal shapes whose operands share one buffer, each into a piece of one result."""
    monkeypatch.setattr(module, "REPAIR_TERMS", repair_terms)
    pairs = [cancelling(seed) for seed in range(4)]
    pairs.insert(2, (pairs[0][0][:0], pairs[0][1]))  # no rows: an expert without tokens
    out = torch.full((16, 4), math.nan)
    buffer = torch.empty(2, 4, 27, dtype=F64)

    def products():
        first = 0
        for a, b in pairs:
            buffer.fill_(math.nan)  # what was yielded before is gone
            held_a, held_b = buffer[0, : len(a)].copy_(a), buffer[1, : len(b)].copy_(b)
            token = torch.arange(first, first + len(a))[None]
            yield module.Product(held_a[None], held_b[None], out[:, 1:3], token)
            first += len(a)

    module.dots(products())
    a, b = (torch.cat(parts) for parts in zip(*(p for p in pairs if len(p[0])), strict=True))
    whole = dot(a, b)
    expected = torch.stack([whole[i, i // 4 * 2 : i // 4 * 2 + 2] for i in range(16)])
    assert torch.equal(out[:, 1:3], expected)
    assert bool(out[:, [0, 3]].isnan().all())


def test_padded_pairs_together() -> None:
    """Pairs of unequal counts in one product: padding is zeros, and goes nowhere."""
    pairs = [cancelling(seed) for seed in range(3)]
    counts = [3, 1, 4]
    a = torch.zeros(3, 4, pairs[0][0].shape[1], dtype=F64)
    token = torch.full((3, 4), -1)
    first = 0
    for g, count in enumerate(counts):
        a[g, :count] = pairs[g][0][:count]
        token[g, :count] = torch.arange(first, first + count)
        first += count
    out = torch.full((9, len(pairs[0][1])), math.nan)
    module.dots([module.Product(a, torch.stack([b for _, b in pairs]), out, token)])
    expected = torch.cat([dot(p[0][:n], p[1]) for p, n in zip(pairs, counts, strict=True)])
    assert torch.equal(out[:8], expected)
    assert bool(out[8].isnan().all())


SPECIAL = [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_nan_and_infinity_as_ieee_has_them(k: int) -> None:
    """All vectors over the special values (k up to 2), or the first against all (k = 3)."""
    vectors = torch.tensor(list(itertools.product(SPECIAL, repeat=k)), dtype=F64)
    check(dot, vectors if k < 3 else vectors[::9], vectors)


def test_infinity_in_long_rows() -> None:
    """Long enough for blocks, and for any code path that might skip a product with zero."""
    a, b = torch.zeros(4, 700, dtype=F64), torch.zeros(3, 700, dtype=F64)
    a[0, 699], a[1, 3], a[2, 300] = math.inf, math.nan, -math.inf
    b[1, 699], b[1, 300] = 2.0, 1.0
    check(dot, a, b)


def test_nan_in_one_row_changes_no_other() -> None:
    a, b = normal(3)
    clean = dot(a, b)
    a[2, 5], b[4, 9] = math.nan, math.inf
    spoiled = dot(a, b)
    kept_rows = [i for i in range(len(a)) if i != 2]
    kept_columns = [i for i in range(len(b)) if i != 4]
    assert torch.equal(spoiled[kept_rows][:, kept_columns], clean[kept_rows][:, kept_columns])
    assert bool(spoiled[2].isnan().all())
    assert not bool(spoiled[:, 4].isfinite().any())


def test_small_domain_exhausted() -> None:
    """All pairs of three-vectors over numbers whose sums round, tie, nearly tie and cancel."""
    domain = [0.0, 1.0, -1.0, 2.0**-24, -(2.0**-24), 1 + 2.0**-12, 2.0**-60]
    vectors = torch.tensor(list(itertools.product(domain, repeat=3)), dtype=F64)
    out = dot(vectors, vectors)
    # In units of 2**-120 everything is an integer.
    rows = [[int(v * 2.0**60) for v in row] for row in vectors.tolist()]
    seen: dict[int, float] = {}
    for i, (p, q, r) in enumerate(rows):
        expected = []
        for x, y, z in rows:
            total = p * x + q * y + r * z
            if total not in seen:
                seen[total] = rounded(Fraction(total, 1 << 120))
            expected.append(seen[total])
        assert out[i].tolist() == expected
    assert len(seen) > 1000


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda e: e.name)
def test_all_codes_times_all_codes(element) -> None:
    """Two terms: every code against every code, next to a term that no float32 sum can hold."""
    values = [v for v in code_values(element) if math.isfinite(v)]
    a = torch.tensor([[v, 2.0**-20] for v in values], dtype=F64)
    b = torch.tensor([[v, 3 * 2.0**-20] for v in values], dtype=F64)
    out = dot(a, b)
    for i, x in enumerate(values):
        expected = [rounded(Fraction(x) * Fraction(y) + Fraction(3, 1 << 40)) for y in values]
        assert out[i].tolist() == expected


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [normal, wide_range, cancelling, ties])
@pytest.mark.parametrize("k_block", [8, 256])
def test_the_bound_holds(inputs, k_block: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", k_block)
    for seed in range(4):
        a, b = inputs(seed)
        total, terms = module._blocked_product(a, b)
        bound = module._error_bound(a, b, terms)
        for i, j in itertools.product(range(len(a)), range(len(b))):
            true = sum(
                (
                    Fraction(x) * Fraction(y)
                    for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True)
                ),
                Fraction(0),
            )
            assert abs(Fraction(total[i, j].item()) - true) <= Fraction(bound[i, j].item())


def test_the_bound_settles_almost_everything() -> None:
    """Not vacuous: on normal data it leaves less than one element in a hundred to repair."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(32, 2048, generator=g).to(torch.bfloat16).to(F64)
    b = torch.randn(256, 2048, generator=g).to(torch.bfloat16).to(F64)
    total, terms = module._blocked_product(a, b)
    bound = module._error_bound(a, b, terms)
    unsettled = rn32(total - bound) != rn32(total + bound)
    assert 0 < int(unsettled.sum()) < unsettled.numel() / 100


# --- where the plain sum is exact -----------------------------------------------------------------


def coarse(fmt: Format, seed: int, spread: int) -> tuple[Tensor, Quantised]:
    """BF16 rows, and a matrix on a coarse grid: random codes under power-of-two scales."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(3, 64, generator=g).to(torch.bfloat16).to(F64)
    data = torch.randint(0, 256, (5, 64 // fmt.element.packed), generator=g, dtype=torch.uint8)
    if fmt.element is E4M3:
        data = torch.where((data & 0x7F) == 0x7F, 0, data).view(torch.float8_e4m3fn)
    scale = torch.randint(120, 121 + spread, (5, 2), generator=g, dtype=torch.uint8)
    return a, Quantised(format=fmt, data=data, scale=scale)


def ranged(a: Tensor, q: Quantised) -> module.Product:
    low, high = bit_range(q)
    out, token = torch.empty(3, 5), torch.arange(3)[None]
    return module.Product(a[None], dequantise(q)[None], out, token, lambda: (low[None], high[None]))


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
@pytest.mark.parametrize("spread", [0, 3, 60])
def test_a_known_range_changes_no_bits(fmt: Format, spread: int) -> None:
    proven = 0
    for seed in range(20):
        a, q = coarse(fmt, seed, spread)
        product = ranged(a, q)
        proven += int(module._plain_sum_is_exact(a, bit_range(q)).sum())
        module.dots([product])
        check(lambda a, b, out=product.out: out, a, product.b[0])
    assert proven > 0
    assert (proven < 20 * 3 * 5) == (spread == 60)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8, 255, 256, 257])
def test_exactness_counts_the_terms(k: int) -> None:
    """k products below 2**(bits + 1) on a grid of 1 must add up to no more than 2**53."""
    said = []
    for bits in range(30, 56):
        known = torch.tensor([0]), torch.tensor([bits])
        said.append(bool(module._plain_sum_is_exact(torch.ones(1, k, dtype=F64), known)))
        assert not said[-1] or k * 2 ** (bits + 1) <= 2**53
    assert any(said)


def test_ranges_enclose_every_value() -> None:
    for fmt in (MXFP4, MXFP8, INT4_G32, NVFP4):
        g = torch.Generator().manual_seed(1)
        q = quantise(torch.randn(4, 64, generator=g), fmt)
        low, high = bit_range(q)
        for row, least, most in zip(
            dequantise(q).tolist(), low.tolist(), high.tolist(), strict=True
        ):
            for value in map(Fraction, row):
                assert abs(value) < Fraction(2) ** most
                assert (value / Fraction(2) ** least).denominator == 1


def test_a_range_too_narrow_is_seen() -> None:
    """The planted fault: a range that calls an inexact sum exact."""
    wrong = 0
    for seed in range(200):
        a, q = coarse(MXFP8, seed, 60)
        _, high = bit_range(q)
        product = ranged(a, q)
        product = product._replace(range_b=lambda high=high: (high[None] - 2, high[None]))
        module.dots([product])
        wrong += not torch.equal(product.out, dot(a, product.b[0]))
    assert wrong


# --- the exact sum --------------------------------------------------------------------------------


def is_odd(value: float) -> bool:
    return bool(torch.tensor(value, dtype=F64).view(torch.int64) & 1)


NUMBERS = st.builds(
    math.ldexp, st.integers(-(2**53) + 1, 2**53 - 1), st.integers(-453, 347)
) | st.sampled_from([0.0, 1.0, -1.0, 2.0**-53, -(2.0**-53), 2.0**-54, 2.0**200, -(2.0**200)])


@given(st.lists(NUMBERS, min_size=1, max_size=12), st.integers(0, 3))
def test_sum_to_odd(terms: list[float], cancelled: int) -> None:
    terms = [*terms, *(-t for t in terms[:cancelled])]
    total = sum(map(Fraction, terms), Fraction(0))
    out = sum_to_odd(torch.tensor([terms], dtype=F64)).item()
    near = total.numerator / total.denominator  # correctly rounded by Python
    if Fraction(near) == total:
        assert out == near
    else:
        assert is_odd(out)
        assert abs(Fraction(out) - total) < Fraction(math.ulp(near))


@given(NUMBERS, NUMBERS)
def test_two_sum_loses_nothing(a: float, b: float) -> None:
    total, error = two_sum(torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64))
    assert Fraction(total.item()) + Fraction(error.item()) == Fraction(a) + Fraction(b)


@given(NUMBERS, NUMBERS)
def test_product_error_loses_nothing(a: float, b: float) -> None:
    x, y = torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64)
    product = x * y
    error = module._product_error(x, y, product)
    assert Fraction(product.item()) + Fraction(error.item()) == Fraction(a) * Fraction(b)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_any_pairs(pairs: list[tuple[float, float]]) -> None:
    a, b = zip(*pairs, strict=True)
    check(dot, torch.tensor([a], dtype=F64), torch.tensor([b], dtype=F64))


# --- wrong dots -----------------------------------------------------------------------------------


def rounded_float64_sum(a: Tensor, b: Tensor) -> Tensor:
    return rn32(a @ b.T) + 0.0


def float32_matmul(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float32) @ b.to(torch.float32).T + 0.0


def slices_then_rounded(a: Tensor, b: Tensor) -> Tensor:
    """Exact slices added in float64, then rounded to float32: two roundings."""
    high = a.to(torch.float32).to(F64)
    return rn32(high @ b.T + (a - high) @ b.T) + 0.0


def nan_becomes_a_number(a: Tensor, b: Tensor) -> Tensor:
    return dot(torch.where(a.isnan(), 0.0, a), torch.where(b.isnan(), 0.0, b))


def minus_zero(a: Tensor, b: Tensor) -> Tensor:
    out = dot(a, b)
    return torch.where(out == 0, -out, out)


@pytest.mark.parametrize(
    ("mutant", "inputs"),
    [
        (rounded_float64_sum, ties),
        (rounded_float64_sum, cancelling),
        (rounded_float64_sum, design),
        (float32_matmul, normal),
        (slices_then_rounded, design),
        (minus_zero, all_cancels),
    ],
)
def test_a_wrong_dot_is_caught(mutant: Dot, inputs) -> None:
    with pytest.raises(AssertionError):
        check(mutant, *inputs(0))


def test_a_lost_nan_is_caught() -> None:
    vectors = torch.tensor(list(itertools.product(SPECIAL, repeat=2)), dtype=F64)
    with pytest.raises(AssertionError):
        check(nan_becomes_a_number, vectors, vectors)


def test_a_missing_bound_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(module, "_error_bound", lambda a, b, terms: torch.zeros(len(a), len(b)))
    with pytest.raises(AssertionError):
        check(dot, *cancelling(0))


def test_rounding_to_nearest_before_float32_is_caught(monkeypatch) -> None:
    def to_nearest(terms: Tensor) -> Tensor:
        sums = [sum(map(Fraction, row), Fraction(0)) for row in terms.tolist()]
        return torch.tensor([s.numerator / s.denominator for s in sums], dtype=F64)

    monkeypatch.setattr(module, "sum_to_odd", to_nearest)
    with pytest.raises(AssertionError):
        check(dot, *ties(0))
