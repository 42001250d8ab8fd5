"""Was one block scale misread? Every block of one slot's weights is tried.

Shapes: R tile rows and C tile columns of a matrix; H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import F64, Quantised, dequantise
from megamoe.reference.elementwise import clamp, gated
from megamoe.reference.suspect import Suspect

CANDIDATES = 2048  # blocks of w13 tried; where there are more, in the rows that the error points at
FACTORS = (2.0, 0.5)


def misread_blocks(s: Suspect, slot: int) -> list[tuple[str, Tensor]]:
    """The best fitting block of w13 and of w2: (fault, what the slot would then add [H])."""
    experts, layer = s.experts, s.layer
    if s.ids[slot] < 0:
        return []
    x, after = s.alone.x[0].to(F64), s.w[slot]
    if layer.weight_at == "input":
        x, after = x * after, torch.ones_like(after)
    if layer.scale_at == "output":
        after = after * layer.routed_scaling_factor
    w2 = dequantise(experts.w2[slot : slot + 1])[0]
    part_RC = _by_column_tile(experts.w13[slot : slot + 1], x)
    h = part_RC.sum(1)
    if experts.b13 is not None:
        h = h + experts.b13[slot].to(F64)
    missing = s.y - s.exact
    found = []
    if experts.w13.scale is not None:
        found.append(_in_w13(s, slot, part_RC, h, w2, missing, after))
    if experts.w2.scale is not None:
        mid = gated(*clamp(h, layer.activation), layer.activation)
        found.append(_in_w2(s, slot, _by_column_tile(experts.w2[slot : slot + 1], mid), after))
    return found


def _in_w13(
    s: Suspect, slot: int, part: Tensor, h: Tensor, w2: Tensor, missing: Tensor, after: Tensor
) -> tuple[str, Tensor]:
    matrix, activation = s.experts.w13, s.layer.activation
    row_tile = _row_tiles(matrix, h.device)
    tiles, columns = matrix.scale_shape[-2:]
    # An error in row i of gate or up moves the output along column i of w2.
    along = (missing @ w2).square() / w2.square().sum(0).clamp(min=2.0**-1022)
    score = h.new_zeros(tiles).index_add_(0, row_tile, torch.cat([along, along]))
    kept = score.argsort(descending=True)[: max(1, CANDIDATES // columns)]
    tile = kept.repeat_interleave(columns)
    column = torch.arange(columns, device=h.device).repeat(len(kept))
    extra = torch.where(row_tile == tile[:, None], part.T[column], 0.0)
    base = gated(*clamp(h, activation), activation)
    best: tuple[float, str, Tensor] | None = None
    for factor in FACTORS:
        mid = gated(*clamp(h + (factor - 1) * extra, activation), activation)
        change = ((mid - base) @ w2.T) * after
        misfit = (missing - change).square().sum(1)
        index = int(misfit.argmin())
        if best is None or float(misfit[index]) < best[0]:
            name = _name("w13", matrix, int(tile[index]), int(column[index]), factor)
            best = (float(misfit[index]), name, s.terms[slot] + change[index])
    assert best is not None
    return best[1], best[2]


def _in_w2(s: Suspect, slot: int, part: Tensor, after: Tensor) -> tuple[str, Tensor]:
    matrix = s.experts.w2
    row_tile = _row_tiles(matrix, part.device)
    tiles, columns = matrix.scale_shape[-2:]
    change = part * after
    missing = (s.y - s.exact)[:, None]
    square = part.new_zeros(tiles, columns).index_add_(0, row_tile, change.square())
    along = part.new_zeros(tiles, columns).index_add_(0, row_tile, change * missing)
    gain = torch.stack([(f - 1) ** 2 * square - 2 * (f - 1) * along for f in FACTORS])
    which, rest = divmod(int(gain.argmin()), tiles * columns)
    tile, column = divmod(rest, columns)
    factor = FACTORS[which]
    moved = torch.where(row_tile == tile, (factor - 1) * change[:, column], 0.0)
    return _name("w2", matrix, tile, column, factor), s.terms[slot] + moved


def _by_column_tile(matrix: Quantised, operand: Tensor) -> Tensor:
    """The dot of each row with ``operand``, split by column tile: [rows, C]."""
    width = matrix.format.block[1] or max(1, matrix.shape[-1])
    product = dequantise(matrix)[0] * operand
    padded = torch.nn.functional.pad(product, (0, -product.shape[1] % width))
    by_tile: Tensor = padded.unflatten(1, (-1, width)).sum(2)
    return by_tile


def _row_tiles(matrix: Quantised, device: torch.device) -> Tensor:
    """The tile row of each row, int64."""
    rows = torch.arange(matrix.shape[-2], device=device)
    group, row = rows // _height(matrix, whole=True), rows % _height(matrix, whole=True)
    return group * (matrix.scale_shape[-2] // matrix.row_groups) + row // _height(matrix)


def _height(matrix: Quantised, *, whole: bool = False) -> int:
    group = max(1, matrix.shape[-2] // matrix.row_groups)
    return group if whole else matrix.format.block[0] or group


def _name(what: str, matrix: Quantised, tile: int, column: int, factor: float) -> str:
    rows = (_row_tiles(matrix, torch.device("cpu")) == tile).nonzero()[:, 0]
    width = matrix.format.block[1] or matrix.shape[-1]
    last = min((column + 1) * width, matrix.shape[-1]) - 1
    return (
        f"block scale of {what} multiplied by {factor:g}, rows {int(rows[0])} to {int(rows[-1])}, "
        f"columns {column * width} to {last}"
    )
