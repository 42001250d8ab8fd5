"""How one stored matrix is coded: decided from its own tensors, never from the config alone."""

from __future__ import annotations

import math

from megamoe.checkpoint.config import Config
from megamoe.checkpoint.files import Entry, Files
from megamoe.checkpoint.matrix import Matrix, scale_grid
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.storage import GLOBAL_SCALES, SCALES, STORAGES, SUFFIXES, Storage


def detect(files: Files, config: Config, stem: str) -> Matrix:
    """The matrix under ``stem``; what no row of STORAGES describes is refused."""
    names = {name[len(stem) + 1 :]: name for name in files.under(stem + ".")}
    suffix = next((s for s in ("weight_packed", "weight") if s in names), None)
    if suffix is None:
        raise refuse(
            files.root, f"{stem}.weight", "missing", "it, or weight_packed",
            "complete the download, or check that config.json belongs to these files",
        )  # fmt: skip
    data = files.entry(names[suffix])
    if len(data.shape) != 2:
        raise refuse(data.file, data.name, data, "a matrix", "export one tensor per projection")
    kinds = [s for s in STORAGES if s.data == suffix and data.dtype in s.dtypes]
    if not kinds:
        known = sorted({dtype for s in STORAGES if s.data == suffix for dtype in s.dtypes})
        raise refuse(
            data.file, data.name, data, f"one of {', '.join(known)}",
            "convert the checkpoint: this dtype cannot be held without rounding",
        )  # fmt: skip
    scale = _only(files, names, SCALES, "scale")
    factor = _only(files, names, GLOBAL_SCALES, "global scale")
    fitting = [
        s for s in kinds
        if (scale is None) == (not s.scale)
        and (factor is None) == (s.global_scale is None)
        and (scale is None or _suffix(scale) in s.scale)
        and (factor is None or _suffix(factor) == s.global_scale)
    ]  # fmt: skip
    if not fitting:
        present = sorted(set(names) & SUFFIXES - {suffix})
        raise refuse(
            data.file, data.name, f"{data} with {' and '.join(present) or 'no scale'}",
            " or ".join(dict.fromkeys(s.needs() for s in kinds)),
            "export it again: a scale is absent or of another convention",
        )  # fmt: skip
    rows, columns = data.shape
    columns *= 8 if data.dtype == "I32" else fitting[0].format.element.packed
    if "weight_shape" in names and suffix == "weight_packed":
        _check_weight_shape(files, names["weight_shape"], rows, columns)
    if factor is not None and (factor.dtype != "F32" or math.prod(factor.shape) != 1):
        raise refuse(factor.file, factor.name, factor, "one F32", "export the checkpoint again")
    kind = fitting[0] if scale is None else _choose(fitting, scale, config, rows, columns)
    return Matrix(
        stem=stem, format=kind.format, rows=rows, columns=columns, data=data, scale=scale,
        global_scale=factor,
    )  # fmt: skip


def _suffix(entry: Entry) -> str:
    return entry.name.rpartition(".")[2]


def _only(
    files: Files, names: dict[str, str], suffixes: tuple[str, ...], what: str
) -> Entry | None:
    """The one tensor of these suffixes that is there, or None."""
    found = [names[s] for s in suffixes if s in names]
    if len(found) > 1:
        raise refuse(
            files.file_of(found[1]), found[1], f"there beside {found[0]}", f"one {what}",
            "remove the one that does not belong",
        )  # fmt: skip
    return files.entry(found[0]) if found else None


def _choose(kinds: list[Storage], scale: Entry, config: Config, rows: int, columns: int) -> Storage:
    """The one storage whose scale dtype and shape are those of the file."""
    typed = [s for s in kinds if scale.dtype in s.scale_dtypes]
    if not typed:
        expected = dict.fromkeys(dtype for s in kinds for dtype in s.scale_dtypes)
        raise refuse(
            scale.file, scale.name, scale, " or ".join(expected),
            "export it again: a scale is absent or of another convention",
        )  # fmt: skip
    grids = {s: scale_grid(s.format, rows, columns) for s in typed}
    fitting = [s for s in typed if s.fits(scale.shape, grids[s])]
    declared = _declared_block(config)
    if declared is not None:
        # It speaks of two-dimensional blocks only, and of those it must be true.
        agreeing = [s for s in fitting if s.format.block[0] <= 1 or s.format.block == declared]
        if fitting and not agreeing:
            grid = [math.ceil(rows / declared[0]), math.ceil(columns / declared[1])]
            raise refuse(
                scale.file, scale.name, f"{scale} ({fitting[0].format})",
                f"{grid}, as weight_block_size {list(declared)} in {config.file.name} says",
                "take config.json and shards of the same revision",
            )  # fmt: skip
        fitting = agreeing
    if not fitting:
        expected = dict.fromkeys(f"{list(grids[s])} ({s.format})" for s in typed)
        raise refuse(
            scale.file, scale.name, scale, f"{' or '.join(expected)} for [{rows}, {columns}]",
            "take config.json and shards of the same revision",
        )  # fmt: skip
    if len(fitting) > 1:
        names = " and ".join(s.format.name for s in fitting)
        raise refuse(
            scale.file, scale.name, f"{scale}, which fits {names}", "one reading",
            "state weight_block_size in config.json's quantization_config",
        )  # fmt: skip
    return fitting[0]


def _declared_block(config: Config) -> tuple[int, int] | None:
    block = config.quantization.get("weight_block_size")
    if block is None:
        return None
    whole = isinstance(block, list) and all(type(size) is int for size in block)
    if not whole or len(block) != 2 or min(block) < 1:
        raise refuse(
            config.file, "weight_block_size", block, "two numbers above 0", "correct the config"
        )
    return block[0], block[1]


def _check_weight_shape(files: Files, name: str, rows: int, columns: int) -> None:
    entry = files.entry(name)
    found = files.read(entry).tolist() if math.prod(entry.shape) == 2 else entry
    if found != [rows, columns]:
        raise refuse(
            entry.file, name, found, f"[{rows}, {columns}], as the packed tensor tells",
            "pad the matrix to whole words before packing, or export it again",
        )  # fmt: skip
