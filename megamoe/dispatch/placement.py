"""Logical experts to physical ones: what makes uneven, permuted and replicated experts work on
every kernel.

A kernel sees ``world_size * slots_per_rank`` physical experts, equal and contiguous; ranks with
fewer are padded with slots that no token names. The token's owner picks among replicas from (rank,
row, slot); a receiver never chooses, so that each slot is computed exactly once.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megamoe.formats import Quantised
from megamoe.problem import ExpertWeights, MoEWeights, Placement


def physical(placement: Placement) -> Placement:
    """The placement that the kernel sees: every physical slot an expert of its own."""
    return Placement.contiguous(
        placement.world_size * placement.slots_per_rank, placement.world_size
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Replicas by logical expert, on a device. replicas: int64 [E, most]; counts: int64 [E]."""

    replicas: Tensor
    counts: Tensor

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> Table:
        found: list[list[int]] = [[] for _ in range(placement.num_experts)]
        for rank, slots in enumerate(placement.slots):
            for position, expert in enumerate(slots):
                if expert >= 0:
                    found[expert].append(rank * placement.slots_per_rank + position)
        most = max((len(f) for f in found), default=1)
        padded = [f + f[:1] * (most - len(f)) for f in found]
        return cls(
            torch.tensor(padded, dtype=torch.int64, device=device).view(-1, most),
            torch.tensor([len(f) for f in found], dtype=torch.int64, device=device),
        )

    def physical_ids(self, ids: Tensor, rank: int) -> Tensor:
        """Logical ids [T, k] with empty slots as -1, to physical ids; no reading back."""
        if self.replicas.shape[0] == 0:
            return ids
        held = ids.clamp(min=0)
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        slots = torch.arange(ids.shape[1], device=ids.device)
        choice = (rank + rows + slots) % self.counts[held]
        return torch.where(ids < 0, -1, self.replicas[held, choice])


def padded(weights: MoEWeights) -> MoEWeights:
    """This rank's weights as the kernel sees them: filled up to the equal count, physical
    placement.

    A padding slot repeats the first expert's bytes, so that no kernel meets a scale it would
    refuse; no token names it. A rank that holds nothing cannot be padded from its own bytes: it
    gets zeros.
    """
    placement = weights.placement
    missing = placement.slots_per_rank - len(placement.slots[weights.rank])
    experts = weights.experts if missing == 0 else _filled(weights.experts, missing)
    return dataclasses.replace(weights, experts=experts, placement=physical(placement), router=None)


def _filled(experts: ExpertWeights, missing: int) -> ExpertWeights:
    def more(tensor: Tensor) -> Tensor:
        source = tensor[:1] if tensor.shape[0] else tensor.new_zeros((1, *tensor.shape[1:]))
        return torch.cat([tensor, source.expand(missing, *source.shape[1:])])

    def fill(q: Quantised) -> Quantised:
        return Quantised(
            format=q.format,
            data=_bytes_wise(more, q.data),
            scale=None if q.scale is None else _bytes_wise(more, q.scale),
            global_scale=None if q.global_scale is None else more(q.global_scale),
            row_groups=q.row_groups,
        )

    return ExpertWeights(
        w13=fill(experts.w13),
        w2=fill(experts.w2),
        b13=None if experts.b13 is None else more(experts.b13),
        b2=None if experts.b2 is None else more(experts.b2),
    )


def _bytes_wise(f: object, tensor: Tensor) -> Tensor:
    """Apply a copying function to 8-bit floats as bytes: not all torch operations know them."""
    assert callable(f)
    if tensor.dtype.itemsize == 1:
        result: Tensor = f(tensor.view(torch.uint8)).view(tensor.dtype)
        return result
    return f(tensor)  # type: ignore[no-any-return]
