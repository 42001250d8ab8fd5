"""How one stored matrix is coded: decided from its own tensors, never from the config alone.

A matrix with the stem ``...gate_proj`` is the tensors ``...gate_proj.<suffix>``. Each row of
``STORAGES`` is one way to lay codes and scales out in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megamoe.checkpoint.config import Config
from megamoe.checkpoint.files import Entry, Files
from megamoe.checkpoint.refuse import refuse
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

BYTES = ("U8", "I8")
E8M0_TAGS = ("F8_E8M0", "U8")
INVERSE = ("weight_scale_inv", "scale")  # both multiply, whatever the name says
SCALES = ("weight_scale", *INVERSE)


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to store a matrix: which suffixes and safetensors dtypes make which format."""

    format: Format
    data: str
    dtypes: tuple[str, ...]
    scale: tuple[str, ...] = ()
    scale_dtypes: tuple[str, ...] = ()
    global_scale: str | None = None
    blocks: Literal["as stored", "two-dimensional"] = "as stored"


STORAGES = (
    Storage(PLAIN_BF16, "weight", ("BF16",)),
    Storage(PLAIN_F32, "weight", ("F32",)),
    # per tensor and per channel
    Storage(FP8_TENSOR, "weight", ("F8_E4M3",), ("weight_scale",), ("F32", "BF16")),
    Storage(FP8_CHANNEL, "weight", ("F8_E4M3",), ("weight_scale",), ("F32",)),
    Storage(FP8_CHANNEL_BF16, "weight", ("F8_E4M3",), ("weight_scale",), ("BF16",)),
    # two-dimensional blocks
    Storage(FP8_BLOCK128, "weight", ("F8_E4M3",), SCALES, ("F32",)),
    Storage(FP8_BLOCK128_BF16, "weight", ("F8_E4M3",), SCALES, ("BF16",)),
    Storage(FP8_BLOCK128_E8M0, "weight", ("F8_E4M3",), SCALES, E8M0_TAGS),
    Storage(FP8_BLOCK32, "weight", ("F8_E4M3",), SCALES, ("F32",)),
    Storage(FP8_BLOCK32_BF16, "weight", ("F8_E4M3",), SCALES, ("BF16",)),
    Storage(FP8_BLOCK32_E8M0, "weight", ("F8_E4M3",), SCALES, E8M0_TAGS),
    # microscaling
    Storage(MXFP8, "weight", ("F8_E4M3",), SCALES, E8M0_TAGS),
    Storage(MXFP4, "weight", BYTES, ("weight_scale", "scale"), E8M0_TAGS),
    Storage(MXFP4, "weight_packed", ("U8",), ("weight_scale",), E8M0_TAGS),
    Storage(NVFP4, "weight", BYTES, ("weight_scale",), ("F8_E4M3",), "weight_scale_2"),
    Storage(
        NVFP4_DIVIDE, "weight_packed", ("U8",), ("weight_scale",), ("F8_E4M3",),
        "weight_global_scale",
    ),
    Storage(INT4_G32, "weight_packed", ("I32",), ("weight_scale",), ("BF16",)),
)  # fmt: skip

# Belong to a matrix without being part of its values: static activation scales, and a shape that
# the packed tensor already tells.
BESIDE = ("input_scale", "input_global_scale", "weight_shape")
SUFFIXES = frozenset(
    [s.data for s in STORAGES]
    + [name for s in STORAGES for name in s.scale]
    + [s.global_scale for s in STORAGES if s.global_scale]
    + list(BESIDE)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One stored matrix [rows, columns] and where its codes and scales are."""

    stem: str
    format: Format
    rows: int
    columns: int
    data: Entry
    scale: Entry | None = None
    global_scale: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(e for e in (self.data, self.scale, self.global_scale) if e is not None)


def scale_grid(fmt: Format, rows: int, columns: int) -> tuple[int, int]:
    """[row tiles, column tiles] of one matrix."""
    height, width = fmt.block[0] or max(rows, 1), fmt.block[1] or max(columns, 1)
    return math.ceil(rows / height), math.ceil(columns / width)


def _fits(stored: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """Whether a scale has that grid; a vector may stand for a column, a scalar for one tile."""
    as_stored = {grid}
    if grid[1] == 1:
        as_stored.add((grid[0],))  # type: ignore[arg-type]
    if grid == (1, 1):
        as_stored.add(())  # type: ignore[arg-type]
    return stored in as_stored


def _declared_block(config: Config) -> tuple[int, int] | None:
    block = config.quantization.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) for b in block)):
        raise refuse(
            config.file, "weight_block_size", block, "[rows, columns]", "correct the config"
        )
    return block[0], block[1]


def detect(files: Files, config: Config, stem: str) -> Matrix:
    """The matrix under ``stem`` with its format; what STORAGES does not describe is refused."""
    names = {name[len(stem) + 1 :]: name for name in files.under(stem + ".")}
    data_suffix = next((s for s in ("weight_packed", "weight") if s in names), None)
    if data_suffix is None:
        raise refuse(
            files.root, f"{stem}.weight", "missing", "it, or weight_packed",
            "complete the download, or check that config.json belongs to these files",
        )  # fmt: skip
    data = files.entry(names[data_suffix])
    if len(data.shape) != 2:
        raise refuse(data.file, data.name, data, "a matrix", "export one tensor per projection")
    rows, stored_columns = data.shape
    kinds = [s for s in STORAGES if s.data == data_suffix and data.dtype in s.dtypes]
    if not kinds:
        known = sorted({t for s in STORAGES if s.data == data_suffix for t in s.dtypes})
        raise refuse(
            data.file, data.name, data, f"one of {', '.join(known)}",
            "convert it: this dtype cannot be held without rounding",
        )  # fmt: skip
    scales = [s for s in SCALES if s in names]
    if len(scales) > 1:
        raise refuse(
            files.file_of(names[scales[1]]), names[scales[1]], f"there beside {scales[0]}",
            "one scale per matrix", "remove the one that does not belong",
        )  # fmt: skip
    scale = files.entry(names[scales[0]]) if scales else None
    two_level = next((s.global_scale for s in STORAGES if s.global_scale in names), None)
    kinds = [
        s for s in kinds
        if (scales[0] in s.scale if scales else not s.scale) and s.global_scale == two_level
    ]  # fmt: skip
    if not kinds:
        found = ", ".join(sorted(set(names) & SUFFIXES))
        raise refuse(
            data.file, stem, f"{data} with the tensors {found}",
            f"what {data.dtype} {data_suffix} needs: {_needs(data_suffix, data.dtype)}",
            "export it again; a scale is absent or of another convention",
        )  # fmt: skip
    if scale is None:
        fmt = kinds[0].format
        return Matrix(stem=stem, format=fmt, rows=rows, columns=stored_columns, data=data)
    per_item = 8 if data.dtype == "I32" else kinds[0].format.element.packed
    columns = stored_columns * per_item
    if "weight_shape" in names and data.dtype == "I32":
        _check_weight_shape(files, names["weight_shape"], rows, columns)
    kind = _choose(kinds, scale, config, rows, columns)
    factor = files.entry(names[two_level]) if two_level else None
    if factor is not None and (factor.dtype != "F32" or math.prod(factor.shape) != 1):
        raise refuse(
            factor.file, factor.name, factor, "F32, one value", "export the checkpoint again"
        )
    return Matrix(
        stem=stem, format=kind.format, rows=rows, columns=columns, data=data, scale=scale,
        global_scale=factor,
    )  # fmt: skip


def _needs(suffix: str, dtype: str) -> str:
    ways = {
        " + ".join(filter(None, (" or ".join(s.scale), s.global_scale))) or "no scale"
        for s in STORAGES
        if s.data == suffix and dtype in s.dtypes
    }
    return ", or ".join(sorted(ways))


def _choose(kinds: list[Storage], scale: Entry, config: Config, rows: int, columns: int) -> Storage:
    """The one storage whose scale dtype and grid are those of the file."""
    typed = [s for s in kinds if scale.dtype in s.scale_dtypes]
    if not typed:
        expected = sorted({t for s in kinds for t in s.scale_dtypes})
        raise refuse(
            scale.file, scale.name, scale, f"one of {', '.join(expected)}",
            "export the checkpoint again with a scale dtype that megamoe holds",
        )  # fmt: skip
    fitting = [s for s in typed if _fits(scale.shape, scale_grid(s.format, rows, columns))]
    # [out / 128, in / 128] grids exist under any of the names, the others under weight_scale only.
    block = _declared_block(config)
    if block is not None and len(fitting) != 1:
        fitting = [s for s in fitting if s.format.block == block] or fitting
    if not fitting or (
        block is not None and fitting[0].format.block[0] > 1 and fitting[0].format.block != block
    ):
        grids = {s.format: list(scale_grid(s.format, rows, columns)) for s in typed}
        if block is not None:
            grids = {f: g for f, g in grids.items() if f.block[0] <= 1 or f.block == block}
        expected_grids = ", or ".join(f"{g} ({f})" for f, g in grids.items())
        raise refuse(
            scale.file, scale.name, scale,
            f"{expected_grids or f'a grid of {block} blocks'} for [{rows}, {columns}]",
            "take config.json and shards of the same revision",
        )  # fmt: skip
    if len(fitting) > 1:
        raise refuse(
            scale.file, scale.name, f"{scale}, which fits several formats",
            "one reading", "say weight_block_size in config.json's quantization_config",
        )  # fmt: skip
    return fitting[0]


def _check_weight_shape(files: Files, name: str, rows: int, columns: int) -> None:
    entry = files.entry(name)
    found = files.read(entry).tolist() if math.prod(entry.shape) == 2 else entry
    if found != [rows, columns]:
        raise refuse(
            entry.file, name, found, f"[{rows}, {columns}], as the packed tensor tells",
            "pad the matrix to whole words before packing, or export again",
        )  # fmt: skip
