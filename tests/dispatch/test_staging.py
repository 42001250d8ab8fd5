"""What enters a kernel: ids checked, empty slots as its datasheet wants them, counts made equal."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from strategies import bell, ids, unit

from megamoe.dispatch.staging import clean_ids, stage
from megamoe.kernels.base import Datasheet
from megamoe.kernels.reference import Reference

SHEETS = [
    dataclasses.replace(
        Reference.sheet,
        empty_slots=empty,
        equal_counts=equal,
        id_dtype=dtype,  # type: ignore[arg-type]
    )
    for empty, equal, dtype in itertools.product(
        ("masked", "stale"), (False, True), (torch.int32, torch.int64)
    )
]


@given(
    data=st.data(), sheet=st.sampled_from(SHEETS), n=st.integers(0, 4), k=st.integers(1, 3),
    more=st.integers(0, 3),
)  # fmt: skip
def test_each_row_is_the_scalar_model(
    data: st.DataObject, sheet: Datasheet, n: int, k: int, more: int
) -> None:
    drawn = torch.tensor(data.draw(ids(n, k, 6)), dtype=torch.int64).view(n, k)
    x = bell(1, n, 8).to(torch.bfloat16)
    weights = unit(2, n, k)
    weights[drawn < 0] = torch.nan
    before = x.clone(), drawn.clone(), weights.clone()
    batch = stage(x, drawn, weights, sheet=sheet, tokens=n + more)
    rows = n + more if sheet.equal_counts else n
    assert batch.tokens == n + more
    assert batch.ids.dtype == sheet.id_dtype
    assert batch.x.dtype == torch.bfloat16
    assert batch.weights.dtype == torch.float32
    assert [len(t) for t in (batch.x, batch.ids, batch.weights)] == [rows] * 3
    for t in range(rows):
        row = drawn[t].tolist() if t < n else [-1] * k
        nothing = all(e < 0 for e in row)
        for slot, expert in enumerate(row):
            found = int(batch.ids[t, slot])
            # An empty slot weighs 0 whatever its weight was (K30), and so does a padded row.
            assert batch.weights[t, slot] == (weights[t, slot] if expert >= 0 else 0.0)
            if expert >= 0:
                assert found == expert
            elif sheet.empty_slots == "masked":
                assert found == -1
            else:  # an expert of the row itself, so that no other rank gets work
                assert found == max(row) if not nothing else found == 0
        if t >= n or (nothing and sheet.empty_slots == "stale"):
            assert not batch.x[t].any()
        else:
            assert torch.equal(batch.x[t], x[t])
    for tensor in (batch.x, batch.ids, batch.weights):
        assert tensor.is_contiguous()
    for mine, theirs in zip(before, (x, drawn, weights), strict=True):  # the caller's are untouched
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_a_row_of_nothing_but_empty_slots_does_not_show_its_token() -> None:
    """A NaN there would come out as NaN * 0 from a kernel that computes every slot (K31, K52)."""
    x = torch.full((1, 8), torch.nan, dtype=torch.bfloat16)
    batch = stage(
        x, torch.full((1, 2), -1), torch.full((1, 2), torch.nan), sheet=SHEETS[-1], tokens=1
    )
    assert not batch.x.any()
    assert not batch.weights.any()
    assert batch.ids.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_become_empty_and_raise_the_flag(dtype: torch.dtype) -> None:  # K22, K31, K38
    for given_ids, cleaned, flag in (
        ([0, 3, -1], [0, 3, -1], False),
        ([0, 4, -1], [0, -1, -1], True),
        ([-2, 3, 2**31 - 1], [-1, 3, -1], True),
        ([], [], False),
    ):
        sticky = torch.zeros(1, dtype=torch.bool)
        found = clean_ids(torch.tensor([given_ids], dtype=dtype), 4, sticky)
        assert found.dtype == torch.int64
        assert found.tolist() == [cleaned]
        assert bool(sticky) is flag
    sticky = torch.ones(1, dtype=torch.bool)
    clean_ids(torch.tensor([[0]], dtype=dtype), 4, sticky)
    assert bool(sticky)  # until it is looked at
