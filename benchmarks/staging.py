"""What staging a batch costs: the one launch and torch's own operations.

    python benchmarks/staging.py [--hidden 4096] [--top-k 6] [--tokens 8 64 512 4096]

Needs a CUDA GPU with Triton. Both paths must fill the same bits first. "host" is the time that a
call from Python takes before it returns, with nothing waiting on the GPU; "eager" the time of a
call in a row of them; "graph" that of a call inside a CUDA graph, which is what the GPU itself
takes. Each is the median over rows of calls, in microseconds; the last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.formats import FP8_1X128, FP8_ROW, MXFP8, PLAIN_BF16, Format
from megamoe.kernels import fused
from megamoe.kernels.base import Batch
from megamoe.kernels.staging import Staging

CALLS, REPEATS = 50, 11  # a figure is the median of REPEATS, each over CALLS calls
EXPERTS, CAPACITY = 128, 4096
WHAT = ("host", "eager", "graph")

MODES = {
    "routing": PLAIN_BF16,  # rows are taken as they are
    "bf16": PLAIN_BF16,
    "fp8_1x128": FP8_1X128,
    "fp8_row": FP8_ROW,
    "mxfp8": MXFP8,
}


def median(run: Callable[[], float]) -> float:
    return round(statistics.median(run() for _ in range(REPEATS)), 2)


def on_gpu(run: Callable[[], object]) -> float:
    """Microseconds a call, between events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / CALLS


def on_host(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(path: Callable[[], None]) -> dict[str, float]:
    def many() -> None:
        for _ in range(CALLS):
            path()

    many()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    graph.replay()
    return {
        "host": median(lambda: on_host(many)),
        "eager": median(lambda: on_gpu(many)),
        "graph": median(lambda: on_gpu(graph.replay)),
    }


def buffers(fmt: Format, x: Tensor, k: int, *, own: bool) -> Batch:
    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(CAPACITY, columns, device=x.device).to(dtype)

    columns = x.shape[1]
    width = fmt.block[1] or columns
    return Batch(
        x=empty(columns, fmt.element.dtype) if own else x,
        ids=empty(k, torch.int64),
        weights=empty(k, torch.float32),
        scales=None if fmt.scale is None else empty(columns // width, fmt.scale.dtype),
        count=len(x),
        tokens=CAPACITY,
    )


def same(one: Batch, other: Batch) -> bool:
    pairs = [(one.x, other.x), (one.ids, other.ids), (one.weights, other.weights)]
    if one.scales is not None and other.scales is not None:
        pairs.append((one.scales, other.scales))
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512, 4096])
    options = parser.parse_args()
    device, k = torch.device("cuda"), options.top_k
    serves, rows = fused.serves, []
    table = torch.arange(2 * EXPERTS, device=device).view(EXPERTS, 2)
    heads = " ".join(f"{path:>5} {what:>5}" for path in ("fused", "torch") for what in WHAT)
    print(f"{'mode':>10} {'tokens':>6} {heads}")
    for mode, fmt in MODES.items():
        plan = Staging(
            num_experts=EXPERTS,
            rank=1,
            sticky=torch.zeros(1, dtype=torch.bool, device=device),
            replicas=table,
            counts=torch.full((EXPERTS,), 2, device=device),
            fmt=fmt,
        )
        for tokens in options.tokens:
            x = torch.randn(tokens, options.hidden, device=device).bfloat16()
            ids = torch.randint(-1, EXPERTS, (tokens, k), device=device, dtype=torch.int32)
            weights = torch.rand(tokens, k, device=device)
            assert serves(x), "no Triton, or a GPU without E4M3"
            found, filled = {}, []
            for name in ("fused", "torch"):
                fused.serves = serves if name == "fused" else (lambda x: False)
                into = buffers(fmt, x, k, own=mode != "routing")

                def path(
                    plan: Staging = plan, x: Tensor = x, ids: Tensor = ids, w: Tensor = weights,
                    into: Batch = into,
                ) -> None:  # fmt: skip
                    plan(x, ids, w, into, factor=2.5)

                found[name] = measure(path)
                filled.append(into)
            fused.serves = serves
            assert same(*filled), f"{mode} of {tokens}"
            rows.append({"mode": mode, "tokens": tokens, "us": found})
            figures = (found[name][what] for name in found for what in WHAT)
            print(f"{mode:>10} {tokens:>6} " + " ".join(f"{figure:>11.2f}" for figure in figures))
    name = torch.cuda.get_device_name(device)
    versions = {"torch": torch.__version__, "device": name}
    setup = {"hidden": options.hidden, "top_k": k, "capacity": CAPACITY}
    print(json.dumps({**setup, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
