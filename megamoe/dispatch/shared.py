"""The shared expert above a kernel: a dense FFN over this rank's own tokens, never reduced."""

from __future__ import annotations

from collections.abc import Callable

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


TERMS = 3  # BF16 numbers whose sum is a float32 number


def terms(matrix: Tensor) -> Tensor:
    """float32 [rows, columns] as BF16 [rows, 3 * columns]: three numbers that add up to each.

    A product with rows written three times is then one of BF16 matrices, for the matrix units of a
    GPU; float32 ones would go without. float32 itself comes back where a number is too small.
    """
    rest, parts = matrix, []
    for _ in range(TERMS):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(torch.float32)
    return torch.cat(parts, dim=1) if not bool(rest.any()) else matrix


class SharedFFN:
    """Holds its own pack; nothing is rounded between x and the second product's BF16 input.

    float32 accumulation on a GPU, beside the routed experts on a stream of its own; float64 on a
    CPU, where speed does not matter.
    """

    def __init__(self, shared: SharedExpert) -> None:
        weights = shared.weights
        self.activation: Activation = shared.activation
        self.w13, self.w2 = matrix(weights.w13), matrix(weights.w2)
        on_gpu = weights.device.type == "cuda"
        if on_gpu:
            self.w13, self.w2 = (
                terms(m) if m.dtype == torch.float32 else m for m in (self.w13, self.w2)
            )
        self.wide = torch.float32 if on_gpu else torch.float64
        self.b13, self.b2 = (
            None if bias is None else bias[0].to(torch.float32, copy=True)
            for bias in (weights.b13, weights.b2)
        )
        self.stream = torch.cuda.Stream(weights.device) if on_gpu else None

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin on x BF16 [n, H]; the call that comes back waits, and gives BF16 [n, H].

        The memory of each call's result is taken again no earlier than the next call's start, which
        waits for all that was queued before it.
        """
        side = self.stream
        if side is None:
            y = self(x)
            return lambda: y
        main = torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = self(x)

        def joined() -> Tensor:
            main.wait_stream(side)
            return y

        return joined

    def warmup(self, tokens: int) -> None:
        """Load the libraries that a later call would load, also on the side stream."""
        self.start(
            torch.zeros(tokens, self.w2.shape[0], dtype=torch.bfloat16, device=self.w2.device)
        )()

    def __call__(self, x: Tensor) -> Tensor:
        """x BF16 [n, H] to BF16 [n, H]."""
        h = self._product(x, self.w13)
        if self.b13 is not None:
            h = h + self.b13
        gate, up = h.chunk(2, dim=-1)
        limit = self.activation.limit
        if limit is not None:
            gate = gate.clamp(max=limit)
            gate = gate.clamp(min=-limit) if self.activation.symmetric else gate
            up = up.clamp(-limit, limit)
        gate, up = gate.to(self.wide), up.to(self.wide)
        s = (up + self.activation.up_offset) * gate * torch.sigmoid(self.activation.alpha * gate)
        y = self._product(s.to(torch.float32).to(torch.bfloat16), self.w2)
        return (y if self.b2 is None else y + self.b2).to(torch.bfloat16)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """a BF16 [n, k] times b [m, k] transposed, float32; b may hold ``terms``."""
        if b.shape[1] != a.shape[1]:
            a = a.repeat(1, TERMS)
        if a.is_cuda and b.dtype == torch.bfloat16:
            result: Tensor = torch.mm(a, b.T, out_dtype=torch.float32)
            return result
        return (a.to(self.wide) @ b.to(self.wide).T).to(torch.float32)
