"""A row's bits depend on the row alone: not on its batch, threads, strides or expert labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, routed
from torch import Tensor

from megamoe.formats import (
    FP8_1X64,
    FP8_BLOCK32,
    FP8_ROW,
    FP8_TENSOR,
    MXFP8,
    Format,
    Quantised,
    dequantise,
    quantise,
)
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    HF_EAGER,
    HF_GROUPED,
    ExpertWeights,
    MoEWeights,
    Placement,
    Recipe,
    TopK,
)
from megamoe.reference import moe
from megamoe.reference.moe import EXACT, Emulated

PULL_FP4 = Recipe(name="pull", act=FP8_ROW, weight_at="fc2_input", mid=FP8_1X64)
MX = Recipe(name="mx", act=MXFP8, weight_at="fc2_input", mid=MXFP8)
RECIPES = [BF16_COMBINE, BF16_FC2_INPUT, BF16_INPUT, HF_EAGER, HF_GROUPED, PULL_FP4, MX]
recipes = st.sampled_from(RECIPES)
problems = routed(max_tokens=6, max_experts=5, max_top_k=4)


def bits(x: Tensor, topk: TopK, layer: MoEWeights, recipe: Recipe) -> Tensor:
    return moe.layer(x, topk, layer, Emulated(recipe)).view(torch.int16)


def rows_of(topk: TopK, rows: Tensor) -> TopK:
    return dataclasses.replace(topk, ids=topk.ids[rows], weights=topk.weights[rows])


def check_batches(case: Case, topk: TopK, recipe: Recipe, order: list[int], cut: int) -> None:
    """Rows permuted, repeated and cut in two give the rows they gave together."""
    x, layer = case.x(), case.layer()
    whole = bits(x, topk, layer, recipe)
    assert whole.shape == (case.tokens, case.hidden_size)
    chosen = torch.tensor(order, dtype=torch.int64)
    for rows in (chosen, chosen[:cut], chosen[cut:], *chosen.split(1)):
        assert torch.equal(bits(x[rows], rows_of(topk, rows), layer, recipe), whole[rows])


@given(problems, recipes, st.data())
def test_batch_split_and_composition(problem, recipe: Recipe, data) -> None:  # K71
    case, topk = problem
    order = st.lists(st.integers(0, max(case.tokens - 1, 0)), max_size=8 if case.tokens else 0)
    chosen = data.draw(order)
    check_batches(case, topk, recipe, chosen, data.draw(st.integers(0, len(chosen))))


def tensor_scaled(values: Tensor, fmt: Format) -> Tensor:
    return dequantise(quantise(values, FP8_TENSOR))


def centred_on_the_batch(values: Tensor, fmt: Format) -> Tensor:
    wide = values.to(torch.float64)
    return wide + wide.mean(dim=0) * 2.0**-4


@pytest.mark.parametrize("wrong", [tensor_scaled, centred_on_the_batch])
def test_a_row_that_sees_its_batch_is_caught(wrong, monkeypatch) -> None:
    monkeypatch.setattr(Emulated, "enter", lambda self, values, fmt: wrong(values, fmt))
    case = Case(tokens=6, experts=1, empty=0)
    with pytest.raises(AssertionError):
        check_batches(case, case.topk(), BF16_COMBINE, [3, 1, 0, 5, 2, 4], 2)


@pytest.mark.parametrize("recipe", [BF16_COMBINE, MX], ids=str)
def test_thread_count(recipe: Recipe) -> None:
    """Large enough that the library really divides its work."""
    case = Case(tokens=32, experts=3, top_k=3, hidden_size=512, intermediate_size=256, seed=5)
    x, topk, layer = case.x(), case.topk(), case.layer()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(bits(x, topk, layer, recipe))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert int(results[0].count_nonzero()) > results[0].numel() / 2


@given(problems, recipes, st.sampled_from([1, 40, 1 << 30]), st.sampled_from([1, 1 << 30]))
def test_memory_budgets(problem, recipe: Recipe, piece: int, room: int) -> None:
    """How much is held at once changes nothing: one row of a matrix, or all experts together."""
    case, topk = problem
    x, layer = case.x(), case.layer()
    whole = bits(x, topk, layer, recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "CPU_PIECE", piece)
        patch.setattr(moe, "CPU_ROOM", room)
        assert torch.equal(bits(x, topk, layer, recipe), whole)


def spread(t: Tensor) -> Tensor:
    """The same values, every other element of a wider tensor."""
    return t.new_empty(*t.shape, 2)[..., 0].copy_(t)


def transposed(t: Tensor) -> Tensor:
    return t.T.contiguous().T


def offset(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (3, 1, 1, 0))[1:, 3:-1]


@pytest.mark.parametrize("laid_out", [spread, transposed, offset])
@given(problem=problems, recipe=recipes)
def test_strides(laid_out: Callable[[Tensor], Tensor], problem, recipe: Recipe) -> None:
    case, topk = problem
    x, layer = case.x(), case.layer()
    expected = bits(x, topk, layer, recipe)
    strided = TopK(ids=laid_out(topk.ids), weights=laid_out(topk.weights), scaled=False)
    assert torch.equal(bits(laid_out(x), strided, layer, recipe), expected)


def test_strided_weights() -> None:
    case = Case(weights=FP8_BLOCK32, bias=True, hidden_size=96, intermediate_size=64)
    layer = case.layer()
    expected = bits(case.x(), case.topk(), layer, BF16_COMBINE)

    def restride(q: Quantised) -> Quantised:
        assert q.scale is not None
        return dataclasses.replace(q, data=spread(q.data), scale=spread(q.scale))

    experts = layer.experts
    assert experts.b13 is not None
    assert experts.b2 is not None
    strided = ExpertWeights(
        w13=restride(experts.w13), w2=restride(experts.w2), b13=spread(experts.b13),
        b2=spread(experts.b2),
    )  # fmt: skip
    assert not strided.w13.data.is_contiguous()
    again = bits(case.x(), case.topk(), dataclasses.replace(layer, experts=strided), BF16_COMBINE)
    assert torch.equal(again, expected)


@given(problem=problems, recipe=recipes, data=st.data())
def test_expert_relabelling(problem, recipe: Recipe, data) -> None:
    """Experts stored in another order under other ids; only a sum in expert order can tell."""
    case, topk = problem
    if recipe.combine == "experts":
        recipe = dataclasses.replace(recipe, combine="slots", partial=None)
    layer = case.layer()
    order = data.draw(st.permutations(range(case.experts)))
    stored = torch.tensor(order)
    relabelled = dataclasses.replace(
        layer,
        experts=ExpertWeights(w13=layer.experts.w13[stored], w2=layer.experts.w2[stored]),
    )
    new_id = torch.cat([torch.argsort(stored), torch.tensor([-1])])  # -1 stays -1
    ids = new_id[topk.ids]
    again = bits(case.x(), dataclasses.replace(topk, ids=ids), relabelled, recipe)
    assert torch.equal(again, bits(case.x(), topk, layer, recipe))
    placed = dataclasses.replace(
        relabelled, placement=Placement(num_experts=case.experts, slots=(tuple(order),))
    )  # the same experts under their own ids, in other slots
    assert torch.equal(bits(case.x(), topk, placed, recipe), bits(case.x(), topk, layer, recipe))


@given(problem=problems, recipe=recipes)
def test_dtypes_of_routing(problem, recipe: Recipe) -> None:
    """int32 or int64 ids; weights of any float type, where their values are the same."""
    case, topk = problem
    layer = case.layer()
    short = topk.weights.to(torch.bfloat16).to(torch.float16).to(torch.float32)
    topk = dataclasses.replace(topk, weights=short.clamp(min=2.0**-8).to(torch.bfloat16).float())
    expected = bits(case.x(), topk, layer, recipe)
    for ids in (torch.int32, torch.int64):
        for weights in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            cast = dataclasses.replace(topk, ids=topk.ids.to(ids), weights=topk.weights.to(weights))
            assert torch.equal(cast.weights.to(torch.float32), topk.weights)
            assert torch.equal(bits(case.x(), cast, layer, recipe), expected)


@given(problem=problems, recipe=recipes, seed=st.integers(0, 2**10))
def test_empty_slots_and_poison(problem, recipe: Recipe, seed: int) -> None:
    """What stands beside an empty slot, and in a row of nothing else, does not count."""
    case, topk = problem
    layer = case.layer()
    expected = bits(case.x(), topk, layer, recipe)
    empty = topk.ids < 0
    poisoned = torch.where(
        empty, torch.tensor([float("nan"), float("inf"), -5.0])[seed % 3], topk.weights
    )
    x = case.x()
    dead = empty.all(dim=1)
    x[dead] = float("nan")  # nothing reads it: there is no shared expert here
    again = bits(x, dataclasses.replace(topk, weights=poisoned), layer, recipe)
    assert torch.equal(again, expected)
    assert again[dead].count_nonzero() == 0


@given(problem=problems, recipe=recipes)
def test_running_twice(problem, recipe: Recipe) -> None:
    case, topk = problem
    layer = case.layer()
    assert torch.equal(bits(case.x(), topk, layer, recipe), bits(case.x(), topk, layer, recipe))


def test_the_order_of_a_rows_slots_does_count() -> None:
    """Not promised, and rightly not: a float32 sum has an order. EXACT hardly sees it."""
    case = Case(tokens=64, top_k=4, experts=6, empty=0, gain=8.0)
    topk, layer, recipe = case.topk(), case.layer(), dataclasses.replace(BF16_COMBINE, term=None)
    turned = TopK(ids=topk.ids.flip(1), weights=topk.weights.flip(1), scaled=False)
    terms = [_sums(case, t, layer, recipe) for t in (topk, turned)]
    assert not torch.equal(*terms)
    exact = [moe.layer(case.x(), t, layer, EXACT) for t in (topk, turned)]
    torch.testing.assert_close(*exact, rtol=2.0**-45, atol=2.0**-45)


def _sums(case: Case, topk: TopK, layer: MoEWeights, recipe: Recipe) -> Tensor:
    """The float32 sums before their rounding to BF16."""
    arithmetic = Emulated(recipe)
    ids, w = moe.routing(topk, layer)
    terms = torch.zeros(*ids.shape, case.hidden_size)
    held = layer.placement.slots[0]
    moe.add_terms(terms, case.x(), ids, w, layer.experts, held, layer.activation, arithmetic)
    return moe.combine(terms, ids, w, arithmetic)
