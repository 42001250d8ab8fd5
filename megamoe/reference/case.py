"""What a verdict is about: a kernel's inputs, and the layer over the experts of all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import F64, Quantised
from megamoe.problem import ExpertWeights, MoEWeights, TopK
from megamoe.reference.canary import check_device
from megamoe.reference.moe import (
    EXACT,
    Arithmetic,
    Exact,
    add_terms,
    finish,
    routing,
    shared_term,
    unique_slots,
)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A kernel's inputs as they entered the device call.

    x: BF16 [T, H], this rank's tokens. topk: logical experts. weights: one rank's, or every rank's
    of the expert-parallel group in rank order; together they hold every expert that a token uses.
    owner: int64 [T, K], the rank that computed each slot, where replicas leave a choice and the
    recipe combines by rank; None is the first rank that holds the expert.
    """

    x: Tensor
    topk: TopK
    weights: MoEWeights | Sequence[MoEWeights]
    rank: int = 0
    owner: Tensor | None = None

    def __post_init__(self) -> None:
        x, ids, layer = self.x, self.topk.ids, self.layer
        if x.dim() != 2 or x.shape[1] != layer.hidden_size or x.dtype != torch.bfloat16:
            raise bad_input(
                "x", f"of {x.dtype} {list(x.shape)}", f"is not BF16 [tokens, {layer.hidden_size}]",
                "pass what entered the kernel",
            )  # fmt: skip
        if len(ids) != len(x):
            raise bad_input(
                "topk", f"of {len(ids)} tokens", f"does not fit x of {len(x)}", "pass one row each"
            )
        for name, device in (("topk", ids.device), ("weights", layer.device)):
            if device != x.device:
                raise bad_input(name, f"on {device}", f"are not on x's {x.device}", "move them")
        held = {e for rank in self.ranks for e in rank.placement.slots[rank.rank]}
        missing = sorted(set(ids.unique().tolist()) - held - {-1})
        if missing and 0 <= missing[0] < layer.num_experts:
            raise bad_input(
                "weights", f"of {len(self.ranks)} ranks", f"do not hold expert {missing[0]}",
                "pass every rank's weights",
            )  # fmt: skip

    @property
    def ranks(self) -> tuple[MoEWeights, ...]:
        return (self.weights,) if isinstance(self.weights, MoEWeights) else tuple(self.weights)

    @property
    def layer(self) -> MoEWeights:
        """The weights that say what is common to all ranks: activation, scaling, shared expert."""
        return self.ranks[0]

    @property
    def tokens(self) -> int:
        return int(self.x.shape[0])

    def rows(self, index: Tensor | slice) -> Inputs:
        """These tokens of it."""
        topk = replace(self.topk, ids=self.topk.ids[index], weights=self.topk.weights[index])
        owner = None if self.owner is None else self.owner[index]
        return Inputs(self.x[index], topk, self.weights, self.rank, owner)


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The layer under EXACT with what its error is measured against, each float64 [T, H].

    routed: the sum of |w y| over slots, element by element. shared: |shared expert|, or None.
    """

    exact: Tensor
    routed: Tensor
    shared: Tensor | None

    @classmethod
    def cat(cls, parts: Sequence[Truth]) -> Truth:
        """Of all tokens, from that of consecutive runs."""
        shared = [part.shared for part in parts if part.shared is not None]
        return cls(
            exact=torch.cat([part.exact for part in parts]),
            routed=torch.cat([part.routed for part in parts]),
            shared=torch.cat(shared) if shared else None,
        )


def slot_terms(inputs: Inputs, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
    """The term of every slot [T, K, H], whichever rank holds its expert; ids and weights."""
    check_device(inputs.x.device)
    ids, w = routing(inputs.topk, inputs.layer)
    hidden = inputs.layer.hidden_size
    terms = inputs.x.new_zeros(*ids.shape, hidden, dtype=arithmetic.dtype)
    done: set[int] = set()
    for rank in inputs.ranks:
        held = unique_slots(rank.placement.slots[rank.rank])
        held = tuple(-1 if expert in done else expert for expert in held)
        done.update(held)
        add_terms(terms, inputs.x, ids, w, rank.experts, held, rank.activation, arithmetic)
    return terms, ids, w


def output(inputs: Inputs, arithmetic: Arithmetic) -> Tensor:
    """The whole layer [T, H] in an arithmetic's own result type: BF16 where it rounds."""
    terms, ids, w = slot_terms(inputs, arithmetic)
    owner = inputs.owner if inputs.owner is not None else _first_owner(inputs, ids)
    return finish(inputs.x, terms, ids, w, inputs.layer, arithmetic, owner)


def _first_owner(inputs: Inputs, ids: Tensor) -> Tensor:
    table = torch.zeros(inputs.layer.num_experts + 1, dtype=torch.int64)
    for rank in reversed(inputs.ranks):
        held = [expert for expert in rank.placement.slots[rank.rank] if expert >= 0]
        table[held] = rank.rank
    return table.to(ids.device)[ids]


def contributions(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """What each slot adds to the output [T, K, H], and the shared expert [T, H], under EXACT."""
    layer = inputs.layer
    exact = Exact("input" if layer.weight_at == "input" else "combine")
    terms, ids, w = slot_terms(inputs, exact)
    if exact.weight_at == "combine":
        terms = terms * w.to(F64)[:, :, None]
    if layer.scale_at == "output":
        terms = terms * layer.routed_scaling_factor
    terms = torch.where((ids >= 0)[:, :, None], terms, 0.0)
    shared = None if layer.shared is None else shared_term(inputs.x, layer.shared, EXACT)
    return terms, shared


def truth(inputs: Inputs) -> Truth:
    """EXACT and its denominators, all tokens at once."""
    slots, shared = contributions(inputs)
    routed = slots.sum(1)
    return Truth(
        exact=routed if shared is None else routed + shared,
        routed=slots.abs().sum(1),
        shared=None if shared is None else shared.abs(),
    )


def share(numbers: Sequence[int], make: Callable[[int], ExpertWeights]) -> ExpertWeights:
    """What ``make`` gives for these numbers as one record; none of them leaves a share of the same
    shapes, since a rank may hold no expert.
    """
    experts = stacked([make(number) for number in numbers or (0,)])
    return _rows(experts, slice(len(numbers)))


def stacked(experts: Sequence[ExpertWeights]) -> ExpertWeights:
    """At least one expert, all of one format, as one record, in this order."""

    def matrix(parts: list[Quantised]) -> Quantised:
        return replace(
            parts[0],
            data=torch.cat([part.data for part in parts]),
            scale=_cat([part.scale for part in parts]),
            global_scale=_cat([part.global_scale for part in parts]),
        )

    return ExpertWeights(
        w13=matrix([e.w13 for e in experts]),
        w2=matrix([e.w2 for e in experts]),
        b13=_cat([e.b13 for e in experts]),
        b2=_cat([e.b2 for e in experts]),
    )


def _cat(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def one_expert(experts: ExpertWeights, slot: int) -> ExpertWeights:
    """The expert in one physical slot."""
    return _rows(experts, slice(slot, slot + 1))


def _rows(experts: ExpertWeights, rows: slice) -> ExpertWeights:
    return ExpertWeights(
        w13=experts.w13[rows],
        w2=experts.w2[rows],
        b13=None if experts.b13 is None else experts.b13[rows],
        b2=None if experts.b2 is None else experts.b2[rows],
    )
