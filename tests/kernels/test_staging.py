"""What enters a kernel, by torch's own operations: ids checked and mapped, empty slots as it wants
them, rows coded, and the rest of its buffers emptied."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from strategies import bell, hashed, unit
from torch import Tensor

from megamoe.formats import (
    E4M3,
    FP8_1X64,
    FP8_ROW,
    FP32,
    MXFP8,
    PLAIN_BF16,
    Format,
    ScaleRule,
    quantise,
)
from megamoe.kernels.base import Batch
from megamoe.kernels.layout.kperm import permute_columns, unpermute_columns
from megamoe.kernels.staging import Staging

STATIC = Format(
    name="static", element=E4M3, scale=FP32, rule=ScaleRule(kind="static", top=0.37)
)  # fmt: skip


def plan_of(**fields: Any) -> Staging:
    sticky = torch.zeros(1, dtype=torch.bool)
    return Staging(**{"num_experts": 4, "rank": 0, "sticky": sticky} | fields)


def buffers(
    count: int, rows: int, k: int, like: Tensor, id_dtype: torch.dtype = torch.int64, **fields: Any
) -> Batch:
    """Filled with what nobody writes."""
    return Batch(
        x=torch.full((rows, like.shape[1]), 3.0).to(like.dtype),
        ids=torch.full((rows, k), 77, dtype=id_dtype),
        weights=torch.full((rows, k), torch.nan),
        count=count,
        tokens=rows,
        **fields,
    )


@given(
    data=st.data(), n=st.integers(0, 4), k=st.integers(1, 3), more=st.integers(0, 3),
    most=st.integers(0, 3), rank=st.integers(0, 3), first=st.integers(0, 9), stale=st.booleans(),
    factor=st.sampled_from([1.0, 2.5]), id_dtype=st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_each_row_is_the_scalar_model(
    data: st.DataObject, n: int, k: int, more: int, most: int, rank: int, first: int, stale: bool,
    factor: float, id_dtype: torch.dtype,
) -> None:  # fmt: skip  # K53
    row = st.lists(st.integers(-2, 6), min_size=k, max_size=k)
    drawn = data.draw(st.lists(row, min_size=n, max_size=n))
    ids = torch.tensor(drawn, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    ids = ids.view(n, k)
    x, weights = bell(1, n, 8).to(torch.bfloat16), unit(2, n, k)
    weights[(ids < 0) | (ids > 5)] = torch.nan
    plan = plan_of(num_experts=6, rank=rank, stale=stale)
    if most:
        counts = torch.from_numpy(hashed(most, 6) >> 40).to(torch.int64) % most + 1
        table = torch.from_numpy(hashed(most + 5, 6, most) >> 40).to(torch.int64) % 50
        plan = dataclasses.replace(plan, replicas=table, counts=counts)
    before = x.clone(), ids.clone(), weights.clone()
    into = buffers(n, n + more, k, x, id_dtype)
    plan(x, ids, weights, into, factor=factor, first=first)

    def physical(t: int, slot: int) -> int:
        expert = drawn[t][slot]
        if not 0 <= expert < 6:
            return -1
        if plan.replicas is None or plan.counts is None:
            return expert
        choice = (rank + first + t + slot) % int(plan.counts[expert])
        return int(plan.replicas[expert, choice])

    assert bool(plan.sticky) is any(expert not in range(-1, 6) for row in drawn for expert in row)
    for t in range(n + more):
        if t >= n:
            assert into.ids[t].tolist() == [-1] * k
            assert not into.weights[t].any()
            assert torch.equal(into.x[t], torch.full((8,), 3.0).bfloat16())  # is not touched
            continue
        found = [physical(t, slot) for slot in range(k)]
        nothing = max(found) < 0
        for slot, expert in enumerate(found):
            # An empty slot weighs 0 whatever its weight was.
            want = float(weights[t, slot] * torch.tensor(factor)) if expert >= 0 else 0.0
            assert float(into.weights[t, slot]) == want
            if expert < 0 and stale:  # an expert of the row: no other rank gets work
                expert = max(*found, 0)
            assert int(into.ids[t, slot]) == expert
        if nothing and stale:
            assert not into.x[t].any()
        else:
            assert torch.equal(into.x[t], x[t])
    for mine, theirs in zip(before, (x, ids, weights), strict=True):  # the caller's are untouched
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_a_row_of_nothing_but_empty_slots_does_not_show_its_token() -> None:
    """A NaN there would come out as NaN * 0 from a kernel that computes every slot."""
    x = torch.full((1, 8), torch.nan, dtype=torch.bfloat16)
    into = buffers(1, 1, 2, x)
    plan_of(stale=True)(x, torch.full((1, 2), -1), torch.full((1, 2), torch.nan), into)
    assert not into.x.any()
    assert not into.weights.any()
    assert into.ids.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_become_empty_and_raise_the_flag(dtype: torch.dtype) -> None:  # K38
    for given_ids, cleaned, flag in (
        ([0, 3, -1], [0, 3, -1], False),
        ([0, 4, -1], [0, -1, -1], True),
        ([-2, 3, 2**31 - 1], [-1, 3, -1], True),
        ([], [], False),
    ):
        plan = plan_of()
        found = plan.physical(torch.tensor([given_ids], dtype=dtype))
        assert found.dtype == torch.int64
        assert found.tolist() == [cleaned]
        assert bool(plan.sticky) is flag
    plan = plan_of(sticky=torch.ones(1, dtype=torch.bool))
    plan.physical(torch.tensor([[0]], dtype=dtype))
    assert bool(plan.sticky)  # until it is looked at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_scaled_in_float32(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    weights = unit(3, 3, 2).to(dtype)
    into = buffers(3, 3, 2, x)
    plan_of()(x, torch.zeros(3, 2, dtype=torch.int64), weights, into, factor=2.5)
    want = weights.to(torch.float32).double() * 2.5
    assert torch.equal(into.weights, want.to(torch.float32))


def test_rows_may_be_taken_as_they_are() -> None:
    x = bell(1, 2, 8).bfloat16()
    into = dataclasses.replace(buffers(2, 4, 1, x), x=x)
    before = x.clone()
    plan_of()(x, torch.tensor([[3], [-1]]), torch.ones(2, 1), into)
    assert torch.equal(x, before)
    assert into.ids.tolist() == [[3], [-1], [-1], [-1]]


@pytest.mark.parametrize(
    ("fmt", "columns", "dtype"),
    [
        (FP8_ROW, 1, torch.float32),
        (FP8_ROW, 4, torch.float32),
        (FP8_1X64, 2, torch.float32),
        (FP8_1X64, 5, torch.float32),
        (MXFP8, 4, torch.uint8),
        (MXFP8, 6, torch.float8_e8m0fnu),
        (STATIC, 0, torch.float32),
    ],
)
@pytest.mark.parametrize("period", [0, 64])
def test_rows_are_coded(fmt: Format, columns: int, dtype: torch.dtype, period: int) -> None:
    x = bell(4, 3, 128).bfloat16()
    want = quantise(x, fmt)
    into = buffers(3, 5, 1, torch.zeros(0, 128, dtype=E4M3.dtype))
    old = into.x.clone()
    if columns:
        into = dataclasses.replace(into, scales=torch.full((5, columns), 2.0).to(dtype))
    order = torch.arange(period, dtype=torch.int32)
    order = (order % 16) * 4 + order // 16 if period else None  # any permutation
    plan_of(fmt=fmt, order=order)(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), into)
    data = want.data.view(torch.uint8)
    for column in range(128):
        source = column if order is None else column // 64 * 64 + int(order[column % 64])
        assert torch.equal(into.x.view(torch.uint8)[:3, column], data[:, source])
    assert torch.equal(into.x[3:].view(torch.uint8), old[3:].view(torch.uint8))
    if into.scales is None:
        return
    assert want.scale is not None
    scales, made = into.scales.view(want.scale.dtype), want.scale
    for column in range(columns):
        if fmt is FP8_ROW:
            assert torch.equal(scales[:3, column], made[:, 0])
        elif column < made.shape[1]:
            assert torch.equal(scales[:3, column], made[:, column])
        else:  # padding
            assert (into.scales[:3, column].float() == 2.0).all()
    assert (into.scales[3:].float() == 2.0).all()


def test_the_order_of_columns_is_the_layouts() -> None:
    x = bell(4, 3, 128).bfloat16()
    order = permute_columns(torch.arange(64, dtype=torch.int32), 64)
    into = buffers(3, 3, 1, torch.zeros(0, 128, dtype=E4M3.dtype))
    plan = plan_of(fmt=STATIC, order=order)
    plan(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), into)
    back = unpermute_columns(into.x.view(torch.uint8), 64)
    assert torch.equal(back, quantise(x, STATIC).data.view(torch.uint8))


def test_plain_rows_take_no_order() -> None:
    x = bell(4, 3, 64).bfloat16()
    into = buffers(3, 3, 1, x)
    order = torch.arange(63, -1, -1, dtype=torch.int32)
    plan = plan_of(fmt=PLAIN_BF16, order=order)
    plan(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), into)
    assert torch.equal(into.x, x)
