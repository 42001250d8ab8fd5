"""The one door to a checkpoint's tensors: what there is, and reading some of it.

A directory holds ``*.safetensors``, sharded with an index or not. Shards are opened when one of
their tensors is asked for, so that a rank touches only the shards that hold its share. safetensors
checks and reads the headers; the bytes themselves are read here, without the kernel's readahead: a
mapped file makes a rank of eight read several times its share from the disk.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.checkpoint.refuse import refuse

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor as its file's header describes it; dtype is the safetensors tag.

    offset: where its bytes begin in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class _Shard:
    stream: FileIO
    entries: dict[str, Entry]


class Files:
    """The tensors of one checkpoint directory, by name.

    ``bytes_read`` counts what :meth:`read` was asked for. Headers are not counted. As a context, it
    closes its shards at the end.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes_read = 0
        self._shards: dict[Path, _Shard] = {}
        self._where = _where(self)
        self._names = sorted(self._where)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._shards.values():
            shard.stream.close()
        self._shards.clear()

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
        found = self.shard(file).entries.get(name)
        if found is None:
            raise refuse(
                file, name, "missing", f"in this shard, as {INDEX} says",
                "download shard and index of the same revision",
            )  # fmt: skip
        return found

    def read(self, entry: Entry, index: int | None = None) -> Tensor:
        """A tensor, or its part ``index`` along the first dimension; on the CPU."""
        shape, offset, nbytes = entry.shape, entry.offset, entry.nbytes
        if index is not None:
            nbytes //= shape[0]
            offset += index * nbytes
            shape = shape[1:]
        held = torch.empty(nbytes, dtype=torch.uint8)
        _read_into(self.shard(entry.file).stream, held, offset, entry)
        self.bytes_read += nbytes
        return held.view(DTYPES[entry.dtype]).reshape(shape)

    def shard(self, file: Path) -> _Shard:
        """An open shard; safetensors holds its header against its length."""
        if file not in self._shards:
            try:
                self._shards[file] = _open(file)
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
        return self._shards[file]


def _open(file: Path) -> _Shard:
    with safe_open(file, framework="pt", device="cpu") as header:
        names = header.offset_keys()
        slices = {name: header.get_slice(name) for name in names}
        shapes = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    stream = FileIO(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    # A file is the length of its header, the header, then the tensors without gaps, in this order.
    offset = 8 + int.from_bytes(os.pread(stream.fileno(), 8, 0), "little")
    entries = {}
    for name in names:
        dtype, shape = shapes[name]
        bits = 4 if dtype == "F4" else 8 * DTYPES[dtype].itemsize if dtype in DTYPES else 0
        nbytes = math.prod(shape) * bits // 8
        entries[name] = Entry(
            name=name, file=file, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes
        )
        offset += nbytes
    if offset != file.stat().st_size:
        raise refuse(
            file, "the shard", f"{file.stat().st_size} bytes", f"{offset}, as its header says",
            "convert dtypes other than " + ", ".join((*DTYPES, "F4")),
        )  # fmt: skip
    return _Shard(stream, entries)


def _read_into(stream: FileIO, held: Tensor, offset: int, entry: Entry) -> None:
    """Fill ``held`` from the file: one read gives at most 2 GiB, and a signal may cut it short."""
    view = held.numpy().data
    while len(view):
        count = os.preadv(stream.fileno(), [view], offset)
        if not count:
            raise refuse(
                entry.file, entry.name, f"cut short, {len(view)} bytes before its end",
                f"{entry}", "download the shard again; it may be truncated",
            )  # fmt: skip
        view, offset = view[count:], offset + count


def _where(files: Files) -> dict[str, Path]:
    root = files.root
    if not root.is_dir():
        raise refuse(
            root, "the checkpoint", "no directory", "a directory",
            "pass a local directory; download the repository first",
        )  # fmt: skip
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
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
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
        for name in files.shard(shard).entries:
            if name in where:
                raise refuse(
                    shard, name, f"here and in {where[name].name}", "in one shard only",
                    "restore the index, or remove the copy that does not belong",
                )  # fmt: skip
            where[name] = shard
    return where
