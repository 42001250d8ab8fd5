"""What the shared expert costs beside the megakernel, and what it costs in a row with it.

    python benchmarks/shared_expert.py [--kernel sm90_pull_fp8] [--shared 2048] [--tokens 8 64 ...]

One layer on one GPU, called in three ways: "beside" runs the shared expert on a stream of its own,
overlapped with the kernel, as a layer does; "in a row" runs it on the kernel's stream, where it
comes before the kernel and nothing overlaps; "without" leaves it out. Each is timed eager and as a
CUDA graph, in turns, over bursts between CUDA events. First checked are the bits: "beside" and "in
a row" give the same, which is "without" plus the shared expert alone, and so do all replays.

"hidden" is the share of the shared expert's time that the overlap saves: (in a row - beside) / (in
a row - without). Times are medians in milliseconds; the last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import megamoe
from megamoe.dispatch.shared import SharedFFN
from megamoe.formats import CATALOGUE
from megamoe.problem import MoEWeights, Placement, SharedExpert, TopK
from megamoe.suite import bench, cases, run, timing
from megamoe.suite.cases import Shape

WAYS = ("beside", "in a row", "without")
HEADS = tuple(f"{way}{graph}" for graph in ("", " graph") for way in WAYS)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="sm90_pull_fp8")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--shared", type=int, default=2048, help="the shared expert's width")
    parser.add_argument(
        "--shared-format", default="bf16", choices=[f.name for f in CATALOGUE], help="its weights'"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each token count")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    clock: timing.Clock = timing.EventClock() if on_gpu else timing.HostClock()
    state = timing.State(device, None, clock)
    kernel = run.kernel_named(options.kernel)
    shape = run.shape_of(
        kernel,
        Shape(
            hidden_size=options.hidden,
            intermediate_size=options.intermediate,
            num_experts=options.experts,
            top_k=options.top_k,
            capacity=max(options.tokens),
        ),
    )
    weights = make_weights(options, shape, device)
    rows = []
    print(f"{'tokens':>6} {'workspace':>9} " + " ".join(f"{head:>14}" for head in HEADS))
    with megamoe.prepare(
        weights, max_tokens_per_rank=shape.capacity, top_k=shape.top_k, kernel=options.kernel,
        workspaces=options.tokens,
    ) as layer:  # fmt: skip
        layer.warmup()
        experts = ways(weights, layer)
        for tokens in options.tokens:
            batch = timing.make_tokens(shape, tokens, 0, 1, device)
            calls: dict[str, timing.Call] = {
                way: functools.partial(call, layer, shared, batch.x, batch.topk)
                for way, shared in experts.items()
            }
            calls |= checked(calls, batch.x, weights, on_gpu)
            samples = timing.in_turns(calls, state, options.seconds)
            times = {name: timing.summary(values) for name, values in samples.items()}
            row = {
                "tokens": tokens,
                "workspace": layer.choice.capacities[layer.choice.index(tokens)],
                "times": times,
                "hidden": {
                    graph.strip() or "eager": hidden(times, graph)
                    for graph in ("", " graph")
                    if f"beside{graph}" in times
                },
            }
            rows.append(row)
            print(told(row), flush=True)
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    record = {**vars(options), "torch": torch.__version__, "device": name, "rows": rows}
    print(json.dumps(record), flush=True)


def make_weights(options: argparse.Namespace, shape: Shape, device: torch.device) -> MoEWeights:
    placement = Placement.contiguous(shape.num_experts, 1)
    request = cases.request_of(shape, placement, run.kernel_named(options.kernel), shape.capacity)
    alone = replace(shape, intermediate_size=options.shared, fmt=options.shared_format)
    numbers = range(shape.num_experts)
    return MoEWeights(
        experts=timing.make_experts(shape, numbers, device),
        shared=SharedExpert(weights=timing.make_experts(alone, [shape.num_experts], device)),
        placement=placement,
        activation=request.activation,
        weight_at=request.weight_at,
    )


def ways(weights: MoEWeights, layer: megamoe.PreparedWeights) -> dict[str, SharedFFN | None]:
    """A fresh layer's shared expert in each way: its own, one without a stream, none."""
    assert weights.shared is not None
    assert layer._shared is not None, f"{layer.decision.name} has the shared expert inside"
    row = SharedFFN(weights.shared)
    assert row.stream is not None or layer.device.type == "cpu"
    row.stream = None
    return {"beside": layer._shared, "in a row": row, "without": None}


def call(layer: megamoe.PreparedWeights, shared: SharedFFN | None, x: Tensor, topk: TopK) -> Tensor:
    layer._shared = shared
    return layer.forward(x, topk, max_tokens=len(x))


def checked(
    calls: Mapping[str, timing.Call], x: Tensor, weights: MoEWeights, on_gpu: bool
) -> dict[str, timing.Call]:
    """The calls as CUDA graphs, once all bits are as they should be."""
    assert weights.shared is not None
    wanted = {way: function() for way, function in calls.items()}
    for way, function in calls.items():
        assert torch.equal(function(), wanted[way]), f"{way}: a second call has other bits"
    assert torch.equal(wanted["beside"], wanted["in a row"]), "the overlap changes bits"
    alone = SharedFFN(weights.shared)(x)
    assert torch.equal(wanted["in a row"], wanted["without"] + alone), "the shared expert is wrong"
    assert not torch.equal(wanted["beside"], wanted["without"]), "the shared expert adds nothing"
    graphs = {}
    for way, function in calls.items() if on_gpu else ():
        graphs[f"{way} graph"], same = timing.captured(function, wanted[way])
        assert same, f"{way}: a replay has other bits"
    return graphs


def hidden(times: dict[str, Any], graph: str) -> float | None:
    """The share of the shared expert's time that the overlap saves; None where it takes none."""
    beside, row, without = (times[f"{way}{graph}"]["median_ms"] for way in WAYS)
    return round((row - beside) / (row - without), 3) if row > without else None


def told(row: dict[str, Any]) -> str:
    cells = (bench._time(row["times"], head) for head in HEADS)
    shares = ", ".join(f"{name} {share}" for name, share in row["hidden"].items())
    figures = " ".join(f"{cell:>14}" for cell in cells)
    return f"{row['tokens']:>6} {row['workspace']:>9} {figures}  hidden: {shares}"


if __name__ == "__main__":
    main()
