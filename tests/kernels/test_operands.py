"""Experts as the adapters hand them to layouts: views, or exact where they say so."""

from __future__ import annotations

import pytest
import torch
from strategies import bell

from megamoe.errors import Unsupported
from megamoe.formats import (
    FP8_BLOCK32_E8M0,
    FP8_BLOCK128,
    FP8_BLOCK128_E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    dequantise,
    plain,
    quantise,
)
from megamoe.kernels.operands import canonical, exact_bf16
from megamoe.problem import ExpertWeights


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
