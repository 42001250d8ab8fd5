"""The reference against a naive float32 loop: time in the same run, and peak memory.

    python benchmarks/reference.py

Checks first that both are right, then prints the ratio of the best times and, from a process of its
own, the memory that the reference takes above the weights, in sizes of one float64 expert. The
defaults are the shape that the numbers in the documentation were measured at.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megamoe.formats import plain
from megamoe.problem import (
    BF16_COMBINE,
    ExpertWeights,
    MoEWeights,
    Placement,
    TopK,
)
from megamoe.reference.moe import EXACT, Emulated, layer


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.memory_only:
        print(peak_in_experts(options))
        return
    wall, processor = measure(options)
    print(
        f"E {options.experts}, H {options.hidden}, I {options.intermediate}, k {options.top_k}, "
        f"{options.tokens} tokens, {options.threads} threads, best of {options.repeats}:"
    )
    for name in wall:
        print(f"  {name:14} {wall[name]:7.2f} s, {processor[name]:7.2f} s of processors")
    for what, times in (("time", wall), ("processor time", processor)):
        print(f"  ratio in {what}: {times['reference'] / times['naive float32']:.2f}")
    child = [sys.executable, __file__, *sys.argv[1:], "--memory-only"]
    peak = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    print(f"  peak memory above the weights: {float(peak):.2f} experts in float64")


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """The best time of each, by the clock and of the processors."""
    x, topk, weights = problem(options)
    check(x, topk, weights)
    runs: dict[str, Callable[[], Tensor]] = {
        "naive float32": lambda: naive(x, topk, weights),
        "reference": lambda: layer(x, topk, weights, Emulated(BF16_COMBINE)),
    }
    wall, processor = (dict.fromkeys(runs, float("inf")) for _ in range(2))
    for _ in range(options.repeats):  # in turns, so that both meet the same machine
        for name, run in runs.items():
            start = time.perf_counter(), time.process_time()
            run()
            wall[name] = min(wall[name], time.perf_counter() - start[0])
            processor[name] = min(processor[name], time.process_time() - start[1])
    return wall, processor


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (
        ("experts", 32), ("hidden", 4096), ("intermediate", 2048), ("top-k", 6), ("tokens", 64),
        ("threads", 2), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def problem(options: argparse.Namespace) -> tuple[Tensor, TopK, MoEWeights]:
    """Random tokens and routing; experts are rolled copies of one, which is quick to make."""
    torch.manual_seed(0)
    count, hidden, width = options.experts, options.hidden, options.intermediate
    x = torch.randn(options.tokens, hidden).to(torch.bfloat16)
    scores = torch.rand(options.tokens, count)
    chosen = scores.topk(options.top_k, dim=1)
    topk = TopK(ids=chosen.indices, weights=chosen.values.softmax(dim=1), scaled=False)
    matrices = {}
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        base = (torch.randn(rows, columns) / columns**0.5).to(torch.bfloat16)
        matrices[name] = torch.empty(count, rows, columns, dtype=torch.bfloat16)
        for e in range(count):
            matrices[name][e] = base.roll(e * 7 + 1, dims=1)
    experts = ExpertWeights(w13=plain(matrices["w13"]), w2=plain(matrices["w2"]))
    return x, topk, MoEWeights(experts=experts, placement=Placement.contiguous(count, 1))


def naive(x: Tensor, topk: TopK, weights: MoEWeights) -> Tensor:
    """What one writes first: float32 throughout, the library's matmul and silu."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    experts = weights.experts
    for e in range(experts.count):
        rows, slots = (topk.ids == e).nonzero(as_tuple=True)
        if not len(rows):
            continue
        gate, up = (x[rows].float() @ experts.w13.data[e].float().T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ experts.w2.data[e].float().T
        y[rows] += topk.weights[rows, slots, None] * out
    return y.to(torch.bfloat16)


def check(x: Tensor, topk: TopK, weights: MoEWeights) -> None:
    """Stop unless the reference is close to the truth, the loop likewise, and bits are bits."""
    y = layer(x, topk, weights, Emulated(BF16_COMBINE))
    some = slice(0, 4)
    few = TopK(ids=topk.ids[some], weights=topk.weights[some], scaled=False)
    if not torch.equal(layer(x[some], few, weights, Emulated(BF16_COMBINE)), y[some]):
        sys.exit("the reference gives a row other bits in another batch")
    truth = layer(x[some], few, weights, EXACT)
    for name, rows in (("reference", y[some]), ("loop", naive(x[some], few, weights))):
        error = float(((rows.double() - truth).norm(dim=1) / truth.norm(dim=1)).max())
        if not error < 2.0**-7:
            sys.exit(f"the {name} is {error:.1e} away from the truth")
        print(f"{name}: right, {error:.1e} away from float64 arithmetic")


def peak_in_experts(options: argparse.Namespace) -> float:
    """Peak resident memory above that of the weights, in float64 experts."""
    x, topk, weights = problem(options)
    small = problem(
        argparse.Namespace(**(vars(options) | {"experts": 8, "hidden": 64, "intermediate": 64}))
    )
    layer(*small, Emulated(BF16_COMBINE))  # what a process takes once: threads, library buffers
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    layer(x, topk, weights, Emulated(BF16_COMBINE))
    return (status("VmHWM") - before) / (3 * options.hidden * options.intermediate * 8)


def status(field: str) -> int:
    """A size in bytes from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


if __name__ == "__main__":
    main()
