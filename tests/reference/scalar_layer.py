"""The layer a second time: one number at a time, written from the numeric contract.

Exact numbers are Fractions and roundings are integer divisions; dots add integers; the elementwise
part is one numpy float64 operation after another. It shares the nouns with megamoe and none of its
arithmetic, so that a fault in one of the two shows as a difference. Finite values only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from operator import mul

import numpy as np
import torch
from torch import Tensor

from megamoe.problem import Activation, ExpertWeights, MoEWeights, Recipe, TopK

FIELDS = {"fp32": (8, 23), "bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1)}
GREATEST = {"e4m3": Fraction(448), "e2m1": Fraction(6)}


# --- one number -----------------------------------------------------------------------------------


def floor_log2(value: Fraction) -> int:
    """The e with 2**e <= |value| < 2**(e + 1); value is not 0."""
    e = abs(value.numerator).bit_length() - value.denominator.bit_length()
    return e if abs(value) >= Fraction(2) ** e else e - 1


def nearest(value: Fraction, element: str) -> Fraction:
    """The nearest number of a binary float, ties to even, as if exponents had no upper end."""
    exponent_bits, mantissa_bits = FIELDS[element]
    if value == 0:
        return value
    least = 2 - (1 << (exponent_bits - 1))
    quantum = Fraction(2) ** (max(floor_log2(value), least) - mantissa_bits)
    return round(value / quantum) * quantum  # Python rounds a Fraction half to even


def rn32(value: Fraction) -> Fraction:
    rounded = nearest(value, "fp32")
    assert abs(rounded) < Fraction(2) ** 128, "overflow: not this file's business"
    return rounded


def rnbf16(value: Fraction) -> Fraction:
    return nearest(rn32(value), "bf16")


@functools.cache
def decode(code: int, element: str) -> Fraction:
    """A code's value, from its bit fields."""
    if element == "e8m0":
        assert code != 255
        return Fraction(2) ** (code - 127)
    if element == "int4":
        return Fraction(code - 8)
    exponent_bits, mantissa_bits = FIELDS[element]
    bias = (1 << (exponent_bits - 1)) - 1
    mantissa = code & ((1 << mantissa_bits) - 1)
    field = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    if field == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias - mantissa_bits)
    return sign * (mantissa + (1 << mantissa_bits)) * Fraction(2) ** (field - bias - mantissa_bits)


def codes(tensor: Tensor, element: str) -> np.ndarray:
    """The codes of a stored tensor as integers; packed ones unpacked, lower nibble first."""
    width = tensor.element_size()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    raw = tensor.detach().cpu().contiguous().view(view).numpy().astype(np.int64)
    raw &= (1 << (8 * width)) - 1
    if element in ("e2m1", "int4"):
        raw = np.stack([raw % 16, raw // 16], axis=-1).reshape(*raw.shape[:-1], -1)
    return raw


# --- a row and a matrix ---------------------------------------------------------------------------


def matrix(q: object, expert: int) -> list[list[Fraction]]:
    """One expert's matrix as exact numbers, each code times its scales."""
    fmt = q.format  # type: ignore[attr-defined]
    data = codes(q.data[expert], fmt.element.name)  # type: ignore[attr-defined]
    rows, columns = data.shape
    if fmt.scale is None:
        return [[decode(int(c), fmt.element.name) for c in row] for row in data]
    scales = codes(q.scale[expert], fmt.scale.name)  # type: ignore[attr-defined]
    groups: int = q.row_groups  # type: ignore[attr-defined]
    per_group = rows // groups
    height, width = fmt.block[0] or per_group, fmt.block[1] or columns
    tiles = -(-per_group // height)
    out = []
    for i in range(rows):
        group, inside = divmod(i, per_group)
        scale_row = scales[group * tiles + inside // height]
        whole = Fraction(1)
        if fmt.global_scale != "none":
            globals_ = codes(q.global_scale[expert], "fp32")  # type: ignore[attr-defined]
            whole = decode(int(globals_[group]), "fp32")
        row = []
        for j in range(columns):
            scale = decode(int(scale_row[j // width]), fmt.scale.name)
            scale = rn32(scale / whole) if fmt.global_scale == "divide" else scale * whole
            row.append(decode(int(data[i, j]), fmt.element.name) * scale)
        out.append(row)
    return out


def quantised(row: Sequence[Fraction], fmt: object) -> list[Fraction]:
    """A row of float32 numbers in an activation format, read back as exact numbers."""
    element: str = fmt.element.name  # type: ignore[attr-defined]
    if fmt.scale is None:  # type: ignore[attr-defined]
        return [nearest(v, element) for v in row]
    rule, width = fmt.rule, fmt.block[1] or len(row)  # type: ignore[attr-defined]
    top = Fraction(rule.top)
    out: list[Fraction] = []
    for start in range(0, len(row), width):
        block = row[start : start + width]
        amax = max(abs(v) for v in block)
        scale = rn32(amax / top)
        if rule.kind == "power_of_two_up":
            exponent = -127 if scale == 0 else floor_log2(scale)
            exponent += scale > Fraction(2) ** exponent
            scale = Fraction(2) ** max(exponent, -127)
        elif scale == 0:
            scale = Fraction(1)
        greatest = GREATEST[element]
        for v in block:
            ratio = nearest(rn32(v / scale), element)
            out.append(max(-greatest, min(greatest, ratio)) * scale)
    return out


def as_integers(row: Sequence[Fraction]) -> tuple[list[int], int]:
    """A row over its common denominator."""
    common = math.lcm(*(v.denominator for v in row)) if row else 1
    return [v.numerator * (common // v.denominator) for v in row], common


def exact_dot(a: tuple[list[int], int], b: tuple[list[int], int]) -> Fraction:
    return Fraction(sum(map(mul, a[0], b[0])), a[1] * b[1])


# --- elementwise, in numpy float64 ----------------------------------------------------------------

F64 = np.float64


def exp(x: np.float64) -> np.float64:
    if np.isnan(x):
        return x
    if x > 708.0:
        return F64(np.inf)
    if x < -708.0:
        return F64(0.0)
    n = np.rint(x * F64(1.4426950408889634))
    high = x - n * F64(0.6931471803691238)
    low = n * F64(1.9082149292705877e-10)
    r = high - low
    lost = (high - r) - low
    value = F64(1.0) / F64(6227020800.0)
    for factorial in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2):
        value = value * r
        value = value + F64(1.0) / F64(factorial)
    value = F64(1.0) + (r + (lost + r * (r * value)))
    return F64(math.ldexp(float(value), int(n)))


def sigmoid(x: np.float64) -> np.float64:
    return F64(1.0) / (F64(1.0) + exp(-x))


def log1p_exp(x: np.float64) -> np.float64:
    z = exp(-abs(x))
    s = z / (z + F64(2.0))
    square = s * s
    value = F64(1.0) / F64(33.0)
    for odd in range(31, 0, -2):
        value = value * square
        value = value + F64(1.0) / F64(odd)
    return (x if x > 0 else F64(0.0)) + F64(2.0) * (s * value)


def swiglu(gate: Fraction, up: Fraction, activation: Activation, recipe: Recipe) -> np.float64:
    """After the clamp: ((up + up_offset) * gate) * sigmoid(alpha * gate)."""
    g, u = F64(float(gate)), F64(float(up))
    s = sigmoid(F64(activation.alpha) * g)
    if recipe.gate_out is not None:
        half = rnbf16(Fraction(float(g * s)))
        return (u + F64(activation.up_offset)) * F64(float(half))
    return ((u + F64(activation.up_offset)) * g) * s


def clamped(gate: Fraction, up: Fraction, activation: Activation) -> tuple[Fraction, Fraction]:
    if activation.limit is None:
        return gate, up
    limit = nearest(Fraction(activation.limit), "fp32")
    if activation.symmetric:
        gate = max(gate, -limit)
    return min(gate, limit), max(-limit, min(limit, up))


# --- the layer ------------------------------------------------------------------------------------


class Expert:
    """One expert's matrices as integer rows, its biases as exact numbers."""

    def __init__(self, weights: ExpertWeights, index: int) -> None:
        self.w13 = [as_integers(row) for row in matrix(weights.w13, index)]
        self.w2 = [as_integers(row) for row in matrix(weights.w2, index)]
        self.b13 = _bias(weights.b13, index, len(self.w13))
        self.b2 = _bias(weights.b2, index, len(self.w2))

    def term(
        self, x: Sequence[Fraction], w: Fraction | None, activation: Activation, recipe: Recipe
    ) -> list[Fraction]:
        if w is not None and recipe.weight_at == "input":
            x = [rnbf16(w * v) for v in x]
        entered = as_integers(quantised(x, recipe.act))
        h = [rn32(exact_dot(entered, row)) for row in self.w13]
        h = [_named(rn32(v + b), recipe.fc1_out) for v, b in zip(h, self.b13, strict=True)]
        half = len(h) // 2
        mid = []
        for gate, up in zip(h[:half], h[half:], strict=True):
            s = swiglu(*clamped(gate, up, activation), activation, recipe)
            if recipe.swiglu_out is not None:
                s = F64(float(rnbf16(Fraction(float(s)))))
            if w is not None and recipe.weight_at == "fc2_input":
                s = s * F64(float(w))
            mid.append(rn32(Fraction(float(s))))
        entered = as_integers(quantised(mid, recipe.mid))
        y = [rn32(exact_dot(entered, row)) for row in self.w2]
        y = [_named(rn32(v + b), recipe.fc2_out) for v, b in zip(y, self.b2, strict=True)]
        if w is not None and recipe.weight_at == "term":
            y = [rn32(w * v) for v in y]
        return [_named(v, recipe.term) for v in y]


def layer(x: Tensor, topk: TopK, weights: MoEWeights, recipe: Recipe) -> list[list[float]]:
    """What ``Emulated(recipe)`` gives, as Python floats [T][H]."""
    experts = {
        e: Expert(weights.experts, slot)
        for slot, e in enumerate(weights.placement.slots[weights.rank])
    }
    shared = None if weights.shared is None else Expert(weights.shared.weights, 0)
    plain = Recipe(name="shared")
    factor = rn32(Fraction(weights.routed_scaling_factor))
    scale_weights = weights.scale_at == "weights" and not topk.scaled
    out = []
    for t, codes_of_row in enumerate(codes(x, "bf16")):
        row = [decode(int(c), "bf16") for c in codes_of_row]
        slots = [
            (int(e), rn32(Fraction(float(w))))
            for e, w in zip(topk.ids[t].tolist(), topk.weights[t].tolist(), strict=True)
            if e >= 0
        ]
        if scale_weights:
            slots = [(e, rn32(w * factor)) for e, w in slots]
        if recipe.combine == "experts":
            slots.sort(key=lambda slot: slot[0])
        total = [Fraction(0)] * weights.hidden_size
        for e, w in slots:
            term = experts[e].term(row, w, weights.activation, recipe)
            if recipe.weight_at == "combine":
                term = [rn32(w * v) for v in term]
            total = [rn32(a + b) for a, b in zip(total, term, strict=True)]
            if recipe.combine == "experts":
                total = [_named(v, recipe.partial) for v in total]
        if weights.scale_at == "output":
            total = [rn32(v * factor) for v in total]
        y = [rnbf16(v) for v in total]
        if shared is not None and weights.shared is not None:
            own = shared.term(row, None, weights.shared.activation, plain)
            y = [rnbf16(a + b) for a, b in zip(y, own, strict=True)]
        out.append([float(v) for v in y])
    return out


def _bias(bias: Tensor | None, index: int, count: int) -> list[Fraction]:
    if bias is None:
        return [Fraction(0)] * count
    return [Fraction(float(v)) for v in bias[index].tolist()]


def _named(value: Fraction, element: object) -> Fraction:
    """A rounding point of the recipe: BF16 or nothing."""
    return value if element is None else rnbf16(value)
