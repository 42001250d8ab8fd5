"""What start-up tuning costs and gains: one layer started four times, on one GPU.

    python benchmarks/startup.py [--kernel sm90_pull_fp8] [--capacity 64] [--workspaces 16 32]
                                 [--limit 8]

The starts: `off` without tuning; `cold`, which measures every tactic and fills an empty folder;
`again`, in the same process; and `warm`, which has forgotten all but the folder, as a new process.
Every start must give the same bits for the same rows. A tactic is left out where it gives other
bits than the default, or where it fails: each is printed with its reason. --limit takes so many of
the tactics, the default and others evenly spaced. The last line is the record as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import megamoe
from megamoe.dispatch.select import KERNELS
from megamoe.dispatch.startup import Memory
from megamoe.dispatch.tuning import Knobs, Mode, Trial, Tuner, admitted
from megamoe.kernels.base import Kernel
from megamoe.problem import MoEWeights, Placement
from megamoe.suite import cases, run, timing
from megamoe.suite.cases import Shape

OTHER_BITS = "gives other bits than the default"
STARTS: tuple[tuple[str, Mode], ...] = (
    ("off", "off"),
    ("cold", "on"),
    ("again", "on"),
    ("warm", "on"),
)
SIZES = (1, 8, 64, 512)  # tokens of the rows compared, and each workspace's own

T = TypeVar("T")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [k.sheet.name for k in KERNELS]
    parser.add_argument("--kernel", choices=names, default="sm90_pull_fp8")
    parser.add_argument("--capacity", type=int, default=64, help="tokens of the greatest workspace")
    parser.add_argument("--workspaces", type=int, nargs="*", default=[], help="of further ones")
    parser.add_argument("--limit", type=int, default=0, help="tactics measured; 0 is all")
    for name, value in (("hidden", 4096), ("intermediate", 2048), ("experts", 64), ("top-k", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU is here: nothing was measured")
        return 1
    device = torch.device(options.device)
    kernel = run.kernel_named(options.kernel)
    shape = run.shape_of(
        kernel,
        Shape(
            hidden_size=options.hidden, intermediate_size=options.intermediate,
            num_experts=options.experts, top_k=options.top_k, capacity=options.capacity,
        ),
    )  # fmt: skip
    weights = layer_of(kernel, shape, device)
    offered: dict[int, int] = {}
    tried: list[dict[str, Any]] = []
    starts: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[int, Tensor]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="megamoe-startup-") as folder,
        mock.patch.dict(os.environ, {"MEGAMOE_CACHE_DIR": folder}),
        limited(kernel, options.limit, offered),
        recorded(tried),
    ):
        for name, mode in STARTS:
            if name == "warm":
                Memory.held.clear()
            starts[name], rows[name] = start(name, mode, kernel, weights, shape, options)
    same = compared(rows)
    record = {
        "command": "benchmarks/startup.py",
        "kernel": kernel.sheet.name,
        "shape": dataclasses.asdict(shape),
        "workspaces": sorted({*options.workspaces, options.capacity}),
        "offered": offered,
        "left_out": summary(tried),
        "tried": tried,
        "starts": starts,
        "same_bits": same,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }
    good = told(record)
    print(json.dumps(record))
    return 0 if good else 1


# --- the layer ------------------------------------------------------------------------------------


def layer_of(kernel: type[Kernel], shape: Shape, device: torch.device) -> MoEWeights:
    placement = Placement.contiguous(shape.num_experts, 1)
    request = cases.request_of(shape, placement, kernel, shape.capacity)
    return MoEWeights(
        experts=timing.make_experts(shape, range(shape.num_experts), device),
        placement=placement,
        activation=request.activation,
        weight_at=request.weight_at,
    )


def start(
    name: str,
    mode: Mode,
    kernel: type[Kernel],
    weights: MoEWeights,
    shape: Shape,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """What one start did, and its outputs on the CPU by tokens a step."""
    print(f"--- {name}: tuning {mode}", flush=True)
    begun = time.perf_counter()
    with megamoe.prepare(
        weights, max_tokens_per_rank=shape.capacity, top_k=shape.top_k, kernel=kernel.sheet.name,
        workspaces=options.workspaces, tuning=mode,
    ) as layer:  # fmt: skip
        prepared = time.perf_counter()
        layer.warmup()
        warm = time.perf_counter()
        rows = {}
        for tokens in sorted({s for s in (*SIZES, *layer.tactics) if s <= shape.capacity}):
            batch = timing.make_tokens(shape, tokens, 0, 1, weights.device)
            rows[tokens] = layer.forward(batch.x, batch.topk, max_tokens=tokens).cpu()
        layer.check()
        steps = {  # the workspaces as they will serve, apart from what tuning has measured
            space.capacity: 1e6 * layer._rig.step(space, space.capacity) for space in layer._spaces
        }
        entry: dict[str, Any] = {
            "prepare_s": round(prepared - begun, 2),
            "warmup_s": round(warm - prepared, 2),
            "counts": dataclasses.asdict(layer.started),
            "tactics": {
                c: {"source": t.source, "knobs": dict(t.knobs), **gain(t.seconds, t.default)}
                for c, t in layer.tactics.items()
            },
            "choice": dataclasses.asdict(layer.choice),
            "step_us": {capacity: round(us, 2) for capacity, us in steps.items()},
        }
    counts = ", ".join(f"{key} {value}" for key, value in entry["counts"].items())
    print(f"    prepare {entry['prepare_s']} s, warmup {entry['warmup_s']} s; {counts}", flush=True)
    return entry, rows


def gain(seconds: float | None, default: float | None) -> dict[str, float | None]:
    """ratio: of the tactic's time to the default's, where both were measured."""
    us = [None if s is None else round(1e6 * s, 2) for s in (seconds, default)]
    ratio = None if seconds is None or default is None else round(seconds / default, 4)
    return {"us": us[0], "default_us": us[1], "ratio": ratio}


# --- the tactics ----------------------------------------------------------------------------------


@contextmanager
def limited(kernel: type[Kernel], limit: int, offered: dict[int, int]) -> Iterator[None]:
    """A spread of the tactics in place of all; how many there were, by capacity."""
    real = kernel.tactics

    def tactics(self: Kernel, capacity: int) -> Sequence[Knobs]:
        request = self.context.request  # type: ignore[attr-defined]
        found = admitted(real(self, capacity), request.host.deterministic)
        offered[capacity] = len(found)
        return spread(found, limit)

    with mock.patch.object(kernel, "tactics", tactics):
        yield


def spread(found: Sequence[T], limit: int) -> list[T]:
    """So many of them, evenly spaced from the first to the last; 0 is all."""
    if not 0 < limit < len(found):
        return list(found)
    return [found[i * (len(found) - 1) // max(1, limit - 1)] for i in range(limit)]


@contextmanager
def recorded(tried: list[dict[str, Any]]) -> Iterator[None]:
    """What became of each tactic that was measured."""
    real = Tuner._try

    def measured(
        self: Tuner, capacity: int, knobs: Knobs, trial: Trial
    ) -> tuple[float, str | None]:
        begun = time.perf_counter()
        seconds, why = real(self, capacity, knobs, trial)
        entry = {
            "capacity": capacity,
            "knobs": dict(knobs),
            "us": None if why else round(1e6 * seconds, 2),
            "why": why,
            "took_s": round(time.perf_counter() - begun, 2),
        }
        tried.append(entry)
        result = f"{entry['us']} us" if why is None else f"left out: {why}"
        print(
            f"    {capacity} tokens, {json.dumps(entry['knobs'])}: {result} ({entry['took_s']} s)",
            flush=True,
        )
        return seconds, why

    with mock.patch.object(Tuner, "_try", measured):
        yield


def summary(tried: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    why = [entry["why"] for entry in tried if entry["why"]]
    bits = sum(OTHER_BITS in reason for reason in why)
    return {"tried": len(tried), "other bits": bits, "errors": len(why) - bits}


# --- the verdict ----------------------------------------------------------------------------------


def compared(rows: Mapping[str, Mapping[int, Tensor]]) -> dict[str, bool]:
    """By tokens and start: whether the outputs have the bits of the start without tuning."""
    plain = rows["off"]
    return {
        f"{name} at {tokens}": torch.equal(y.view(torch.int16), plain[tokens].view(torch.int16))
        for name in rows
        if name != "off"
        for tokens, y in rows[name].items()
    }


def told(record: Mapping[str, Any]) -> bool:
    """Print what was found; whether it is as it should be."""
    starts, left = record["starts"], record["left_out"]
    for capacity, tactic in starts["cold"]["tactics"].items():
        ratio, knobs = tactic["ratio"], json.dumps(tactic["knobs"])
        print(
            f"{capacity} tokens, of {record['offered'][capacity]} tactics: {knobs}, "
            f"{tactic['us']} us to the default's {tactic['default_us']} us"
            + (f" (x {ratio})" if ratio is not None else "")
            + f"; served: {starts['cold']['step_us'][capacity]} us "
            f"to {starts['off']['step_us'][capacity]} us without tuning"
        )
    print(
        f"{left['tried']} tactics tried: {left['other bits']} left out for other bits, "
        f"{left['errors']} for errors"
    )
    failed = [f"other bits: {what}" for what, same in record["same_bits"].items() if not same]
    for name in ("again", "warm"):
        counts = starts[name]["counts"]
        if counts["tactics"] or counts["steps"]:
            failed.append(f"the start '{name}' measured anew: {counts}")
    print("\n".join(failed) if failed else "all starts give the same bits")
    return not failed


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # exit handlers of communication libraries have crashed after good runs
