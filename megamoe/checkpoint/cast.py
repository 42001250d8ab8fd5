"""MXFP4 to NVFP4 without rounding, byte for byte what ModelOpt's lossless cast exports.

An MXFP4 block of 32 with the scale 2^k becomes two NVFP4 blocks of 16 with the E4M3 scale
2^(k - m), where the global scale is 2^m and m = k_max - 8. E4M3 holds 2^-9 to 2^8, so blocks
down to k_max - 17 are exact. Blocks of nothing but zeros are exact under any scale.
"""

from __future__ import annotations

import torch

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
    assert q.scale is not None
    k = q.scale.to(torch.int64) - BIAS
    # A scale byte of 0 is how MXFP4 writes an all-zero block; it does not set the range.
    sets_range = q.scale > 0
    lowest = torch.iinfo(torch.int64).min
    k_max = torch.where(sets_range, k, lowest).flatten(1).amax(dim=1)
    k_max = torch.where(sets_range.flatten(1).any(dim=1), k_max, 0)
    m = (k_max - TOP)[:, None, None]
    codes = unpack(q.data).unflatten(-1, (-1, MXFP4.block[1]))
    nonzero = ((codes & 7) != 0).any(dim=-1)
    out = nonzero & (k - m < BOTTOM)
    if bool(out.any()):
        expert, row, block = out.nonzero()[0].tolist()
        low, top = int(k[expert, row, block]), int(k_max[expert])
        raise bad_input(
            "cast to nvfp4", f"of expert {expert}, row {row}, block {block} with scale 2^{low}",
            f"is not exact: it lies more than 2^17 below the expert's greatest, 2^{top}",
            "load the checkpoint as mxfp4",
        )  # fmt: skip
    scale = encode(power_of_two((k - m).clamp(min=BOTTOM)), E4M3).repeat_interleave(2, dim=-1)
    positive_zero = torch.where(codes == 8, 0, codes).flatten(-2)
    factor = power_of_two(k_max - TOP).to(torch.float32)[:, None].repeat(1, q.row_groups)
    return Quantised(
        format=NVFP4, data=pack(positive_zero), scale=scale, global_scale=factor,
        row_groups=q.row_groups,
    )  # fmt: skip
