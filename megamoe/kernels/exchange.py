"""All-to-alls of rows over a torch.distributed group, for kernels that bring none of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.kernels.base import Context


class Exchange:
    """All-to-alls over the group: on the device with NCCL, through pinned memory with gloo."""

    def __init__(self, context: Context) -> None:
        import torch.distributed as dist

        self._dist, self._context = dist, context
        backends = dict(
            part.split(":") for part in dist.get_backend_config(context.group).split(",")
        )
        device = context.device
        alone = context.machine.ranks_per_gpu == 1
        if device.type == "cuda" and backends.get("cuda") == "nccl" and alone:
            self._wire = device
        elif "cpu" in backends:
            self._wire = torch.device("cpu")
        else:
            what = "shares a GPU with another rank" if not alone else f"is on {device}"
            raise bad_input(
                "group", f"of {backends}", f"cannot carry tensors of a rank that {what}",
                "initialise torch.distributed with backend 'cpu:gloo,cuda:nccl'",
            )  # fmt: skip

    def counts(self, counts: Tensor) -> Tensor:
        """int64 [W * S], this rank's slots by expert, to [W, S]: every rank's for this one's."""
        outgoing = self._to_wire(counts)
        incoming = torch.empty_like(outgoing)
        self._all_to_all(incoming, outgoing, None, None)
        return incoming.to(counts.device).view(self._context.request.world_size, -1)

    def rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """BF16 [sum(sent), H], in rank order, to what the ranks sent to this one, likewise."""
        outgoing = self._to_wire(rows.contiguous())
        incoming = self._empty(sum(received), rows.shape[1], dtype=rows.dtype)
        self._all_to_all(incoming, outgoing, list(received), list(sent))
        return incoming.to(rows.device, non_blocking=True)

    def _all_to_all(self, incoming: Tensor, outgoing: Tensor, received: Any, sent: Any) -> None:
        # As bytes: gloo does not know every type.
        work = self._dist.all_to_all_single(
            incoming.view(torch.uint8) if received else incoming,
            outgoing.view(torch.uint8) if received else outgoing,
            received, sent, group=self._context.group, async_op=True,
        )  # fmt: skip
        peers = self._context.peers
        if self._wire.type == "cpu" and peers is not None:
            peers.wait(work)
        else:
            work.wait()

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self._wire.type:
            return tensor
        held = self._empty(*tensor.shape, dtype=tensor.dtype)
        held.copy_(tensor)  # waits for the device
        return held

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        pinned = self._context.device.type == "cuda" and self._wire.type == "cpu"
        return torch.empty(shape, dtype=dtype, device=self._wire, pin_memory=pinned)
