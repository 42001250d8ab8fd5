"""Two implementations of the layer that share no arithmetic give the same bits.

One is `megamoe.reference.moe`, vectorised; the other `scalar_layer`, one number at a time. Where
both are wrong in the same way the rational arithmetic of the second would have to be wrong too.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import scalar_layer
import torch
from strategies import Case, bell, unit

from megamoe.formats import (
    BF16,
    CATALOGUE,
    FP8_1X64,
    FP8_1X128,
    FP8_BLOCK32,
    FP8_CHANNEL_BF16,
    FP8_ROW,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_DIVIDE,
    PLAIN_BF16,
    PLAIN_F32,
    Format,
    dequantise,
    quantise,
)
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    GPT_OSS_ALPHA,
    HF_EAGER,
    HF_GROUPED,
    Activation,
    Recipe,
)
from megamoe.reference import moe
from megamoe.reference.moe import Emulated

PULL_FP4 = Recipe(name="pull", act=FP8_ROW, weight_at="fc2_input", mid=FP8_1X64)
MX = Recipe(name="mx", act=MXFP8, weight_at="fc2_input", mid=MXFP8)
BLOCKWISE = Recipe(name="1x128", act=FP8_1X128, mid=FP8_1X128, swiglu_out=BF16)
UNWEIGHTED_TERM = Recipe(name="float32 terms", term=None)
RECIPES = (
    BF16_COMBINE, BF16_FC2_INPUT, BF16_INPUT, HF_EAGER, HF_GROUPED, PULL_FP4, MX, BLOCKWISE,
    UNWEIGHTED_TERM,
)  # fmt: skip
GPT_OSS = Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0)
CLAMPS = {
    "none": (Activation(), 1.0),
    "10": (Activation(limit=10.0), 256.0),
    "small": (Activation(limit=0.75), 16.0),
    "symmetric": (Activation(limit=0.75, symmetric=True), 16.0),
    "gpt_oss": (GPT_OSS, 128.0),
}


def differing(case: Case, recipe: Recipe) -> int:
    """How many elements of the two layers differ."""
    x, topk, layer = case.x(), case.topk(), case.layer()
    y = moe.layer(x, topk, layer, Emulated(recipe))
    assert y.dtype == torch.bfloat16
    assert bool(y.isfinite().all())
    assert int(y.count_nonzero()) > y.numel() / 2
    again = torch.tensor(scalar_layer.layer(x, topk, layer, recipe), dtype=torch.float64)
    return int((y.to(torch.float64) != again).sum())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_recipes_and_clamps(recipe: Recipe, clamp: str) -> None:  # K73
    activation, gain = CLAMPS[clamp]
    case = Case(activation=activation, gain=gain, hidden_size=72, experts=3, seed=7, empty=7)
    assert differing(case, recipe) == 0


@pytest.mark.parametrize("clamp", [c for c in CLAMPS if c != "none"])
def test_the_clamps_above_were_met(clamp: str) -> None:
    """Gates above and below the limit, ups beyond both sides: else the test above shows little."""
    activation, gain = CLAMPS[clamp]
    assert activation.limit is not None
    case = Case(activation=activation, gain=gain, hidden_size=72, experts=3, seed=7, empty=7)
    w13 = dequantise(case.layer().experts.w13)
    gate, up = torch.einsum("th,erh->ter", case.x().double(), w13).chunk(2, dim=-1)
    for beyond in (gate > activation.limit, gate < -activation.limit, up.abs() > activation.limit):
        assert 0.05 < float(beyond.double().mean()) < 0.95


@pytest.mark.parametrize(
    "fmt",
    [PLAIN_F32, FP8_BLOCK32, FP8_CHANNEL_BF16, MXFP8, MXFP4, NVFP4, NVFP4_DIVIDE, INT4_G32],
    ids=str,
)
@pytest.mark.parametrize("recipe", [BF16_FC2_INPUT, PULL_FP4], ids=str)
def test_weight_formats(fmt: Format, recipe: Recipe) -> None:
    activation = Activation(limit=1.0)
    case = Case(weights=fmt, activation=activation, gain=16.0, hidden_size=48, experts=2, seed=11)
    assert differing(case, recipe) == 0


BIASED = Case(bias=True, activation=GPT_OSS, gain=32.0, seed=3)
SHARED = Case(
    shared=20, shared_activation=Activation(limit=0.5), activation=Activation(limit=2.0), gain=32.0,
    seed=4,
)  # fmt: skip


@pytest.mark.parametrize("recipe", [BF16_COMBINE, BF16_INPUT, HF_EAGER, HF_GROUPED], ids=str)
def test_biases(recipe: Recipe) -> None:
    assert differing(BIASED, recipe) == 0


@pytest.mark.parametrize("recipe", [BF16_COMBINE, BF16_FC2_INPUT, HF_EAGER, MX], ids=str)
def test_a_shared_expert_of_its_own_width_and_limit(recipe: Recipe) -> None:
    assert differing(SHARED, recipe) == 0


@pytest.mark.parametrize("scale_at", ["weights", "output"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("factor", [2.5, 2.826])
@pytest.mark.parametrize("recipe", [BF16_COMBINE, BF16_FC2_INPUT], ids=str)
def test_routed_scaling(scale_at, scaled: bool, factor: float, recipe: Recipe) -> None:
    case = dataclasses.replace(
        SHARED, routed_scaling_factor=factor, scale_at=scale_at, scaled=scaled, tokens=2
    )
    assert differing(case, recipe) == 0


def test_the_same_expert_twice_and_many_slots() -> None:
    case = Case(tokens=2, experts=2, top_k=5, empty=4, seed=9)
    assert any(len(set(row)) < len(row) for row in case.topk().ids.tolist())
    for recipe in (BF16_COMBINE, HF_EAGER):
        assert differing(case, recipe) == 0


@pytest.mark.parametrize("fmt", CATALOGUE, ids=str)
def test_weights_are_read_alike(fmt: Format) -> None:
    values = bell(5, 2, 14, 40) * 0.37
    q = quantise(values, fmt, row_groups=2)
    for e in range(2):
        again = [[float(v) for v in row] for row in scalar_layer.matrix(q, e)]
        assert dequantise(q)[e].tolist() == again


@pytest.mark.parametrize("fmt", [PLAIN_BF16, FP8_ROW, FP8_1X64, MXFP8, MXFP4], ids=str)
def test_activations_are_quantised_alike(fmt: Format) -> None:
    x = bell(6, 4, 150) * torch.tensor([1.0, 2.0**-140, 2.0**60, 0.3])[:, None]
    x[1, :70] = 0.0
    exact = [[Fraction(v) for v in row] for row in x.tolist()]
    again = [[float(v) for v in scalar_layer.quantised(row, fmt)] for row in exact]
    assert dequantise(quantise(x, fmt)).tolist() == again


TERM = Case(experts=1, tokens=12, bias=True, activation=GPT_OSS, gain=128.0, seed=5)


def differing_terms(recipe: Recipe) -> int:
    """One expert's float32 outputs for all tokens: no BF16 at the end hides a last bit."""
    x, layer = TERM.x(), TERM.layer()
    w = unit(8, TERM.tokens)
    y = moe.term(x, w, layer.experts, TERM.activation, Emulated(recipe))
    assert y.dtype == torch.float32
    expert = scalar_layer.Expert(layer.experts, 0)
    rows = [
        expert.term([Fraction(v) for v in row], Fraction(weight), TERM.activation, recipe)
        for row, weight in zip(x.tolist(), w.tolist(), strict=True)
    ]
    again = torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)
    return int((y.to(torch.float64) != again).sum())


FLOAT32 = [
    Recipe(name="float32", term=None, act=PLAIN_F32, mid=PLAIN_F32),
    Recipe(name="weighted", term=None, mid=PLAIN_F32, weight_at="fc2_input"),
    Recipe(name="weighted term", term=None, mid=MXFP8, weight_at="term"),
]


@pytest.mark.parametrize("recipe", FLOAT32, ids=str)
def test_float32_terms(recipe: Recipe) -> None:
    assert differing_terms(recipe) == 0


def float32_dots(products):
    for product in products:
        product.put(product.a.to(torch.float32) @ product.b.to(torch.float32).mT)


def truncated_dots(products):
    """Rounded towards zero, as a tensor core's accumulator might."""
    for product in products:
        exact = product.a @ product.b.mT
        near = exact.to(torch.float32)
        over = near.to(torch.float64).abs() > exact.abs()
        product.put(torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near))


def library_gated(gate, up, activation):
    half = torch.nn.functional.silu(gate.to(torch.float32) * activation.alpha) / activation.alpha
    return (up.double() + activation.up_offset) * half.double()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("dots", float32_dots), ("dots", truncated_dots), ("gated", library_gated)],
    ids=["float32 dots", "truncated dots", "library silu"],
)
def test_other_last_bits_are_seen(name: str, wrong, monkeypatch) -> None:
    monkeypatch.setattr(moe, name, wrong)
    assert differing_terms(FLOAT32[0]) > 0


# --- wrong layers ---------------------------------------------------------------------------------


def swapped(h, activation):
    gate, up = clamp(h, activation)
    return up, gate


def gate_clamped_below(h, activation):
    return clamp(h, dataclasses.replace(activation, symmetric=True))


def not_clamped(h, activation):
    return clamp(h, dataclasses.replace(activation, limit=None))


clamp = moe.clamp


@pytest.mark.parametrize("wrong", [swapped, gate_clamped_below, not_clamped])
def test_a_wrong_clamp_is_seen(wrong, monkeypatch) -> None:
    monkeypatch.setattr(moe, "clamp", wrong)
    assert differing(SHARED, BF16_COMBINE) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        dataclasses.replace(BF16_COMBINE, weight_at="fc2_input"),
        dataclasses.replace(BF16_COMBINE, term=None),
        dataclasses.replace(BF16_COMBINE, mid=PLAIN_F32),
        dataclasses.replace(BF16_COMBINE, swiglu_out=BF16, mid=FP8_ROW),
        dataclasses.replace(BF16_COMBINE, combine="experts", partial=BF16),
        dataclasses.replace(BF16_COMBINE, fc1_out=BF16),
        dataclasses.replace(BF16_COMBINE, gate_out=BF16),
    ],
    ids=lambda r: f"{r.weight_at}-{r.combine}",
)
def test_each_rounding_point_changes_bits(wrong: Recipe) -> None:
    """So that agreement above is agreement about where to round."""
    x, topk, layer = SHARED.x(), SHARED.topk(), SHARED.layer()
    right = moe.layer(x, topk, layer, Emulated(BF16_COMBINE))
    assert not torch.equal(moe.layer(x, topk, layer, Emulated(wrong)), right)
