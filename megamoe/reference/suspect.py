"""One wrong token taken apart, so that faults can be tried on it.

Shapes: K slots of the token, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.formats import F64
from megamoe.problem import ExpertWeights, MoEWeights, Placement
from megamoe.reference.case import Inputs, contributions, one_expert, stacked
from megamoe.reference.moe import routing


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """One wrong token under EXACT.

    batch: the inputs that it is part of; token: its row. alone: it alone, without a shared expert,
    with slot j's expert as expert j whatever its rank. w: routing weights [K], scaling included, 0
    in empty slots. terms: what each slot adds [K, H]; shared: the shared expert [H], zeros without
    one; y: what the kernel gave [H]. All float64.
    """

    batch: Inputs
    token: int
    alone: Inputs
    ids: tuple[int, ...]
    w: Tensor
    terms: Tensor
    shared: Tensor
    y: Tensor

    @classmethod
    def of(cls, batch: Inputs, token: int, y: Tensor) -> Suspect:
        one = batch.rows(slice(token, token + 1))
        ids, w = routing(one.topk, one.layer)
        chosen = tuple(int(expert) for expert in ids[0].tolist())
        terms, shared = contributions(one)
        return cls(
            batch=batch,
            token=token,
            alone=_alone(one, chosen),
            ids=chosen,
            w=torch.where(ids[0] >= 0, w[0].to(F64), 0.0),
            terms=terms[0],
            shared=y.new_zeros(y.shape[1], dtype=F64) if shared is None else shared[0],
            y=y[token].to(F64),
        )

    @property
    def layer(self) -> MoEWeights:
        return self.alone.layer

    @property
    def experts(self) -> ExpertWeights:
        """Of the slots, in slot order."""
        return self.layer.experts

    @property
    def routed(self) -> Tensor:
        return self.terms.sum(0)

    @property
    def exact(self) -> Tensor:
        return self.routed + self.shared

    def through(self, change: Callable[[int], int]) -> Tensor:
        """What slots would add if each named another expert, ``change(id)``: [K, H]."""
        one = self.batch.rows(slice(self.token, self.token + 1))
        return contributions(_alone(one, [change(expert) for expert in self.ids]))[0][0]

    def by(self, expert: int) -> Tensor:
        """What slots would add if all named this expert, which some rank holds: [K, H]."""
        one = self.batch.rows(slice(self.token, self.token + 1))
        single = _alone(one, [expert])
        ids = [[0 if given >= 0 else -1 for given in self.ids]]
        topk = replace(one.topk, ids=torch.tensor(ids, device=one.x.device))
        return contributions(replace(single, topk=topk))[0][0]

    def weighted(self, w: Tensor) -> Tensor:
        """What slots would add with other routing weights [K], scaling included: [K, H]."""
        topk = replace(self.alone.topk, weights=w[None].to(torch.float32), scaled=True)
        return contributions(replace(self.alone, topk=topk))[0][0]

    def layered(self, **changes: object) -> Tensor:
        """What slots would add through a layer with other fields: [K, H]."""
        layer = replace(self.layer, **changes)  # type: ignore[arg-type]
        return contributions(replace(self.alone, weights=layer))[0][0]

    def with_experts(self, **changes: object) -> Tensor:
        """What slots would add through experts with other fields: [K, H]."""
        return self.layered(experts=replace(self.experts, **changes))  # type: ignore[arg-type]

    def with_x(self, x: Tensor) -> Tensor:
        """What slots would add for another x [1, H]: [K, H]."""
        return contributions(replace(self.alone, x=x))[0][0]


def _alone(one: Inputs, ids: Sequence[int]) -> Inputs:
    """A single token whose slot j goes to expert j, a copy of expert ids[j]."""
    at = {
        expert: (rank.experts, slot)
        for rank in reversed(one.ranks)
        for slot, expert in enumerate(rank.placement.slots[rank.rank])
    }
    spare = next(iter(at.values()))
    layer = replace(
        one.layer,
        experts=stacked([one_expert(*at.get(expert, spare)) for expert in ids]),
        placement=Placement.contiguous(len(ids), 1),
        rank=0,
        router=None,
        shared=None,
    )
    named = [j if expert >= 0 else -1 for j, expert in enumerate(ids)]
    weights = one.topk.weights[:, : len(ids)]
    topk = replace(one.topk, ids=torch.tensor([named], device=one.x.device), weights=weights)
    return Inputs(one.x, topk, layer, one.rank)
