"""What serving does with a prepared layer on one GPU: graphs of several sizes on several
workspaces, experts exchanged under captured graphs, and a compiled caller.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import TopK
from megamoe.kernels.base import Kernel
from megamoe.oracle import CLASSES, Inputs
from megamoe.problem import Placement
from megamoe.suite import cases, run
from megamoe.suite.cases import Shape
from megamoe.suite.serve import Static

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = torch.device("cuda", 0)
SHAPE = Shape()
SMALL, SIZES = 64, (8, 64, 200)  # a workspace besides the greatest, and the graphs' tokens
PULL = ("sm90_pull_bf16", "sm90_pull_fp8", "sm90_pull_mxfp4", "sm90_pull_nvfp4")
KERNEL = pytest.mark.parametrize("kernel", [run.kernel_named(n) for n in PULL], ids=PULL)


@pytest.fixture(autouse=True)
def _synchronised() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def inputs(kernel: type[Kernel], placement: Placement | None = None, seed: int = 0) -> Inputs:
    """A layer on one rank, and as many tokens as its greatest workspace takes."""
    shape = run.shape_of(kernel, SHAPE)
    placement = placement or Placement.contiguous(shape.num_experts, 1)
    request = cases.request_of(shape, placement, kernel, shape.capacity)
    return CLASSES["normal"](request, kernel.recipe(request), seed, DEVICE)


def prepared(kernel: type[Kernel], made: Inputs, **more: Any) -> megamoe.PreparedWeights:
    """A warm layer over copies: a pack may be a view, which an exchange of experts writes over."""
    layer = megamoe.prepare(
        copy.deepcopy(made.layer), max_tokens_per_rank=SHAPE.capacity, top_k=SHAPE.top_k,
        kernel=kernel.sheet.name, tuning="off", **more,
    )  # fmt: skip
    assert layer.decision.name == kernel.sheet.name
    layer.warmup()
    return layer


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of ``call`` as one CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def sound(y: Tensor) -> bool:
    """Numbers, and not the zeros that nothing would give too."""
    return bool(y.isfinite().all()) and bool((y != 0).any(1).float().mean() > 0.9)


def batch(made: Inputs, tokens: int, turn: int) -> tuple[Tensor, TopK]:
    """Other rows at every turn."""
    topk = made.topk
    ids, weights = (t.roll(17 * turn, 0)[:tokens] for t in (topk.ids, topk.weights))
    return made.x.roll(5 * turn, 0)[:tokens], TopK(ids=ids, weights=weights, scaled=False)


@KERNEL
def test_graphs_of_several_sizes_in_turns(kernel: type[Kernel]) -> None:  # K56, K68
    made = inputs(kernel)
    shape = run.shape_of(kernel, SHAPE)
    with prepared(kernel, made, workspaces=(SMALL,)) as layer:
        served = [layer.choice.capacities[layer.choice.index(size)] for size in SIZES]
        assert served == [SMALL, SMALL, SHAPE.capacity]
        steps = list(itertools.product(SIZES, range(4)))
        random.Random(3).shuffle(steps)
        wanted = {}
        for size, turn in steps:  # all of them first: an eager call must not mend a replay
            x, topk = batch(made, size - turn % 2, turn)  # odd turns do not fill their graph
            wanted[size, turn] = layer.forward(x, topk, max_tokens=size)
            assert sound(wanted[size, turn])
        statics = {size: Static.of(size, shape, DEVICE) for size in SIZES}

        def capture(size: int) -> Callable[[], Any]:
            s = statics[size]
            s.fill(*batch(made, size, 9))
            return captured(lambda: layer.forward(s.x, s.topk, max_tokens=size, out=s.out))

        replay = {size: capture(size) for size in SIZES}
        for between in (False, True):
            for size, turn in steps:
                x, topk = batch(made, size - turn % 2, turn)
                statics[size].fill(x, topk)
                replay[size]()
                y = statics[size].out
                assert same(y[: len(x)], wanted[size, turn]), (size, turn, between)
                assert not bool(y[len(x) :].any())
                if between:
                    y = layer.forward(x, topk, max_tokens=size)
                    assert same(y, wanted[size, turn]), (size, turn, "eager")
        layer.check()


@KERNEL
def test_graphs_go_on_with_exchanged_experts(kernel: type[Kernel]) -> None:  # K66
    """Two experts have a replica, and others have one in the next placement."""
    order = range(SHAPE.num_experts)
    places = ((*order, 0, 1), (5, *reversed(order), 2))
    old, new = (
        inputs(kernel, Placement(num_experts=len(order), slots=(slots,)), seed)
        for seed, slots in enumerate(places)
    )
    assert_other_scales(old, new)
    x, topk = batch(old, SHAPE.capacity, 0)
    wanted = []
    for made in (old, new):
        with prepared(kernel, made, most_replicas=2) as fresh:
            wanted.append(fresh.forward(x, topk))
    assert all(sound(y) for y in wanted)
    assert not same(*wanted)
    with prepared(kernel, old, most_replicas=2) as layer:
        out = torch.empty_like(x)
        replay = captured(lambda: layer.forward(x, topk, out=out))
        for made, want in zip((old, new, old, new), wanted * 2, strict=True):
            layer.update(made.layer)
            out.fill_(torch.nan)
            replay()
            assert same(out, want)
            assert same(layer.forward(x, topk), want)
        layer.check()


def assert_other_scales(old: Inputs, new: Inputs) -> None:
    """Of expert 7, which both placements hold once."""
    held = [(made.layer.experts, made.layer.placement.slots[0].index(7)) for made in (old, new)]
    for name in ("w13", "w2"):
        for part in ("scale", "global_scale"):
            a, b = (getattr(getattr(e, name), part) for e, _ in held)
            if a is None:
                continue
            a, b = (t[slot].view(torch.uint8) for t, (_, slot) in zip((a, b), held, strict=True))
            assert not torch.equal(a, b), f"{part} of {name}"


@KERNEL
def test_a_compiled_caller(kernel: type[Kernel]) -> None:
    made = inputs(kernel)
    with prepared(kernel, made, workspaces=(SMALL,)) as layer:

        @torch.compile(fullgraph=True, backend="aot_eager")
        def step(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            topk = TopK(ids=ids + 0, weights=weights * 1, scaled=False)
            y = layer.forward(x, topk, max_tokens=SMALL)
            return y, layer.forward(x * 1, topk, max_tokens=SMALL, out=out)

        for turn in range(3):
            x, topk = batch(made, SMALL // 2 + 1, turn)
            want = layer.forward(x, topk, max_tokens=SMALL)
            assert sound(want)
            out = torch.full_like(x, torch.nan)
            for y in (*step(x, topk.ids, topk.weights, out), out):
                assert same(y, want)
        layer.check()
