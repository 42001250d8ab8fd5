"""Weights of `flashinfer.megamoe`: NVFP4 rows and MXFP4 tiles, FP4 codes and scales side by side.

From canonical bytes: FlashInfer's own transform takes Marlin order (`to_marlin`), from which it
builds these bytes; moving the signs (`braid_signs`) gets there directly. Source: FlashInfer 0.7.4,
megamoe/weights.py; decoders in data/include/flashinfer/megamoe/{nvfp4,mxfp4}_dequant.cuh.

Both decoders turn code * scale into one E4M3 code, so block scales must lie in a range and the
rest in one fp32 factor per expert (`l1_global_scales`, `l2_global_scales`), shared by gate and up.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_shape
from megamoe.kernels.layout.e4m3 import E4M3_MAX, FP4_MAGNITUDES, fp4_product_errors
from megamoe.kernels.layout.fragment import braid_signs, unbraid_signs
from megamoe.kernels.layout.mxfp4_window import (
    MXFP4_BLOCK,
    FoldedMxfp4,
    fold_window,
    unfold_window,
)
from megamoe.kernels.layout.nvfp4_balance import (
    NVFP4_BLOCK,
    STANDALONE_TOP,
    BalancedNvfp4,
    balance_nvfp4,
    check_e4m3_scales,
)
from megamoe.kernels.layout.pull_mxfp4 import check_fp4_experts, chunks, decode_factor, floor_byte
from megamoe.kernels.layout.pull_nvfp4 import nvfp4_operand
from megamoe.kernels.layout.records import CanonicalExperts, Exactness, fp4_exactness
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up

_NVFP4_ROW: Final = 80  # 64 bytes of codes, 8 scales, 8 of padding
_TILE: Final = 128
# The byte of 2**-5: with offsets of 1 to 12, scales of 2**-5 to 2**6.
_MXFP4_FLOOR: Final = 127 - 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandaloneWeights:
    """Both matrices and their factors, as `nvfp4_mega_moe` or `mxfp4_mega_moe` takes them.

    NVFP4: `l1` uint8 [E, 2I, H/128 * 80], `l2` uint8 [E, H, I/128 * 80]. MXFP4: uint8
    [E, N/128 * K/128, 128 * 68]. `l1_global` and `l2_global` fp32 [E].
    """

    l1: torch.Tensor
    l2: torch.Tensor
    l1_global: torch.Tensor
    l2_global: torch.Tensor


def pack_standalone_nvfp4(
    experts: CanonicalExperts,
) -> tuple[StandaloneWeights, Exactness, Exactness]:
    """Return the NVFP4 weights, and what balancing the scales changed in w13 and in w2.

    w13 uint8 [E, 2I, H/2] with E4M3 bytes [E, 2I, H/16] and `w13_global` fp32 [E] or [E, 2] (gate,
    up), w2 likewise; H and I multiples of 128; global scales of None are 1. Block scales are moved
    to at most 72 (`balance_nvfp4`). What the decoder rounds on top: `standalone_nvfp4_exactness`.
    """
    w13_scale, w2_scale = check_fp4_experts(experts)
    first = _balance(experts.w13, w13_scale, experts.w13_global)
    second = _balance(experts.w2, w2_scale, experts.w2_global)
    weights = StandaloneWeights(
        l1=_nvfp4_rows(first.payload, first.scales, gate_up=True),
        l2=_nvfp4_rows(second.payload, second.scales, gate_up=False),
        l1_global=first.global_scale,
        l2_global=second.global_scale,
    )
    return weights, first.exactness, second.exactness


def unpack_standalone_nvfp4(weights: StandaloneWeights) -> CanonicalExperts:
    """Return the canonical bytes in the pack (balanced scales): the inverse on its image."""
    w13, w13_scale = _nvfp4_canonical(weights.l1, gate_up=True)
    w2, w2_scale = _nvfp4_canonical(weights.l2, gate_up=False)
    return CanonicalExperts(
        w13=w13,
        w13_scale=w13_scale,
        w13_global=weights.l1_global,
        w2=w2,
        w2_scale=w2_scale,
        w2_global=weights.l2_global,
    )


def standalone_nvfp4_exactness(payload: torch.Tensor, scales: torch.Tensor) -> Exactness:
    """Report the elements whose code * scale is no E4M3 number; counts [E, N, K/16].

    `payload` uint8 [E, N, K/2], `scales` E4M3 bytes [E, N, K/16] as they are in the pack.
    """
    check_e4m3_scales("block scales", scales)
    return fp4_exactness(payload, scales, fp4_product_errors(0), NVFP4_BLOCK)


def standalone_nvfp4_operand(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what the kernel multiplies with, RN_E4M3(code * scale), in logical order.

    uint8 [..., K/2] and E4M3 bytes [..., K/16] to float8_e4m3fn [..., K].
    """
    return nvfp4_operand(payload, scales, 0)


def pack_standalone_mxfp4(experts: CanonicalExperts) -> StandaloneWeights:
    """Return the MXFP4 weights: block scales of 2**-5 to 2**6, the rest in the factors.

    Shapes as `pack_pull_mxfp4`, whose window this is too: `window_exactness` tells what it rounds,
    and nothing else is lost.
    """
    w13_scale, w2_scale = check_fp4_experts(experts)
    l1, l1_global = _mxfp4_tiles(experts.w13, w13_scale, gate_up=True)
    l2, l2_global = _mxfp4_tiles(experts.w2, w2_scale, gate_up=False)
    return StandaloneWeights(l1=l1, l2=l2, l1_global=l1_global, l2_global=l2_global)


def unpack_standalone_mxfp4(weights: StandaloneWeights, *, hidden_size: int) -> CanonicalExperts:
    """Return the canonical bytes that hold exactly what the kernel computes with.

    The inverse of `pack_standalone_mxfp4` on its image; -0 was written as +0. Tiles do not tell how
    many of them make a row, hence `hidden_size`.
    """
    h128 = hidden_size // _TILE
    tiles = weights.l2.shape[1]
    if hidden_size <= 0 or hidden_size % _TILE or tiles % h128:
        raise bad_input("hidden_size", hidden_size, f"does not fit {tiles} tiles of w2", "mend it")
    i128 = tiles // h128
    w13, w13_scale = _mxfp4_canonical(weights.l1, weights.l1_global, 2 * i128, h128)
    w2, w2_scale = _mxfp4_canonical(weights.l2, weights.l2_global, h128, i128)
    return CanonicalExperts(
        w13=deinterleave_gate_up(w13, PULL_ROWS),
        w13_scale=deinterleave_gate_up(w13_scale, PULL_ROWS),
        w2=w2,
        w2_scale=w2_scale,
    )


def standalone_mxfp4_exactness(payload: torch.Tensor, scales: torch.Tensor) -> Exactness:
    """Report what the MXFP4 decoder does to scales as they are: counts [E, N, K/32].

    It saturates at 448 and flushes below 2**-6. For bytes that bypass `pack_standalone_mxfp4`.
    """
    check_dtype("E8M0 scales", scales, torch.uint8)
    return fp4_exactness(payload, scales, _mxfp4_decoder_errors(), MXFP4_BLOCK)


def _balance(
    payload: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None
) -> BalancedNvfp4:
    if global_scale is None:
        global_scale = torch.ones(payload.shape[0], dtype=torch.float32, device=payload.device)
    return balance_nvfp4(payload, scales, global_scale, top=STANDALONE_TOP)


def _nvfp4_rows(payload: torch.Tensor, scales: torch.Tensor, *, gate_up: bool) -> torch.Tensor:
    experts, rows, row_bytes = payload.shape
    blocks = row_bytes // 64
    out = torch.zeros((experts, rows, blocks, _NVFP4_ROW), dtype=torch.uint8, device=payload.device)
    for part in chunks(experts):
        codes, bytes_ = payload[part], scales[part]
        if gate_up:
            codes, bytes_ = (interleave_gate_up(x, PULL_ROWS) for x in (codes, bytes_))
        count = codes.shape[0]
        out[part, ..., :64] = braid_signs(codes).view(count, rows, blocks, 64)
        out[part, ..., 64:72] = bytes_.reshape(count, rows, blocks, 8)
    return out.flatten(-2)


def _nvfp4_canonical(rows: torch.Tensor, *, gate_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = rows.reshape(*rows.shape[:2], rows.shape[2] // _NVFP4_ROW, _NVFP4_ROW)
    payload = unbraid_signs(blocks[..., :64].flatten(-2))
    scales = blocks[..., 64:72].flatten(-2)
    if gate_up:
        payload, scales = (deinterleave_gate_up(x, PULL_ROWS) for x in (payload, scales))
    return payload, scales


def _mxfp4_tiles(
    payload: torch.Tensor, scales: torch.Tensor, *, gate_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, row_bytes = payload.shape
    n128, k128 = rows // _TILE, row_bytes // 64
    out = torch.empty((experts, n128 * k128, _TILE * 68), dtype=torch.uint8, device=payload.device)
    factor = torch.empty(experts, dtype=torch.float32, device=payload.device)
    for part in chunks(experts):
        codes, bytes_ = payload[part], scales[part]
        if gate_up:
            codes, bytes_ = (interleave_gate_up(x, PULL_ROWS) for x in (codes, bytes_))
        folded, count = fold_window(codes, bytes_), codes.shape[0]
        # 16-byte chunk c of row r at (c * 128 + r) * 16, then 4 scales a row.
        rows16 = braid_signs(folded.payload).reshape(count, n128, _TILE, k128, 4, 16)
        tiles = rows16.permute(0, 1, 3, 4, 2, 5).reshape(count, n128 * k128, _TILE * 64)
        rows4 = (folded.offset + (_MXFP4_FLOOR - 1)).reshape(count, n128, _TILE, k128, 4)
        out[part, :, : _TILE * 64] = tiles
        out[part, :, _TILE * 64 :] = rows4.transpose(2, 3).reshape(count, n128 * k128, _TILE * 4)
        factor[part] = decode_factor(folded.floor_byte)
    return out, factor


def _mxfp4_canonical(
    tiles: torch.Tensor, factor: torch.Tensor, n128: int, k128: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload and scales, gate and up rows still interleaved."""
    experts = tiles.shape[0]
    check_shape("tiles", tiles, (experts, n128 * k128, _TILE * 68))
    codes = tiles[..., : _TILE * 64].reshape(experts, n128, k128, 4, _TILE, 16)
    codes = codes.permute(0, 1, 4, 2, 3, 5).reshape(experts, n128 * _TILE, k128 * 64)
    offset = tiles[..., _TILE * 64 :].reshape(experts, n128, k128, _TILE, 4) - (_MXFP4_FLOOR - 1)
    offset = offset.transpose(2, 3).reshape(experts, n128 * _TILE, k128 * 4)
    folded = FoldedMxfp4(payload=unbraid_signs(codes), offset=offset, floor_byte=floor_byte(factor))
    return unfold_window(folded)


@functools.cache
def _mxfp4_decoder_errors() -> torch.Tensor:
    """Return the decoder's relative error by scale byte and magnitude: fp64 [256, 8]."""
    scales = torch.tensor(
        [2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64, device="cpu"
    )
    true = scales[:, None] * torch.tensor(FP4_MAGNITUDES, dtype=torch.float64, device="cpu")
    got = torch.where(true < 2.0**-6, 0.0, true.clamp(max=E4M3_MAX))
    return torch.where(true == 0, 0.0, (got - true) / true)
