"""One launch from the caller's tensors to a kernel's buffers: ``Staging``, fused in Triton.

Triton is imported by the first call. Every step on values is a float32 operation rounded once, or
works on bit patterns: those of magnitudes order as the magnitudes do, with NaN above infinity, so
that no maximum can lose a NaN and no comparison can flush a denormal.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from megamoe.errors import Unsupported
from megamoe.formats import E4M3, E8M0, FP32, PLAIN_BF16, Format
from megamoe.kernels.base import Batch

if TYPE_CHECKING:
    import triton.language as tl

    from megamoe.kernels.staging import Staging

    route: Any
    write: Any

TILE: Final = 1024  # elements a program of 4 warps takes: of BF16, 16 bytes a thread
ROUTING, COPY, CODE = range(3)


def serves(x: Tensor) -> bool:
    """Whether :func:`stage` runs where ``x`` lies: a GPU that casts to E4M3, with Triton."""
    return x.is_cuda and _ready(x.device)


@functools.cache
def _ready(device: torch.device) -> bool:
    found = importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device) >= (8, 9)


def stage(
    plan: Staging,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    into: Batch,
    *,
    factor: float = 1.0,
    first: int = 0,
) -> None:
    """What ``plan(x, ids, weights, into)`` does, bit for bit, in one launch.

    plan.fmt: BF16, or E4M3 with a scale for all of a row or for columns of it, whose rule is
    ``amax``, ``power_of_two_up`` or ``static``; Unsupported elsewhere. x: BF16, copied first where
    its columns are not next to each other or its rows not aligned like a tensor's own; ``into.x``
    may be x itself, whose rows the kernel then takes as they are. E4M3 codes may go to uint8;
    float32 takes the clamped quotients before their last rounding. Nothing is read back. The first
    launch for a plan's constants and the dtypes of ids and weights compiles, so it has to precede a
    capture; counts, the capacity, ``first``, factor, and where x, ids and weights lie are free.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            stage(plan, x, ids, weights, into, factor=factor, first=first)
            return
    n, columns = x.shape
    rows, k = into.ids.shape
    assert n == into.count
    found = _settings(plan.fmt, columns, k)
    mode, tiles, rule = found.mode, found.tiles, found.rule
    scales, scale_columns, spread, order, period = into.scales, 0, 0, None, 0
    rows_in: Tensor | None = x
    rows_out: Tensor | None = into.x
    if mode == COPY:
        scales = None
        if into.x is x:
            assert not plan.stale, "rows without an expert are written, so x needs a copy"
            mode, tiles, rows_in, rows_out = ROUTING, 0, None, None
    else:
        if plan.order is not None:
            order, period = plan.order, plan.order.shape[0]
            assert period & (period - 1) == 0
            assert columns % period == 0
        if scales is not None:
            assert scales.is_contiguous()
            scale_columns = scales.shape[1]
            spread = _power_above(scale_columns) if found.whole else 0
            if found.powers:
                scales = scales.view(torch.uint8)  # Triton has no name for E8M0
            else:
                assert scales.dtype == torch.float32
    stride = columns
    if mode != ROUTING:
        assert into.x.is_contiguous()
        if n and not _aligned(x):
            rows_in = x = x.clone(memory_format=torch.contiguous_format)
        if n > 1:  # a lone row's is anything
            stride = x.stride(0)
    if weights.dtype is torch.float64:
        weights = weights.to(torch.float32)
    assert into.ids.is_contiguous()
    assert into.weights.is_contiguous()
    programs = -(-rows // found.rows) + n * tiles
    if programs == 0:
        return
    replicas, counts = plan.replicas, plan.counts
    if replicas is None or counts is None:
        replicas = counts = None
    ids_row, ids_slot = ids.stride()
    weights_row, weights_slot = weights.stride()
    most = 0 if replicas is None else replicas.shape[1]
    values = (
        rows_in, ids, weights, rows_out, into.ids, into.weights, scales, plan.sticky, replicas,
        counts, order, float(factor), found.given, n, rows, plan.rank + first, ids_row, ids_slot,
        weights_row, weights_slot, columns, stride, scale_columns, k, found.lanes, found.rows,
        plan.num_experts, most, plan.stale, mode, found.width, found.blocks, spread, period, *rule,
    )  # fmt: skip
    _launch(programs, values, found.warps)


def _aligned(x: Tensor) -> bool:
    """Whether the kernel that is compiled for rows right behind each other reads these too."""
    n, columns = x.shape
    if x.data_ptr() % 16 or (columns > 1 and x.stride(1) != 1):
        return False
    stride = x.stride(0)
    return n == 1 or stride == columns or (columns % 16 == stride % 16 == 0 and stride < 1 << 31)


def _launch(programs: int, values: tuple[Any, ...], warps: int) -> None:
    """Launch with the compiled kernel of before where all that chose it is the same: finding it
    again costs Triton as much host time as the rest of a call."""
    x, ids, weights, out_x, out_ids, _, scales, sticky, replicas, counts, order = values[:11]
    key = (
        sticky.device, ids.dtype, weights.dtype, out_ids.dtype, warps,
        None if scales is None else scales.dtype,
        None if x is None else (out_x.data_ptr() % 16, out_x.dtype),
        None if replicas is None else (replicas.data_ptr() % 16, counts.data_ptr() % 16),
        None if order is None else order.data_ptr() % 16,
        values[STRIDE - 1], values[STRIDE + 2:],
    )  # fmt: skip
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _kernel()[(programs, 1, 1)](*values, num_warps=warps)
        if compiled is not None:  # the interpreter compiles nothing
            _COMPILED[key] = compiled
        return
    compiled[(programs, 1, 1)](*values)


STRIDE: Final = 21  # of x's rows among the arguments
_COMPILED: dict[Any, Any] = {}

Rule = tuple[bool, bool, bool, float, int, int, int, bool]  # the constants from STATIC on


class _Settings(NamedTuple):
    """What the launches of one format, width and top_k share.

    whole: one scale spans the row. powers: scales are E8M0. given: the scale of a static rule, an
    argument, so that layers with scales of their own share a compiled kernel.
    """

    fmt: Format
    mode: int
    tiles: int
    lanes: int
    rows: int
    width: int
    blocks: int
    whole: bool
    powers: bool
    warps: int
    given: float
    rule: Rule


_known: dict[tuple[int, int, int], _Settings] = {}


def _settings(fmt: Format, columns: int, k: int) -> _Settings:
    """Kept by the format's identity, since its hash takes longer than everything else here."""
    key = (id(fmt), columns, k)
    found = _known.get(key)
    if found is None:  # an entry holds its format, so no other can come to have its id
        found = _known[key] = _make_settings(fmt, columns, k)
    return found


def _make_settings(fmt: Format, columns: int, k: int) -> _Settings:
    lanes, width = _power_above(k), TILE
    mode, whole, given = COPY, False, 0.0
    rule: Rule = (False, False, False, 0.0, 0, 0, 0, False)
    if fmt != PLAIN_BF16:
        mode, rule, whole = CODE, _rule(fmt), fmt.block[1] == 0
        assert fmt.rule is not None
        static = fmt.rule.kind == "static"
        given = _single(fmt.rule.top) if static else 0.0
        width = fmt.block[1] or (TILE if static else _power_above(columns))
    blocks = 1 if whole else max(1, TILE // width)
    count = -(-columns // width)
    return _Settings(
        fmt=fmt,
        mode=mode,
        tiles=-(-count // blocks),
        lanes=lanes,
        rows=max(1, TILE // lanes),
        width=width,
        blocks=blocks,
        whole=whole,
        powers=fmt.scale is E8M0,
        warps=4 if width * blocks <= 2 * TILE else 8,
        given=given,
        rule=rule,
    )


def _power_above(count: int) -> int:
    """The least power of two not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


@functools.cache
def _rule(fmt: Format) -> Rule:
    rule, width = fmt.rule, fmt.block[1]
    kinds = {FP32: ("amax", "power_of_two_up", "static"), E8M0: ("power_of_two_up",)}
    if (
        rule is None
        or fmt.scale is None
        or (fmt.element, fmt.global_scale) != (E4M3, "none")
        or (fmt.block[0] != 1 and (rule.kind, fmt.block) != ("static", (0, 0)))
        or rule.kind not in kinds.get(fmt.scale, ())
        or width & (width - 1)
        or (fmt.scale is E8M0 and rule.scale_floor > 0)
    ):
        raise Unsupported(
            f"{fmt} is not what the fused kernel writes: E4M3, one scale a row or a power of two "
            "of its columns, in float32 or as powers of two; use formats.quantise"
        )
    apply_divides = rule.apply == "divide"
    if rule.kind == "static":
        return (True, False, False, 0.0, 0, 0, 0, apply_divides)
    top = torch.tensor(rule.top, dtype=torch.float32)
    divide = rule.quotient == "divide"
    return (
        False,
        rule.kind == "power_of_two_up",
        divide,
        float(top if divide else torch.ones_like(top) / top),
        _bits(rule.amax_floor),
        _bits(rule.scale_floor),
        -1 if rule.zero_scale is None else _bits(rule.zero_scale),
        apply_divides,
    )


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


VARYING: Final = (
    "n",
    "rows",
    "first",
    "ids_row",
    "ids_slot",
    "weights_row",
    "weights_slot",
    "scale_columns",
)
"""Integers whose values must not choose another compiled kernel."""

UNALIGNED: Final = ("ids", "weights", "out_ids", "out_weights", "out_scales", "sticky")
"""Pointers whose alignment must not either: slices of a call's rows start anywhere."""


@functools.cache
def _kernel() -> Any:
    global tl, route, write  # the bodies find them among the globals
    import triton
    import triton.language as tl

    route, write = triton.jit(_route), triton.jit(_write)
    varying, unaligned = list(VARYING), list(UNALIGNED)
    return triton.jit(_stage, do_not_specialize=varying, do_not_specialize_on_alignment=unaligned)


def _stage(
    x: tl.tensor, ids: tl.tensor, weights: tl.tensor, out_x: tl.tensor, out_ids: tl.tensor,
    out_weights: tl.tensor, out_scales: tl.tensor, sticky: tl.tensor, replicas: tl.tensor,
    counts: tl.tensor, order: tl.tensor, factor: tl.tensor, given: tl.tensor, n: tl.tensor,
    rows: tl.tensor, first: tl.tensor, ids_row: tl.tensor, ids_slot: tl.tensor,
    weights_row: tl.tensor, weights_slot: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    scale_columns: tl.tensor, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, MOST: tl.constexpr, STALE: tl.constexpr, MODE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SPREAD: tl.constexpr, PERIOD: tl.constexpr,
    STATIC: tl.constexpr, POWER: tl.constexpr, DIVIDE: tl.constexpr, FACTOR: tl.constexpr,
    AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, ZERO_SCALE: tl.constexpr,
    APPLY_DIVIDES: tl.constexpr,
) -> None:  # fmt: skip
    """The first programs route ROWS rows each, the others write a tile of one row of x.

    MODE: ROUTING, COPY or CODE. first: with the rank added. Floors and ZERO_SCALE are float32 bits.
    """
    program = tl.program_id(0)
    routers = tl.cdiv(rows, ROWS)
    if program < routers:
        route(
            program, ids, weights, out_ids, out_weights, sticky, replicas, counts, factor, n, rows,
            first, ids_row, ids_slot, weights_row, weights_slot, K, LANES, ROWS, EXPERTS, MOST,
            STALE,
        )  # fmt: skip
    elif MODE != 0:
        tiles = tl.cdiv(tl.cdiv(columns, WIDTH), BLOCKS)
        row = ((program - routers) // tiles).to(tl.int64)
        tile = (program - routers) % tiles
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = column < columns
        narrow = tl.load(x + row * stride + column, mask=inside, other=0.0)
        if STALE:  # a row without an expert is written as zeros
            slot = tl.arange(0, LANES)
            own = tl.load(ids + row * ids_row + slot * ids_slot, mask=slot < K, other=0)
            held = (slot < K) & (own.to(tl.int64) >= 0) & (own.to(tl.int64) < EXPERTS)
            narrow = tl.where(tl.max(held.to(tl.int32), axis=0) != 0, narrow, 0.0)
        if MODE == 1:
            tl.store(out_x + row * columns + column, narrow, mask=inside)
        else:
            write(
                narrow, row, tile, block, column, out_x, out_scales, order, given, columns,
                scale_columns, WIDTH, BLOCKS, SPREAD, PERIOD, STATIC, POWER, DIVIDE, FACTOR,
                AMAX_FLOOR, SCALE_FLOOR, ZERO_SCALE, APPLY_DIVIDES,
            )  # fmt: skip


def _route(
    program: tl.tensor, ids: tl.tensor, weights: tl.tensor, out_ids: tl.tensor,
    out_weights: tl.tensor, sticky: tl.tensor, replicas: tl.tensor, counts: tl.tensor,
    factor: tl.tensor, n: tl.tensor, rows: tl.tensor, first: tl.tensor, ids_row: tl.tensor,
    ids_slot: tl.tensor, weights_row: tl.tensor, weights_slot: tl.tensor, K: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, MOST: tl.constexpr,
    STALE: tl.constexpr,
) -> None:  # fmt: skip
    """Ids and weights of ROWS rows, those past ``n`` included."""
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    slot = tl.arange(0, LANES)[None, :]
    inside = (row < n) & (slot < K)
    at = row.to(tl.int64)
    found = tl.load(ids + (at * ids_row + slot * ids_slot), mask=inside, other=0).to(tl.int64)
    weight = tl.load(weights + (at * weights_row + slot * weights_slot), mask=inside, other=0.0)
    weight = weight.to(tl.float32) * factor
    held = inside & (found >= 0) & (found < EXPERTS)
    bad = inside & (found != -1) & ((found < 0) | (found >= EXPERTS))
    tl.store(sticky + tl.zeros_like(row + slot), True, mask=bad)
    if replicas is not None:
        count = tl.load(counts + found, mask=held, other=1).to(tl.int32)
        choice = (first + row + slot) % count
        found = tl.load(replicas + (found * MOST + choice), mask=held, other=-1)
    found = tl.where(held, found, -1)
    weight = tl.where(held, weight, 0.0)
    if STALE:
        own = tl.max(found, axis=1)[:, None]
        found = tl.where((row < n) & (found < 0), tl.maximum(own, 0), found)
    there = (row < rows) & (slot < K)
    tl.store(out_ids + (at * K + slot), found.to(out_ids.dtype.element_ty), mask=there)
    tl.store(out_weights + (at * K + slot), weight, mask=there)


def _write(
    narrow: tl.tensor, row: tl.tensor, tile: tl.tensor, block: tl.tensor, column: tl.tensor,
    codes: tl.tensor, scales: tl.tensor, order: tl.tensor, given: tl.tensor, columns: tl.tensor,
    scale_columns: tl.tensor, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SPREAD: tl.constexpr,
    PERIOD: tl.constexpr, STATIC: tl.constexpr, POWER: tl.constexpr, DIVIDE: tl.constexpr,
    FACTOR: tl.constexpr, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ZERO_SCALE: tl.constexpr, APPLY_DIVIDES: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCKS blocks of WIDTH columns of one row in E4M3, and their scales: SPREAD times the one."""
    bits = narrow.to(tl.int16, bitcast=True).to(tl.int32) << 16
    if STATIC:
        scale = (tl.zeros((BLOCKS,), tl.float32) + given).to(tl.int32, bitcast=True)
    else:
        amax = tl.max(bits & 0x7FFFFFFF, axis=1)
        raised = tl.maximum(amax, AMAX_FLOOR).to(tl.float32, bitcast=True)
        quotient = tl.div_rn(raised, FACTOR) if DIVIDE else raised * FACTOR
        scale = quotient.to(tl.int32, bitcast=True)
        if POWER:  # E8M0's range: of the denormals there is 2**-127 alone
            exponent, mantissa = scale >> 23, scale & 0x7FFFFF
            above = tl.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
            exponent = tl.minimum(exponent + above.to(tl.int32), 254)
            scale = tl.where(exponent == 0, 0x400000, exponent << 23)
        zero = (amax == 0) | (scale == 0)
        scale = tl.maximum(scale, SCALE_FLOOR)
        if ZERO_SCALE >= 0:
            scale = tl.where(zero, ZERO_SCALE, scale)
        scale = tl.where(amax >= 0x7F800000, 0x7FC00000, scale)

    values = bits.to(tl.float32, bitcast=True)
    by = scale.to(tl.float32, bitcast=True)[:, None]
    values = tl.div_rn(values, by) if APPLY_DIVIDES else values * tl.div_rn(1.0, by)
    values = tl.minimum(values, 448.0, propagate_nan=tl.PropagateNan.ALL)
    values = tl.maximum(values, -448.0, propagate_nan=tl.PropagateNan.ALL)
    if order is not None:
        source = tl.load(order + tl.arange(0, PERIOD))[None, :]
        source = tl.broadcast_to(source, (BLOCKS * WIDTH // PERIOD, PERIOD))
        values = tl.reshape(values, (BLOCKS * WIDTH // PERIOD, PERIOD))
        values = tl.reshape(tl.gather(values, source, 1), (BLOCKS, WIDTH))
    target = codes + row * columns + column
    inside = column < columns
    if codes.dtype.element_ty == tl.uint8:
        coded = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(target, coded, mask=inside)
    else:
        tl.store(target, values.to(codes.dtype.element_ty), mask=inside)

    if scales is not None:
        if SPREAD:
            place = tl.arange(0, SPREAD)
            scale = tl.broadcast_to(scale, (SPREAD,))
            there = (place < scale_columns) & (tile == 0)
        else:
            place = block
            there = block < tl.cdiv(columns, WIDTH)
        if scales.dtype.element_ty == tl.uint8:
            made = (scale >> 23).to(tl.uint8)
        else:
            made = scale.to(tl.float32, bitcast=True)
        tl.store(scales + row * scale_columns + place, made, mask=there)
