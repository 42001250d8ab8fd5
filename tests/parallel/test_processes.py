"""Real processes over gloo, through ``prepare`` and ``forward``: the bits are one rank's."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from parallel.mutants import MUTANTS
from parallel.shares import Problem, problems, same_bits
from parallel.work import run
from strategies import Case

from megamoe.formats import MXFP4, PLAIN_BF16
from megamoe.kernels.torch_grouped import TorchGrouped
from megamoe.problem import Placement, Recipe, family_recipe
from megamoe.suite.pool import Pool

# One pool serves all examples: its ranks keep nothing of a problem.
SHARED_POOL = profile(max_examples=14, suppress_health_check=[HealthCheck.function_scoped_fixture])


def compare(pool: Pool, problem: Problem, recipe: Recipe, **how: Any) -> None:
    """Both calls on every rank against one rank's reference; AssertionError where a bit differs."""
    outcome = pool.run(run, timeout=120.0, problem=problem, **how)
    assert outcome.status == "done", f"{outcome}\n{outcome.log}"
    expected = problem.expected(recipe)
    sizes = list(problem.counts)
    turned = torch.cat([part.flip(0) for part in expected.split(sizes)])
    for first in range(0, pool.world_size, problem.world_size):  # every copy of the group
        ranks = range(first, first + problem.world_size)
        for call, wanted in enumerate((turned, expected)):
            found = [torch.from_numpy(outcome.values[r][call]).view(torch.bfloat16) for r in ranks]
            same_bits(found, wanted)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_of_one_rank(pool: Pool, world_size: int) -> None:  # K27
    @given(problem=problems(st.just(world_size)), forced=st.sampled_from((None, "1")))
    @SHARED_POOL
    def check(problem: Problem, forced: str | None) -> None:
        compare(pool, problem, family_recipe(problem.case.weight_at), force=forced)

    check()


@pytest.mark.parametrize("world_size", [2, 4])
def test_torch_grouped_has_the_bits_of_its_recipe(pool: Pool, world_size: int) -> None:
    @given(problem=problems(st.just(world_size), (PLAIN_BF16, MXFP4)))
    @SHARED_POOL
    def check(problem: Problem) -> None:
        compare(pool, problem, grouped_recipe(problem), kernel="torch_grouped")

    check()


def grouped_recipe(problem: Problem) -> Recipe:
    own = TorchGrouped.sheet.recipe
    if problem.case.weight_at == "input":
        return dataclasses.replace(own, weight_at="input")
    return own


def test_emulate_runs_the_recipe_of_the_kernel_it_stands_for(pool: Pool) -> None:
    compare(pool, BUSY, grouped_recipe(BUSY), kernel="torch_grouped", force="emulate")


BUSY = Problem(
    case=Case(
        tokens=12, experts=3, top_k=3, hidden_size=32, intermediate_size=32, shared=32,
        routed_scaling_factor=2.5, gain=2.0, seed=11,
    ),
    # Every expert twice, so that each of both ranks meets each fault.
    placement=Placement(num_experts=3, slots=((2, 0, 1), (1, 2, 0))),
    counts=(6, 6),
    ids=tuple((a % 3, -1 if a % 4 == 3 else (a + 1) % 3, 2 - a % 3) for a in range(12)),
)  # fmt: skip


@pytest.mark.parametrize("counts", [(0, 12), (12, 0), (0, 0), (5, 7)])
def test_more_tokens_than_capacity_run_in_rounds(pool: Pool, counts: tuple[int, int]) -> None:
    """K46: exact at, below and above the capacity; an idle rank runs as many rounds."""
    tokens = sum(counts)
    problem = dataclasses.replace(
        BUSY, case=dataclasses.replace(BUSY.case, tokens=tokens), counts=counts,
        ids=BUSY.ids[:tokens],
    )  # fmt: skip
    recipe = family_recipe(problem.case.weight_at)
    for capacity in (4, 5, max(counts) + 1):
        compare(pool, problem, recipe, capacity=capacity, max_tokens=max(counts))


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", "torch_grouped"])
def test_without_a_fault_the_comparison_passes(pool: Pool, kernel: str) -> None:
    recipe = grouped_recipe(BUSY) if kernel == "torch_grouped" else family_recipe("combine")
    compare(pool, BUSY, recipe, kernel=kernel)


@pytest.mark.parametrize("kernel", ["reference", "torch_grouped"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_fault_is_caught(pool: Pool, mutant: str, kernel: str) -> None:
    recipe = grouped_recipe(BUSY) if kernel == "torch_grouped" else family_recipe("combine")
    with pytest.raises(AssertionError, match=r"rows \[.*\] differ"):
        compare(pool, BUSY, recipe, kernel=kernel, mutant=mutant)
