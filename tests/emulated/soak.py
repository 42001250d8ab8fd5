"""Walks of serving steps through the emulated device: the task of the GPU's walk, on threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from emulated.cluster import run_ranks
from emulated.device import emulated
from megamoe.dispatch.machine import H200
from megamoe.kernels.base import Kernel
from megamoe.problem import Machine
from megamoe.suite import run, serve
from megamoe.suite.cases import Shape, State, finish
from megamoe.suite.pool import Outcome
from megamoe.suite.soak import Entry, merged, placements

TINY = Shape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, capacity=8, limit=1.0)
PIECE = 250  # steps that one set of threads runs; a piece ends with a close
ROWS = 132


def soak(
    kernel: type[Kernel],
    *,
    steps: int,
    seed: int = 0,
    first: int = 0,
    world: int = 4,
    shape: Shape = TINY,
    machine: Machine = H200,
    chapter: int = PIECE,
    rows: int = ROWS,
    tell: Callable[[int], Any] = lambda number: None,
) -> Entry:
    """The record of a walk, and how often the device ``launched`` on each rank. It ends early after
    a piece in which a step failed; every piece must give its workspaces back.

    tell: gets the number of each step before rank 0 runs it.
    """
    parts: list[Entry] = []
    shape = run.shape_of(kernel, shape)
    where = placements(kernel, shape, world, machine)
    assert where, "the kernel takes no placement"
    at, entry = first, Entry()
    off = {"MEGAMOE_TUNING": "off"}  # times of a stand-in say nothing, and must not be kept
    with mock.patch.dict(os.environ, off), emulated(machine) as device:
        while at < first + steps and not (entry and entry["wrong_steps"]):
            stop = min(first + steps, at + PIECE - at % PIECE)

            def work(rank: int, at: int = at, stop: int = stop) -> Entry:
                def phase(name: str) -> None:
                    if rank == 0 and name.startswith("step "):
                        tell(int(name.split(":")[0].removeprefix("step ")))

                group = dist.group.WORLD if world > 1 else None
                state = State(torch.device("cpu"), group, {})
                found = serve.serve(
                    phase, rank, world, state=state, kernel=kernel.sheet.name, shape=shape,
                    seed=seed, first=at, steps=stop - at, placements=where, rows=rows,
                    chapter=chapter, on_failure="raise",
                )  # fmt: skip
                finish(state)
                return found | {"rank": rank}

            parts += run_ranks(world, work)
            assert device.open_workspaces == 0
            entry = merged(parts, Outcome(status="done")) | {"seed": seed, "first": first}
            entry["reached"] = at = stop
            entry["launched"] = [device.launches.get(rank, 0) for rank in range(world)]
    return entry
