"""A rank that raises, dies, never comes or disagrees is named by all the others within a bound."""

from __future__ import annotations

from typing import Any

import pytest
from parallel.shares import Problem
from parallel.work import fail, stuck
from strategies import Case

from megamoe.problem import Placement
from megamoe.suite.pool import Pool

TIMEOUT = 3.0  # what the ranks are given
BOUND = 4 * TIMEOUT  # cores are shared: far above the timeout, far below a hang
WHO = 1

PROBLEM = Problem(
    case=Case(tokens=4, experts=4, top_k=2, hidden_size=32, intermediate_size=32),
    placement=Placement.contiguous(4, 4),
    counts=(1, 1, 1, 1),
    ids=((0, 1), (1, 2), (2, 3), (3, 0)),
)


def outcome(pool: Pool, how: str, **more: Any) -> tuple[Any, dict[int, tuple[str, str, float]]]:
    found = pool.run(
        fail, timeout=60.0, problem=PROBLEM, who=WHO, how=how, timeout_s=TIMEOUT, **more
    )
    return found, dict(found.values)


def others_name_it(values: dict[int, tuple[str, str, float]], *words: str) -> None:
    assert set(values) >= {0, 2, 3}
    for rank in (0, 2, 3):
        kind, text, seconds = values[rank]
        assert kind == "RankFailure", (rank, values[rank])
        for word in (f"rank {WHO}", *words):
            assert word in text, (rank, text)
        assert seconds < BOUND


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("bad argument", "max_tokens_per_rank 0 is below 1; pass a positive count"),
        ("bad timeout", "timeout 0.0 is not above 0 seconds; pass seconds to wait"),
        (
            "other rank's weights",
            "group in which this is rank 1 of 4 does not fit weights loaded for rank 0 of 4; pass "
            "the expert-parallel group that the weights were loaded for",
        ),
    ],
)
def test_a_rank_that_raises_in_prepare(pool: Pool, how: str, sentence: str) -> None:  # K48
    found, values = outcome(pool, f"{how} in prepare")
    assert found.status == "done", f"{found}\n{found.log}"
    assert values[WHO][:2] == ("BadInput", sentence)
    others_name_it(values, f"raised BadInput: {sentence}", "in prepare #1")
    assert all(seconds < TIMEOUT for _, _, seconds in values.values())  # at once, not at the bound


def test_a_fingerprint_that_differs_raises_on_every_rank(pool: Pool) -> None:  # K43, K44
    found, values = outcome(pool, "other capacity in prepare")
    assert found.status == "done", f"{found}\n{found.log}"
    texts = {text for _, text, _ in values.values()}
    assert texts == {
        "the ranks disagree on max_tokens_per_rank (8 on rank 0, 2, 3, 9 on rank 1): "
        "prepare every rank alike"
    }
    assert {kind for kind, _, _ in values.values()} == {"RankFailure"}
    assert len(values) == 4


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("bad tokens", "x of shape [1, 31]"),
        ("bad pair", "topk.weights of shape [1, 1] do not match ids of shape [1, 2]"),
    ],
)
def test_a_rank_that_raises_before_its_launch(pool: Pool, how: str, words: str) -> None:
    found, values = outcome(pool, f"{how} in forward")
    assert found.status == "done", f"{found}\n{found.log}"
    # `fail` has seen that its next call raises RankFailure: the others have given up.
    assert values[WHO][0] == "BadInput"
    others_name_it(values, f"raised BadInput: {words}", "in forward #2 of layer 1")
    assert all(seconds < TIMEOUT for _, _, seconds in values.values())


def test_a_rank_that_never_comes_to_prepare(pool: Pool) -> None:
    found, values = outcome(pool, "stays away before prepare", idle=2 * TIMEOUT)
    assert found.status == "done", f"{found}\n{found.log}"
    others_name_it(values, "prepare #1 of layer 1 waited 3 s in vain", "never seen")
    # When it comes at last it learns that the others have given up.
    kind, text, _ = values[WHO]
    assert kind == "RankFailure"
    assert "in vain for rank 1" in text


def test_a_rank_that_never_comes_to_a_call(pool: Pool) -> None:
    found, values = outcome(pool, "stays away in forward", idle=2 * TIMEOUT)
    assert found.status == "done", f"{found}\n{found.log}"
    others_name_it(values, "waited 3 s in vain", "last in after forward #1 of layer 1")
    assert values[WHO][0] == "RankFailure"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("before prepare", ("in vain", "never seen")),
        ("in forward", ("after forward #1 of layer 1",)),
        ("before close", ("after forward #2 of layer 1",)),
    ],
)
def test_a_rank_that_dies(pool: Pool, where: str, words: tuple[str, ...]) -> None:
    found, values = outcome(pool, f"dies {where}")
    assert (found.status, found.rank) == ("died", WHO)
    assert "exit code 7" in found.message
    others_name_it(values, *words)


def test_rank_0_dies_and_the_store_with_it(pool: Pool) -> None:
    found = pool.run(
        fail, timeout=60.0, problem=PROBLEM, who=0, how="dies in forward", timeout_s=TIMEOUT
    )
    assert (found.status, found.rank) == ("died", 0)
    assert set(found.values) == {1, 2, 3}
    for kind, text, seconds in found.values.values():
        assert kind == "RankFailure"
        assert "rank 0" in text
        assert seconds < BOUND


def test_a_call_that_cannot_raise_aborts_the_process_and_names_the_rank(pool: Pool) -> None:
    found = pool.run(stuck, timeout=60.0, timeout_s=TIMEOUT)
    assert found.status == "died"
    assert found.rank != WHO
    assert "exit code -6" in found.message  # SIGABRT
    assert f"rank {found.rank} aborts: " in found.log
    assert "waited 3 s in vain for rank 1 (last in after prepare #1 of layer 1)" in found.log
    assert found.seconds < BOUND
