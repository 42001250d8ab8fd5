"""What canonical bytes are worth, in fp64 (exact for FP4 and FP8 times any one scale)."""

import torch

from megamoe.kernels.layout import unpack_codes

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def fp4_values(payload: torch.Tensor) -> torch.Tensor:
    codes = unpack_codes(payload).long()
    return FP4[codes & 7] * torch.where(codes < 8, 1.0, -1.0)


def mxfp4_values(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return fp4_values(payload) * e8m0_values(scales).repeat_interleave(32, -1)


def nvfp4_values(
    payload: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """`global_scale` fp32 [E], or [E, 2] for gate rows and up rows."""
    experts, rows = payload.shape[:2]
    block = scales.view(torch.float8_e4m3fn).to(torch.float64).repeat_interleave(16, -1)
    per_row = global_scale.to(torch.float64)
    per_row = per_row[:, None] if per_row.ndim == 1 else per_row
    per_row = per_row.repeat_interleave(rows // per_row.shape[1] if rows else 0, 1)
    return fp4_values(payload) * block * per_row.view(experts, rows, 1)


def e8m0_values(scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])
    return table.to(torch.float64)[scales.long()]


def fp8_values(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`scale` [E, N / block, K / block]; both blocks follow from the shapes."""
    wide = scale.to(torch.float64)
    for dim in (1, 2):
        if wide.shape[dim]:
            wide = wide.repeat_interleave(data.shape[dim] // wide.shape[dim], dim)
    return data.to(torch.float64) * wide
