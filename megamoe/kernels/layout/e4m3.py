"""FP8 E4M3 as tables: its values, the nearest code, and FP4 times block scale in one code.

Tables are made on the CPU whatever the default device is: loaders of models change that.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

E4M3_MAX: Final = 448.0

# The middle between 448 and the next number there would be, were its code not NaN.
_OVERFLOW: Final = 464.0
_NAN: Final = 0x7F

FP4_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its three magnitude bits."""


@functools.cache
def values() -> torch.Tensor:
    """Return the value of each E4M3 code: fp64 [256], NaN at 0x7F and 0xFF."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    return codes.view(torch.float8_e4m3fn).to(torch.float64)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E4M3 to an fp64 tensor, ties to even, saturating at 448; NaN stays NaN.

    Not a cast: from fp64 it would round twice (through fp32), and what becomes of a large value
    differs between versions of PyTorch.
    """
    magnitude = x.abs().clamp(max=E4M3_MAX)
    # The exponent of the quantum: three bits below the leading one, and 2**-9 among the subnormals.
    exponent = (torch.frexp(magnitude).exponent.clamp(-5, 9) - 4).long() + 9
    powers = torch.tensor([2.0**k for k in range(-9, 6)], dtype=torch.float64, device=x.device)
    quantum = powers[exponent]
    rounded = torch.copysign((magnitude / quantum).round() * quantum, x)
    return rounded.to(torch.float32).to(torch.float8_e4m3fn)


@functools.cache
def fp4_products(shift: int) -> torch.Tensor:
    """Return RN_E4M3(q * s * 2**shift) as a code: uint8 [127, 8], by scale code s and magnitude q.

    What the SM90 NVFP4 kernels multiply with: shift -3 in the pull kernel (FlashInfer 0.7.4,
    kernel_src/sm90/pull_style_cutedsl_megakernel/shim/nvfp4_conversion.py), shift 0 in the
    standalone ones (data/include/flashinfer/megamoe/nvfp4_dequant.cuh). Products above 464 are NaN
    (0x7F), as there.
    """
    scales = values()[:127].to(torch.float32)
    magnitudes = torch.tensor(FP4_MAGNITUDES, dtype=torch.float32, device="cpu")
    products = scales[:, None] * magnitudes * 2.0**shift  # exact: at most 6 significant bits
    # Written out, since the cast saturates in some versions of PyTorch and gives NaN in others.
    codes = products.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(products > _OVERFLOW, _NAN, codes)


@functools.cache
def fp4_product_errors(shift: int) -> torch.Tensor:
    """Return the relative error of each of `fp4_products`: fp64 [127, 8], inf where it is NaN."""
    magnitudes = torch.tensor(FP4_MAGNITUDES, dtype=torch.float64, device="cpu")
    true = values()[:127, None] * magnitudes * 2.0**shift
    got = values()[fp4_products(shift).long()]
    error = torch.where(true == 0, 0.0, (got - true) / true)
    return torch.where(got.isnan(), torch.inf, error)
