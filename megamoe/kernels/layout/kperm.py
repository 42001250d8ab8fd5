"""The column permutation of the NVFP4 pull kernel, which gives each lane's eight values one scale.

Within every chunk of `period` columns, runs of four stay together and change places. The same
permutation is due on the hidden dimension of the staged activations, and on the gate rows and the
up rows of w13, so that the SwiGLU output meets the permuted columns of w2. Source: FlashInfer
0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_nvfp4_bf16_pull_cutedsl/weights.py.
"""

from __future__ import annotations

from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_multiple
from megamoe.kernels.layout.fragment import view_as

KPERM_PERIODS: Final = (0, 32, 64)

# A chunk of runs of four, viewed as three factors, and the order in which those are walked.
_FACTORS: Final = {32: ((2, 2, 2), (2, 0, 1)), 64: ((4, 2, 2), (1, 2, 0))}


def permute_columns(x: torch.Tensor, period: int, dim: int = -1) -> torch.Tensor:
    """Return `x` with dimension `dim` in the kernel's order: result[p] = x[pi(p)].

    Any dtype; the length is a multiple of `period` (0: returned as it is). A contiguous copy.
    """
    return _permute(x, period, dim, inverse=False)


def unpermute_columns(x: torch.Tensor, period: int, dim: int = -1) -> torch.Tensor:
    """Inverse of `permute_columns`."""
    return _permute(x, period, dim, inverse=True)


def permute_payload(payload: torch.Tensor, period: int) -> torch.Tensor:
    """`permute_columns` for packed FP4: uint8 [..., K/2], K a multiple of `period`, same shape.

    Runs of four columns are two bytes, so no nibble is unpacked.
    """
    return _permute_payload(payload, period, inverse=False)


def unpermute_payload(payload: torch.Tensor, period: int) -> torch.Tensor:
    """Inverse of `permute_payload`."""
    return _permute_payload(payload, period, inverse=True)


def swap_scale_pairs(scales: torch.Tensor) -> torch.Tensor:
    """Exchange the odd scale of row r < 8 with the even one of row r + 8; its own inverse.

    In every tile of 16 rows and 2 scale columns.

    [E, N, K/16], N a multiple of 16 and K of 32, to a copy of the same shape: the pair of scales
    that a lane reads for one row then holds one scale of each of its two rows.
    """
    experts, rows, groups = scales.shape
    check_multiple("the number of scale rows", rows, 16)
    check_multiple("the number of scale columns", groups, 2)
    tiles = scales.reshape(experts, rows // 16, 2, 8, groups // 2, 2)
    return tiles.transpose(2, 5).contiguous().view(scales.shape)


def _permute(
    x: torch.Tensor, period: int, dim: int, *, inverse: bool, run: int = 4
) -> torch.Tensor:
    if period not in KPERM_PERIODS:
        raise bad_input("nvfp4_kperm", period, "is none of 0, 32, 64", "use 64, the default")
    if period == 0:
        return x
    dim %= x.ndim
    length = x.shape[dim]
    check_multiple("the length of the permuted dimension", length, period // 4 * run)
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    sizes, order = _FACTORS[period]
    if inverse:
        sizes, order = tuple(sizes[i] for i in order), tuple(order.index(i) for i in range(3))
    head, tail = x.shape[:dim], x.shape[dim + 1 :]
    split = x.reshape(*head, length * 4 // (period * run), *sizes, run, *tail)
    first = dim + 1
    dims = list(range(split.ndim))
    dims[first : first + 3] = [first + factor for factor in order]
    return split.permute(dims).contiguous().view(x.shape)


def _permute_payload(payload: torch.Tensor, period: int, *, inverse: bool) -> torch.Tensor:
    check_dtype("payload", payload, torch.uint8)
    if period == 0:
        return payload
    check_multiple("the number of bytes in a row", payload.shape[-1], 2)
    runs = view_as(payload, torch.int16)
    return _permute(runs, period, -1, inverse=inverse, run=1).view(torch.uint8)
