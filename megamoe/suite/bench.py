"""A benchmark: configurations on a pool of ranks, one record each, floors, ratios and the table.

A record is written as soon as its configuration ends, whatever becomes of the next one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from megamoe.dispatch.tuning import Mode
from megamoe.errors import bad_input
from megamoe.kernels.base import Kernel
from megamoe.problem import Machine, Placement
from megamoe.suite import cases, results, run, timing
from megamoe.suite.cases import Shape
from megamoe.suite.pool import Outcome, Pool
from megamoe.suite.timing import Routing

DEFAULT_KERNELS = ("sm90_pull_bf16", "sm90_pull_fp8", "sm90_pull_mxfp4")
SHAPE = Shape(hidden_size=4096, intermediate_size=2048, num_experts=64, top_k=6)
TOKENS = (8, 64, 512, 4096)
SECONDS = 1.5
RATIOS = (
    ("by hand", "forward"),
    ("by hand graph", "forward graph"),
    ("torch_grouped", "forward"),
    ("torch_grouped graph", "forward graph"),
    ("smallest", "forward"),
    ("smallest graph", "forward graph"),
)
"""Times that are divided: above 1 the second is the faster."""

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine can do at most. operations: a second, by the bits of the matrix operands."""

    bytes: float
    operations: Mapping[int, float]


H200 = Rates(bytes=4.3e12, operations={16: 0.79e15, 8: 1.58e15})
"""Measured on one: a device copy's bytes, read and written; a large BF16 product on random data,
and twice that for FP8."""


def rates_of(machine: Machine) -> Rates | None:
    return H200 if "H200" in machine.name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. capacity: None is each token count's own. workspaces: capacities that every
    layer opens, besides one for a token count that is above them. tune: the kernels' tactics too.
    routing: how tokens choose experts.
    """

    kernels: tuple[type[Kernel], ...]
    world_size: int = 1
    tokens: tuple[int, ...] = TOKENS
    shape: Shape = SHAPE
    routing: Routing = "balanced"
    capacity: int | None = None
    workspaces: tuple[int, ...] = ()
    tune: bool = False
    seconds: float = SECONDS
    timeout: float = run.FIRST_S

    def __post_init__(self) -> None:
        experts, top_k = self.shape.num_experts, self.shape.top_k
        if experts < 1:
            raise bad_input("--experts", experts, "is below 1", "pass a count")
        if self.routing == "random" and top_k > experts:
            raise bad_input("--top-k", top_k, f"is above {experts} experts", "pass a smaller one")
        if not 0 <= self.seconds < math.inf:
            raise bad_input("--seconds-per-config", self.seconds, "is no time", "pass seconds")
        if not 0 < self.timeout < math.inf:
            raise bad_input("--timeout", self.timeout, "is no time to wait", "pass seconds")
        if self.workspaces and self.capacity is not None:
            raise bad_input("--capacity", self.capacity, "is beside --workspaces", "pass only one")
        for workspace in self.workspaces:
            if workspace < 1:
                raise bad_input("--workspaces", workspace, "is below 1", "pass capacities")
        for tokens in self.tokens:
            if tokens < 1:
                raise bad_input("--tokens", tokens, "is below 1", "pass counts")
            if self.capacity is not None and tokens > self.capacity:
                raise bad_input(
                    "--capacity", self.capacity, f"is below {tokens} tokens", "pass a larger one"
                )

    def configurations(self) -> Iterable[tuple[type[Kernel], int, Shape]]:
        for kernel in self.kernels:
            for tokens in self.tokens:
                capacity = self.capacity or max(tokens, *self.workspaces, 1)
                yield kernel, tokens, run.shape_of(kernel, replace(self.shape, capacity=capacity))

    @property
    def tuning(self) -> Mode | None:
        if self.tune:
            return "on"
        return "workspaces" if self.workspaces else None


# --- running --------------------------------------------------------------------------------------


def bench(
    plan: Plan,
    machine: Machine,
    *,
    file: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    task: Callable[..., dict[str, Any]] = timing.measure,
) -> dict[str, Any]:
    """Every configuration in turn; the document as it stands is written to ``file`` after each.

    A configuration that hangs or crashes costs its pool, and the next one starts another. Raises
    BadInput before the first where the file cannot be written.
    """
    document = _document(plan, machine)
    if file is not None:
        results.writable(file)
    with Pool(
        plan.world_size,
        setup=timing.setup,
        start_timeout=run.START_S,
        environment=run.ENVIRONMENT,
    ) as pool:
        for kernel, tokens, shape in plan.configurations():
            head = _head(kernel, tokens, shape)
            why = _refused(kernel, shape, plan.world_size, machine)
            if why:
                entry = head | {"status": "refused", "message": why}
            else:
                outcome = pool.run(
                    task,
                    timeout=plan.timeout,
                    kernel=kernel.sheet.name,
                    shape=shape,
                    tokens=tokens,
                    seconds=plan.seconds,
                    routing=plan.routing,
                    workspaces=plan.workspaces,
                    tuning=plan.tuning,
                )
                entry = head | merged(outcome) | {"seconds": round(outcome.seconds, 2)}
                entry = finished(entry, rates_of(machine))
            document["configurations"].append(entry)
            _write(document, file)
            tell(line(entry))
    document["complete"] = True
    _write(document, file)
    return document


def _document(plan: Plan, machine: Machine) -> dict[str, Any]:
    rates = rates_of(machine)
    return {
        "command": "megamoe bench",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.name,
        "versions": {
            n: getattr(machine, n) for n in ("torch", "cuda", "driver", "flashinfer", "nvshmem")
        },
        "world_size": plan.world_size,
        "routing": plan.routing,
        "ranks_per_gpu": machine.ranks_per_gpu,
        "seconds_per_configuration": plan.seconds,
        "rates": None if rates is None else asdict(rates),
        "complete": False,
        "configurations": [],
    }


def _head(kernel: type[Kernel], tokens: int, shape: Shape) -> Entry:
    recipe = kernel.recipe(_request(kernel, shape, 1))
    return {
        "kernel": kernel.sheet.name,
        "tokens": tokens,
        "shape": asdict(shape),
        "operand_bits": max(recipe.act.element.bits, recipe.mid.element.bits),
    }


def _refused(kernel: type[Kernel], shape: Shape, world: int, machine: Machine) -> str:
    return "; ".join(kernel.objections(_request(kernel, shape, world), machine))


def _request(kernel: type[Kernel], shape: Shape, world: int) -> Any:
    placement = Placement.contiguous(shape.num_experts, world)
    return cases.request_of(shape, placement, kernel, shape.capacity)


def _write(document: Mapping[str, Any], file: Path | None) -> None:
    if file is not None:
        results.write(file, json.dumps(document, indent=1) + "\n")


# --- from ranks' records to one -------------------------------------------------------------------


def merged(outcome: Outcome) -> Entry:
    """All ranks' records as one: rank 0's figures, the greatest medians, and all verdicts."""
    if outcome.status != "done":
        return {
            "status": outcome.status,
            "message": str(outcome),
            "log": outcome.log[-1500:],
        }
    ranks: list[Mapping[str, Any]] = [outcome.values[r] for r in sorted(outcome.values)]
    first = next((r for r in ranks if r["status"] != "timed"), ranks[0])
    entry = dict(first)
    entry["verdicts"] = {
        name: _worst([r["verdicts"][name] for r in ranks if name in r["verdicts"]])
        for name in first["verdicts"]
    }
    entry["notes"] = list(dict.fromkeys(note for r in ranks for note in r["notes"]))
    if entry["status"] == "wrong":
        entry["message"] = entry["verdicts"]["forward"]["message"]
    if entry["status"] == "timed":
        entry["times"] = {
            name: dict(figures)
            | {"max_over_ranks_ms": max(r["times"][name]["median_ms"] for r in ranks)}
            for name, figures in first["times"].items()
        }
        for what in ("weight_bytes", "operations"):
            entry[what] = max(r[what] for r in ranks)
    return entry


def _worst(verdicts: Sequence[Mapping[str, Any]]) -> Entry:
    """The verdict over all ranks."""
    return {
        "right": all(v["right"] for v in verdicts),
        "recipe": all(v["recipe"] for v in verdicts),
        "tokens": sum(v["tokens"] for v in verdicts),
        "share": min(v["share"] for v in verdicts),
        "share_floor": max(v["share_floor"] for v in verdicts),
        "worst_of_budget": max(v["worst_of_budget"] for v in verdicts),
        "message": "\n".join(v["message"] for v in verdicts if v["message"]),
    }


def finished(entry: Entry, rates: Rates | None) -> Entry:
    """The entry with ratios, floors and the host time that ``forward`` adds."""
    if entry["status"] != "timed":
        return entry
    times = {name: figures["max_over_ranks_ms"] for name, figures in entry["times"].items()}
    entry["ratios"] = {
        f"{other} / {ours}": round(times[other] / times[ours], 4)
        for other, ours in RATIOS
        if other in times and ours in times and times[ours]
    }
    host = entry["host_us"]
    if "by hand" in host:
        entry["host_added_us"] = round(host["forward"] - host["by hand"], 2)
    if rates is not None:
        entry["floor"] = floor(entry, rates)
        best = times.get("forward graph", times["forward"])
        entry["floor"]["forward_over_floor"] = round(best / entry["floor"]["ms"], 3)
    return entry


def floor(entry: Mapping[str, Any], rates: Rates) -> Entry:
    """The least milliseconds: reading the weights of the experts that are hit, and multiplying."""
    reading = 1e3 * entry["weight_bytes"] / rates.bytes
    bits = 8 if entry["operand_bits"] <= 8 else 16
    computing = 1e3 * entry["operations"] / rates.operations[bits]
    return {
        "bytes_ms": round(reading, 5),
        "operations_ms": round(computing, 5),
        "ms": round(max(reading, computing), 5),
    }


# --- for people -----------------------------------------------------------------------------------


def line(entry: Mapping[str, Any]) -> str:
    """One configuration in one line."""
    head = f"{entry['kernel']}, {entry['tokens']} tokens"
    if entry["status"] != "timed":
        return f"{head}: not timed ({entry['status']}): {entry['message']}"
    parts = [f"{name} {f['median_ms']:.3f} ms" for name, f in entry["times"].items()]
    parts += [f"{name} {value:.2f}" for name, value in entry["ratios"].items()]
    return f"{head}: {', '.join(parts)}"


def table(document: Mapping[str, Any]) -> Table:
    """Times side by side; beside each of the others, how many times ours it is."""
    of = f"{document['machine']}, {document['world_size']} ranks, {document['date']}"
    out = Table(
        title=f"milliseconds a layer (half of the samples lie within +-): {of}",
        caption="x: that time over forward's, above 1 forward is faster; floor: weights of the "
        "experts that are hit at the memory's rate, or products at the matrix units'",
    )
    out.add_column("kernel", no_wrap=True)
    for name in (
        "tokens", "forward", "by hand", "x", "graph", "by hand", "x", "torch_grouped", "x",
        "graph", "x", "host us", "by hand", "floor", "graph/floor", "verdict",
    ):  # fmt: skip
        out.add_column(name, justify="right", no_wrap=True)
    for entry in document["configurations"]:
        out.add_row(*_row(entry))
    return out


def _row(entry: Mapping[str, Any]) -> list[str]:
    head = [entry["kernel"], str(entry["tokens"])]
    if entry["status"] != "timed":
        return [*head, f"not timed: {entry['status']}"]
    times, ratios, host = entry["times"], entry["ratios"], entry["host_us"]
    row = [*head, _time(times, "forward")]
    for other, ours in RATIOS[:2]:
        row += [_time(times, ours)] if ours == "forward graph" else []
        row += [_time(times, other), _ratio(ratios, f"{other} / {ours}")]
    for other, ours in RATIOS[2:4]:
        row += [_time(times, other), _ratio(ratios, f"{other} / {ours}")]
    row += [f"{host[n]:.0f}" if n in host else "-" for n in ("forward", "by hand")]
    found = entry.get("floor")
    row += [f"{found['ms']:.3f}", f"{found['forward_over_floor']:.2f}"] if found else ["-", "-"]
    ours = entry["verdicts"]["forward"]
    return [*row, "right" + (", this recipe" if ours["recipe"] else "")]


def workspaces(document: Mapping[str, Any]) -> Table | None:
    """Steps in the workspace that was measured to serve them, and in the smallest that covers; None
    where no layer had several.
    """
    entries = [e for e in document["configurations"] if e["status"] == "timed"]
    entries = [e for e in entries if "workspaces" in e]
    if not entries:
        return None
    out = Table(
        title="milliseconds a layer, by workspace",
        caption="x: that time over forward's, above 1 the measured choice is faster; by hand: in a "
        "workspace of the step's own size",
    )
    out.add_column("kernel", no_wrap=True)
    for name in (
        "tokens", "measured", "forward", "graph", "smallest", "forward", "x", "graph", "x",
        "by hand", "x", "graph", "x",
    ):  # fmt: skip
        out.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        times, ratios, capacity = entry["times"], entry["ratios"], entry["workspaces"]["capacity"]
        row = [entry["kernel"], str(entry["tokens"]), str(capacity["forward"])]
        row += [_time(times, "forward"), _time(times, "forward graph"), str(capacity["smallest"])]
        for other, ours in (*RATIOS[4:], *RATIOS[:2]):
            row += [_time(times, other), _ratio(ratios, f"{other} / {ours}")]
        out.add_row(*row)
    return out


def _time(times: Mapping[str, Any], name: str) -> str:
    if name not in times:
        return "-"
    low, high = times[name]["quartiles_ms"]
    return f"{times[name]['median_ms']:.3f}+-{(high - low) / 2:.3f}"


def _ratio(ratios: Mapping[str, float], name: str) -> str:
    return f"{ratios[name]:.2f}" if name in ratios else "-"


def notes(document: Mapping[str, Any]) -> list[str]:
    """What was left out and why, each once with the configurations it is true of."""
    found: dict[str, list[str]] = {}
    for entry in document["configurations"]:
        said = list(entry.get("notes", ()))
        if entry["status"] != "timed":
            said.append(entry["message"])
        for note in said:
            found.setdefault(note, []).append(f"{entry['kernel']} at {entry['tokens']}")
    return [f"{', '.join(where)}: {note}" for note, where in found.items()]


def everything_timed(document: Mapping[str, Any]) -> bool:
    """Whether no configuration failed; one that the kernel refuses has not."""
    return all(e["status"] in ("timed", "refused") for e in document["configurations"])


def anything_timed(document: Mapping[str, Any]) -> bool:
    return any(e["status"] == "timed" for e in document["configurations"])
