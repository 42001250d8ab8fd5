"""Logical experts to physical slots: against a scalar model, and the failures others shipped."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from parallel.shares import FORMATS, placements, share
from strategies import Case, ids
from torch import Tensor

from megamoe.dispatch.placement import padded, physical, replicas
from megamoe.formats import Format
from megamoe.kernels.staging import Staging
from megamoe.problem import Host, Placement, Request
from megamoe.reference import parallel

CPU = torch.device("cpu")


def physical_ids(placement: Placement, logical: Tensor, rank: int) -> Tensor:
    table = replicas(placement, CPU)
    sticky = torch.zeros(1, dtype=torch.bool)
    staging = Staging(
        num_experts=placement.num_experts,
        rank=rank,
        sticky=sticky,
        replicas=None if table is None else table[0],
        counts=None if table is None else table[1],
    )
    found = staging.physical(logical)
    assert not sticky
    return found


def scalar_home(placement: Placement, expert: int, rank: int, row: int, slot: int) -> int:
    """The physical expert of one slot, from the rule's words alone."""
    if expert < 0:
        return -1
    homes = [
        holder * placement.slots_per_rank + position
        for holder, held in enumerate(placement.slots)
        for position, e in enumerate(held)
        if e == expert
    ]
    return homes[(rank + row + slot) % len(homes)]


@given(data=st.data(), world_size=st.integers(1, 8), experts=st.integers(1, 8))
def test_physical_ids_are_the_scalar_model(
    data: st.DataObject, world_size: int, experts: int
) -> None:
    placement = data.draw(placements(experts, world_size))
    rank = data.draw(st.integers(0, world_size - 1))
    rows, k = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    drawn = data.draw(ids(rows, k, experts))
    logical = torch.tensor(drawn, dtype=torch.int64).view(rows, k)
    found = physical_ids(placement, logical, rank)
    assert found.tolist() == [
        [scalar_home(placement, e, rank, t, s) for s, e in enumerate(row)]
        for t, row in enumerate(logical.tolist())
    ]
    # The reference chose replicas with code of its own.
    assert torch.equal(found, parallel.physical(logical, placement, rank))


@given(data=st.data(), world_size=st.integers(1, 8), experts=st.integers(1, 8))
def test_each_slot_goes_to_one_slot_that_holds_its_expert(
    data: st.DataObject, world_size: int, experts: int
) -> None:  # K30, K32, K36
    placement = data.draw(placements(experts, world_size))
    logical = torch.arange(-1, experts).repeat(3, 1)
    for rank in range(world_size):
        found = physical_ids(placement, logical, rank)
        for row, wanted in zip(found.tolist(), logical.tolist(), strict=True):
            for home, expert in zip(row, wanted, strict=True):
                if expert == -1:
                    assert home == -1
                    continue
                holder, position = divmod(home, placement.slots_per_rank)
                assert placement.slots[holder][position] == expert


def test_replicas_take_turns_over_ranks_rows_and_slots() -> None:  # K36
    placement = Placement(num_experts=2, slots=((0, 1), (0, 1)))
    logical = torch.zeros(4, 2, dtype=torch.int64)
    for rank in range(2):
        found = physical_ids(placement, logical, rank)
        assert (found == 0).sum() == (found == 2).sum() == 4


def test_a_count_that_does_not_divide() -> None:  # K35
    placement = Placement.contiguous(10, 4)
    assert [len(held) for held in placement.slots] == [3, 3, 2, 2]
    assert physical(placement) == Placement.contiguous(12, 4)
    found = physical_ids(placement, torch.arange(10)[:, None], 0)
    named = set(found.flatten().tolist())
    assert named == set(range(12)) - {8, 11}  # the two padding slots receive no token


def test_256_experts_on_3_ranks() -> None:  # K35
    assert [len(held) for held in Placement.contiguous(256, 3).slots] == [86, 85, 85]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tensor_parallelism_around_the_group_places_nothing(tp_size: int) -> None:  # K34
    placement = Placement.contiguous(8, 4)
    request = Request(
        hidden_size=64, intermediate_size=64, placement=placement, top_k=2, max_tokens_per_rank=4,
        host=Host(tp_size=tp_size),
    )  # fmt: skip
    found = physical_ids(request.placement, torch.arange(8)[None], 3)
    assert found.tolist() == [list(range(8))]


# --- padded weights -------------------------------------------------------------------------------


@given(data=st.data(), world_size=st.integers(1, 5), fmt=st.sampled_from(FORMATS))
def test_padded_shares_hold_experts_in_place_and_nothing_else(
    data: st.DataObject, world_size: int, fmt: Format
) -> None:  # K54: bytes of an empty slot are never what happened to lie there
    experts = data.draw(st.integers(1, 4))
    case = Case(
        experts=experts, hidden_size=32, intermediate_size=32, weights=fmt, bias=True, seed=experts
    )
    whole = case.layer()
    placement = data.draw(placements(experts, world_size))
    for rank in range(world_size):
        full = padded(share(whole, placement, rank))
        assert full.experts.count == placement.slots_per_rank
        assert full.placement == physical(placement)
        assert full.rank == rank
        held = [*placement.slots[rank], *[-1] * placement.slots_per_rank]
        first = next((e for e in held if e >= 0), None)
        pairs = zip(full.experts.tensors, whole.experts.tensors, strict=True)
        for mine, theirs in pairs:
            for seat in range(full.experts.count):
                expert = held[seat] if held[seat] >= 0 else first
                found = mine[seat].contiguous().view(torch.uint8)
                if expert is None:
                    assert not found.any()
                else:
                    assert torch.equal(found, theirs[expert].contiguous().view(torch.uint8))


def test_a_full_share_is_not_copied() -> None:
    whole = Case(experts=4).layer()
    assert padded(whole).experts.w13.data.data_ptr() == whole.experts.w13.data.data_ptr()
    assert dataclasses.replace(padded(whole), router=whole.router).experts is whole.experts


def test_contiguous_experts_need_no_look_up_and_all_others_do() -> None:
    for experts, world in ((4, 1), (4, 2), (8, 4), (0, 1)):
        assert replicas(Placement.contiguous(experts, world), CPU) is None
    for slots in (
        ((1, 0), (2, 3)),
        ((0, 1, 2), (3,)),
        ((0, 1), (2, 3, 0)),
        ((0, -1, 1), (2, 3, -1)),
    ):
        assert replicas(Placement(num_experts=4, slots=slots), CPU) is not None
