"""The reference over ranks as plain lists: whatever the placement, the bits are one rank's."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from parallel.shares import Problem, problems, same_bits
from strategies import Case

from megamoe.errors import BadInput
from megamoe.problem import BF16_COMBINE, HF_EAGER, Placement, Recipe, TopK, family_recipe
from megamoe.reference import parallel
from megamoe.reference.moe import EXACT, Emulated, layer


def over_ranks(problem: Problem, recipe: Recipe) -> list[torch.Tensor]:
    ranks = range(problem.world_size)
    xs, topks = zip(*(problem.tokens(rank) for rank in ranks), strict=True)
    weights = [problem.weights(rank) for rank in ranks]
    return parallel.over_ranks(xs, topks, weights, Emulated(recipe))


@given(problem=problems(st.integers(1, 8)))
@profile(max_examples=60)
def test_bits_of_one_rank(problem: Problem) -> None:  # K27
    recipe = family_recipe(problem.case.weight_at)
    same_bits(over_ranks(problem, recipe), problem.expected(recipe))


@given(problem=problems(st.integers(1, 4)))
@profile(max_examples=15)
def test_a_recipe_that_sums_in_expert_order_means_logical_experts(problem: Problem) -> None:
    same_bits(over_ranks(problem, HF_EAGER), problem.expected(HF_EAGER))


def test_exact_arithmetic_goes_over_ranks_too() -> None:
    problem = hot(4)
    ranks = range(4)
    xs, topks = zip(*(problem.tokens(r) for r in ranks), strict=True)
    ys = parallel.over_ranks(xs, topks, [problem.weights(r) for r in ranks], EXACT)
    truth = layer(*problem.whole(), EXACT)
    together = torch.cat(ys)
    assert together.dtype == torch.float64
    # float64 products may sum in another order where their batch differs: a few units at most.
    assert (together - truth).norm() <= 2**-45 * truth.norm()


def hot(world_size: int, *, ids: int = 0, counts: tuple[int, ...] | None = None) -> Problem:
    """Every token to one expert of rank 0, so that the last rank receives nothing."""
    counts = counts or (3,) * world_size
    case = Case(tokens=sum(counts), experts=2 * world_size, top_k=2, shared=16)
    return Problem(
        case=case,
        placement=Placement.contiguous(case.experts, world_size),
        counts=counts,
        ids=((ids, ids + 1),) * case.tokens,
    )


def test_all_tokens_to_rank_0_and_none_to_the_last() -> None:  # K42
    same_bits(over_ranks(hot(4), BF16_COMBINE), hot(4).expected(BF16_COMBINE))


@pytest.mark.parametrize("idle", [*range(4), None])
def test_an_idle_rank_takes_part(idle: int | None) -> None:  # K39, K40, K41
    counts = tuple(0 if idle in (rank, None) else 3 * rank + 1 for rank in range(4))
    problem = hot(4, ids=2, counts=counts)
    found = over_ranks(problem, BF16_COMBINE)
    assert [len(y) for y in found] == list(counts)
    same_bits(found, problem.expected(BF16_COMBINE))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_of_nothing_but_empty_slots_give_the_shared_expert(world_size: int) -> None:  # K25
    counts = (2,) * world_size
    case = Case(tokens=sum(counts), experts=4, top_k=2, shared=16)
    problem = Problem(
        case=case,
        placement=Placement.contiguous(4, world_size),
        counts=counts,
        ids=((-1, -1),) * case.tokens,
    )
    x, topk, weights = problem.whole()
    assert topk.weights.isnan().all()
    alone = layer(x, TopK(ids=topk.ids[:, :0], weights=topk.weights[:, :0], scaled=False), weights,
                  Emulated(BF16_COMBINE))  # fmt: skip
    assert alone.any()
    same_bits(over_ranks(problem, BF16_COMBINE), alone)


def test_replicas_in_rank_order_share_the_load() -> None:
    placement = Placement(num_experts=2, slots=((0, 1), (1, -1), (1, 0)))
    ids = torch.tensor([[1, 0], [1, -1], [0, 1]])
    # Expert 0 stands at 0 and 5, expert 1 at 1, 2 and 4; number (rank + row + slot) is taken.
    assert parallel.physical(ids, placement, 0).tolist() == [[1, 5], [2, -1], [0, 1]]
    assert parallel.physical(ids, placement, 2).tolist() == [[4, 5], [1, -1], [0, 4]]


def test_a_recipe_by_ranks_gets_the_owner_of_each_slot() -> None:
    """Each rank's partial sum is rounded to BF16 before they are added: 257 is no BF16 number."""
    recipe = Recipe(name="by rank", combine="ranks", partial=BF16_COMBINE.term)
    w = torch.tensor([[256.0, 1.0, 1.0]])
    for owners, total in (((0, 0, 0), 258.0), ((0, 0, 1), 256.0), ((0, 1, 1), 258.0)):
        terms = torch.ones(1, 3, 1)
        y = parallel_sum(terms, w, owners, recipe)
        # One rank: 258, BF16. Two: RNbf16(257) + 1 is 257, tied to 256; 256 + 2 is 258.
        assert y == total


def parallel_sum(
    terms: torch.Tensor, w: torch.Tensor, owners: tuple[int, ...], recipe: Recipe
) -> float:
    from megamoe.formats import rnbf16
    from megamoe.reference.moe import combine

    ids = torch.zeros(1, len(owners), dtype=torch.int64)
    owner = torch.tensor([owners])
    return float(rnbf16(combine(terms, ids, w, Emulated(recipe), owner)))


def test_lists_of_different_lengths_are_refused() -> None:
    problem = hot(2)
    xs, topks = zip(*(problem.tokens(r) for r in range(2)), strict=True)
    weights = [problem.weights(r) for r in range(2)]
    with pytest.raises(BadInput, match="xs of 1 ranks do not match 2 ranks"):
        parallel.over_ranks(xs[:1], topks, weights, Emulated(BF16_COMBINE))
    with pytest.raises(BadInput, match="of 2 ranks do not match 1 ranks"):
        parallel.over_ranks(xs[:1], topks[:1], weights[:1], Emulated(BF16_COMBINE))
