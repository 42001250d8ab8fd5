"""Kernels without buffers of their own: they read the caller's rows where these lie."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from megamoe.kernels.base import Batch, Context, Kernel, Tactic, Workspace


class PlainKernel(Kernel):
    context: Context

    @abc.abstractmethod
    def run(self, batch: Batch, out: Tensor) -> None:
        """Write the weighted sum of the routed experts into ``out``, BF16 [n, H]; collective."""

    def open(self, capacity: int, tactic: Tactic | None = None) -> PlainWorkspace:
        return PlainWorkspace(self, capacity)

    def close(self) -> None:
        return None


class PlainWorkspace(Workspace):
    def __init__(self, kernel: PlainKernel, capacity: int) -> None:
        self.kernel, self.capacity, self.sheet = kernel, capacity, kernel.sheet
        self.device: torch.device = kernel.context.device

    def run(self, batch: Batch, out: Tensor) -> None:
        self.kernel.run(batch, out)
