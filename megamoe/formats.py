"""Number formats as data: one rounding function, one quantiser, one error bound for all of them.

An :class:`Element` says how one number is coded, a :class:`Format` how numbers share scales, and a
:class:`Quantised` is a tensor of codes that carries its format. Logical values are held in float64,
where every element times its scales is exact.

Source of the codes: OCP MX specification 1.0 (E4M3, E5M2, E2M1, E8M0), IEEE 754 (BF16, FP32).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megamoe.errors import bad_input

F64 = torch.float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """How one number is coded.

    A float has ``mantissa_bits`` stored bits, least normal exponent ``min_exponent`` and greatest
    finite value ``max``. Past ``max`` it rounds to infinity where it has one, else it saturates.
    ``code`` tells the three ways a code is read: a sign-magnitude float, a bare exponent (E8M0: no
    sign, no zero) or an integer stored with an offset. ``dtype`` is the torch type of stored codes;
    4-bit codes are packed two to a byte, the lower index in the low nibble.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    min: float
    code: Literal["float", "exponent", "offset"] = "float"
    infinity: bool = False
    nan: int | None = None  # the one NaN that is written, whichever NaN was given
    dtype: torch.dtype = torch.uint8

    @property
    def packed(self) -> int:
        """How many codes one stored item holds."""
        return 2 if self.bits == 4 else 1

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1


def _float(
    name: str, bits: int, mantissa: int, low: int, top: float, dtype: torch.dtype, **extra: object
) -> Element:
    return Element(
        name=name,
        bits=bits,
        mantissa_bits=mantissa,
        min_exponent=low,
        max=top,
        min=-top,
        dtype=dtype,
        **extra,  # type: ignore[arg-type]
    )


FP32 = _float(
    "fp32", 32, 23, -126, (2 - 2**-23) * 2.0**127, torch.float32, infinity=True, nan=0x7FC00000
)
BF16 = _float(
    "bf16", 16, 7, -126, (2 - 2**-7) * 2.0**127, torch.bfloat16, infinity=True, nan=0x7FC0
)
E4M3 = _float("e4m3", 8, 3, -6, 448.0, torch.float8_e4m3fn, nan=0x7F)
E5M2 = _float("e5m2", 8, 2, -14, 57344.0, torch.float8_e5m2, infinity=True, nan=0x7F)
E2M1 = _float("e2m1", 4, 1, 0, 6.0, torch.uint8)
E8M0 = Element(
    name="e8m0",
    bits=8,
    mantissa_bits=0,
    min_exponent=-127,
    max=2.0**127,
    min=2.0**-127,
    code="exponent",
    nan=0xFF,
)
INT4 = Element(
    name="int4", bits=4, mantissa_bits=3, min_exponent=3, max=7.0, min=-8.0, code="offset"
)
ELEMENTS = (FP32, BF16, E4M3, E5M2, E2M1, E8M0, INT4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """How a block's scale is made from its greatest magnitude, and how elements meet it.

    All steps are float32, each rounded once. ``kind``: ``amax`` is amax over ``top``;
    ``power_of_two_up`` the least power of two not below it, ``power_of_two_nearest`` the nearest
    (halfway goes up), ``power_of_two_floor`` the greatest power of two not above amax, moved down
    by the element's greatest exponent (OCP MX; elements may saturate), all three in E8M0's range;
    ``two_level`` is ModelOpt's NVFP4: amax over top times the global scale, itself coded in the
    scale's element; ``static`` is ``top`` whatever the values.

    ``quotient`` divides by ``top`` or multiplies by its rounded reciprocal; ``apply`` does the same
    for elements and their scale. The two differ in about half of all scales, so a recipe says
    which. ``amax_floor`` and ``scale_floor`` raise small values. ``zero_scale`` is for an all-zero
    block and for one whose scale underflows to zero.
    """

    kind: Literal[
        "amax",
        "power_of_two_up",
        "power_of_two_nearest",
        "power_of_two_floor",
        "two_level",
        "static",
    ]
    top: float
    quotient: Literal["divide", "reciprocal"] = "divide"
    apply: Literal["divide", "reciprocal"] = "divide"
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    zero_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a tensor's numbers are coded and share scales.

    ``block`` is (rows, columns) of the last two dimensions under one scale; 0 is the whole extent.
    ``global_scale`` says how a float32 scale per row group enters: ``multiply`` (ModelOpt) or
    ``divide`` (compressed-tensors: the block scale becomes RN32(scale / global)).
    """

    name: str
    element: Element
    block: tuple[int, int] = (0, 0)
    scale: Element | None = None
    global_scale: Literal["none", "multiply", "divide"] = "none"
    rule: ScaleRule | None = None

    def __str__(self) -> str:
        return self.name


def _fp8(name: str, block: tuple[int, int], scale: Element, rule: ScaleRule) -> Format:
    return Format(name=name, element=E4M3, block=block, scale=scale, rule=rule)


AMAX_448 = ScaleRule(kind="amax", top=448.0, zero_scale=1.0)
UP_448 = ScaleRule(kind="power_of_two_up", top=448.0)

PLAIN_F32 = Format(name="f32", element=FP32)
PLAIN_BF16 = Format(name="bf16", element=BF16)
FP8_TENSOR = _fp8("fp8_tensor", (0, 0), FP32, AMAX_448)
FP8_CHANNEL = _fp8("fp8_channel", (1, 0), FP32, AMAX_448)
FP8_CHANNEL_BF16 = _fp8("fp8_channel_bf16_scale", (1, 0), BF16, AMAX_448)
FP8_BLOCK128 = _fp8("fp8_block128", (128, 128), FP32, AMAX_448)
FP8_BLOCK128_BF16 = _fp8("fp8_block128_bf16_scale", (128, 128), BF16, AMAX_448)
FP8_BLOCK128_E8M0 = _fp8("fp8_block128_e8m0_scale", (128, 128), E8M0, UP_448)
FP8_BLOCK32 = _fp8("fp8_block32", (32, 32), FP32, AMAX_448)
FP8_BLOCK32_BF16 = _fp8("fp8_block32_bf16_scale", (32, 32), BF16, AMAX_448)
FP8_BLOCK32_E8M0 = _fp8("fp8_block32_e8m0_scale", (32, 32), E8M0, UP_448)
FP8_ROW = _fp8("fp8_row", (1, 0), FP32, AMAX_448)
FP8_1X128 = _fp8("fp8_1x128", (1, 128), FP32, AMAX_448)
FP8_1X64 = _fp8("fp8_1x64", (1, 64), FP32, AMAX_448)
MXFP8 = _fp8("mxfp8", (1, 32), E8M0, UP_448)
MXFP4 = Format(
    name="mxfp4",
    element=E2M1,
    block=(1, 32),
    scale=E8M0,
    rule=ScaleRule(kind="power_of_two_up", top=6.0),
)
NVFP4 = Format(
    name="nvfp4",
    element=E2M1,
    block=(1, 16),
    scale=E4M3,
    global_scale="multiply",
    rule=ScaleRule(kind="two_level", top=6.0, scale_floor=2.0**-9, zero_scale=1.0),
)
NVFP4_DIVIDE = Format(
    name="nvfp4_divide",
    element=E2M1,
    block=(1, 16),
    scale=E4M3,
    global_scale="divide",
    rule=ScaleRule(kind="two_level", top=6.0, scale_floor=2.0**-9, zero_scale=1.0),
)
INT4_G32 = Format(
    name="int4_g32",
    element=INT4,
    block=(1, 32),
    scale=BF16,
    rule=ScaleRule(kind="amax", top=7.0, zero_scale=1.0),
)
CATALOGUE = (
    PLAIN_F32,
    PLAIN_BF16,
    FP8_TENSOR,
    FP8_CHANNEL,
    FP8_CHANNEL_BF16,
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
    FP8_BLOCK32,
    FP8_BLOCK32_BF16,
    FP8_BLOCK32_E8M0,
    FP8_ROW,
    FP8_1X128,
    FP8_1X64,
    MXFP8,
    MXFP4,
    NVFP4,
    NVFP4_DIVIDE,
    INT4_G32,
)


# --- one number ---------------------------------------------------------------------------------


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent as float64, exact: integer exponents in [-1022, 1023] become bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(F64)


def exponent_of(values: Tensor) -> Tensor:
    """floor(log2 |v|) of float64 values as int64; zeros and float64 denormals give -1023."""
    return ((values.view(torch.int64) >> 52) & 0x7FF) - 1023


def last_bit_of(values: Tensor) -> Tensor:
    """The exponent of the lowest set bit of float64 values, int64; meaningless for zeros."""
    mantissa = (values.view(torch.int64) & ((1 << 52) - 1)) | (1 << 52)
    return exponent_of(values) - 52 + exponent_of((mantissa & -mantissa).to(F64))


def round_to(values: Tensor, element: Element) -> Tensor:
    """The nearest values of ``element``, ties to even, as float64.

    values: float64, any shape. Overflow becomes an infinity where the element has one, else the
    greatest finite value; NaN stays NaN (coded as the block's scale where the element has none).
    """
    if element.code == "exponent":  # no sign and no zero: halfway goes up, as torch's cast does
        magnitude = values.abs().clamp(element.min, element.max)
        exponent = exponent_of(magnitude)
        up = (magnitude.view(torch.int64) >> 51) & 1
        rounded = power_of_two((exponent + up).clamp(max=127))
        return torch.where(values.isnan(), values, rounded)
    exponent = exponent_of(values).clamp(min=element.min_exponent, max=1000)
    quantum = exponent - element.mantissa_bits
    rounded = (values * power_of_two(-quantum)).round() * power_of_two(quantum)
    if not element.infinity:
        return rounded.clamp(element.min, element.max)
    infinite = torch.where(values < 0, -math.inf, math.inf)
    return torch.where(rounded.abs() > element.max, infinite, rounded)


def rn32(values: Tensor) -> Tensor:
    """float64 to float32, to nearest even. The one place where this cast happens."""
    return values.to(torch.float32)


def rnbf16(values: Tensor) -> Tensor:
    """float32 to BF16, to nearest even; never from float64, which would round twice."""
    assert values.dtype == torch.float32, values.dtype
    return values.to(torch.bfloat16)


@functools.cache
def code_values(element: Element) -> tuple[float, ...]:
    """The value of each code of an element of up to 8 bits, in code order."""
    assert element.bits <= 8
    values = []
    for code in range(1 << element.bits):
        if element.code == "exponent":
            values.append(math.nan if code == element.nan else math.ldexp(1.0, code - 127))
            continue
        if element.code == "offset":
            values.append(float(code - (1 << (element.bits - 1))))
            continue
        magnitude = code & ((1 << (element.bits - 1)) - 1)
        field_, mantissa = divmod(magnitude, 1 << element.mantissa_bits)
        value = math.ldexp(
            mantissa + (1 << element.mantissa_bits) * (field_ > 0),
            max(field_ - 1, 0) + element.min_exponent - element.mantissa_bits,
        )
        if value > element.max:
            value = math.inf if element.infinity and mantissa == 0 else math.nan
        values.append(-value if code >> (element.bits - 1) else value)
    return tuple(values)


@functools.cache
def _table(element: Element, device: torch.device) -> Tensor:
    """The value of each code, float32, which holds them all."""
    return torch.tensor(code_values(element), dtype=torch.float32, device=device)


def decode(data: Tensor, element: Element) -> Tensor:
    """The values of stored codes, float64: [..., n] items give [..., n * element.packed]."""
    if data.dtype.is_floating_point:
        return data.to(F64) if element.bits >= 16 else data.to(torch.float32).to(F64)
    codes = data if element.packed == 1 else unpack(data)
    return _table(element, data.device)[codes.to(torch.int32)].to(F64)


_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def encode(values: Tensor, element: Element) -> Tensor:
    """Stored codes of float64 values that the element holds exactly: the inverse of :func:`decode`.

    NaN takes the element's NaN code, or zero's where it has none.
    """
    if element.dtype.is_floating_point:
        data = values.to(torch.float32).to(element.dtype)
        assert element.nan is not None
        # A cast's NaN has a sign and a payload, and they differ between devices.
        data.view(_BITS[element.bits]).masked_fill_(values.isnan(), element.nan)
        return data
    if element.code == "exponent":
        codes = exponent_of(values) + 127
        # 2 ** -127 is a float64 normal number, so its exponent is right too.
        return torch.where(values.isnan(), 0xFF, codes).to(torch.uint8)
    if element.code == "offset":
        codes = values.nan_to_num(0.0).to(torch.int64) + (1 << (element.bits - 1))
    else:
        finite = values.nan_to_num(0.0)
        exponent = exponent_of(finite).clamp(min=element.min_exponent)
        mantissa = (finite.abs() * power_of_two(element.mantissa_bits - exponent)).to(torch.int64)
        codes = ((exponent - element.min_exponent) << element.mantissa_bits) + mantissa
        codes += (finite.view(torch.int64) < 0).to(torch.int64) << (element.bits - 1)
    return pack(codes.to(torch.uint8))


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the lower index in the low nibble: uint8 [..., n] to [..., n / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """The inverse of :func:`pack`: uint8 [..., n] to [..., 2 n] codes below 16."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


# --- a tensor of numbers ------------------------------------------------------------------------


def _grid(extent: int, block: int) -> int:
    return (1 if extent else 0) if block == 0 else -(-extent // block)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantised:
    """A tensor of codes with its format; validated once.

    data: the element's dtype, [..., rows, columns / element.packed] (4-bit codes packed).
    scale: [..., row tiles, column tiles] in the scale's dtype, or None where the format has none.
    global_scale: float32 [..., row_groups], or None.
    row_groups: the rows fall into this many equal groups, and tiling starts anew in each: gate and
    up rows of w13 keep the scales they had as separate tensors, whatever their height.
    """

    format: Format
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    row_groups: int = 1
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        fmt, element = self.format, self.format.element
        if self.data.dtype != element.dtype:
            raise bad_input(
                f"{fmt} data", f"of {self.data.dtype}", f"is not {element.dtype}", "view it as that"
            )
        if self.data.dim() < 2:
            raise bad_input(
                f"{fmt} data", f"of shape {tuple(self.data.shape)}", "has no rows and columns",
                "pass at least two dimensions",
            )  # fmt: skip
        *lead, rows, columns = self.data.shape
        columns *= element.packed
        if self.row_groups < 1 or rows % self.row_groups:
            raise bad_input(
                f"{fmt} rows", rows, f"do not fall into {self.row_groups} equal groups",
                "pass row_groups that divides them",
            )  # fmt: skip
        object.__setattr__(self, "shape", (*lead, rows, columns))
        self._check("scale", self.scale, fmt.scale, self.scale_shape)
        needs_global = FP32 if fmt.global_scale != "none" else None
        self._check("global scale", self.global_scale, needs_global, (*lead, self.row_groups))

    def _check(
        self, what: str, tensor: Tensor | None, element: Element | None, shape: tuple[int, ...]
    ) -> None:
        fmt = self.format
        if element is None:
            if tensor is not None:
                raise bad_input(f"{what}", tuple(tensor.shape), f"has no place in {fmt}", "drop it")
            return
        if tensor is None:
            raise bad_input(
                f"{what} of {fmt}", "None", f"is missing, {list(shape)} expected", "pass it"
            )
        if tuple(tensor.shape) != shape:
            raise bad_input(
                f"{what} of {fmt}", list(tensor.shape), f"is not {list(shape)}",
                f"pass one scale per tile of the {list(self.shape)} tensor",
            )  # fmt: skip
        if tensor.dtype != element.dtype:
            raise bad_input(
                f"{what} of {fmt}", f"of {tensor.dtype}", f"is not {element.dtype}",
                "view or cast it exactly",
            )  # fmt: skip
        if tensor.device != self.data.device:
            raise bad_input(
                f"{what} of {fmt}", f"on {tensor.device}", f"is not on {self.data.device}",
                "move it",
            )  # fmt: skip

    @property
    def scale_shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.shape
        tiles = self.row_groups * _grid(rows // self.row_groups, self.format.block[0])
        return (*lead, tiles, _grid(columns, self.format.block[1]))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.data, self.scale, self.global_scale) if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def __getitem__(self, index: int | slice | Tensor) -> Quantised:
        """Select along the first (expert) dimension; views where torch gives views."""
        return self._map(lambda t: t[index])

    def to(self, device: torch.device | str) -> Quantised:
        return self._map(lambda t: t.to(device))

    def _map(self, f: object) -> Quantised:
        assert callable(f)
        return Quantised(
            format=self.format,
            data=f(self.data),
            scale=None if self.scale is None else f(self.scale),
            global_scale=None if self.global_scale is None else f(self.global_scale),
            row_groups=self.row_groups,
        )


def plain(values: Tensor) -> Quantised:
    """A BF16 or float32 tensor [..., rows, columns] as a :class:`Quantised` without scales."""
    formats = {f.element.dtype: f for f in (PLAIN_BF16, PLAIN_F32)}
    if values.dtype not in formats:
        raise bad_input(
            "plain values", f"of {values.dtype}", "are neither bfloat16 nor float32",
            "pass a Quantised that says how its codes are read",
        )  # fmt: skip
    return Quantised(format=formats[values.dtype], data=values)


def _tiles(values: Tensor, fmt: Format, row_groups: int) -> Tensor:
    """Zero pad [..., rows, columns]: [..., row tiles, tile height, column tiles, tile width]."""
    *lead, rows, columns = values.shape
    rows //= row_groups
    height, width = fmt.block[0] or max(rows, 1), fmt.block[1] or max(columns, 1)
    across, down = _grid(columns, width), _grid(rows, height)
    values = values.unflatten(-2, (row_groups, rows))
    values = torch.nn.functional.pad(values, (0, across * width - columns, 0, down * height - rows))
    return values.reshape(*lead, row_groups * down, height, across, width)


def _untiled(tiles: Tensor, shape: tuple[int, ...], row_groups: int) -> Tensor:
    """The inverse of :func:`_tiles`: padding dropped."""
    *lead, rows, columns = shape
    height = tiles.shape[-3] * (tiles.shape[-4] // row_groups)
    values = tiles.reshape(*lead, row_groups, height, tiles.shape[-2] * tiles.shape[-1])
    return values[..., : rows // row_groups, :columns].reshape(shape)


def _single(value: float) -> float:
    """A rule's constant as float32 code has it."""
    return torch.tensor(value, dtype=torch.float32).item()


def _scales(amax: Tensor, fmt: Format, multiplier: Tensor | None) -> Tensor:
    """Each block's scale from its greatest magnitude: float64, exact in the scale's element."""
    rule, element = fmt.rule, fmt.scale
    assert rule is not None
    assert element is not None
    if rule.kind == "static":
        return round_to(torch.full_like(amax, rule.top), element)
    top = rn32(amax.new_full((), rule.top)).to(F64)  # filled on the device: safe in a capture
    if rule.kind == "two_level":
        assert multiplier is not None
        top = rn32(top * multiplier).to(F64)
    raised = amax.clamp(min=_single(rule.amax_floor))
    if rule.quotient == "divide":
        scale = rn32(raised / top).to(F64)
    else:
        scale = rn32(raised * rn32(torch.ones_like(top) / top).to(F64)).to(F64)
    if rule.kind == "power_of_two_floor":
        scale = power_of_two((exponent_of(raised) - fmt.element.max_exponent).clamp(-127, 127))
    elif rule.kind == "power_of_two_nearest":
        scale = round_to(scale, E8M0)
    elif rule.kind == "power_of_two_up":
        above = (scale.view(torch.int64) & ((1 << 52) - 1)) != 0
        scale = power_of_two((exponent_of(scale) + above).clamp(-127, 127))
    coded = round_to(scale.clamp(min=_single(rule.scale_floor)), element)
    if rule.zero_scale is not None:
        zero = (amax == 0) | (scale == 0) | (coded == 0)
        coded = torch.where(zero, rule.zero_scale, coded)
    return torch.where(amax.isfinite(), coded, math.nan)


def quantise(
    values: Tensor, fmt: Format, *, row_groups: int = 1, global_scale: Tensor | None = None
) -> Quantised:
    """``values`` in ``fmt``, by the format's own scale rule.

    values: BF16, float32 or float64 [..., rows, columns]; scaled formats work on their float32
    rounding. global_scale: float32 [..., row_groups], made from each group's greatest magnitude
    where not given (amax / (top * greatest scale); compressed-tensors stores its reciprocal).
    A NaN or infinity turns its own block into NaN, and no other; under a static scale, and in a
    format without scales, its own element only.
    """
    rows, columns = values.shape[-2:]
    if columns % fmt.element.packed:
        raise bad_input(
            f"{fmt} columns", columns, "cannot be packed two to a byte", "pad to an even count"
        )
    if rows % row_groups:
        raise bad_input(
            f"{fmt} rows", rows, f"do not fall into {row_groups} equal groups",
            "pass row_groups that divides them",
        )  # fmt: skip
    if fmt.scale is None:
        data = encode(round_to(values.to(F64), fmt.element), fmt.element)
        return Quantised(format=fmt, data=data, row_groups=row_groups)
    assert fmt.rule is not None
    exact = rn32(values.to(F64)).to(F64)
    tiles = _tiles(exact, fmt, row_groups)
    amax = tiles.abs().amax(dim=(-3, -1))
    per_tile = None
    if fmt.global_scale != "none":
        if global_scale is None:
            global_scale = _global_scale(amax, fmt, row_groups)
        per_tile = _global_per_tile(global_scale, fmt, amax.shape[-2])
        made = _scales(amax, fmt, _multiplier(per_tile, fmt))
    else:
        made = _scales(amax, fmt, None)
    effective = _effective(made, per_tile, fmt, rounded=True)
    by = effective[..., :, None, :, None]
    if fmt.rule.apply == "divide":
        ratio = rn32(tiles / by)
    else:
        ratio = rn32(tiles * rn32(torch.ones_like(by) / by).to(F64))
    elements = _untiled(round_to(ratio.to(F64), fmt.element), tuple(values.shape), row_groups)
    return Quantised(
        format=fmt,
        data=encode(elements, fmt.element),
        scale=encode(made, fmt.scale),
        global_scale=global_scale,
        row_groups=row_groups,
    )


def _global_scale(amax: Tensor, fmt: Format, row_groups: int) -> Tensor:
    """float32 [..., row_groups]; 1 where a group is zero, or so small that its scale would be."""
    assert fmt.rule is not None
    assert fmt.scale is not None
    blocks = torch.where(amax.isfinite(), amax, 0.0)
    blocks = blocks.unflatten(-2, (row_groups, amax.shape[-2] // row_groups)).flatten(-2)
    whole = torch.nn.functional.pad(blocks, (0, 1)).amax(dim=-1)  # the pad serves empty groups
    top = torch.full_like(whole, fmt.rule.top * fmt.scale.max)
    scale = rn32(whole / top) if fmt.global_scale == "multiply" else rn32(top / whole)
    return torch.where((scale > 0) & scale.isfinite(), scale, 1.0)


def _multiplier(global_scale: Tensor, fmt: Format) -> Tensor:
    if fmt.global_scale == "multiply":
        return global_scale
    return rn32(torch.ones_like(global_scale) / global_scale).to(F64)


def _global_per_tile(global_scale: Tensor, fmt: Format, tiles: int) -> Tensor:
    """float32 [..., groups] to float64 [..., row tiles, 1]."""
    repeat = tiles // max(global_scale.shape[-1], 1)
    return global_scale.to(F64).repeat_interleave(repeat, dim=-1)[..., None]


def _effective(scale: Tensor, per_tile: Tensor | None, fmt: Format, *, rounded: bool) -> Tensor:
    """What a block's elements are multiplied by; ``rounded`` to the quantiser's float32."""
    if per_tile is None:
        return scale
    if fmt.global_scale == "divide":
        return rn32(scale / per_tile).to(F64)
    product = scale * per_tile
    return rn32(product).to(F64) if rounded else product


def effective_scale(q: Quantised, *, rounded: bool = False) -> Tensor:
    """What each tile's elements are multiplied by, float64 of q.scale_shape, exact.

    rounded: to float32, as the quantiser divided by it; only a multiplying global scale differs.
    """
    assert q.scale is not None
    assert q.format.scale is not None
    scale = decode(q.scale, q.format.scale)
    per_tile = None
    if q.global_scale is not None:
        per_tile = _global_per_tile(q.global_scale, q.format, scale.shape[-2])
    return _effective(scale, per_tile, q.format, rounded=rounded)


def row_scale(q: Quantised, *, rows: slice = slice(None), rounded: bool = False) -> Tensor:
    """What each row's tiles are multiplied by, float64 [..., rows, column tiles], exact.

    rows: only these of the second-last dimension. rounded: as in ``effective_scale``.
    """
    scale = effective_scale(q, rounded=rounded)
    count = q.shape[-2] // q.row_groups
    height = q.format.block[0] or max(count, 1)
    row = torch.arange(count, device=scale.device) // height
    group = torch.arange(q.row_groups, device=scale.device)[:, None] * _grid(count, height)
    return scale.index_select(-2, (group + row).flatten()[rows])


def dequantise(q: Quantised, *, to: Element | None = None, rows: slice = slice(None)) -> Tensor:
    """The exact values, float64 of q.shape; with ``to``, rounded once to that element's dtype.

    rows: only these of the second-last dimension, so that a large matrix can be read in pieces.
    """
    values = decode(q.data[..., rows, :], q.format.element)
    if q.scale is not None:
        scale = row_scale(q, rows=rows)
        width = q.format.block[1] or max(q.shape[-1], 1)
        if q.shape[-1] % width == 0:
            values = (values.unflatten(-1, (-1, width)) * scale[..., None]).flatten(-2)
        else:
            column = torch.arange(q.shape[-1], device=values.device) // width
            values = values * scale.index_select(-1, column)
    return values if to is None else encode(round_to(values, to), to)


def bit_range(q: Quantised, *, rows: slice = slice(None)) -> tuple[Tensor, Tensor] | None:
    """Exponents (low, high) of each row: its values are multiples of 2**low and below 2**high.

    int64 [..., rows], read off the scales alone; None for a format without scales.
    """
    if q.scale is None or not q.scale.numel():
        return None
    element = q.format.element
    scale = row_scale(q, rows=rows)
    low = torch.where(scale == 0, 1 << 20, last_bit_of(scale)).amin(-1)
    greatest = math.frexp(max(element.max, -element.min))[1]
    return (
        low + element.min_exponent - element.mantissa_bits,
        exponent_of(scale).amax(-1) + 1 + greatest,
    )


def error_bound(values: Tensor, q: Quantised) -> Tensor:
    """How far ``dequantise(q)`` may lie from the ``values`` it was quantised from, per element.

    Half the gap between neighbours at that magnitude, times the scale, widened by the float32
    roundings of scale and ratio; where a value lies past the element's greatest, the excess too.
    float64 of q.shape. Holds for values that are finite in float32 and stayed finite.
    """
    exact = values.to(F64)
    element = q.format.element
    if q.scale is None:
        return _rounding_bound(exact, element)
    width = q.format.block[1] or max(q.shape[-1], 1)
    scale, divisor = (
        row_scale(q, rounded=rounded)
        .repeat_interleave(width, dim=-1)[..., : q.shape[-1]]
        for rounded in (False, True)
    )  # fmt: skip
    ratio = exact / divisor
    rounding = (_rounding_bound(ratio, element) + 4 * 2.0**-24 * ratio.abs()) * scale
    # The last addend is what float32 loses of a number below its normal range.
    bound = rounding + ratio.abs() * (scale - divisor).abs() + 2.0**-150
    # A divisor that underflowed made every element zero or the greatest.
    return torch.where(divisor == 0, exact.abs() + element.max * scale, bound)


def _rounding_bound(values: Tensor, element: Element) -> Tensor:
    exponent = exponent_of(values).clamp(min=element.min_exponent)
    half_gap = power_of_two(exponent - element.mantissa_bits - 1)
    return half_gap + torch.maximum(values - element.max, element.min - values).clamp(min=0)
