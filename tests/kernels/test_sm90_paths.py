"""The production path of every SM90 kernel on the emulated device: bits of the one-rank reference.

Prepare, placement, layout, staging, session and `forward`, over ranks, routings, empty slots, idle
ranks, and uneven, permuted and replicated experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from emulated.layers import PLAIN_BF16, Layer, differences, layers
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.formats import Format
from megamoe.problem import Activation

UPPER = (Activation(), Activation(limit=1.0), Activation(limit=0.75))


@dataclass(frozen=True, kw_only=True)
class Path:
    """What of a kernel's datasheet is walked here."""

    kernel: str
    weights: tuple[Format, ...]
    worlds: tuple[int, ...] = (1, 2, 3, 4, 8)
    top_k: tuple[int, ...] = (1, 2, 3)
    activations: tuple[Activation, ...] = UPPER


PATHS = (Path(kernel="sm90_pull_bf16", weights=(PLAIN_BF16,)),)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.kernel)
@settings(max_examples=8)
@given(data=st.data())
def test_bits_are_the_reference_s(path: Path, data: st.DataObject) -> None:
    case: Layer = data.draw(layers(**vars(path)))
    assert differences(case) == []
