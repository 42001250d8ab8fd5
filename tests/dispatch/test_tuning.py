"""Start-up tuning with threads for ranks, a clock of tables, and kernels that fail where told."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from megamoe.dispatch.cache import Cache, Key, digest
from megamoe.dispatch.machine import H200
from megamoe.dispatch.tuning import MARGIN, Knobs, Mode, Tactic, Tuner, admitted, winner
from megamoe.dispatch.workspaces import Choice, points
from megamoe.errors import BadInput, MegaMoEError, RankFailure
from megamoe.problem import Placement, Request

REQUEST = Request(
    hidden_size=256,
    intermediate_size=128,
    placement=Placement.contiguous(8, 2),
    top_k=2,
    max_tokens_per_rank=64,
)
A, B, C = ({"tile": (128, n, 64), "name": name} for n, name in ((8, "A"), (16, "B"), (32, "C")))
OFFER: dict[int, list[Knobs]] = {64: [A, B, C], 256: [A, B, C]}
TIMES = {"A": 1.0, "B": 0.5, "C": 0.8}


class Store:
    """Every rank's values by name and turn; a rank that ended without coming is an error."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.held: dict[tuple[str, int], dict[int, str]] = {}
        self.changed = threading.Condition()
        self.left: set[int] = set()

    def gather_of(self, rank: int) -> Callable[[str, str], list[str]]:
        turns = iter(range(10_000))

        def gather(what: str, value: str) -> list[str]:
            turn = next(turns)
            with self.changed:
                mine = self.held.setdefault((what, turn), {})
                mine[rank] = value
                self.changed.notify_all()
                self.changed.wait_for(
                    lambda: len(mine) == self.world or self.left - mine.keys(), timeout=20
                )
                if len(mine) < self.world:
                    raise RankFailure(f"{what} waited in vain")
                return [mine[r] for r in range(self.world)]

        return gather


class Clock:
    """A kernel whose seconds are a table; ``faults`` names (phase, knobs) that raise here."""

    def __init__(self, times: Mapping[str, float], faults: set[tuple[str, str]]) -> None:
        self.times, self.faults = times, faults
        self.now: str | None = None
        self.opened: list[tuple[int, str]] = []
        self.timed: list[str] = []
        self.closed = 0

    def open(self, capacity: int, knobs: Knobs) -> None:
        assert self.now is None, "the last candidate's owner still lives"
        self.now = knobs["name"]
        self.opened.append((capacity, knobs["name"]))
        if ("open", knobs["name"]) in self.faults:
            raise RuntimeError("does not\ncompile")

    def time(self) -> float:
        assert self.now is not None
        self.timed.append(self.now)
        if ("time", self.now) in self.faults:
            raise RuntimeError("does not run")
        return self.times[self.now]

    def close(self) -> None:
        assert self.now is not None
        self.now, self.closed = None, self.closed + 1


@dataclasses.dataclass
class Start:
    """One start of every rank: what each decided, and what it cost."""

    tactics: list[dict[int, Tactic]]
    choices: list[Choice]
    tuners: list[Tuner]
    clocks: list[Clock]
    errors: list[Exception]

    @property
    def names(self) -> dict[int, str]:
        """The winners, which all ranks must have alike."""
        assert not self.errors, self.errors
        every = [{c: t.knobs["name"] for c, t in made.items()} for made in self.tactics]
        assert all(e == every[0] for e in every)
        assert all(c == self.choices[0] for c in self.choices)
        return every[0]

    def cost(self, what: str) -> set[int]:
        return {getattr(t.counts, what) for t in self.tuners}


def start(
    folder: Path | None,
    *,
    world: int = 2,
    modes: tuple[Mode, ...] = ("on",),
    times: tuple[Mapping[str, float], ...] = (TIMES,),
    faults: Mapping[int, set[tuple[str, str]]] | None = None,
    offers: tuple[Mapping[int, list[Knobs]], ...] = (OFFER,),
    steps: Callable[[int, int, int], float] = lambda rank, capacity, tokens: 1.0 + capacity,
    deterministic: bool = True,
) -> Start:
    """modes, times, offers: of each rank, the last one for the others too."""
    store = Store(world)
    made = Start([{}] * world, [Choice.of((1,))] * world, [], [], [])
    for rank in range(world):
        made.clocks.append(Clock(times[min(rank, len(times) - 1)], (faults or {}).get(rank, set())))

        def key(
            what: Literal["tactic", "choice"], capacities: tuple[int, ...], rank: int = rank
        ) -> Key:
            return Key.of(what, "fake", REQUEST, H200, gpu=f"GPU-{rank}", capacities=capacities)

        made.tuners.append(
            Tuner(
                mode=modes[min(rank, len(modes) - 1)], cache=Cache(folder), key=key,
                gather=store.gather_of(rank), deterministic=deterministic,
            )
        )  # fmt: skip

    def work(rank: int) -> None:
        tuner = made.tuners[rank]
        try:
            offer = offers[min(rank, len(offers) - 1)]
            made.tactics[rank] = tuner.tactics(offer, made.clocks[rank])
            made.choices[rank] = tuner.choice(
                made.tactics[rank], lambda capacity, tokens: steps(rank, capacity, tokens)
            )
        except Exception as error:
            made.errors.append(error)
        finally:
            with store.changed:
                store.left.add(rank)
                store.changed.notify_all()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return made


def sources(made: Start) -> set[str]:
    return {t.source for tactics in made.tactics for t in tactics.values()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_cold_start_tunes_and_a_warm_one_does_not(tmp_path: Path, world: int) -> None:  # K69
    cold = start(tmp_path, world=world)
    assert cold.names == {64: "B", 256: "B"}
    assert sources(cold) == {"tuned"}
    assert cold.cost("tactics") == {6}
    assert cold.cost("steps") == {len(points((64, 256)))}
    assert cold.cost("written") == {3}
    warm = start(tmp_path, world=world)
    assert warm.names == cold.names
    assert warm.choices == cold.choices
    assert sources(warm) == {"cache"}
    assert [warm.cost(what) for what in ("tactics", "steps", "written")] == [{0}] * 3
    assert all(not clock.opened for clock in warm.clocks)
    for before, after in zip(cold.tactics, warm.tactics, strict=True):
        for capacity, tactic in after.items():
            assert tactic.knobs == before[capacity].knobs
            assert isinstance(tactic.knobs["tile"], tuple)  # as the kernel wants it
            assert (tactic.seconds, tactic.default) == (0.5, 1.0)


def test_every_owner_is_destroyed_before_the_next(tmp_path: Path) -> None:
    made = start(tmp_path, faults={0: {("open", "A")}, 1: {("time", "C")}})
    assert made.names == {64: "B", 256: "B"}
    for clock in made.clocks:
        assert clock.now is None
        assert clock.closed == len(clock.opened) == 6


def test_cached_uses_what_is_there_and_never_measures(tmp_path: Path) -> None:
    cold = start(tmp_path, modes=("cached",))
    assert cold.names == {64: "A", 256: "A"}
    assert sources(cold) == {"default"}
    assert cold.choices[0] == Choice.of((64, 256))
    start(tmp_path)
    warm = start(tmp_path, modes=("cached",))
    assert warm.names == {64: "B", 256: "B"}
    for made in (cold, warm):
        assert [made.cost(what) for what in ("tactics", "steps", "written")] == [{0}] * 3


def test_off_neither_reads_nor_measures(tmp_path: Path) -> None:
    start(tmp_path)
    made = start(tmp_path, modes=("off",))
    assert made.names == {64: "A", 256: "A"}
    assert [made.cost(w) for w in ("tactics", "steps", "read", "written")] == [{0}] * 4


def test_the_slowest_rank_decides(tmp_path: Path) -> None:
    made = start(tmp_path, times=(TIMES, {"A": 1.0, "B": 2.0, "C": 0.9}))
    assert made.names == {64: "C", 256: "C"}
    assert made.tactics[0][64].seconds == 0.9


def test_a_gain_within_the_noise_keeps_the_default(tmp_path: Path) -> None:
    made = start(tmp_path, times=({"A": 1.0, "B": 1.0 - MARGIN / 2, "C": 1.0},))
    assert made.names == {64: "A", 256: "A"}
    assert sources(made) == {"tuned"}
    assert start(tmp_path).cost("tactics") == {0}  # that it is the default is worth keeping too


@pytest.mark.parametrize("phase", ["open", "time"])
def test_a_candidate_that_fails_on_one_rank_is_out_on_all(tmp_path: Path, phase: str) -> None:
    made = start(tmp_path, world=3, faults={1: {(phase, "B")}})
    assert made.names == {64: "C", 256: "C"}
    for tactics in made.tactics:
        (why,) = tactics[64].failed
        assert why.startswith("rank 1: RuntimeError: does not")
        assert "\n" not in why
    if phase == "open":  # no rank may enter a launch that another cannot join
        assert all("B" not in clock.timed for clock in made.clocks)


def test_a_default_that_fails_is_replaced(tmp_path: Path) -> None:
    made = start(tmp_path, faults={0: {("open", "A")}}, times=({"A": 1.0, "B": 9.0, "C": 8.0},))
    assert made.names == {64: "C", 256: "C"}
    assert made.tactics[0][64].default is None
    assert start(tmp_path).tactics[0][64].default is None


def test_a_time_that_is_none_is_a_failure(tmp_path: Path) -> None:
    made = start(tmp_path, times=({"A": 1.0, "B": float("nan"), "C": 0.0},))
    assert made.names == {64: "A", 256: "A"}
    assert len(made.tactics[0][64].failed) == 2


def test_where_nothing_runs_every_rank_says_so(tmp_path: Path) -> None:
    made = start(tmp_path, faults={1: {("open", n) for n in "ABC"}})
    assert len(made.errors) == 2
    assert {str(e) for e in made.errors} == {
        "no tactic runs at 64 tokens a rank, of 3 tried; first: rank 1: RuntimeError: does not "
        "compile"
    }
    assert all(isinstance(e, MegaMoEError) for e in made.errors)


# --- caches that differ ---------------------------------------------------------------------------


def test_a_rank_without_a_cache_makes_all_tune(tmp_path: Path) -> None:
    start(tmp_path)
    for path in tmp_path.iterdir():
        if '"gpu": "GPU-1"' in path.read_text() and "-tactic-64-" in path.name:
            path.unlink()
    made = start(tmp_path)
    assert made.names == {64: "B", 256: "B"}
    assert made.cost("tactics") == {3}  # of that capacity alone
    assert [t[256].source for t in made.tactics] == ["cache", "cache"]


@pytest.mark.parametrize("mode", ["on", "cached"])
def test_a_rank_whose_winner_differs_makes_all_do_the_same(
    tmp_path: Path, mode: Mode
) -> None:  # K69
    start(tmp_path)
    for capacity in (64, 256):  # rank 0's GPU was in another group meanwhile
        key = Key.of("tactic", "fake", REQUEST, H200, gpu="GPU-0", capacities=(capacity,))
        assert Cache(tmp_path).write(key, {"knobs": C, "seconds": 1.0, "default": 1.0})
    made = start(tmp_path, modes=(mode,), times=({"A": 1.0, "B": 2.0, "C": 0.1},))
    if mode == "on":
        assert made.names == {64: "C", 256: "C"}
        assert made.cost("tactics") == {6}
        assert start(tmp_path).cost("tactics") == {0}
    else:
        assert made.names == {64: "A", 256: "A"}
        assert made.cost("tactics") == {0}


def test_other_knobs_make_the_choice_stale(tmp_path: Path) -> None:
    first = start(tmp_path)
    for path in tmp_path.glob("*-tactic-*"):
        path.unlink()
    same = start(tmp_path)
    assert same.cost("steps") == {0}
    for path in tmp_path.glob("*-tactic-*"):
        path.unlink()
    other = start(tmp_path, times=({"A": 1.0, "B": 1.0, "C": 0.1},))
    assert other.names != first.names
    assert other.cost("steps") == {len(points((64, 256)))}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"knobs": None},
        {"knobs": {"name": "D"}},
        {"knobs": {**A, "in_kernel_fc2_reduce": True}},
        {"knobs": [1]},
    ],
)
def test_a_winner_that_is_no_candidate_is_no_winner(tmp_path: Path, value: Any) -> None:
    for rank in range(2):
        key = Key.of("tactic", "fake", REQUEST, H200, gpu=f"GPU-{rank}", capacities=(64,))
        Cache(tmp_path).write(key, value)
    made = start(tmp_path)
    assert made.names == {64: "B", 256: "B"}
    assert made.cost("tactics") == {6}


@pytest.mark.parametrize("value", [None, {}, {"capacities": [64]}, Choice.of((64,)).to_json()])
def test_a_choice_that_is_none_is_measured(tmp_path: Path, value: Any) -> None:
    first = start(tmp_path)
    tactics = first.tactics[0]
    for rank in range(2):
        key = Key.of("choice", "fake", REQUEST, H200, gpu=f"GPU-{rank}", capacities=(64, 256))
        made_for = digest([[c, tactics[c].knobs] for c in (64, 256)])
        Cache(tmp_path).write(key, {"choice": value, "tactics": made_for})
    again = start(tmp_path)
    assert again.choices == first.choices
    assert again.cost("steps") == {len(points((64, 256)))}


# --- what ranks must have alike -------------------------------------------------------------------


def test_ranks_with_other_switches_or_candidates_are_told(tmp_path: Path) -> None:  # K69
    made = start(tmp_path, modes=("on", "cached"))
    assert len(made.errors) == 2
    assert all(isinstance(e, RankFailure) for e in made.errors)
    assert "MEGAMOE_TUNING (on on rank 0, cached on rank 1)" in str(made.errors[0])
    made = start(tmp_path, offers=(OFFER, {64: [A, B], 256: [A, B, C]}))
    assert len(made.errors) == 2
    assert "what tactics to choose among" in str(made.errors[0])


def test_a_rank_that_is_gone_is_no_fault_of_a_candidate(tmp_path: Path) -> None:
    class Gone(Clock):
        def time(self) -> float:
            raise RankFailure("rank 1 died")

    tuner = start(tmp_path, world=1).tuners[0]
    clock = Gone(TIMES, set())
    with pytest.raises(RankFailure, match="rank 1 died"):
        tuner._measure(64, OFFER[64], clock)
    assert clock.closed == 0  # nothing is collective any more


# --- the choice -----------------------------------------------------------------------------------


def test_the_choice_is_what_was_measured_on_the_slowest_rank(tmp_path: Path) -> None:
    def steps(rank: int, capacity: int, tokens: int) -> float:
        return 3.0 if (rank, capacity) == (1, 64) and tokens <= 16 else 2.0

    made = start(tmp_path, steps=steps)
    choice = made.choices[0]
    assert [choice.capacities[choice.index(t)] for t in (1, 16, 17, 64, 65)] == [
        256, 256, 64, 64, 256,
    ]  # fmt: skip
    assert start(tmp_path).choices[0] == choice


def test_one_workspace_leaves_nothing_to_choose(tmp_path: Path) -> None:
    made = start(tmp_path, offers=({64: [A, B]},))
    assert made.choices[0] == Choice.of((64,))
    assert made.cost("steps") == {0}


def test_a_kernel_without_tactics_still_has_its_choice_measured(tmp_path: Path) -> None:
    made = start(tmp_path, offers=({64: [A], 256: [A]},))
    assert sources(made) == {"default"}
    assert made.cost("tactics") == {0}
    assert made.cost("steps") == {len(points((64, 256)))}
    assert start(tmp_path, offers=({64: [A], 256: [A]},)).cost("steps") == {0}


# --- the two rules --------------------------------------------------------------------------------


def test_deterministic_leaves_out_what_sums_inside_the_kernel(tmp_path: Path) -> None:  # K71
    reducing = {**B, "in_kernel_fc2_reduce": True}
    grouped = {**B, "grouped_token_back": True}
    assert admitted([A, reducing, grouped, B, A], True) == (A, B)
    assert admitted([A, reducing, grouped, B], False) == (A, reducing, grouped, B)
    with pytest.raises(BadInput, match="fixed order"):
        admitted([reducing], True)
    offer: dict[int, list[Knobs]] = {64: [A, reducing]}
    assert start(tmp_path, offers=(offer,)).cost("tactics") == {0}
    free = start(tmp_path, offers=(offer,), deterministic=False)
    assert free.tactics[0][64].knobs == reducing


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0], 0),
        ([1.0, 0.5, 0.5], 1),
        ([1.0, 1.0 - MARGIN / 2], 0),
        ([1.0, 1.0 - 2 * MARGIN], 1),
        ([float("inf"), 5.0, 4.0], 2),
        ([1.0, float("inf")], 0),
        ([float("inf")] * 2, None),
    ],
)
def test_winner(times: list[float], expected: int | None) -> None:
    assert winner(times) == expected
