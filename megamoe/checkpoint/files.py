"""The one door to a checkpoint's tensors: what there is, and reading some of it.

A directory holds ``*.safetensors``, sharded with an index or not. Shards are opened when one of
their tensors is asked for, so that a rank touches only the shards that hold its share.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.checkpoint.refuse import refuse

INDEX = "model.safetensors.index.json"
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor as its file's header describes it; dtype is the safetensors tag."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS.get(self.dtype, 0) // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Files:
    """The tensors of one checkpoint directory, by name.

    ``bytes_read`` counts what :meth:`read` was asked for. Headers are not counted.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._where = _where(self)
        self._names = sorted(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def under(self, prefix: str) -> list[str]:
        """The names that begin with ``prefix``, sorted; nothing is opened."""
        names = self._names
        return names[bisect_left(names, prefix) : bisect_left(names, prefix + "\U0010ffff")]

    def file_of(self, name: str) -> Path:
        """The shard that the index gives for a tensor, or the directory where it gives none."""
        return self._where.get(name, self.root)

    def entry(self, name: str) -> Entry:
        """A tensor's dtype and shape, from its shard's header."""
        if name not in self._where:
            raise refuse(
                self.root, name, "missing", "a tensor of that name",
                "complete the download, or check that config.json belongs to these files",
            )  # fmt: skip
        file = self._where[name]
        handle = self.handle(file)
        try:
            found = handle.get_slice(name)
        except SafetensorError as error:
            raise refuse(
                file, name, "missing", f"in this shard, as {INDEX} says",
                "download shard and index of the same revision",
            ) from error  # fmt: skip
        return Entry(name=name, file=file, dtype=found.get_dtype(), shape=tuple(found.get_shape()))

    def read(self, entry: Entry, index: int | slice | None = None) -> Tensor:
        """A tensor, or a part of it along its first dimension; CPU, possibly a view of the file."""
        handle = self.handle(entry.file)
        if index is None:
            tensor: Tensor = handle.get_tensor(entry.name)
        elif isinstance(index, int):
            tensor = handle.get_slice(entry.name)[index : index + 1][0]
        else:
            tensor = handle.get_slice(entry.name)[index]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def handle(self, file: Path) -> Any:
        """The open shard; safetensors checks its header against its length."""
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise refuse(
                    file, "the shard", "absent", f"a file, as {INDEX} says", "complete the download"
                ) from error
            except (SafetensorError, OSError) as error:
                size = file.stat().st_size if file.is_file() else 0
                raise refuse(
                    file, "the shard", f"{size} bytes that do not read ({error})",
                    "a whole safetensors file", "download it again; it may be truncated",
                ) from error  # fmt: skip
        return self._open[file]


def _where(files: Files) -> dict[str, Path]:
    root = files.root
    if not root.is_dir():
        raise refuse(root, "the checkpoint", "no directory", "a directory", "check the path")
    shards = sorted(root.glob("*.safetensors"))
    index = root / INDEX
    if not index.is_file():
        others = sorted(root.glob("*.safetensors.index.json"))
        if len(others) == 1:
            index = others[0]
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): root / str(shard) for name, shard in named.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise refuse(
                index, "the index", f"unreadable ({error!r})", "JSON with a weight_map",
                "download it again",
            ) from error  # fmt: skip
    if not shards:
        raise refuse(
            root, "the directory", "without *.safetensors", "at least one",
            "point at the directory that holds config.json and the weights",
        )  # fmt: skip
    where: dict[str, Path] = {}
    for shard in shards:
        for name in files.handle(shard).keys():  # noqa: SIM118 (not a mapping)
            if name in where:
                raise refuse(
                    shard, name, f"here and in {where[name].name}", "in one shard only",
                    "restore the index, or remove the copy that does not belong",
                )  # fmt: skip
            where[name] = shard
    return where
