"""Ways to store one matrix, as published checkpoints do, and what its values are.

The codes come from the package's quantiser; the values do not: they are decoded by ml_dtypes and
multiplied here, so that a loader and a writer that share a mistake do not agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from megamoe.formats import (
    FP8_BLOCK32,
    FP8_BLOCK32_BF16,
    FP8_BLOCK32_E8M0,
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
    FP8_CHANNEL,
    FP8_CHANNEL_BF16,
    FP8_TENSOR,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_DIVIDE,
    PLAIN_BF16,
    PLAIN_F32,
    Format,
    Quantised,
    quantise,
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """One matrix as written: tensors by suffix, its exact values, and its format."""

    tensors: Tensors
    values: Tensor  # float64
    format: Format


Store = Callable[[Tensor], Stored]


def _numpy(tensor: Tensor) -> np.ndarray:
    kinds = {
        torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
        torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
        torch.bfloat16: ml_dtypes.bfloat16,
    }
    if tensor.dtype in kinds:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        return raw.view(kinds[tensor.dtype]).reshape(tuple(tensor.shape)).astype(np.float64)
    return tensor.numpy().astype(np.float64)


def e2m1(packed: Tensor) -> Tensor:
    """The values of two codes a byte, the first in the low nibble."""
    raw = packed.contiguous().view(torch.uint8).numpy()
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    return torch.from_numpy(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64))


def e8m0(codes: Tensor) -> Tensor:
    return torch.from_numpy(_numpy(codes.contiguous().view(torch.float8_e8m0fnu)))


def exact(tensor: Tensor) -> Tensor:
    return torch.from_numpy(_numpy(tensor))


def spread(scale: Tensor, shape: torch.Size, height: int, width: int) -> Tensor:
    """One scale per tile, repeated over the tile's elements."""
    tall = scale.repeat_interleave(height, dim=0)[: shape[0]]
    return tall.repeat_interleave(width, dim=1)[:, : shape[1]]


def plain(dtype: torch.dtype = torch.bfloat16) -> Store:
    def store(values: Tensor) -> Stored:
        weight = values.to(dtype)
        fmt = PLAIN_BF16 if dtype == torch.bfloat16 else PLAIN_F32
        return Stored({"weight": weight}, exact(weight), fmt)

    return store


BLOCKS = {
    (128, "f32"): FP8_BLOCK128,
    (128, "bf16"): FP8_BLOCK128_BF16,
    (128, "e8m0"): FP8_BLOCK128_E8M0,
    (32, "f32"): FP8_BLOCK32,
    (32, "bf16"): FP8_BLOCK32_BF16,
    (32, "e8m0"): FP8_BLOCK32_E8M0,
}


def block(suffix: str, scale: str = "f32", size: int = 128) -> Store:
    def store(values: Tensor) -> Stored:
        q = quantise(values, BLOCKS[size, scale])
        held = _scale(q)
        stored = held.view(torch.float8_e8m0fnu) if scale == "e8m0" else held
        factors = e8m0(held) if scale == "e8m0" else exact(held)
        made = exact(q.data) * spread(factors, values.shape, size, size)
        return Stored({"weight": q.data, suffix: stored}, made, q.format)

    return store


def channel(scale: str = "f32", *, vector: bool = False) -> Store:
    def store(values: Tensor) -> Stored:
        q = quantise(values, FP8_CHANNEL if scale == "f32" else FP8_CHANNEL_BF16)
        held = _scale(q)
        made = exact(q.data) * exact(held)
        return Stored(
            {"weight": q.data, "weight_scale": held.flatten() if vector else held}, made, q.format
        )

    return store


def per_tensor(*, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Store:
    """With dtype bfloat16, the scale is that of a BF16 export: rounded, and exact in float32."""

    def store(values: Tensor) -> Stored:
        q = quantise(values, FP8_TENSOR)
        scale = _scale(q).to(dtype)
        tensors = {
            "weight": q.data,
            "weight_scale": scale.reshape(shape),
            "input_scale": torch.tensor(0.25).reshape(shape),
        }
        return Stored(tensors, exact(q.data) * exact(scale), q.format)

    return store


def mxfp8(suffix: str = "weight_scale", *, as_bytes: bool = True) -> Store:
    def store(values: Tensor) -> Stored:
        q = quantise(values, MXFP8)
        made = exact(q.data) * spread(e8m0(_scale(q)), values.shape, 1, 32)
        scale = _scale(q) if as_bytes else _scale(q).view(torch.float8_e8m0fnu)
        return Stored({"weight": q.data, suffix: scale}, made, q.format)

    return store


def mxfp4(layout: str) -> Store:
    """layout: "deepseek" (I8 and F8_E8M0), "compressed-tensors" or "quark" (bytes)."""

    def store(values: Tensor) -> Stored:
        q = quantise(values, MXFP4)
        made = e2m1(q.data) * spread(e8m0(_scale(q)), values.shape, 1, 32)
        if layout == "deepseek":
            tensors = {
                "weight": q.data.view(torch.int8),
                "scale": _scale(q).view(torch.float8_e8m0fnu),
            }
        else:
            data = "weight_packed" if layout == "compressed-tensors" else "weight"
            tensors = {data: q.data, "weight_scale": _scale(q)}
        return Stored(tensors, made, q.format)

    return store


def nvfp4_modelopt(values: Tensor) -> Stored:
    q = quantise(values, NVFP4)
    factor = _global(q)
    scale = spread(exact(_scale(q)), values.shape, 1, 16)
    return Stored(
        {
            "weight": q.data,
            "weight_scale": _scale(q),
            "weight_scale_2": factor.reshape(()),
            "input_scale": torch.tensor(1.0),
        },
        e2m1(q.data) * scale * exact(factor),
        q.format,
    )


def nvfp4_compressed_tensors(values: Tensor) -> Stored:
    q = quantise(values, NVFP4_DIVIDE)
    factor = _global(q)
    # The block scale is divided in float32.
    scale = (_scale(q).to(torch.float32) / factor).to(torch.float64)
    return Stored(
        {
            "weight_packed": q.data,
            "weight_scale": _scale(q),
            "weight_global_scale": factor.reshape(1),
            "input_global_scale": torch.tensor([0.5]),
        },
        e2m1(q.data) * spread(scale, values.shape, 1, 16),
        q.format,
    )


def int4(values: Tensor) -> Stored:
    q = quantise(values, INT4_G32)
    codes = torch.stack([q.data & 15, q.data >> 4], dim=-1).flatten(-2).to(torch.int64)
    # Eight to a word, the first in the lowest bits.
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    made = (codes - 8).to(torch.float64) * spread(exact(_scale(q)), values.shape, 1, 32)
    return Stored(
        {
            "weight_packed": packed,
            "weight_scale": _scale(q),
            "weight_shape": torch.tensor(values.shape, dtype=torch.int32),
        },
        made,
        q.format,
    )


def _scale(q: Quantised) -> Tensor:
    assert q.scale is not None
    return q.scale


def _global(q: Quantised) -> Tensor:
    assert q.global_scale is not None
    return q.global_scale
