"""The column order of the NVFP4 pull kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import BadInput
from megamoe.kernels.layout import (
    pack_codes,
    permute_columns,
    permute_payload,
    unpermute_columns,
    unpermute_payload,
)
from megamoe.kernels.layout.kperm import swap_scale_pairs


def old_place(new: int, period: int) -> int:
    """Which column stands at place `new` of a chunk: its bits, moved."""
    run, rest = new % 4, new // 4
    if period == 32:
        pair, second, half = rest % 2, rest // 2 % 2, rest // 4
        return 16 * second + 8 * pair + 4 * half + run
    quad, half, eighth = rest % 4, rest // 4 % 2, rest // 8
    return 16 * quad + 8 * eighth + 4 * half + run


@pytest.mark.parametrize("period", [32, 64])
def test_columns_by_their_definition(period: int) -> None:
    x = torch.arange(2 * period)
    expected = [chunk + old_place(p, period) for chunk in (0, period) for p in range(period)]
    assert permute_columns(x, period).tolist() == expected


@pytest.mark.parametrize("period", [32, 64])
def test_eight_lane_values_of_a_row_share_one_scale(period: int) -> None:
    """What the permutation is for: columns 4c .. 4c+3 and 16+4c .. of a K32 fragment, one K16
    block.
    """
    blocks = permute_columns(torch.arange(period), period) // 16
    for fragment in blocks.view(-1, 2, 4, 4):  # (K32 fragment, half, lane of four, run)
        for lane in range(4):
            assert len(set(fragment[:, lane].flatten().tolist())) == 1


@given(
    period=st.sampled_from((0, 32, 64)),
    chunks=st.integers(0, 3),
    dim=st.sampled_from((0, 1, 2, -1, -2)),
)
def test_round_trip(period: int, chunks: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = chunks * 64
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    there = permute_columns(x, period, dim)
    assert there.shape == x.shape
    assert torch.equal(unpermute_columns(there, period, dim), x)


@given(
    period=st.sampled_from((0, 32, 64)),
    chunks=st.integers(0, 3),
    lead=st.lists(st.integers(0, 3), max_size=2),
)
def test_payload_moves_as_its_codes_do(period: int, chunks: int, lead: list[int]) -> None:
    generator = torch.Generator().manual_seed(chunks)
    codes = torch.randint(0, 16, (*lead, chunks * 64), dtype=torch.uint8, generator=generator)
    payload = pack_codes(codes)
    there = permute_payload(payload, period)
    assert torch.equal(there, pack_codes(permute_columns(codes, period)))
    assert torch.equal(unpermute_payload(there, period), payload)


def test_scale_pairs() -> None:
    scales = torch.arange(2 * 32 * 4, dtype=torch.uint8).view(2, 32, 4)
    swapped = swap_scale_pairs(scales)
    assert torch.equal(swap_scale_pairs(swapped), scales)
    for row in range(32):
        for group in range(4):
            upper = row % 16 < 8
            if upper and group % 2:
                source = row + 8, group - 1
            elif not upper and group % 2 == 0:
                source = row - 8, group + 1
            else:
                source = row, group
            assert torch.equal(swapped[:, row, group], scales[:, source[0], source[1]])


def test_refusals() -> None:
    with pytest.raises(BadInput, match="nvfp4_kperm 16 is none of 0, 32, 64"):
        permute_columns(torch.zeros(64), 16)
    with pytest.raises(BadInput, match="32 is not a multiple of 64"):
        permute_columns(torch.zeros(32), 64)
    with pytest.raises(BadInput, match="not a multiple of"):
        permute_payload(torch.zeros(16, dtype=torch.uint8), 64)
