"""What the kernels of ``flashinfer.megamoe`` share: workspaces over one symmetric buffer."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Tactic, Workspace, pooled, slots_beyond_experts
from megamoe.kernels.layout import StandaloneWeights
from megamoe.kernels.packed import PackedKernel
from megamoe.problem import Machine, Request


class StandaloneKernel(PackedKernel):
    """entry: the function of FlashInfer that launches it."""

    packed: StandaloneWeights
    entry: ClassVar[str]

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        return slots_beyond_experts(request)

    @abc.abstractmethod
    def selector(self, tokens: int) -> str:
        """FlashInfer's function that plans a launch of so many tokens a rank."""

    def launch_options(self) -> dict[str, Any]:
        """What a launch is told besides the buffers."""
        return {}

    def open(self, capacity: int, tactic: Tactic | None = None) -> SharedWorkspace:
        return SharedWorkspace(self, capacity)

    def close(self) -> None:
        return None


class SharedWorkspace(Workspace):
    """Rows are staged in the symmetric buffer, as many on every rank."""

    def __init__(self, kernel: StandaloneKernel, capacity: int) -> None:
        self.capacity, self.sheet = capacity, kernel.sheet
        self.device: torch.device = kernel.context.device
        self.packed, self.entry = kernel.packed, kernel.entry
        self.options, self.selector = kernel.launch_options(), kernel.selector
        self.buffer = flashinfer.SharedBuffer.of(
            kernel.context, pooled(kernel.context.request, capacity)
        )

    def inputs(self, x: Tensor, top_k: int, tokens: int) -> Batch:
        return self.buffer.inputs(x.shape[0], tokens)

    def run(self, batch: Batch, out: Tensor) -> None:
        self.buffer.run(self.entry, self.packed, batch, out, **self.options)

    def compiles(self) -> Sequence[int]:
        return self.buffer.plans(self.selector, self.capacity)

    def close(self) -> None:
        self.buffer.close()
