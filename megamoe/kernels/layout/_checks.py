"""What a layout demands of the tensors it is given, as `BadInput` before any work."""

from __future__ import annotations

import torch

from megamoe.errors import bad_input


def check_dtype(name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
    if x.dtype not in allowed:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise bad_input(name, x.dtype, f"is not {expected}", "convert or view it first")


def check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise bad_input(name, tuple(x.shape), f"is not of shape {shape}", "pass matching tensors")


def check_rank(name: str, x: torch.Tensor, rank: int) -> None:
    if x.ndim != rank:
        raise bad_input(name, tuple(x.shape), f"is not {rank}-dimensional", "reshape it")


def check_multiple(name: str, value: int, of: int) -> None:
    if value % of:
        raise bad_input(name, value, f"is not a multiple of {of}", f"pad to {-(-value // of) * of}")
