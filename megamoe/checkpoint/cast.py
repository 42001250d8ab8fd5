"""MXFP4 to NVFP4 without rounding, byte for byte what ModelOpt's lossless cast exports.

An MXFP4 block of 32 with the scale 2^k becomes two NVFP4 blocks of 16 with the E4M3 scale
2^(k - m), where the global scale is 2^m and m = k_max - 8. E4M3 holds 2^-9 to 2^8, so blocks
down to k_max - 17 are exact. Blocks of nothing but zeros are exact under any scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import E4M3, MXFP4, NVFP4, Quantised, encode, pack, power_of_two, unpack

BIAS = 127
TOP = 8  # the greatest power of two of an E4M3 scale is 2^8
BOTTOM = -9


def mxfp4_to_nvfp4(q: Quantised) -> Quantised:
    """The same values in NVFP4: [n, rows, columns], one global scale per expert in all row groups.

    Gate and up share theirs, as kernels want. Only the sign of zeros is lost: ModelOpt writes none.
    Raises BadInput where a block lies too far below the expert's greatest scale.
    """
    if q.format != MXFP4 or len(q.shape) != 3:
        raise bad_input("cast to nvfp4", f"of {q.format}", "is not of mxfp4 experts", "load mxfp4")
    place = first_inexact(q)
    if place is not None:
        expert, row, block = place
        raise bad_input(
            "cast to nvfp4", f"of expert {expert}, row {row}, block {block}",
            "is not exact: its scale is over 2^17 times below the expert's greatest",
            "keep it in mxfp4",
        )  # fmt: skip
    k, m = _exponents(q)
    exponents = (k - m).clamp(min=BOTTOM).repeat_interleave(2, dim=-1)
    codes = unpack(q.data)
    return Quantised(
        format=NVFP4,
        data=pack(torch.where(codes == 8, 0, codes)),
        scale=encode(power_of_two(exponents), E4M3),
        global_scale=power_of_two(m[:, 0]).to(torch.float32).repeat(1, q.row_groups),
        row_groups=q.row_groups,
    )


def first_inexact(q: Quantised) -> tuple[int, int, int] | None:
    """(expert, row, block of 32) of the first block that the cast would round, or None."""
    k, m = _exponents(q)
    nonzero = ((unpack(q.data) & 7) != 0).unflatten(-1, (-1, MXFP4.block[1])).any(dim=-1)
    inexact = (nonzero & (k - m < BOTTOM)).nonzero()
    if not len(inexact):
        return None
    expert, row, block = inexact[0].tolist()
    return expert, row, block


def _exponents(q: Quantised) -> tuple[Tensor, Tensor]:
    """k of each block [n, rows, blocks] and m of each expert [n, 1, 1], int64.

    A scale byte of 0 is how MXFP4 writes a block of zeros, so it does not set the range.
    """
    assert q.scale is not None
    k = q.scale.to(torch.int64) - BIAS
    sets_range = (q.scale > 0).flatten(1)
    k_max = torch.where(sets_range, k.flatten(1), -BIAS).amax(dim=1)
    k_max = torch.where(sets_range.any(dim=1), k_max, 0)
    return k, (k_max - TOP)[:, None, None]
