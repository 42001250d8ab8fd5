"""From the caller's tensors to the bytes in a kernel's buffers: one launch on a GPU.

Ids are checked and mapped to physical experts, weights scaled, empty slots written as the kernel
wants them, rows coded. Nothing here reads back from a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import PLAIN_BF16, Format, quantise
from megamoe.kernels import fused
from megamoe.kernels.base import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staging:
    """How one layer's calls are staged; made once, when the layer is prepared.

    num_experts: logical ids lie in [-1, num_experts), -1 for an empty slot. sticky: bool [1],
    raised by any other id, which becomes an empty slot. replicas: int64 [num_experts, most], the
    physical experts that hold a logical one, and counts: int64 [num_experts], how many; None where
    physical ids are the logical ones. fmt: what rows are written in, BF16, or E4M3 under a scale.
    stale: empty slots take an expert of their own row at weight 0, and rows without any are written
    as zeros. order: int32 [period]; in each period of columns, place p is taken by column order[p].
    """

    num_experts: int
    rank: int
    sticky: Tensor
    replicas: Tensor | None = None
    counts: Tensor | None = None
    fmt: Format = PLAIN_BF16
    stale: bool = False
    order: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        into: Batch,
        *,
        factor: float = 1.0,
        first: int = 0,
    ) -> None:
        """Fill ``into`` from a call's rows.

        x: BF16 [n, H]; ids: integers [n, k], logical; weights: floats [n, k], multiplied by factor
        in float32; n is ``into.count``, any strides. first: the number of the first row in the
        call, which the choice among replicas goes by.
        """
        if fused.serves(x):
            fused.stage(self, x, ids, weights, into, factor=factor, first=first)
            return
        n = into.count
        found = self.physical(ids, first)
        into.ids[n:] = -1
        into.weights[n:] = 0.0
        wide = weights.to(torch.float32)
        wide = wide if factor == 1.0 else wide * factor
        into.weights[:n] = torch.where(found < 0, 0.0, wide)
        if self.stale:
            x, found = _occupied(x, found)
        into.ids[:n] = found
        self._rows(x, into)

    def physical(self, ids: Tensor, first: int = 0) -> Tensor:
        """Logical ids [n, k] to physical ones, int64, -1 for an empty slot; raises the flag."""
        ids = ids.to(torch.int64)
        bad = (ids < -1) | (ids >= self.num_experts)
        self.sticky.logical_or_(bad.any())
        ids = torch.where(bad, -1, ids)
        if self.replicas is None or self.counts is None or self.num_experts == 0:
            return ids
        held = ids.clamp(min=0)
        rows = torch.arange(first, first + ids.shape[0], device=ids.device)[:, None]
        slots = torch.arange(ids.shape[1], device=ids.device)
        choice = (self.rank + rows + slots) % self.counts[held]
        return torch.where(ids < 0, -1, self.replicas[held, choice])

    def _rows(self, x: Tensor, into: Batch) -> None:
        n = into.count
        if self.fmt == PLAIN_BF16:
            if into.x is not x:
                into.x[:n] = x
            return
        coded = quantise(x, self.fmt)
        data = coded.data.view(torch.uint8)
        if self.order is not None:
            data = data.unflatten(1, (-1, len(self.order)))[..., self.order.to(torch.int64)]
            data = data.flatten(1)
        into.x.view(torch.uint8)[:n] = data
        if into.scales is not None and coded.scale is not None:
            columns = into.scales.shape[1] if self.fmt.block[1] == 0 else coded.scale.shape[1]
            scale = coded.scale.expand(-1, columns)
            target = into.scales[:n, :columns]
            same = target.dtype == scale.dtype
            (target if same else target.view(scale.dtype)).copy_(scale)


def _occupied(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Empty slots take an expert of their own row; a row of none is zeros for expert 0.

    An expert of the row itself is computed anyway, so no other rank gets work. Expert 0's answer to
    a row of zeros is finite: 0 times it is 0.
    """
    own = ids.amax(dim=1, keepdim=True) if ids.shape[1] else ids
    filled = torch.where(ids < 0, own.clamp(min=0), ids)
    return torch.where(own < 0, 0.0, x), filled
