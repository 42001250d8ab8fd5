"""Pools of real processes: a rank that raises, dies or hangs is named, and the next task runs."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megamoe.suite.pool import Pool

Phase = Callable[[str], None]


def setup(rank: int, world_size: int, port: int) -> str:
    return f"state of {rank} of {world_size}"


def bad_setup(rank: int, world_size: int, port: int) -> None:
    if rank == 1:
        raise ValueError("no device for rank 1")


def answer(phase: Phase, rank: int, world_size: int, *, state: Any, value: int) -> tuple[str, int]:
    phase("answering")
    return state, value + rank


def misbehave(phase: Phase, rank: int, world_size: int, *, state: Any, who: int, how: str) -> str:
    phase("calm")
    if rank == who:
        phase(f"about to be {how}")
        if how == "raised":
            raise RuntimeError("planted")
        if how == "died":
            os._exit(7)
        time.sleep(600)
    elif how != "hung":
        time.sleep(600)  # as a peer inside a kernel would
    return "fine"


def name(phase: Phase, rank: int, world_size: int, *, state: Any) -> int:
    return os.getpid()


def test_values_by_rank_and_a_state_that_lasts() -> None:
    with Pool(2, setup=setup, grace=0.5) as pool:
        for value in (10, 20):
            outcome = pool.run(answer, timeout=60, value=value)
            assert outcome.status == "done"
            assert outcome.values == {
                0: ("state of 0 of 2", value),
                1: ("state of 1 of 2", value + 1),
            }


def test_a_rank_that_fails_is_named_with_its_phase_and_the_next_task_runs() -> None:
    with Pool(2, setup=setup, grace=0.5) as pool:
        for how, words in (
            ("raised", "RuntimeError: planted"),
            ("died", "exit code 7"),
            ("hung", "rank 1 about to be hung"),
        ):
            outcome = pool.run(misbehave, timeout=2 if how == "hung" else 30, who=1, how=how)
            assert (outcome.status, outcome.rank) == (how, 1)
            assert outcome.phase == f"about to be {how}"
            assert words in outcome.message
            assert outcome.seconds < 20
            assert pool.run(answer, timeout=60, value=1).status == "done"


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_between_two_tasks_is_named_and_the_next_task_runs(who: int) -> None:
    with Pool(2, setup=setup, grace=0.5) as pool:
        first = pool.run(name, timeout=60).values
        os.kill(first[who], signal.SIGKILL)
        time.sleep(0.5)  # its end of the pipe closes
        outcome = pool.run(answer, timeout=30, value=1)
        assert (outcome.status, outcome.rank) == ("died", who)
        assert "exit code -9" in outcome.message
        assert not set(pool.run(name, timeout=60).values.values()) & set(first.values())


def test_an_interrupt_does_not_wait_for_busy_ranks() -> None:
    def interrupted() -> None:
        with Pool(2, setup=setup) as pool:
            pool.run(name, timeout=60)
            threading.Timer(0.5, _thread.interrupt_main).start()
            begun.append(time.monotonic())
            pool.run(misbehave, timeout=60, who=0, how="hung")

    begun: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun[0] < 8


def test_a_set_up_that_fails_is_an_outcome() -> None:
    with Pool(2, setup=bad_setup) as pool:
        outcome = pool.run(answer, timeout=60, value=1)
        assert (outcome.status, outcome.rank) == ("raised", 1)
        assert "no device for rank 1" in outcome.message
        assert "ValueError" in outcome.log
