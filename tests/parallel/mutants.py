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
from megamoe.dispatch.shared import SharedFFN
from megamoe.kernels.base import Batch
from megamoe.kernels.plain import PlainWorkspace
from megamoe.kernels.staging import Staging
from megamoe.reference import moe


def ids_off_by_one_rank(patch: pytest.MonkeyPatch, group: Any) -> None:
    honest = Staging.physical

    def wrong(self: Staging, ids: Tensor, first: int = 0) -> Tensor:
        found = honest(self, ids, first)
        assert self.replicas is not None
        total = int(self.replicas.max()) + 1
        seats = -(-total // dist.get_world_size(group))
        return torch.where(found < 0, found, (found + seats) % total)

    patch.setattr(Staging, "physical", wrong)


def replica_counted_twice(patch: pytest.MonkeyPatch, group: Any) -> None:
    """Every holder of a replica computes the slot, as if the receivers chose: a second one's answer
    comes on top of the first's."""
    honest = PlainWorkspace.run
    stagings: list[Staging] = []
    init = session.Staging

    def seen(**fields: Any) -> Staging:
        stagings.append(init(**fields))
        return stagings[-1]

    def twice(self: PlainWorkspace, batch: Batch, out: Tensor) -> None:
        honest(self, batch, out)
        table, counts = stagings[-1].replicas, stagings[-1].counts
        assert table is not None
        assert counts is not None
        # Physical ids to those of the logical expert's next holder, or to none.
        after = torch.full((int(table.max()) + 1,), -1)
        for row, count in zip(table.tolist(), counts.tolist(), strict=True):
            for i in range(count) if count > 1 else ():
                after[row[i]] = row[(i + 1) % count]
        ids = torch.where(batch.ids < 0, -1, after[batch.ids.clamp(min=0)])
        more = torch.empty_like(out)
        honest(self, dataclasses.replace(batch, ids=ids), more)
        out += more

    patch.setattr(session, "Staging", seen)
    patch.setattr(PlainWorkspace, "run", twice)


def empty_slot_wraps_to_the_last_expert(patch: pytest.MonkeyPatch, group: Any) -> None:
    def wrong(self: Staging, ids: Tensor, first: int = 0) -> Tensor:
        assert self.replicas is not None
        return self.replicas[ids, 0]  # -1 is the last row

    patch.setattr(Staging, "physical", wrong)


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


def output_summed_over_ranks(patch: pytest.MonkeyPatch, group: Any) -> None:  # K29
    """As in a host that takes what a rank returns for a partial sum."""
    honest = PlainWorkspace.run

    def run(self: PlainWorkspace, batch: Batch, out: Tensor) -> None:
        honest(self, batch, out)
        out.copy_(_summed(out, group))

    patch.setattr(PlainWorkspace, "run", run)


def stale_rows(patch: pytest.MonkeyPatch, group: Any) -> None:
    """A workspace that keeps its last row from the call before."""
    kept: list[Tensor] = []
    honest = PlainWorkspace.run

    def run(self: PlainWorkspace, batch: Batch, out: Tensor) -> None:
        fresh = batch.x.clone()
        if kept and len(fresh):
            batch = dataclasses.replace(batch, x=torch.cat([fresh[:-1], kept[0][-1:]]))
        kept[:] = [fresh]
        honest(self, batch, out)

    patch.setattr(PlainWorkspace, "run", run)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    plant.__name__: plant
    for plant in (
        ids_off_by_one_rank,
        replica_counted_twice,
        empty_slot_wraps_to_the_last_expert,
        scaled_twice,
        shared_expert_summed_over_ranks,
        output_summed_over_ranks,
        stale_rows,
    )
}


@contextmanager
def planted(name: str, group: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch, group)
        yield
