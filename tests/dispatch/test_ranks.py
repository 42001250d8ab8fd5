"""Agreement and the watchdog, with threads for ranks and a store in memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamoe.dispatch import watchdog as watchdogs
from megamoe.dispatch.ranks import Ranks, connection
from megamoe.dispatch.watchdog import Step, Watchdog
from megamoe.errors import BadInput, RankFailure

SHORT = 1.5  # seconds given to ranks that are to be missed
LONG = 60.0


class Group:
    """Threads as ranks: ``run`` gives what each returned or raised."""

    def __init__(self, world_size: int, timeout: float = LONG) -> None:
        self.store = dist.HashStore()
        self.aborted: list[int] = []
        self.watchdogs = [
            Watchdog(
                connection(self.store), rank, world_size,
                abort=lambda rank=rank: self.aborted.append(rank),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for w in self.watchdogs:
            w.timeout, w.on_failure = timeout, "raise"

    def run(self, work: Callable[[Ranks, int], Any], *, absent: tuple[int, ...] = ()) -> list[Any]:
        results: list[Any] = [None] * len(self.watchdogs)

        def one(rank: int) -> None:
            w = self.watchdogs[rank]
            ranks = Ranks(w)
            ranks.fit(
                rank=rank, world_size=len(results), timeout=w.timeout, on_failure=w.on_failure
            )
            try:
                results[rank] = work(ranks, rank)
            except Exception as error:
                results[rank] = error
            finally:
                ranks.close()

        threads = [
            threading.Thread(target=one, args=(r,))
            for r in range(len(results))
            if r not in absent
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results


def failures(results: list[Any], ranks: range | list[int]) -> set[str]:
    for rank in ranks:
        assert isinstance(results[rank], RankFailure), results
    return {str(results[rank]) for rank in ranks}


def prepare(ranks: Ranks, facts: dict[str, str] | None = None) -> None:
    with ranks.step("prepare"):
        ranks.agree("request", facts or {})


def test_values_come_in_rank_order_and_calls_do_not_mix() -> None:
    def work(ranks: Ranks, rank: int) -> list[list[str]]:
        with ranks.step("prepare"):
            first = ranks.gather("a", f"{rank}")
            again = ranks.gather("a", f"{rank + 10}")
        with ranks.step("prepare"):
            return [first, again, ranks.gather("a", f"{rank + 20}")]

    wanted = [["0", "1", "2"], ["10", "11", "12"], ["20", "21", "22"]]
    assert Group(3).run(work) == [wanted] * 3


def test_who_comes_last_to_a_gather_is_not_told_what_the_others_did_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its look at the values and its look at errors, the others may finish and raise."""
    group = Group(2)
    honest = group.watchdogs[0].verdict

    def late(step: Any, *given: Any, **more: Any) -> str | None:
        while not group.watchdogs[0].store.check([f"error/{step.key}"]):
            time.sleep(0.01)
        return honest(step, *given, **more)

    monkeypatch.setattr(group.watchdogs[0], "verdict", late)

    def work(ranks: Ranks, rank: int) -> list[str]:
        with ranks.step("prepare"):
            if rank == 1:
                time.sleep(0.2)  # so that the other waits
            found = ranks.gather("a", f"{rank}")
            if rank == 1:
                raise BadInput("mine")
            return found

    results = group.run(work)
    assert results[0] == ["0", "1"]
    assert isinstance(results[1], BadInput)


def test_one_rank_needs_no_group() -> None:
    ranks = Ranks()
    with ranks.step("prepare") as call:
        call.launch()
        assert ranks.gather("a", "x") == ["x"]
        ranks.agree("a", {"b": "c"})
    assert (ranks.rank, ranks.world_size, ranks.group) == (0, 1, None)
    ranks.check()
    ranks.close()


def test_facts_that_differ_are_named_with_their_ranks_on_every_rank() -> None:
    def work(ranks: Ranks, rank: int) -> None:
        facts = {"same": "yes", "capacity": "64" if rank == 1 else "32"}
        prepare(ranks, facts | ({"extra": "1"} if rank == 2 else {}))

    assert failures(Group(3).run(work), range(3)) == {
        "the ranks disagree on capacity (32 on rank 0, 2, 64 on rank 1); "
        "extra (nothing on rank 0, 1, 1 on rank 2): prepare every rank alike"
    }


def test_after_a_disagreement_the_group_can_be_prepared_again() -> None:
    def work(ranks: Ranks, rank: int) -> str:
        with pytest.raises(RankFailure):
            prepare(ranks, {"x": str(rank)})
        prepare(ranks, {"x": "1"})
        return "fine"

    assert Group(2).run(work) == ["fine"] * 2


def test_an_error_before_a_launch_reaches_the_others_at_once() -> None:
    def work(ranks: Ranks, rank: int) -> None:
        with ranks.step("prepare"):
            if rank == 1:
                raise BadInput("x is wrong")
            ranks.gather("ready", "")

    begun = time.monotonic()
    results = Group(3).run(work)
    assert time.monotonic() - begun < LONG / 2
    assert isinstance(results[1], BadInput)
    assert failures(results, [0, 2]) == {
        "rank 1 raised BadInput: x is wrong in prepare #1 of layer 1"
    }


def test_an_error_that_every_rank_raises_leaves_the_group_whole() -> None:
    def work(ranks: Ranks, rank: int) -> str:
        prepare(ranks)
        for _ in range(2):
            with pytest.raises(BadInput), ranks.step("forward"):
                raise BadInput("the same everywhere")
            with ranks.step("forward") as call:
                call.launch()
                ranks.gather("still here", "")
        return "fine"

    assert Group(2).run(work) == ["fine"] * 2


def test_a_rank_alone_with_its_error_does_not_enter_the_call_of_the_others() -> None:
    """Without a word it would serve, one call late, the collective that they wait in."""
    group = Group(2)

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0:
            launch(ranks)
        with pytest.raises(BadInput), ranks.step("forward"):
            raise BadInput("mine alone")
        with ranks.step("forward"):
            pytest.fail("entered")

    wanted = "rank 1 raised BadInput: mine alone in forward #1 of layer 1"
    for text in failures(group.run(work), range(2)):
        assert text.startswith(wanted)


class Never:
    """A collective's handle that never completes."""

    def wait(self, bound: timedelta) -> None:
        time.sleep(bound.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def launch(ranks: Ranks) -> None:
    with ranks.step("forward") as call:
        call.launch()
        ranks.wait(Never())


def test_a_launched_call_learns_of_an_error_elsewhere_and_the_group_is_dead() -> None:
    group = Group(2)

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0:
            launch(ranks)
        with ranks.step("forward"):
            raise BadInput("late")

    results = group.run(work)
    text = "rank 1 raised BadInput: late in forward #1 of layer 1"
    assert failures(results, [0]) == {text + "; since then the group is dead: start its ranks anew"}
    assert group.watchdogs[0].failure == text

    def later(ranks: Ranks, rank: int) -> None:
        launch(ranks)

    assert all(text in found for found in failures(group.run(later), range(2)))


def test_a_rank_that_leaves_its_layer_is_named() -> None:
    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 1:
            ranks.abandon(ValueError("of the caller's own"))
        else:
            launch(ranks)

    results = Group(2).run(work)
    assert "rank 1 left layer 1 on ValueError: of the caller's own" in failures(results, [0]).pop()


def test_ranks_that_never_come_are_named_within_the_bound() -> None:
    begun = time.monotonic()
    results = Group(4, SHORT).run(lambda ranks, rank: prepare(ranks), absent=(1, 3))
    assert SHORT <= time.monotonic() - begun < 5 * SHORT
    assert failures(results, [0, 2]) == {
        "prepare #1 of layer 1 waited 1.5 s in vain for rank 1 (never seen), rank 3 (never seen)"
    }


def away(ranks: Ranks, rank: int) -> None:
    """Rank 1 stays away from the call that rank 0 has launched."""
    prepare(ranks)
    if rank == 0:
        launch(ranks)
    time.sleep(2 * SHORT)


def test_a_rank_that_does_not_enter_a_launched_call_is_named_with_its_phase() -> None:
    text = failures(Group(2, SHORT).run(away), [0]).pop()
    assert "forward #1 of layer 1 waited 1.5 s in vain for rank 1" in text
    assert "(last in after prepare #1 of layer 1)" in text


def test_a_process_that_shows_no_sign_of_life_is_named_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdogs, "LOST", SHORT)
    group = Group(2, 20.0)  # a beat of a second

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0:
            launch(ranks)
        group.watchdogs[1]._halt()  # as if killed: nothing is published any more

    begun = time.monotonic()
    text = failures(group.run(work), [0]).pop()
    assert time.monotonic() - begun < 15
    assert "rank 1 died: no sign of life for 1.5 s; it was last in" in text
    assert "and forward #1 of layer 1 waits for it" in text


def test_a_process_that_ends_is_named_at_once() -> None:
    group = Group(2)

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0:
            launch(ranks)
        group.watchdogs[1].end()

    text = failures(group.run(work), [0]).pop()
    assert "rank 1 has ended; it was last in after prepare #1 of layer 1" in text


@pytest.mark.parametrize("fate", ["comes late", "ends"])
def test_a_rank_between_two_layers_is_waited_for_unless_its_process_ends(
    fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats no more after its last layer, and its last sign of life is none of death."""
    monkeypatch.setattr(watchdogs, "LOST", SHORT)
    group = Group(2)
    group.run(lambda ranks, rank: prepare(ranks))

    def again(ranks: Ranks, rank: int) -> str:
        prepare(ranks)
        return "fine"

    def alone(rank: int) -> Any:
        return group.run(again, absent=(1 - rank,))[rank]

    if fate == "ends":
        group.watchdogs[1].end()
        text = failures([alone(0)], [0]).pop()
        assert "rank 1 has ended; it was last in after prepare #1 of layer 1" in text
        return
    found: list[Any] = []
    fast = threading.Thread(target=lambda: found.append(alone(0)))
    fast.start()
    time.sleep(3 * SHORT)
    assert alone(1) == "fine"
    fast.join(10)
    assert found == ["fine"]


def test_a_rank_whose_group_goes_after_its_last_layer_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        """A process group's."""

    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr("megamoe.dispatch.ranks._store_of", lambda group: store)

    def state() -> str:
        other = Watchdog(connection(store), 1, 2)
        return other._look(time.monotonic())[0].state

    group = Handle()
    ranks = Ranks.of(group, world_size=2)
    ranks.fit(rank=0, world_size=2)
    assert state() == "beating"
    ranks.close()
    assert state() == "resting"
    del ranks, group
    gc.collect()
    assert state() == "ended"


def test_a_call_whose_device_does_not_return_says_so() -> None:
    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        launch(ranks)

    for text in failures(Group(2, SHORT).run(work), range(2)):
        assert "forward #1 of layer 1 did not come back within 1.5 s; the others: rank" in text
        assert "(last in forward #1 of layer 1)" in text


def test_a_call_that_has_returned_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megakernel's launch returns at once: the device waits, and the next call is told."""

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0:
            with ranks.step("forward") as call:
                call.launch()
        deadline = time.monotonic() + 10 * SHORT
        while ranks.healthy and rank == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2 * SHORT if rank else 0)
        ranks.check()

    results = Group(2, SHORT).run(work)
    assert "forward #1 of layer 1 waited 1.5 s in vain for rank 1" in failures(results, [0]).pop()


def test_a_returned_call_learns_of_an_error_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 raises before its launch; rank 0's device waits, and its process is not waiting."""
    monkeypatch.setattr(watchdogs, "LOOK", 0.2)

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        with ranks.step("forward") as call:
            if rank == 1:
                raise BadInput("late")
            call.launch()
        deadline = time.monotonic() + 20
        while ranks.healthy and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks.check()

    text = failures(Group(2).run(work), [0]).pop()
    assert "rank 1 raised BadInput: late in forward #1 of layer 1" in text


class Stream:
    """A GPU's, that is still at work or not."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy

    def query(self) -> bool:
        return not self.busy


@pytest.mark.parametrize("stream", [None, Stream(False), Stream(True)], ids=["cpu", "idle", "busy"])
def test_a_rank_outside_of_calls_is_aborted_only_if_its_device_is_stuck(
    stream: Stream | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdogs, "LOOK", 0.2)
    monkeypatch.setattr(watchdogs, "GRACE", 0.2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    group = Group(2)
    group.watchdogs[0].on_failure = "abort"
    stuck = stream is not None and stream.busy

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        with ranks.step("forward") as step:
            step.launch(None if stream is None else torch.device("cuda"))
            if rank == 1:
                raise RuntimeError("out of memory")
        deadline = time.monotonic() + 20
        while ranks.healthy and time.monotonic() < deadline:
            time.sleep(0.05)
        # The abort that must come is awaited; one that must not would come within a second.
        deadline = time.monotonic() + (20 if stuck else 1)
        while not group.aborted and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks.check()

    assert "out of memory" in failures(group.run(work), [0]).pop()
    assert group.aborted == ([0] if stuck else [])
    assert ("rank 0 aborts: rank 1 raised RuntimeError" in capsys.readouterr().err) is stuck


@pytest.mark.parametrize("raises", [True, False])
def test_the_process_is_aborted_only_where_nothing_can_be_raised(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdogs, "GRACE", 0.5)
    group = Group(2, SHORT)
    group.watchdogs[0].on_failure = "abort"

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        if rank == 0 and raises:
            launch(ranks)
        if rank == 0:
            with ranks.step("forward") as call:
                call.launch()
                deadline = time.monotonic() + 10 * SHORT
                while not group.aborted and time.monotonic() < deadline:
                    time.sleep(0.05)  # inside a kernel
        time.sleep(3 * SHORT)

    group.run(work)
    assert group.aborted == ([] if raises else [0])
    assert ("megamoe: rank 0 aborts: forward #1 of layer 1 waited" in capsys.readouterr().err) is (
        not raises
    )


def test_calls_do_not_talk_to_the_store() -> None:
    group = Group(2)
    mine: list[str] = []

    class Counting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            if threading.current_thread().name != "megamoe-watchdog":
                mine.append(name)
            return getattr(self.store, name)

    for w in group.watchdogs:
        w.store = Counting(w.store)

    def work(ranks: Ranks, rank: int) -> int:
        prepare(ranks)
        ranks.gather("all here", "")
        before = len(mine)
        for _ in range(1000):
            with ranks.step("forward") as call:
                call.launch()
        found = len(mine) - before
        time.sleep(0.2)  # the other's gather may still be counted before this
        return found

    # Each thread counts both threads' operations, and both are past their gather.
    assert min(group.run(work)) == 0


def test_a_transport_error_becomes_a_failure_that_names_the_rank_behind_it() -> None:
    group = Group(3)

    def work(ranks: Ranks, rank: int) -> None:
        prepare(ranks)
        with ranks.step("forward") as call:
            call.launch()
            if rank == 1:
                raise RuntimeError("out of memory")
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    results = group.run(work)
    assert str(results[1]) == "out of memory"
    for text in failures(results, [0, 2]):
        assert text == "rank 1 raised RuntimeError: out of memory in forward #1 of layer 1"
    assert isinstance(results[0].__cause__, RuntimeError)


def test_a_store_that_is_gone_is_said_to_be() -> None:
    class Gone:
        def check(self, *_: object) -> bool:
            raise RuntimeError("Broken pipe")

        set = get = check

    w = Watchdog(Gone(), 1, 2)
    w.enter(Step(layer=1, phase="forward", number=1))
    thread = threading.Thread(target=w._run, args=(threading.Event(),))
    w.timeout, w.on_failure = 1.0, "raise"
    thread.start()
    thread.join(10)
    with pytest.raises(RankFailure, match=r"group's store \(rank 0, or the launcher\) is gone"):
        w.check()


# --- the group ------------------------------------------------------------------------------------


def test_arguments() -> None:
    ranks = Ranks()
    with pytest.raises(BadInput, match="timeout 0 is not above 0 seconds"):
        ranks.fit(rank=0, world_size=1, timeout=0)
    with pytest.raises(BadInput, match="timeout nan is not above 0"):
        ranks.fit(rank=0, world_size=1, timeout=float("nan"))
    with pytest.raises(BadInput, match="on_failure 'ignore' is unknown"):
        ranks.fit(rank=0, world_size=1, on_failure="ignore")  # type: ignore[arg-type]
    assert not dist.is_initialized()
    with pytest.raises(BadInput, match="default group of 2 ranks, and there is none"):
        Ranks.of(None, world_size=2)


def test_a_group_that_does_not_fit_the_weights_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(BadInput, match="rank 0 of 1 does not fit weights loaded for rank 1 of"):
            Ranks.of(None, world_size=2).fit(rank=1, world_size=2)
        assert Ranks.of(dist.group.WORLD, world_size=1).group is None
        with pytest.raises(BadInput, match="group does not hold this process"):
            Ranks.of(dist.GroupMember.NON_GROUP_MEMBER, world_size=2)
    finally:
        dist.destroy_process_group()
