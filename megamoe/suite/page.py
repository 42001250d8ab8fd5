"""A page out of measurements' records: what was measured, in tables, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

HEAD = """# Measured on NVIDIA H200

Generated from the records in `docs/bench/h200` (`python -m tests.readme`), which the named commands
wrote. Times of one table come from one run, in turns, after the oracle had found every contender
right; milliseconds are medians. *x* is a contender's time over `forward`'s: above 1, `forward` is
the faster. *graph* is a CUDA-graph replay. *by hand* is FlashInfer's own layer, called as one would
without this package. Routing is balanced, every expert asked equally often, unless a title says
*random*. *floor* is the time to read the weights of the experts that are hit at the
memory's rate, or to multiply at the matrix units' rate, whichever is longer. *host* is the time
until a call returns.
"""

CALLS = ("forward", "forward graph")
OTHERS = ("smallest", "by hand", "torch_grouped")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def bench(record: Record) -> list[str]:
    """`megamoe bench`: one configuration a row."""
    timed = [entry for entry in record["configurations"] if entry["status"] == "timed"]
    timed.sort(key=lambda entry: entry["tokens"])
    others = [name for name in OTHERS if any(name in entry["times"] for entry in timed)]
    shape, kernel, ranks = timed[0]["shape"], timed[0]["kernel"], record["world_size"]
    opened = timed[0].get("workspaces", {}).get("choice", {}).get("capacities")
    title = f"`{kernel}` on " + ("one rank" if ranks == 1 else f"{ranks} ranks, a GPU each")
    title += ", the workspace measured" if opened else ""
    routing = record.get("routing", "balanced")
    title += "" if routing == "balanced" else f", {routing} routing"
    sizes = ", ".join(
        f"{name} {shape[key]}"
        for name, key in (
            ("H", "hidden_size"), ("I", "intermediate_size"), ("E", "num_experts"), ("k", "top_k"),
        )
    )  # fmt: skip
    head = ["tokens a rank", *(["workspace"] if opened else [])]
    for call in CALLS:
        head.append(call)
        for other in others:
            head += [other, "x"]
    head += ["host us", "by hand", "floor", "graph / floor"]
    rows = []
    for entry in timed:
        row = [str(entry["tokens"])]
        if opened:
            used = entry["workspaces"]["capacity"]
            row.append(f"{used['forward']} (smallest {used['smallest']})")
        for call in CALLS:
            row.append(_ms(entry, call))
            for other in others:
                name = other + call.removeprefix("forward")
                row += [_ms(entry, name), _ratio(entry, f"{name} / {call}")]
        host, floor = entry["host_us"], entry["floor"]
        row += [f"{host['forward']:.0f}", f"{host['by hand']:.0f}" if "by hand" in host else "-"]
        rows.append([*row, f"{floor['ms']:.3f}", f"{floor['forward_over_floor']:.2f}"])
    command = f"megamoe bench --kernel {kernel} --world-size {ranks}"
    command += "" if routing == "balanced" else f" --routing {routing}"
    command += " --workspaces " + " ".join(map(str, opened)) if opened else ""
    lines = [f"## {title}", "", f"{sizes}; {_of(record)}. `{command}`", "", *table(head, rows)]
    left = {note for entry in timed for note in entry["notes"]}
    missing = sorted({8, 64, 512, 4096} - {entry["tokens"] for entry in timed})
    if missing:
        left.add(f"not timed: {', '.join(map(str, missing))} tokens (the run was cut off)")
    return lines + ([""] + [f"* {note}" for note in sorted(left)] if left else [])


def startup(records: Sequence[Record]) -> list[str]:
    """`benchmarks/startup.py`: one kernel a row."""
    rows = []
    for record in records:
        tried, left = record["tried"], record["left_out"]
        times = [trial["us"] for trial in tried if trial["us"] is not None]
        starts = record["starts"]
        rows.append([
            f"`{record['kernel']}`", f"{left['tried']} of {sum(record['offered'].values())}",
            str(left["other bits"]), str(left["errors"]), f"{times[0]:.1f}", f"{min(times):.1f}",
            f"{times[0] / min(times):.3f}", f"{starts['cold']['prepare_s']:.0f}",
            ", ".join(str(starts[name]["counts"]["tactics"]) for name in ("again", "warm")),
        ])  # fmt: skip
    head = [
        "kernel", "tactics tried", "left out: other bits", "errors", "default us", "best us", "x",
        "cold start s", "tried in a warm start",
    ]  # fmt: skip
    text = (
        "A workspace of 64 tokens at H 1024, I 512, E 16, k 4, one rank; four kernels were started "
        "at once on one GPU, so that the times say little, but every start gave the same bits. "
        "*Warm*: the next layer of the process, and a process that finds the file. "
        "`python benchmarks/startup.py --limit 8`"
    )
    return ["## Start-up tuning", "", text, "", *table(head, rows)]


def shared(record: Record) -> list[str]:
    """`benchmarks/shared_expert.py`."""
    ways = ("beside", "in a row", "without")
    calls = [way + how for how in ("", " graph") for way in ways]
    rows = [
        [str(row["tokens"]), *(f"{row['times'][call]['median_ms']:.3f}" for call in calls)]
        for row in record["rows"]
    ]
    text = (
        f"`{record['kernel']}` with a shared expert of width {record['shared']} in "
        f"{record['shared_format']}: *beside* the megakernel on a stream of its own, *in a row* on "
        "one stream, and the layer *without* it. The megakernel keeps every multiprocessor, so "
        "little can run beside it. `python benchmarks/shared_expert.py`"
    )
    head = ["tokens", *ways, *(f"{way}, graph" for way in ways)]
    return ["## The shared expert", "", text, "", *table(head, rows)]


def soak(records: Sequence[tuple[str, Record]]) -> list[str]:
    """`megamoe check --soak`: one walk a row."""
    rows = [
        [
            f"`{kernel}`", str(walk["world_size"]), str(walk["steps"]), f"{walk['rows']:,}",
            str(walk["differing"]), str(walk["launches"]), str(walk["replays"]),
            str(walk["idle"]), str(walk["refused"]), str(walk["prepares"]),
            f"{walk['seconds']:.0f}",
        ]
        for kernel, record in records
        for walk in record.values()
    ]  # fmt: skip
    head = [
        "kernel", "ranks", "steps", "rows verified", "of other bits", "launches", "graph replays",
        "idle ranks", "refusals", "prepares", "seconds",
    ]  # fmt: skip
    text = (
        "Seeded random serving steps, all ranks on one GPU: unequal counts, idle ranks, hot "
        "experts, empty slots, rounds, late ranks, eager calls and graphs of several sizes; every "
        "row is compared bit for bit with what the judged batch gave for it. "
        "`megamoe check --kernel K --world-size 4 --soak 1000`"
    )
    return ["## Walks of random steps", "", text, "", *table(head, rows)]


def answers(record: Record) -> list[str]:
    """`benchmarks/first_answer.py`."""
    rows = [
        [name, f"`{found['kernel']}`"]
        + [f"{found[key]:.1f}" for key in ("load_s", "prepare_s", "forward_s", "total_s")]
        for name, found in record["results"].items()
    ]
    head = ["checkpoint", "kernel", "load s", "prepare s", "first forward s", "in all s"]
    text = (
        "From files to the first answer with empty compile caches, H 4096, I 2048, E 16, k 6. "
        "`python benchmarks/first_answer.py`"
    )
    return ["## The first answer", "", text, "", *table(head, rows)]


def document(bench_folder: Path, verdict_folder: Path) -> str:
    """The whole document."""
    records = {
        file.stem: json.loads(file.read_text()) for file in sorted(bench_folder.glob("*.json"))
    }
    walks = [
        (file.stem.rpartition("-world")[0], json.loads(file.read_text()))
        for file in sorted((verdict_folder / "soak").glob("*.json"))
    ]
    parts = [bench(record) for name, record in records.items() if name.startswith("ep")]
    parts.append(startup([r for name, r in records.items() if name.startswith("startup")]))
    parts += [shared(records["shared-expert"]), soak(walks)]
    parts += [answers(record) for name, record in records.items() if name.startswith("first")]
    return HEAD + "\n" + "\n\n".join("\n".join(part) for part in parts) + "\n"


def _ms(entry: Record, name: str) -> str:
    return f"{entry['times'][name]['max_over_ranks_ms']:.3f}" if name in entry["times"] else "-"


def _ratio(entry: Record, name: str) -> str:
    return f"{entry['ratios'][name]:.2f}" if name in entry["ratios"] else "-"


def _of(record: Record) -> str:
    versions = ", ".join(
        f"{name} {record['versions'][name]}"
        for name in ("torch", "flashinfer")
        if record["versions"][name]
    )
    return f"{record['date']}, {versions}"
