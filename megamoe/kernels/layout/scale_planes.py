"""Block scales in the orders the kernels load them: folded M64/K128 tiles, and 32x4x4 atoms."""

from __future__ import annotations

import torch

from megamoe.kernels.layout._checks import (
    check_multiple,
    check_rank,
    check_shape,
)


def fold_k32(scales: torch.Tensor) -> torch.Tensor:
    """Fold one-byte scales of 32 columns into 256-byte tiles of 64 rows by 128 columns.

    [E, N, K/32], N a multiple of 64 and K of 128, to contiguous [E, N/64, K/128, 16, 16]: row m of
    a tile goes to line m % 16, byte 4 * (m // 16) + k32. Source: FlashInfer 0.7.4,
    fused_moe/prepare.py, interleave_moe_scales_for_sm90_mixed_gemm.
    """
    experts, rows, groups = _check(scales, 4)
    tiles = scales.reshape(experts, rows // 64, 4, 16, groups // 4, 4)
    return (
        tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(experts, rows // 64, groups // 4, 16, 16)
    )


def unfold_k32(folded: torch.Tensor) -> torch.Tensor:
    """Inverse of `fold_k32`: [E, N/64, K/128, 16, 16] to contiguous [E, N, K/32]."""
    experts, m64, k128 = _check_folded(folded, 16)
    tiles = folded.reshape(experts, m64, k128, 16, 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(experts, m64 * 64, k128 * 4)


def fold_k16(scales: torch.Tensor) -> torch.Tensor:
    """Fold one-byte scales of 16 columns into 512-byte tiles of 64 rows by 128 columns.

    [E, N, K/16], N a multiple of 64 and K of 128, to contiguous [E, N/64, K/128, 32, 16]: the two
    scales of each 32 columns stay neighbours; within a tile the order is (m // 16, k32, m % 16).
    Source: FlashInfer 0.7.4,
    moe_ep/backends/mega/kernel/sm90/fp8_nvfp4_bf16_pull_cutedsl/weights.py.
    """
    experts, rows, groups = _check(scales, 8)
    tiles = scales.reshape(experts, rows // 64, 4, 16, groups // 8, 4, 2)
    return (
        tiles.permute(0, 1, 4, 2, 5, 3, 6)
        .contiguous()
        .view(experts, rows // 64, groups // 8, 32, 16)
    )


def unfold_k16(folded: torch.Tensor) -> torch.Tensor:
    """Inverse of `fold_k16`: [E, N/64, K/128, 32, 16] to contiguous [E, N, K/16]."""
    experts, m64, k128 = _check_folded(folded, 32)
    tiles = folded.reshape(experts, m64, k128, 4, 4, 16, 2)
    return tiles.permute(0, 1, 3, 5, 2, 4, 6).contiguous().view(experts, m64 * 64, k128 * 8)


def blocked_size(rows: int, columns: int) -> int:
    """Return the bytes of one expert's plane in 128-row, 4-column atoms, padding included."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def to_blocked(scales: torch.Tensor) -> torch.Tensor:
    """Return one-byte scale planes in atoms of 128 rows by 4 columns, each stored as 32x4x4.

    [E, N, C] to contiguous [E, blocked_size(N, C)], padded with zero bytes: row m of an atom goes
    to 16-byte line m % 32, bytes 4 * (m // 32) onwards. Source: FlashInfer 0.7.4,
    kernel_src/sm120/split_cutedsl_megakernel/shim/weights.py.
    """
    check_rank("scales", scales, 3)
    experts, rows, columns = scales.shape
    atoms_m, atoms_k = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(
        (experts, atoms_m * 128, atoms_k * 4), dtype=torch.uint8, device=scales.device
    )
    padded[:, :rows, :columns] = scales.view(torch.uint8)
    atoms = padded.view(experts, atoms_m, 4, 32, atoms_k, 4)
    flat = atoms.permute(0, 1, 4, 3, 2, 5).reshape(experts, blocked_size(rows, columns))
    return flat.view(scales.dtype)


def from_blocked(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `to_blocked`: [E, blocked_size(rows, columns)] to [E, rows, columns]."""
    experts = blocked.shape[0]
    check_shape("blocked scales", blocked, (experts, blocked_size(rows, columns)))
    atoms_m, atoms_k = -(-rows // 128), -(-columns // 4)
    atoms = blocked.view(torch.uint8).reshape(experts, atoms_m, atoms_k, 32, 4, 4)
    padded = atoms.permute(0, 1, 4, 3, 2, 5).reshape(experts, atoms_m * 128, atoms_k * 4)
    return padded[:, :rows, :columns].contiguous().view(blocked.dtype)


def _check(scales: torch.Tensor, groups_per_k128: int) -> tuple[int, int, int]:
    check_rank("scales", scales, 3)
    experts, rows, groups = scales.shape
    check_multiple("the number of scale rows", rows, 64)
    check_multiple("the number of scale columns", groups, groups_per_k128)
    return experts, rows, groups


def _check_folded(folded: torch.Tensor, lines: int) -> tuple[int, int, int]:
    check_rank("folded scales", folded, 5)
    experts, m64, k128 = folded.shape[:3]
    check_shape("folded scales", folded, (experts, m64, k128, lines, 16))
    return experts, m64, k128
