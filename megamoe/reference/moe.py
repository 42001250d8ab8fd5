"""The layer, once, over two arithmetics.

``EXACT`` computes in float64 throughout: the truth, to a relative 2**-45 of the terms' norm.
``Emulated(recipe)`` rounds exactly where the recipe says, with correctly rounded dots: what a
perfect kernel of that recipe gives, bit for bit on any machine. Both read the same function, top to
bottom in the order of the numeric contract.

Shapes: T tokens, K slots a token, n tokens of one expert, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import (
    BF16,
    F64,
    Element,
    Format,
    Quantised,
    bit_range,
    dequantise,
    quantise,
    rn32,
    rnbf16,
)
from megamoe.problem import (
    BF16_COMBINE,
    Activation,
    ExpertWeights,
    MoEWeights,
    Recipe,
    SharedExpert,
    TopK,
    WeightAt,
)
from megamoe.reference.canary import check_device
from megamoe.reference.dot import Product, dots
from megamoe.reference.elementwise import canonical_nan, clamp, gated, sigmoid

CPU_PIECE = 1 << 21  # elements of a matrix held in float64 at once
CUDA_PIECE = 1 << 27
CPU_ROOM = 1 << 22  # elements of the widest activation held at once
CUDA_ROOM = 1 << 26

Groups = Sequence[tuple[int, int]]  # (expert, tokens), in the order of the tokens


class Arithmetic(Protocol):
    """What the layer asks of an arithmetic; ``dtype`` is that of its intermediate values."""

    dtype: torch.dtype

    @property
    def recipe(self) -> Recipe: ...
    def enter(self, values: Tensor, fmt: Format) -> Tensor: ...
    def dots(self, products: Iterable[Product]) -> None: ...
    def narrow(self, values: Tensor) -> Tensor: ...
    def round(self, values: Tensor, element: Element | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Emulated:
    """Rounds where the recipe says: intermediate values are float32, operands float64 copies."""

    recipe: Recipe
    dtype = torch.float32

    def enter(self, values: Tensor, fmt: Format) -> Tensor:
        """values in a format, as the float64 operand of a dot."""
        return dequantise(quantise(values, fmt))

    def dots(self, products: Iterable[Product]) -> None:
        dots(products)

    def narrow(self, values: Tensor) -> Tensor:
        """float64 to the arithmetic's own precision: RN32."""
        return rn32(values)

    def round(self, values: Tensor, element: Element | None) -> Tensor:
        """A named rounding point; float32 in and out."""
        if element is None:
            return values
        assert element is BF16, element
        return rnbf16(values).to(torch.float32)


@dataclass(frozen=True, slots=True)
class Exact:
    """float64 throughout; only the place of the routing weight is read from its recipe."""

    weight_at: WeightAt = "combine"
    dtype = torch.float64

    @property
    def recipe(self) -> Recipe:
        return Recipe(name="exact", term=None, weight_at=self.weight_at)

    def enter(self, values: Tensor, fmt: Format) -> Tensor:
        return values.to(F64)

    def dots(self, products: Iterable[Product]) -> None:
        for product in products:
            product.put(product.a @ product.b.mT)

    def narrow(self, values: Tensor) -> Tensor:
        return values

    def round(self, values: Tensor, element: Element | None) -> Tensor:
        return values


EXACT = Exact()


def layer(x: Tensor, topk: TopK, weights: MoEWeights, arithmetic: Arithmetic) -> Tensor:
    """The whole layer on one rank that holds every expert: [T, H].

    BF16 under :class:`Emulated`, NaN written as 0x7FC0; float64 under :class:`Exact`.
    """
    check_device(x.device)
    ids, w = routing(topk, weights)
    terms = x.new_zeros(*ids.shape, weights.hidden_size, dtype=arithmetic.dtype)
    held = unique_slots(weights.placement.slots[weights.rank])
    add_terms(terms, x, ids, w, weights.experts, held, weights.activation, arithmetic)
    return finish(x, terms, ids, w, weights, arithmetic)


def routing(topk: TopK, weights: MoEWeights) -> tuple[Tensor, Tensor]:
    """ids as int64 and weights as float32 [T, K], the scaling factor applied once.

    Raises BadInput where an id is outside [-1, E), or a factor's application was left unsaid.
    """
    ids, w = topk.ids.to(torch.int64), topk.weights.to(torch.float32)
    if ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high >= weights.num_experts:
            raise bad_input(
                "topk.ids", low if low < -1 else high,
                f"is outside [-1, {weights.num_experts})", "use -1 for an empty slot",
            )  # fmt: skip
    return ids, w * scaling(topk, weights)


def scaling(topk: TopK, weights: MoEWeights) -> float:
    """What the routing weights are multiplied by: the factor, or 1 where it is inside already."""
    factor = weights.routed_scaling_factor
    if weights.scale_at == "output":
        return 1.0
    if topk.scaled is None and factor != 1.0:
        raise bad_input(
            "topk.scaled", "None",
            f"leaves unsaid whether routed_scaling_factor {factor:g} is inside the weights",
            "pass TopK(..., scaled=True) if your router multiplied it in, else False",
        )  # fmt: skip
    return 1.0 if topk.scaled else factor


def unique_slots(slots: Sequence[int]) -> tuple[int, ...]:
    """``slots`` with every second replica emptied, so that each expert is computed once."""
    seen: set[int] = set()
    first = []
    for expert in slots:
        first.append(-1 if expert in seen else expert)
        seen.add(expert)
    return tuple(first)


def add_terms(
    terms_TKH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    experts: ExpertWeights,
    held: Sequence[int],
    activation: Activation,
    arithmetic: Arithmetic,
) -> None:
    """Write the term of every slot whose expert is in ``held`` (-1 holds none) into ``terms_TKH``.

    A few experts at a time, whose tokens' activations fit in a bound of memory.
    """
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    used, counts = torch.unique_consecutive(flat[order], return_counts=True)
    rows_of = dict(zip(used.tolist(), order.split(counts.tolist()), strict=True))
    out = terms_TKH.view(-1, terms_TKH.shape[-1])
    room = CPU_ROOM if x_TH.device.type == "cpu" else CUDA_ROOM
    width = max(experts.w13.shape[1], experts.hidden_size, 1)
    chosen: list[tuple[int, Tensor]] = []

    def compute() -> None:
        rows = torch.cat([rows for _, rows in chosen])
        groups = [(slot, len(rows)) for slot, rows in chosen]
        x, w = x_TH[rows // ids_TK.shape[1]], w_TK.flatten()[rows]
        out[rows] = term(x, w, experts, activation, arithmetic, groups)
        chosen.clear()

    for slot, expert in enumerate(held):
        if expert >= 0 and expert in rows_of:
            chosen.append((slot, rows_of[expert]))
            if width * sum(len(rows) for _, rows in chosen) >= room:
                compute()
    if chosen:
        compute()


def term(
    x_nH: Tensor,
    w_n: Tensor | None,
    experts: ExpertWeights,
    activation: Activation,
    arithmetic: Arithmetic,
    groups: Groups | None = None,
) -> Tensor:
    """The experts' outputs for their tokens, float [n, H]; a shared expert has no ``w_n``.

    groups: (expert, count) in the order of the tokens; None gives them all to the first expert.
    """
    a, recipe = arithmetic, arithmetic.recipe
    groups = [(0, len(x_nH))] if groups is None else groups
    w_n1 = None if w_n is None else w_n[:, None].to(F64)
    x = x_nH
    if w_n1 is not None and recipe.weight_at == "input":
        x = a.round(a.narrow(w_n1 * x.to(F64)), BF16)
    h = _biased(_product(a.enter(x, recipe.act), experts.w13, groups, a), experts.b13, groups)
    h = a.round(h, recipe.fc1_out)
    gate, up = clamp(h, activation)
    if recipe.gate_out is not None:
        s = _stepwise(gate, up, activation, a)
    else:
        s = gated(gate, up, activation)
    if recipe.swiglu_out is not None:
        s = a.round(a.narrow(s), recipe.swiglu_out).to(F64)
    if w_n1 is not None and recipe.weight_at == "fc2_input":
        s = s * w_n1
    s = a.narrow(s)
    y = _biased(_product(a.enter(s, recipe.mid), experts.w2, groups, a), experts.b2, groups)
    y = a.round(y, recipe.fc2_out)
    if w_n1 is not None and recipe.weight_at == "term":
        y = a.narrow(w_n1 * y.to(F64))
    return a.round(y, recipe.term)


def _product(operand: Tensor, matrices: Quantised, groups: Groups, a: Arithmetic) -> Tensor:
    """operand [n, columns] times each group's matrix of [experts, rows, columns]: [n, rows].

    Some rows of one matrix are held in float64 at a time, a few megabytes that stay in a
    processor's caches; a GPU takes whole matrices, and neighbouring experts together, with their
    tokens padded to one count. Peak memory is a small multiple of one expert.
    """
    _, rows, columns = matrices.shape
    piece = CPU_PIECE if operand.device.type == "cpu" else CUDA_PIECE
    step = max(1, piece // max(1, columns))
    out = torch.empty(len(operand), rows, dtype=a.dtype, device=operand.device)

    def products() -> Iterator[Product]:
        first = 0
        for run in _runs(groups, step // max(1, rows)):
            counts = [count for _, count in run]
            token = _tokens(counts, first, operand.device)
            first += sum(counts)
            left = operand[token.clamp(min=0)]
            if len(run) > 1:
                left = torch.where(token[:, :, None] >= 0, left, 0.0)
            some = matrices[run[0][0] : run[-1][0] + 1]
            for start in range(0, rows, step):
                part = slice(start, start + step)
                right = dequantise(some, rows=part)
                ranges = functools.partial(bit_range, some, rows=part)
                yield Product(left, right, out[:, part], token, ranges)

    a.dots(products())
    return out


def _runs(groups: Groups, most: int) -> Iterator[Groups]:
    """Groups of consecutive experts, at most so many together."""
    run: list[tuple[int, int]] = []
    for group in groups:
        if run and (len(run) >= most or group[0] != run[-1][0] + 1):
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _tokens(counts: Sequence[int], first: int, device: torch.device) -> Tensor:
    """Row numbers from ``first`` on, one line a group, -1 where a group is shorter: [G, most]."""
    most = torch.arange(max(counts), device=device)
    if len(counts) == 1:
        return (first + most)[None]
    count = torch.tensor(counts, device=device)[:, None]
    return torch.where(most < count, first + count.cumsum(0) - count + most, -1)


def _biased(values: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """Each group's bias of [experts, columns] added to its rows."""
    if bias is None:
        return values
    expert = [index for index, count in groups for _ in range(count)]
    index = torch.tensor(expert, dtype=torch.int64, device=bias.device)  # also of no token
    return values + bias[index].to(values.dtype)


def _stepwise(gate: Tensor, up: Tensor, activation: Activation, a: Arithmetic) -> Tensor:
    """The same product with the gated half rounded first, as engines that round every step do."""
    g = gate.to(F64)
    half = a.round(a.narrow(g * sigmoid(g * activation.alpha)), a.recipe.gate_out).to(F64)
    return (up.to(F64) + activation.up_offset) * half


def finish(
    x_TH: Tensor,
    terms_TKH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    weights: MoEWeights,
    arithmetic: Arithmetic,
    owner_TK: Tensor | None = None,
) -> Tensor:
    """Steps 9 and 10 on the token's own rank: combine, output scaling, shared expert, BF16.

    owner_TK: the rank that computed each slot; needed where the recipe combines by rank.
    """
    total = combine(terms_TKH, ids_TK, w_TK, arithmetic, owner_TK)
    if weights.scale_at == "output":
        total = total * weights.routed_scaling_factor  # in the sum's precision, as routing weights
    total = arithmetic.round(total, BF16)
    if weights.shared is not None:
        total = arithmetic.round(total + shared_term(x_TH, weights.shared, arithmetic), BF16)
    return canonical_nan(rnbf16(total)) if total.dtype == torch.float32 else total


def shared_term(x_TH: Tensor, shared: SharedExpert, arithmetic: Arithmetic) -> Tensor:
    """The shared expert's output, rounded to BF16 under Emulated: always the plain BF16 recipe."""
    plain = Emulated(BF16_COMBINE) if isinstance(arithmetic, Emulated) else arithmetic
    return plain.round(term(x_TH, None, shared.weights, shared.activation, plain), BF16)


def combine(
    terms_TKH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    arithmetic: Arithmetic,
    owner_TK: Tensor | None = None,
) -> Tensor:
    """The sum over a token's slots in the recipe's order, [T, H]; empty slots are skipped."""
    recipe = arithmetic.recipe
    order = _order(ids_TK, owner_TK, recipe.combine)
    total = torch.zeros_like(terms_TKH[:, 0]) if ids_TK.shape[1] else terms_TKH.sum(1)
    partial = torch.zeros_like(total)
    rows = torch.arange(ids_TK.shape[0], device=ids_TK.device)
    previous: Tensor | None = None
    for position in range(ids_TK.shape[1]):
        slot = order[:, position]
        live = (ids_TK[rows, slot] >= 0)[:, None]
        value = terms_TKH[rows, slot]
        if recipe.weight_at == "combine":
            value = arithmetic.narrow(w_TK[rows, slot, None].to(F64) * value.to(F64))
        if recipe.combine == "ranks":
            assert owner_TK is not None
            owner = owner_TK[rows, slot]
            if previous is not None:
                turned = (owner != previous)[:, None]
                summed = total + arithmetic.round(partial, recipe.partial)
                total = torch.where(turned, summed, total)
                partial = torch.where(turned, 0.0, partial)
            partial = torch.where(live, partial + value, partial)
            previous = owner
        else:
            summed = total + value
            if recipe.combine == "experts":
                summed = arithmetic.round(summed, recipe.partial)
            total = torch.where(live, summed, total)
    return total + arithmetic.round(partial, recipe.partial) if recipe.combine == "ranks" else total


def _order(
    ids_TK: Tensor, owner_TK: Tensor | None, how: Literal["slots", "experts", "ranks"]
) -> Tensor:
    if how == "slots":
        return torch.arange(ids_TK.shape[1], device=ids_TK.device).expand_as(ids_TK)
    if how == "experts":
        return ids_TK.argsort(dim=1, stable=True)
    if owner_TK is None:
        raise bad_input(
            "recipe.combine", "ranks", "needs the rank that owns each slot",
            "run it through megamoe.reference.parallel",
        )  # fmt: skip
    return owner_TK.argsort(dim=1, stable=True)
