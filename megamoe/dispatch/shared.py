"""The shared expert above a kernel: a dense FFN over this rank's own tokens, never reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import FP32, Quantised, dequantise
from megamoe.problem import Activation, SharedExpert


def matrix(q: Quantised) -> Tensor:
    """One matrix [1, rows, columns] as BF16 where exact, else as float32: [rows, columns]."""
    exact = dequantise(q)[0]
    narrow = exact.to(torch.float32).to(torch.bfloat16)
    if bool((narrow.to(torch.float64) == exact).all()):
        return narrow
    return dequantise(q, to=FP32)[0]


class SharedFFN:
    """Holds its own pack; float32 accumulation, no rounding before the second product's BF16
    input.
    """

    def __init__(self, shared: SharedExpert) -> None:
        weights = shared.weights
        self.activation: Activation = shared.activation
        self.w13, self.w2 = matrix(weights.w13), matrix(weights.w2)
        self.b13 = None if weights.b13 is None else weights.b13[0].to(torch.float32)
        self.b2 = None if weights.b2 is None else weights.b2[0].to(torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """x BF16 [n, H] to BF16 [n, H]."""
        h = product(x, self.w13)
        if self.b13 is not None:
            h = h + self.b13
        gate, up = h.chunk(2, dim=-1)
        limit = self.activation.limit
        if limit is not None:
            gate = gate.clamp(max=limit)
            gate = gate.clamp(min=-limit) if self.activation.symmetric else gate
            up = up.clamp(-limit, limit)
        s = (up + self.activation.up_offset) * gate * torch.sigmoid(self.activation.alpha * gate)
        y = product(s.to(torch.bfloat16), self.w2)
        return (y if self.b2 is None else y + self.b2).to(torch.bfloat16)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a BF16 [n, k] times b [m, k] transposed, accumulated and returned in float32."""
    if a.is_cuda and b.dtype == torch.bfloat16:
        result: Tensor = torch.mm(a, b.T, out_dtype=torch.float32)
        return result
    return a.to(torch.float32) @ b.to(torch.float32).T
