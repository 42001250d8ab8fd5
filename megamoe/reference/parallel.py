"""The reference over many ranks: each owns its tokens and its experts, and the bits are one rank's.

A token's row, its weights and the terms travel bit for bit; terms are computed where the expert
lives and are summed at the token's owner in slot order. Ranks are a plain list (``over_ranks``, any
placement, logical ids) or a torch.distributed group (``forward``, physical ids: rank r owns
[r * S, (r + 1) * S)). Both take the same three steps: ``_leaving``, ``_served``, ``_landed``.

Shapes: T tokens of this rank, K slots a token, H hidden_size, W ranks, S physical slots of a rank,
m tokens that one rank sends to another, n slots among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.problem import MoEWeights, Placement, TopK
from megamoe.reference.canary import check_device
from megamoe.reference.moe import Arithmetic, add_terms, finish, routing

Wait = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one rank sends to another: tokens with at least one slot there.

    x_mH: BF16. seat_mK: the receiver's own slot in [0, S), -1 for slots that are not its business.
    w_mK: float32.
    """

    x_mH: Tensor
    seat_mK: Tensor
    w_mK: Tensor


def over_ranks(
    xs: Sequence[Tensor],
    topks: Sequence[TopK],
    weights: Sequence[MoEWeights],
    arithmetic: Arithmetic,
) -> list[Tensor]:
    """Every rank's tokens through the whole layer: one [T, H] a rank, dtypes as ``moe.layer``'s.

    xs, topks, weights: one a rank, in rank order, the ids logical. Counts may differ or be 0.
    """
    world = len(weights)
    for name, given in (
        ("xs", xs),
        ("topks", topks),
        ("weights.placement", weights[0].placement.slots),
    ):
        if len(given) != world:
            raise bad_input(
                name, f"of {len(given)} ranks", f"do not match {world} ranks of weights",
                "pass one a rank",
            )  # fmt: skip
    routes = [routing(topk, w) for topk, w in zip(topks, weights, strict=True)]
    placement = weights[0].placement
    seats = max(1, placement.slots_per_rank)
    homes = [physical(ids, placement, rank) for rank, (ids, _) in enumerate(routes)]
    leaving = [
        _leaving(x, home, w, world, seats)
        for x, home, (_, w) in zip(xs, homes, routes, strict=True)
    ]
    served = [
        _served([leaving[source][rank] for source in range(world)], weights[rank], arithmetic)
        for rank in range(world)
    ]
    results = []
    for rank, (x, (ids, w), home) in enumerate(zip(xs, routes, homes, strict=True)):
        returned = [served[other][rank] for other in range(world)]
        terms = _landed(returned, home, seats, weights[rank].hidden_size, arithmetic)
        results.append(finish(x, terms, ids, w, weights[rank], arithmetic, _owner(home, seats)))
    return results


def physical(ids: Tensor, placement: Placement, rank: int) -> Tensor:
    """Logical ids [T, K] of a rank's tokens to physical ones, r * S + slot; -1 stays.

    Among an expert's replicas, in (rank, slot) order, row t and slot k of rank r take number
    (r + t + k) modulo their count: the owner decides, so each slot is computed exactly once.
    """
    seats = max(1, placement.slots_per_rank)
    homes: dict[int, list[int]] = {-1: [-1]}
    for holder, slots in enumerate(placement.slots):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                homes.setdefault(expert, []).append(holder * seats + slot)
    chosen = [
        [homes[e][(rank + t + k) % len(homes[e])] for k, e in enumerate(row)]
        for t, row in enumerate(ids.tolist())
    ]
    return torch.tensor(chosen, dtype=torch.int64, device=ids.device).view(ids.shape)


def forward(
    x_TH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    weights: MoEWeights,
    arithmetic: Arithmetic,
    group: Any = None,
    wait: Wait = lambda work: work.wait(),
) -> Tensor:
    """This rank's tokens through the whole layer; collective over ``group`` where there is one.

    ids_TK: physical, int64, -1 for an empty slot. w_TK: float32, the scaling factor applied.
    weights: S experts. wait: what is done with each collective's handle.
    """
    check_device(x_TH.device)
    seats = max(1, weights.experts.count)
    if group is None:
        terms = x_TH.new_zeros(*ids_TK.shape, weights.hidden_size, dtype=arithmetic.dtype)
        held = range(weights.experts.count)
        add_terms(terms, x_TH, ids_TK, w_TK, weights.experts, held, weights.activation, arithmetic)
    else:
        post = Post(group, x_TH.device, wait)
        leaving = _leaving(x_TH, ids_TK, w_TK, post.world_size, seats)
        counts = post.counts([len(parcel.x_mH) for parcel in leaving])
        arrived = [
            Parcel(x_mH=x, seat_mK=seat, w_mK=w)
            for x, seat, w in zip(
                post.exchange([p.x_mH for p in leaving], counts),
                post.exchange([p.seat_mK for p in leaving], counts),
                post.exchange([p.w_mK for p in leaving], counts),
                strict=True,
            )
        ]
        back = [int(((ids_TK // seats == rank) & (ids_TK >= 0)).sum()) for rank in post.ranks]
        returned = post.exchange(_served(arrived, weights, arithmetic), back)
        terms = _landed(returned, ids_TK, seats, weights.hidden_size, arithmetic)
    return finish(x_TH, terms, ids_TK, w_TK, weights, arithmetic, _owner(ids_TK, seats))


# --- the three steps ------------------------------------------------------------------------------


def _leaving(x_TH: Tensor, home_TK: Tensor, w_TK: Tensor, world: int, seats: int) -> list[Parcel]:
    """This rank's tokens by destination, each token once a destination, in token order."""
    parcels = []
    for rank in range(world):
        here = _owner(home_TK, seats) == rank
        rows = here.any(dim=1)
        seat = torch.where(here, home_TK - rank * seats, -1)
        parcels.append(Parcel(x_mH=x_TH[rows], seat_mK=seat[rows], w_mK=w_TK[rows]))
    return parcels


def _served(arrived: Sequence[Parcel], weights: MoEWeights, arithmetic: Arithmetic) -> list[Tensor]:
    """The terms [n, H] that each source asked for, in its (token, slot) order."""
    seat_mK = torch.cat([parcel.seat_mK for parcel in arrived])
    row_n, slot_n = (seat_mK >= 0).nonzero().unbind(1)
    x_nH = torch.cat([parcel.x_mH for parcel in arrived])[row_n]
    w_n1 = torch.cat([parcel.w_mK for parcel in arrived])[row_n, slot_n, None]
    terms = x_nH.new_zeros(len(row_n), 1, weights.hidden_size, dtype=arithmetic.dtype)
    held = range(weights.experts.count)
    add_terms(
        terms, x_nH, seat_mK[row_n, slot_n, None], w_n1, weights.experts, held,
        weights.activation, arithmetic,
    )  # fmt: skip
    asked = [int((parcel.seat_mK >= 0).sum()) for parcel in arrived]
    return list(terms[:, 0].split(asked))


def _landed(
    returned: Sequence[Tensor], home_TK: Tensor, seats: int, hidden: int, arithmetic: Arithmetic
) -> Tensor:
    """The terms of every slot at their owner, [T, K, H]; empty slots hold zeros."""
    terms = home_TK.new_zeros(*home_TK.shape, hidden, dtype=arithmetic.dtype)
    for rank, term_nH in enumerate(returned):
        terms[_owner(home_TK, seats) == rank] = term_nH
    return terms


def _owner(home_TK: Tensor, seats: int) -> Tensor:
    """The rank that computes each slot; -1 for an empty one."""
    return torch.where(home_TK < 0, -1, home_TK // seats)


# --- over a group ---------------------------------------------------------------------------------


class Post:
    """Variable all-to-alls of bytes over a group; on a GPU they go through the CPU if gloo can.

    gloo wants CPU tensors and allows ranks to share a GPU, which NCCL refuses.
    """

    def __init__(self, group: Any, device: torch.device, wait: Wait) -> None:
        import torch.distributed as dist

        self._dist, self._group, self._device = dist, group, device
        self.world_size = dist.get_world_size(group)
        self.ranks = range(self.world_size)
        gloo = "cpu:gloo" in dist.get_backend_config(group)
        self._wire = torch.device("cpu") if gloo else device
        # Waiting for NCCL only orders streams: there is nothing that could be interrupted.
        self._wait: Wait = wait if gloo else lambda work: work.wait()

    def counts(self, send: Sequence[int]) -> list[int]:
        """How many each rank sends to this one."""
        mine = torch.tensor(send, dtype=torch.int64, device=self._wire)
        theirs = torch.empty_like(mine)
        self._wait(self._dist.all_to_all_single(theirs, mine, group=self._group, async_op=True))
        return [int(count) for count in theirs.tolist()]

    def exchange(self, send: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        """send: one [rows, ...] a rank; back comes one a rank with ``receive`` rows each."""
        shape, dtype = send[0].shape[1:], send[0].dtype
        rows = torch.cat(list(send)).to(self._wire).contiguous()
        outgoing = (
            rows.view(len(rows), -1).view(torch.uint8)
            if rows.numel()
            else rows.new_empty(0, shape.numel() * dtype.itemsize, dtype=torch.uint8)
        )
        incoming = outgoing.new_empty(sum(receive), outgoing.shape[1])
        self._wait(
            self._dist.all_to_all_single(
                incoming, outgoing, list(receive), [len(part) for part in send],
                group=self._group, async_op=True,
            )
        )  # fmt: skip
        values = (
            incoming.view(dtype).view(-1, *shape) if len(incoming) else rows.new_empty(0, *shape)
        )
        return list(values.to(self._device).split(list(receive)))
