"""The nouns: what they hold, what they work out, and the sentence for what does not fit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case

from megamoe.errors import BadInput
from megamoe.formats import (
    BF16,
    E4M3,
    FP8_1X128,
    FP8_BLOCK128,
    FP8_ROW,
    FP8_TENSOR,
    FP32,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
    Format,
    ScaleRule,
    plain,
)
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    GPT_OSS_ALPHA,
    HF_EAGER,
    HF_GROUPED,
    Activation,
    ExpertWeights,
    Host,
    Machine,
    MoEWeights,
    Placement,
    Recipe,
    Request,
    Router,
    SharedExpert,
    TopK,
    family_recipe,
)


def refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(sentence)}$"):
        make()


# --- activation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0, 0.0, -0.0, math.inf])
def test_no_limit_has_one_form(limit: float | None) -> None:
    assert Activation(limit=limit) == Activation()
    assert Activation(limit=limit).limit is None


@pytest.mark.parametrize("limit", [-1.0, -math.inf, math.nan])
def test_a_limit_is_a_number_from_zero_up(limit: float) -> None:
    refused(
        lambda: Activation(limit=limit),
        f"activation limit {limit} is not a number >= 0; use None or 0 for no clamp",
    )


@pytest.mark.parametrize("name", ["alpha", "up_offset"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_alpha_and_offset_are_finite(name: str, value: float) -> None:
    refused(
        lambda: Activation(**{name: value}),
        f"activation {name} {value} is not finite; pass a finite one",
    )


def test_activations_say_what_they_are() -> None:
    assert str(Activation()) == "swiglu"
    assert str(Activation(limit=10)) == "swiglu, limit 10"
    assert str(Activation(limit=7, symmetric=True)) == "swiglu, limit 7 symmetric"
    assert str(Activation(symmetric=True)) == "swiglu"
    gpt_oss = Activation(limit=7, alpha=GPT_OSS_ALPHA, up_offset=1)
    assert str(gpt_oss) == "swiglu(alpha 1.702, up + 1), limit 7"
    assert Activation().is_swiglu
    assert not gpt_oss.is_swiglu


def test_gpt_oss_alpha_is_float32() -> None:
    assert torch.tensor(1.702, dtype=torch.float32).item() == GPT_OSS_ALPHA


# --- top-k ----------------------------------------------------------------------------------------


def test_routing_of_any_size() -> None:
    for tokens, top_k in ((0, 2), (3, 1), (5, 8)):
        topk = TopK(ids=torch.full((tokens, top_k), -1), weights=torch.ones(tokens, top_k))
        assert (topk.tokens, topk.top_k, topk.scaled) == (tokens, top_k, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_any_float(dtype: torch.dtype) -> None:
    TopK(ids=torch.zeros(2, 1, dtype=torch.int32), weights=torch.ones(2, 1, dtype=dtype))


@pytest.mark.parametrize(
    ("ids", "weights", "sentence"),
    [
        (
            torch.zeros(2, 1, dtype=torch.int16), torch.ones(2, 1),
            "topk.ids of torch.int16 are neither int32 nor int64; cast with ids.long()",
        ),
        (
            torch.zeros(2, 1), torch.ones(2, 1),
            "topk.ids of torch.float32 are neither int32 nor int64; cast with ids.long()",
        ),
        (
            torch.zeros(2, dtype=torch.int64), torch.ones(2),
            "topk.ids of shape [2] are not [tokens, top_k]; reshape them",
        ),
        (
            torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int32),
            "topk.weights of torch.int32 are not a float of 16 bits or more; "
            "cast with weights.float()",
        ),
        (
            torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1).to(torch.float8_e4m3fn),
            "topk.weights of torch.float8_e4m3fn are not a float of 16 bits or more; "
            "cast with weights.float()",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 2),
            "topk.weights of shape [2, 2] do not match ids of shape [2, 3]; "
            "pass one weight per slot",
        ),
        (
            torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, device="meta"),
            "topk.weights on meta are not on the ids' cpu; move them",
        ),
    ],
)  # fmt: skip
def test_a_routing_that_does_not_fit(ids, weights, sentence: str) -> None:
    refused(lambda: TopK(ids=ids, weights=weights), sentence)


# --- router ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"weight": torch.zeros(8)},
            "router.weight of shape [8] is not [experts, hidden_size]; pass the gate's matrix",
        ),
        ({"top_k": 0}, "router.top_k 0 is not in [1, 8]; check the model's config"),
        ({"top_k": 9}, "router.top_k 9 is not in [1, 8]; check the model's config"),
        (
            {"bias": torch.zeros(7)},
            "router.bias of shape [7] is not [8]; pass one value per expert",
        ),
        (
            {"correction_bias": torch.zeros(8, 1)},
            "router.correction_bias of shape [8, 1] is not [8]; pass one value per expert",
        ),
        (
            {"num_groups": 3},
            "router groups 1 of 3 do not divide 8 experts; check n_group and topk_group",
        ),
        (
            {"num_groups": 4, "top_groups": 5},
            "router groups 5 of 4 do not divide 8 experts; check n_group and topk_group",
        ),
        (
            {"num_groups": 0},
            "router groups 1 of 0 do not divide 8 experts; check n_group and topk_group",
        ),
        (
            {"num_groups": 8, "top_groups": 4},
            "router groups of 1 experts, 4 kept, cannot give two best scores and 2 experts; "
            "check n_group, topk_group and num_experts_per_tok",
        ),
        (
            {"num_groups": 4, "top_groups": 1, "top_k": 3},
            "router groups of 2 experts, 1 kept, cannot give two best scores and 3 experts; "
            "check n_group, topk_group and num_experts_per_tok",
        ),
        (
            {"table": torch.zeros(100, 3, dtype=torch.int64)},
            "router.table of shape [100, 3] is not [vocabulary, 2]; pass tid2eid as stored",
        ),
    ],
)
def test_a_router_that_does_not_fit(change: dict, sentence: str) -> None:
    good = {"weight": torch.zeros(8, 16), "top_k": 2}
    assert Router(**good).num_experts == 8
    refused(lambda: Router(**(good | change)), sentence)


# --- weights --------------------------------------------------------------------------------------


def experts(count: int = 2, width: int = 6, hidden: int = 10, **change: object) -> ExpertWeights:
    good: dict = {
        "w13": plain(torch.zeros(count, 2 * width, hidden, dtype=torch.bfloat16)),
        "w2": plain(torch.zeros(count, hidden, width, dtype=torch.bfloat16)),
    }
    return ExpertWeights(**(good | change))


def test_expert_weights_know_their_sizes() -> None:
    e = experts(b13=torch.zeros(2, 12), b2=torch.zeros(2, 10, dtype=torch.bfloat16))
    assert (e.count, e.intermediate_size, e.hidden_size) == (2, 6, 10)
    assert e.nbytes == 2 * (2 * 12 * 10 + 2 * 10 * 6) + 4 * 24 + 2 * 20
    assert len(e.tensors) == 4
    assert e.to("cpu").nbytes == e.nbytes
    assert e.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"w2": plain(torch.zeros(10, 6, dtype=torch.bfloat16))},
            "expert weights of shapes [2, 12, 10] and [10, 6] are not [experts, rows, columns]; "
            "stack the experts first",
        ),
        (
            {"w2": plain(torch.zeros(2, 6, 10, dtype=torch.bfloat16))},
            "w2 of shape [2, 6, 10] does not fit w13 of shape [2, 12, 10]; expected [2, 10, 6]",
        ),
        (
            {"w13": plain(torch.zeros(2, 11, 10, dtype=torch.bfloat16))},
            "w2 of shape [2, 10, 6] does not fit w13 of shape [2, 11, 10]; expected [2, 10, 5]",
        ),
        (  # K13: rows of a layer without gates
            {"w13": plain(torch.zeros(2, 6, 10, dtype=torch.bfloat16))},
            "w2 of shape [2, 10, 6] does not fit w13 of shape [2, 6, 10]; expected [2, 10, 3]",
        ),
        (
            {"b13": torch.zeros(2, 6)},
            "b13 of shape [2, 6] is not [2, 12]; pass one bias per output row",
        ),
        (
            {"b2": torch.zeros(2, 12)},
            "b2 of shape [2, 12] is not [2, 10]; pass one bias per output row",
        ),
        (
            {"b2": torch.zeros(2, 10, device="meta")},
            "b2 on meta is not on w13's cpu; move it",
        ),
    ],
)
def test_experts_that_do_not_fit(change: dict, sentence: str) -> None:
    refused(lambda: experts(**change), sentence)


def test_one_shared_expert() -> None:
    refused(
        lambda: SharedExpert(weights=experts()),
        "shared expert of 2 experts is not one FFN; "
        "concatenate shared experts along their intermediate dimension",
    )


def layer(**change: object) -> MoEWeights:
    good: dict = {"experts": experts(), "placement": Placement.contiguous(2, 1)}
    return MoEWeights(**(good | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"rank": 1},
            "weights.rank 1 is not in [0, 1); "
            "pass this process's rank in the expert-parallel group",
        ),
        (
            {"placement": Placement.contiguous(3, 1)},
            "weights.experts of 2 experts do not fill the 3 slots of rank 0; "
            "load with the same placement",
        ),
        (
            {"routed_scaling_factor": 0.0},
            "routed_scaling_factor 0.0 is not a finite number above 0; "
            "use 1.0 for a model without one",
        ),
        (
            {"routed_scaling_factor": math.nan},
            "routed_scaling_factor nan is not a finite number above 0; "
            "use 1.0 for a model without one",
        ),
        (
            {"experts": experts(b2=torch.zeros(2, 10)), "weight_at": "fc2_input"},
            "weight_at fc2_input is wrong with a bias b2: the bias would go unweighted; "
            "use weight_at='combine'",
        ),
        (
            {"shared": SharedExpert(weights=experts(count=1, hidden=12))},
            "shared expert's hidden_size 12 is not the experts' 10; load both from the same layer",
        ),
        (
            {"router": Router(weight=torch.zeros(2, 12), top_k=1)},
            "router's hidden_size 12 is not the experts' 10; load both from the same layer",
        ),
        (
            {"router": Router(weight=torch.zeros(4, 10), top_k=1)},
            "router of 4 experts does not choose among the layer's 2; "
            "load both from the same layer",
        ),
    ],
)
def test_a_layer_that_does_not_fit(change: dict, sentence: str) -> None:
    layer()
    refused(lambda: layer(**change), sentence)


def test_a_layer_knows_its_sizes() -> None:
    own = layer(shared=SharedExpert(weights=experts(count=1, width=3)))
    assert (own.num_experts, own.hidden_size, own.intermediate_size) == (2, 10, 6)
    assert own.nbytes == experts().nbytes + experts(count=1, width=3).nbytes


# --- placement ------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_contiguous_placement(num_experts: int, world_size: int) -> None:
    placement = Placement.contiguous(num_experts, world_size)
    assert [e for rank in placement.slots for e in rank] == list(range(num_experts))
    sizes = [len(rank) for rank in placement.slots]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert placement.world_size == world_size
    assert placement.slots_per_rank == max(sizes)
    assert placement.is_contiguous == (num_experts % world_size == 0)
    assert not placement.has_replicas


def test_placements_of_every_kind() -> None:
    permuted = Placement(num_experts=4, slots=((3, 1), (0, 2)))
    replicated = Placement(num_experts=2, slots=((0, 1), (1, -1)))
    uneven = Placement.contiguous(10, 4)
    assert not permuted.is_contiguous
    assert not permuted.has_replicas
    assert replicated.has_replicas
    assert [len(rank) for rank in uneven.slots] == [3, 3, 2, 2]
    assert not uneven.is_contiguous
    assert not Placement(num_experts=2, slots=((0, 1, -1),)).has_replicas


@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        (
            ((0, 1), (2, 4)),
            "placement names expert 4 outside [-1, 4); use logical ids, and -1 for an empty slot",
        ),
        (
            ((0, 1), (-2, 3)),
            "placement names expert -2 outside [-1, 4); use logical ids, and -1 for an empty slot",
        ),
        (
            ((0, 1), (3, -1)),
            "placement leaves out expert 2 but all 4 must be held; give each expert a slot",
        ),
    ],
)
def test_a_placement_that_does_not_fit(slots, sentence: str) -> None:
    refused(lambda: Placement(num_experts=4, slots=slots), sentence)


def test_a_world_has_ranks() -> None:
    refused(
        lambda: Placement.contiguous(4, 0),
        "world_size 0 is below 1; pass the group's size",
    )


# --- recipes and requests -------------------------------------------------------------------------


def test_family_recipes() -> None:
    assert family_recipe("combine") is BF16_COMBINE
    assert family_recipe("fc2_input") is BF16_FC2_INPUT
    assert family_recipe("input") is BF16_INPUT
    term = family_recipe("term")
    assert term == dataclasses.replace(BF16_COMBINE, name=term.name, weight_at="term")


def test_the_default_recipe_rounds_operands_and_terms_only() -> None:
    for recipe in (BF16_COMBINE, BF16_FC2_INPUT, BF16_INPUT):
        assert (recipe.act, recipe.mid, recipe.term) == (PLAIN_BF16, PLAIN_BF16, BF16)
        between = (recipe.fc1_out, recipe.gate_out, recipe.swiglu_out, recipe.fc2_out)
        assert between == (None,) * 4
        assert (recipe.combine, recipe.partial) == ("slots", None)
    assert HF_EAGER.weight_at == "term"
    assert HF_GROUPED.weight_at == "combine"
    assert str(HF_EAGER) == "Hugging Face eager experts"


@pytest.mark.parametrize("fmt", [FP8_TENSOR, FP8_BLOCK128, NVFP4], ids=str)
@pytest.mark.parametrize("name", ["act", "mid"])
def test_no_activation_format_mixes_tokens(fmt: Format, name: str) -> None:
    refused(
        lambda: Recipe(name="mixed", **{name: fmt}),
        f"recipe.{name} {fmt} makes one scale for several tokens; "
        "use a format of one row a block, so that no token's bits depend on its batch",
    )


def test_activation_formats_of_one_row() -> None:
    static = Format(name="static", element=E4M3, scale=FP32, rule=ScaleRule(kind="static", top=0.5))
    for fmt in (PLAIN_BF16, FP8_ROW, FP8_1X128, MXFP8, MXFP4, static):
        Recipe(name="fine", act=fmt, mid=fmt)


def test_a_request_is_a_layer_without_its_tensors() -> None:
    case = Case(
        experts=3, bias=True, shared=8, routed_scaling_factor=2.5, scale_at="output",
        activation=Activation(limit=7.0),
    )  # fmt: skip
    own = case.layer()
    host = Host(tp_size=2)
    request = Request.of(own, top_k=2, max_tokens_per_rank=16, host=host)
    assert request == Request(
        hidden_size=40, intermediate_size=24, placement=own.placement, top_k=2,
        max_tokens_per_rank=16, activation=own.activation, expert_bias=True, shared=True,
        routed_scaling_factor=2.5, scale_at="output", host=host,
    )  # fmt: skip
    assert request.w2_weights is PLAIN_BF16
    assert (request.num_experts, request.world_size) == (3, 1)
    assert hash(request) == hash(dataclasses.replace(request))


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "top_k", "max_tokens_per_rank"]
)
def test_counts_are_positive(name: str) -> None:
    good = {"hidden_size": 1, "intermediate_size": 1, "top_k": 1, "max_tokens_per_rank": 1}
    placement = Placement.contiguous(1, 1)
    Request(placement=placement, **good)
    refused(
        lambda: Request(placement=placement, **(good | {name: 0})),
        f"{name} 0 is below 1; pass a positive count",
    )


def test_nouns_are_frozen() -> None:
    for noun in (Activation(), Host(), Machine(name="cpu"), BF16_COMBINE, layer(), experts()):
        field = dataclasses.fields(noun)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, field, None)
        with pytest.raises(TypeError):
            type(noun)("positional")
