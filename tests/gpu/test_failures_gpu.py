"""Ranks that come late change no bit, and a rank that is gone is named by the one that waits for
it: two processes around one kernel, on two GPUs or on one. The reference on CPUs proves the tasks.
"""

from __future__ import annotations

import os
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import RankFailure, TopK
from megamoe.dispatch.watchdog import OnFailure
from megamoe.suite import cases, run
from megamoe.suite.cases import Shape, State
from megamoe.suite.pool import Outcome, Pool

Phase = Callable[[str], None]

WORLD, GONE = 2, 1
KEY = "failures"  # of the layer among those that a rank keeps
ROUNDS, TURNS = 24, 3
LATE_S = 0.1
TIMEOUT_S = 5.0  # what a rank is given to come
BOUND_S = 40.0  # between a rank's end and the other's: far above what the time-out asks for
CPU = Shape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, capacity=8)

pytestmark = pytest.mark.timeout(600)
KERNEL = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("reference", marks=pytest.mark.slow),
        pytest.param("sm90_pull_fp8", marks=pytest.mark.gpu),
    ],
)


# --- on a rank ------------------------------------------------------------------------------------


def start(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: State,
    kernel: str,
    shape: Shape,
    on_failure: OnFailure = "abort",
) -> list[float]:
    """A warm layer, unequal counts, and a good call; the norms of its rows."""
    what, chosen = cases.case("uneven counts"), run.kernel_named(kernel)
    counts = [min(n, shape.capacity) for n in what.counts(world_size, shape.capacity)]
    phase("inputs")
    inputs = cases._inputs(what, chosen, shape, counts, world_size, 0, state.device)
    first = sum(counts[:rank])
    mine = inputs.rows(slice(first, first + counts[rank]))
    phase("prepare")
    layer = megamoe.prepare(
        inputs.ranks[rank], state.group, max_tokens_per_rank=shape.capacity, top_k=shape.top_k,
        kernel=kernel, tuning="off", on_failure=on_failure,
    )  # fmt: skip
    state.layers[KEY] = mine, layer
    layer.warmup()
    phase("forward")
    norms: list[float] = layer.forward(mine.x, mine.topk).float().norm(dim=1).tolist()
    return norms


def come_late(
    phase: Phase, rank: int, world_size: int, *, state: State, seed: int
) -> dict[str, int]:
    """Calls and replays before which one rank sleeps; how many outputs have other bits.

    The device is waited for in every fourth round only: in the others a rank that is not late runs
    ahead of the one that is.
    """
    mine, layer = state.layers[KEY]
    turned = [_turn(mine.x, mine.topk, turn) for turn in range(TURNS)]
    wanted = [layer.forward(x, topk).clone() for x, topk in turned]
    cases._wait(state.device)
    x, topk = _turn(mine.x, mine.topk, 0)
    out = torch.empty_like(x)

    def call() -> None:
        layer.forward(x, topk, out=out)

    ways = {"eager": call}
    if state.device.type == "cuda":
        phase("capture")
        call()
        cases._wait(state.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        ways["replayed"] = graph.replay
    found: dict[str, int] = {"late": 0}
    draw = random.Random(seed)  # of the same rank on every rank
    for way, again in ways.items():
        differing = []
        for number in range(ROUNDS):
            phase(f"{way} {number}")
            turn = draw.randrange(TURNS)
            x.copy_(turned[turn][0])
            topk.ids.copy_(turned[turn][1].ids)
            out.fill_(torch.nan)
            if draw.randrange(world_size) == rank:
                found["late"] += 1
                time.sleep(LATE_S)
            again()
            differing.append(_differs(out, wanted[turn]))
            if number % 4 == 3:
                cases._wait(state.device)
        found[way] = int(torch.stack(differing).sum())
    return found


def _turn(x: Tensor, topk: TopK, turn: int) -> tuple[Tensor, TopK]:
    """Copies: rows rolled, and the slots of each."""
    return x.roll(turn, 0), replace(
        topk, ids=topk.ids.roll(turn, 1), weights=topk.weights.clone(), scaled=topk.scaled
    )


def _differs(y: Tensor, wanted: Tensor) -> Tensor:
    return (y.view(torch.int16) != wanted.view(torch.int16)).any()


def be_lost(
    phase: Phase, rank: int, world_size: int, *, state: State, stderr: str
) -> tuple[str, str, float]:
    """One rank ends; what the other's calls say, and after how many seconds.

    stderr: a file for what the waiting rank writes, or nothing where its calls are to raise.
    """
    mine, layer = state.layers[KEY]
    out = torch.empty_like(mine.x)
    watchdog = layer._ranks._watchdog
    assert watchdog is not None
    watchdog.timeout = TIMEOUT_S  # only now: to compile took longer
    if rank == GONE:
        phase("ending")
        time.sleep(0.5)  # the other waits
        os._exit(7)
    begun = time.monotonic()
    if stderr:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        if state.device.type == "cpu":  # there a call learns of it; a kernel would wait like this
            layer._kernel.run = lambda *_: time.sleep(600)  # type: ignore[union-attr]
        phase("forward")
        layer.forward(mine.x, mine.topk, out=out)
        phase("wait for the device")
        cases._wait(state.device)
        return "", "nothing was waited for", time.monotonic() - begun
    phase("forward")
    while True:  # the device is asked nothing: it would not answer
        try:
            layer.forward(mine.x, mine.topk, out=out)
        except RankFailure as error:
            raised = str(error)
            break
        time.sleep(0.5)
    seconds = time.monotonic() - begun
    phase("check")
    with pytest.raises(RankFailure) as again:
        layer.check()
    return raised, str(again.value), seconds


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture
def pool(kernel: str) -> Iterator[Pool]:
    environment = {**run.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    if kernel == "reference":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with Pool(
        WORLD, setup=cases.setup, finish=cases.finish, environment=environment,
        start_timeout=run.START_S, grace=BOUND_S,
    ) as started:  # fmt: skip
        yield started


def started(pool: Pool, kernel: str, on_failure: OnFailure = "abort") -> None:
    shape = CPU if kernel == "reference" else run.shape_of(run.kernel_named(kernel))
    found = pool.run(start, timeout=run.FIRST_S, kernel=kernel, shape=shape, on_failure=on_failure)
    assert found.status == "done", f"{found}\n{found.log}"
    for norms in found.values.values():
        assert norms
        assert all(0 < norm < float("inf") for norm in norms)


@KERNEL
def test_a_late_rank_changes_no_bit(pool: Pool, kernel: str) -> None:  # K56, K71
    started(pool, kernel)
    found = pool.run(come_late, timeout=run.CASE_S, seed=1)
    assert found.status == "done", f"{found}\n{found.log}"
    ways = {"eager"} if kernel == "reference" else {"eager", "replayed"}
    for counts in found.values.values():
        assert counts.keys() == {"late", *ways}
        assert counts["late"] > ROUNDS // 4
        assert all(counts[way] == 0 for way in ways), counts
    assert sum(counts["late"] for counts in found.values.values()) == ROUNDS * len(ways)


@KERNEL
def test_who_waits_in_a_kernel_for_a_rank_that_is_gone_names_it_and_aborts(
    pool: Pool, kernel: str, tmp_path: Path
) -> None:
    started(pool, kernel)
    stderr = tmp_path / "stderr"
    found = pool.run(be_lost, timeout=2 * BOUND_S, stderr=str(stderr))
    said = stderr.read_text()
    assert_gone(found, said)
    assert not found.values, found.values
    # As dead, or as the one waited for in vain: both bounds are 5 s here.
    assert re.search(rf"megamoe: rank 0 aborts: .*\brank {GONE} ", said), said


@KERNEL
def test_calls_after_a_rank_is_gone_raise_and_name_it(pool: Pool, kernel: str) -> None:
    started(pool, kernel, "raise")
    found = pool.run(be_lost, timeout=2 * BOUND_S, stderr="")
    assert_gone(found, "")
    assert 0 in found.values, "no call raised"
    raised, again, seconds = found.values[0]
    assert f"rank {GONE} " in raised, raised
    assert f"rank {GONE} " in again, again
    assert seconds < BOUND_S


def assert_gone(found: Outcome, said: str) -> None:
    """The pool saw the rank end, and the other end or answer before it had to be killed."""
    assert (found.status, found.rank, found.phase) == ("died", GONE, "ending"), f"{found}\n{said}"
    assert "exit code 7" in found.message
    assert found.seconds < BOUND_S, said
