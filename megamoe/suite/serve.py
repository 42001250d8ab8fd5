"""A walk of steps on one rank: a layer that serves them, and what verifies each of them.

Nothing is read from a GPU between steps, as in serving: comparisons stay on the device and are read
every few steps, by when the call that went wrong is still at hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

import megamoe
from megamoe import oracle
from megamoe.dispatch.watchdog import OnFailure
from megamoe.errors import BadInput, Unsupported
from megamoe.problem import TopK
from megamoe.suite import run
from megamoe.suite.cases import Shape, State
from megamoe.suite.pool import Phase
from megamoe.suite.steps import Step, graph_sizes, walk
from megamoe.suite.stock import Stock, stocked

ROWS = 2048  # of the stock
CHAPTER = 250  # steps between a prepare and the next
PLACEMENTS: tuple[Literal["contiguous", "uneven", "replicated", "permuted"], ...] = (
    "contiguous",
    "uneven",
    "replicated",
    "permuted",
)
"""Of chapters, in turn."""
OTHER: dict[str, Literal["contiguous", "permuted"]] = {
    "contiguous": "permuted",
    "permuted": "contiguous",
}
"""Where a chapter's experts move to, and back, while graphs stay: to as many slots a rank."""
READ_EVERY = 16
DESCRIBED = 3  # failures of a task; more are only counted


@dataclass(slots=True, eq=False)
class Static:
    """The buffers of one size, and the graph over them where one could be captured.

    Rows past a call's own keep the x of older calls, and have ids of -1.
    """

    x: Tensor
    topk: TopK
    out: Tensor
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, size: int, shape: Shape, device: torch.device) -> Static:
        x = torch.zeros(size, shape.hidden_size, dtype=torch.bfloat16, device=device)
        ids = torch.full((size, shape.top_k), -1, dtype=torch.int64, device=device)
        weights = torch.full(ids.shape, torch.nan, device=device)
        return cls(x, TopK(ids=ids, weights=weights, scaled=False), torch.empty_like(x))

    def fill(self, x: Tensor, topk: TopK) -> None:
        n = len(x)
        self.x[:n], self.topk.ids[:n], self.topk.weights[:n] = x, topk.ids, topk.weights
        self.topk.ids[n:], self.topk.weights[n:] = -1, torch.nan
        self.out.fill_(torch.nan)


def workspaces_of(chapter: int, capacity: int) -> tuple[int, ...]:
    """Those besides the greatest: in every other chapter a small one too."""
    return (max(1, capacity // 4),) if chapter % 2 else ()


class Served:
    """One prepared layer, its stock and its graphs; collective to make and to close."""

    def __init__(
        self,
        phase: Phase,
        rank: int,
        world_size: int,
        *,
        device: torch.device,
        group: Any,
        kernel: str,
        shape: Shape,
        placement: str,
        workspaces: Sequence[int],
        seed: int,
        rows: int,
        on_failure: OnFailure,
    ) -> None:
        kind = run.kernel_named(kernel)
        self.rank, self.device, self.shape = rank, device, shape
        phase(f"rows, {placement}")
        inputs, sections = stocked(
            kind, shape, placement, world=world_size, rows=rows, seed=seed, device=device
        )
        phase(f"prepare, {placement}")
        self.places = [inputs.ranks[rank]]
        if placement in OTHER:
            moved, _ = stocked(
                kind, shape, OTHER[placement], world=world_size, rows=1, seed=seed, device=device
            )
            self.places.append(moved.ranks[rank])
        self.layer = megamoe.prepare(
            inputs.ranks[rank],
            group,
            max_tokens_per_rank=shape.capacity,
            top_k=shape.top_k,
            kernel=kernel,
            workspaces=workspaces,
            most_replicas=1 if placement in OTHER else None,
            on_failure=on_failure,
        )
        self.layer.warmup()
        phase("the rows' output")
        computed = [replace(r, experts=kind.as_computed(r.experts)) for r in inputs.ranks]
        measure = oracle.yardstick(
            replace(inputs, weights=computed, rank=rank), self.layer.decision.recipe
        )
        choice = self.layer.choice
        alone = {
            space: self._alone(inputs, tokens)
            for tokens, space in zip(choice.bounds, choice.serves, strict=True)
        }
        phase("the rows' verdict")
        self.verdicts = [_verdict(measure.judge(y), choice.capacities[i]) for i, y in alone.items()]
        expected = {i: torch.cat([y, y.new_zeros(1, y.shape[1])]) for i, y in alone.items()}
        self.stock = Stock(inputs, sections, measure, expected)
        phase("graphs")
        self.statics = {size: self._static(size) for size in graph_sizes(shape.capacity)}

    def _alone(self, inputs: oracle.Inputs, tokens: int) -> Tensor:
        """All rows, ``tokens`` a call, from the workspace that serves steps of this size."""
        parts = [inputs.rows(slice(at, at + tokens)) for at in range(0, inputs.tokens, tokens)]
        return torch.cat([self.layer.forward(p.x, p.topk, max_tokens=tokens) for p in parts])

    def space(self, step: Step) -> int:
        """The workspace that serves a step."""
        choice = self.layer.choice
        if step.max_tokens is None:
            return choice.index(self.shape.capacity)
        return choice.index(choice.rounds(step.max_tokens)[1])

    def _static(self, size: int) -> Static:
        static = Static.of(size, self.shape, self.device)
        if self.layer.capturable:
            self._into(static, size)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._into(static, size)
            static.graph = graph
        return static

    def _into(self, static: Static, size: int) -> None:
        self.layer.forward(static.x, static.topk, max_tokens=size, out=static.out)

    def call(self, step: Step) -> tuple[Tensor, Tensor]:
        """The rows that were asked for and what came out, both on the device and nobody else's."""
        rows = self.stock.rows(step, self.rank).to(self.device)
        x, topk = self.stock.batch(rows)
        if not step.graph:
            out = torch.full_like(x, torch.nan) if step.out else None
            return rows, self.layer.forward(x, topk, max_tokens=step.max_tokens, out=out)
        static = self.statics[step.graph]
        static.fill(x, topk)
        if static.graph is None:
            self._into(static, step.graph)
        else:
            static.graph.replay()
        padded = rows.new_full((step.graph,), self.stock.padding)
        padded[: len(rows)] = rows
        return padded, static.out.clone()

    def move(self) -> bool:
        """Exchange the places of the experts, if the kernel can and the placement has another."""
        if len(self.places) < 2:
            return False
        self.places.reverse()
        try:
            self.layer.update(self.places[0])
        except Unsupported:  # on every rank alike
            self.places.clear()
            return False
        return True

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.statics.clear()
        self.layer.close()


def _verdict(report: oracle.Report, capacity: int) -> dict[str, Any]:
    names = ("right", "recipe", "share", "message")
    return {"capacity": capacity} | {name: getattr(report, name) for name in names}


@dataclass(slots=True, eq=False)
class Tally:
    """What a rank did and found in one task.

    rows: verified, padding included. replays: of CUDA graphs. moves: of experts, in place.
    launches: rounds of all calls. differing: rows of other bits than the stock's. failures: the
    first in words, with all that it takes to repeat them. stock: the verdict on each workspace.
    """

    steps: int = 0
    calls: int = 0
    launches: int = 0
    padded: int = 0
    replays: int = 0
    refused: int = 0
    prepares: int = 0
    moves: int = 0
    rows: int = 0
    idle: int = 0
    late: int = 0
    differing: int = 0
    wrong_steps: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    stock: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, step: Step, rank: int, message: str, **more: Any) -> None:
        self.wrong_steps += 1
        if len(self.failures) < DESCRIBED:
            what = {"step": step.number, "what": str(step), "rank": rank, "message": message}
            self.failures.append(what | more)

    def judge(self, step: Step, rows: Tensor, y: Tensor, served: Served) -> None:
        """Rows of a step have other bits than the stock's: are they right, for all that?"""
        stock = served.stock
        space = served.space(step)
        off = stock.differs(rows, y, space).nonzero().flatten()
        self.differing += len(off)
        wrong, message = stock.judge(rows[off], y[off], space)
        if not bool(wrong.any()):
            return
        token = int(off[wrong][0])
        row = int(rows[token])
        ids = None if row == stock.padding else stock.inputs.topk.ids[row].tolist()
        more = {"token": token, "row": row, "ids": ids, "wrong_rows": int(wrong.sum())}
        self.fail(step, served.rank, message, **more)


class Walker:
    """Runs steps on a served layer, and reads the comparisons every so often."""

    def __init__(self, served: Served, tally: Tally) -> None:
        self.served, self.tally = served, tally
        self._waiting: list[tuple[Step, Tensor, Tensor, Tensor]] = []

    def run(self, step: Step) -> None:
        served, tally = self.served, self.tally
        tally.steps += 1
        if late := step.late_ms[served.rank]:
            time.sleep(late / 1e3)
            tally.late += 1
        if step.moves:
            tally.moves += served.move()
        if step.refusal:
            self._refused(step)
            return
        rows, y = served.call(step)
        differs = served.stock.differs(rows, y, served.space(step))
        self._waiting.append((step, rows, y, differs.sum()))
        tally.calls += 1
        tally.launches += step.rounds(served.shape.capacity)
        tally.padded += step.graph > 0
        tally.replays += step.graph > 0 and served.statics[step.graph].graph is not None
        tally.rows += len(rows)
        tally.idle += step.counts[served.rank] == 0
        if len(self._waiting) >= READ_EVERY:
            self.read()

    def _refused(self, step: Step) -> None:
        try:
            self.served.call(step)
        except BadInput:
            self.tally.refused += 1
        else:
            self.tally.fail(step, self.served.rank, "the call was not refused")

    def read(self) -> None:
        """Read the comparisons that wait; judge what differs."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        counts = torch.stack([count for *_, count in waiting]).tolist()
        for count, (step, rows, y, _) in zip(counts, waiting, strict=True):
            if count:
                self.tally.judge(step, rows, y, self.served)
        try:
            self.served.layer.check()
        except BadInput as error:
            self.tally.fail(waiting[-1][0], self.served.rank, f"at or before it: {error}")


def serve(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: State,
    kernel: str,
    shape: Shape,
    seed: int,
    first: int,
    steps: int,
    placements: Sequence[str] = PLACEMENTS,
    rows: int = ROWS,
    chapter: int = CHAPTER,
    on_failure: OnFailure = "abort",
) -> dict[str, Any]:
    """``steps`` steps of a seed's walk, from the one numbered ``first``, on this rank.

    The layer lasts from one task to the next; where a chapter begins it is closed, and prepared
    anew with the experts placed otherwise.
    """
    tally, begun = Tally(), time.perf_counter()
    walker: Walker | None = None
    current: Any = None
    for step in walk(seed, steps, first=first, world=world_size, capacity=shape.capacity):
        number = step.number // chapter
        key = ("soak", kernel, tuple(asdict(shape).items()), seed, number)
        if key != current:
            if walker is not None:
                walker.read()
            if key not in state.layers:
                _clear(state)
                made = Served(
                    phase, rank, world_size, device=state.device, group=state.group, kernel=kernel,
                    shape=shape, placement=placements[number % len(placements)],
                    workspaces=workspaces_of(number, shape.capacity), seed=seed, rows=rows,
                    on_failure=on_failure,
                )  # fmt: skip
                # Closed at the end of the pool like any other layer.
                state.layers[key] = made, cast(megamoe.PreparedWeights, made)
                tally.stock += made.verdicts
                tally.prepares += 1
            walker, current = Walker(state.layers[key][0], tally), key
        assert walker is not None
        phase(str(step))
        walker.run(step)
    if walker is not None:
        phase("read")
        walker.read()
    tally.seconds = round(time.perf_counter() - begun, 2)
    return asdict(tally)


def _clear(state: State) -> None:
    for _, layer in state.layers.values():
        layer.close()
    state.layers.clear()
