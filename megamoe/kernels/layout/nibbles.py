"""FP4 codes and their bytes: canonical (even column in the low nibble) and Marlin order."""

from __future__ import annotations

import torch

from megamoe.kernels.layout._checks import check_dtype, check_multiple


def unpack_codes(payload: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes (uint8, 0 to 15) of canonical bytes: [..., K/2] to [..., K]."""
    check_dtype("payload", payload, torch.uint8)
    return torch.stack((payload & 15, payload >> 4), dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return canonical bytes of 4-bit codes: uint8 [..., K] to [..., K/2].

    Codes above 15 are not checked for.
    """
    check_dtype("codes", codes, torch.uint8)
    check_multiple("the number of FP4 columns", codes.shape[-1], 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def to_marlin(payload: torch.Tensor) -> torch.Tensor:
    """Reorder canonical bytes into Marlin order.

    Byte b of each 4-byte word then holds column b in its *high* nibble and column b + 4 in its low
    one. uint8 [..., K/2], K a multiple of 8, to the same shape. The order that `flashinfer.megamoe`
    takes (FlashInfer 0.7.4, megamoe/weights.py); our own layouts for it start from canonical bytes.
    """
    left, right = _words(payload).unbind(-2)
    even = ((left & 15) << 4) | (right & 15)
    odd = (left & 0xF0) | (right >> 4)
    return torch.stack((even, odd), dim=-1).flatten(-3)


def from_marlin(payload: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_marlin`: uint8 [..., K/2] to the same shape."""
    even, odd = _words(payload).unbind(-1)
    left = (even >> 4) | (odd & 0xF0)
    right = (even & 15) | ((odd & 15) << 4)
    return torch.stack((left, right), dim=-2).flatten(-3)


def _words(payload: torch.Tensor) -> torch.Tensor:
    check_dtype("payload", payload, torch.uint8)
    check_multiple("the number of bytes in a row", payload.shape[-1], 4)
    return payload.reshape(*payload.shape[:-1], payload.shape[-1] // 4, 2, 2)
