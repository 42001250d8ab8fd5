"""Honest kernels of another make: a layer in plain float32, and FP8 product by product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import dequantise
from megamoe.oracle import Inputs
from megamoe.reference.honest import FP8_BITS, STEP_FP8, Honest


def plain_torch(inputs: Inputs) -> Tensor:
    """BF16 operands, float32 sums, torch's own silu, slots in order; one rank, no shared expert."""
    layer = inputs.layer
    x, ids, w = inputs.x, inputs.topk.ids, inputs.topk.weights.float()
    factor = 1.0 if inputs.topk.scaled else layer.routed_scaling_factor
    total = torch.zeros(x.shape, dtype=torch.float32)
    for slot in range(ids.shape[1]):
        for expert in ids[:, slot].unique().tolist():
            if expert < 0:
                continue
            rows = ids[:, slot] == expert
            w13 = dequantise(layer.experts.w13[expert : expert + 1])[0].float()
            w2 = dequantise(layer.experts.w2[expert : expert + 1])[0].float()
            gate, up = (x[rows].float() @ w13.T).chunk(2, dim=-1)
            if layer.activation.limit is not None:
                gate = gate.clamp(max=layer.activation.limit)
                up = up.clamp(-layer.activation.limit, layer.activation.limit)
            mid = (torch.nn.functional.silu(gate) * up).bfloat16()
            term = (mid.float() @ w2.T).bfloat16().float()
            total[rows] += term * (w[rows, slot, None] * factor)
    return total.bfloat16()


def eager_bf16(inputs: Inputs) -> Tensor:
    """Every step a BF16 operation of torch's, slots summed in float32: HF_GROUPED's roundings."""
    layer = inputs.layer
    x, ids, w = inputs.x, inputs.topk.ids, inputs.topk.weights
    limit = layer.activation.limit
    total = torch.zeros(x.shape, device=x.device)
    for slot in range(ids.shape[1]):
        for expert in ids[:, slot].unique().tolist():
            if expert < 0:
                continue
            rows = (ids[:, slot] == expert).nonzero()[:, 0]
            gate, up = (x[rows] @ layer.experts.w13.data[expert].T).chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y = (torch.nn.functional.silu(gate) * up) @ layer.experts.w2.data[expert].T
            total[rows] += y.float() * w[rows, slot, None]
    return total.bfloat16()


@dataclass(frozen=True, slots=True)
class EveryProduct(Honest):
    """Hopper's FP8 accumulator with each product cut to 14 bits before all are added."""

    def _fp8(self, a: Tensor, b: Tensor) -> Tensor:
        columns = b.shape[1]
        codes, scale = a[:, :columns], a[:, columns:]
        width = columns // scale.shape[1]
        out = torch.zeros(len(a), len(b), dtype=torch.float32)
        for block in range(scale.shape[1]):
            total = torch.zeros(len(a), len(b), dtype=torch.float64)
            for start in range(block * width, (block + 1) * width, STEP_FP8):
                k = slice(start, start + STEP_FP8)
                products = torch.cat([codes[:, None, k] * b[None, :, k], total[..., None]], dim=2)
                unit = torch.exp2(
                    products.abs().amax(2, keepdim=True).log2().floor() - FP8_BITS + 1
                )
                total = (torch.where(unit > 0, products / unit, 0.0).trunc() * unit).sum(2)
            out = out + (total * scale[:, block, None]).float()
        return out
