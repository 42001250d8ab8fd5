"""The production path of every megakernel on the emulated device: the bits of one rank.

Prepare, placement, layout, staging, session and `forward`, over ranks, routings, empty slots, idle
ranks, and uneven, permuted and replicated experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from emulated.layers import HIDDEN, Layer, differences, layers
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.dispatch.machine import H200, SM120
from megamoe.formats import (
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
    Format,
)
from megamoe.problem import Activation, Machine

UPPER = (Activation(), Activation(limit=1.0), Activation(limit=0.75))


@dataclass(frozen=True, kw_only=True)
class Path:
    """What of a kernel's datasheet is walked here."""

    kernel: str
    weights: tuple[Format, ...]
    worlds: tuple[int, ...] = (1, 2, 3, 4, 8)
    top_k: tuple[int, ...] = (1, 2, 3)
    activations: tuple[Activation, ...] = UPPER
    hidden: int = HIDDEN
    machine: Machine = H200


SYMMETRIC = tuple(Activation(limit=a.limit, symmetric=True) for a in UPPER)
PUSH_TOP_K = (1, 2, 4)
BF16_FORMATS = (PLAIN_BF16, MXFP4, NVFP4, MXFP8, FP8_BLOCK128_E8M0)

PATHS = (
    Path(kernel="sm90_pull_bf16", weights=BF16_FORMATS),
    Path(kernel="sm90_pull_fp8", weights=(FP8_BLOCK128, FP8_BLOCK128_BF16, FP8_BLOCK128_E8M0)),
    Path(kernel="sm90_pull_mxfp4", weights=(MXFP4,)),
    Path(kernel="sm90_pull_nvfp4", weights=(NVFP4,)),
    Path(kernel="sm90_push_bf16", weights=BF16_FORMATS, top_k=PUSH_TOP_K, activations=SYMMETRIC),
    Path(
        kernel="sm90_push_fp8",
        weights=(FP8_BLOCK128, FP8_BLOCK128_BF16, FP8_BLOCK128_E8M0),
        top_k=PUSH_TOP_K,
        activations=(Activation(),),
    ),
    Path(kernel="sm90_standalone_mxfp4", weights=(MXFP4,), worlds=(1, 2, 4, 8), top_k=(1, 2)),
    Path(kernel="sm90_standalone_nvfp4", weights=(NVFP4,), worlds=(4, 8), top_k=(1, 2)),
    Path(
        kernel="sm120_mxfp4_split",
        weights=(MXFP4,),
        worlds=tuple(range(1, 9)),
        top_k=(1, 2),
        machine=SM120,
    ),
    Path(
        kernel="sm120_mxfp4_cake",
        weights=(MXFP4,),
        worlds=tuple(range(2, 9)),
        activations=(Activation(), Activation(limit=1.0)),
        hidden=512,
        machine=SM120,
    ),
    Path(
        kernel="sm120_mxfp8",
        weights=(MXFP8,),
        worlds=tuple(range(1, 9)),
        activations=(Activation(),),
        machine=SM120,
    ),
)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.kernel)
@settings(max_examples=8)
@given(data=st.data())
def test_bits_are_the_reference_s(path: Path, data: st.DataObject) -> None:
    case: Layer = data.draw(layers(**vars(path)))
    assert differences(case) == []
