"""MXFP4 in the exponent window."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_values import fp4_values, mxfp4_values

from megamoe.errors import BadInput
from megamoe.kernels.layout import (
    fold_window,
    neutral_zero_blocks,
    pack_codes,
    unfold_window,
    unpack_codes,
    window_exactness,
)

MAGNITUDES = [Fraction(m) for m in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def one_expert(codes: list[int], raised: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of these codes that the fold must raise by `raised`, beside one at the top."""
    block = torch.tensor(codes + [0] * (32 - len(codes)), dtype=torch.uint8)
    payload = pack_codes(torch.cat((block, torch.full((32,), 2, dtype=torch.uint8))))
    top = 200
    scales = torch.tensor([top - 11 - raised, top], dtype=torch.uint8)
    return payload.view(1, 1, -1), scales.view(1, 1, 2)


@pytest.mark.parametrize("raised", [*range(8), 100, 127, 128, 129, 189])
def test_every_code_is_divided_to_nearest_ties_away(raised: int) -> None:
    payload, scales = one_expert(list(range(16)), raised)
    folded = fold_window(payload, scales)
    assert folded.offset.flatten().tolist() == [1, 12]
    assert folded.floor_byte.tolist() == [189]
    got = unpack_codes(folded.payload).flatten()[:16].tolist()
    for code in range(16):
        wanted = MAGNITUDES[code & 7] / 2**raised
        distance = [abs(m - wanted) for m in MAGNITUDES]
        magnitude = max(m for m in range(8) if distance[m] == min(distance))
        # Only -0 loses its sign.
        assert got[code] == (magnitude | (code & 8) if code != 8 else 0)

    report = window_exactness(payload, scales)
    changed = sum(MAGNITUDES[got[c] & 7] * 2**raised != MAGNITUDES[c & 7] for c in range(16))
    assert report.counts.flatten().tolist() == [changed, 0]
    assert report.elements == 64
    assert report.inexact == changed
    assert report.exact == (changed == 0)
    worst = max(
        abs(MAGNITUDES[got[c]] * 2**raised - MAGNITUDES[c]) / MAGNITUDES[c] for c in range(1, 8)
    )
    assert report.worst == float(worst)


@settings(deadline=None)
@given(
    data=st.data(),
    experts=st.integers(0, 3),
    rows=st.integers(0, 3),
    groups=st.integers(0, 3),
)
def test_inside_the_window_every_value_is_kept(
    data: st.DataObject, experts: int, rows: int, groups: int
) -> None:
    count = experts * rows * groups
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    payload = torch.randint(
        0, 256, (experts, rows, 16 * groups), dtype=torch.uint8, generator=generator
    )
    lowest = data.draw(st.lists(st.integers(0, 243), min_size=experts, max_size=experts))
    spread = data.draw(st.lists(st.integers(0, 11), min_size=count, max_size=count))
    scales = torch.tensor(spread, dtype=torch.uint8).view(experts, rows, groups)
    scales = scales + torch.tensor(lowest, dtype=torch.uint8).view(-1, 1, 1)
    folded = fold_window(payload, scales)
    assert window_exactness(payload, scales).exact
    assert set(folded.offset.flatten().tolist()) <= set(range(1, 13))
    back, back_scales = unfold_window(folded)
    assert torch.equal(back_scales, scales)
    codes = unpack_codes(payload)
    assert torch.equal(unpack_codes(back), torch.where(codes == 8, 0, codes))


@settings(deadline=None)
@given(data=st.data(), blocks=st.integers(1, 4))
def test_report_is_the_difference_of_values(data: st.DataObject, blocks: int) -> None:
    raw = data.draw(st.binary(min_size=16 * blocks, max_size=16 * blocks))
    payload = torch.tensor(list(raw), dtype=torch.uint8).view(1, blocks, 16)
    # Spread so that fp64 holds every value.
    bytes_ = data.draw(st.lists(st.integers(100, 140), min_size=blocks, max_size=blocks))
    scales = torch.tensor(bytes_, dtype=torch.uint8).view(1, blocks, 1)
    report = window_exactness(payload, scales)
    true = mxfp4_values(payload, scales)
    got = mxfp4_values(*unfold_window(fold_window(payload, scales)))
    changed = (got != true).view(1, blocks, 1, 32).sum(-1)
    assert torch.equal(report.counts, changed)
    assert window_exactness(*unfold_window(fold_window(payload, scales))).exact


def test_experts_are_folded_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    payload = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (3, 4, 2), dtype=torch.uint8, generator=generator)
    whole = fold_window(payload, scales)
    for expert in range(3):
        alone = fold_window(payload[expert : expert + 1], scales[expert : expert + 1])
        assert torch.equal(alone.payload[0], whole.payload[expert])
        assert torch.equal(alone.offset[0], whole.offset[expert])
        assert alone.floor_byte[0] == whole.floor_byte[expert]


def test_scales_of_zero_blocks_no_longer_cost_precision() -> None:
    """A zero block with scale 1.0 above blocks around 2**-20 would round all of those."""
    ones = torch.full((32,), 3, dtype=torch.uint8)
    zeros = torch.tensor([0, 8] * 16, dtype=torch.uint8)
    payload = pack_codes(torch.stack((ones, zeros, ones))).view(1, 3, 16)
    scales = torch.tensor([107, 127, 105], dtype=torch.uint8).view(1, 3, 1)
    assert not window_exactness(payload, scales).exact
    neutral = neutral_zero_blocks(payload, scales)
    assert neutral.flatten().tolist() == [107, 107, 105]
    assert window_exactness(payload, neutral).exact
    assert torch.equal(mxfp4_values(payload, neutral), mxfp4_values(payload, scales))


def test_neutral_scales_where_all_is_zero() -> None:
    payload = torch.zeros(2, 2, 16, dtype=torch.uint8)
    scales = torch.tensor([[1, 127], [255, 0]], dtype=torch.uint8).view(2, 2, 1)
    neutral = neutral_zero_blocks(payload, scales)
    assert not fp4_values(fold_window(payload, neutral).payload).any()
    empty = torch.zeros(0, 2, 1, dtype=torch.uint8)
    assert neutral_zero_blocks(torch.zeros(0, 2, 16, dtype=torch.uint8), empty) is empty


def test_refusals() -> None:
    payload = torch.zeros(2, 1, 16, dtype=torch.uint8)
    nan = torch.tensor([127, 255], dtype=torch.uint8).view(2, 1, 1)
    with pytest.raises(BadInput, match="E8M0 scale of expert 1 is NaN"):
        fold_window(payload, nan)
    with pytest.raises(BadInput, match="is not of shape"):
        fold_window(payload, torch.zeros(2, 1, 2, dtype=torch.uint8))
    with pytest.raises(BadInput, match="FP4 columns 16 is not a multiple of 32"):
        fold_window(payload[..., :8], nan[..., :0])
    with pytest.raises(BadInput, match=r"E8M0 scales torch\.float8_e8m0fnu is not uint8"):
        fold_window(payload, nan.view(torch.float8_e8m0fnu))
