"""NVFP4's two levels of scale, moved against each other: E4M3 per block, fp32 per expert.

Every SM90 NVFP4 kernel takes one global scale for gate and up together, and rounds code * block
scale to E4M3: the standalone kernels overflow above 448, all of them lose bits among the
subnormals. Moving powers of two between the levels keeps each value and puts an expert's largest
block scale just below a chosen top. Source of the limits: FlashInfer 0.7.4, megamoe/weights.py.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import bad_input
from megamoe.kernels.layout._checks import check_dtype, check_multiple, check_shape
from megamoe.kernels.layout.e4m3 import FP4_MAGNITUDES, nearest, values
from megamoe.kernels.layout.nibbles import pack_codes, unpack_codes
from megamoe.kernels.layout.records import Exactness

NVFP4_BLOCK: Final = 16
PULL_TOP: Final = 448.0
"""Largest block scale of the pull kernel: 6 * 448 / 8 still is an E4M3 number."""
STANDALONE_TOP: Final = 72.0
"""Largest block scale of the standalone kernels: 6 * 72 rounds to 448, 6 * 80 overflows."""

# A block whose scale does not fit is tried with its scale doubled and its codes halved, up to here.
_DOUBLINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalancedNvfp4:
    """One matrix of NVFP4 experts with one global scale each, and what the move changed.

    `payload` uint8 [E, N, K/2], `scales` E4M3 bytes uint8 [E, N, K/16], `global_scale` fp32 [E];
    `exactness.counts` is [E, N, K/16], all zero where every value was kept.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    exactness: Exactness


def balance_nvfp4(
    payload: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, *, top: float
) -> BalancedNvfp4:
    """Give each expert one global scale, its largest block scale at most `top` and above `top / 2`.

    `payload` uint8 [E, N, K/2], `scales` E4M3 bytes [E, N, K/16], `global_scale` fp32, positive
    and finite: [E], or [E, 2] where gate rows (the first half of N) and up rows have their own. A
    value is code * block scale * global scale, before and after.

    Exact where the two global scales are a power of two apart and the moved block scale is an E4M3
    number, or becomes one when it is doubled (up to thrice) and the block's codes can be halved.
    Elsewhere the scale is the nearest E4M3 number, at least 2**-9, and codes are rounded to
    nearest, ties to even. Sign bits and NaN in block scales are `BadInput`. Reads device memory:
    load time.
    """
    _check(payload, scales, global_scale)
    experts = payload.shape[0]
    out_payload, out_scales = payload.clone(), scales.clone()
    out_global = torch.empty(experts, dtype=torch.float32, device=payload.device)
    counts = torch.zeros(scales.shape, dtype=torch.int64, device=payload.device)
    worst = 0.0
    halves = global_scale[:, None] if global_scale.ndim == 1 else global_scale
    for expert in range(experts):
        shared, wanted = _share(scales[expert], halves[expert], top, expert)
        out_global[expert] = shared
        moved = nearest(wanted)
        out_scales[expert] = moved.view(torch.uint8)
        # Almost all blocks are done with that; the others need their codes, too.
        hard = moved.to(torch.float64) != wanted
        if payload.numel() and bool(hard.any()):
            codes = unpack_codes(payload[expert]).view(*scales.shape[1:], NVFP4_BLOCK)
            codes[hard], out_scales[expert][hard], error = _recode(codes[hard], wanted[hard])
            out_payload[expert] = pack_codes(codes.flatten(-2))
            counts[expert][hard] = (error != 0).sum(-1)
            worst = max(worst, float(error.abs().max()))
    exactness = Exactness(counts=counts, elements=payload.numel() * 2, worst=worst)
    return BalancedNvfp4(
        payload=out_payload, scales=out_scales, global_scale=out_global, exactness=exactness
    )


def _check(payload: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
    check_dtype("payload", payload, torch.uint8)
    check_dtype("global scales", global_scale, torch.float32)
    check_e4m3_scales("block scales", scales)
    check_multiple("the number of FP4 columns", payload.shape[-1] * 2, NVFP4_BLOCK)
    check_shape("block scales", scales, (*payload.shape[:-1], payload.shape[-1] // 8))
    experts = payload.shape[0]
    if tuple(global_scale.shape) not in ((experts,), (experts, 2)):
        raise bad_input(
            "global scales",
            tuple(global_scale.shape),
            f"are of neither shape ({experts},) nor ({experts}, 2)",
            "pass one per expert, or one for gate and one for up",
        )
    check_global_scale("global scales", global_scale)


def check_e4m3_scales(name: str, scales: torch.Tensor) -> None:
    """Refuse block scales that are not E4M3 bytes of finite, non-negative numbers."""
    check_dtype(name, scales, torch.uint8)
    if scales.numel() and int(scales.max()) > 126:
        raise bad_input(name, int(scales.max()), "is NaN or negative in E4M3", "requantise")


def check_global_scale(name: str, scale: torch.Tensor) -> None:
    """Refuse global scales that are not positive and finite."""
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise bad_input(name, scale.tolist(), "are not all positive and finite", "requantise")


def _share(
    scales: torch.Tensor, halves: torch.Tensor, top: float, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one expert's shared global scale (fp32) and the block scales it asks for (fp64)."""
    # One plane for gate and one for up, or one for both.
    parts = halves.shape[0]
    true = (
        values()
        .to(scales.device)[scales.long()]
        .view(parts, scales.shape[0] // parts, scales.shape[1])
    )
    wide = halves.to(torch.float64)
    largest = true.flatten(1).amax(1) if true.numel() else torch.zeros_like(wide)
    leader = int((largest * wide).argmax())
    shared = wide[leader]
    peak = float((largest * (wide / shared)).max())
    shift = 0
    while peak > 0 and peak * 2.0**-shift > top:
        shift += 1
    while peak > 0 and peak * 2.0 ** (1 - shift) <= top:
        shift -= 1
    scaled = shared * 2.0**shift
    fp32 = scaled.to(torch.float32)
    if not bool(fp32.to(torch.float64) == scaled) or not bool(torch.isfinite(fp32)):
        raise bad_input(
            f"the global scale {float(shared):g} of expert",
            expert,
            f"leaves fp32 when 2**{shift} moves into it",
            "requantise the checkpoint",
        )
    # Multiplied before divided, so that a power-of-two ratio stays exact.
    wanted = true * wide.view(parts, 1, 1) / scaled
    return fp32, wanted.view(scales.shape)


def _recode(
    codes: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Express blocks of codes [B, 16] times fp64 scales [B] (no E4M3 numbers) with E4M3 scales.

    Returns the codes, the scale bytes, and the relative error of each element (fp64 [B, 16]).
    """
    device = codes.device
    table = values().to(device)
    magnitude, sign = (codes & 7).long(), codes & 8
    best = nearest(wanted.clamp(min=2.0**-9)).view(torch.uint8)
    best = torch.where((magnitude != 0).any(-1), best, nearest(wanted).view(torch.uint8))
    halved = magnitude
    open_ = table[best.long()] != wanted
    for doublings in range(1, _DOUBLINGS + 1):
        divided = _halved_magnitudes().to(device)[doublings, magnitude]
        doubled = wanted * 2.0**doublings
        scale = nearest(doubled)
        fits = open_ & (scale.to(torch.float64) == doubled) & (divided >= 0).all(-1)
        best = torch.where(fits, scale.view(torch.uint8), best)
        halved = torch.where(fits[:, None], divided.long(), halved)
        open_ &= ~fits
    values_q = torch.tensor(FP4_MAGNITUDES, dtype=torch.float64, device=device)
    true = values_q[magnitude] * wanted[:, None]
    scale64 = table[best.long()][:, None]
    rounded = _nearest_magnitude(torch.where(scale64 > 0, true / scale64, 0.0))
    halved = torch.where(open_[:, None], rounded, halved)
    got = values_q[halved] * scale64
    error = torch.where(true == 0, 0.0, (got - true) / true)
    return sign | halved.to(torch.uint8), best, error


@functools.cache
def _halved_magnitudes() -> torch.Tensor:
    """Return code / 2**doublings as a magnitude code, -1 where there is none: int8 [4, 8]."""
    table = torch.full((_DOUBLINGS + 1, 8), -1, dtype=torch.int8, device="cpu")
    for doublings in range(_DOUBLINGS + 1):
        for code, value in enumerate(FP4_MAGNITUDES):
            if value / 2**doublings in FP4_MAGNITUDES:
                table[doublings, code] = FP4_MAGNITUDES.index(value / 2**doublings)
    return table


def _nearest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 magnitude code of non-negative fp64 values, ties to even; int64."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(FP4_MAGNITUDES)]
    edges = torch.tensor(middles, dtype=torch.float64, device=x.device)
    code = torch.bucketize(x, edges)  # a tie falls to the lower code
    tie = x == edges[code.clamp(max=6)]
    return code + (tie & (code % 2 == 1)).long()
