"""transformers' own arithmetic, step by step in correctly rounded operations: a second opinion.

Written from its modeling files and not from our recipes: each torch operation on bfloat16 tensors
is its exact result rounded to float32 and then to bfloat16. It has what a recipe cannot say: the
extra roundings of the gpt-oss gate, of a bias added after its product, and of the shared expert.

Shapes: T tokens, K slots a token, n tokens of one expert, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import dequantise, rn32, rnbf16
from megamoe.problem import Activation, ExpertWeights, MoEWeights
from megamoe.reference.dot import dot
from megamoe.reference.elementwise import sigmoid


def step(values: Tensor) -> Tensor:
    """One bfloat16 operation's result, float64 that bfloat16 holds."""
    return rnbf16(rn32(values)).double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = step(dot(x, weight).double())
    return out if bias is None else step(out + bias.double())


def gate_function(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(min=-activation.limit, max=activation.limit)
    if activation.is_swiglu:
        return step(step(gate * sigmoid(gate)) * up)
    glu = step(gate * step(sigmoid(step(gate * activation.alpha))))
    return step(step(up + activation.up_offset) * glu)


def ffn(x_nH: Tensor, expert: ExpertWeights, activation: Activation) -> Tensor:
    """One expert of ``expert`` (which holds one), float64 [n, H] that bfloat16 holds."""
    bias = [None if b is None else b[0] for b in (expert.b13, expert.b2)]
    h = linear(x_nH.double(), dequantise(expert.w13)[0], bias[0])
    gate, up = h.chunk(2, dim=-1)
    return linear(gate_function(gate, up, activation), dequantise(expert.w2)[0], bias[1])


def block(x: Tensor, ids: Tensor, w: Tensor, weights: MoEWeights, eager: bool) -> Tensor:
    """The whole block with transformers' ids and weights [T, K], whose dtype matters: BF16 [T, H].

    eager sums in expert order in bfloat16; else (grouped_mm, batched_mm) in slot order in float32.
    """
    experts = weights.experts
    weighted = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for e in range(experts.count):
        one = ExpertWeights(
            w13=experts.w13[e : e + 1],
            w2=experts.w2[e : e + 1],
            b13=None if experts.b13 is None else experts.b13[e : e + 1],
            b2=None if experts.b2 is None else experts.b2[e : e + 1],
        )
        token, slot = torch.where(ids == e)
        y = ffn(x[token], one, weights.activation)
        product = y * w[token, slot, None].double()
        narrow = eager or w.dtype == torch.bfloat16
        weighted[token, slot] = step(product) if narrow else rn32(product).double()
    order = ids.argsort(dim=1) if eager else torch.arange(ids.shape[1]).expand_as(ids)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for position in range(ids.shape[1]):
        slot = order[:, position]
        total = total + weighted[torch.arange(len(x)), slot]
        total = step(total) if eager else rn32(total).double()
    total = step(total)
    if weights.scale_at == "output":
        total = step(total * weights.routed_scaling_factor)
    if weights.shared is not None:
        total = step(total + ffn(x, weights.shared.weights, weights.shared.activation))
    return total.bfloat16()
