"""FP8 experts with one scale for a block of 128x128, or one for a whole matrix."""

from __future__ import annotations

from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_multiple, check_shape
from megamoe.kernels.layout.e4m3 import nearest
from megamoe.kernels.layout.pull_bf16 import check_expert_shapes
from megamoe.kernels.layout.records import CanonicalExperts, Exactness

FP8_BLOCK: Final = 128


def scale_to_fp32(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Widen scales (fp32, bf16 or float8_e8m0fnu) to fp32, exactly.

    Negative, infinite and NaN scales are `BadInput`.
    """
    check_dtype(name, scale, torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
    if scale.dtype == torch.float8_e8m0fnu:
        byte = scale.view(torch.uint8).to(torch.int32)
        # Exponent bits; 2**-127 is a subnormal fp32, 255 is NaN.
        bits = torch.where(byte == 0, 0x00400000, byte << 23)
        wide = torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)
    else:
        wide = scale.to(torch.float32)
    if not bool((torch.isfinite(wide) & (wide >= 0)).all()):
        raise bad_input(
            name, tuple(scale.shape), "hold a negative or non-finite value", "requantise"
        )
    return wide


def check_block_fp8(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Refuse experts that are not block FP8; return their scales as fp32.

    e4m3 [E, 2I, H] and [E, H, I], scales [E, 2I/128, H/128] and [E, H/128, I/128], I and H
    multiples of 128.
    """
    _check_fp8(experts)
    count, hidden, width = experts.w2.shape
    check_multiple("intermediate_size", width, FP8_BLOCK)
    check_multiple("hidden_size", hidden, FP8_BLOCK)
    w13_scale, w2_scale = _scales(experts)
    grid = (count, 2 * width // FP8_BLOCK, hidden // FP8_BLOCK)
    check_shape("w13_scale", w13_scale, grid)
    check_shape("w2_scale", w2_scale, (count, hidden // FP8_BLOCK, width // FP8_BLOCK))
    return w13_scale, w2_scale


def check_tensor_fp8(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Refuse experts that are not FP8 with one scale a matrix; return the scales as fp32.

    `w13_scale` [E, 2] (gate, up) or [E] (both), returned as [E, 2]; `w2_scale` [E].
    """
    _check_fp8(experts)
    w13_scale, w2_scale = _scales(experts)
    count = experts.w13.shape[0]
    if tuple(w13_scale.shape) == (count,):
        w13_scale = w13_scale[:, None].expand(count, 2)
    check_shape("w13_scale", w13_scale, (count, 2))
    check_shape("w2_scale", w2_scale, (count,))
    return w13_scale, w2_scale


def merge_gate_up(
    w13: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Exactness]:
    """Give the gate and the up block of each pair the larger of their scales; recode the other.

    `w13` e4m3 [E, 2, B, R, G, C] (gate and up; B x G blocks of R x C elements), `scale` fp32 [E,
    2, B, G]. Returns the recoded e4m3 (the same tensor where nothing needs it), the shared scale
    fp32 [E, B, G], and the elements whose value changed, counts [E, 2, B, G].

    Exact where the two scales are a power of two apart (DeepSeek-V4's E8M0 scales always are) and
    the recoded element is not lost among the E4M3 subnormals; elsewhere to nearest, ties to even.
    NaN elements stay NaN and are not counted.
    """
    shared = scale.amax(1)
    differs = (scale != shared[:, None]) & (shared[:, None] > 0)
    counts = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
    worst = 0.0
    if not w13.numel() or not bool(differs.any()):
        return w13, shared, Exactness(counts=counts, elements=w13.numel(), worst=worst)
    recoded = w13.clone()
    for expert in range(w13.shape[0]):
        which = differs[expert]
        if not bool(which.any()):
            continue
        # [2, B, R, G, C] -> [2, B, G, R, C], then the blocks to recode: [n, R, C]
        blocks = w13[expert].movedim(2, 3)[which].to(torch.float64)
        true = blocks * scale[expert][which][:, None, None].to(torch.float64)
        wide = shared[expert].expand(2, -1, -1)[which][:, None, None].to(torch.float64)
        new = nearest(true / wide)
        got = new.to(torch.float64) * wide
        changed = (got != true) & ~true.isnan()
        bytes_view = recoded[expert].view(torch.uint8).movedim(2, 3)
        bytes_view[which] = new.view(torch.uint8)
        counts[expert][which] = changed.sum((-1, -2))
        error = torch.where(changed, (got - true) / true, 0.0)
        worst = max(worst, float(error.abs().max()))
    return recoded, shared, Exactness(counts=counts, elements=w13.numel(), worst=worst)


def _check_fp8(experts: CanonicalExperts) -> None:
    check_dtype("w13", experts.w13, torch.float8_e4m3fn)
    check_dtype("w2", experts.w2, torch.float8_e4m3fn)
    check_expert_shapes(experts)


def _scales(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    if experts.w13_scale is None or experts.w2_scale is None:
        raise bad_input("FP8 experts", "", "carry no scales", "pass w13_scale and w2_scale")
    return (
        scale_to_fp32("w13_scale", experts.w13_scale),
        scale_to_fp32("w2_scale", experts.w2_scale),
    )
