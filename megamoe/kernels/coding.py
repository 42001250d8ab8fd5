"""Rows of BF16 as E4M3 codes and their scales in one launch: ``formats.quantise``, fused in Triton.

Triton is imported by the first call. Every step is a float32 operation rounded once, or works on
bit patterns: those of magnitudes order as the magnitudes do, with NaN above infinity, so that no
maximum can lose a NaN and no comparison can flush a denormal.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from megamoe.errors import Unsupported
from megamoe.formats import E4M3, E8M0, FP32, Format

if TYPE_CHECKING:
    import triton.language as tl

TILE: Final = 1024  # elements a program of 4 warps takes: 16 bytes of them a thread


def serves(x: Tensor) -> bool:
    """Whether :func:`code` runs where ``x`` lies: a GPU that casts to E4M3, with Triton."""
    return x.is_cuda and _ready(x.device)


@functools.cache
def _ready(device: torch.device) -> bool:
    found = importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device) >= (8, 9)


def code(
    x: Tensor, fmt: Format, *, codes: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The data [n, H] and scale [n, tiles] of ``formats.quantise(x, fmt)``, bit for bit.

    x: BF16 [n, H], any stride between rows and none within. fmt: E4M3 with a scale for all of a row
    or for columns of it, whose rule is ``amax`` or ``power_of_two_up``; Unsupported elsewhere.
    codes, scales: contiguous, written where given; float32 ``codes`` take the clamped quotients
    before their last rounding. The launch reads nothing back. The first one of a format, width and
    alignment of x compiles, so it has to precede a capture.
    """
    rule = _rule(fmt)
    n, columns = x.shape
    assert x.dtype == torch.bfloat16
    assert x.stride(1) == 1 or columns < 2 or n == 0
    assert fmt.scale is not None
    width = fmt.block[1] or _power_above(columns)
    count = -(-columns // width)
    if codes is None:
        codes = torch.empty(n, columns, dtype=E4M3.dtype, device=x.device)
    if scales is None:
        scales = torch.empty(n, count, dtype=fmt.scale.dtype, device=x.device)
    assert (codes.shape, scales.shape) == ((n, columns), (n, count))
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    if codes.numel() == 0:
        return codes, scales
    blocks = 1 if not fmt.block[1] else max(1, TILE // width)
    grid = (n, -(-count // blocks))
    warps = 4 if width * blocks <= 2 * TILE else 8
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        _kernel()[grid](
            x, codes, scales, columns, x.stride(0), width, blocks, *rule, num_warps=warps
        )  # fmt: skip
    return codes, scales


def _power_above(columns: int) -> int:
    """The least power of two not below ``columns``: what one program spans."""
    return 1 << max(columns - 1, 0).bit_length()


@functools.cache
def _rule(fmt: Format) -> tuple[bool, bool, float, int, int, int, bool]:
    """The kernel's constants from POWER on."""
    rule, width = fmt.rule, fmt.block[1]
    kinds = {FP32: ("amax", "power_of_two_up"), E8M0: ("power_of_two_up",)}
    if (
        rule is None
        or fmt.scale is None
        or (fmt.element, fmt.block[0], fmt.global_scale) != (E4M3, 1, "none")
        or rule.kind not in kinds.get(fmt.scale, ())
        or width & (width - 1)
        or (fmt.scale is E8M0 and rule.scale_floor > 0)
    ):
        raise Unsupported(
            f"{fmt} is not what the fused kernel writes: E4M3, one scale a row or a power of two "
            "of its columns, in float32 or as powers of two; use formats.quantise"
        )
    top = torch.tensor(rule.top, dtype=torch.float32)
    divide = rule.quotient == "divide"
    return (
        rule.kind == "power_of_two_up",
        divide,
        float(top if divide else torch.ones_like(top) / top),
        _bits(rule.amax_floor),
        _bits(rule.scale_floor),
        -1 if rule.zero_scale is None else _bits(rule.zero_scale),
        rule.apply == "divide",
    )


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@functools.cache
def _kernel() -> Any:
    global tl  # the body finds it among the globals
    import triton
    import triton.language as tl

    return triton.jit(_code_rows)


def _code_rows(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    POWER: tl.constexpr,
    DIVIDE: tl.constexpr,
    FACTOR: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    ZERO_SCALE: tl.constexpr,
    APPLY_DIVIDES: tl.constexpr,
) -> None:
    """BLOCKS blocks of WIDTH columns of one row. Floors and ZERO_SCALE are bits of float32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < columns
    narrow = tl.load(x + row * stride + column, mask=inside, other=0.0)
    bits = narrow.to(tl.int16, bitcast=True).to(tl.int32) << 16
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
    tl.store(codes + row * columns + column, values.to(codes.dtype.element_ty), mask=inside)

    count = tl.cdiv(columns, WIDTH)
    if scales.dtype.element_ty == tl.uint8:
        tl.store(scales + row * count + block, (scale >> 23).to(tl.uint8), mask=block < count)
    else:
        made = scale.to(tl.float32, bitcast=True)
        tl.store(scales + row * count + block, made, mask=block < count)
