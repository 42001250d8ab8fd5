"""What FlashInfer's kernels share: experts in bytes of their own, packed before the ranks meet."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Kernel
from megamoe.kernels.packs import owned, write_over
from megamoe.problem import ExpertWeights, MoEWeights


class PackedKernel(Kernel):
    """packed: None where FlashInfer made the bytes from it, and keeps them to itself."""

    packed: Any
    context: Context

    @classmethod
    @abc.abstractmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> Any:
        """The experts in the kernel's own bytes; Unsupported where a value forbids it."""

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> PackedKernel:
        packed = cls.pack(weights.experts, context)
        if context.exchange:
            packed = owned(packed, weights.experts)
        flashinfer.together(context)
        return cls(packed, context)

    def __init__(self, packed: Any, context: Context) -> None:
        self.packed, self.context = packed, context

    def update(self, weights: MoEWeights) -> Callable[[], None]:
        if self.packed is None:
            return super().update(weights)
        return write_over(self.packed, self.pack(weights.experts, self.context))
