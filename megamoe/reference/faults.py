"""The faults that layers have had, each a row: what it is called, and what would then come out.

They come from the field's issue trackers: clamps dropped or misplaced, gate and up swapped, scaling
applied twice or never, shared experts counted once per rank, ids off by one, empty slots that wrap
to the last expert, scales cut to powers of two. A fault that leaves a token as it was explains
nothing, so no row needs to say when it applies.

Shapes: K slots of a token, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.formats import BF16, FP8_1X64, FP8_1X128, FP32, MXFP8, PLAIN_BF16, Quantised
from megamoe.problem import Activation, Recipe
from megamoe.reference.case import Inputs
from megamoe.reference.elementwise import clamp, gated, sigmoid
from megamoe.reference.suspect import Suspect

LEAST_NORMAL = 2.0**-126  # of BF16 and float32


def _flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < LEAST_NORMAL, 0.0, values)


# --- between FC1 and FC2: f(gate, up, activation), float64 [K, I] -------------------------------


def _standard(gate: Tensor, up: Tensor, a: Activation) -> Tensor:
    return gated(*clamp(torch.cat([gate, up], -1), a), a)


def _limit(a: Activation) -> float:
    return a.limit or math.inf


def _clamped_after(gate: Tensor, up: Tensor, a: Activation) -> Tensor:
    half = (gate * sigmoid(gate * a.alpha)).clamp(max=_limit(a))
    return half * (up.clamp(-_limit(a), _limit(a)) + a.up_offset)


ACTIVATION_FAULTS: tuple[tuple[str, Callable[[Tensor, Tensor, Activation], Tensor]], ...] = (
    ("gate and up swapped", lambda g, u, a: _standard(u, g, a)),
    ("clamp missing", lambda g, u, a: gated(g, u, a)),
    ("gate clamped on both sides", lambda g, u, a: _standard(g, u, replace(a, symmetric=True))),
    ("gate clamped from above only", lambda g, u, a: _standard(g, u, replace(a, symmetric=False))),
    ("up clamped from above only", lambda g, u, a: gated(
        g.clamp(max=_limit(a)), u.clamp(max=_limit(a)), a)),
    ("clamp applied after the activation", _clamped_after),
    ("gate not clamped", lambda g, u, a: gated(g, u.clamp(-_limit(a), _limit(a)), a)),
    ("up not clamped", lambda g, u, a: gated(g.clamp(max=_limit(a)), u, a)),
    ("alpha ignored", lambda g, u, a: _standard(g, u, replace(a, alpha=1.0))),
    ("up_offset ignored", lambda g, u, a: _standard(g, u, replace(a, up_offset=0.0))),
    ("alpha and up_offset ignored", lambda g, u, a: _standard(
        g, u, replace(a, alpha=1.0, up_offset=0.0))),
    ("gate ignored", lambda g, u, a: u.clamp(-_limit(a), _limit(a)) + a.up_offset),
    ("up ignored", lambda g, u, a: _standard(g, torch.ones_like(u), replace(a, up_offset=0.0))),
    ("NaN of gate or up taken for the limit", lambda g, u, a: _standard(
        g.nan_to_num(_limit(a)), u.nan_to_num(_limit(a)), a)),
    ("NaN of gate taken for the limit, of up for the lower one", lambda g, u, a: _standard(
        g.nan_to_num(_limit(a)), u.nan_to_num(-_limit(a)), a)),
    ("denormals before FC2 flushed to zero", lambda g, u, a: _flushed(_standard(g, u, a))),
)  # fmt: skip


# --- slot by slot: what each slot would add [K, H] ----------------------------------------------


def _cut(matrix: Quantised) -> Quantised:
    """float32 scales without their mantissas, as a kernel that expects E8M0 reads them."""
    if matrix.format.scale is not FP32 or matrix.scale is None:
        return matrix
    code = matrix.scale.contiguous().view(torch.int32)
    return replace(matrix, scale=(code & ~0x7FFFFF).view(torch.float32))


def _one_global_scale(matrix: Quantised) -> Quantised:
    if matrix.global_scale is None:
        return matrix
    return replace(matrix, global_scale=matrix.global_scale[:, :1].expand(-1, matrix.row_groups))


def _count(s: Suspect) -> int:
    return s.batch.layer.num_experts


SLOT_FAULTS: tuple[tuple[str, Callable[[Suspect], Tensor]], ...] = (
    ("dropped", lambda s: torch.zeros_like(s.terms)),
    ("counted twice", lambda s: s.terms * 2),
    ("computed with the next expert (id + 1)", lambda s: s.through(
        lambda e: (e + 1) % _count(s) if e >= 0 else e)),
    ("computed with the previous expert (id - 1)", lambda s: s.through(
        lambda e: (e - 1) % _count(s) if e >= 0 else e)),
    ("empty, yet computed with the last expert", lambda s: s.through(lambda e: e % _count(s))),
    ("empty, yet computed with expert 0", lambda s: s.through(lambda e: max(e, 0))),
    ("routing weight not applied", lambda s: s.weighted(torch.ones_like(s.w))),
    ("routing weight applied twice", lambda s: s.weighted(s.w * s.w)),
    ("routing weights renormalised", lambda s: s.weighted(s.w / s.w.sum())),
    ("routing weight applied before FC1", lambda s: s.layered(weight_at="input")),
    ("routing weight applied before FC1 and again after FC2", lambda s: (
        s.layered(weight_at="input") * s.w[:, None])),
    ("routing weight applied after FC2", lambda s: s.layered(weight_at="combine")),
    ("bias b13 dropped", lambda s: s.with_experts(b13=None)),
    ("bias b2 dropped", lambda s: s.with_experts(b2=None)),
    ("scales of w13 cut to powers of two", lambda s: s.with_experts(w13=_cut(s.experts.w13))),
    ("scales of w2 cut to powers of two", lambda s: s.with_experts(w2=_cut(s.experts.w2))),
    ("scales of w13 and w2 cut to powers of two", lambda s: s.with_experts(
        w13=_cut(s.experts.w13), w2=_cut(s.experts.w2))),
    ("gate's global scale used for up", lambda s: s.with_experts(
        w13=_one_global_scale(s.experts.w13))),
    ("denormals of x flushed to zero", lambda s: s.with_x(_flushed(s.alone.x))),
)  # fmt: skip


# --- the whole token: what would come out [H] ---------------------------------------------------


def _factor(s: Suspect) -> float:
    return s.batch.layer.routed_scaling_factor


TOKEN_FAULTS: tuple[tuple[str, Callable[[Suspect], Tensor]], ...] = (
    ("denormal results flushed to zero", lambda s: _flushed(s.exact)),
    ("nothing was written, the row is zero", lambda s: torch.zeros_like(s.exact)),
    ("shared expert dropped", lambda s: s.routed),
    ("shared expert counted twice", lambda s: s.exact + s.shared),
    ("routed experts dropped", lambda s: s.shared),
    ("routed_scaling_factor applied twice", lambda s: s.shared + s.routed * _factor(s)),
    ("routed_scaling_factor not applied", lambda s: s.shared + s.routed / _factor(s)),
    ("routed_scaling_factor applied to the shared expert too", lambda s: (
        s.routed + s.shared * _factor(s))),
)  # fmt: skip


# --- right, but another recipe: the same inputs otherwise rounded -------------------------------


def _slots_reversed(inputs: Inputs) -> Inputs:
    topk = replace(inputs.topk, ids=inputs.topk.ids.flip(1), weights=inputs.topk.weights.flip(1))
    owner = None if inputs.owner is None else inputs.owner.flip(1)
    return replace(inputs, topk=topk, owner=owner)


RecipeFault = Callable[[Inputs, Recipe], tuple[Inputs, Recipe]]
RECIPE_FAULTS: tuple[tuple[str, RecipeFault], ...] = (
    ("routing weight in fc2_input", lambda i, r: (i, replace(r, weight_at="fc2_input"))),
    ("routing weight in term", lambda i, r: (i, replace(r, weight_at="term"))),
    ("routing weight in combine", lambda i, r: (i, replace(r, weight_at="combine"))),
    ("term not rounded", lambda i, r: (i, replace(r, term=None))),
    ("term rounded to BF16", lambda i, r: (i, replace(r, term=BF16))),
    ("FC1's output not rounded", lambda i, r: (i, replace(r, fc1_out=None))),
    ("FC1's output rounded to BF16", lambda i, r: (i, replace(r, fc1_out=BF16))),
    ("SwiGLU's output not rounded", lambda i, r: (i, replace(r, gate_out=None, swiglu_out=None))),
    ("SwiGLU's output rounded to BF16 first", lambda i, r: (i, replace(r, swiglu_out=BF16))),
    ("FC1's and SwiGLU's outputs rounded to BF16", lambda i, r: (
        i, replace(r, fc1_out=BF16, swiglu_out=BF16))),
    ("FC2's input in BF16", lambda i, r: (i, replace(r, mid=PLAIN_BF16))),
    ("FC2's input in FP8, blocks of 64", lambda i, r: (i, replace(r, mid=FP8_1X64))),
    ("FC2's input in FP8, blocks of 128", lambda i, r: (i, replace(r, mid=FP8_1X128))),
    ("FC2's input in MXFP8", lambda i, r: (i, replace(r, mid=MXFP8))),
    ("x in BF16", lambda i, r: (i, replace(r, act=PLAIN_BF16))),
    ("x in FP8, blocks of 128", lambda i, r: (i, replace(r, act=FP8_1X128))),
    ("slots summed in reverse order", lambda i, r: (_slots_reversed(i), r)),
    ("slots summed in expert order", lambda i, r: (i, replace(r, combine="experts"))),
    ("every partial sum rounded to BF16, expert order", lambda i, r: (
        i, replace(r, combine="experts", partial=BF16))),
)  # fmt: skip
