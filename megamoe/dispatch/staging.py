"""From the caller's tensors to what a kernel takes: ids checked on the device, empty slots as the
kernel wants them, unequal counts padded. Nothing here reads back from a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.kernels.base import Batch, Datasheet


def clean_ids(ids: Tensor, num_experts: int, sticky: Tensor) -> Tensor:
    """ids as int64, those outside [-1, E) replaced by -1; any such raises the sticky bool [1]."""
    ids = ids.to(torch.int64)
    bad = (ids < -1) | (ids >= num_experts)
    sticky |= bad.any()
    return torch.where(bad, -1, ids)


def stage(x: Tensor, ids: Tensor, weights: Tensor, *, sheet: Datasheet, tokens: int) -> Batch:
    """One round's batch as the datasheet wants it.

    x: BF16 [n, H]; ids: int64 [n, k], physical, -1 for an empty slot; weights: float32 [n, k].
    tokens: the greatest n of any rank.
    """
    weights = torch.where(ids < 0, 0.0, weights)  # a NaN on an empty slot must not be read
    if sheet.equal_counts and x.shape[0] < tokens:
        missing = tokens - x.shape[0]
        x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
        ids = torch.cat([ids, ids.new_full((missing, ids.shape[1]), -1)])
        weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
    if sheet.empty_slots == "stale":
        x, ids = _occupied(x, ids)
    return Batch(
        x=x.contiguous(),
        ids=ids.to(sheet.id_dtype).contiguous(),
        weights=weights.contiguous(),
        tokens=tokens,
    )


def _occupied(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Empty slots take an expert of their own row, at weight 0; a row of none is staged as 0.

    An expert of the row itself is computed anyway, so no other rank gets work. Rows of none go to
    expert 0, whose answer to a row of zeros is finite: 0 times it is 0.
    """
    own = ids.amax(dim=1, keepdim=True) if ids.shape[1] else ids
    filled = torch.where(ids < 0, own.clamp(min=0), ids)
    return torch.where(own < 0, 0.0, x), filled
