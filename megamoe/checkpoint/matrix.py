"""One stored matrix: its format, and where its codes and scales lie in the files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.checkpoint.files import Entry, Files
from megamoe.formats import Element, Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix [rows, columns] of one expert, as one or several tensors.

    index: which expert of a tensor that stacks them, or None. groups: how many projections lie in
    it; ``interleaved`` says that their rows alternate (gate 0, up 0, gate 1, ...) instead of
    following each other. transposed: stored as [columns, rows].
    """

    stem: str
    format: Format
    rows: int
    columns: int
    data: Entry
    scale: Entry | None = None
    global_scale: Entry | None = None
    index: int | None = None
    groups: int = 1
    interleaved: bool = False
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Stored bytes of this matrix alone."""
        total = sum(e.nbytes for e in (self.data, self.scale, self.global_scale) if e is not None)
        return total if self.index is None else total // self.data.shape[0]

    def codes(self, files: Files) -> Tensor:
        """[rows, stored columns] in the element's dtype, rows as in the file."""
        stored = files.read(self.data, self.index)
        if self.transposed:
            stored = stored.T
        return as_codes(stored, self.format.element).reshape(self.rows, -1)

    def scales(self, files: Files) -> Tensor:
        """[row tiles, column tiles] in the scale's dtype, rows as in the file."""
        assert self.scale is not None
        assert self.format.scale is not None
        stored = as_codes(files.read(self.scale, self.index), self.format.scale)
        return stored.reshape(self.grid)

    @property
    def grid(self) -> tuple[int, int]:
        tiles, across = scale_grid(self.format, self.rows // self.groups, self.columns)
        return tiles * self.groups, across


def scale_grid(fmt: Format, rows: int, columns: int) -> tuple[int, int]:
    """[row tiles, column tiles] of one projection."""
    height, width = fmt.block[0] or max(rows, 1), fmt.block[1] or max(columns, 1)
    return math.ceil(rows / height), math.ceil(columns / width)


def as_codes(stored: Tensor, element: Element) -> Tensor:
    """The same bytes under the element's dtype; nothing is rounded.

    I8, U8, F8_E8M0 and I32 (eight 4-bit codes, the first in the lowest bits: little-endian bytes
    are pairs in order) become uint8. A BF16 scale where the format has float32 widens exactly.
    """
    if stored.dtype == element.dtype:
        return stored
    if element.dtype == torch.uint8:
        return stored.contiguous().view(torch.uint8)
    assert (stored.dtype, element.dtype) == (torch.bfloat16, torch.float32), stored.dtype
    return stored.to(torch.float32)
