"""The ways to store a matrix, as a table.

A matrix with the stem ``...gate_proj`` is the tensors ``...gate_proj.<suffix>``; each row says
which suffixes and safetensors dtypes make which format, and which shapes its scale may have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
)


@dataclass(frozen=True, slots=True)
class Storage:
    """One row. ``shape``: of the scale; a "column" may be stored as a vector (Quark)."""

    format: Format
    data: str
    dtypes: tuple[str, ...]
    scale: tuple[str, ...] = ()
    scale_dtypes: tuple[str, ...] = ()
    global_scale: str | None = None
    shape: Literal["grid", "column", "scalar"] = "grid"

    def fits(self, stored: tuple[int, ...], grid: tuple[int, int]) -> bool:
        """Whether a stored scale has the shape that this storage gives a matrix of that grid."""
        if self.shape == "scalar":
            return stored in ((), (1,))
        return stored == grid or (self.shape == "column" and stored == grid[:1])

    def needs(self) -> str:
        """The tensors beside the codes, in words."""
        return (
            " and ".join(filter(None, (" or ".join(self.scale), self.global_scale))) or "no scale"
        )


BYTES = ("U8", "I8")
E8M0_TAGS = ("F8_E8M0", "U8")
# "inv" or not, all of them multiply.
SCALES = ("weight_scale", "weight_scale_inv", "scale")
FP8 = ("F8_E4M3",)

STORAGES = (
    Storage(PLAIN_BF16, "weight", ("BF16",)),
    Storage(PLAIN_F32, "weight", ("F32",)),
    Storage(FP8_TENSOR, "weight", FP8, SCALES, ("F32", "BF16"), shape="scalar"),
    Storage(FP8_CHANNEL, "weight", FP8, ("weight_scale",), ("F32",), shape="column"),
    Storage(FP8_CHANNEL_BF16, "weight", FP8, ("weight_scale",), ("BF16",), shape="column"),
    Storage(FP8_BLOCK128, "weight", FP8, SCALES, ("F32",)),
    Storage(FP8_BLOCK128_BF16, "weight", FP8, SCALES, ("BF16",)),
    Storage(FP8_BLOCK128_E8M0, "weight", FP8, SCALES, E8M0_TAGS),
    Storage(FP8_BLOCK32, "weight", FP8, SCALES, ("F32",)),
    Storage(FP8_BLOCK32_BF16, "weight", FP8, SCALES, ("BF16",)),
    Storage(FP8_BLOCK32_E8M0, "weight", FP8, SCALES, E8M0_TAGS),
    Storage(MXFP8, "weight", FP8, SCALES, E8M0_TAGS),
    Storage(MXFP4, "weight", BYTES, ("weight_scale", "scale"), E8M0_TAGS),
    Storage(MXFP4, "weight_packed", BYTES, ("weight_scale",), E8M0_TAGS),
    Storage(NVFP4, "weight", BYTES, ("weight_scale",), FP8, "weight_scale_2"),
    Storage(NVFP4_DIVIDE, "weight_packed", BYTES, ("weight_scale",), FP8, "weight_global_scale"),
    Storage(INT4_G32, "weight_packed", ("I32",), ("weight_scale",), ("BF16",)),
)

# Belong to a matrix without being part of its values: static activation scales, and a shape that
# the packed tensor already tells.
BESIDE = ("input_scale", "input_global_scale", "activation_scale", "weight_shape")
GLOBAL_SCALES = tuple(s.global_scale for s in STORAGES if s.global_scale)
SUFFIXES = frozenset(
    (*(s.data for s in STORAGES), *SCALES, *GLOBAL_SCALES, *BESIDE),
)
