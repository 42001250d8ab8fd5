"""What coding a batch of activations costs: the fused kernel and torch's own operations.

    python benchmarks/coding.py [--hidden 4096] [--tokens 8 64 512 4096]

Needs a CUDA GPU with Triton. Both paths must give the bits of ``formats.quantise`` on the batch
first. "eager" is the median time of a call from Python, launches included, over batches of calls;
"graph" the median time of a call inside a CUDA graph, which is what the GPU itself takes. The last
line is the same as JSON, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.formats import FP8_1X128, FP8_ROW, MXFP8, Format, quantise
from megamoe.kernels import coding
from megamoe.kernels.operands import coded, mx_coded

CALLS, REPEATS = 50, 11  # a figure is the median of REPEATS, each over CALLS calls

Path = Callable[[], tuple[Tensor, Tensor]]


def timed(run: Callable[[], object], calls: int) -> float:
    """Microseconds a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / calls)
    return statistics.median(taken)


def measure(path: Path) -> dict[str, float]:
    def many() -> None:
        for _ in range(CALLS):
            path()

    many()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    graph.replay()
    return {"eager": round(timed(many, CALLS), 2), "graph": round(timed(graph.replay, CALLS), 2)}


def check(path: Path, x: Tensor, fmt: Format) -> None:
    want = quantise(x, fmt)
    assert want.scale is not None
    codes, scales = path()
    assert torch.equal(codes.view(torch.uint8), want.data.view(torch.uint8)), f"{fmt} codes"
    assert torch.equal(scales.view(torch.uint8), want.scale.view(torch.uint8)), f"{fmt} scales"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512, 4096])
    options = parser.parse_args()
    device = torch.device("cuda")
    serves = coding.serves
    rows = []
    print(f"{'format':>10} {'tokens':>6}   {'fused eager':>11} {'graph':>8}   torch eager    graph")
    for fmt in (FP8_1X128, FP8_ROW, MXFP8):
        for tokens in options.tokens:
            x = torch.randn(tokens, options.hidden, device=device).bfloat16()
            assert serves(x), "no Triton, or a GPU without E4M3"

            def path(x: Tensor = x, fmt: Format = fmt) -> tuple[Tensor, Tensor]:
                return mx_coded(x) if fmt is MXFP8 else coded(x, fmt)

            found = {}
            for name in ("fused", "torch"):
                coding.serves = serves if name == "fused" else (lambda x: False)
                check(path, x, fmt)
                found[name] = measure(path)
            coding.serves = serves
            rows.append({"format": fmt.name, "tokens": tokens, "us": found})
            f, t = found["fused"], found["torch"]
            print(
                f"{fmt.name:>10} {tokens:>6}   {f['eager']:>11.2f} {f['graph']:>8.2f}   "
                f"{t['eager']:>11.2f} {t['graph']:>8.2f}"
            )
    name = torch.cuda.get_device_name(device)
    versions = {"torch": torch.__version__, "device": name}
    print(json.dumps({"hidden": options.hidden, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
