"""The cases every kernel is judged on: data, and the one task that runs a case on a rank.

A case says how many tokens each rank has, which class of input, where experts live and how tokens
are routed. Inputs are seeded and portable, so every rank builds all ranks' weights by itself and
judges its own tokens against the whole layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from megamoe import oracle
from megamoe.dispatch.select import KERNELS
from megamoe.errors import bad_input
from megamoe.formats import CATALOGUE, Format
from megamoe.kernels.base import Kernel
from megamoe.problem import Activation, Placement, Request, TopK
from megamoe.suite.pool import Phase

Counts = Callable[[int, int], list[int]]  # (world_size, capacity) -> tokens of each rank
Routing = Callable[[Tensor, int], Tensor]  # (ids, num_experts) -> ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The geometry a kernel is judged at; ``fmt`` names the weights' format."""

    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 16
    top_k: int = 4
    capacity: int = 256
    limit: float | None = 10.0
    symmetric: bool = False
    fmt: str = "bf16"
    activation_scales: tuple[float, float] | None = None

    @property
    def format(self) -> Format:
        return next(f for f in CATALOGUE if f.name == self.fmt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    replays: also captured in a CUDA graph, replayed on other inputs. clamped: at the shape's limit;
    else the layer has none. core: part of a short run.
    """

    name: str
    counts: Counts
    inputs: str = "normal"
    placement: Literal["contiguous", "permuted", "uneven", "replicated"] = "contiguous"
    routing: Routing | None = None
    replays: bool = False
    clamped: bool = True
    core: bool = True

    def shape(self, shape: Shape) -> Shape:
        """The shape that it is judged at."""
        return shape if self.clamped else replace(shape, limit=None)


def full(world: int, capacity: int) -> list[int]:
    return [capacity] * world


def some(world: int, capacity: int) -> list[int]:
    return [96] * world


def idle(world: int, capacity: int) -> list[int]:
    """The last rank has nothing; on one rank, a call without tokens."""
    return [64] * (world - 1) + [0]


def uneven(world: int, capacity: int) -> list[int]:
    return [(7 + 61 * rank) % capacity for rank in range(world)]


def exactly(tokens: int) -> Counts:
    return lambda world, capacity: [tokens] * world


def hot(ids: Tensor, experts: int) -> Tensor:
    """Every token's first slot goes to expert 0."""
    first = torch.zeros_like(ids[:, :1])
    rest = torch.where(ids[:, 1:] == 0, ids[:, :1], ids[:, 1:])
    return torch.cat([first, rest], dim=1)


def nothing(ids: Tensor, experts: int) -> Tensor:
    return torch.full_like(ids, -1)


def twice(ids: Tensor, experts: int) -> Tensor:
    """The last slot repeats the first slot's expert."""
    return torch.cat([ids[:, :-1], ids[:, :1]], dim=1)


CASES: tuple[Case, ...] = (
    Case(name="full", counts=full),
    Case(name="idle rank", counts=idle),
    Case(name="one hot expert", counts=some, routing=hot),
    Case(name="all empty", counts=some, routing=nothing),
    Case(name="duplicates", counts=some, routing=twice),
    *(Case(name=f"{n} tokens", counts=exactly(n), core=False) for n in (1, 63, 64, 65, 127, 129)),
    Case(name="uneven counts", counts=uneven),
    Case(name="permuted", counts=some, placement="permuted"),
    Case(name="uneven placement", counts=some, placement="uneven"),
    Case(name="replicated", counts=some, placement="replicated"),
    Case(name="saturating", counts=some, inputs="saturating"),
    Case(name="outlier", counts=some, inputs="outlier", core=False),
    Case(name="near-cancelling", counts=some, inputs="near-cancelling", core=False),
    Case(name="no clamp", counts=some, inputs="saturating", clamped=False, core=False),
    Case(name="exact grid", counts=exactly(32), inputs="exact-grid"),
    Case(name="poisoned", counts=some, inputs="poisoned"),
    Case(name="graph replay", counts=uneven, replays=True),
)


def case(name: str) -> Case:
    found = [c for c in CASES if c.name == name]
    if not found:
        names = ", ".join(c.name for c in CASES)
        raise bad_input("case", repr(name), "is unknown", f"use one of {names}")
    return found[0]


def place(how: str, experts: int, world: int) -> Placement:
    """Where experts live: in order, strided and reversed, unequal counts, or with replicas."""
    plain = Placement.contiguous(experts, world)
    if how == "permuted":
        slots = tuple(tuple(reversed(range(r, experts, world))) for r in range(world))
        return Placement(num_experts=experts, slots=slots)
    if how == "uneven":  # the last rank gives all but one of its experts to the first
        slots = plain.slots
        moved = slots[-1][1:] if world > 1 else ()
        kept = (*slots[:-1], slots[-1][:1]) if world > 1 else slots
        return Placement(num_experts=experts, slots=(kept[0] + moved, *kept[1:]))
    if how == "replicated":  # every rank also holds expert 0, and the next rank's first
        extra = tuple((0, *plain.slots[(r + 1) % world][:1]) for r in range(world))
        return Placement(
            num_experts=experts,
            slots=tuple(own + more for own, more in zip(plain.slots, extra, strict=True)),
        )
    return plain


# --- on a rank ----------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """What a rank of the pool keeps between cases."""

    device: torch.device
    group: Any
    layers: dict[Any, tuple[Any, megamoe.PreparedWeights]]


def setup(rank: int, world_size: int, port: int) -> State:
    """A device (shared where there are fewer GPUs than ranks) and a process group."""
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        device = torch.device("cuda", rank % count)
        torch.cuda.set_device(device)
        backend = "nccl" if world_size <= count else "gloo"
    group = None
    if world_size > 1:
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        group = dist.group.WORLD
    return State(device, group, {})


def finish(state: State) -> None:
    for _, layer in state.layers.values():
        layer.close()


def run(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: State,
    kernel: str,
    shape: Shape,
    name: str,
    seed: int = 0,
) -> dict[str, Any]:
    """One case on this rank: prepare (or reuse) the layer, call, repeat, replay, judge."""
    what = case(name)
    shape = what.shape(shape)
    chosen = next(k for k in KERNELS if k.sheet.name == kernel)
    counts = [min(c, shape.capacity) for c in what.counts(world_size, shape.capacity)]
    phase("inputs")
    inputs = _inputs(what, chosen, shape, counts, world_size, seed, state.device)
    start = sum(counts[:rank])
    mine = replace(inputs.rows(slice(start, start + counts[rank])), rank=rank)
    phase("prepare")
    layer = _layer(state, what, kernel, shape, inputs, rank)
    recipe = layer.decision.recipe
    phase("forward")
    begun = time.perf_counter()
    y = layer.forward(mine.x, mine.topk)
    again = layer.forward(mine.x, mine.topk)
    _wait(state.device)
    seconds = time.perf_counter() - begun
    record: dict[str, Any] = {
        "tokens": counts[rank],
        "seconds": round(seconds, 4),
        "repeat_equal": _same(y, again),
    }
    if what.replays and state.device.type == "cuda":
        phase("graph")
        record["replay_equal"] = _replays(layer, mine, counts[rank])
    phase("judge")
    computed = [replace(r, experts=chosen.as_computed(r.experts)) for r in inputs.ranks]
    measure = oracle.yardstick(replace(mine, weights=computed), recipe)
    report = measure.judge(y, exact_grid=what.inputs == "exact-grid")
    phase("judged")
    return record | {
        "right": report.right,
        "recipe": report.recipe,
        "share": report.share,
        "share_floor": report.share_floor,
        "worst_of_budget": max(
            (float(c.excess.max()) for c in report.checks if len(c.value)), default=0.0
        ),
        "cosine": report.cosine,
        "relative_error": report.relative_error,
        "message": report.message,
    }


def request_of(shape: Shape, placement: Placement, kernel: type[Kernel], tokens: int) -> Request:
    return Request(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        placement=placement,
        top_k=shape.top_k,
        max_tokens_per_rank=max(1, tokens),
        weights=shape.format,
        activation=Activation(limit=shape.limit, symmetric=shape.symmetric),
        weight_at=_function(kernel),
        activation_scales=shape.activation_scales,
    )


def _function(kernel: type[Kernel]) -> Any:
    """The layer's own place of the weight; fc2_input and combine are one function."""
    at = kernel.sheet.recipe.weight_at
    return at if at in ("fc2_input", "combine") else "combine"


def _inputs(
    what: Case,
    kernel: type[Kernel],
    shape: Shape,
    counts: Sequence[int],
    world: int,
    seed: int,
    device: torch.device,
) -> oracle.Inputs:
    placement = place(what.placement, shape.num_experts, world)
    request = request_of(shape, placement, kernel, sum(counts))
    inputs = oracle.CLASSES[what.inputs](request, kernel.recipe(request), seed, device)
    if what.routing is not None:
        ids = what.routing(inputs.topk.ids, shape.num_experts)
        inputs = replace(inputs, topk=TopK(ids=ids, weights=inputs.topk.weights, scaled=False))
    return inputs.rows(slice(0, sum(counts)))


def _layer(
    state: State, what: Case, kernel: str, shape: Shape, inputs: oracle.Inputs, rank: int
) -> megamoe.PreparedWeights:
    """The prepared layer; one is kept per set of weights, and cases of one set share it."""
    special = what.inputs in ("exact-grid", "near-cancelling", "poisoned")
    key = (kernel, tuple(asdict(shape).items()), what.placement, what.inputs if special else "")
    if key not in state.layers:
        for _, old in state.layers.values():
            old.close()
        state.layers.clear()
        weights = inputs.ranks[rank]
        layer = megamoe.prepare(
            weights,
            state.group,
            max_tokens_per_rank=shape.capacity,
            top_k=shape.top_k,
            kernel=kernel,
            activation_scales=shape.activation_scales,
        )
        layer.warmup()
        state.layers[key] = weights, layer
    return state.layers[key][1]


def _replays(layer: megamoe.PreparedWeights, inputs: oracle.Inputs, tokens: int) -> bool:
    """Capture one call, replay it on other inputs than it was captured on, compare with eager."""
    x, ids = inputs.x.clone(), inputs.topk.ids.clone()
    topk = TopK(ids=ids, weights=inputs.topk.weights.clone(), scaled=False)
    out = torch.empty_like(x)
    layer.forward(x, topk, out=out)
    _wait(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(x, topk, out=out)
    equal = True
    for turn in range(3):
        x.copy_(inputs.x.roll(turn, 0))
        ids.copy_(inputs.topk.ids.roll(turn, 1))
        graph.replay()
        _wait(x.device)
        replayed = out.clone()
        equal &= _same(replayed, layer.forward(x, topk))
    return equal


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
