"""How the SM90 FP4 kernels hold eight FP4 codes in a 32-bit word, and words in a matrix fragment.

Both decoders take eight magnitudes from fixed nibbles of a word and the eight signs by two masks,
so the signs are moved beforehand: the sign of column k < 4 stands in nibble 2k + 1, of column k >=
4 in nibble 2k - 8. Magnitudes stay. The pull kernels also exchange words between rows and columns,
in the order in which one `ldmatrix` hands them to the lanes of an m64k32 fragment.

Source: FlashInfer 0.7.4,
data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu (pull),
megamoe/weights.py (standalone).
"""

from __future__ import annotations

from typing import Final

import torch

from megamoe.kernels.layout._checks import check_dtype, check_multiple, check_rank

_MAGNITUDES: Final = 0x77777777
# Nibble of the column -> nibble of its sign, and the distance in bits.
_SIGN_NIBBLE: Final = tuple(2 * k + 1 if k < 4 else 2 * k - 8 for k in range(8))

_ROWS: Final = 16
_COLUMNS: Final = 64


def braid_signs(payload: torch.Tensor) -> torch.Tensor:
    """Move the signs of canonical bytes to where the decoders mask them.

    uint8 [..., K/2], K a multiple of 8, to the same shape; magnitudes keep their nibbles.
    """
    words = _words(payload)
    braided = words & _MAGNITUDES
    for column, nibble in enumerate(_SIGN_NIBBLE):
        braided |= _moved(words, 4 * column + 3, 4 * nibble + 3)
    return braided.view(torch.uint8)


def unbraid_signs(payload: torch.Tensor) -> torch.Tensor:
    """Inverse of `braid_signs`: uint8 [..., K/2] to the same shape."""
    words = _words(payload)
    plain = words & _MAGNITUDES
    for column, nibble in enumerate(_SIGN_NIBBLE):
        plain |= _moved(words, 4 * nibble + 3, 4 * column + 3)
    return plain.view(torch.uint8)


def to_fragments(payload: torch.Tensor) -> torch.Tensor:
    """Return canonical bytes as the pull kernels' matrix fragments.

    uint8 [E, N, K/2], N a multiple of 16 and K of 64, to a contiguous tensor of the same shape. In
    each 16-row, 64-column tile, a 16-bit unit (4 columns) of row r and the one of row r + 8 become
    neighbours, with their signs braided over the pair; bit 2 of the unit's column then picks the
    row.
    """
    halves = _halves(payload)
    experts, rows, units = halves.shape
    tiles = halves.reshape(experts, rows // 16, 2, 8, units // 16, 2, 2, 4)
    #                             0        1          2  3  4            5  6  7
    paired = tiles.permute(0, 1, 6, 3, 4, 5, 7, 2).contiguous()
    return braid_signs(paired.view(experts, rows, units).view(torch.uint8))


def from_fragments(payload: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_fragments`: uint8 [E, N, K/2] to a contiguous tensor of the same shape."""
    halves = _halves(unbraid_signs(payload))
    experts, rows, units = halves.shape
    paired = halves.view(experts, rows // 16, 2, 8, units // 16, 2, 4, 2)
    tiles = paired.permute(0, 1, 7, 3, 4, 5, 2, 6).contiguous()
    return tiles.view(experts, rows, units).view(torch.uint8)


def _moved(words: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return one bit of int32 words, moved; shift before mask, since `>>` copies the sign bit."""
    shifted = words << (target - source) if target > source else words >> (source - target)
    return shifted & (-(1 << 31) if target == 31 else 1 << target)


def _halves(payload: torch.Tensor) -> torch.Tensor:
    check_dtype("payload", payload, torch.uint8)
    check_rank("payload", payload, 3)
    check_multiple("the number of FP4 rows", payload.shape[1], _ROWS)
    check_multiple("the number of FP4 columns", payload.shape[2] * 2, _COLUMNS)
    return view_as(payload, torch.int16)


def _words(payload: torch.Tensor) -> torch.Tensor:
    check_dtype("payload", payload, torch.uint8)
    check_multiple("the number of bytes in a row", payload.shape[-1], 4)
    return view_as(payload, torch.int32)


def view_as(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as wider integers; copied only where strides or the offset forbid the view."""
    shape = (*payload.shape[:-1], payload.shape[-1] // dtype.itemsize)
    # Flat first: a contiguous tensor may have any stride where its extent is 1 or 0.
    flat = payload.reshape(-1)
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
