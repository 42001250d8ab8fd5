"""torch_grouped on a CPU: its host side gives the bits of the recipe that its sheet states."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from parallel.shares import Problem, problems, same_bits
from strategies import Case, bell

import megamoe
from megamoe.dispatch.machine import CPU, H200
from megamoe.dispatch.select import refusals, select
from megamoe.formats import BF16, CATALOGUE, MXFP4, MXFP8, PLAIN_BF16, Format, dequantise
from megamoe.kernels.torch_grouped import TorchGrouped, grouped, with_bias
from megamoe.problem import Activation, Recipe, Request
from megamoe.reference.moe import Emulated, layer


def recipe(case: Case) -> Recipe:
    own = TorchGrouped.sheet.recipe
    return dataclasses.replace(own, weight_at="input") if case.weight_at == "input" else own


@given(problem=problems(st.just(1), (PLAIN_BF16, MXFP4, MXFP8)))
def test_bits_of_its_recipe(problem: Problem) -> None:
    x, topk = problem.tokens(0)
    with megamoe.prepare(
        problem.weights(0), max_tokens_per_rank=8, top_k=problem.case.top_k, kernel="torch_grouped"
    ) as prepared:
        found = prepared.forward(x, topk)
    same_bits([found], problem.expected(recipe(problem.case)))


@pytest.mark.parametrize(
    "activation",
    [
        Activation(limit=0.3),
        Activation(limit=0.3, symmetric=True),
        Activation(alpha=1.7020000219345093, up_offset=1.0, limit=0.7),
    ],
    ids=str,
)
def test_activations(activation: Activation) -> None:
    case = Case(
        tokens=9, activation=activation, shared=16, shared_activation=activation, bias=True, gain=4
    )
    x, topk, weights = case.x(), case.topk(), case.layer()
    with megamoe.prepare(
        weights, max_tokens_per_rank=9, top_k=2, kernel="torch_grouped"
    ) as prepared:
        found = prepared.forward(x, topk)
    same_bits([found], layer(x, topk, weights, Emulated(TorchGrouped.sheet.recipe)))


def test_a_bias_stands_exactly_in_three_columns() -> None:
    bias = torch.tensor([[1.0 + 2.0**-23, -3.1415927, 0.0, 2.0**-126, 1e30, torch.inf]])
    weights = with_bias(torch.zeros(1, 6, 8, dtype=torch.bfloat16), bias)
    assert weights.shape == (1, 6, 16)
    columns = weights[0, :, 8:].to(torch.float64)
    assert not columns[:, 3:].any()
    assert torch.equal(columns.sum(1), bias[0].to(torch.float64))
    rows = grouped(torch.zeros(1, 8, dtype=torch.bfloat16), weights, torch.tensor([1]))
    assert torch.equal(rows, bias.to(torch.bfloat16))
    plain = torch.zeros(1, 6, 8, dtype=torch.bfloat16)
    assert with_bias(plain, None) is plain


def test_rows_past_the_counts_are_poison_and_do_not_leak() -> None:  # K51, K52, K55
    a = bell(1, 4, 8).to(torch.bfloat16)
    w = bell(2, 3, 16, 8).to(torch.bfloat16)
    found = grouped(a, w, torch.tensor([0, 2, 0]))
    assert found[2:].isnan().all()
    assert torch.equal(found[:2], (a[:2].double() @ w[1].double().T).float().bfloat16())
    case = Case(tokens=6, experts=3, empty=2)
    assert (case.topk().ids < 0).any()
    y = megamoe.prepare(
        case.layer(), max_tokens_per_rank=6, top_k=2, kernel="torch_grouped"
    ).forward(case.x(), case.topk())
    same_bits([y], layer(case.x(), case.topk(), case.layer(), Emulated(recipe(case))))


def test_no_token_at_all() -> None:  # K40
    case = Case(tokens=0, shared=16)
    with megamoe.prepare(
        case.layer(), max_tokens_per_rank=4, top_k=2, kernel="torch_grouped"
    ) as prepared:
        y = prepared.forward(case.x(), case.topk())
    assert y.shape == (0, case.hidden_size)
    assert y.dtype == torch.bfloat16


# --- what it refuses ------------------------------------------------------------------------------


def request(**more: object) -> Request:
    base = Request.of(Case(hidden_size=64).layer(), top_k=2, max_tokens_per_rank=4)
    return dataclasses.replace(base, w2_weights=None, **more)  # type: ignore[arg-type]


def test_on_a_cpu_it_runs_only_where_it_is_named() -> None:
    decision = select(request(), CPU)
    assert decision.name == "reference"
    sentence = "is a plain loop there: on a CPU it runs only where it is named"
    assert decision.refusals["torch_grouped"] == (sentence,)
    assert select(request(), CPU, only="torch_grouped").name == "torch_grouped"
    assert refusals(TorchGrouped, request(), H200) == ()


@pytest.mark.parametrize(
    ("change", "capability", "sentence"),
    [
        ({}, (7, 5), "needs compute capability 8.0 or above, and NVIDIA H200 has 7.5"),
        ({"hidden_size": 36}, (9, 0), "hidden_size 36 is not a multiple of 8"),
        ({"intermediate_size": 12}, (9, 0), "intermediate_size 12 is not a multiple of 8"),
    ],
)  # fmt: skip
def test_objections(change: dict[str, object], capability: tuple[int, int], sentence: str) -> None:
    machine = dataclasses.replace(H200, capability=capability)
    assert refusals(TorchGrouped, request(**change), machine) == (sentence,)


def test_several_ranks_on_one_gpu_are_fine() -> None:
    shared = dataclasses.replace(H200, ranks_per_gpu=2, peer_access=False)
    two = Request.of(Case(hidden_size=64).layer(), top_k=2, max_tokens_per_rank=4)
    two = dataclasses.replace(two, placement=megamoe.Placement.contiguous(4, 2))
    assert refusals(TorchGrouped, two, shared) == ()


@pytest.mark.parametrize("fmt", CATALOGUE, ids=str)
def test_every_format_is_held_in_bf16_and_judged_as_it_is_held(fmt: Format) -> None:
    case = Case(hidden_size=64, intermediate_size=32, weights=fmt)
    weights = case.layer()
    with megamoe.prepare(
        weights, max_tokens_per_rank=4, top_k=2, kernel="torch_grouped"
    ) as prepared:
        y = prepared.forward(case.x(), case.topk())
    computed = TorchGrouped.as_computed(weights.experts)
    held = dataclasses.replace(weights, experts=computed)
    same_bits([y], layer(case.x(), case.topk(), held, Emulated(recipe(case))))
    for exact, kept in ((weights.experts.w13, computed.w13), (weights.experts.w2, computed.w2)):
        assert torch.equal(dequantise(exact, to=BF16), kept.data)


def test_ranks_without_a_group_are_refused() -> None:
    from megamoe.kernels.base import Context

    two = dataclasses.replace(request(), placement=megamoe.Placement.contiguous(4, 2))
    context = Context(request=two, machine=CPU, device=torch.device("cpu"))
    for kernel in ("torch_grouped", "reference"):
        with pytest.raises(megamoe.BadInput, match="group None does not hold the 2 ranks"):
            select(two, CPU, only=kernel).kernel.prepare(Case().layer(), context)
