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

from megamoe.errors import bad_input
from megamoe.formats import Quantised
from megamoe.problem import ExpertWeights, MoEWeights, Placement


def physical(placement: Placement) -> Placement:
    """The placement that the kernel sees: every physical slot an expert of its own."""
    return Placement.contiguous(
        placement.world_size * placement.slots_per_rank, placement.world_size
    )


def replicas(
    placement: Placement, device: torch.device, most: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """The physical experts that hold each logical one, int64 [E, most], and how many, int64 [E].

    most: the table's width, for placements to come; without it, the greatest number of replicas
    there is. None where physical ids are the logical ones and no other placement is to come.
    """
    if placement.num_experts == 0 or (placement.is_contiguous and most is None):
        return None
    found: list[list[int]] = [[] for _ in range(placement.num_experts)]
    for rank, slots in enumerate(placement.slots):
        for position, expert in enumerate(slots):
            if expert >= 0:
                found[expert].append(rank * placement.slots_per_rank + position)
    needed = max(len(f) for f in found)
    if most is not None and needed > most:
        raise bad_input(
            "placement", f"of {needed} replicas of one expert", f"exceeds most_replicas {most}",
            "prepare the layer for more",
        )  # fmt: skip
    most = most or needed
    filled = [f + f[:1] * (most - len(f)) for f in found]
    return (
        torch.tensor(filled, dtype=torch.int64, device=device),
        torch.tensor([len(f) for f in found], dtype=torch.int64, device=device),
    )


def padded(weights: MoEWeights) -> MoEWeights:
    """This rank's weights as the kernel sees them: the equal count of slots, physical placement.

    A slot that holds no expert repeats the first one's bytes, so that no kernel meets a value it
    would refuse; no token names it. A rank that holds none at all gets zeros.
    """
    placement = weights.placement
    held = placement.slots[weights.rank]
    seats = (*held, *(-1 for _ in range(placement.slots_per_rank - len(held))))
    experts = weights.experts if -1 not in seats else _filled(weights.experts, seats)
    return dataclasses.replace(weights, experts=experts, placement=physical(placement), router=None)


def _filled(experts: ExpertWeights, seats: tuple[int, ...]) -> ExpertWeights:
    """One entry a seat; those of empty seats come from the first that is not."""
    first = next((seat for seat, expert in enumerate(seats) if expert >= 0), None)
    source = [seat if expert >= 0 else first for seat, expert in enumerate(seats)]

    def fill(tensor: Tensor) -> Tensor:
        data = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        if first is None:
            filled = data.new_zeros((len(seats), *data.shape[1:]))
        else:
            filled = data[torch.tensor(source, device=data.device)]
        return filled.view(tensor.dtype)  # 8-bit floats as bytes: few operations know them

    def quantised(q: Quantised) -> Quantised:
        return Quantised(
            format=q.format,
            data=fill(q.data),
            scale=None if q.scale is None else fill(q.scale),
            global_scale=None if q.global_scale is None else fill(q.global_scale),
            row_groups=q.row_groups,
        )

    return ExpertWeights(
        w13=quantised(experts.w13),
        w2=quantised(experts.w2),
        b13=None if experts.b13 is None else fill(experts.b13),
        b2=None if experts.b2 is None else fill(experts.b2),
    )
