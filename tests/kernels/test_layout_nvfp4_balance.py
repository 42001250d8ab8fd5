"""NVFP4's two levels of scale, moved against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_values import nvfp4_values

from megamoe.errors import BadInput
from megamoe.kernels.layout import PULL_TOP, STANDALONE_TOP, balance_nvfp4, pack_codes
from megamoe.kernels.layout.e4m3 import fp4_products

TOPS = (PULL_TOP, STANDALONE_TOP)


def e4m3(code: int) -> float:
    return float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn))


def block(codes: list[int]) -> torch.Tensor:
    return pack_codes(torch.tensor(codes + [0] * (16 - len(codes)), dtype=torch.uint8))


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("largest", range(1, 127))
def test_largest_scale_ends_just_below_the_top(top: float, largest: int) -> None:
    payload = block([7]).view(1, 1, 8)
    scales = torch.tensor([[[largest]]], dtype=torch.uint8)
    out = balance_nvfp4(payload, scales, torch.tensor([0.3]), top=top)
    assert top / 2 < e4m3(int(out.scales)) <= top
    assert out.exactness.exact
    assert torch.equal(out.payload, payload)
    before = nvfp4_values(payload, scales, torch.tensor([0.3]))
    assert torch.equal(nvfp4_values(out.payload, out.scales, out.global_scale), before)


@pytest.mark.parametrize("small", range(1, 127))
def test_small_scales_beside_a_large_one(small: int) -> None:
    """Every scale below 448 in one expert, moved down three binades: exact, or said not to be."""
    for codes in ([1, 2, 3, 4, 5, 6, 7], [2, 4, 6, 7], [4, 6], [6], [0], [8], [15, 9]):
        payload = torch.stack((block([7]), block(codes))).view(1, 2, 8)
        scales = torch.tensor([126, small], dtype=torch.uint8).view(1, 2, 1)
        one = torch.ones(1)
        out = balance_nvfp4(payload, scales, one, top=STANDALONE_TOP)
        assert out.global_scale == 8.0
        before = nvfp4_values(payload, scales, one)
        after = nvfp4_values(out.payload, out.scales, out.global_scale)
        changed = (after != before).view(1, 2, 1, 16).sum(-1)
        assert torch.equal(out.exactness.counts, changed)
        fits = e4m3(small) / 8 >= 2.0**-6 or e4m3(small) / 8 % 2.0**-9 == 0
        assert not fits or out.exactness.exact
        # Never worse than half a step of the smallest block scale, 8 * 2**-9.
        assert float((after - before).abs().max()) <= 6 * 8 * 2.0**-10


def test_codes_are_halved_where_that_keeps_the_values() -> None:
    """A scale of 1.5 * 2**-6 moved down by 8 is no E4M3 number; doubled it is.

    Rounded to a neighbour instead, the code of 1.0 would have to become 0.75.
    """
    payload = torch.stack((block([7]), block([2, 13, 0]))).view(1, 2, 8)
    scales = torch.tensor([126, e4m3_code(1.5 * 2.0**-6)], dtype=torch.uint8).view(1, 2, 1)
    out = balance_nvfp4(payload, scales, torch.ones(1), top=STANDALONE_TOP)
    assert out.exactness.exact
    assert out.scales.flatten().tolist() == [e4m3_code(56.0), e4m3_code(3.0 * 2.0**-9)]
    assert torch.equal(out.payload[0, 1], block([1, 11, 0]))


def test_the_tops_are_the_largest_scales_that_do_not_overflow() -> None:
    six = 7
    standalone = fp4_products(0)[:, six].tolist()
    assert standalone[e4m3_code(STANDALONE_TOP)] == 0x7E
    assert standalone[e4m3_code(STANDALONE_TOP) + 1] == 0x7F
    assert e4m3_code(PULL_TOP) == 126
    assert max(fp4_products(-3)[:, six].tolist()) < 0x7F


def e4m3_code(value: float) -> int:
    return next(code for code in range(127) if e4m3(code) == value)


@pytest.mark.parametrize("apart", [0, 1, 3, -2, 6])
def test_gate_and_up_scales_a_power_of_two_apart_are_shared(apart: int) -> None:  # K60
    generator = torch.Generator().manual_seed(1)
    payload = torch.randint(0, 256, (2, 8, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x48, 0x60, (2, 8, 2), dtype=torch.uint8, generator=generator)
    both = torch.tensor([[0.011, 0.011 * 2.0**apart], [3.0, 3.0 * 2.0**apart]])
    for top in TOPS:
        out = balance_nvfp4(payload, scales, both, top=top)
        assert out.exactness.exact
        after = nvfp4_values(out.payload, out.scales, out.global_scale)
        assert torch.equal(after, nvfp4_values(payload, scales, both))
        largest = out.scales.view(torch.float8_e4m3fn).to(torch.float64).amax((1, 2))
        assert bool((largest <= top).all())
        assert bool((largest > top / 2).all())


def test_other_ratios_are_rounded_and_reported() -> None:  # K58, K60
    generator = torch.Generator().manual_seed(2)
    payload = torch.randint(0, 256, (1, 64, 64), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x40, 0x7F, (1, 64, 8), dtype=torch.uint8, generator=generator)
    both = torch.tensor([[0.011, 0.013]])
    out = balance_nvfp4(payload, scales, both, top=PULL_TOP)
    before = nvfp4_values(payload, scales, both)
    after = nvfp4_values(out.payload, out.scales, out.global_scale)
    changed = (after != before).view(1, 64, 8, 16).sum(-1)
    assert torch.equal(out.exactness.counts, changed)
    gate = out.exactness.counts[:, :32]
    assert int(gate.sum()) > 0
    assert int(out.exactness.counts[:, 32:].sum()) == 0, "the leader keeps its values"
    # The nearest E4M3 scale is within 2**-4, and no code had to change for it.
    assert out.exactness.worst <= 2.0**-4
    error = torch.where(before == 0, 0.0, (after - before) / before).abs().max()
    assert out.exactness.worst == pytest.approx(float(error))


@settings(deadline=None)
@given(
    data=st.data(),
    experts=st.integers(0, 2),
    rows=st.integers(0, 2),
    groups=st.integers(0, 2),
    top=st.sampled_from(TOPS),
    split=st.booleans(),
)
def test_report_is_the_difference_of_values(
    data: st.DataObject, experts: int, rows: int, groups: int, top: float, split: bool
) -> None:
    shape = (experts, 2 * rows, groups)
    count = torch.Size(shape).numel()
    raw = data.draw(st.binary(min_size=8 * count, max_size=8 * count))
    payload = torch.tensor(list(raw), dtype=torch.uint8).view(*shape[:2], 8 * groups)
    bytes_ = data.draw(st.lists(st.integers(0, 126), min_size=count, max_size=count))
    scales = torch.tensor(bytes_, dtype=torch.uint8).view(shape)
    extent = (experts, 2) if split else (experts,)
    wide = st.floats(2.0**-20, 2.0**10, width=32)
    size = torch.Size(extent).numel()
    shared = torch.tensor(data.draw(st.lists(wide, min_size=size, max_size=size))).view(extent)
    kept = payload.clone(), scales.clone(), shared.clone()
    out = balance_nvfp4(payload, scales, shared, top=top)
    before = nvfp4_values(payload, scales, shared)
    after = nvfp4_values(out.payload, out.scales, out.global_scale)
    changed = (after != before).view(*shape, 16).sum(-1)
    assert torch.equal(out.exactness.counts, changed)
    assert out.exactness.elements == before.numel()
    assert bool((out.scales.view(torch.float8_e4m3fn).to(torch.float64) <= top).all())
    assert all(map(torch.equal, kept, (payload, scales, shared))), "inputs are left alone"
    assert bool((after[before == 0] == 0).all())


def test_refusals() -> None:
    payload = block([7]).view(1, 1, 8)
    scales = torch.tensor([[[0x38]]], dtype=torch.uint8)
    one = torch.ones(1)
    for code in (127, 128, 255):
        with pytest.raises(BadInput, match=f"block scales {code} is NaN or negative"):
            balance_nvfp4(payload, torch.full_like(scales, code), one, top=PULL_TOP)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="not all positive and finite"):
            balance_nvfp4(payload, scales, torch.tensor([bad]), top=PULL_TOP)
    with pytest.raises(BadInput, match=r"neither shape \(1,\) nor \(1, 2\)"):
        balance_nvfp4(payload, scales, torch.ones(1, 3), top=PULL_TOP)
    with pytest.raises(BadInput, match="leaves fp32"):
        balance_nvfp4(payload, scales, torch.tensor([1e-45]), top=PULL_TOP)
