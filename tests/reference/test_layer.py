"""The layer's contract on inputs whose answer is known: the field's failures, edges and EXACT."""

from __future__ import annotations

import dataclasses
import decimal
import math
from fractions import Fraction

import pytest
import torch
from strategies import Case
from torch import Tensor

from megamoe.errors import BadInput
from megamoe.formats import (
    F64,
    FP8_1X128,
    FP8_BLOCK32,
    FP8_ROW,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    PLAIN_F32,
    Format,
    Quantised,
    dequantise,
    encode,
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
    MoEWeights,
    Placement,
    Recipe,
    SharedExpert,
    TopK,
)
from megamoe.reference import moe
from megamoe.reference.moe import EXACT, Emulated, Exact

RECIPES = (BF16_COMBINE, BF16_FC2_INPUT, BF16_INPUT, HF_EAGER, HF_GROUPED)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
SIZE = 8


def probe(
    gates: list[float],
    ups: list[float],
    *,
    shared: tuple[float, float] | None = None,
    **layer: object,
) -> MoEWeights:
    """Expert e answers on output channel e alone, with act(gate e, up e): the channel names it."""
    return MoEWeights(
        experts=_probe(gates, ups),
        placement=Placement.contiguous(len(gates), 1),
        shared=None
        if shared is None
        else SharedExpert(weights=_probe([shared[0]], [shared[1]], channel=SIZE - 1)),
        **layer,  # type: ignore[arg-type]
    )


def _probe(gates: list[float], ups: list[float], channel: int = 0) -> ExpertWeights:
    count = len(gates)
    w13 = torch.zeros(count, 2 * SIZE, SIZE)
    w13[:, 0, 0] = torch.tensor(gates)
    w13[:, SIZE, 0] = torch.tensor(ups)
    w2 = torch.zeros(count, SIZE, SIZE)
    for e in range(count):
        w2[e, channel + e, 0] = 1.0
    return ExpertWeights(w13=plain(w13.to(torch.bfloat16)), w2=plain(w2.to(torch.bfloat16)))


def token(count: int = 1) -> Tensor:
    x = torch.zeros(count, SIZE, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    return x


def topk(ids: list[list[int]], weights: list[list[float]], scaled: bool | None = False) -> TopK:
    return TopK(ids=torch.tensor(ids), weights=torch.tensor(weights), scaled=scaled)


def bf16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).item()


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def run(
    layer: MoEWeights, routing: TopK, recipe: Recipe = BF16_COMBINE, x: Tensor | None = None
) -> Tensor:
    return moe.layer(token(routing.tokens) if x is None else x, routing, layer, Emulated(recipe))


# --- the field's failures -------------------------------------------------------------------------


@each_recipe
def test_gate_and_up_are_not_swapped(recipe: Recipe) -> None:
    """K8: -5.715444, or -0.715218 where the halves change places."""
    y = run(probe([3.0], [-2.0]), topk([[0]], [[1.0]]), recipe)
    stepwise = recipe.gate_out is not None
    assert y[0, 0].item() == bf16(-2 * (bf16(silu(3.0)) if stepwise else silu(3.0)))
    assert y[0, 0].item() == pytest.approx(-5.715444, rel=2.0**-7)
    assert y[0, 1:].count_nonzero() == 0


@pytest.mark.parametrize("fmt", [FP8_TENSOR, NVFP4], ids=str)
def test_gate_and_up_have_a_scale_each(fmt: Format) -> None:
    """K60: 1.462117; 0.731059 under gate's for both, 3.523188 under the larger."""
    layer = probe([1.0], [1.0])
    assert fmt.scale is not None
    scales = torch.tensor([[1.0, 2.0]])
    values = layer.experts.w13.data.to(torch.float64)
    w13 = Quantised(
        format=fmt,
        data=encode(values, fmt.element),
        scale=(scales[..., None] if fmt is FP8_TENSOR else torch.ones(1, 2 * SIZE, 1)).to(
            fmt.scale.dtype
        ),
        global_scale=scales if fmt is NVFP4 else None,
        row_groups=2,
    )
    experts = dataclasses.replace(layer.experts, w13=w13)
    y = run(dataclasses.replace(layer, experts=experts), topk([[0]], [[1.0]]))
    assert y[0, 0] == bf16(1.462117)


@each_recipe
def test_each_slot_reaches_its_own_expert(recipe: Recipe) -> None:
    layer = probe([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    y = run(layer, topk([[2, 0], [3, 1]], [[1.0, 1.0], [1.0, 1.0]]), recipe)
    expected = torch.tensor(
        [[silu(1), 0, silu(3), 0], [0, silu(2), 0, silu(4)]], dtype=torch.float32
    )
    assert torch.equal(y[:, :4], expected.to(torch.bfloat16))


def test_the_place_of_the_weight_is_a_rounding_or_a_function() -> None:
    """K23: 3.523188 after FC1 at any place, 1.462117 before it (another function)."""
    layer, routing = probe([2.0], [4.0]), topk([[0]], [[0.5]])
    for recipe in (BF16_COMBINE, BF16_FC2_INPUT, HF_EAGER, HF_GROUPED):
        assert run(layer, routing, recipe)[0, 0].item() == bf16(4 * silu(2.0) / 2)
    assert run(layer, routing, BF16_INPUT)[0, 0].item() == bf16(2 * silu(1.0))


def test_gpt_oss_form() -> None:
    """K11: alpha and the offset, with a clamp; 1.691592."""
    gpt_oss = Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0)
    assert run(probe([1.0], [1.0], activation=gpt_oss), topk([[0]], [[1.0]]))[0, 0] == bf16(
        1.691592
    )


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r is not BF16_INPUT], ids=str)
@pytest.mark.parametrize(("scaled", "expected"), [(False, 2.5), (True, 1.0)])
def test_the_factor_is_applied_once(recipe: Recipe, scaled: bool, expected: float) -> None:
    """K15, K16: once, unless the weights hold it already."""
    layer = probe([1.0], [1.0], routed_scaling_factor=2.5)
    y = run(layer, topk([[0]], [[1.0]], scaled=scaled), recipe)
    plain_y = run(probe([1.0], [1.0]), topk([[0]], [[expected]]), recipe)
    assert torch.equal(y, plain_y)
    assert y[0, 0].item() == pytest.approx(expected * silu(1.0), rel=2.0**-7)


def test_the_factor_at_the_output_scales_the_float32_sum() -> None:
    layer = probe([1.0, 2.0], [1.0, 1.0], routed_scaling_factor=3.0, scale_at="output")
    for scaled in (None, False, True):
        y = run(layer, topk([[0, 1]], [[1.0, 1.0]], scaled=scaled))
        expected = [bf16(3 * bf16(silu(1.0))), bf16(3 * bf16(silu(2.0)))]
        assert y[0, :2].tolist() == expected


@each_recipe
def test_the_same_expert_twice_counts_twice(recipe: Recipe) -> None:
    """K24."""
    layer = probe([1.0], [1.0])
    y = run(layer, topk([[0, 0]], [[0.25, 0.5]]), recipe)
    parts = [run(layer, topk([[0]], [[w]]), recipe)[0, 0].float() for w in (0.25, 0.5)]
    assert y[0, 0].float() == pytest.approx(float(sum(parts)), rel=2.0**-7)
    doubled = run(layer, topk([[0, 0]], [[1.0, 1.0]]), recipe)
    assert torch.equal(doubled, 2 * run(layer, topk([[0]], [[1.0]]), recipe))


@each_recipe
@pytest.mark.parametrize("weight", [123.0, math.nan, math.inf, -0.0])
def test_an_empty_slot_contributes_nothing_whatever_its_weight(
    recipe: Recipe, weight: float
) -> None:
    """K30: nothing, and -1 is no index of the last expert."""
    layer = probe([1.0, 2.0, 3.0], [1.0] * 3, shared=(1.0, 2.0))
    y = run(
        layer, topk([[-1, 1, -1], [0, -1, 2]], [[weight, 0.5, weight], [1.0, weight, 0.25]]), recipe
    )
    compact = run(layer, topk([[1, -1], [0, 2]], [[0.5, 0.0], [1.0, 0.25]]), recipe)
    assert torch.equal(y, compact)
    assert bool(y.isfinite().all())


@each_recipe
def test_a_row_of_empty_slots_is_the_shared_expert_exactly(recipe: Recipe) -> None:
    """K25: once, whatever else is scaled; +0 where there is none."""
    routing = topk([[-1, -1]], [[math.nan, 1.0]])
    shared = probe([1.0], [1.0], shared=(1.0, 3.0), routed_scaling_factor=2.5)
    y = run(shared, routing, recipe)
    assert y[0, SIZE - 1].item() == bf16(3 * silu(1.0))
    assert y[0, : SIZE - 1].count_nonzero() == 0
    nothing = run(probe([1.0], [1.0]), routing, recipe)
    assert nothing.view(torch.int16).count_nonzero() == 0  # +0, bit for bit


def test_routed_and_shared_limits_are_independent() -> None:
    """K5."""
    layer = probe([9.0], [1.0], shared=(9.0, 1.0), activation=Activation(limit=4.0))
    assert layer.shared is not None
    own = dataclasses.replace(layer.shared, activation=Activation(limit=7.0))
    y = run(dataclasses.replace(layer, shared=own), topk([[0]], [[1.0]]))
    assert y[0, 0].item() == bf16(silu(4.0))
    assert y[0, SIZE - 1].item() == bf16(silu(7.0))


def test_the_sum_before_the_shared_expert_is_bf16() -> None:
    """y = RNbf16(RN32(RNbf16(routed) + shared)): otherwise the routed sum's low bits would stay."""
    layer = probe([1.0], [1.0], shared=(1.0, 1.0))
    assert layer.shared is not None
    negative = _probe([1.0], [-1.0], channel=0)
    shared = dataclasses.replace(layer.shared, weights=negative)
    layer = dataclasses.replace(layer, shared=shared)
    # The routed sum is 3/4 of the term, which BF16 cannot hold; the shared one is the term negated.
    y = run(layer, topk([[0, 0]], [[0.5, 0.25]]))
    assert 0.75 * bf16(silu(1.0)) != bf16(0.75 * bf16(silu(1.0)))
    assert y[0, 0].item() == bf16(0.75 * bf16(silu(1.0))) - bf16(silu(1.0))


def test_biases() -> None:
    """b13 before the activation; b2 after FC2 and before the routing weight."""
    layer = probe([1.0, 1.0], [1.0, 1.0])
    b13, b2 = torch.zeros(2, 2 * SIZE), torch.zeros(2, SIZE)
    b13[1, 0], b2[1, 0] = 2.0, 4.0
    experts = dataclasses.replace(layer.experts, b13=b13, b2=b2)
    layer = dataclasses.replace(layer, experts=experts)
    y = run(layer, topk([[0], [1]], [[0.5], [0.5]]))
    assert y[0, :2].tolist() == [0.5 * bf16(silu(1.0)), 0.0]
    assert y[1, :2].tolist() == [2.0, 0.5 * bf16(silu(3.0))]


# --- edges ----------------------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_no_tokens(recipe: Recipe, top_k: int) -> None:
    case = Case(tokens=0, top_k=top_k, shared=8)
    y = moe.layer(case.x(), case.topk(), case.layer(), Emulated(recipe))
    assert y.shape == (0, 40)
    assert y.dtype == torch.bfloat16


def test_no_slots() -> None:
    case = Case(tokens=2, top_k=0, shared=8)
    y = moe.layer(case.x(), case.topk(), case.layer(), Emulated(BF16_COMBINE))
    empty = TopK(ids=torch.full((2, 1), -1), weights=torch.ones(2, 1), scaled=False)
    assert torch.equal(y, moe.layer(case.x(), empty, case.layer(), Emulated(BF16_COMBINE)))


def test_inputs_are_not_written() -> None:
    case = Case(shared=8, bias=True, activation=Activation(limit=0.1), gain=32.0)
    x, routing, layer = case.x(), case.topk(), case.layer()
    tensors = [x, routing.ids, routing.weights, *layer.experts.tensors]
    before = [t.clone() for t in tensors]
    for recipe in RECIPES:
        if recipe is not BF16_FC2_INPUT:
            moe.layer(x, routing, layer, Emulated(recipe))
    moe.layer(x, routing, layer, EXACT)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@each_recipe
@pytest.mark.parametrize("spoiler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("act", [None, FP8_ROW, MXFP8, FP8_1X128], ids=str)
def test_a_spoiled_row_changes_no_other(recipe: Recipe, spoiler: float, act) -> None:
    if act is not None:
        recipe = dataclasses.replace(recipe, act=act, mid=act)
    case = Case(tokens=5, shared=8, empty=0, top_k=3)
    x, routing, layer = case.x(), case.topk(), case.layer()
    clean = moe.layer(x, routing, layer, Emulated(recipe))
    x[2, 7] = spoiler
    spoiled = moe.layer(x, routing, layer, Emulated(recipe))
    others = [0, 1, 3, 4]
    assert torch.equal(spoiled[others], clean[others])
    assert not bool(spoiled[2].isfinite().any())
    nan = spoiled[spoiled.isnan()]
    assert set(nan.view(torch.int16).tolist()) <= {0x7FC0}


def test_a_nan_weight_spoils_its_row_only() -> None:
    case = Case(tokens=3, empty=0)
    routing = case.topk()
    clean = moe.layer(case.x(), routing, case.layer(), Emulated(BF16_COMBINE))
    routing.weights[1, 0] = math.nan
    spoiled = moe.layer(case.x(), routing, case.layer(), Emulated(BF16_COMBINE))
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])
    assert spoiled[1].view(torch.int16).unique().tolist() == [0x7FC0]


def test_sums_that_overflow() -> None:
    """Float32 terms whose sum is beyond it are infinite; a smaller sum is not."""
    layer = probe([100.0, 100.0], [3e36, -3e36])
    y = run(layer, topk([[0, 0], [1, 1], [0, 1]], [[1.0, 1.0]] * 3))
    assert y[:2, :2].tolist() == [[math.inf, 0.0], [0.0, -math.inf]]
    assert bool(y[2].isfinite().all())
    assert y[2, :2].abs().min() > 2e38


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (4, r"^topk.ids 4 is outside \[-1, 4\); use -1 for an empty slot$"),
        (-2, r"^topk.ids -2 is outside \[-1, 4\); use -1 for an empty slot$"),
        (2**40, r"^topk.ids 1099511627776 is outside \[-1, 4\); use -1 for an empty slot$"),
    ],
)
@pytest.mark.parametrize("arithmetic", [EXACT, Emulated(BF16_COMBINE)], ids=["exact", "bf16"])
def test_ids_outside_the_layer(bad: int, sentence: str, arithmetic) -> None:
    case = Case()
    ids = case.topk().ids.clone()
    ids[1, 1] = bad
    routing = TopK(ids=ids, weights=case.topk().weights, scaled=False)
    with pytest.raises(BadInput, match=sentence):
        moe.layer(case.x(), routing, case.layer(), arithmetic)


def test_a_factor_left_unsaid() -> None:
    layer = probe([1.0], [1.0], routed_scaling_factor=2.5)
    with pytest.raises(
        BadInput,
        match=r"^topk.scaled None leaves unsaid whether routed_scaling_factor 2.5 is inside the "
        r"weights; pass TopK\(..., scaled=True\) if your router multiplied it in, else False$",
    ):
        run(layer, topk([[0]], [[1.0]], scaled=None))
    run(probe([1.0], [1.0]), topk([[0]], [[1.0]], scaled=None))  # of a factor of 1, nothing to say


def test_a_sum_by_ranks_needs_owners() -> None:
    recipe = Recipe(name="ranks", combine="ranks")
    with pytest.raises(
        BadInput, match=r"^recipe.combine ranks needs the rank that owns each slot; "
    ):
        run(probe([1.0], [1.0]), topk([[0]], [[1.0]]), recipe)


# --- EXACT ----------------------------------------------------------------------------------------


def rational(case: Case, weight_at: str) -> tuple[list[list[Fraction]], list[float]]:
    """The layer as rational numbers, the sigmoid to 60 digits; and each row's norm of terms."""

    def sigmoid(v: Fraction) -> Fraction:
        with decimal.localcontext() as context:
            context.prec = 60
            x = decimal.Decimal(v.numerator) / decimal.Decimal(v.denominator)
            return Fraction(1 / (1 + (-x).exp()))

    layer, routing = case.layer(), case.topk()
    form = case.activation
    w13 = [[list(map(Fraction, r)) for r in e] for e in dequantise(layer.experts.w13).tolist()]
    w2 = [[list(map(Fraction, r)) for r in e] for e in dequantise(layer.experts.w2).tolist()]
    rows, norms = [], []
    for t, x in enumerate(case.x().tolist()):
        total, norm = [Fraction(0)] * case.hidden_size, 0.0
        for e, weight in zip(routing.ids[t].tolist(), routing.weights[t].tolist(), strict=True):
            if e < 0:
                continue
            w = Fraction(weight)
            entered = [Fraction(v) * (w if weight_at == "input" else 1) for v in x]
            h = [sum(map(Fraction.__mul__, entered, row), Fraction(0)) for row in w13[e]]
            half = len(h) // 2
            s = []
            for gate, up in zip(h[:half], h[half:], strict=True):
                if form.limit is not None:
                    limit = Fraction(form.limit)
                    gate, up = min(gate, limit), max(-limit, min(limit, up))
                s.append(
                    (up + Fraction(form.up_offset)) * gate * sigmoid(Fraction(form.alpha) * gate)
                )
            y = [sum(map(Fraction.__mul__, s, row), Fraction(0)) for row in w2[e]]
            y = [v * (1 if weight_at == "input" else w) for v in y]
            total = [a + b for a, b in zip(total, y, strict=True)]
            norm += math.sqrt(sum(float(v) ** 2 for v in y))
        rows.append(total)
        norms.append(norm)
    return rows, norms


@pytest.mark.parametrize("weight_at", ["combine", "fc2_input", "term", "input"])
@pytest.mark.parametrize(
    "activation",
    [
        Activation(),
        Activation(limit=0.5),
        Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0),
    ],
    ids=str,
)
def test_exact_is_the_truth(weight_at, activation: Activation) -> None:
    """Within 2**-45 of the terms' norm."""
    case = Case(tokens=2, experts=2, activation=activation, gain=16.0, empty=0, seed=21)
    y = moe.layer(case.x(), case.topk(), case.layer(), Exact(weight_at=weight_at))
    assert y.dtype == F64
    rows, norms = rational(case, weight_at)
    for values, row, norm in zip(y.tolist(), rows, norms, strict=True):
        error = math.sqrt(
            sum(float(Fraction(v) - r) ** 2 for v, r in zip(values, row, strict=True))
        )
        assert norm > 0
        assert error <= norm * 2.0**-45


def test_exact_of_other_formats_and_shared_experts() -> None:
    """EXACT reads the same dequantised weights, rounds nothing, and adds the shared expert."""
    case = Case(weights=FP8_BLOCK32, shared=8, hidden_size=64)
    layer = case.layer()
    assert layer.shared is not None
    routed = moe.layer(case.x(), case.topk(), dataclasses.replace(layer, shared=None), EXACT)
    own = moe.term(case.x(), None, layer.shared.weights, layer.shared.activation, EXACT)
    assert torch.equal(moe.layer(case.x(), case.topk(), layer, EXACT), routed + own)


def test_float32_everywhere_comes_close_to_exact() -> None:
    """A recipe that rounds nothing to BF16 on the way is half a BF16 place from the truth."""
    case = Case(seed=13, tokens=4, gain=16.0)
    recipe = Recipe(name="float32", term=None, act=PLAIN_F32, mid=PLAIN_F32)
    y = moe.layer(case.x(), case.topk(), case.layer(), Emulated(recipe)).to(F64)
    exact = moe.layer(case.x(), case.topk(), case.layer(), EXACT)
    assert bool(((y - exact).abs() <= exact.abs() * 2.0**-8 * (1 + 2.0**-10) + 2.0**-40).all())


def test_scaling_under_exact() -> None:
    case = Case(routed_scaling_factor=2.5, scale_at="output")
    base = dataclasses.replace(case, routed_scaling_factor=1.0)
    y = moe.layer(case.x(), case.topk(), case.layer(), EXACT)
    assert torch.equal(y, moe.layer(base.x(), base.topk(), base.layer(), EXACT) * 2.5)


def test_replicas_are_computed_once() -> None:
    """The first of them: the others are never read."""
    case = Case(experts=3)
    single = case.layer()
    order = torch.tensor([0, 1, 2, 1, 0])
    experts = ExpertWeights(w13=single.experts.w13[order], w2=single.experts.w2[order])
    experts.w13.data[3:] = math.nan
    placement = Placement(num_experts=3, slots=(tuple(order.tolist()),))
    doubled = dataclasses.replace(single, experts=experts, placement=placement)
    for arithmetic in (EXACT, Emulated(BF16_COMBINE)):
        y = moe.layer(case.x(), case.topk(), doubled, arithmetic)
        assert torch.equal(y, moe.layer(case.x(), case.topk(), single, arithmetic))


def test_large_layers_are_read_in_pieces(monkeypatch) -> None:
    case = Case(weights=FP8_BLOCK32, hidden_size=96, intermediate_size=80, tokens=6)
    whole = moe.layer(case.x(), case.topk(), case.layer(), Emulated(BF16_COMBINE))
    for piece in (1, 96 * 33, 96 * 80):
        monkeypatch.setattr(moe, "CPU_PIECE", piece)
        again = moe.layer(case.x(), case.topk(), case.layer(), Emulated(BF16_COMBINE))
        assert torch.equal(again, whole)
