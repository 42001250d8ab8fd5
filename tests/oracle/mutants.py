"""Wrong layers: each differs from the right one in one thing, as real kernels and adapters have.

A mutant is built by running the reference on other inputs or weights, or with a function replaced,
never from the oracle's own hypotheses. `K` numbers refer to a list of public bug reports.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.formats import (
    BF16,
    FP8_1X64,
    FP8_1X128,
    FP8_BLOCK32_E8M0,
    FP8_BLOCK128,
    Quantised,
)
from megamoe.oracle import CLASSES, Inputs, Report, Yardstick, yardstick
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    GPT_OSS_ALPHA,
    Activation,
    MoEWeights,
    Placement,
    Recipe,
    Request,
)
from megamoe.reference import moe
from megamoe.reference.case import output
from megamoe.reference.elementwise import sigmoid
from megamoe.reference.moe import Emulated

FP8_PULL = Recipe(name="fp8 pull", act=FP8_1X128, mid=FP8_1X64, weight_at="fc2_input")


@dataclass(frozen=True, slots=True)
class Rig:
    """One layer with its inputs and recipe."""

    request: Request
    recipe: Recipe = BF16_COMBINE
    kind: str = "normal"
    seed: int = 1
    nan_row: int | None = None


def _request(**changes: Any) -> Request:
    base: dict[str, Any] = dict(
        hidden_size=128,
        intermediate_size=64,
        placement=Placement.contiguous(8, 1),
        top_k=3,
        max_tokens_per_rank=48,
        routed_scaling_factor=2.5,
    )
    return Request(**(base | changes))


WIDE = {"hidden_size": 256, "intermediate_size": 128}  # two tiles, or blocks, of 128
FP8 = WIDE | {"weights": FP8_BLOCK128, "weight_at": "fc2_input"}

RIGS = {
    "plain": Rig(_request(shared=True, **WIDE)),
    "fc2_input": Rig(_request(shared=True, weight_at="fc2_input"), BF16_FC2_INPUT),
    "large limit": Rig(_request(activation=Activation(limit=10.0)), kind="saturating"),
    "small limit": Rig(_request(activation=Activation(limit=1.0)), kind="saturating"),
    "gpt-oss": Rig(
        _request(
            activation=Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0), expert_bias=True
        ),
        kind="saturating",
    ),
    "fp8": Rig(_request(activation=Activation(limit=10.0), **FP8), FP8_PULL),
    "poisoned": Rig(_request(), kind="poisoned"),
    "cancelling": Rig(_request(), kind="near-cancelling"),
    "denormal": Rig(_request(), kind="denormal"),
    "NaN row": Rig(_request(activation=Activation(limit=7.0)), nan_row=8),
    "many": Rig(_request(max_tokens_per_rank=512)),
    "many, fp8": Rig(_request(max_tokens_per_rank=256, **FP8), FP8_PULL),
    "many experts": Rig(
        _request(
            placement=Placement.contiguous(48, 1),
            weights=FP8_BLOCK32_E8M0,
            top_k=2,
            weight_at="fc2_input",
            max_tokens_per_rank=128,
        ),
        FP8_PULL,
    ),
    "two ranks": Rig(_request(placement=Placement.contiguous(8, 2), shared=True)),
}


@functools.cache
def bench(rig: str) -> Yardstick:
    """The yardstick of a rig; its `inputs`, `recipe` and `emulated` are what mutants start from."""
    r = RIGS[rig]
    inputs = CLASSES[r.kind](r.request, r.recipe, r.seed, "cpu")
    if r.nan_row is not None:
        inputs.x[r.nan_row] = math.nan
    return yardstick(inputs, r.recipe)


@functools.cache
def verdict(mutant: Mutant) -> Report:
    yard = bench(mutant.rig)
    return yard.judge(mutant.make(yard))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong layer. says: what the message must contain. wrong: "right" or "recipe", the verdict
    that must go against it."""

    name: str
    rig: str
    make: Callable[[Yardstick], Tensor]
    says: tuple[str, ...] = ()
    wrong: str = "right"


# --- how to be wrong ----------------------------------------------------------------------------


def run(bench: Yardstick, inputs: Inputs | None = None, recipe: Recipe | None = None) -> Tensor:
    """What a perfect kernel gives on other inputs or by another recipe."""
    return output(inputs or bench.inputs, Emulated(recipe or bench.recipe))


def layered(inputs: Inputs, change: Callable[[MoEWeights], MoEWeights]) -> Inputs:
    return replace(inputs, weights=tuple(change(rank) for rank in inputs.ranks))


def routed(inputs: Inputs, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Inputs:
    """With other ids and weights: change(ids, weights)."""
    ids, weights = change(inputs.topk.ids.clone(), inputs.topk.weights.clone())
    return replace(inputs, topk=replace(inputs.topk, ids=ids, weights=weights))


def rows(right: Tensor, wrong: Tensor, *tokens: int) -> Tensor:
    """``right`` with some rows of ``wrong``."""
    y = right.clone()
    y[list(tokens)] = wrong[list(tokens)]
    return y


@contextmanager
def patched(**functions: Any) -> Iterator[None]:
    """The layer with some of its functions replaced."""
    kept = {name: getattr(moe, name) for name in functions}
    for name, function in functions.items():
        setattr(moe, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(moe, name, function)


def with_activation(**changes: Any) -> Callable[[Yardstick], Tensor]:
    def make(bench: Yardstick) -> Tensor:
        def change(rank: MoEWeights) -> MoEWeights:
            return replace(rank, activation=replace(rank.activation, **changes))

        return run(bench, layered(bench.inputs, change))

    return make


def with_patch(**functions: Any) -> Callable[[Yardstick], Tensor]:
    def make(bench: Yardstick) -> Tensor:
        with patched(**functions):
            return run(bench)

    return make


def with_routes(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    return lambda bench: run(bench, routed(bench.inputs, change))


def with_layer(change: Callable[[MoEWeights], MoEWeights]) -> Callable[[Yardstick], Tensor]:
    return lambda bench: run(bench, layered(bench.inputs, change))


def with_recipe(**changes: Any) -> Callable[[Yardstick], Tensor]:
    return lambda bench: run(bench, recipe=replace(bench.recipe, **changes))


def swap_rows(q: Quantised) -> Quantised:
    """Gate rows where up rows should be."""

    def halves(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)

    data = halves(q.data)
    assert data is not None
    return replace(q, data=data, scale=halves(q.scale))


def swapped(rank: MoEWeights) -> MoEWeights:
    return replace(rank, experts=replace(rank.experts, w13=swap_rows(rank.experts.w13)))


def one_sided(h: Tensor, a: Activation) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, dim=-1)
    return gate.clamp(max=a.limit), up.clamp(max=a.limit)


def gate_first(h: Tensor, a: Activation) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, dim=-1)
    assert a.limit is not None
    return gate, up.clamp(-a.limit, a.limit)


def late(gate: Tensor, up: Tensor, a: Activation) -> Tensor:
    gate = gate.double()
    return (gate * sigmoid(gate * a.alpha)).clamp(max=a.limit) * (up.double() + a.up_offset)


def clamped_late(bench: Yardstick) -> Tensor:
    with patched(clamp=gate_first, gated=late):
        return run(bench)


def every_hundredth(bench: Yardstick) -> Tensor:
    def drop(ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ids[50::100, 1] = -1
        return ids, w

    return run(bench, routed(bench.inputs, drop))


def another_expert(bench: Yardstick) -> Tensor:
    def change(ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ids[7, 1] = (ids[7, 1] + 3) % bench.inputs.layer.num_experts
        return ids, w

    return run(bench, routed(bench.inputs, change))


def drop_in_a_token(bench: Yardstick) -> Tensor:
    """One slot of one token in fifty: the second slot that is not empty."""

    def drop(ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ids[7, 1] = -1
        return ids, w

    return run(bench, routed(bench.inputs, drop))


def wrong_expert(bench: Yardstick) -> Tensor:
    def change(ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ids[7, 1] = (ids[7, 1] + 1) % bench.inputs.layer.num_experts
        return ids, w

    return run(bench, routed(bench.inputs, change))


def wrapped(bench: Yardstick) -> Tensor:
    """K30: -1 indexes from the end."""
    last = bench.inputs.layer.num_experts - 1
    return run(bench, routed(bench.inputs, lambda ids, w: (torch.where(ids < 0, last, ids), w)))


def scaled(factor: float) -> Callable[[MoEWeights], MoEWeights]:
    return lambda rank: replace(rank, routed_scaling_factor=factor)


def rescaled_block(which: str, factor: float) -> Callable[[MoEWeights], MoEWeights]:
    """One block scale of expert 2 is off."""

    def change(rank: MoEWeights) -> MoEWeights:
        q = getattr(rank.experts, which)
        scale = q.scale.clone()
        if scale.dtype == torch.uint8:  # a bare exponent
            scale[2, 1, 0] += round(math.log2(factor))
        else:
            scale[2, 1, 0] *= factor
        return replace(rank, experts=replace(rank.experts, **{which: replace(q, scale=scale)}))

    return change


def cut_scales(rank: MoEWeights) -> MoEWeights:
    """K57: float32 scales read as powers of two."""

    def cut(q: Quantised) -> Quantised:
        assert q.scale is not None
        return replace(q, scale=torch.exp2(q.scale.log2().floor()))

    experts = rank.experts
    return replace(rank, experts=replace(experts, w13=cut(experts.w13), w2=cut(experts.w2)))


def weight_before(bench: Yardstick) -> Tensor:
    """K23: the routing weight scales the token before FC1 and is not applied after."""

    def change(rank: MoEWeights) -> MoEWeights:
        return replace(rank, weight_at="input")

    return run(bench, layered(bench.inputs, change), replace(bench.recipe, weight_at="input"))


def shared_times(count: int) -> Callable[[Yardstick], Tensor]:
    """K25: a replicated shared expert, summed over ranks."""

    def make(bench: Yardstick) -> Tensor:
        def many(*arguments: Any) -> Tensor:
            return right(*arguments) * count

        right = moe.shared_term
        with patched(shared_term=many):
            return run(bench)

    return make


def leaked(bench: Yardstick) -> Tensor:
    """NaN of one row reaches its neighbour through a tile."""
    y = bench.emulated.clone()
    y[9, 5] = math.nan
    return y


def hidden_nan(bench: Yardstick) -> Tensor:
    """fmin and fmax turn a NaN into the limit."""

    def clamp(h: Tensor, a: Activation) -> tuple[Tensor, Tensor]:
        assert a.limit is not None
        gate, up = h.nan_to_num(a.limit).chunk(2, dim=-1)
        return gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)

    with patched(clamp=clamp):
        return run(bench)


def flushed(bench: Yardstick) -> Tensor:
    y = bench.emulated
    return torch.where(y.abs() < torch.finfo(torch.bfloat16).smallest_normal, 0.0, y)


def enlarged(bench: Yardstick) -> Tensor:
    """All tokens 0.3 % too large: less than any one of them shows."""
    return (bench.emulated.float() * 1.003).to(torch.bfloat16)


def stale(bench: Yardstick) -> Tensor:
    y = bench.emulated.clone()
    y[11] = y[4]
    return y


def dead(bench: Yardstick) -> Tensor:
    y = bench.emulated.clone()
    y[5] = 0
    return y


def dead_tile(bench: Yardstick) -> Tensor:
    y = bench.emulated.clone()
    y[5, 128:] = 0
    return y


def reversed_slots(bench: Yardstick) -> Tensor:
    return run(bench, routed(bench.inputs, lambda ids, w: (ids.flip(1), w.flip(1))))


def mid_twice(bench: Yardstick) -> Tensor:
    """SwiGLU's gated half rounded before it meets up, and their product again."""
    return run(bench, recipe=replace(bench.recipe, gate_out=BF16, swiglu_out=BF16))


MUTANTS = (
    Mutant("slot dropped", "plain", drop_in_a_token, ("token 7", "slot 1", "dropped")),
    Mutant("slot dropped, weight in FC2's input", "fc2_input", drop_in_a_token,
           ("token 7", "slot 1", "dropped")),
    Mutant("slot dropped, two ranks", "two ranks", drop_in_a_token,
           ("token 7", "slot 1", "dropped")),
    Mutant("slot dropped, fp8", "fp8", drop_in_a_token, ("token 7", "slot 1", "dropped")),
    Mutant("slot counted twice", "plain", with_routes(
        lambda ids, w: (ids, torch.where(torch.arange(3) == 2, w * 2, w))),
        ("slot 2", "counted twice")),
    Mutant("dead row", "plain", dead, ("token 5", "nothing was written")),
    Mutant("dead tile", "plain", dead_tile, ("token 5", "columns 128 to 255 are zero")),
    Mutant("one wrong expert", "plain", wrong_expert, ("token 7", "slot 1", "next expert")),
    Mutant("another wrong expert", "two ranks", another_expert,
           ("token 7", "slot 1", "expert 4: computed with expert 7")),
    Mutant("ids off by one", "plain", with_routes(
        lambda ids, w: (torch.where(ids >= 0, (ids + 1) % 8, ids), w)),
        ("next expert", "every slot")),
    Mutant("ids off by one, down", "two ranks", with_routes(
        lambda ids, w: (torch.where(ids >= 0, (ids - 1) % 8, ids), w)),
        ("previous expert", "every slot")),
    Mutant("doubled block scale in w2", "fp8", with_layer(rescaled_block("w2", 2.0)),
           ("expert 2", "block scale of w2 multiplied by 2", "rows 128 to 255")),
    Mutant("doubled block scale in w13", "fp8", with_layer(rescaled_block("w13", 2.0)),
           ("expert 2", "block scale of w13 multiplied by 2", "rows 128 to 255")),
    Mutant("routing weights permuted", "plain", with_routes(lambda ids, w: (ids, w.roll(1, 1))),
           ("permuted",)),
    Mutant("routing weights not applied", "plain", with_routes(
        lambda ids, w: (ids, torch.full_like(w, 0.4))), ("not applied", "every slot")),
    Mutant("weights renormalised", "plain", with_routes(
        lambda ids, w: (ids, w / w.sum(1, keepdim=True) / 2.5)), ("renormalised",)),
    Mutant("K8 gate and up swapped", "plain", with_layer(swapped), ("gate and up swapped",)),
    Mutant("K1 clamp dropped", "large limit", with_activation(limit=None), ("clamp missing",)),
    Mutant("K1 clamp dropped, small", "small limit", with_activation(limit=None),
           ("clamp missing",)),
    Mutant("K2 symmetric clamp", "small limit", with_activation(symmetric=True),
           ("clamped on both sides",)),
    Mutant("K3 up clamped on one side", "small limit", with_patch(clamp=one_sided),
           ("up clamped from above only",)),
    Mutant("K3 up clamped on one side, large", "large limit", with_patch(clamp=one_sided),
           ("up clamped from above only",)),
    Mutant("K4 clamp after the activation", "small limit", clamped_late,
           ("clamp applied after the activation",)),
    Mutant("K11 alpha ignored", "gpt-oss", with_activation(alpha=1.0), ("alpha ignored",)),
    Mutant("K11 offset ignored", "gpt-oss", with_activation(up_offset=0.0),
           ("up_offset ignored",)),
    Mutant("b2 dropped", "gpt-oss", with_layer(
        lambda rank: replace(rank, experts=replace(rank.experts, b2=None))), ("b2 dropped",)),
    Mutant("b13 dropped", "gpt-oss", with_layer(
        lambda rank: replace(rank, experts=replace(rank.experts, b13=None))), ("b13 dropped",)),
    Mutant("K15 scaled twice", "plain", with_layer(scaled(6.25)),
           ("routed_scaling_factor applied twice",)),
    Mutant("K16 not scaled", "plain", with_layer(scaled(1.0)),
           ("routed_scaling_factor not applied",)),
    Mutant("K16 scaled by another factor", "plain", with_layer(scaled(2.625)),
           ("routed part multiplied by 1.05",)),
    Mutant("K23 weight before FC1", "plain", weight_before, ("before FC1", "every slot")),
    Mutant("K25 shared expert twice", "plain", shared_times(2), ("shared expert counted twice",)),
    Mutant("K25 shared expert four times", "plain", shared_times(4),
           ("shared expert multiplied by 4",)),
    Mutant("K26 shared expert dropped", "plain", shared_times(0), ("shared expert dropped",)),
    Mutant("K30 empty slot wraps to the last expert", "plain", wrapped,
           ("expert -1", "computed with the last expert")),
    Mutant("K30 poisoned last expert", "poisoned", wrapped, ("NaN",)),
    Mutant("K57 scales cut to powers of two", "fp8", with_layer(cut_scales),
           ("cut to powers of two",)),
    Mutant("NaN leaks to a neighbour", "NaN row", leaked, ("token 9", "NaN", "leaked: 8")),
    Mutant("NaN hidden by the clamp", "NaN row", hidden_nan, ("token 8", "taken for the limit")),
    Mutant(
        "denormals flushed to zero",
        "denormal",
        flushed,
        ("denormal results flushed to zero",),
    ),
    Mutant("all tokens enlarged", "many", enlarged, ("off together",)),
    Mutant("stale row", "plain", stale, ("token 11", "row of token 4")),
    Mutant("weight in combine", "fc2_input", with_recipe(weight_at="combine"),
           ("routing weight in combine",), "recipe"),
    Mutant("weight in FC2's input", "plain", with_recipe(weight_at="fc2_input"),
           ("routing weight in fc2_input",), "recipe"),
    Mutant("term not rounded", "plain", with_recipe(term=None), ("term not rounded",), "recipe"),
    Mutant("FC2's input in FP8", "plain", with_recipe(mid=FP8_1X128),
           ("FC2's input in FP8, blocks of 128",)),
    Mutant("mid rounded twice", "plain", mid_twice, (), "recipe"),
    Mutant("FC1 rounded", "plain", with_recipe(fc1_out=BF16), ("FC1's output rounded",), "recipe"),
    Mutant("scale of 128 columns, fp8", "many, fp8", with_recipe(mid=FP8_1X128),
           ("blocks of 128",), "recipe"),
    Mutant("slots in reverse", "cancelling", reversed_slots, ("reverse order",), "recipe"),
    Mutant("1 % of slots dropped", "many", every_hundredth, ("dropped",)),
    Mutant("one dead row of many", "many", dead, ("token 5", "nothing was written")),
    Mutant("one wrong expert of many", "many", wrong_expert, ("token 7", "slot 1", "next expert")),
    Mutant("one doubled block of many", "many experts", with_layer(rescaled_block("w2", 2.0)),
           ("expert 2", "block scale of w2 multiplied by 2")),
    Mutant("scaled twice, nothing else", "many", with_layer(scaled(6.25)),
           ("routed_scaling_factor applied twice",)),
)  # fmt: skip

# Which mutants pass which of the field's gates.
BELOW_THE_GATES = (
    ("1 % of slots dropped", "cosine"),
    ("one dead row of many", "cosine and relative"),
    ("one wrong expert of many", "cosine and relative"),
    ("one doubled block of many", "cosine"),
    ("scaled twice, nothing else", "cosine"),
    ("K57 scales cut to powers of two", "cosine"),
    ("K11 alpha ignored", "cosine and relative"),
    ("b2 dropped", "cosine and relative"),
)
