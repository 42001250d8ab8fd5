"""The classes of input that bring faults to light, one maker each.

Gates of deviation 1 never reach a limit of 7 or 10, so normal inputs alone prove little. A maker
takes the layer's `Request`, the recipe to be judged, a seed and a device, and gives `Inputs` with
the weights of every rank of the placement; a class that does not depend on the recipe ignores it.

Shapes: T tokens, K slots a token, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import F64, Quantised, dequantise
from megamoe.problem import ExpertWeights, MoEWeights, Recipe, Request
from megamoe.reference import synthetic as made
from megamoe.reference.case import Inputs, one_expert
from megamoe.reference.grid import exact_grid
from megamoe.reference.hashing import bits
from megamoe.reference.measure import TILE
from megamoe.reference.synthetic import Device

LEAST = 2.0**-133  # BF16's least positive number
SATURATED = 0.1  # of gates above the limit, below its negative, and of ups beyond either side
DEFAULT_LIMIT = 10.0  # what saturates where the layer has no limit
MEASURED = 256  # tokens on which saturation is measured

Maker = Callable[[Request, Recipe, int, Device], Inputs]


def normal(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """Bell-shaped activations and weights, gates of deviation about 1, a few empty slots."""
    x = made.normal_tokens(request.max_tokens_per_rank, request.hidden_size, seed, device)
    layers = made.layers(request, lambda number: made.expert(request, number, seed, device))
    return Inputs(x, made.routes(request, seed, device), layers)


def saturating(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """Normal inputs scaled up until the clamp acts on both sides of gate and up."""
    return saturated(normal(request, recipe, seed, device))


def saturated(inputs: Inputs) -> Inputs:
    """``inputs`` with x scaled by the least power of two that saturates it, for any weights.

    At least a tenth of gates lie above the limit, a tenth below its negative, and a tenth of ups
    beyond either side (the limit is 10 where the layer has none). Raises BadInput where no scale
    does that.
    """
    for exponent in range(32):
        scaled = replace(inputs, x=inputs.x * 2.0**exponent)
        if min(saturation(scaled)) >= SATURATED:
            return scaled
    raise bad_input(
        "inputs", f"of {inputs.tokens} tokens", "cannot be saturated by scaling x",
        "use more tokens, or weights that are less sparse",
    )  # fmt: skip


def saturation(inputs: Inputs) -> tuple[float, float, float, float]:
    """The shares of gates above the limit and below its negative, and of ups likewise."""
    limit = inputs.layer.activation.limit or DEFAULT_LIMIT
    gate, up = _fc1(inputs.rows(slice(0, MEASURED))).chunk(2, dim=-1)
    beyond = (gate > limit, gate < -limit, up > limit, up < -limit)
    a, b, c, d = (int(part.sum()) / max(1, part.numel()) for part in beyond)
    return a, b, c, d


def _fc1(inputs: Inputs) -> Tensor:
    """FC1's exact output for every used slot, float64 [slots, 2I]."""
    found = [inputs.x.new_zeros(0, 2 * inputs.layer.intermediate_size, dtype=F64)]
    done: set[int] = set()
    for rank in inputs.ranks:
        for slot, number in enumerate(rank.placement.slots[rank.rank]):
            rows = (inputs.topk.ids == number).any(1)
            if number < 0 or number in done or not bool(rows.any()):
                continue
            done.add(number)
            expert = one_expert(rank.experts, slot)
            h = inputs.x[rows].to(F64) @ dequantise(expert.w13)[0].T
            found.append(h if expert.b13 is None else h + expert.b13[0].to(F64))
    return torch.cat(found)


def outlier(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """One element of every block of 128 is 32 to 256 times the others: what block scales suffer."""
    inputs = normal(request, recipe, seed, device)
    tokens, hidden = inputs.x.shape
    blocks = -(-hidden // TILE)
    h = bits((tokens, blocks), seed, made.SPOT, device=device)
    column = (h % TILE + torch.arange(blocks, device=h.device) * TILE).clamp(max=hidden - 1)
    factor = 2.0 ** (5 + (h >> 16) % 4).to(torch.float32)
    x = inputs.x.to(torch.float32)
    x = x.scatter(1, column, x.gather(1, column) * factor)
    return replace(inputs, x=x.to(torch.bfloat16))


def denormal(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """BF16 denormals: in the columns that feed up, scattered, in entire rows, and normal rows.

    Gates read the first half of the columns and ups the second, so that in every fourth token
    normal gates meet denormal ups, and the outputs are denormal.
    """
    hidden = request.hidden_size
    half = torch.arange(hidden, device=device) < hidden // 2

    def make(number: int) -> ExpertWeights:
        inner = request.intermediate_size
        w13 = made.matrix(2 * inner, hidden, seed, made.W13, number, device=device)
        w13[inner:] *= 8.0  # so that outputs have a few bits above BF16's least number
        keep = torch.cat([half.expand(inner, -1), ~half.expand(inner, -1)])
        w2 = made.matrix(hidden, inner, seed, made.W2, number, device=device)
        return made.encoded(torch.where(keep, w13, 0.0), w2, request)

    x = made.normal_tokens(request.max_tokens_per_rank, hidden, seed, device).to(torch.float32)
    small = (x * 2.0**4).trunc() * LEAST  # at most 64 units of the 128 that a normal number has
    kind = torch.arange(len(x), device=x.device)[:, None] % 4
    odd = (torch.arange(hidden, device=x.device) % 2 == 1)[None]
    tiny = ((kind == 0) & ~half[None]) | ((kind == 1) & odd) | (kind == 2)
    x = torch.where(tiny, small, x)
    return Inputs(
        x.to(torch.bfloat16), made.routes(request, seed, device), made.layers(request, make)
    )


def near_cancelling(
    request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu"
) -> Inputs:
    """Dots and, in odd tokens, slots whose terms nearly cancel: what a short accumulator loses.

    Columns come in pairs of equal x and nearly opposite weights. With three slots or more, odd
    tokens send the first two to one expert with weights of opposite sign and 2**18 the others'
    size, so that only the written order of slots gives the right bits.
    """
    element = request.weights.element
    tweak = 1 - min(element.mantissa_bits, 7)

    def make(number: int) -> ExpertWeights:
        inner, hidden = request.intermediate_size, request.hidden_size
        w13 = made.matrix(2 * inner, hidden, seed, made.W13, number, device=device)
        delta = made.matrix(2 * inner, hidden, seed, made.SIGN, number, device=device)
        w13[:, 1::2] = (delta * 2.0**tweak)[:, 1::2] - w13[:, 0 : hidden - hidden % 2 : 2]
        w2 = made.matrix(hidden, inner, seed, made.W2, number, device=device)
        return made.encoded(w13, w2, request)

    x = made.normal_tokens(request.max_tokens_per_rank, request.hidden_size, seed, device)
    x[:, 1::2] = x[:, 0 : x.shape[1] - x.shape[1] % 2 : 2]
    topk = made.routes(request, seed, device)
    if request.top_k >= 3:
        ids, w = topk.ids.clone(), topk.weights.clone()
        ids[1::2, 1] = ids[1::2, 0]
        w[1::2, 0] = w[1::2, 0] * 2.0**18
        w[1::2, 1] = -w[1::2, 0]
        topk = replace(topk, ids=ids, weights=w)
    return Inputs(x * 2.0 ** (-tweak), topk, made.layers(request, make))


def poisoned(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """NaN in every byte that a kernel must not let matter.

    Every fourth row is padding (all slots empty; its x is NaN unless a shared expert reads it), the
    weights of empty slots are NaN, and the last expert, which no token uses, is all bits set.
    """
    if request.num_experts <= request.top_k:
        raise bad_input(
            "num_experts", request.num_experts, f"leaves no expert unused by top_k {request.top_k}",
            "use more experts",
        )  # fmt: skip
    unused = request.num_experts - 1
    inputs = normal(request, recipe, seed, device)
    topk = made.routes(request, seed, device, experts=unused)
    padding = torch.arange(inputs.tokens, device=inputs.x.device) % 4 == 3
    ids = torch.where(padding[:, None], -1, topk.ids)
    w = torch.where(ids < 0, torch.nan, topk.weights)
    x = inputs.x if request.shared else torch.where(padding[:, None], torch.nan, inputs.x)
    ranks = tuple(_spoiled(rank, unused) for rank in inputs.ranks)
    return Inputs(x, replace(topk, ids=ids, weights=w), ranks)


def _spoiled(rank: MoEWeights, unused: int) -> MoEWeights:
    """All bits set in one expert's codes and biases, and in those of slots that hold none.

    Scales stay: a kernel may refuse a scale that is no number when it packs the weights.
    """
    slots = rank.placement.slots[rank.rank]
    bad = [slot for slot, number in enumerate(slots) if number in (unused, -1)]

    def spoil(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.clone()
        for slot in bad:
            tensor[slot].view(torch.uint8).fill_(0xFF)
        return tensor

    def matrix(q: Quantised) -> Quantised:
        data = spoil(q.data)
        assert data is not None
        return replace(q, data=data)

    experts = rank.experts
    return replace(
        rank,
        experts=ExpertWeights(
            w13=matrix(experts.w13), w2=matrix(experts.w2),
            b13=spoil(experts.b13), b2=spoil(experts.b2),
        ),
    )  # fmt: skip


CLASSES: dict[str, Maker] = {
    "normal": normal,
    "saturating": saturating,
    "exact-grid": exact_grid,
    "outlier": outlier,
    "denormal": denormal,
    "near-cancelling": near_cancelling,
    "poisoned": poisoned,
}
