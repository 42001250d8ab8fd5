"""Formats: every code and midpoint against independent judges, every scale rule by hand.

Judges: ml_dtypes, gfloat, torch's own casts, and the definition itself (the sorted list of values).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import hashed
from torch import Tensor

from megamoe import formats
from megamoe.errors import BadInput
from megamoe.formats import (
    BF16,
    CATALOGUE,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    ELEMENTS,
    F64,
    FP8_1X64,
    FP8_1X128,
    FP8_BLOCK32,
    FP8_BLOCK128,
    FP8_CHANNEL,
    FP8_ROW,
    FP8_TENSOR,
    FP32,
    INT4,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_DIVIDE,
    PLAIN_BF16,
    PLAIN_F32,
    Element,
    Format,
    Quantised,
    ScaleRule,
    bit_range,
    code_values,
    decode,
    dequantise,
    effective_scale,
    encode,
    error_bound,
    pack,
    plain,
    quantise,
    round_to,
    unpack,
)

SMALL = (E4M3, E5M2, E2M1, E8M0, INT4)
ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int4": ml_dtypes.int4,
}
GFLOAT = {
    "fp32": gfloat.formats.format_info_binary32,
    "bf16": gfloat.formats.format_info_bfloat16,
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}
TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
BITS = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
by_name = pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
small = pytest.mark.parametrize("element", SMALL, ids=lambda e: e.name)
each_format = pytest.mark.parametrize("fmt", CATALOGUE, ids=str)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for NaN's."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a[~nan].contiguous().view(torch.int64), b[~nan].contiguous().view(torch.int64)
    )


def all_codes(element: Element) -> Tensor:
    """Every code's value in code order; float32 by a sample of its significands."""
    if element is FP32:
        patterns = (hashed(5, 40).astype(np.int64) & 0x7FFFFF).tolist()
        patterns += [0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF]
        words = [(e << 23) | m for e in range(255) for m in sorted(patterns)]
        positive = torch.tensor(words, dtype=torch.int32).view(torch.float32).to(F64)
        return torch.cat([positive, -positive])
    if element is BF16:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        return every.view(torch.bfloat16).to(F64)
    return torch.tensor(code_values(element), dtype=F64)


def neighbours(element: Element) -> tuple[Tensor, Tensor]:
    """Adjacent finite values, lower and upper: all of them, or those of float32's sample."""
    if element is FP32:
        lower = all_codes(FP32)
        upper = torch.nextafter(lower.to(torch.float32), torch.tensor(math.inf)).to(F64)
        kept = upper.isfinite()
        return lower[kept], upper[kept]
    values = all_codes(element)
    values = values[values.isfinite()].unique()
    return values[:-1], values[1:]


def is_even(values: Tensor, element: Element) -> Tensor:
    """Whether the code of each value ends in a zero bit."""
    if element.bits > 8:
        return (values.to(element.dtype).view(BITS[element.bits]) & 1) == 0
    codes = {v: c for c, v in reversed(list(enumerate(code_values(element))))}
    return torch.tensor([codes[v] % 2 == 0 for v in values.tolist()])


# --- one number -----------------------------------------------------------------------------------


def check_midpoints(function: Callable[[Tensor, Element], Tensor], element: Element) -> None:
    """The definition: the lower value below a midpoint, the upper above it, the even one on it."""
    lower, upper = neighbours(element)
    middle = lower + (upper - lower) / 2
    assert torch.equal((middle - lower) * 2, upper - lower)
    below = torch.nextafter(middle, torch.full_like(middle, -math.inf))
    above = torch.nextafter(middle, torch.full_like(middle, math.inf))
    on_tie = torch.where(is_even(upper, element), upper, lower)
    if element is E8M0:
        on_tie = upper  # exponents have no even significand: halfway goes up, as torch's cast does
    for points, expected in ((below, lower), (middle, on_tie), (above, upper)):
        assert torch.equal(function(points, element), expected)
    values = all_codes(element)
    assert same(function(values, element), values)


@by_name
def test_rounding_at_every_midpoint(element: Element) -> None:
    check_midpoints(round_to, element)


def half_away(values: Tensor, element: Element) -> Tensor:
    exponent = formats.exponent_of(values).clamp(element.min_exponent, 1000)
    quantum = formats.power_of_two(exponent - element.mantissa_bits)
    return (values / quantum + torch.where(values < 0, -0.5, 0.5)).trunc() * quantum


def by_way_of_float32(values: Tensor, element: Element) -> Tensor:
    return round_to(values.to(torch.float32).to(F64), element)


def truncated(values: Tensor, element: Element) -> Tensor:
    return round_to(values * (1 - 2.0**-6), element)


@pytest.mark.parametrize("wrong", [half_away, by_way_of_float32, truncated])
def test_wrong_rounding_is_caught(wrong) -> None:
    for element in (BF16, E4M3, E2M1):
        with pytest.raises(AssertionError):
            check_midpoints(wrong, element)


def judged_points(element: Element) -> Tensor:
    """Midpoints and their float32 neighbours, which every judge can be given."""
    lower, upper = neighbours(element)
    middle = (lower + (upper - lower) / 2).to(torch.float32)
    inf = torch.tensor(math.inf)
    around = [middle, torch.nextafter(middle, inf), torch.nextafter(middle, -inf)]
    return torch.cat(around).to(F64)


@pytest.mark.parametrize("name", [n for n in ML_DTYPES if n != "int4"])
def test_ml_dtypes_agrees(name: str) -> None:
    element = next(e for e in ELEMENTS if e.name == name)
    points = judged_points(element)
    if element is E8M0:
        points = points[points >= 2.0**-126]  # as torch's cast, below
    judged = points.to(torch.float32).numpy().astype(ML_DTYPES[name]).astype(np.float64)
    assert same(round_to(points, element), torch.from_numpy(judged))


@pytest.mark.parametrize("name", [n for n in TORCH if n != "fp32"])
def test_torch_casts_agree(name: str) -> None:
    element = next(e for e in ELEMENTS if e.name == name)
    points = judged_points(element)
    if element is E8M0:
        # Below float32's normal range this cast rounds up what lies above 2 ** -127 at all.
        points = points[points >= 2.0**-126]
    judged = points.to(torch.float32).to(TORCH[name]).to(torch.float32).to(F64)
    assert same(round_to(points, element), judged)


def test_torch_and_numpy_casts_to_float32_agree() -> None:
    lower, upper = neighbours(FP32)
    middle = lower + (upper - lower) / 2
    inf = torch.tensor(math.inf, dtype=F64)
    points = torch.cat([middle, torch.nextafter(middle, inf), torch.nextafter(middle, -inf)])
    assert same(round_to(points, FP32), points.to(torch.float32).to(F64))
    assert same(round_to(points, FP32), torch.from_numpy(points.numpy().astype(np.float32)).to(F64))


@pytest.mark.parametrize("name", list(GFLOAT))
def test_gfloat_agrees(name: str) -> None:
    """In float64, so that its neighbours of a midpoint count too."""
    element = next(e for e in ELEMENTS if e.name == name)
    lower, upper = neighbours(element)
    middle = lower + (upper - lower) / 2
    inf = torch.tensor(math.inf, dtype=F64)
    points = torch.cat([middle, torch.nextafter(middle, inf), torch.nextafter(middle, -inf)])
    judged = gfloat.round_ndarray(GFLOAT[name], points.numpy(), sat=not element.infinity)
    assert same(round_to(points, element), torch.from_numpy(judged))


@pytest.mark.parametrize(
    ("element", "finite", "beyond", "becomes"),
    [
        (FP32, 2.0**128 - 2.0**103 - 2.0**75, 2.0**128 - 2.0**103, math.inf),
        (BF16, 2.0**128 - 2.0**119 - 2.0**75, 2.0**128 - 2.0**119, math.inf),
        (E5M2, math.nextafter(61440.0, 0.0), 61440.0, math.inf),
        (E4M3, 448.0, 464.5, 448.0),
        (E4M3, 448.0, math.inf, 448.0),
        (E2M1, 6.0, 7.0, 6.0),
        (E2M1, 6.0, math.inf, 6.0),
        (INT4, 7.0, 7.5, 7.0),
        (E8M0, 2.0**127, 2.0**130, 2.0**127),
    ],
    ids=lambda p: p.name if isinstance(p, Element) else None,
)
def test_past_the_greatest(element: Element, finite, beyond, becomes) -> None:
    points = torch.tensor([finite, beyond, 1e308, math.nan], dtype=F64)
    out = round_to(points, element).tolist()
    assert out[:3] == [element.max, becomes, becomes]
    assert math.isnan(out[3])
    if element is not E8M0:
        low = round_to(-points, element).tolist()
        assert low[0] == (-8.0 if element is INT4 and finite > 7.4 else -element.max)
        assert low[2] == (element.min if not element.infinity else -math.inf)


def test_int4_reaches_minus_eight() -> None:
    points = torch.tensor([-8.5, -8.0, -7.5, -0.5, 0.5, 1.5, 6.5, 7.49], dtype=F64)
    assert round_to(points, INT4).tolist() == [-8.0, -8.0, -8.0, 0.0, 0.0, 2.0, 6.0, 7.0]


def test_the_least_scale_is_not_zero() -> None:
    points = torch.tensor([0.0, 2.0**-149, 2.0**-127, 1.5 * 2.0**-127], dtype=F64)
    assert round_to(points, E8M0).tolist() == [2.0**-127] * 3 + [2.0**-126]


# --- codes ----------------------------------------------------------------------------------------


@small
def test_every_code_decodes_as_ml_dtypes_reads_it(element: Element) -> None:
    values = torch.tensor(code_values(element), dtype=F64)
    if element is INT4:  # stored with an offset: that is its definition here
        assert values.tolist() == list(range(-8, 8))
        return
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    judged = codes.view(ML_DTYPES[element.name]).astype(np.float64)
    assert same(values, torch.from_numpy(judged))
    if element.name in GFLOAT:
        again = gfloat.decode_ndarray(GFLOAT[element.name], codes)
        assert same(values, torch.from_numpy(np.asarray(again, dtype=np.float64)))


@by_name
def test_encode_is_the_inverse_of_decode(element: Element) -> None:
    values = all_codes(element)
    values = values[~values.isnan()]
    data = encode(values, element)
    assert data.dtype == element.dtype
    assert data.numel() * element.packed == values.numel()
    assert same(decode(data, element), values)


@small
def test_every_stored_item_comes_back(element: Element) -> None:
    """Codes to values to codes, each byte; NaN to the one that is written."""
    codes = torch.arange(256, dtype=torch.uint8)
    data = codes.view(element.dtype)
    again = encode(decode(data, element), element).view(torch.uint8)
    nan = decode(data, element).isnan()
    if element.packed == 1:
        assert torch.equal(again[~nan], codes[~nan])
        assert set(again[nan].tolist()) <= {element.nan}
    else:
        assert torch.equal(again, codes)


@pytest.mark.parametrize("element", [FP32, BF16, E4M3, E5M2], ids=lambda e: e.name)
def test_one_nan_is_written(element: Element) -> None:
    nans = torch.tensor([0x7FF8, 0x7FF0000000000001, -1, -(2**51)], dtype=torch.int64)
    nans[0] <<= 48
    assert bool(nans.view(F64).isnan().all())
    written = encode(nans.view(F64), element).view(BITS[element.bits])
    assert set(written.tolist()) == {element.nan}
    canonical = {"fp32": 0x7FC00000, "bf16": 0x7FC0, "e4m3": 0x7F, "e5m2": 0x7F}
    assert element.nan == canonical[element.name]


def test_low_nibble_first() -> None:
    assert encode(torch.tensor([[0.5, 1.0, -6.0, 0.0]], dtype=F64), E2M1).tolist() == [[0x21, 0x0F]]
    assert encode(torch.tensor([-8.0, 7.0], dtype=F64), INT4).tolist() == [0xF0]
    assert decode(torch.tensor([0x21], dtype=torch.uint8), E2M1).tolist() == [0.5, 1.0]


def test_pack_and_unpack_are_inverse() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(2, 16, 8)
    assert torch.equal(pack(unpack(data)), data)
    codes = torch.tensor(list(itertools.product(range(16), repeat=2)), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(codes[:0]).shape == (0, 1)
    assert unpack(data[:, :0]).shape == (2, 0, 16)


def test_formats_hold_no_contradiction() -> None:
    assert len({f.name for f in CATALOGUE}) == len(CATALOGUE)
    for fmt in CATALOGUE:
        assert (fmt.scale is None) == (fmt.rule is None)
        if fmt.rule is not None and fmt.rule.kind != "static":
            assert fmt.rule.top == fmt.element.max
        assert (fmt.global_scale != "none") == (
            fmt.rule is not None and fmt.rule.kind == "two_level"
        )
        assert str(fmt) == fmt.name
    for element in ELEMENTS:
        assert element.max_exponent == math.floor(math.log2(element.max))


# --- scales, by hand ------------------------------------------------------------------------------


def ruled(
    rule: ScaleRule, element: Element = E4M3, scale: Element = FP32, width: int = 4
) -> Format:
    return Format(name="ruled", element=element, block=(1, width), scale=scale, rule=rule)


def scales_of(fmt: Format, *amaxes: float) -> list[float]:
    """The scale of one block for each greatest magnitude, which stands last and negative."""
    width = fmt.block[1]
    blocks = torch.zeros(len(amaxes), width)
    blocks[:, -1] = -torch.tensor(amaxes, dtype=F64).to(torch.float32)
    q = quantise(blocks, fmt)
    assert q.scale is not None
    assert fmt.scale is not None
    return decode(q.scale, fmt.scale).flatten().tolist()


def f32(x: float) -> np.float32:
    return np.float32(x)


def test_amax_divides_or_multiplies_by_the_reciprocal() -> None:
    """Each in float32, rounded once; they differ in about half of all scales."""
    amaxes = [0.1, 1.0, 3.3, 448.0, 447.9, 1e30, *np.linspace(1, 2, 50).tolist()]
    divided = scales_of(ruled(ScaleRule(kind="amax", top=448.0)), *amaxes)
    assert divided == [float(f32(a) / f32(448)) for a in amaxes]
    reciprocal = ScaleRule(kind="amax", top=448.0, quotient="reciprocal")
    multiplied = scales_of(ruled(reciprocal), *amaxes)
    assert multiplied == [float(f32(a) * (f32(1) / f32(448))) for a in amaxes]
    differ = sum(a != b for a, b in zip(divided, multiplied, strict=True))
    assert len(amaxes) / 4 < differ < len(amaxes) * 3 / 4


def test_elements_divided_or_multiplied_by_the_reciprocal() -> None:
    x = torch.tensor([[448.0 * 1.1, 3.7, 21.0, 100.0]]).repeat(40, 1)
    x *= torch.linspace(1, 2, 40)[:, None]
    for apply in ("divide", "reciprocal"):
        q = quantise(x, ruled(ScaleRule(kind="amax", top=448.0, apply=apply)))
        scale = effective_scale(q).numpy().astype(np.float32)
        ratio = x.numpy() / scale if apply == "divide" else x.numpy() * (f32(1) / scale)
        expected = torch.from_numpy(ratio.astype(np.float32)).clamp(-448, 448)
        assert torch.equal(decode(q.data, E4M3), expected.to(torch.float8_e4m3fn).to(F64))


def test_dividing_and_multiplying_can_give_another_code() -> None:
    """So a recipe must say which: some element lies between the two float32 ratios' midpoints."""
    k = torch.arange(1, 20001, dtype=torch.float32)
    scale_only = {
        apply: ruled(ScaleRule(kind="amax", top=448.0, apply=apply), width=2)
        for apply in ("divide", "reciprocal")
    }
    amax = 448.0 * (1 + k * 2.0**-20)
    midpoint = (amax.to(F64) / 448 * 1.0625).to(torch.float32)  # 1.0625 is a tie of E4M3
    x = torch.stack([amax, midpoint], dim=1)
    codes = [quantise(x, fmt).data.view(torch.uint8) for fmt in scale_only.values()]
    assert bool((codes[0] != codes[1]).any())


@pytest.mark.parametrize(
    ("amax", "up", "nearest", "floor"),
    [
        (448.0, 1.0, 1.0, 1.0),
        (448.0001, 2.0, 1.0, 1.0),
        (224.0, 0.5, 0.5, 0.5),
        (255.0, 1.0, 0.5, 0.5),
        (256.0, 1.0, 0.5, 1.0),
        (511.0, 2.0, 1.0, 1.0),
        (512.0, 2.0, 1.0, 2.0),
        (671.99, 2.0, 1.0, 2.0),
        (672.0, 2.0, 2.0, 2.0),  # 1.5: halfway goes up
        (448 * 2.0**-127, 2.0**-127, 2.0**-127, 2.0**-127),
        (449 * 2.0**-127, 2.0**-126, 2.0**-127, 2.0**-127),
        (448 * 2.0**-135, 2.0**-127, 2.0**-127, 2.0**-127),  # E8M0 goes no lower
        (2.0**-149, 2.0**-127, 2.0**-127, 2.0**-127),
        (0.0, 2.0**-127, 2.0**-127, 2.0**-127),
        (float(np.finfo(np.float32).max), 2.0**120, 2.0**119, 2.0**119),
    ],
)
@pytest.mark.parametrize("scale", [E8M0, FP32], ids=lambda e: e.name)
def test_powers_of_two(amax: float, up: float, nearest: float, floor: float, scale) -> None:
    kinds = {"power_of_two_up": up, "power_of_two_nearest": nearest, "power_of_two_floor": floor}
    for kind, expected in kinds.items():
        rule = ScaleRule(kind=kind, top=448.0)
        assert scales_of(ruled(rule, scale=scale), amax) == [expected]


def test_ocp_scales_let_elements_saturate() -> None:
    rule = ScaleRule(kind="power_of_two_floor", top=6.0)
    q = quantise(torch.tensor([[7.5, 1.0, -7.9, 0.0]]), ruled(rule, element=E2M1, scale=E8M0))
    assert dequantise(q).tolist() == [[6.0, 1.0, -6.0, 0.0]]


def test_floors_raise_small_values() -> None:
    floored = ScaleRule(kind="amax", top=448.0, amax_floor=1e-4)
    lowest = float(f32(1e-4) / f32(448))
    above = float(f32(2e-4) / f32(448))
    assert scales_of(ruled(floored), 0.0, 1e-5, 2e-4) == [lowest, lowest, above]
    scaled = ScaleRule(kind="amax", top=448.0, scale_floor=2.0**-9, zero_scale=1.0)
    assert scales_of(ruled(scaled), 0.0, 1e-5, 448.0) == [1.0, 2.0**-9, 1.0]
    decimal = ScaleRule(kind="amax", top=448.0, scale_floor=1e-30)
    assert scales_of(ruled(decimal), 0.0, 1e-31) == [float(f32(1e-30))] * 2


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (FP8_ROW, 1.0),
        (FP8_1X64, 1.0),
        (INT4_G32, 1.0),
        (MXFP8, 2.0**-127),
        (MXFP4, 2.0**-127),
        (NVFP4, 1.0),
        (NVFP4_DIVIDE, 1.0),
    ],
    ids=str,
)
def test_a_block_of_zeros(fmt: Format, expected: float) -> None:
    q = quantise(torch.zeros(2, 64), fmt)
    assert q.scale is not None
    assert fmt.scale is not None
    assert set(decode(q.scale, fmt.scale).flatten().tolist()) == {expected}
    assert dequantise(q).count_nonzero() == 0
    if q.global_scale is not None:
        assert set(q.global_scale.flatten().tolist()) == {1.0}


@each_format
def test_a_scale_that_underflows_is_a_block_of_zeros(fmt: Format) -> None:
    """Never 0 / 0: tiny finite values must not become NaN."""
    for tiny in (2.0**-149, 2.0**-140, 2.0**-133, 2.0**-126):
        x = torch.zeros(2, 128)
        x[0, 3], x[1, 40] = tiny, -tiny
        q = quantise(x, fmt)
        assert bool(dequantise(q).isfinite().all())
        assert bool(((dequantise(q) - x).abs() <= error_bound(x, q)).all())


def test_denormal_scales_are_kept() -> None:
    assert scales_of(ruled(formats.AMAX_448), 448 * 2.0**-149, 448 * 3 * 2.0**-140) == [
        2.0**-149, 3 * 2.0**-140,
    ]  # fmt: skip
    x = torch.tensor([[448.0, 1.0, -14.0, 0.0]]) * 2.0**-149
    assert torch.equal(dequantise(quantise(x, ruled(formats.AMAX_448))), x.to(F64))


def test_scales_coded_in_bf16() -> None:
    q = quantise(torch.tensor([[7.0 * 1.005, 1.0] + [0.0] * 30]), INT4_G32)
    assert q.scale is not None
    assert q.scale.flatten().tolist() == [1.0078125]  # RNbf16(1.005)
    assert decode(q.data, INT4)[0, :2].tolist() == [7.0, 1.0]


def test_two_levels() -> None:
    """ModelOpt: global = amax / (6 * 448); block = E4M3(block amax / RN32(6 * global))."""
    x = torch.zeros(2, 48)
    x[0, 0], x[0, 17], x[1, 3], x[1, 40] = 2688.0, -6.0, 6 * 1.0625, 6 * 2.0**-12
    q = quantise(x, NVFP4)
    assert q.global_scale is not None
    assert q.scale is not None
    assert q.global_scale.tolist() == [1.0]
    assert q.scale.to(torch.float32).tolist() == [[448.0, 1.0, 1.0], [1.0, 1.0, 2.0**-9]]
    # 1.0625 ties to 1.0 in E4M3, so 6.375 saturates at 6; 6 * 2**-12 meets the floor, and 0.75
    # ties to 1.0 in E2M1.
    assert dequantise(q)[[0, 0, 1, 1], [0, 17, 3, 40]].tolist() == [2688.0, -6.0, 6.0, 2.0**-9]


def test_two_levels_by_division() -> None:
    """compressed-tensors stores the reciprocal, and a block means RN32(scale / global)."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 3.0, 0.4
    q = quantise(x, NVFP4_DIVIDE)
    assert q.global_scale is not None
    assert q.scale is not None
    whole = f32(2688) / f32(3)
    assert q.global_scale.tolist() == [float(whole)]
    block = f32(0.4) / (f32(6) * (f32(1) / whole))
    coded = float(np.asarray(block, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn))
    assert q.scale.to(torch.float32).tolist() == [[448.0, coded]]
    assert effective_scale(q).tolist() == [[float(f32(448) / whole), float(f32(coded) / whole)]]


def test_a_given_global_scale_is_used() -> None:
    x = torch.full((2, 16), 3.0)
    q = quantise(x, NVFP4, row_groups=2, global_scale=torch.tensor([0.5, 0.25]))
    assert q.scale is not None
    assert q.scale.to(torch.float32).tolist() == [[1.0], [2.0]]
    assert torch.equal(dequantise(q), x.to(F64))
    q = quantise(x * 1e30, NVFP4, global_scale=torch.tensor([1.0]))  # saturates, never infinite
    assert dequantise(q).unique().tolist() == [6.0 * 448]


def test_static_scales_ignore_the_values() -> None:
    fmt = ruled(ScaleRule(kind="static", top=0.5), width=0)
    q = quantise(torch.tensor([[1000.0, 1.0], [0.0, -math.inf]]), fmt)
    assert q.scale is not None
    assert q.scale.tolist() == [[0.5], [0.5]]
    assert dequantise(q).tolist() == [[224.0, 1.0], [0.0, -224.0]]


def near_ties(scale: np.float32) -> Tensor:
    """The float32 numbers around every tie of E4M3 times a scale: [ties, 3]."""
    lower, upper = neighbours(E4M3)
    middle = ((lower + upper) / 2 * float(scale)).to(torch.float32)
    inf = torch.tensor(math.inf)
    return torch.stack([torch.nextafter(middle, -inf), middle, torch.nextafter(middle, inf)], dim=1)


def test_a_static_scale_is_float32_before_it_divides() -> None:
    """Ten decimal scales, elements around every tie: numpy's float32 division decides alike."""
    for tenths in range(1, 20, 2):
        x = near_ties(f32(tenths / 10))
        q = quantise(x, ruled(ScaleRule(kind="static", top=tenths / 10), width=0))
        ratio = torch.from_numpy(x.numpy() / f32(tenths / 10))
        assert torch.equal(decode(q.data, E4M3), round_to(ratio.to(F64), E4M3))


def test_the_bound_covers_float32_ratios() -> None:
    """Elements a hair past a tie, whose float32 ratio is the tie and rounds the other way."""
    scale = f32(448.3) / f32(448)
    x = torch.nn.functional.pad(near_ties(scale), (0, 1), value=448.3)
    x = x[x.abs().amax(1) <= 448.3]
    q = quantise(x, FP8_ROW)
    assert q.scale is not None
    assert set(q.scale.flatten().tolist()) == {float(scale)}
    error = (dequantise(q) - x).abs()
    ratio = x.to(F64) / float(scale)
    nearest = (round_to(ratio, E4M3) - ratio).abs() * float(scale)
    assert bool((error > nearest * (1 + 2.0**-40)).any())  # or the test shows nothing
    assert bool((error <= error_bound(x, q)).all())


def test_the_bound_covers_a_denormal_product_of_scales() -> None:
    """Block scale 1.125 times global scale 5 is 6 where only integers exist: the quantiser's 6.

    In units of float32's least number: 30 / 6 ties to 4, which means 22.5, not 24.
    """
    x = torch.arange(-33, 33).repeat(16, 1).to(torch.float32)[:, :64] * 2.0**-149
    x[:, ::16] = 33 * 2.0**-149
    q = quantise(x, NVFP4, global_scale=torch.tensor([5 * 2.0**-149]))
    assert set((effective_scale(q) * 2.0**149).flatten().tolist()) == {5.625}
    assert set((effective_scale(q, rounded=True) * 2.0**149).flatten().tolist()) == {6.0}
    error = (dequantise(q) - x).abs()
    assert float(error.max()) > 5.625 * 2.0**-149  # half a gap of E2M1 times the scale
    assert bool((error <= error_bound(x, q)).all())


@each_format
@pytest.mark.parametrize("spoiler", [math.nan, math.inf, -math.inf])
def test_a_spoiled_block_spoils_no_other(fmt: Format, spoiler: float) -> None:
    x = torch.from_numpy(hashed(3, 256, 256).astype(np.int32) % 1000).to(torch.float32)
    clean = dequantise(quantise(x, fmt, global_scale=_ones(fmt)))
    x[130, 70] = spoiler
    out = dequantise(quantise(x, fmt, global_scale=_ones(fmt)))
    if fmt.scale is None:
        assert str(out[130, 70].item()) == str(spoiler)
        touched = torch.zeros(256, 256, dtype=torch.bool)
        touched[130, 70] = True
    else:
        height, width = fmt.block[0] or 256, fmt.block[1] or 256
        tile = torch.zeros(256, 256, dtype=torch.bool)
        down, across = 130 // height * height, 70 // width * width
        tile[down : down + height, across : across + width] = True
        touched = tile
        assert bool(out[touched].isnan().all())
    assert torch.equal(out[~touched], clean[~touched])


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_DIVIDE], ids=str)
def test_a_spoiled_block_does_not_reach_the_global_scale(fmt: Format) -> None:
    x = torch.from_numpy(hashed(3, 2, 64).astype(np.int32) % 100).to(torch.float32)
    x[0, 40] = 1000.0
    clean = quantise(x, fmt)
    x[1, 0], x[1, 17] = math.inf, math.nan
    spoiled = quantise(x, fmt)
    assert spoiled.global_scale is not None
    assert clean.global_scale is not None
    assert torch.equal(spoiled.global_scale, clean.global_scale)
    assert dequantise(spoiled).isnan().sum() == 32
    assert torch.equal(dequantise(spoiled)[0], dequantise(clean)[0])


def _ones(fmt: Format) -> Tensor | None:
    return None if fmt.global_scale == "none" else torch.ones(1)


# --- tiles ----------------------------------------------------------------------------------------


def sample(seed: int, *shape: int) -> Tensor:
    """float32 with magnitudes over four binades, so that tiles have scales of their own."""
    z = hashed(seed, *shape).astype(np.int64) & 0xFFFFFFF
    values = (z % 4001 - 2000) * 2.0 ** (-(z // 4001 % 16)).astype(np.float64)
    return torch.from_numpy(values).to(torch.float32)


@each_format
@pytest.mark.parametrize(("rows_per_group", "columns"), [(1, 2), (33, 40), (130, 150)])
@pytest.mark.parametrize("groups", [1, 2])
def test_each_tile_is_a_tensor_of_its_own(fmt, rows_per_group: int, columns: int, groups: int):
    """Ragged extents included; tiling starts anew in each row group (gate, up).

    Of formats with a scale per row, the rows around the edges of each group.
    """
    rows = groups * rows_per_group
    x = sample(rows * 1000 + columns, rows, columns)
    given = None if fmt.global_scale == "none" else torch.tensor([2.0**-9, 2.0**-7][:groups])
    q = quantise(x, fmt, row_groups=groups, global_scale=given)
    values = decode(q.data, fmt.element)
    assert q.shape == (rows, columns)
    if fmt.scale is None:
        assert torch.equal(values, round_to(x.to(F64), fmt.element))
        return
    assert q.scale is not None
    scale = decode(q.scale, fmt.scale)
    height, width = fmt.block[0] or rows_per_group, fmt.block[1] or columns
    tile_row = 0
    for group in range(groups):
        stop = (group + 1) * rows_per_group
        for top in range(group * rows_per_group, stop, height):
            if height == 1 and min(top % rows_per_group, -top % rows_per_group) > 2:
                tile_row += 1
                continue
            for tile_column, left in enumerate(range(0, columns, width)):
                tile = slice(top, min(top + height, stop)), slice(left, left + width)
                alone = quantise(
                    x[tile], fmt, global_scale=None if given is None else given[group : group + 1]
                )
                assert torch.equal(decode(alone.data, fmt.element), values[tile])
                assert alone.scale is not None
                assert decode(alone.scale, fmt.scale).item() == scale[tile_row, tile_column]
            tile_row += 1
    assert q.scale.shape == (tile_row, -(-columns // width)) == q.scale_shape


@each_format
def test_experts_are_quantised_one_by_one(fmt: Format) -> None:  # K64
    x = sample(8, 3, 34, 66) * torch.tensor([1.0, 30.0, 1000.0])[:, None, None]
    q = quantise(x, fmt, row_groups=2)
    for e in range(3):
        alone = quantise(x[e], fmt, row_groups=2)
        for one, other in zip(q[e].tensors, alone.tensors, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(dequantise(q[1:]), dequantise(q)[1:])
    assert torch.equal(dequantise(q[torch.tensor([2, 0])]), dequantise(q)[[2, 0]])
    assert q[1].shape == (34, 66)
    assert q[:0].shape == (0, 34, 66)


@each_format
@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0), (0, 0)])
def test_empty_tensors(fmt: Format, shape: tuple[int, ...]) -> None:
    q = quantise(torch.zeros(shape), fmt, row_groups=2)
    assert q.shape == shape
    assert dequantise(q).shape == shape
    assert dequantise(q, to=BF16).shape == shape
    assert error_bound(torch.zeros(shape), q).shape == shape


@each_format
def test_rows_are_read_in_pieces(fmt: Format) -> None:
    q = quantise(sample(4, 2, 70, 80), fmt, row_groups=2)
    whole = dequantise(q)
    for start, stop in ((0, 1), (0, 35), (30, 41), (69, 70), (35, 35), (0, 70)):
        assert torch.equal(dequantise(q, rows=slice(start, stop)), whole[:, start:stop])


@each_format
def test_strides_and_dtypes_do_not_matter(fmt: Format) -> None:
    x = sample(6, 40, 64)
    expected = quantise(x, fmt)
    strided = torch.stack([x, x], dim=-1)[..., 1]
    for again in (
        quantise(x.T.contiguous().T, fmt),
        quantise(strided, fmt),
        quantise(x.to(F64), fmt),
    ):
        for one, other in zip(again.tensors, expected.tensors, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
    half = x.to(torch.bfloat16)
    assert torch.equal(dequantise(quantise(half, fmt)), dequantise(quantise(half.float(), fmt)))


# --- exactness and error --------------------------------------------------------------------------


@each_format
def test_dequantise_is_exact(fmt: Format) -> None:
    """Each element times its scales, as rational numbers; only division by a global rounds."""
    q = quantise(sample(11, 6, 70), fmt, row_groups=2)
    values, elements = dequantise(q), decode(q.data, fmt.element)
    width = fmt.block[1] or 70
    height = fmt.block[0] or 3
    for i, j in itertools.product(range(6), range(70)):
        expected = Fraction(elements[i, j].item())
        if fmt.scale is not None:
            assert q.scale is not None
            tile = i // 3 * -(-3 // height) + i % 3 // height
            scale = Fraction(decode(q.scale, fmt.scale)[tile, j // width].item())
            if fmt.global_scale == "multiply":
                assert q.global_scale is not None
                scale *= Fraction(q.global_scale[i // 3].item())
            elif fmt.global_scale == "divide":
                assert q.global_scale is not None
                ratio = np.float32(float(scale)) / np.float32(q.global_scale[i // 3].item())
                scale = Fraction(float(ratio))
            expected *= scale
        assert Fraction(values[i, j].item()) == expected


@each_format
def test_bit_ranges_hold_every_value(fmt: Format) -> None:
    """Each row's values are multiples of 2**low below 2**high; of chosen rows alike."""
    x = sample(12, 2, 6, 70) * torch.tensor([1.0, 2.0**-130, 0.0, 2.0**100, 3.3, 1e-3])[:, None]
    q = quantise(x, fmt, row_groups=2)
    for rows in (slice(None), slice(2, 5)):
        known = bit_range(q, rows=rows)
        if fmt.scale is None:
            assert known is None
            continue
        assert known is not None
        values = dequantise(q, rows=rows)
        low, high = (exponents.clamp(-1000, 1000).numpy()[..., None] for exponents in known)
        assert (np.abs(values.numpy()) < np.ldexp(1.0, high)).all()
        units = np.ldexp(values.numpy(), -low)
        assert np.isfinite(units).all()
        assert (units == np.rint(units)).all()


def test_to_rounds_once() -> None:
    """1.125 times a float32 scale lies next to a tie of BF16, and float32 would hide that."""
    ties = 1 + (2 * torch.arange(128, dtype=F64) + 1) * 2.0**-8
    ties = ties[(ties * 256) % 9 != 0]  # the others are ties exactly
    scale = (ties / 1.125).to(torch.float32)
    q = Quantised(
        format=FP8_CHANNEL,
        data=torch.full((len(ties), 1), 1.125).to(torch.float8_e4m3fn),
        scale=scale[:, None],
    )
    once = dequantise(q, to=BF16)
    assert once.dtype == torch.bfloat16
    exact = dequantise(q)
    assert same(once.to(F64), round_to(exact, BF16))
    expected = torch.where(exact < ties[:, None], ties[:, None] - 2.0**-8, ties[:, None] + 2.0**-8)
    assert torch.equal(once.to(F64), expected)
    twice = exact.to(torch.float32).to(torch.bfloat16)
    assert bool((once != twice).any())  # or the test shows nothing


@pytest.mark.parametrize("to", [FP32, BF16, E4M3, E5M2, E2M1], ids=lambda e: e.name)
def test_to_any_element(to: Element) -> None:
    q = quantise(sample(2, 4, 64), MXFP4)
    assert torch.equal(decode(dequantise(q, to=to), to), round_to(dequantise(q), to))


@given(
    fmt=st.sampled_from(CATALOGUE),
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    groups=st.integers(1, 2),
    centre=st.integers(-135, 115),
    spread=st.integers(0, 24),
    zeros=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_error_is_within_the_bound(fmt, rows, columns, groups, centre, spread, zeros, seed) -> None:
    shape = rows * groups, 2 * columns
    z = hashed(seed, *shape)
    significand = (z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    exponent = centre + ((z & np.uint64(255)).astype(np.int64) % (spread + 1)) - spread // 2
    values = np.ldexp(significand, exponent)
    values[((z >> np.uint64(8)) & np.uint64(3)).astype(np.int64) < zeros] = 0.0
    x = torch.from_numpy(values)
    q = quantise(x, fmt, row_groups=groups)
    error = (dequantise(q) - x).abs()
    assert bool((error <= error_bound(x, q)).all())


@each_format
def test_the_bound_is_reached(fmt: Format) -> None:
    """Not vacuous: some value misses by more than nine tenths of what it may."""
    x = sample(21, 64, 256)
    x += sample(22, 64, 256) * 2.0**-11
    x = x.to(F64) * (1 + 0.97 * 2.0**-24)  # off float32's grid too
    q = quantise(x, fmt)
    share = (dequantise(q) - x).abs() / error_bound(x, q)
    assert 0.9 < float(share.max()) <= 1


def test_a_bound_that_forgets_saturation_is_caught() -> None:
    fmt = ruled(ScaleRule(kind="power_of_two_floor", top=6.0), element=E2M1, scale=E8M0)
    x = torch.tensor([[7.9, 1.0, 0.0, 0.0]])
    q = quantise(x, fmt)
    error = (dequantise(q) - x).abs()
    assert bool((error <= error_bound(x, q)).all())
    assert float(error.max()) > 1.0  # half a gap of E2M1 at 4 ... 6


# --- the record -----------------------------------------------------------------------------------


def test_plain_tensors() -> None:
    for dtype, fmt in ((torch.bfloat16, PLAIN_BF16), (torch.float32, PLAIN_F32)):
        x = sample(1, 2, 4, 6).to(dtype)
        q = plain(x)
        assert q.format is fmt
        assert torch.equal(dequantise(q), x.to(F64))
        assert q.nbytes == x.numel() * x.element_size()
    with pytest.raises(BadInput, match=r"^plain values of torch.float16 are neither bfloat16 nor"):
        plain(torch.zeros(2, 2, dtype=torch.float16))


def test_sizes_and_devices() -> None:
    q = quantise(sample(1, 3, 4, 64), NVFP4, row_groups=2)
    assert q.nbytes == 3 * 4 * 32 + 3 * 4 * 4 + 3 * 2 * 4
    assert q.device == torch.device("cpu")
    moved = q.to("cpu")
    for one, other in zip(moved.tensors, q.tensors, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.data = q.data  # type: ignore[misc]


GOOD = {
    "format": FP8_BLOCK32,
    "data": torch.zeros(2, 64, 40).to(torch.float8_e4m3fn),
    "scale": torch.ones(2, 2, 2),
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"data": torch.zeros(2, 64, 40, dtype=torch.uint8)},
            "fp8_block32 data of torch.uint8 is not torch.float8_e4m3fn; view it as that",
        ),
        (
            {"data": torch.zeros(64).to(torch.float8_e4m3fn)},
            "fp8_block32 data of shape (64,) has no rows and columns; pass at least two dimensions",
        ),
        (
            {"row_groups": 3},
            "fp8_block32 rows 64 do not fall into 3 equal groups; "
            "pass row_groups that divides them",
        ),
        (
            {"scale": None},
            "scale of fp8_block32 None is missing, [2, 2, 2] expected; pass it",
        ),
        (
            {"scale": torch.ones(2, 2, 1)},
            "scale of fp8_block32 [2, 2, 1] is not [2, 2, 2]; "
            "pass one scale per tile of the [2, 64, 40] tensor",
        ),
        (
            {"scale": torch.ones(2, 2, 2, dtype=torch.bfloat16)},
            "scale of fp8_block32 of torch.bfloat16 is not torch.float32; view or cast it exactly",
        ),
        (
            {"scale": torch.ones(2, 2, 2, device="meta")},
            "scale of fp8_block32 on meta is not on cpu; move it",
        ),
        (
            {"global_scale": torch.ones(2, 1)},
            "global scale (2, 1) has no place in fp8_block32; drop it",
        ),
        (
            {"format": PLAIN_BF16, "data": torch.zeros(2, 4, dtype=torch.bfloat16)},
            "scale (2, 2, 2) has no place in bf16; drop it",
        ),
        (
            {
                "format": NVFP4,
                "data": torch.zeros(2, 64, 16, dtype=torch.uint8),
                "scale": torch.ones(2, 64, 2).to(torch.float8_e4m3fn),
            },
            "global scale of nvfp4 None is missing, [2, 1] expected; pass it",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict, sentence: str) -> None:  # K62
    Quantised(**GOOD)
    with pytest.raises(BadInput, match=f"^{re.escape(sentence)}$"):
        Quantised(**(GOOD | change))


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4, INT4_G32], ids=str)
def test_odd_columns_cannot_be_packed(fmt: Format) -> None:
    with pytest.raises(
        BadInput, match=r"columns 33 cannot be packed two to a byte; pad to an even"
    ):
        quantise(torch.zeros(2, 33), fmt)


def test_rows_that_do_not_divide() -> None:
    with pytest.raises(BadInput, match=r"^fp8_row rows 5 do not fall into 2 equal groups; "):
        quantise(torch.zeros(5, 8), FP8_ROW, row_groups=2)


def test_whole_tensor_and_channel_scales() -> None:
    x = sample(3, 2, 6, 10)
    tensor = quantise(x, FP8_TENSOR, row_groups=2)
    assert tensor.scale is not None
    expected = (x.view(2, 2, 30).abs().amax(-1) / 448)[..., None]
    assert torch.equal(tensor.scale, expected)
    channel = quantise(x, FP8_CHANNEL)
    assert channel.scale is not None
    assert torch.equal(channel.scale, x.abs().amax(-1, keepdim=True) / 448)
    assert quantise(x, FP8_BLOCK128).scale_shape == (2, 1, 1)
    assert quantise(x, FP8_1X128).scale_shape == (2, 6, 1)
