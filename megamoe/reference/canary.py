"""A canary, once per process and device: is this machine's arithmetic what the contract needs?"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from megamoe.errors import MegaMoEError
from megamoe.formats import F64
from megamoe.reference.elementwise import exp

EXP_DIGEST = "2c9a4efbcc539c20"


def digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order, the first 16 hexadecimal digits."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


@functools.cache
def check_device(device: torch.device) -> None:
    """Raise MegaMoEError, naming what is off, where bits on ``device`` could not be trusted."""
    for name, holds in (
        ("denormal numbers are flushed to zero", _keeps_denormals(device)),
        ("float64 matrix products are emulated or reduced", _multiplies_in_float64(device)),
        ("the exponential has other bits", digest(exp(_grid(device))) == EXP_DIGEST),
    ):
        if not holds:
            raise MegaMoEError(
                f"arithmetic on {device} breaks the reference: {name}; unset "
                "torch.set_flush_denormal and any float64 emulation, then start again"
            )


def _grid(device: torch.device) -> Tensor:
    return torch.arange(-4096, 4097, dtype=F64, device=device) * 0.171875  # to +-704


def _keeps_denormals(device: torch.device) -> bool:
    small = torch.tensor([2.0**-149, 2.0**-130], dtype=torch.float32, device=device)
    tiny = torch.tensor([2.0**-1074, 2.0**-1050], dtype=F64, device=device)
    return bool(((small * 1.0) != 0).all() and ((tiny * 1.0) != 0).all())


def _multiplies_in_float64(device: torch.device) -> bool:
    """Integers whose sums need all 53 bits, so the answer is exact or visibly wrong."""
    a = torch.arange(64, dtype=F64, device=device).view(1, -1) * 2 + (2.0**23 + 1)
    b = torch.full((8, 64), 2.0**23 - 1, dtype=F64, device=device)
    exact = sum((2**23 + 1 + 2 * i) * (2**23 - 1) for i in range(64))
    return bool(((a @ b.T) == float(exact)).all())
