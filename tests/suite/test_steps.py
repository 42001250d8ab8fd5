"""The walk of serving steps: as data, run on the emulated device, and with faults planted in it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated.soak import ROWS, TINY, soak
from torch import Tensor

from megamoe.cli import main
from megamoe.dispatch.machine import H200
from megamoe.dispatch.session import PreparedWeights
from megamoe.errors import BadInput
from megamoe.kernels.sm90_pull_bf16 import Sm90PullBf16
from megamoe.problem import TopK
from megamoe.suite import soak as record
from megamoe.suite.cases import Shape, place
from megamoe.suite.pool import Outcome
from megamoe.suite.serve import CHAPTER, OTHER, PLACEMENTS, workspaces_of
from megamoe.suite.steps import KINDS, ROUTINGS, SKEW_MS, Step, graph_sizes, step, walk
from megamoe.suite.stock import stocked

WORLD, CAPACITY = 4, TINY.capacity


@functools.lru_cache
def steps(world: int, capacity: int, count: int = 1000) -> tuple[Step, ...]:
    return tuple(walk(0, count, world=world, capacity=capacity))


# --- as data --------------------------------------------------------------------------------------


def test_a_walk_follows_from_its_seed_and_may_begin_anywhere() -> None:
    whole = list(walk(3, 60, world=4, capacity=256))
    assert whole == list(walk(3, 60, world=4, capacity=256))
    assert whole[20:] == list(walk(3, 40, first=20, world=4, capacity=256))
    assert whole != list(walk(4, 60, world=4, capacity=256))


def test_a_walk_is_the_same_on_every_machine() -> None:
    assert [str(step(0, number, world=4, capacity=256)) for number in (0, 7, 31)] == [
        "step 0: decode, twice; tokens 6, 6, 6, 7; max_tokens None; eager",
        "step 7: refused, mixed; tokens 412, 412, 412, 412; max_tokens None; eager; "
        "refused for capacity",
        "step 31: edges, one rank; to rank 2; tokens 0, 9, 63, 33; max_tokens 64; graph of 64",
    ]


@pytest.mark.parametrize("capacity", [8, 256])
@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_thousand_steps_hold_everything(world: int, capacity: int) -> None:
    found = steps(world, capacity)
    assert {s.kind for s in found} == set(KINDS)
    assert {s.routing for s in found} == set(ROUTINGS)
    assert {s.refusal for s in found} == {"", "capacity", "max_tokens"}
    assert {s.graph for s in found} == {0, *graph_sizes(capacity)}
    assert {s.target for s in found} == set(range(world))
    assert {s.rounds(capacity) for s in found} >= {0, 1, 2, 3}
    assert {s.out for s in found} == {False, True}
    assert {r for s in found for r, ms in enumerate(s.late_ms) if ms} == set(range(world))
    counts = Counter(count for s in found for count in s.counts)
    for edge in (0, 1, 63, 64, 65, capacity - 1, capacity, capacity + 1):
        assert counts[edge] or capacity + 1 < edge
    announced = Counter(
        "nothing" if s.max_tokens is None else s.max_tokens - max(s.counts) > 0
        for s in found
        if not s.refusal and not s.graph
    )
    assert set(announced) == {"nothing", True, False}
    hot = {max(s.counts) - capacity for s in found if s.kind == "brim to one rank"}
    assert hot == {-1, 0, 1}
    assert all(s.routing == "one rank" for s in found if s.kind == "brim to one rank")
    if world > 1:
        assert any(s.counts.count(0) == world - 1 for s in found)
        assert any(0 < s.counts.count(0) < world - 1 for s in found) or world == 2
    assert any(not any(s.counts) for s in found)


@pytest.mark.parametrize(("world", "capacity"), [(1, 2), (2, 3), (4, 8), (8, 256), (3, 1000)])
def test_steps_keep_the_rules(world: int, capacity: int) -> None:
    for s in steps(world, capacity):
        assert len(s.counts) == len(s.late_ms) == world
        assert min(s.counts) >= 0
        assert set(s.late_ms) <= {0, SKEW_MS}
        assert 0 <= s.target < world
        if s.refusal:  # on every rank, or the others would wait for one that will not come
            limit = capacity if s.max_tokens is None else s.max_tokens
            assert all(count > limit for count in s.counts)
            assert (s.max_tokens is None) == (s.refusal == "capacity")
            assert not s.graph
        elif s.max_tokens is None:
            assert max(s.counts) <= capacity
        else:
            assert max(s.counts) <= s.max_tokens
        if s.graph:
            fitting = [size for size in graph_sizes(capacity) if size >= max(s.counts)]
            assert s.graph == s.max_tokens == fitting[0]
            assert s.mode == "graph"


def test_bad_walks_are_refused() -> None:
    with pytest.raises(BadInput, match="below 0"):
        next(walk(0, 1, first=-1, world=1, capacity=8))
    with pytest.raises(BadInput, match="capacity 1 is below 2"):
        next(walk(0, 1, world=1, capacity=1))


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_are_routed_as_their_section_says(placement: str) -> None:
    inputs, sections = stocked(
        Sm90PullBf16, TINY, placement, world=WORLD, rows=ROWS, seed=0, device=torch.device("cpu")
    )
    ids = inputs.topk.ids
    parts = {kind: ids[part.start : part.stop] for kind, part in sections.items()}
    assert sum(map(len, parts.values())) == len(ids) == ROWS
    assert (parts["empty", 0] == -1).all()
    assert (parts["hot", 0][:, 0] == 0).all()
    assert (parts["twice", 0][:, 0] == parts["twice", 0][:, -1]).all()
    assert 0.4 < float((parts["sparse", 0] == -1).double().mean()) < 0.65
    held = place(placement, TINY.num_experts, WORLD).slots
    for rank in range(WORLD):
        assert set(parts["one rank", rank].unique().tolist()) == set(held[rank])
    assert torch.equal(inputs.topk.weights.isnan(), ids < 0)
    assert ids.max() < TINY.num_experts


# --- on the emulated device -----------------------------------------------------------------------


def test_a_walk_through_the_emulated_device_has_the_reference_bits() -> None:
    """Three chapters, so three prepares of one walk; every launch is accounted for."""
    count, chapter, rows = 96, 32, ROWS // 2
    entry = soak(Sm90PullBf16, steps=count, chapter=chapter, rows=rows)
    assert record.passed(entry), record.line(entry, count)
    assert entry["differing"] == 0
    assert entry["stock_share"] == 1.0
    assert (entry["steps"], entry["prepares"]) == (count, count // chapter)
    walked = steps(WORLD, CAPACITY)[:count]
    assert entry["rows"] == sum(s.graph * WORLD or sum(s.counts) for s in walked if not s.refusal)
    assert entry["launches"] == sum(s.rounds(CAPACITY) for s in walked)
    assert entry["idle"] == sum(s.counts.count(0) for s in walked)
    assert entry["refused"] == sum(s.refusal != "" for s in walked) > 0
    assert entry["padded"] == sum(s.graph > 0 for s in walked) > 0
    still = [chapter * n for n in range(count // chapter) if PLACEMENTS[n] in OTHER]
    moves = sum(s.moves for s in walked if s.number // chapter * chapter in still)
    assert entry["moves"] == moves > 0
    assert entry["late"] == sum(any(s.late_ms) for s in walked) > 0
    opened = [(CAPACITY, *workspaces_of(n, CAPACITY)) for n in range(count // chapter)]
    assert sorted(map(len, opened)) == [1, 1, 2]
    before = sum(1 + -(-rows // size) for sizes in opened for size in sizes)
    assert entry["launched"] == [entry["launches"] + before] * WORLD  # warm-ups, rows alone


# --- faults ---------------------------------------------------------------------------------------

Forward = Callable[..., Tensor]  # steps pass ``out``; what the rows gave alone came without
Where = Callable[[Step], bool]


def dropped(real: Forward, layer: PreparedWeights, x: Tensor, topk: TopK, **more: Any) -> Tensor:
    """The last row of a full batch is lost."""
    y = real(layer, x, topk, **more)
    if len(x) == CAPACITY and "out" in more:
        y[-1] = 0
    return y


class Leaking:
    """One token alone gets what this rank's last call gave its first."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}

    def __call__(
        self, real: Forward, layer: PreparedWeights, x: Tensor, topk: TopK, **more: Any
    ) -> Tensor:
        y = real(layer, x, topk, **more)
        if len(x) == 1 and layer.rank in self.last and "out" in more:
            y[0] = self.last[layer.rank]
        elif len(x) > 1:
            self.last[layer.rank] = y[0].clone()
        return y


def one_round(real: Forward, layer: PreparedWeights, x: Tensor, topk: TopK, **more: Any) -> Tensor:
    """Tokens past the capacity are left out."""
    if (more.get("max_tokens") or 0) <= CAPACITY:
        return real(layer, x, topk, **more)
    y = torch.full_like(x, 3.0) if more["out"] is None else more["out"]
    part = slice(0, CAPACITY)
    some = TopK(ids=topk.ids[part], weights=topk.weights[part], scaled=False)
    y[part] = real(layer, x[part], some, max_tokens=CAPACITY)
    return y


def padding_computed(
    real: Forward, layer: PreparedWeights, x: Tensor, topk: TopK, **more: Any
) -> Tensor:
    """Rows of nothing but -1 get something, where a call was padded to its announced size."""
    y = real(layer, x, topk, **more)
    empty = (topk.ids < 0).all(1)
    if "out" in more and len(x) and more["max_tokens"] == len(x):
        y[empty] = 1.0
    return y


def truncated(real: Forward, layer: PreparedWeights, x: Tensor, topk: TopK, **more: Any) -> Tensor:
    """More than fits is cut off instead of refused."""
    if more.get("max_tokens") is None and len(x) > CAPACITY:
        return torch.zeros_like(x)
    return real(layer, x, topk, **more)


FAULTS: dict[str, tuple[Any, Where, str]] = {
    "a dropped row": (
        dropped,
        lambda s: CAPACITY in s.counts and not s.graph and not s.refusal,
        "nothing was written, the row is zero",
    ),
    "a leaked row": (
        Leaking(),
        lambda s: s.kind == "one token each" and not s.graph and not s.refusal,
        "holds the row of token",
    ),
    "one round for two": (
        one_round,
        lambda s: s.kind == "one over" and not s.graph,
        "error",
    ),
    "padding that is computed": (
        padding_computed,
        lambda s: s.graph > max(s.counts) > 0,
        "a row of nothing but -1 is not zero",
    ),
    "no refusal": (truncated, lambda s: s.refusal == "capacity", "the call was not refused"),
}
"""By name, the fault, the steps where it shows, and what the record must say."""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def plant(fault: Any) -> None:
        real = PreparedWeights.forward

        def forward(self: PreparedWeights, x: Tensor, topk: Any, **more: Any) -> Tensor:
            return fault(real, self, x, topk, **more)  # type: ignore[no-any-return]

        monkeypatch.setattr(PreparedWeights, "forward", forward)

    return plant


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_with_its_step(name: str, planted: Callable[[Any], None]) -> None:
    fault, where, words = FAULTS[name]
    number = next(s.number for s in steps(WORLD, CAPACITY) if where(s) and s.routing != "empty")
    planted(fault)
    entry = soak(Sm90PullBf16, steps=3, first=number)
    assert not record.passed(entry)
    failure = entry["first_failure"]
    said = record.line(entry, 3)
    assert failure["step"] == number, said
    assert words in failure["message"], said
    assert f"step {number}: " in said
    assert "--soak-seed 0" in said


def test_experts_that_move_without_their_table_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PreparedWeights.update

    def update(self: PreparedWeights, weights: Any) -> None:
        table = self._staging.replicas
        assert table is not None
        before = table.clone()
        real(self, weights)
        table.copy_(before)

    monkeypatch.setattr(PreparedWeights, "update", update)
    number = next(s.number for s in steps(WORLD, CAPACITY) if s.moves)
    entry = soak(Sm90PullBf16, steps=3, first=number)
    assert not record.passed(entry)
    assert entry["first_failure"]["step"] >= number


def test_other_bits_that_are_right_are_counted(planted: Callable[[Any], None]) -> None:
    """Where the size of a call changes a kernel's rounding, its rows are judged for themselves."""

    def nudged(real: Forward, layer: Any, x: Tensor, topk: TopK, **more: Any) -> Tensor:
        y = real(layer, x, topk, **more)
        if "out" in more:
            y.view(torch.int16)[:, 0] ^= (y[:, 0] != 0).to(torch.int16)
        return y

    planted(nudged)
    entry = soak(Sm90PullBf16, steps=6)
    assert record.passed(entry), record.line(entry, 6)
    assert 0 < entry["differing"] <= sum(sum(s.counts) for s in steps(WORLD, CAPACITY)[:6])


# --- on a pool ------------------------------------------------------------------------------------


class Told:
    """A pool whose ranks answer from a list, a task each."""

    world_size = 2

    def __init__(self, *answers: Outcome) -> None:
        self.answers: Iterator[Outcome] = iter(answers)
        self.asked: list[dict[str, Any]] = []

    def run(self, task: Any, **asked: Any) -> Outcome:
        self.asked.append(asked)
        return next(self.answers)


def answer(**changes: Any) -> Outcome:
    tally = {name: 1 for name in (*record.OF_EACH, *record.OF_ALL)} | {
        "wrong_steps": 0,
        "failures": [],
        "stock": [{"right": True, "recipe": True, "share": 0.999, "message": ""}],
        "seconds": 1.0,
    }
    return Outcome(status="done", values={0: tally, 1: tally | changes})


def walked(pool: Any, **more: Any) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    shape = Shape(capacity=8)
    entry = record.soak(pool, Sm90PullBf16, shape, H200, tell=lines.append, **more)
    return entry, lines


def test_tasks_begin_with_chapters_and_are_summed() -> None:
    pool = Told(answer(), answer(), answer())
    entry, lines = walked(pool, steps=70, seed=5, first=CHAPTER - 10)
    assert [(a["first"], a["steps"]) for a in pool.asked] == [
        (CHAPTER - 10, 10),
        (CHAPTER, 50),
        (CHAPTER + 50, 10),
    ]
    assert pool.asked[1]["timeout"] > pool.asked[2]["timeout"]  # a chapter may compile
    assert all(a["seed"] == 5 and a["placements"] == PLACEMENTS for a in pool.asked)
    assert record.passed(entry)
    assert (entry["rows"], entry["steps"], entry["stock_share"]) == (6, 3, 0.999)
    assert lines[-1].startswith("sm90_pull_bf16: 70 of 70 steps in 3 s")


def test_a_walk_ends_after_the_task_that_failed() -> None:
    failure = {
        "step": 61, "what": "step 61: any, hot", "rank": 1, "message": "dropped slot 1",
        "token": 4, "row": 9, "ids": [0, 3], "wrong_rows": 2,
    }  # fmt: skip
    pool = Told(answer(), answer(wrong_steps=1, failures=[failure]), answer())
    entry, lines = walked(pool, steps=1000)
    assert len(pool.asked) == 2
    assert not record.passed(entry)
    assert entry["first_failure"] == failure
    assert "FAILED at step 61: any, hot\n   rank 1, token 4, experts [0, 3]" in lines[-1]
    assert "stock row 9: dropped slot 1" in lines[-1]
    assert "--soak-seed 0 --soak-from" in lines[-1]


@pytest.mark.parametrize(
    "last",
    [
        Outcome(status="hung", rank=1, phase="step 3: any", message="no answer within 120 s"),
        answer(stock=[{"right": False, "recipe": True, "share": 0.5, "message": "is wrong"}]),
    ],
)
def test_a_rank_that_hangs_or_a_wrong_stock_fails_the_walk(last: Outcome) -> None:
    entry, lines = walked(Told(answer(), last), steps=100)
    assert not record.passed(entry)
    assert "FAILED: " + ("rank 1 hung" if last.rank else "is wrong") in lines[-1]


def test_no_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kernel", "reference", "--soak", "0"]) == 2
    assert "--soak 0 is below 1 step" in capsys.readouterr().err
