"""The suite's own cases over the emulated device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated.cluster import run_ranks
from emulated.device import emulated

from megamoe.cli import main
from megamoe.dispatch.machine import H200, SM120
from megamoe.dispatch.select import KERNELS
from megamoe.kernels.base import Kernel
from megamoe.kernels.torch_grouped import TorchGrouped
from megamoe.problem import Machine
from megamoe.suite import cases, results, run
from megamoe.suite.cases import Case, Shape, case
from megamoe.suite.pool import Outcome

SHAPE = Shape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, capacity=16)
NAMES = ("idle rank", "no clamp", "exact grid")


def machine_of(kernel: type[Kernel]) -> Machine:
    return SM120 if kernel.sheet.name.startswith("sm120") else H200


def records(kernel: type[Kernel], world: int, shape: Shape) -> dict[str, Any]:
    """The cases' records, from ranks that keep their layers between cases as a pool's do."""
    machine = machine_of(kernel)
    whole = [c for c in map(case, NAMES) if not run.refused(kernel, c, shape, world, machine)]

    def work(rank: int) -> dict[str, dict[str, Any]]:
        group = dist.group.WORLD if world > 1 else None
        state = cases.State(torch.device("cpu"), group, {})
        found = {
            what.name: cases.run(
                lambda phase: None, rank, world, state=state, kernel=kernel.sheet.name,
                shape=shape, name=what.name,
            )
            for what in whole
        }  # fmt: skip
        cases.finish(state)
        return found

    with emulated(machine) as device:
        by_rank = run_ranks(world, work)
        assert device.open_workspaces == 0
    return {
        what.name: results.record(
            Outcome(status="done", values={rank: of[what.name] for rank, of in enumerate(by_rank)}),
            shape, machine,
        )
        for what in whole
    }  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.sheet.name)
def test_cases_pass_for_every_kernel(kernel: type[Kernel]) -> None:
    world = min(world for world in (2, 4) if world in kernel.sheet.world_sizes)
    hidden = max(SHAPE.hidden_size, kernel.sheet.hidden_multiple)
    found = records(kernel, world, run.shape_of(kernel, replace(SHAPE, hidden_size=hidden)))
    assert len(found) > 1
    for name, entry in found.items():
        assert results.passed(entry), (name, entry)


def test_what_no_graph_can_hold_is_not_asked_of_one() -> None:
    """`torch_grouped` learns its rows' counts from its peers."""
    shape, replay = run.shape_of(TorchGrouped, SHAPE), case("graph replay")
    said = [run.refused(TorchGrouped, replay, shape, world, H200) for world in (1, 2)]
    assert said == ["", "reads from the device, which a CUDA graph cannot hold"]
    assert run.refused(TorchGrouped, case("full"), shape, 2, H200) == ""


def test_a_refused_case_is_said_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(kernel: Any, what: Case, *_: Any) -> str:
        return "cannot" if what.name == "duplicates" else ""

    monkeypatch.setattr(run, "refused", refused)
    asked = [word for name in ("duplicates", "idle rank") for word in ("--case", name)]
    assert main(["check", "--kernel", "reference", *asked, "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "reference, duplicates: not run: cannot" in said
    assert "reference, idle rank: passed" in said
    assert "1 case judged" in said
    assert results.load(tmp_path)["reference", 1].keys() == {"idle rank"}


@pytest.mark.parametrize("how", ["contiguous", "permuted", "uneven", "replicated"])
def test_more_ranks_than_experts_can_be_placed(how: str) -> None:
    placed = cases.place(how, 2, 3)
    assert placed.world_size == 3
    assert {expert for slots in placed.slots for expert in slots} >= {0, 1}
