"""What the kernels of ``flashinfer.megamoe`` share: a workspace over one symmetric buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Context, Datasheet, Workspace
from megamoe.kernels.layout import StandaloneWeights


class Standalone(Protocol):
    sheet: ClassVar[Datasheet]
    packed: StandaloneWeights
    context: Context


class SharedWorkspace(Workspace):
    """Rows are staged in the symmetric buffer, as many on every rank.

    entry: the function of FlashInfer that launches, and options for it.
    """

    def __init__(self, kernel: Standalone, capacity: int, entry: str, **options: Any) -> None:
        self.capacity, self.sheet = capacity, kernel.sheet
        self.device: torch.device = kernel.context.device
        self.packed, self.entry, self.options = kernel.packed, entry, options
        self.buffer = flashinfer.SharedBuffer.of(kernel.context, capacity)

    def inputs(self, x: Tensor, top_k: int, tokens: int) -> Batch:
        return self.buffer.inputs(x.shape[0], tokens)

    def run(self, batch: Batch, out: Tensor) -> None:
        self.buffer.run(self.entry, self.packed, batch, out, **self.options)

    def compiles(self) -> Sequence[int]:
        return self.buffer.plans()

    def close(self) -> None:
        self.buffer.close()
