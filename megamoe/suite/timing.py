"""What one rank of a benchmark does: a layer, its contenders, a verdict on each, times in turns.

Contenders run in one process on the same tokens: `forward` eager and as a CUDA graph; FlashInfer's
own layer called by hand, over the same weights, configuration and workspace, which is what one
would write without this package; and `torch_grouped` on BF16 weights. None is timed before the
oracle has found it right.

Where several workspaces are asked for, `forward` takes the one that was measured to serve the step,
`smallest` is the same layer in the smallest that covers it, and the layer by hand has a workspace
of the step's own size, with the tactic that FlashInfer gives that size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from megamoe import oracle
from megamoe.dispatch.cache import plain
from megamoe.dispatch.tuning import Mode
from megamoe.dispatch.workspaces import Choice
from megamoe.errors import Unsupported
from megamoe.formats import quantise
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Kernel
from megamoe.kernels.torch_grouped import TorchGrouped
from megamoe.problem import ExpertWeights, MoEWeights, Placement, Recipe, TopK
from megamoe.reference.case import share
from megamoe.suite import cases, run
from megamoe.suite.cases import Shape
from megamoe.suite.pool import Phase

BURST_S = 0.005  # one sample: as many calls as take about so long
ROUNDS = (5, 200)  # samples of each contender, at least and at most
HOST_CALLS, HOST_ROUNDS = 4, 15
JUDGED_TOKENS, JUDGED_EXPERTS = 64, 8  # what the oracle looks at: it has to stay quick
BY_HAND = (
    "sm90_pull_bf16", "sm90_pull_fp8", "sm90_pull_mxfp4", "sm90_pull_nvfp4", "sm90_push_bf16",
    "sm90_push_fp8",
)  # fmt: skip
"""Kernels whose FlashInfer layer takes BF16 rows and the weights of ours."""

Routing = Literal["balanced", "random"]
"""balanced: every expert is asked equally often, which reads most weights; random: as it comes."""

ROUTINGS = get_args(Routing)

Call = Callable[[], Any]
LayerCall = Callable[[Tensor, TopK], Tensor]


# --- clocks ---------------------------------------------------------------------------------------


class Clock(Protocol):
    def device(self, call: Call, count: int) -> float:
        """Seconds a call takes when ``count`` are issued one after another, all work done."""

    def host(self, call: Call, count: int) -> float:
        """Seconds until a call returns to the host, whatever the device still does."""


@dataclass(frozen=True, slots=True)
class EventClock:
    """CUDA events around a burst that starts on an idle device, so that no backlog hides the host.

    group: the ranks that start each burst together.
    """

    group: Any = None

    def device(self, call: Call, count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._meet()
        first.record()
        for _ in range(count):
            call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000 / count

    def host(self, call: Call, count: int) -> float:
        self._meet()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - begun
        torch.cuda.synchronize()
        return seconds / count

    def _meet(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)
        torch.cuda.synchronize()


class HostClock:
    """Of a CPU, where a call has done its work when it returns."""

    def device(self, call: Call, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begun) / count

    host = device


# --- a rank's state -------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """What a rank keeps between configurations: its experts, and what verdicts need."""

    device: torch.device
    group: Any
    clock: Clock
    experts: dict[Any, ExpertWeights] = field(default_factory=dict)
    yardsticks: dict[Any, oracle.Yardstick] = field(default_factory=dict)

    def most(self, values: Sequence[float]) -> list[float]:
        """The greatest of each over all ranks, so that all of them decide alike."""
        if self.group is None:
            return list(values)
        on = self.device if dist.get_backend(self.group) == "nccl" else "cpu"
        shared = torch.tensor(values, dtype=torch.float64, device=on)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in shared.tolist()]

    def all(self, good: bool) -> bool:
        return self.most([0.0 if good else 1.0]) == [0.0]


def setup(rank: int, world_size: int, port: int) -> State:
    base = cases.setup(rank, world_size, port)
    on_gpu = base.device.type == "cuda"
    return State(base.device, base.group, EventClock(base.group) if on_gpu else HostClock())


# --- weights, tokens, routing ---------------------------------------------------------------------


def make_experts(shape: Shape, numbers: Sequence[int], device: torch.device) -> ExpertWeights:
    """Random experts in the shape's format, quantised on the device one at a time; an expert's
    bytes depend on its number alone, gates have a deviation of about 1."""
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def matrix(draw: torch.Generator, rows: int, columns: int) -> Tensor:
        values = torch.randn(1, rows, columns, generator=draw, device=device)
        return values * torch.full_like(values, columns**-0.5)

    def one(number: int) -> ExpertWeights:
        draw = torch.Generator(device).manual_seed(1000 + number)
        return ExpertWeights(
            w13=quantise(matrix(draw, 2 * inner, hidden), shape.format, row_groups=2),
            w2=quantise(matrix(draw, hidden, inner), shape.format),
        )

    return share(numbers, one)


def balanced(tokens: int, top_k: int, experts: int, seed: int) -> Tensor:
    """Random ids int64 [tokens, top_k], on the CPU: no expert twice in a row, and any two experts
    equally often, but for the last, incomplete turn."""
    draw = torch.Generator().manual_seed(seed)
    rows = math.lcm(experts, top_k) // top_k
    turn = torch.arange(rows * top_k) % experts
    turns = [
        torch.randperm(experts, generator=draw)[turn].view(rows, top_k)
        for _ in range(max(1, -(-tokens // rows)))
    ]
    return torch.cat(turns)[:tokens]


def scattered(tokens: int, top_k: int, experts: int, seed: int) -> Tensor:
    """Random ids int64 [tokens, top_k], on the CPU: any ``top_k`` experts equally likely."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=draw).topk(top_k, dim=1).indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A rank's batch, and what the step asks of this rank's experts. hit: experts that any rank's
    token goes to. slots: (token, expert) pairs. judged: rows that the oracle looks at."""

    x: Tensor
    topk: TopK
    hit: int
    slots: int
    judged: Tensor | None = None


def make_tokens(
    shape: Shape,
    tokens: int,
    rank: int,
    world: int,
    device: torch.device,
    routing: Routing = "balanced",
) -> Tokens:
    """The batch that is timed: BF16 normal rows, the routing drawn over all ranks' tokens."""
    draw_ids = balanced if routing == "balanced" else scattered
    every = draw_ids(world * tokens, shape.top_k, shape.num_experts, seed=7)
    mine = list(Placement.contiguous(shape.num_experts, world).slots[rank])
    asked = torch.bincount(every.flatten(), minlength=shape.num_experts)[mine]
    draw = torch.Generator(device).manual_seed(100 + rank)
    x = torch.randn(tokens, shape.hidden_size, generator=draw, device=device)
    ids = every[rank * tokens : (rank + 1) * tokens].to(device)
    return Tokens(
        x=x.to(torch.bfloat16), topk=_topk(ids, draw), hit=int((asked > 0).sum()),
        slots=int(asked.sum()),
    )  # fmt: skip


def _topk(ids: Tensor, draw: torch.Generator) -> TopK:
    w = torch.rand(ids.shape, generator=draw, device=ids.device) + 0.25
    return TopK(ids=ids, weights=w / w.sum(1, keepdim=True), scaled=False)


def judged_experts(shape: Shape) -> list[int]:
    """The few experts of the judged rows, spread over all of them and so over all ranks."""
    count = min(shape.num_experts, max(shape.top_k, JUDGED_EXPERTS))
    return [number * shape.num_experts // count for number in range(count)]


def judged_rows(shape: Shape, count: int, rank: int, device: torch.device) -> tuple[Tensor, TopK]:
    """``count`` rows of which each goes to experts of ``judged_experts``, numbered among them."""
    draw = torch.Generator(device).manual_seed(200 + rank)
    x = torch.randn(count, shape.hidden_size, generator=draw, device=device)
    among = len(judged_experts(shape))
    ids = balanced(count, shape.top_k, among, seed=11 + rank).to(device)
    return x.to(torch.bfloat16), _topk(ids, draw)


def with_judged(batch: Tokens, shape: Shape, rank: int) -> Tokens:
    """A batch of the same size in which some rows, evenly spread, are the judged ones."""
    tokens, device = len(batch.x), batch.x.device
    count = min(tokens, JUDGED_TOKENS)
    rows = torch.arange(count, device=device) * tokens // max(1, count)
    x, topk = judged_rows(shape, count, rank, device)
    numbers = torch.tensor(judged_experts(shape), device=device)
    mixed = TopK(
        ids=batch.topk.ids.index_copy(0, rows, numbers[topk.ids]),
        weights=batch.topk.weights.index_copy(0, rows, topk.weights),
        scaled=False,
    )
    return replace(batch, x=batch.x.index_copy(0, rows, x), topk=mixed, judged=rows)


def yardstick(
    state: State, kernel: type[Kernel], shape: Shape, recipe: Recipe, count: int, rank: int
) -> oracle.Yardstick:
    """What an output's judged rows are held to: the layer of the judged experts alone."""
    key = (kernel.sheet.name, replace(shape, capacity=1), recipe.name, count)
    if key not in state.yardsticks:
        numbers = judged_experts(shape)
        placement = Placement.contiguous(len(numbers), 1)
        request = cases.request_of(shape, placement, kernel, 1)
        layer = MoEWeights(
            experts=kernel.as_computed(make_experts(shape, numbers, state.device)),
            placement=placement,
            activation=request.activation,
            weight_at=request.weight_at,
        )
        x, topk = judged_rows(shape, count, rank, state.device)
        inputs = oracle.Inputs(x=x, topk=topk, weights=layer)
        state.yardsticks[key] = oracle.yardstick(inputs, recipe)
    return state.yardsticks[key]


# --- the contenders -------------------------------------------------------------------------------


class ByHand:
    """FlashInfer's layer as one calls it without this package: BF16 rows, its own staging.

    Made over a prepared layer's packed weights and configuration, so it also shares the workspace.
    Opening, the first call and closing are collective.
    """

    def __init__(
        self, layer: megamoe.PreparedWeights, kernel: type[Kernel], capacity: int | None = None
    ) -> None:
        """capacity: of a workspace with FlashInfer's own tactic; None shares the layer's greatest.

        Raises Unsupported where there is nothing to call by hand.
        """
        name = kernel.sheet.name
        if name not in BY_HAND:
            raise Unsupported(f"calling FlashInfer by hand is not implemented for {name}")
        mega: flashinfer.MegaLayer = layer._kernel.layer  # type: ignore[union-attr]
        theirs = mega.layer
        self.context, self.api, self.dtype = mega.context, mega.api, kernel.sheet.id_dtype
        names = ("_bootstrap", "_fleet_params", "_mega_config")
        bootstrap, fleet, config = (getattr(theirs, name, None) for name in names)
        if bootstrap is None or fleet is None or config is None:
            raise Unsupported("this FlashInfer's layer does not show how it was configured")
        config = dataclasses.replace(config, quantize_input=True)
        tactic = layer.tactics[layer.request.max_tokens_per_rank].knobs
        if capacity is not None:
            fleet = dataclasses.replace(fleet, max_tokens_per_rank=capacity)
        elif tactic:  # the same workspace is shared by those who ask for the same
            knobs = dataclasses.replace(config.megakernel, knobs=dict(tactic))
            config = dataclasses.replace(config, megakernel=knobs)
        with flashinfer.environment(self.context):
            self.layer = self.api.MoEEpLayer(bootstrap, fleet, None, backend=config)
        self.launched = False

    def __call__(self, x: Tensor, topk: TopK) -> Tensor:
        """topk: ids in the kernel's own type, which a caller would have made once."""
        tensors = self.api.MoEEpTensors(
            hidden_states=x, topk_ids=topk.ids, topk_weights=topk.weights
        )
        if self.launched:
            y: Tensor = self.layer.forward(tensors)
            return y
        with flashinfer.environment(self.context):
            y = self.layer.forward(tensors)
        self.launched = True
        return y

    def __enter__(self) -> ByHand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            with flashinfer.environment(self.context):
                self.layer.destroy()


@dataclass(slots=True)
class Contender:
    """One way to compute the layer, on its own inputs' types, with its verdict's yardstick."""

    name: str
    call: LayerCall
    measure: oracle.Yardstick
    capturable: bool
    id_dtype: torch.dtype = torch.int64

    def topk(self, topk: TopK) -> TopK:
        return replace(topk, ids=topk.ids.to(self.id_dtype))

    def judge(self, batch: Tokens) -> oracle.Report:
        assert batch.judged is not None
        return self.measure.judge(self.call(batch.x, self.topk(batch.topk))[batch.judged])


def step(layer: megamoe.PreparedWeights, choice: Choice, tokens: int) -> LayerCall:
    """``forward`` of a step of ``tokens`` a rank, in the workspace that ``choice`` says."""

    def call(x: Tensor, topk: TopK) -> Tensor:
        layer.choice = choice
        return layer.forward(x, topk, max_tokens=tokens)

    return call


def captured(call: Call, want: Tensor) -> tuple[Call, bool]:
    """A CUDA graph of a warmed-up call, and whether its replay has the bits of ``want``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(y.view(torch.int16), want.view(torch.int16))
    return functools.partial(_replay, graph, y), same


def _replay(graph: torch.cuda.CUDAGraph, y: Tensor) -> Tensor:
    graph.replay()
    return y


# --- the task -------------------------------------------------------------------------------------


def measure(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: State,
    kernel: str,
    shape: Shape,
    tokens: int,
    seconds: float,
    routing: Routing = "balanced",
    workspaces: Sequence[int] = (),
    tuning: Mode | None = None,
) -> dict[str, Any]:
    """One configuration on this rank: prepare, judge, and only then time. A picklable record.

    workspaces: capacities besides the shape's. tuning: of ``forward``'s layer.
    """
    chosen = run.kernel_named(kernel)
    notes: list[str] = []
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        phase("weights")
        batch = make_tokens(shape, tokens, rank, world_size, state.device, routing)
        mixed = with_judged(batch, shape, rank)
        assert mixed.judged is not None
        count = len(mixed.judged)

        def contender(
            name: str, kind: type[Kernel], form: Shape, **how: Any
        ) -> tuple[Contender, megamoe.PreparedWeights]:
            phase(f"{name}: prepare")
            layer = stack.enter_context(_prepared(state, kind, form, rank, world_size, **how))
            phase(f"{name}: judge")
            ruler = yardstick(state, kind, form, layer.decision.recipe, count, rank)
            return Contender(name, layer.forward, ruler, layer.capturable), layer

        ours, layer = contender("forward", chosen, shape, workspaces=workspaces, tuning=tuning)
        choices = {"forward": layer.choice, "smallest": Choice.of(layer.choice.capacities)}
        if workspaces:
            ours.call = step(layer, choices["forward"], tokens)
        prepared = time.perf_counter() - begun
        report = ours.judge(mixed)
        verdicts = {ours.name: verdict(report)}
        record = {
            "status": "timed",
            "prepare_s": round(prepared, 2),
            "verdicts": verdicts,
            "notes": notes,
            "experts_hit": batch.hit,
            "weight_bytes": _bytes_of(batch.hit, state.experts[_weights_key(shape)]),
            "operations": 6 * batch.slots * shape.hidden_size * shape.intermediate_size,
        }
        if workspaces:
            record["workspaces"] = _workspaces(layer, choices, tokens)
        if not state.all(report.right):
            return record | {"status": "wrong", "message": report.message}
        field_ = [ours]
        size = tokens if workspaces else None
        others: list[Callable[[], Contender]] = [
            lambda: _by_hand(stack, layer, chosen, ours, size),
        ]
        if workspaces:
            smallest = step(layer, choices["smallest"], tokens)
            others.insert(0, lambda: replace(ours, name="smallest", call=smallest))
        if chosen is not TorchGrouped:
            grouped = replace(shape, fmt="bf16")
            others.append(lambda: contender("torch_grouped", TorchGrouped, grouped)[0])
        for make in others:
            made = _tried(make, mixed, notes, world_size)
            if made is None:
                continue
            other, report = made
            verdicts[other.name] = verdict(report)
            if state.all(report.right):
                field_.append(other)
            else:
                notes.append(f"{other.name} is wrong and was not timed: {report.message}")
        return record | _times(phase, state, field_, batch, notes, seconds, world_size)


def _prepared(
    state: State, kernel: type[Kernel], shape: Shape, rank: int, world: int, **how: Any
) -> megamoe.PreparedWeights:
    """how: what else ``megamoe.prepare`` is asked for."""
    placement = Placement.contiguous(shape.num_experts, world)
    request = cases.request_of(shape, placement, kernel, shape.capacity)
    key = _weights_key(shape)
    if key not in state.experts:
        state.experts[key] = make_experts(shape, placement.slots[rank], state.device)
    weights = MoEWeights(
        experts=state.experts[key],
        placement=placement,
        rank=rank,
        activation=request.activation,
        weight_at=request.weight_at,
    )
    layer = megamoe.prepare(
        weights,
        state.group,
        max_tokens_per_rank=shape.capacity,
        top_k=shape.top_k,
        kernel=kernel.sheet.name,
        **how,
    )
    layer.warmup()
    return layer


def _workspaces(
    layer: megamoe.PreparedWeights, choices: Mapping[str, Choice], tokens: int
) -> dict[str, Any]:
    """The capacity that serves the step by each choice, and how the first was come by: no steps are
    measured where an earlier layer's or the cache's choice was found.
    """
    measured = choices["forward"]
    return {
        "capacity": {name: c.capacities[c.index(tokens)] for name, c in choices.items()},
        "choice": measured.to_json(),
        "steps_measured": layer.started.steps,
        "tactics": {
            str(c): {"knobs": plain(dict(tactic.knobs)), "source": tactic.source}
            for c, tactic in layer.tactics.items()
        },
    }


def _weights_key(shape: Shape) -> tuple[Any, ...]:
    return (shape.fmt, shape.num_experts, shape.hidden_size, shape.intermediate_size)


def _bytes_of(hit: int, experts: ExpertWeights) -> int:
    """Of so many experts in their logical format, scales included; a rank that has none reads 0."""
    return hit * (experts.nbytes // max(1, experts.count))


def _by_hand(
    stack: contextlib.ExitStack,
    layer: megamoe.PreparedWeights,
    kernel: type[Kernel],
    ours: Contender,
    capacity: int | None,
) -> Contender:
    hand = stack.enter_context(ByHand(layer, kernel, capacity))
    return Contender("by hand", hand, ours.measure, ours.capturable, kernel.sheet.id_dtype)


def _tried(
    make: Callable[[], Contender], mixed: Tokens, notes: list[str], world: int
) -> tuple[Contender, oracle.Report] | None:
    """A contender and its verdict; one that fails is left out, with a note.

    On several ranks only a refusal may fail, since all ranks share it: else one would wait.
    """
    try:
        made = make()
        return made, made.judge(mixed)
    except Unsupported as error:
        notes.append(str(error))
    except Exception as error:
        if world > 1:
            raise
        notes.append(f"a contender failed: {type(error).__name__}: {error}")
    return None


def verdict(report: oracle.Report) -> dict[str, Any]:
    """A report's figures, as JSON has them."""
    worst = max((float(c.excess.max()) for c in report.checks if len(c.value)), default=0.0)
    return {
        "right": report.right,
        "recipe": report.recipe,
        "tokens": len(report.error),
        "share": report.share,
        "share_floor": report.share_floor,
        "worst_of_budget": worst,
        "message": report.message,
    }


def _times(
    phase: Phase,
    state: State,
    contenders: Sequence[Contender],
    batch: Tokens,
    notes: list[str],
    seconds: float,
    world: int,
) -> dict[str, Any]:
    """Capture what can be captured, then time everything in turns."""
    calls: dict[str, Call] = {}
    eager: dict[str, Call] = {}
    for c in contenders:
        call = functools.partial(c.call, batch.x, c.topk(batch.topk))
        eager[c.name] = calls[c.name] = call
        want = call()
        if not c.capturable:
            notes.append(f"{c.name} was not captured in a CUDA graph")
            continue
        phase(f"{c.name}: capture")
        try:
            replay, same = captured(call, want)
        except Exception as error:
            if world > 1:
                raise
            notes.append(f"{c.name} in a CUDA graph: {type(error).__name__}: {error}")
            continue
        if state.all(same):
            calls[f"{c.name} graph"] = replay
        else:
            notes.append(f"{c.name}: a replay has other bits than the call; it was not timed")
    phase("time")
    samples = in_turns(calls, state, seconds)
    phase("host time")
    host = host_times(eager, state.clock)
    return {
        "times": {name: summary(values) for name, values in samples.items()},
        "host_us": {name: round(1e6 * value, 2) for name, value in host.items()},
    }


def in_turns(calls: Mapping[str, Call], state: State, seconds: float) -> dict[str, list[float]]:
    """Samples of seconds a call, A B C, B C A, ...; bursts of one length on every rank."""
    clock, names = state.clock, list(calls)
    for name in names:
        calls[name]()
    guess = state.most([clock.device(calls[name], 3) for name in names])
    counts = [max(1, min(50, round(BURST_S / max(g, 1e-9)))) for g in guess]
    turn = sum(g * n for g, n in zip(guess, counts, strict=True))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(seconds / max(turn, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for place in range(len(names)):
            i = (number + place) % len(names)
            samples[names[i]].append(clock.device(calls[names[i]], counts[i]))
    return samples


def host_times(calls: Mapping[str, Call], clock: Clock) -> dict[str, float]:
    """The median seconds until a call returns, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            samples[name].append(clock.host(call, HOST_CALLS))
    return {name: statistics.median(values) for name, values in samples.items()}


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, and the medians of both halves of the run, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    half = len(seconds) // 2
    halves = [statistics.median(seconds[:half]), statistics.median(seconds[half:])]
    return {
        "median_ms": round(1e3 * middle, 5),
        "quartiles_ms": [round(1e3 * low, 5), round(1e3 * high, 5)],
        "halves_ms": [round(1e3 * value, 5) for value in halves],
        "samples": len(seconds),
    }
