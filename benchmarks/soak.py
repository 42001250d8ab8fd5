"""A long walk of random serving steps without a GPU: `megamoe` on the emulated device of the tests.

    python benchmarks/soak.py [--steps 10000] [--kernel sm90_pull_bf16] [--seed 0] [--from 0]

Run it from a checkout with the `test` extra installed. Ranks are threads; FlashInfer is a stand-in
that computes each kernel's recipe and is as strict about its inputs as the kernel is. Every row of
every step must have the bits of the reference. `megamoe check --soak N` is the same walk on real
kernels. The last line is the record as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from emulated.soak import soak

from megamoe.dispatch.machine import H200, SM120
from megamoe.dispatch.select import KERNELS
from megamoe.suite.run import kernel_named
from megamoe.suite.soak import line, passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument(
        "--kernel", default="sm90_pull_bf16",
        choices=[k.sheet.name for k in KERNELS if k.sheet.name.startswith("sm")],
    )  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    begun = time.perf_counter()
    with Progress(*columns) as progress:
        bar = progress.add_task("steps", total=args.steps)

        def tell(number: int) -> Any:
            progress.update(bar, completed=number - args.first)
            if not progress.console.is_terminal and number % 1000 == 0:
                print(f"step {number}, {time.perf_counter() - begun:.0f} s", flush=True)

        entry = soak(
            kernel_named(args.kernel),
            steps=args.steps,
            seed=args.seed,
            first=args.first,
            world=args.world_size,
            machine=SM120 if args.kernel.startswith("sm120") else H200,
            tell=tell,
        )
        progress.update(bar, completed=entry["reached"] - args.first)
    wall = time.perf_counter() - begun
    good = passed(entry) and not entry["differing"] and entry["stock_share"] == 1.0
    print(f"{args.kernel}, {args.world_size} ranks: {line(entry, args.steps)}")
    print(f"{'every row has the reference bits' if good else 'FAILED'}; {wall:.0f} s")
    print(json.dumps(entry))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
