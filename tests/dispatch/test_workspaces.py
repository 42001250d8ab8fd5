"""Capacities from what an engine knows, and the workspace that serves each step."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megamoe.dispatch.workspaces import (
    MARGIN,
    PRESET,
    Choice,
    ascending,
    decode_ceiling,
    points,
    profiles,
    rounds,
    slowest,
)
from megamoe.errors import BadInput

sizes = st.lists(st.integers(1, 300), min_size=1, max_size=5).map(ascending)


@st.composite
def measured(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[tuple[int, int], float]]:
    """Capacities and a table that may have any holes."""
    capacities = draw(sizes)
    every = [(c, t) for c in capacities for t in range(1, c + 1)]
    taken = draw(st.lists(st.sampled_from(every), max_size=12, unique=True))
    return capacities, {p: draw(st.sampled_from((1.0, 1.01, 1.5, 2.0))) for p in taken}


@pytest.mark.parametrize(
    ("graphs", "limit", "width", "expected"),
    [((1, 2, 64), 0, 1, 64), ((8,), 100, 1, 100), ((8, 32), 16, 4, 128), ((), 5, 1, 5)],
)
def test_the_ceiling_is_the_most_requests_times_their_tokens(
    graphs: tuple[int, ...], limit: int, width: int, expected: int
) -> None:
    assert decode_ceiling(graphs, limit, width) == expected


@pytest.mark.parametrize(
    ("ceiling", "prefill", "expected"),
    [
        (1, 4096, (1, 4096)),
        (20, 512, (32, 512)),
        (64, 1000, (64, 1000)),
        (65, 4096, (64, 128, 4096)),
        (300, 8192, (64, 128, 256, 512, 8192)),
        (512, 512, (64, 128, 256, 512)),
        (256, 100, (64, 100, 128, 256)),
    ],
)
def test_profiles(ceiling: int, prefill: int, expected: tuple[int, ...]) -> None:
    assert profiles(ceiling, prefill) == expected


def test_the_preset_is_what_profiles_look_like() -> None:
    assert ascending(PRESET) == PRESET == (64, 256, 1024)


@given(ceiling=st.integers(1, 5000), prefill=st.integers(1, 5000))
def test_profiles_cover_both_and_nothing_is_there_twice(ceiling: int, prefill: int) -> None:
    found = profiles(ceiling, prefill)
    assert found == ascending(found)
    assert prefill in found
    top = max(c for c in found if c & (c - 1) == 0)
    assert ceiling <= top < 2 * ceiling or top == prefill


@pytest.mark.parametrize(
    "call",
    [
        lambda: decode_ceiling(),
        lambda: decode_ceiling((0,)),
        lambda: decode_ceiling((8,), -1),
        lambda: decode_ceiling((8,), 0, 0),
        lambda: decode_ceiling((8.0,)),  # type: ignore[arg-type]
        lambda: profiles(0, 64),
        lambda: profiles(64, 0),
        lambda: profiles(64, True),
        lambda: ascending(()),
        lambda: ascending((64, -1)),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(call: Any) -> None:
    with pytest.raises(BadInput) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@given(tokens=st.integers(0, 1000), capacity=st.integers(1, 300))
def test_rounds_are_few_equal_and_enough(tokens: int, capacity: int) -> None:
    count, step = rounds(tokens, capacity)
    assert step <= capacity
    assert count * step >= tokens
    assert (count - 1) * capacity < max(tokens, 1)
    assert Choice.of((capacity,)).rounds(tokens) == (count, step)


@given(sizes)
def test_unmeasured_is_the_smallest_that_covers(capacities: tuple[int, ...]) -> None:
    choice = Choice.of(capacities)
    for tokens in range(capacities[-1] + 1):
        assert capacities[choice.index(tokens)] == min(c for c in capacities if c >= tokens)


def expected(capacities: tuple[int, ...], table: dict[tuple[int, int], float], tokens: int) -> int:
    """The rule, a step at a time: the next measured count at or above the step's end of range."""
    end = min(p for p in {*capacities, *(t for _, t in table)} if p >= tokens)
    at = min((t for _, t in table if t >= end), default=None)
    found = {c: table[c, at] for c in capacities if (c, at) in table} if at is not None else {}
    if not found:
        return min(c for c in capacities if c >= end)
    return min(c for c, s in found.items() if s <= min(found.values()) * (1 + MARGIN))


@given(measured())
def test_measured_is_the_rule(
    drawn: tuple[tuple[int, ...], dict[tuple[int, int], float]],
) -> None:
    capacities, table = drawn
    choice = Choice.of(capacities, table)
    for tokens in range(1, capacities[-1] + 1):
        served = capacities[choice.index(tokens)]
        assert served == expected(capacities, table, tokens)
        assert served >= tokens
    assert choice.index(0) == choice.index(1)


def test_the_order_in_which_it_was_measured_changes_nothing() -> None:
    table = {(64, 8): 2.0, (256, 8): 1.0, (64, 64): 3.0, (256, 64): 3.0, (256, 256): 5.0}
    every = {Choice.of((256, 64), dict(items)) for items in itertools.permutations(table.items())}
    (choice,) = every
    assert [choice.capacities[choice.index(t)] for t in (1, 8, 9, 64, 65, 256)] == [
        256, 256, 64, 64, 256, 256,
    ]  # fmt: skip


def test_a_gain_within_the_noise_keeps_the_smaller() -> None:
    near = {(64, 64): 1.0, (128, 64): 1.0 - MARGIN / 2}
    assert Choice.of((64, 128), near).index(64) == 0
    assert Choice.of((64, 128), near, margin=0.0).index(64) == 1
    assert Choice.of((64, 128), {(64, 64): 1.0, (128, 64): 0.9}).index(64) == 1


def test_numbers_of_other_workspaces_are_not_looked_at() -> None:
    assert Choice.of((64,), {(128, 64): 0.1, (64, 128): 0.1}) == Choice.of((64,))


@given(measured())
def test_json_round_trip(
    drawn: tuple[tuple[int, ...], dict[tuple[int, int], float]],
) -> None:
    choice = Choice.of(*drawn)
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"capacities": [64], "bounds": [64]},
        {"capacities": 64, "bounds": [64], "serves": [0]},
        {"capacities": [64], "bounds": [64], "serves": [1]},
        {"capacities": [64], "bounds": [64], "serves": [-1]},
        {"capacities": [64], "bounds": [32], "serves": [0]},
        {"capacities": [64, 32], "bounds": [32, 64], "serves": [0, 0]},
        {"capacities": [32, 64], "bounds": [64], "serves": [0]},
        {"capacities": [32, 64], "bounds": [64, 64], "serves": [1, 1]},
        {"capacities": [64], "bounds": [64], "serves": ["0"]},
        {"capacities": [0, 64], "bounds": [64], "serves": [1]},
        {"capacities": [], "bounds": [], "serves": []},
    ],
)
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="choice"):
        Choice.from_json(value)


def test_more_than_the_greatest_is_for_rounds() -> None:
    with pytest.raises(BadInput, match="rounds"):
        Choice.of((64, 128)).index(129)


def test_points_are_every_capacity_at_its_own_size_and_below() -> None:
    assert points((16, 24)) == ((16, 8), (24, 8), (16, 16), (24, 16), (24, 24))
    for capacities in ((1,), PRESET, profiles(300, 4000)):
        found = points(capacities)
        assert all(t <= c for c, t in found)
        assert {(c, c) for c in capacities} <= set(found)
        table = dict.fromkeys(found, 1.0)
        choice = Choice.of(capacities, table)
        assert choice == Choice.of(capacities)


def test_the_slowest_rank_counts_and_only_what_all_measured() -> None:
    tables = [{(64, 8): 1.0, (64, 64): 2.0}, {(64, 8): 3.0}, {(64, 8): 2.0, (64, 64): 1.0}]
    assert slowest(tables) == {(64, 8): 3.0}


def test_index_is_cheap() -> None:
    choice = Choice.of(profiles(4096, 16384), {(c, t): 1 / c for c, t in points((64, 16384))})
    since = time.perf_counter()
    for _ in range(10_000):
        choice.index(777)
    assert time.perf_counter() - since < 1.0
