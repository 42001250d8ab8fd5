"""Hugging Face's own MoE blocks and ours, on the same saved weights, each judged by its own recipe.

Blocks are run as transformers runs them: eager, and grouped_mm, its default. Their routing enters
their verdict as it is; what their routers do differently is in test_hf_routers.py.
"""

from __future__ import annotations

from dataclasses import replace

import hf_arithmetic
import hf_models as hf
import pytest
import torch
from torch import Tensor, nn

import megamoe
from megamoe.formats import dequantise
from megamoe.oracle import Inputs, judge, yardstick
from megamoe.problem import (
    HF_EAGER,
    HF_GROUPED,
    Activation,
    ExpertWeights,
    MoEWeights,
    Recipe,
    TopK,
    family_recipe,
)
from megamoe.reference import router as reference_router
from megamoe.reference.case import output
from megamoe.reference.measure import same_bits
from megamoe.reference.moe import Emulated

TOKENS = 256
CASES = [case.package for case in hf.CASES]
IMPLEMENTATIONS = ["eager", "grouped_mm"]
CLAMPED = ["deepseek_v4", "glm5_next", "gpt_oss", "minimax_m3_vl"]
FLOAT32_LOGITS = ["glm4_moe", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm5_next"]

# grouped_mm multiplies in the weights' type: where a router returns bfloat16, each product is
# rounded to it before the sum.
HF_GROUPED_BF16_WEIGHTS = replace(
    HF_GROUPED, name="Hugging Face grouped experts, bfloat16 weights", weight_at="term"
)


def recipe_of(implementation: str, w: Tensor) -> Recipe:
    if implementation == "eager":
        return HF_EAGER
    return HF_GROUPED_BF16_WEIGHTS if w.dtype == torch.bfloat16 else HF_GROUPED


def routed(
    package: str, limit: float | None = None
) -> tuple[nn.Module, MoEWeights, Tensor, Tensor, Tensor]:
    """The block, its checkpoint as we load it, tokens, and the block's own ids and weights."""
    block, weights = hf.pair(package, limit=limit)
    x = hf.tokens(TOKENS)
    _, w, ids = hf.hf_route(block, x)
    return block, weights, x, ids, w


def inputs_of(x: Tensor, ids: Tensor, w: Tensor, weights: MoEWeights) -> Inputs:
    # transformers' routers fold the factor in; M3's block multiplies its output instead.
    return Inputs(x, TopK(ids=ids, weights=w, scaled=weights.scale_at == "weights"), weights)


def experts_only(weights: MoEWeights) -> MoEWeights:
    return replace(weights, shared=None, routed_scaling_factor=1.0, weight_at="combine")


@pytest.mark.parametrize("package", CLAMPED)
def test_inputs_saturate_the_clamp(package: str) -> None:
    """At least a tenth of gates above L, below -L, and of ups beyond both sides; shared too."""
    _, weights, x, ids, _ = routed(package)
    limit = weights.activation.limit
    assert limit is not None
    h = torch.einsum("th,erh->ter", x.double(), dequantise(weights.experts.w13))
    if weights.experts.b13 is not None:
        h = h + weights.experts.b13.double()
    parts = [h[torch.arange(TOKENS)[:, None], ids]]
    if weights.shared is not None:
        assert weights.shared.activation.limit == limit
        parts.append(x.double() @ dequantise(weights.shared.weights.w13)[0].T)
    for part in parts:
        for half in part.chunk(2, dim=-1):
            assert float((half > limit).double().mean()) >= 0.1
            assert float((half < -limit).double().mean()) >= 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("package", CASES)
def test_hugging_face_experts(
    package: str, implementation: str, record_property: pytest.RecordProperty
) -> None:
    """The experts alone: right, and as many bits of the recipe's as honest kernels have.

    gpt_oss rounds at five more points than its recipe says (see below): right, but another recipe.
    """
    block, weights, x, ids, w = routed(package)
    with hf.implementation(block, implementation), torch.no_grad():
        y = block.experts(x, ids, w)
    recipe = recipe_of(implementation, w)
    report = judge(y, inputs_of(x, ids, w, experts_only(weights)), recipe)
    record_property("share of bits", report.share)
    report.raise_if_wrong(recipe=package != "gpt_oss")
    assert report.recipe == (package != "gpt_oss")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("package", CASES)
def test_hugging_face_blocks(
    package: str, implementation: str, record_property: pytest.RecordProperty
) -> None:
    """The whole block: right; and step by step, with its extra roundings, bit for bit but for sums.

    The share is held to the recipe's floor: a step that were missing or in another place shows.
    """
    block, weights, x, ids, w = routed(package)
    with hf.implementation(block, implementation):
        y = hf.hf_block(block, x)
    report = judge(y, inputs_of(x, ids, w, weights), recipe_of(implementation, w))
    report.raise_if_wrong(recipe=False)
    steps = hf_arithmetic.block(x, ids, w, weights, eager=implementation == "eager")
    share = float(same_bits(y, steps).double().mean())
    record_property("share of bits", share)
    assert share >= report.share_floor
    # Where the recipe leaves a rounding out, stepping through it comes nearer to their bits.
    extra = weights.shared is not None or not weights.activation.is_swiglu
    assert (share > report.share) == extra


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("package", CASES)
def test_the_recipes_are_what_transformers_writes(package: str, implementation: str) -> None:
    """Emulated(recipe) against the step-by-step arithmetic: equal where no rounding is extra."""
    _, weights, x, ids, w = routed(package)
    bare = experts_only(weights)
    bare = replace(bare, scale_at="weights")
    steps = hf_arithmetic.block(x, ids, w, bare, eager=implementation == "eager")
    emulated = output(inputs_of(x, ids, w, bare), Emulated(recipe_of(implementation, w)))
    assert torch.equal(steps, emulated) == weights.activation.is_swiglu


@pytest.mark.parametrize("package", CASES)
def test_forward_on_the_saved_checkpoint(package: str) -> None:
    """Our router and layer on what save_pretrained wrote: right, and the recipe's bits."""
    _, weights = hf.pair(package)
    assert weights.router is not None
    x = hf.tokens(TOKENS)
    topk = megamoe.route(weights.router.logits(x), weights.router)
    y = megamoe.forward(x, topk, weights)
    inputs, recipe = Inputs(x, topk, weights), family_recipe(weights.weight_at)
    judge(y, inputs, recipe).raise_if_wrong()
    assert torch.equal(y, output(inputs, Emulated(recipe)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("package", FLOAT32_LOGITS)
def test_the_whole_block_under_our_routing(package: str, implementation: str) -> None:
    """Where their router is float32, their block is right about *our* ids and weights too."""
    block, weights, x, _, w = routed(package)
    assert weights.router is not None
    with hf.implementation(block, implementation):
        y = hf.hf_block(block, x)
    topk = megamoe.route(reference_router.logits(x, weights.router), weights.router)
    report = judge(y, Inputs(x, topk, weights), recipe_of(implementation, w))
    report.raise_if_wrong(recipe=False)


def swapped(experts: ExpertWeights) -> ExpertWeights:
    data = torch.cat(experts.w13.data.chunk(2, dim=1)[::-1], dim=1)
    bias = None if experts.b13 is None else torch.cat(experts.b13.chunk(2, dim=1)[::-1], dim=1)
    return replace(experts, w13=replace(experts.w13, data=data), b13=bias)


def exceeds(y: Tensor, inputs: Inputs, recipe: Recipe) -> bool:
    """Some token's error is over its budget: judge's first check, without looking for the fault."""
    measure = yardstick(inputs, recipe)
    return bool((measure.ruler.measure(y).error > measure.budget).any())


def unclamped(activation: Activation) -> Activation:
    return replace(activation, limit=None)


@pytest.mark.parametrize("package", ["qwen3_moe", "deepseek_v3", *CLAMPED])
def test_wrong_layers_are_not_what_hugging_face_computes(package: str) -> None:
    """The verdict is about this layer: without its clamp, or with gate and up swapped, it is no."""
    block, weights, x, ids, w = routed(package)
    y = hf.hf_block(block, x)
    wrong = {"swapped": replace(weights, experts=swapped(weights.experts))}
    if package in CLAMPED:
        wrong["unclamped"] = replace(weights, activation=unclamped(weights.activation))
    if weights.shared is not None:
        wrong["no shared"] = replace(weights, shared=None)
    for name, layer in wrong.items():
        assert exceeds(y, inputs_of(x, ids, w, layer), recipe_of("grouped_mm", w)), name


@pytest.mark.parametrize("package", CLAMPED)
def test_the_gate_is_clamped_from_above_only(package: str) -> None:
    """At a limit of 1, where bfloat16 sees it: silu(-7) is -0.006, and silu(-1) would be -0.27."""
    block, weights, x, ids, w = routed(package, limit=1.0)
    assert weights.activation.limit == 1.0
    y = hf.hf_block(block, x)
    recipe = recipe_of("grouped_mm", w)
    judge(y, inputs_of(x, ids, w, weights), recipe).raise_if_wrong(recipe=False)
    symmetric = replace(weights, activation=replace(weights.activation, symmetric=True))
    assert exceeds(y, inputs_of(x, ids, w, symmetric), recipe)


def test_a_hash_routed_block() -> None:
    """DeepSeek-V4's first layers: the token ids choose, theirs and ours, from one table."""
    block, weights = hf.pair("deepseek_v4", layer=0)
    router, x = weights.router, hf.tokens(TOKENS)
    assert router is not None
    assert router.table is not None
    tokens = torch.arange(TOKENS)[None] % hf.VOCABULARY
    _, w, ids = hf.hf_route(block, x, tokens)
    theirs = hf.hf_block(block, x, tokens)
    judge(theirs, inputs_of(x, ids, w, weights), recipe_of("grouped_mm", w)).raise_if_wrong(
        recipe=False
    )
    topk = megamoe.route(router.logits(x), router, input_ids=tokens)
    assert torch.equal(topk.ids, ids)
    y = megamoe.forward(x, topk, weights)
    judge(y, Inputs(x, topk, weights), family_recipe(weights.weight_at)).raise_if_wrong()
