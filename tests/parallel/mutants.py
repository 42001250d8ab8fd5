"""Faults that real engines have shipped, planted in the production path one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.dispatch import session
from megamoe.dispatch.placement import Table
from megamoe.dispatch.shared import SharedFFN
from megamoe.kernels.base import Batch
from megamoe.reference import moe


def ids_off_by_one_rank(patch: pytest.MonkeyPatch, group: Any) -> None:
    honest = Table.physical_ids

    def wrong(self: Table, ids: Tensor, rank: int) -> Tensor:
        found = honest(self, ids, rank)
        total = int(self.replicas.max()) + 1
        seats = -(-total // dist.get_world_size(group))
        return torch.where(found < 0, found, (found + seats) % total)

    patch.setattr(Table, "physical_ids", wrong)


def replica_counted_twice(patch: pytest.MonkeyPatch, group: Any) -> None:
    """Every holder of a replica computes the slot, as if the receivers chose."""
    honest = Table.physical_ids

    def wrong(self: Table, ids: Tensor, rank: int) -> Tensor:
        return torch.cat([honest(self, ids, rank + r) for r in range(int(self.counts.max()))], 1)

    def stage(x: Tensor, ids: Tensor, weights: Tensor, **rest: Any) -> Batch:
        # The same replica twice is one computation; another one is a second.
        k = weights.shape[1]
        for start in range(k, ids.shape[1], k):
            again = (ids[:, start : start + k, None] == ids[:, None, :start]).any(2)
            ids[:, start : start + k][again] = -1
        return honest_stage(x, ids, weights.repeat(1, ids.shape[1] // max(k, 1)), **rest)

    honest_stage = session.stage
    patch.setattr(Table, "physical_ids", wrong)
    patch.setattr(session, "stage", stage)


def empty_slot_wraps_to_the_last_expert(patch: pytest.MonkeyPatch, group: Any) -> None:
    def wrong(self: Table, ids: Tensor, rank: int) -> Tensor:
        return self.replicas[ids, 0]  # -1 is the last row

    patch.setattr(Table, "physical_ids", wrong)


def scaled_twice(patch: pytest.MonkeyPatch, group: Any) -> None:
    honest = session.scaling
    patch.setattr(session, "scaling", lambda *given: honest(*given) ** 2)


def _summed(y: Tensor, group: Any) -> Tensor:
    total = y.to(torch.float32)
    dist.all_reduce(total, group=group)
    return total.to(y.dtype)


def shared_expert_summed_over_ranks(patch: pytest.MonkeyPatch, group: Any) -> None:
    """As in a host that all-reduces what every rank holds whole. Needs equal token counts."""
    above, inside = SharedFFN.__call__, moe.shared_term
    patch.setattr(SharedFFN, "__call__", lambda self, x: _summed(above(self, x), group))
    patch.setattr(moe, "shared_term", lambda *given: _summed(inside(*given), group))


def stale_rows(patch: pytest.MonkeyPatch, group: Any) -> None:
    """A workspace that keeps its last row from the call before."""
    kept: list[Tensor] = []
    honest = session.stage

    def stage(x: Tensor, ids: Tensor, weights: Tensor, **rest: Any) -> Batch:
        batch = honest(x, ids, weights, **rest)
        fresh = batch.x.clone()
        if kept and len(fresh):
            batch = dataclasses.replace(batch, x=torch.cat([fresh[:-1], kept[0][-1:]]))
        kept[:] = [fresh]
        return batch

    patch.setattr(session, "stage", stage)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    plant.__name__: plant
    for plant in (
        ids_off_by_one_rank,
        replica_counted_twice,
        empty_slot_wraps_to_the_last_expert,
        scaled_twice,
        shared_expert_summed_over_ranks,
        stale_rows,
    )
}


@contextmanager
def planted(name: str, group: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch, group)
        yield
