"""The mode of PyTorch that a layer is made in, whatever the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What is allocated in the block may be written in every mode: no inference tensor, no graph.

    A layer made under ``inference_mode`` could otherwise be used nowhere else. A default device
    that is not the CPU, as of a caller who loads a model, is not followed.
    """
    elsewhere = torch.get_default_device().type != "cpu"
    device = torch.device("cpu") if elsewhere else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), device:
        yield
