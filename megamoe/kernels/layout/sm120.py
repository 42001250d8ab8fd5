"""Weights of the SM120 kernels: views for their loaders, and the bytes those loaders make.

FlashInfer's SM120 backends rearrange canonical weights themselves, so an adapter hands them the
checkpoint's bytes under another dtype (`view_mxfp4`): nothing is copied on our side. The packs
below are what the kernels then read, for `transformed_weights` and for tests without a GPU.
Source: FlashInfer 0.7.4, moe_ep/kernel_src/sm120/split_cutedsl_megakernel/shim/weights.py,
moe_ep/backends/mega/kernel/sm120/mxfp8_mxfp8_bf16_cutedsl/weights.py,
moe_ep/backends/mega/kernel/sm120/mxfp4_mxfp8_bf16_cake/cake_weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_multiple, check_rank, check_shape
from megamoe.kernels.layout.fragment import view_as
from megamoe.kernels.layout.pull_bf16 import check_expert_shapes
from megamoe.kernels.layout.records import CanonicalExperts
from megamoe.kernels.layout.rows import PULL_ROWS, deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layout.scale_planes import from_blocked, to_blocked

_BLOCK: Final = 32
_VECTOR_COLUMNS: Final = 128
_VECTOR_WORDS: Final = 16

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sm120Weights:
    """Both matrices of the split (MXFP4) or the MXFP8 kernel.

    Split: `fc1` float4_e2m1fn_x2 [E, 2I, H/2], `fc2` [E, H, I/2]. MXFP8: e4m3 [E, H, 2I] and
    [E, I, H] with stride 1 in dimension 1. Scales float8_e8m0fnu [E, bytes], in 128x4 atoms.
    """

    fc1: torch.Tensor
    fc1_scale: torch.Tensor
    fc2: torch.Tensor
    fc2_scale: torch.Tensor

    def transformed(self) -> tuple[Pair, Pair]:
        """Return what `MegaConfig.transformed_weights` takes."""
        return (self.fc1, self.fc1_scale), (self.fc2, self.fc2_scale)


def view_mxfp4(experts: CanonicalExperts) -> CanonicalExperts:
    """View canonical MXFP4 bytes as float4_e2m1fn_x2 and float8_e8m0fnu; no copy."""
    return _viewed(experts, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)


def view_mxfp8(experts: CanonicalExperts) -> CanonicalExperts:
    """View canonical MXFP8 (e4m3 or its bytes) as float8_e4m3fn and float8_e8m0fnu; no copy."""
    return _viewed(experts, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def view_bytes(experts: CanonicalExperts) -> CanonicalExperts:
    """Inverse of `view_mxfp4` and `view_mxfp8`: everything as uint8; no copy."""
    return _viewed(experts, torch.uint8, torch.uint8)


def pack_sm120_split(experts: CanonicalExperts) -> Sm120Weights:
    """Return the split kernel's weights from an MXFP4 checkpoint, every byte kept.

    w13 uint8 [E, 2I, H/2] with E8M0 bytes [E, 2I, H/32], w2 uint8 [E, H, I/2] with [E, H, I/32]; H
    and I multiples of 32. w2 is a view.
    """
    check_expert_shapes(experts, packing=2)
    w13_scale, w2_scale = _scales(experts, packing=2)
    return Sm120Weights(
        fc1=interleave_gate_up(experts.w13.view(torch.uint8), PULL_ROWS).view(
            torch.float4_e2m1fn_x2
        ),
        fc1_scale=_blocked(interleave_gate_up(w13_scale, PULL_ROWS)),
        fc2=experts.w2.contiguous().view(torch.float4_e2m1fn_x2),
        fc2_scale=_blocked(w2_scale),
    )


def unpack_sm120_split(weights: Sm120Weights) -> CanonicalExperts:
    """Inverse of `pack_sm120_split`; all uint8."""
    return CanonicalExperts(
        w13=deinterleave_gate_up(weights.fc1.view(torch.uint8), PULL_ROWS),
        w13_scale=_unblocked_gate_up(weights.fc1_scale, *_extent(weights.fc1, 2)),
        w2=weights.fc2.view(torch.uint8),
        w2_scale=_unblocked(weights.fc2_scale, *_extent(weights.fc2, 2)),
    )


def pack_sm120_mxfp8(experts: CanonicalExperts) -> Sm120Weights:
    """Return the MXFP8 kernel's weights from an MXFP8 checkpoint, every byte kept.

    w13 e4m3 [E, 2I, H] with E8M0 bytes uint8 [E, 2I, H/32], w2 e4m3 [E, H, I] with [E, H, I/32]; H
    and I multiples of 32. w2 is a view.
    """
    check_dtype("w13", experts.w13, torch.float8_e4m3fn)
    check_dtype("w2", experts.w2, torch.float8_e4m3fn)
    check_expert_shapes(experts)
    w13_scale, w2_scale = _scales(experts, packing=1)
    return Sm120Weights(
        fc1=interleave_gate_up(experts.w13, PULL_ROWS).transpose(1, 2),
        fc1_scale=_blocked(interleave_gate_up(w13_scale, PULL_ROWS)),
        fc2=experts.w2.contiguous().transpose(1, 2),
        fc2_scale=_blocked(w2_scale),
    )


def unpack_sm120_mxfp8(weights: Sm120Weights) -> CanonicalExperts:
    """Inverse of `pack_sm120_mxfp8`; scales as uint8."""
    fc1, fc2 = weights.fc1.transpose(1, 2), weights.fc2.transpose(1, 2)
    return CanonicalExperts(
        w13=deinterleave_gate_up(fc1, PULL_ROWS),
        w13_scale=_unblocked_gate_up(weights.fc1_scale, *_extent(fc1, 1)),
        w2=fc2,
        w2_scale=_unblocked(weights.fc2_scale, *_extent(fc2, 1)),
    )


def to_cake_vectors(scales: torch.Tensor) -> torch.Tensor:
    """Return E8M0 bytes [E, N, K/32] as cake's scale vectors: uint32 [E * K/128 * N/16, 16].

    N and K multiples of 128. A word holds four scales of one row, the first in its low byte; for
    every expert and 128 columns, each 128 rows make eight vectors, and word t of vector g belongs
    to row 8 * (t ^ 4 * (g // 2)) + g. For w13, interleave gate and up rows (8) first.
    """
    check_dtype("E8M0 scales", scales, torch.uint8)
    check_rank("E8M0 scales", scales, 3)
    experts, rows, groups = scales.shape
    check_multiple("the number of scale rows", rows, _VECTOR_COLUMNS)
    check_multiple("the number of scale columns", groups, 4)
    words = view_as(scales, torch.int32).permute(0, 2, 1)
    tiles = words.reshape(experts, groups // 4, rows // 128, _VECTOR_WORDS, 8).transpose(-1, -2)
    index = _cake_order(scales.device).expand(tiles.shape)
    vectors = torch.gather(tiles, -1, index).reshape(-1, _VECTOR_WORDS)
    return vectors.contiguous().view(torch.uint32)


def from_cake_vectors(vectors: torch.Tensor, experts: int, rows: int) -> torch.Tensor:
    """Inverse of `to_cake_vectors`: uint32 [E * K/128 * N/16, 16] to uint8 [E, N, K/32]."""
    check_dtype("scale vectors", vectors, torch.uint32)
    check_multiple("the number of scale rows", rows, _VECTOR_COLUMNS)
    per_k128 = experts * rows // _VECTOR_WORDS
    if tuple(vectors.shape[1:]) != (_VECTOR_WORDS,) or (
        vectors.shape[0] % per_k128 if per_k128 else vectors.shape[0]
    ):
        raise bad_input(
            "scale vectors",
            tuple(vectors.shape),
            f"do not fit {experts} experts of {rows} rows",
            "pass the extents they were made with",
        )
    k128 = vectors.shape[0] // per_k128 if per_k128 else 0
    tiles = vectors.view(torch.int32).reshape(experts, k128, rows // 128, 8, _VECTOR_WORDS)
    # The order is its own inverse: an exclusive or.
    words = torch.gather(tiles, -1, _cake_order(vectors.device).expand(tiles.shape))
    words = words.transpose(-1, -2).reshape(experts, k128, rows).transpose(1, 2)
    return words.reshape(-1).view(torch.uint8).view(experts, rows, k128 * 4)


def _viewed(experts: CanonicalExperts, data: torch.dtype, scale: torch.dtype) -> CanonicalExperts:
    if experts.w13_scale is None or experts.w2_scale is None:
        raise bad_input("MX experts", "", "carry no scales", "pass w13_scale and w2_scale")
    return CanonicalExperts(
        w13=experts.w13.view(data),
        w13_scale=experts.w13_scale.view(scale),
        w2=experts.w2.view(data),
        w2_scale=experts.w2_scale.view(scale),
    )


def _scales(experts: CanonicalExperts, *, packing: int) -> Pair:
    if experts.w13_scale is None or experts.w2_scale is None:
        raise bad_input("MX experts", "", "carry no scales", "pass w13_scale and w2_scale")
    out = []
    for name, data, scale in (
        ("w13_scale", experts.w13, experts.w13_scale),
        ("w2_scale", experts.w2, experts.w2_scale),
    ):
        check_dtype(name, scale, torch.uint8, torch.float8_e8m0fnu)
        check_multiple("the number of columns", data.shape[2] * packing, _BLOCK)
        check_shape(name, scale, (*data.shape[:2], data.shape[2] * packing // _BLOCK))
        out.append(scale.view(torch.uint8))
    return out[0], out[1]


def _extent(data: torch.Tensor, packing: int) -> tuple[int, int]:
    return data.shape[1], data.shape[2] * packing // _BLOCK


def _blocked(scales: torch.Tensor) -> torch.Tensor:
    return to_blocked(scales).view(torch.float8_e8m0fnu)


def _unblocked(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return from_blocked(blocked.view(torch.uint8), rows, columns)


def _unblocked_gate_up(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return deinterleave_gate_up(_unblocked(blocked, rows, columns), PULL_ROWS)


def _cake_order(device: torch.device) -> torch.Tensor:
    """Return which word of a tile's row stands at each place: int64 [8, 16]."""
    group = torch.arange(8, device=device).view(8, 1)
    return torch.arange(_VECTOR_WORDS, device=device) ^ ((group >> 1) * 4)
