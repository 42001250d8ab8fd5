"""The row orders of w13."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import BadInput
from megamoe.kernels.layout import (
    PULL_ROWS,
    PUSH_BF16_ROWS,
    PUSH_FP8_ROWS,
    deinterleave_gate_up,
    interleave_gate_up,
)

GRANULARITIES = (1, PULL_ROWS, PUSH_BF16_ROWS, PUSH_FP8_ROWS)


@pytest.mark.parametrize("rows", GRANULARITIES)
def test_every_row_lands_where_the_kernel_reads_it(rows: int) -> None:  # K9
    groups = 3
    half = groups * rows
    x = torch.arange(2 * half).view(2 * half, 1)
    got = interleave_gate_up(x, rows)[:, 0].tolist()
    expected = [
        logical
        for group in range(groups)
        for first in (group * rows, half + group * rows)
        for logical in range(first, first + rows)
    ]
    assert got == expected


def test_eight_rows_are_gate_then_up() -> None:  # K9
    """The literal order for intermediate_size 16: a wrong granularity passes most round trips."""
    x = torch.arange(32).view(32, 1)
    got = interleave_gate_up(x, 8)[:, 0].tolist()
    assert got == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


@given(
    rows=st.sampled_from(GRANULARITIES),
    groups=st.integers(0, 3),
    columns=st.integers(0, 3),
    lead=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from((torch.uint8, torch.bfloat16, torch.float8_e4m3fn)),
)
def test_round_trip(
    rows: int, groups: int, columns: int, lead: list[int], dtype: torch.dtype
) -> None:
    shape = (*lead, 2 * groups * rows, columns)
    x = torch.arange(torch.Size(shape).numel() * dtype.itemsize).to(torch.uint8).view(dtype)
    x = x.view(shape)
    there = interleave_gate_up(x, rows)
    back = deinterleave_gate_up(there, rows)
    assert there.shape == back.shape == x.shape
    assert there.is_contiguous()
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


@given(rows=st.sampled_from(GRANULARITIES[1:]), groups=st.integers(1, 3))
def test_takes_views(rows: int, groups: int) -> None:
    x = torch.arange(4 * groups * rows).view(2, 2 * groups * rows).t()
    assert torch.equal(interleave_gate_up(x, rows), interleave_gate_up(x.contiguous(), rows))


@pytest.mark.parametrize("inverse", [False, True])
def test_misaligned_rows_are_refused(inverse: bool) -> None:
    function = deinterleave_gate_up if inverse else interleave_gate_up
    with pytest.raises(BadInput, match="24 is not a multiple of 16"):
        function(torch.zeros(1, 24, 4), 8)
    with pytest.raises(BadInput, match="has no rows"):
        function(torch.zeros(24), 8)
