"""The sample that a budget comes from: enough tokens of the batch's own input classes.

A batch is its own sample. Where it is short, its rows return with every element moved by a few
units in BF16's last place, which keeps zeros, outliers, saturation and denormals, and the row's
routing.

A batch may mix classes: a row of denormals errs far more than its neighbours, and must not lend
them its budget, nor may a chain of rows, each a little harder than the last. Tokens are one class
where their errors lie within a factor of its least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.reference.case import Inputs
from megamoe.reference.hashing import hashed

TOKENS = 256  # a class's sample has at least so many
JITTER = 3  # units in the last place, either way
SPAN = 4.0  # the factor
SEED = 0x5EED


def classes(key: Tensor) -> Tensor:
    """The class of each token, int64 [T], 0 where the errors are least; ``key`` is a positive
    error. Each class begins with the least error that is past the span of the one before.

    Zero and non-finite keys (rows without any finite output to measure) are class -1.
    """
    usable = key.isfinite() & (key > 0)
    ranked = key[usable].sort().values.cpu()
    starts, first = [], 0
    while first < len(ranked):
        starts.append(ranked[first])
        first = int(torch.searchsorted(ranked, SPAN * ranked[first], right=True))
    bounds = torch.stack(starts).to(key.device) if starts else key.new_zeros(0)
    return torch.where(usable, torch.searchsorted(bounds, key, right=True) - 1, -1)


def companions(inputs: Inputs, members: Tensor, count: int) -> Inputs:
    """``count`` jittered copies of the tokens ``members`` (an int64 index), taken in turn."""
    turn = torch.arange(count, device=members.device)
    row = members[turn % len(members)]
    jittered = inputs.rows(row)
    return Inputs(
        jitter(jittered.x, turn), jittered.topk, inputs.weights, inputs.rank, jittered.owner
    )


def jitter(x: Tensor, copy: Tensor) -> Tensor:
    """BF16 [n, H] with each element moved by up to ``JITTER`` units, the same for equal magnitudes.

    That keeps pairs which cancel exactly; ``copy`` int64 [n] makes rows differ. Zeros, infinities
    and NaN stay, no sign changes, and nothing finite becomes infinite.
    """
    code = x.contiguous().view(torch.int16).to(torch.int64)
    sign, magnitude = code & 0x8000, code & 0x7FFF
    step = hashed((copy[:, None] << 15 | magnitude) & 0xFFFFFFFF, SEED) % (2 * JITTER + 1) - JITTER
    moved = (magnitude + step).clamp(1, 0x7F7F)
    moved = torch.where((magnitude == 0) | (magnitude >= 0x7F80), magnitude, moved)
    return _signed16(sign | moved).view(torch.bfloat16)


def _signed16(code: Tensor) -> Tensor:
    return torch.where(code >= 0x8000, code - 0x10000, code).to(torch.int16)
