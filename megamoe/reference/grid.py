"""The exact-grid class: inputs on which every honest kernel of a recipe gives the same bits.

Every rounding point of the recipe is at least 2 ** -18 of the value away from a tie, so neither an
approximate sigmoid nor the order of a sum can turn one. It is built, and then verified:

* FC1: x has four small entries a token, weights are 0 or +-unit: gate and up are small integers, in
  any order of summation, and so few that all their products can be good ones.
* scales: those of weights are powers of two; so are those of x, because in every 32 columns one is
  7 (448 / 64) in every token. In every 32 rows of FC1 one, the anchor, reads only columns where x
  is always 4, and is greater than all others: the scale of FC2's input never changes.
* FC2: a row of w2 reads one value, or four equal ones whose coefficients sum to a power of two.
* combine: the experts of a token write to disjoint columns, the shared expert to its own, so an
  output's value names slot, expert and row.

Shapes: T tokens, K slots a token, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import (
    BF16,
    F64,
    PLAIN_BF16,
    Element,
    Format,
    Quantised,
    dequantise,
    encode,
    exponent_of,
    power_of_two,
    quantise,
    row_scale,
)
from megamoe.problem import BF16_COMBINE, ExpertWeights, Recipe, Request, TopK
from megamoe.reference import synthetic as made
from megamoe.reference.case import Inputs, output
from megamoe.reference.hashing import bits
from megamoe.reference.moe import Emulated, term
from megamoe.reference.synthetic import Device

MARGIN = 2.0**-18  # of the value, between every rounding point and the nearest tie
UNITS = (0.5, 0.25, 1.0, 0.125, 2.0)  # of gate weights, tried in turn
CONSTANT = 4  # columns where x is 4 in every token
LARGE = 7.0  # x in one column of 32, which no weight reads: over 448, a power of two
ENTRIES = 4  # other columns that are not 0 in a token
GROUP = 4  # rows of FC1 that stand together: an anchor, four different ones, or four equal ones
ANCHOR_EVERY = 32 // GROUP  # groups: the shortest block of any format of FC2's input

# Coefficients over a group of four equal values, which sum to 1, 2 or 4.
PATTERNS = ((1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, -1), (1, 1, 1, 1))


def exact_grid(request: Request, recipe: Recipe, seed: int = 0, device: Device = "cpu") -> Inputs:
    """Inputs of the class, verified. Routing weights are powers of two, scaling included.

    Raises BadInput where the geometry is too small, the experts are fewer than top_k, or no grid
    was found (a scaling of the output, or an up_offset under step-by-step rounding).
    """
    if request.hidden_size < 2 * GROUP * ENTRIES or request.intermediate_size % GROUP:
        raise bad_input(
            "geometry", f"of H {request.hidden_size}, I {request.intermediate_size}",
            "has no room for an exact grid", f"use H >= {2 * GROUP * ENTRIES} and I in fours",
        )  # fmt: skip
    if request.num_experts < request.top_k:
        raise bad_input(
            "top_k", request.top_k, f"exceeds {request.num_experts} experts", "add some"
        )
    for unit in UNITS:
        inputs = _build(request, recipe, unit, seed, device)
        if distance_to_ties(inputs, recipe) >= MARGIN:
            return inputs
    raise bad_input(
        "recipe", recipe, "has no exact grid for this activation and scaling", "use another class"
    )


def _build(request: Request, recipe: Recipe, unit: float, seed: int, device: Device) -> Inputs:
    layers = made.layers(request, lambda n: _expert(request, recipe, n, unit, seed, device))
    return Inputs(_tokens(request, seed, device), _routes(request, seed, device), layers)


def _tokens(request: Request, seed: int, device: Device) -> Tensor:
    tokens, hidden = request.max_tokens_per_rank, request.hidden_size
    constant, large = _fixed_columns(hidden, device)
    free = (~constant & ~large).nonzero()[:, 0]
    h = bits((tokens, ENTRIES), seed, made.X, device=device)
    value = (1.0 + ((h >> 8) & 1)) * (1.0 - 2.0 * ((h >> 9) & 1))
    x = torch.zeros(tokens, hidden, device=device)
    x[:, constant] = 4.0
    x[:, large] = LARGE
    column = free[(h >> 10) % len(free)]
    for entry in range(ENTRIES):  # one by one: of two in one column the later stands, everywhere
        part = slice(entry, entry + 1)
        x = x.scatter(1, column[:, part], value[:, part].to(x.dtype))
    return x.to(torch.bfloat16)


def _fixed_columns(hidden: int, device: Device) -> tuple[Tensor, Tensor]:
    """Where x is constant, bool [H]: what anchors read, and what sets the scales of its blocks."""
    column = torch.arange(hidden, device=device)
    last = GROUP * ANCHOR_EVERY - 1
    return column < CONSTANT, column % (last + 1) == last


def _routes(request: Request, seed: int, device: Device) -> TopK:
    """Experts of a token differ modulo top_k, because that names the columns they write to."""
    shape, k = (request.max_tokens_per_rank, request.top_k), request.top_k
    start = bits((shape[0], 1), seed, made.IDS, device=device)
    part = (start + torch.arange(k, device=device)) % max(1, k)
    h = bits(shape, seed, made.WEIGHTS, device=device)
    ids = part + k * ((h >> 8) % ((request.num_experts - 1 - part) // max(1, k) + 1))
    if k > 1:
        ids = torch.where(bits(shape, seed, made.EMPTY, device=device) % 16 == 0, -1, ids)
    return TopK(ids=ids, weights=power_of_two(-1 - h % 3).to(torch.float32), scaled=True)


def _expert(
    request: Request, recipe: Recipe, number: int, unit: float, seed: int, device: Device
) -> ExpertWeights:
    inner, hidden = request.intermediate_size, request.hidden_size
    row = torch.arange(inner, device=device)
    group = row // GROUP
    equal = group % 2 == 1
    source = torch.where(equal, group * GROUP, row)  # equal rows copy their group's first
    anchor = (group % ANCHOR_EVERY == 0) & (row % GROUP == 0)
    constant, large = _fixed_columns(hidden, device)

    h = bits((2, inner, hidden), seed, made.W13, number, device=device)[:, source]
    small = torch.where((h >> 7) % 2 == 0, 0.0, 1.0 - 2.0 * ((h >> 9) % 2))
    gate, up = torch.where(constant | large, 0.0, small)
    bias = torch.where((h[..., :1] >> 11) % 2 == 0, small[..., :1], 0.0)
    up_unit = 1.0
    if recipe.gate_out is not None:  # rounded before it meets up: up must be a power of two
        count = 1 << (h[1, :, :1] >> 13) % 3
        up = (torch.arange(hidden, device=device) < count) * (1.0 - 2.0 * ((h[1, :, :1] >> 9) % 2))
        bias[1] = 0.0
        limit = request.activation.limit or 4.0 * CONSTANT
        up_unit = 2.0 ** math.floor(math.log2(limit / (4.0 * CONSTANT)))
    gate, up = (torch.where(anchor[:, None], constant.to(m.dtype), m) for m in (gate, up))
    bias = torch.where(anchor[:, None], 0.0, bias)
    b13 = torch.cat([bias[0] * unit, bias[1] * up_unit]).T.to(torch.float32)
    b2 = torch.zeros(1, hidden, device=device)
    halves = _coded(gate, request.weights, unit), _coded(up, request.weights, up_unit)
    return ExpertWeights(
        w13=_stacked(*halves),
        w2=_coded(_combination(request, number, equal, seed, device), request.w2_weights, 1.0),
        b13=b13 if request.expert_bias else None,
        b2=b2 if request.expert_bias else None,
    )


def _coded(values: Tensor, fmt: Format | None, scale: float) -> Quantised:
    """values [rows, columns] of 0 and small powers of two, times ``scale``, with exact scales."""
    fmt = fmt or PLAIN_BF16
    if fmt.scale is None:
        return quantise(values[None].to(torch.float32) * scale, fmt)
    like = quantise(torch.zeros_like(values[None], dtype=torch.float32), fmt)
    assert like.scale is not None
    scales = torch.full(like.scale.shape, scale, dtype=F64, device=values.device)
    return replace(
        like,
        data=encode(values[None].to(F64), fmt.element),
        scale=encode(scales, fmt.scale),
        global_scale=None if like.global_scale is None else torch.ones_like(like.global_scale),
    )


def _stacked(gate: Quantised, up: Quantised) -> Quantised:
    """Gate rows over up rows, each with its own scales."""

    def both(name: str, dim: int) -> Tensor | None:
        pair = [getattr(half, name) for half in (gate, up)]
        return None if pair[0] is None else torch.cat(pair, dim=dim)

    data = both("data", -2)
    assert data is not None
    return Quantised(
        format=gate.format, data=data, scale=both("scale", -2),
        global_scale=both("global_scale", -1), row_groups=2,
    )  # fmt: skip


def _combination(request: Request, number: int, equal: Tensor, seed: int, device: Device) -> Tensor:
    """w2, float32 [H, I]: in this expert's own columns of the output, one group of values each."""
    inner, hidden = request.intermediate_size, request.hidden_size
    parts = request.top_k + request.shared
    own = request.top_k if number == made.SHARED else number % max(1, request.top_k)
    h = bits((hidden,), seed, made.W2, number, device=device)
    group = (h >> 12) % (inner // GROUP)
    patterns = torch.tensor(PATTERNS, dtype=torch.float32, device=device)
    chosen = torch.where(equal[group * GROUP], h % GROUP, 0)
    shift = (h >> 4) % GROUP
    place = (torch.arange(GROUP, device=device) + shift[:, None]) % GROUP
    sign = 1.0 - 2.0 * ((h >> 8) % 2)
    values = patterns[chosen] * sign[:, None].to(torch.float32)
    values = torch.where(torch.arange(hidden, device=device)[:, None] % parts == own, values, 0.0)
    w2 = torch.zeros(hidden, inner, device=device)
    return w2.scatter(1, group[:, None] * GROUP + place, values)


@dataclass(frozen=True, slots=True, eq=False)
class Watched(Emulated):
    """Emulated, and how near to a tie each rounding came; ``least`` collects tensors."""

    least: list[Tensor] = field(default_factory=list)

    def round(self, values: Tensor, element: Element | None) -> Tensor:
        if element is not None:
            self.least.append(_to_tie(values.to(F64), element))
        return Emulated.round(self, values, element)

    def enter(self, values: Tensor, fmt: Format) -> Tensor:
        coded = quantise(values, fmt)
        ratio = values.to(F64)
        if coded.scale is not None:
            scale = _spread(coded)
            ratio = ratio / torch.where(scale == 0, 1.0, scale)
            self.least.append(_to_power(coded, values))
        self.least.append(_to_tie(ratio, fmt.element))
        return dequantise(coded)


def distance_to_ties(inputs: Inputs, recipe: Recipe) -> float:
    """The least relative distance of any rounding point from a tie; infinite without any."""
    watched = Watched(recipe)
    output(inputs, watched)
    found = watched.least
    shared = inputs.layer.shared
    if shared is not None:  # it rounds by a recipe of its own
        watched = Watched(BF16_COMBINE)
        watched.round(term(inputs.x, None, shared.weights, shared.activation, watched), BF16)
        found = found + watched.least
    return min((float(least) for least in found), default=math.inf)


def _to_tie(values: Tensor, element: Element) -> Tensor:
    """The least |value - tie| / |value|, float64 scalar; zeros and what saturates have none."""
    exponent = exponent_of(values).clamp(min=element.min_exponent)
    steps = values.abs() * power_of_two((element.mantissa_bits - exponent).clamp(max=1023))
    apart = ((steps - steps.floor()) - 0.5).abs() / steps
    usable = (values != 0) & values.isfinite() & (values.abs() <= element.max)
    apart = torch.where(usable, apart, torch.inf)
    return apart.amin() if apart.numel() else apart.new_full((), torch.inf)


def _to_power(coded: Quantised, values: Tensor) -> Tensor:
    """For scales that are powers of two, how near amax / top came to one from either side."""
    rule = coded.format.rule
    nothing = torch.full((), torch.inf, dtype=F64, device=values.device)
    if rule is None or not rule.kind.startswith("power_of_two") or not values.numel():
        return nothing
    width = coded.format.block[1] or values.shape[-1]
    padded = torch.nn.functional.pad(values.to(F64).abs(), (0, -values.shape[-1] % width))
    quotient = padded.unflatten(-1, (-1, width)).amax(-1) / rule.top
    mantissa = quotient * power_of_two((-exponent_of(quotient)).clamp(-1022, 1023))
    apart = torch.minimum(mantissa - 1, 2 - mantissa)
    # An exact power of two comes from exact values, which nothing can move.
    return torch.where((quotient > 0) & (apart > 0), apart, torch.inf).amin()


def _spread(coded: Quantised) -> Tensor:
    """Each element's scale, float64 of coded.shape."""
    width = coded.format.block[1] or max(1, coded.shape[-1])
    column = torch.arange(coded.shape[-1], device=coded.device) // width
    return row_scale(coded).index_select(-1, column)
