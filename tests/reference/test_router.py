"""The router against a scalar model of its contract, decimal arithmetic, and known failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.errors import BadInput
from megamoe.formats import plain
from megamoe.problem import MAX_EXPERTS, ExpertWeights, MoEWeights, Placement, Router, TopK
from megamoe.reference.canary import digest
from megamoe.reference.elementwise import exp, log1p_exp, sigmoid
from megamoe.reference.moe import routing
from megamoe.reference.router import logits, route

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "softmax_of_top_k")


def router(experts: int, top_k: int, **fields: object) -> Router:
    return Router(weight=torch.zeros(experts, 1), top_k=top_k, **fields)  # type: ignore[arg-type]


def bits(topk: TopK) -> tuple[list[list[int]], list[list[int]]]:
    weights = torch.where(topk.weights.isnan(), torch.nan, topk.weights)
    return topk.ids.tolist(), weights.view(torch.int32).tolist()


# --- a second implementation: scalars, loops and sorted() -----------------------------------------


def f32(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value))


def one(function: Callable[[Tensor], Tensor], value: float) -> float:
    """An elementwise function of one number; these have scalar models of their own."""
    return float(function(torch.tensor([value], dtype=torch.float64)).item())


def scalar_softmax(values: list[float]) -> list[float]:
    if any(math.isnan(v) for v in values) or max(values) in (math.inf, -math.inf):
        return [math.nan] * len(values)
    terms = [one(exp, v - max(values)) for v in values]
    total = sum(round(term * 2.0**48) for term in terms)  # Python integers
    return [term / (float(total) * 2.0**-48) for term in terms]


def scalar_score(logit: float, scoring: str) -> float:
    if scoring == "sigmoid":
        return f32(one(sigmoid, logit))
    softplus = one(log1p_exp, logit)
    return f32(softplus if math.isnan(softplus) else math.sqrt(softplus))


def descending(scores: list[float], among: list[int]) -> list[int]:
    """``among`` by descending score, NaN first, ties to the lower id."""
    return sorted(
        among,
        key=lambda e: (0, 0.0, e) if math.isnan(scores[e]) else (1, -scores[e], e),
    )


def scalar_route(row: list[float], r: Router) -> tuple[list[int], list[float]]:
    experts = range(r.num_experts)
    if r.scoring == "softmax_of_top_k":
        scores = row
    elif r.scoring == "softmax":
        scores = [f32(p) for p in scalar_softmax(row)]
    else:
        scores = [scalar_score(value, r.scoring) for value in row]
    bias = [0.0] * r.num_experts if r.correction_bias is None else r.correction_bias.tolist()
    choice = [f32(s + b) for s, b in zip(scores, bias, strict=True)]
    size = r.num_experts // r.num_groups
    allowed = list(experts)
    if r.top_groups < r.num_groups:
        groups = [list(experts[g * size : (g + 1) * size]) for g in range(r.num_groups)]
        best = [sum(choice[e] for e in descending(choice, group)[:2]) for group in groups]
        kept = descending([f32(b) for b in best], list(range(r.num_groups)))[: r.top_groups]
        allowed = [e for g in kept for e in groups[g]]
    ids = descending(choice, allowed)[: r.top_k]
    chosen = [scores[e] for e in ids]
    if r.scoring == "softmax_of_top_k":
        return ids, [f32(p) for p in scalar_softmax(chosen)]
    if r.renormalise:
        total = chosen[0]
        for value in chosen[1:]:
            total += value
        with np.errstate(all="ignore"):
            chosen = [float(np.float64(v) / np.float64(total + r.epsilon)) for v in chosen]
    return ids, [f32(v) for v in chosen]


@st.composite
def routers(draw: st.DrawFn, max_experts: int = 12) -> Router:
    groups = draw(st.integers(1, 3))
    size = draw(st.integers(2 if groups > 1 else 1, max_experts // groups))
    top_groups = draw(st.integers(1, groups))
    experts = groups * size
    fields: dict[str, object] = {}
    if draw(st.booleans()):
        fields["correction_bias"] = torch.tensor(
            draw(st.lists(st.floats(-2, 2, width=32), min_size=experts, max_size=experts))
        )
    return router(
        experts,
        draw(st.integers(1, top_groups * size)),
        scoring=draw(st.sampled_from(SCORINGS)),
        renormalise=draw(st.booleans()),
        epsilon=draw(st.sampled_from([0.0, 1e-20])),
        num_groups=groups,
        top_groups=top_groups,
        **fields,
    )


def rows(draw: st.DrawFn, experts: int, **bounds: object) -> list[list[float]]:
    # A few repeated values make ties likely.
    value = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 30.0]), st.floats(width=32, **bounds)  # type: ignore[arg-type]
    )  # fmt: skip
    row = st.lists(value, min_size=experts, max_size=experts)
    return draw(st.lists(row, min_size=0, max_size=4))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_equals_the_scalar_model(data: st.DataObject) -> None:
    r = data.draw(routers())
    table = data.draw(st.composite(rows)(r.num_experts))
    found = route(torch.tensor(table).reshape(-1, r.num_experts), r)
    expected = [scalar_route(row, r) for row in table]
    assert found.scaled is False
    assert found.ids.dtype == torch.int64
    assert found.weights.dtype == torch.float32
    shape = (-1, r.top_k)
    assert bits(found) == bits(
        TopK(
            ids=torch.tensor([ids for ids, _ in expected], dtype=torch.int64).reshape(shape),
            weights=torch.tensor([w for _, w in expected]).reshape(shape),
        )
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_does_not_see_its_batch(data: st.DataObject) -> None:
    r = data.draw(routers())
    table = torch.tensor(data.draw(st.composite(rows)(r.num_experts))).reshape(-1, r.num_experts)
    whole = route(table, r)
    for t in range(len(table)):
        assert bits(route(table[t : t + 1], r)) == tuple(part[t : t + 1] for part in bits(whole))
    strided = torch.stack([table, table], dim=-1)[..., 0]
    assert bits(route(strided, r)) == bits(whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_relabelling_experts_relabels_the_ids(data: st.DataObject) -> None:
    """Weights keep their bits: not even a softmax's denominator knows the order of its terms."""
    experts = data.draw(st.integers(2, 12))
    r = router(experts, data.draw(st.integers(1, experts)), scoring=data.draw(
        st.sampled_from(SCORINGS)))  # fmt: skip
    distinct = st.lists(
        st.integers(-80, 80), min_size=experts, max_size=experts, unique=True
    )  # eighths: scores stay distinct, so that no tie asks for the label
    row = torch.tensor([data.draw(distinct)]) / 8.0
    order = torch.tensor(data.draw(st.permutations(range(experts))))
    before, after = route(row, r), route(row[:, order], r)
    assert torch.equal(order[after.ids], before.ids)
    assert torch.equal(after.weights, before.weights)


# --- accuracy -------------------------------------------------------------------------------------


def decimal_score(logit: float, scoring: str) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        x = Decimal(logit)
        if scoring == "sigmoid":
            return 1 / (1 + (-x).exp())
        return (1 + x.exp()).ln().sqrt()


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
@settings(max_examples=200, deadline=None)
@given(logit=st.floats(-80, 80, width=32))
def test_scores_are_correctly_rounded(scoring: str, logit: float) -> None:
    """Against 60 digits: the nearest float32, but for float64's own error at a midpoint."""
    r = router(1, 1, scoring=scoring, renormalise=False)
    score = route(torch.tensor([[logit]]), r).weights.item()
    exact = decimal_score(logit, scoring)
    half_ulp = Decimal(float(np.spacing(np.float32(score)))) / 2
    float64_error = 8 * exact * Decimal(2.0**-53)  # exp, +, / or ln's steps, sqrt
    assert abs(Decimal(score) - exact) <= half_ulp + float64_error


@settings(max_examples=100, deadline=None)
@given(row=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12))
def test_softmax_is_correctly_rounded(row: list[float]) -> None:
    r = router(len(row), len(row), renormalise=False)
    found = route(torch.tensor([row]), r)
    with localcontext() as context:
        context.prec = 60
        terms = [Decimal(v).exp() for v in row]
        for expert, weight in zip(found.ids[0].tolist(), found.weights[0].tolist(), strict=True):
            exact = terms[expert] / sum(terms)
            half_ulp = Decimal(float(np.spacing(np.float32(weight)))) / 2
            counted = len(row) * Decimal(2.0**-49)  # each term to half a unit of 2 ** -48
            assert abs(Decimal(weight) - exact) <= half_ulp + exact * (counted + Decimal(2.0**-50))


# --- known failures -------------------------------------------------------------------------------

ROW = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def six(weights: Tensor) -> list[str]:
    return [f"{w:.6f}" for w in weights.flatten().tolist()]


def test_k18_softmax_over_all_or_renormalised() -> None:  # K18
    assert six(route(ROW, router(4, 2, renormalise=False)).weights) == ["0.643914", "0.236883"]
    assert six(route(ROW, router(4, 2)).weights) == ["0.731059", "0.268941"]
    of_top_k = router(4, 2, scoring="softmax_of_top_k")
    assert six(route(ROW, of_top_k).weights) == ["0.731059", "0.268941"]


def test_k20_sigmoid_is_normalised() -> None:  # K20
    raw = router(4, 2, scoring="sigmoid", renormalise=False)
    assert six(route(ROW, raw).weights) == ["0.880797", "0.731059"]
    renormalised = route(ROW, router(4, 2, scoring="sigmoid")).weights
    assert six(renormalised) == ["0.546449", "0.453551"]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_k17_scaling_does_not_hang_on_renormalisation(
    renormalise: bool, factor: float
) -> None:  # K17
    """The factor is never the router's: it multiplies once, in the layer, in all four cases."""
    r = router(4, 2, renormalise=renormalise)
    experts = ExpertWeights(w13=plain(torch.zeros(4, 2, 1)), w2=plain(torch.zeros(4, 1, 1)))
    layer = MoEWeights(
        experts=experts, placement=Placement.contiguous(4, 1), routed_scaling_factor=factor
    )
    topk = route(ROW, r)
    _, applied = routing(topk, layer)
    assert torch.equal(applied, topk.weights * factor)
    assert six(topk.weights)[0] == ("0.731059" if renormalise else "0.643914")
    _, already = routing(dataclasses.replace(topk, scaled=True), layer)
    assert torch.equal(already, topk.weights)


@pytest.mark.parametrize("experts", [8, 60, 64, 128, 160, 256, 288, 384])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_k19_bias_does_not_leak_into_weights(experts: int, scoring: str) -> None:  # K19
    generator = torch.Generator().manual_seed(experts)
    table = torch.randn(3, experts, generator=generator)
    bias = torch.zeros(experts)
    bias[0] = 100.0
    for top_k in range(1, min(experts, 16) + 1):
        fields = {"scoring": scoring, "renormalise": False}
        biased = route(table, router(experts, top_k, correction_bias=bias, **fields))
        every = route(table, router(experts, experts, **fields))
        assert (biased.ids[:, 0] == 0).all()
        score = torch.empty_like(table).scatter(1, every.ids, every.weights)
        assert torch.equal(biased.weights, score.gather(1, biased.ids))


# --- ties, groups, hash layers, NaN ---------------------------------------------------------------


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_lower_id(scoring: str) -> None:
    r = router(6, 4, scoring=scoring)
    row = torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0, 1.0], [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0]])
    assert route(row, r).ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_float32_scores_that_saturate_tie() -> None:
    """sigmoid(30) and sigmoid(40) are both the float32 1: the lower id, not the greater logit."""
    topk = route(torch.tensor([[30.0, 40.0, 0.0]]), router(3, 2, scoring="sigmoid"))
    assert topk.ids.tolist() == [[0, 1]]
    assert topk.weights.tolist() == [[0.5, 0.5]]


def test_groups_are_chosen_by_their_two_best() -> None:
    """The best single expert (id 0) is in the group with the lowest sum of two, and is left out."""
    table = torch.tensor([[4.0, -9.0, 3.0, 2.5, 2.9, 2.8, -8.0, -8.0]])
    r = router(8, 2, scoring="softmax_of_top_k", num_groups=4, top_groups=1)
    assert route(table, r).ids.tolist() == [[4, 5]]
    assert route(table, dataclasses.replace(r, top_groups=2, top_k=3)).ids.tolist() == [[2, 4, 5]]
    assert route(table, dataclasses.replace(r, top_groups=4)).ids.tolist() == [[0, 2]]


def test_tied_groups_go_to_the_lower_group() -> None:
    r = router(8, 3, scoring="sigmoid", num_groups=4, top_groups=2)
    assert route(torch.zeros(1, 8), r).ids.tolist() == [[0, 1, 2]]


def test_a_masked_expert_is_never_chosen() -> None:
    """Masked experts rank below even a -inf of an allowed group."""
    table = torch.tensor([[5.0, -math.inf, 1.0, 1.0]])
    r = router(4, 2, scoring="softmax_of_top_k", num_groups=2, top_groups=1)
    assert route(table, r).ids.tolist() == [[2, 3]]
    flipped = torch.tensor([[-math.inf, -math.inf, -math.inf, -math.inf]])
    assert route(flipped, r).ids.tolist() == [[0, 1]]


def test_bias_moves_the_choice_of_groups() -> None:
    bias = torch.tensor([0.0, 0.0, 3.0, 3.0])
    r = router(
        4, 1, scoring="sigmoid", num_groups=2, top_groups=1, correction_bias=bias,
        renormalise=False,
    )  # fmt: skip
    topk = route(torch.tensor([[2.0, 2.0, -2.0, -3.0]]), r)
    assert topk.ids.tolist() == [[2]]
    assert six(topk.weights) == ["0.119203"]


def test_hash_layers_take_the_table_and_the_scores() -> None:
    table = torch.tensor([[3, 1], [0, 2], [2, 2]])
    r = router(4, 2, scoring="sqrtsoftplus", renormalise=False, table=table)
    tokens = torch.tensor([[2], [0]], dtype=torch.int32)
    logits_TE = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
    topk = route(logits_TE, r, input_ids=tokens)
    assert topk.ids.tolist() == [[2, 2], [3, 1]]
    expected = [math.sqrt(math.log1p(math.exp(v))) for v in (2.0, 2.0, 0.0, 2.0)]
    assert six(topk.weights) == [f"{v:.6f}" for v in expected]
    renormalised = route(logits_TE, dataclasses.replace(r, renormalise=True), input_ids=tokens)
    assert renormalised.weights[0].tolist() == [0.5, 0.5]


def test_only_hash_layers_read_input_ids() -> None:
    everywhere = route(ROW, router(4, 2), input_ids=torch.tensor([10**9]))
    assert bits(everywhere) == bits(route(ROW, router(4, 2)))


def test_nan_comes_first_and_stays_visible() -> None:
    row = torch.tensor([[1.0, math.nan, 2.0, math.inf]])
    topk = route(row, router(4, 3, scoring="sigmoid", renormalise=False))
    assert topk.ids.tolist() == [[1, 3, 2]]
    assert topk.weights.isnan().tolist() == [[True, False, False]]
    assert route(row, router(4, 3, scoring="sigmoid")).weights.isnan().all()
    softmax = route(row, router(4, 3))
    assert softmax.ids.tolist() == [[0, 1, 2]]  # every score is NaN: the lowest ids
    assert softmax.weights.isnan().all()
    negative = torch.tensor([[1.0, 2.0]]).copysign(torch.tensor(-1.0)) * math.nan
    mixed = torch.cat([torch.tensor([[9.0]]), negative], dim=1)
    assert route(mixed, router(3, 2, scoring="softmax_of_top_k")).ids.tolist() == [[1, 2]]


def test_nan_in_one_row_leaves_the_others() -> None:
    table = torch.stack([ROW[0], torch.full((4,), math.nan), ROW[0]])
    for scoring in SCORINGS:
        r = router(4, 2, scoring=scoring)
        alone = bits(route(ROW, r))
        ids, weights = bits(route(table, r))
        assert (ids[::2], weights[::2]) == (alone[0] * 2, alone[1] * 2)


# --- logits ---------------------------------------------------------------------------------------


def test_logits_are_correctly_rounded() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 40, generator=generator).bfloat16()
    weight = torch.randn(7, 40, generator=generator)
    weight[0], weight[1] = 0.0, weight[2] * 2.0**-30
    weight[3, 0], weight[3, 1:] = 1e8, 1e-8
    bias = torch.randn(7, generator=generator).bfloat16()
    r = Router(weight=weight, top_k=1)
    found, biased = logits(x, r), logits(x, dataclasses.replace(r, bias=bias))
    for t in range(5):
        for e in range(7):
            pairs = zip(x[t].tolist(), weight[e].tolist(), strict=True)
            exact = nearest(sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0)))
            assert found[t, e].item() == exact
            assert biased[t, e].item() == nearest(Fraction(exact) + Fraction(bias[e].item()))


def nearest(value: Fraction) -> float:
    """The nearest float32, ties to even, by comparing neighbours exactly."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(d)) for d in (-math.inf, math.inf)] + [near]
    return float(min(around, key=lambda v: (abs(Fraction(float(v)) - value), v.view(np.int32) & 1)))


def test_logits_of_bfloat16_route_as_their_float32_values() -> None:
    table = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for scoring in SCORINGS:
        r = router(8, 3, scoring=scoring)
        assert bits(route(table, r)) == bits(route(table.float(), r))


# --- bad input ------------------------------------------------------------------------------------

HASH = {"table": torch.tensor([[0, 1], [2, 7]])}


@pytest.mark.parametrize(
    ("message", "table", "fields", "input_ids"),
    [
        ("logits of shape", torch.zeros(2, 5), {}, None),
        ("logits of shape", torch.zeros(4), {}, None),
        ("logits of torch.int64", torch.zeros(2, 4, dtype=torch.int64), {}, None),
        ("logits of torch.float8", torch.zeros(2, 4).to(torch.float8_e4m3fn), {}, None),
        ("input_ids None", torch.zeros(2, 4), HASH, None),
        ("input_ids of torch.float32", torch.zeros(2, 4), HASH, torch.zeros(2)),
        ("input_ids of torch.int64 and shape", torch.zeros(2, 4), HASH, torch.tensor([0])),
        ("input_ids row 1 2 is outside the vocabulary [0, 2)", torch.zeros(2, 4), HASH,
         torch.tensor([0, 2])),
        ("input_ids row 0 -1 is outside", torch.zeros(2, 4), HASH, torch.tensor([-1, 0])),
        ("router.table row 1 [2, 7] names an expert outside [0, 4)", torch.zeros(2, 4), HASH,
         torch.tensor([0, 1])),
        ("logits", torch.zeros(2, 4, device="meta"),
         {"correction_bias": torch.zeros(4)}, None),
    ],
)  # fmt: skip
def test_bad_input_in_one_line(
    message: str, table: Tensor, fields: dict[str, object], input_ids: Tensor | None
) -> None:
    r = router(4, int(str(fields.get("top_k", 2))), **{
        name: value for name, value in fields.items() if name != "top_k"})  # fmt: skip
    with pytest.raises(BadInput) as caught:
        route(table, r, input_ids=input_ids)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.zeros(3), torch.zeros(2, 3).long()])
def test_bad_x(x: Tensor) -> None:
    with pytest.raises(BadInput, match=r"^x of"):
        logits(x, Router(weight=torch.zeros(2, 3), top_k=1))


def test_too_many_experts() -> None:
    with pytest.raises(BadInput, match="exceeds"):
        router(MAX_EXPERTS + 1, 1)
    everything = route(torch.zeros(1, MAX_EXPERTS), router(MAX_EXPERTS, 1))
    assert everything.weights.item() == 1.0


# --- golden bits ----------------------------------------------------------------------------------

GOLDEN = {
    "softmax": ("41745829a05deb97", "b1995b9c8473d106"),
    "sigmoid": ("2b2600cc1c0300df", "ecc792cf6cf3e4b7"),
    "sqrtsoftplus": ("551ccc478b3ec3fe", "1298e687ed98f919"),
    "softmax_of_top_k": ("853ab68414acf0f9", "c8fcd4de7244a3b4"),
}


def golden_case(scoring: str, device: str) -> tuple[Tensor, Router]:
    """Integers through a fixed congruence: the same inputs on any version of any library."""
    table = torch.arange(64 * 96, dtype=torch.int64).reshape(64, 96)
    table = ((table * 2654435761 + 12345) % 4093 - 2046).to(torch.float32) / 256
    bias = ((torch.arange(96) * 37) % 29 - 14).to(torch.float32) / 64
    r = router(
        96, 8, scoring=scoring, num_groups=8, top_groups=4, epsilon=1e-20,
        correction_bias=bias.to(device),
    )  # fmt: skip
    return table.to(device), r


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_golden_digests(scoring: str, device: str) -> None:
    table, r = golden_case(scoring, device)
    topk = route(table, r)
    assert (digest(topk.ids), digest(topk.weights)) == GOLDEN[scoring]


@pytest.mark.gpu
def test_nothing_is_read_back_from_the_device() -> None:
    table, r = golden_case("softmax", "cuda")
    route(table, r)
    torch.cuda.set_sync_debug_mode("error")
    try:
        route(table, r)
        Router(weight=torch.zeros(96, 4, device="cuda"), top_k=1).logits(
            torch.zeros(2, 4, device="cuda")
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
