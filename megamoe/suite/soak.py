"""Walks of steps on a pool of ranks, and their record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from megamoe.errors import bad_input
from megamoe.kernels.base import Kernel
from megamoe.problem import Machine
from megamoe.suite import run
from megamoe.suite.cases import Case, Shape, full
from megamoe.suite.pool import Outcome, Pool
from megamoe.suite.serve import CHAPTER, PLACEMENTS, serve

TASK = 50  # steps between two lines of progress; chapters begin with a task

Entry = dict[str, Any]

OF_EACH = ("rows", "idle", "late", "differing", "wrong_steps")
OF_ALL = ("steps", "calls", "launches", "padded", "replays", "refused", "prepares", "moves")
"""What is summed over ranks, and what is the same on every rank and summed over tasks only."""


def placements(kernel: type[Kernel], shape: Shape, world: int, machine: Machine) -> tuple[str, ...]:
    """Those that the kernel takes."""
    return tuple(
        how
        for how in PLACEMENTS
        if not run.refused(
            kernel, Case(name=how, counts=full, placement=how), shape, world, machine
        )
    )


def soak(
    on: Pool,
    kernel: type[Kernel],
    shape: Shape,
    machine: Machine,
    *,
    steps: int,
    seed: int = 0,
    first: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> Entry:
    """The steps of a seed's walk, as one record; it ends early after a task in which one failed."""
    if steps < 1:
        raise bad_input("--soak", steps, "is below 1 step", "pass a count")
    if first < 0:
        raise bad_input("--soak-from", first, "is below step 0", "pass a step's number")
    parts: list[Entry] = []
    entry: Entry = {}
    at = first
    while at < first + steps:
        stop = min(first + steps, at + TASK - at % TASK)
        outcome = on.run(
            serve,
            timeout=run.FIRST_S if at == first or at % CHAPTER == 0 else run.CASE_S,
            kernel=kernel.sheet.name,
            shape=shape,
            seed=seed,
            first=at,
            steps=stop - at,
            placements=placements(kernel, shape, on.world_size, machine),
        )
        parts += [outcome.values[rank] | {"rank": rank} for rank in sorted(outcome.values)]
        entry = merged(parts, outcome) | {"seed": seed, "first": first, "reached": stop}
        tell(f"{kernel.sheet.name}: {line(entry, steps)}")
        if not passed(entry):
            break
        at = stop
    return entry | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "world_size": on.world_size,
        "shape": asdict(shape),
        "machine": machine.name,
        "versions": {n: getattr(machine, n) for n in ("torch", "cuda", "flashinfer", "nvshmem")},
    }


def merged(parts: Sequence[Entry], last: Outcome) -> Entry:
    """The ranks' tallies of all tasks as one. last: how the latest task ended."""
    of_one = [part for part in parts if part["rank"] == 0]
    verdicts = [verdict for part in parts for verdict in part["stock"]]
    failures = [failure for part in parts for failure in part["failures"]]
    entry: Entry = {
        "status": last.status,
        **{name: sum(part[name] for part in parts) for name in OF_EACH},
        **{name: sum(part[name] for part in of_one) for name in OF_ALL},
        "seconds": round(sum(part["seconds"] for part in of_one), 1),
        "stock_right": all(v["right"] and v["recipe"] for v in verdicts),
        "stock_share": min((v["share"] for v in verdicts), default=1.0),
        "first_failure": min(failures, key=lambda failure: int(failure["step"]), default=None),
        "message": next((v["message"] for v in verdicts if v["message"]), ""),
    }
    if last.status != "done":
        entry |= {"message": str(last), "log": last.log[-1500:]}
    return entry


def passed(entry: Mapping[str, Any]) -> bool:
    """Every row of every step is right, and the stock that says so has both verdicts."""
    return (
        entry["status"] == "done"
        and entry["steps"] > 0
        and bool(entry["stock_right"])
        and not entry["wrong_steps"]
    )


def line(entry: Mapping[str, Any], steps: int) -> str:
    """How far a walk is, and what went wrong, in words."""
    said = (
        f"{entry['reached'] - entry['first']} of {steps} steps in {entry['seconds']:.0f} s; "
        f"{entry['rows']:,} rows verified, {entry['differing']:,} of other bits than alone; "
        f"{entry['replays']} graph replays, {entry['prepares']} prepares, "
        f"{entry['moves']} moves of experts"
    )
    failure = entry["first_failure"]
    if failure is not None:
        said += f"\n   FAILED at {failure['what']}\n   rank {failure['rank']}"
        if "token" in failure:
            said += f", token {failure['token']}, experts {failure['ids']}"
            said += f"\n   stock row {failure['row']}"
        said += f": {failure['message']}"
    if entry["message"]:
        said += f"\n   FAILED: {entry['message']}"
    if not passed(entry):
        seed = entry["seed"]
        said += f"\n   to repeat it: --soak-seed {seed} --soak-from N, N at the step or before"
    return said
