"""What the adapters hand over besides layouts: bits of the formats, by other operations."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import bell, hashed

from megamoe.errors import Unsupported
from megamoe.formats import (
    E4M3,
    FP8_1X128,
    FP8_BLOCK32_E8M0,
    FP8_BLOCK128,
    FP8_BLOCK128_E8M0,
    FP8_ROW,
    FP32,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    ScaleRule,
    dequantise,
    plain,
    quantise,
)
from megamoe.kernels import coding
from megamoe.kernels.operands import canonical, coded, exact_bf16, mx_coded, static_coded
from megamoe.problem import ExpertWeights


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, any NaN being one NaN."""
    if a.dtype == torch.uint8:
        return torch.equal(a, b)
    if a.dtype.itemsize == 1:
        nan = a.float().isnan() & b.float().isnan()
        return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def any_bf16(seed: int, rows: int, columns: int) -> torch.Tensor:
    """All BF16 numbers alike: infinities, NaN and denormals among them."""
    z = (hashed(seed, rows, columns) >> 40).astype("int64") & 0xFFFF
    return torch.from_numpy(z).to(torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("fmt", [FP8_ROW, FP8_1X128, MXFP8], ids=str)
@given(
    rows=st.integers(0, 3),
    seed=st.integers(0, 2**20),
    exponent=st.integers(-140, 127),
    kind=st.sampled_from(["bell", "any", "zero", "mixed"]),
)
def test_activations_are_coded_as_the_format_says(
    fmt: Format, rows: int, seed: int, exponent: int, kind: str
) -> None:
    wide = any_bf16(seed, rows, 256)
    x = (bell(seed, rows, 256).double() * 2.0**exponent).float().bfloat16()
    if kind == "any":
        x = wide
    elif kind == "zero":
        x = x * 0
    elif kind == "mixed" and rows:
        x[0] = wide[0]
    want = quantise(x, fmt)
    codes, scales = mx_coded(x) if fmt is MXFP8 else coded(x, fmt)
    scales = scales.view(torch.uint8) if fmt is MXFP8 else scales
    assert codes.shape == x.shape
    assert want.scale is not None
    assert scales.shape == want.scale.shape
    assert same(scales, want.scale)
    assert same(codes, want.data)


def test_where_triton_serves_it_is_asked() -> None:
    """Its bits are judged on a GPU; here, that both ways hand over the same dtypes."""
    x = bell(1, 2, 256).bfloat16()

    def code(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantise(x, fmt)
        assert q.scale is not None
        return q.data, q.scale

    ways: list[list[torch.Tensor]] = []
    for serves in (False, True):
        with (
            mock.patch.object(coding, "serves", lambda _, serves=serves: serves),
            mock.patch.object(coding, "code", mock.Mock(side_effect=code)) as asked,
        ):
            ways.append([*coded(x, FP8_ROW), *coded(x, FP8_1X128), *mx_coded(x)])
        assert asked.call_count == 3 * serves
    for ours, theirs in zip(*ways, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@given(seed=st.integers(0, 2**20), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_activations_under_a_static_scale(seed: int, scale: float) -> None:
    x = bell(seed, 2, 64).bfloat16()
    rule = ScaleRule(kind="static", top=scale)
    want = quantise(x, Format(name="static", element=E4M3, scale=FP32, rule=rule))
    assert same(static_coded(x, scale), want.data)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, FP8_BLOCK128_E8M0, FP8_BLOCK32_E8M0], ids=str)
def test_formats_that_bf16_holds_keep_every_value(fmt: Format) -> None:
    experts = ExpertWeights(
        w13=quantise(bell(1, 2, 256, 128), fmt, row_groups=2),
        w2=quantise(bell(2, 2, 128, 128), fmt),
    )
    found = exact_bf16(experts)
    for matrix, q in ((found.w13, experts.w13), (found.w2, experts.w2)):
        assert matrix.dtype == torch.bfloat16
        assert torch.equal(matrix.double(), dequantise(q))


@pytest.mark.parametrize("fmt", [NVFP4, FP8_BLOCK128], ids=str)
def test_a_value_that_bf16_rounds_is_counted_and_named(fmt: Format) -> None:
    experts = ExpertWeights(
        w13=quantise(bell(1, 2, 256, 128) * 0, fmt, row_groups=2),
        w2=quantise(bell(2, 2, 128, 128), fmt),
    )
    with pytest.raises(Unsupported, match=r"w2 of expert slot 0: \d+ of 16384 .* are no BF16"):
        exact_bf16(experts)


def test_bf16_experts_are_not_copied() -> None:
    experts = ExpertWeights(
        w13=plain(bell(1, 2, 32, 16).bfloat16()), w2=plain(bell(2, 2, 16, 16).bfloat16())
    )
    found = exact_bf16(experts)
    assert found.w13.data_ptr() == experts.w13.data.data_ptr()
    assert found.w2.data_ptr() == experts.w2.data.data_ptr()


def test_canonical_experts_are_views() -> None:
    experts = ExpertWeights(
        w13=quantise(bell(1, 2, 256, 128), NVFP4, row_groups=2),
        w2=quantise(bell(2, 2, 128, 128), NVFP4),
    )
    found = canonical(experts)
    assert found.w13.data_ptr() == experts.w13.data.data_ptr()
    assert found.w13_scale is not None
    assert experts.w13.scale is not None
    assert found.w13_scale.data_ptr() == experts.w13.scale.data_ptr()
    assert found.w13_scale.dtype == torch.uint8
