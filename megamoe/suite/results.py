"""Verdicts as records, a JSON file a (kernel, world size): several runs fill one table."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megamoe.errors import bad_input
from megamoe.problem import Machine
from megamoe.suite.cases import CASES, Shape
from megamoe.suite.pool import Outcome


def record(outcome: Outcome, shape: Shape, machine: Machine) -> dict[str, Any]:
    """One case's outcome: the worst rank of each figure, and what went wrong."""
    ranks: list[Mapping[str, Any]] = [outcome.values[r] for r in sorted(outcome.values)]
    entry: dict[str, Any] = {
        "status": outcome.status,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "shape": asdict(shape),
        "machine": machine.name,
        "versions": {n: getattr(machine, n) for n in ("torch", "cuda", "flashinfer", "nvshmem")},
    }
    if outcome.status != "done":
        return entry | {"message": str(outcome), "log": outcome.log[-1500:]}
    messages = [f"rank {i}: {r['message']}" for i, r in enumerate(ranks) if r["message"]]
    replays = [r["replay_equal"] for r in ranks if "replay_equal" in r]
    return entry | {
        "tokens": [r["tokens"] for r in ranks],
        "right": all(r["right"] for r in ranks),
        "recipe": all(r["recipe"] for r in ranks),
        "share": min(r["share"] for r in ranks),
        "share_floor": max(r["share_floor"] for r in ranks),
        "worst_of_budget": max(r["worst_of_budget"] for r in ranks),
        "repeat_equal": all(r["repeat_equal"] for r in ranks),
        "message": "\n".join(messages),
    } | ({"replay_equal": all(replays)} if replays else {})  # fmt: skip


def passed(entry: Mapping[str, Any]) -> bool:
    """Both verdicts, the same bits when repeated, and from every replay."""
    demands = ("right", "recipe", "repeat_equal")
    return (
        entry["status"] == "done"
        and all(bool(entry[demand]) for demand in demands)
        and bool(entry.get("replay_equal", True))
    )


def store(folder: Path, kernel: str, world: int, name: str, entry: Mapping[str, Any]) -> None:
    """Add or replace one case's record. Raises BadInput."""
    file = _file_of(folder, kernel, world)
    known = _read(file) if file.exists() else {}
    known[name] = dict(entry)
    write(file, json.dumps(known, indent=1, sort_keys=True) + "\n")


def usable(folder: Path, kernel: str, world: int) -> None:
    """Raises BadInput where `store` would, so that it is known before the work."""
    file = _file_of(folder, kernel, world)
    writable(file)
    if file.exists():
        _read(file)


def load(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """All records under ``folder``: (kernel, world size) to case name to record."""
    found = {}
    for file in sorted(folder.glob("*-world*.json")):
        kernel, _, world = file.stem.rpartition("-world")
        if not world.isdecimal():
            raise bad_input("records", file, "name no world size", "rename or move the file")
        found[kernel, int(world)] = _read(file)
    return found


def _file_of(folder: Path, kernel: str, world: int) -> Path:
    return folder / f"{kernel}-world{world}.json"


def _read(file: Path) -> dict[str, Any]:
    """Raises BadInput where a file is cut off, or is none of records."""
    try:
        known = json.loads(file.read_text())
        if isinstance(known, dict) and all(isinstance(entry, dict) for entry in known.values()):
            return known
        why: object = "each case needs a record"
    except (OSError, ValueError) as error:
        why = error
    raise bad_input("records", file, f"cannot be read ({why})", "restore it or move it away")


# --- files ----------------------------------------------------------------------------------------


def write(file: Path, text: str) -> None:
    """Replace a file as a whole, so that a reader never finds half of it. Raises BadInput."""
    new = _beside(file)
    with _naming(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(text)
            os.replace(new, file)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def writable(file: Path) -> None:
    """Raises BadInput where `write` would for what can be known before; makes the folder."""
    new = _beside(file)
    with _naming(file):
        if file.exists() and not file.is_file():  # a replaced /dev/null would be missed
            raise OSError(errno.EINVAL, "not a regular file")
        file.parent.mkdir(parents=True, exist_ok=True)
        new.touch()
        new.unlink()


def _beside(file: Path) -> Path:
    return file.parent / (file.name + ".new")


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise bad_input(
            "file", file, f"cannot be written ({error})", "name another place"
        ) from None


# --- the page -------------------------------------------------------------------------------------

GEOMETRY = ("hidden_size", "intermediate_size", "num_experts", "top_k", "capacity")
COLUMNS = (
    "kernel",
    "ranks",
    "case",
    "right",
    "this recipe",
    "bits equal",
    "floor",
    "error / budget",
)


def table(found: Mapping[tuple[str, int], Mapping[str, Any]], kernels: Sequence[str]) -> str:
    """Markdown: a row a kernel, world size and case; kernels that were never run say so."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    order = {c.name: i for i, c in enumerate(CASES)}
    for kernel in kernels:
        worlds = sorted(world for name, world in found if name == kernel)
        if not worlds:
            rows.append((f"`{kernel}`", "-", "not run on hardware", *"-----"))
        for world in worlds:
            cases = found[kernel, world]
            for name in sorted(cases, key=lambda n: order.get(n, len(order))):
                rows.append(_row(kernel, world, name, cases[name]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(kernel: str, world: int, name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    head = (f"`{kernel}`", str(world), name)
    if entry["status"] != "done":
        return (*head, entry["status"], *"----")
    replay = "" if entry.get("replay_equal", True) else ", replay differs"
    repeat = "" if entry["repeat_equal"] else ", repeat differs"
    return (
        *head,
        _yes(entry["right"]) + repeat + replay,
        _yes(entry["recipe"]),
        f"{100 * entry['share']:.3f} %",
        f"{100 * entry['share_floor']:.3f} %",
        f"{entry['worst_of_budget']:.3f}",
    )


def _yes(verdict: bool) -> str:
    return "yes" if verdict else "**NO**"


def document(folder: Path, kernels: Sequence[str]) -> str:
    """The page docs/verdicts-<machine>.md, from the records under ``folder``."""
    found = load(folder)
    entries = [entry for cases in found.values() for entry in cases.values()]
    machines = sorted({entry["machine"] for entry in entries})
    versions = sorted({str(entry["versions"]) for entry in entries})
    dates = sorted({entry["date"] for entry in entries})
    shapes = {", ".join(f"{name} {entry['shape'][name]}" for name in GEOMETRY) for entry in entries}
    return "\n".join(
        (
            f"# Verdicts on {', '.join(machines)}",
            "",
            "Generated from the records beside it (`python -m tests.readme`); each row is a run of",
            "`megamoe check`. *right*: every token's error is within twice the recipe's own worst.",
            "*this recipe*: the share of elements bit-equal to the emulated recipe reaches what",
            "honest kernels reach; shown are the lowest share and the highest floor of any rank (a",
            "rank without tokens has 100 %); where the floor is near 0 the second verdict decides",
            "nothing. Exact-grid cases are `torch.equal`. A case that is not listed was not run.",
            "On 2 ranks each had a GPU of its own; on 4 and 8 they shared one or two, time-sliced:",
            "correctness, not speed.",
            "",
            f"- dates: {', '.join(dates)}",
            f"- versions: {'; '.join(versions)}",
            f"- shapes: {'; '.join(sorted(shapes))}",
            "",
            table(found, kernels),
            "",
        )
    )
