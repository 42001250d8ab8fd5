"""The fused coding of activations: in Triton's interpreter, and in what its compiler emits.

Both run in processes of their own, since the interpreter is chosen when Triton is imported. Its
cast to FP8 does not round to nearest even, so there the kernel is asked for the clamped quotients,
which ``formats`` rounds; tests/gpu/test_coding_gpu.py judges the bits of the cast, on these cases.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the processes below start without pytest's path

from strategies import bell, hashed  # noqa: E402

from megamoe.errors import Unsupported  # noqa: E402
from megamoe.formats import (  # noqa: E402
    CATALOGUE,
    E4M3,
    FP8_1X64,
    FP8_1X128,
    FP8_ROW,
    MXFP8,
    Format,
    Quantised,
    encode,
    quantise,
    round_to,
)
from megamoe.kernels import coding  # noqa: E402
from megamoe.kernels.operands import PULL_MID, STANDALONE_MID  # noqa: E402


def _variant(fmt: Format, name: str, **changes: object) -> Format:
    assert fmt.rule is not None
    rule = dataclasses.replace(fmt.rule, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(fmt, name=name, rule=rule)


FORMATS = (
    FP8_ROW,
    FP8_1X128,
    FP8_1X64,
    MXFP8,
    PULL_MID,
    STANDALONE_MID,
    _variant(MXFP8, "mxfp8_reciprocal", quotient="reciprocal", apply="reciprocal"),
    _variant(MXFP8, "mxfp8_floor", amax_floor=1e-4, zero_scale=1.0),
    _variant(FP8_1X128, "fp8_1x128_amax_floor", amax_floor=1e-10, zero_scale=None),
    _variant(FP8_ROW, "fp8_row_reciprocal", quotient="reciprocal", zero_scale=None),
    _variant(FP8_1X64, "fp8_1x64_scale_floor", scale_floor=1e-30, apply="reciprocal"),
    # No BF16 number reaches E8M0's top, or a scale that underflows, with 448.
    _variant(MXFP8, "mxfp8_low_top", top=0.5),
    _variant(FP8_ROW, "fp8_row_high_top", top=2.0**20),
)
"""What the adapters take, what kernels' own epilogues do, and each constant of a rule once."""

EMITTED = ((FP8_ROW, 90), (FP8_1X128, 90), (PULL_MID, 90), (MXFP8, 120))
"""Formats and the architectures for which their code is read."""


def patterns(rows: int, columns: int, start: int = 0) -> Tensor:
    """BF16 [rows, columns] of consecutive bit patterns, wrapping round."""
    bits = (torch.arange(rows * columns) + start) & 0xFFFF
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(rows, columns)


def cases() -> Iterator[tuple[str, Tensor]]:
    """Named BF16 rows; every BF16 number is among them, most of them under a scale of 1 too."""
    yield "all patterns in order", patterns(64, 1024)
    under_one = patterns(64, 1024)
    under_one = torch.where(under_one.abs() <= 448.0, under_one, 0.0)  # NaN too
    under_one[:, ::32] = 448.0
    yield "all numbers under a scale of 1", under_one
    order = torch.from_numpy(hashed(3, 1 << 16).argsort())
    yield "all patterns, mixed", patterns(64, 1024).flatten()[order].view(64, 1024)
    for columns in (1, 2, 31, 32, 33, 64, 100, 129, 300, 1000, 1025, 2304):
        yield f"{columns} columns", bell(columns, 3, columns).bfloat16()
    exponents = torch.arange(-150, 128, 3).double()[:, None]
    yield (
        "magnitudes from the least to the greatest",
        (bell(5, len(exponents), 256).double() * 2.0**exponents).bfloat16(),
    )
    sparse = torch.zeros(8, 256, dtype=torch.bfloat16)
    sparse[1] = -0.0
    sparse[2, 7] = 2.0**-133  # the least BF16
    sparse[3, 130] = -(2.0**-126)
    sparse[4, 255] = 1.0
    sparse[5, 0] = 3.3895313892515355e38
    sparse[6, 64::32], sparse[7, ::32] = 448 * 2.0**-127, 449 * 2.0**-127  # E8M0's least power
    yield "zeros and lone values", sparse
    outliers = bell(7, 4, 512).bfloat16()
    outliers[:, 5::97] *= 2.0**20
    yield "outliers", outliers
    spoiled = bell(8, 5, 512).bfloat16()
    spoiled[0, 200], spoiled[1, 511] = torch.nan, torch.inf
    spoiled[2, 0], spoiled[3, 64:66] = -torch.inf, torch.tensor([torch.inf, -torch.inf])
    yield "NaN and infinities", spoiled
    wide = bell(9, 7, 1100).bfloat16()
    yield "strided", wide[1::2, 8:1032]
    yield "strided and unaligned", wide[:, 3:260]
    yield "one row many times", wide[:1, :256].expand(5, 256)
    yield "no rows", wide[:0]
    yield "no columns", wide[:, :0]


def difference(got: tuple[Tensor, Tensor], want: Quantised) -> str:
    """Empty where codes and scales are equal bit for bit, else the first place where not."""
    assert want.scale is not None
    for what, mine, theirs in zip(("codes", "scales"), got, (want.data, want.scale), strict=True):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"{what} {mine.dtype} {[*mine.shape]} for {theirs.dtype} {[*theirs.shape]}"
        as_bits = torch.int32 if mine.itemsize == 4 else torch.uint8
        wrong = (mine.view(as_bits) != theirs.view(as_bits)).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            a, b = mine[row, column].float().item(), theirs[row, column].float().item()
            return f"{len(wrong)} {what} differ, first at [{row}, {column}]: {a!r} for {b!r}"
    return ""


def interpret() -> None:
    """In a process of its own: print how many cases agreed, and those that did not."""
    count = 0
    for turn, fmt in enumerate(FORMATS):
        for name, rows in cases():
            x = rows[turn % 8 :: 8] if len(rows) > 16 else rows  # it takes 9 ms a row
            quotients, scales = coding.code(x, fmt, codes=torch.full(x.shape, torch.pi))
            codes = encode(round_to(quotients.double(), E4M3), E4M3)
            wrong = difference((codes, scales), quantise(x, fmt))
            count += 1
            if wrong:
                print(f"{fmt}, {name}: {wrong}")
    print(f"{count} cases compared")


def emit() -> None:
    """In a process of its own: print the PTX of each case of EMITTED."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = coding._kernel()
    names = [parameter.name for parameter in kernel.params]
    for fmt, architecture in EMITTED:
        rule, width = coding._rule(fmt), fmt.block[1] or 4096
        values = dict(zip(names[5:], (width, max(1, 1024 // width), *rule), strict=True))
        scale = "*u8" if fmt.scale is MXFP8.scale else "*fp32"
        types = dict(zip(names, ("*bf16", "*fp8e4nv", scale, "i32", "i32"), strict=False))
        source = ASTSource(
            kernel,
            types | dict.fromkeys(values, "constexpr"),
            {(names.index(name),): value for name, value in values.items()},
            {(i,): [["tt.divisibility", 16]] for i in range(5)},
        )
        target = GPUTarget("cuda", architecture, 32)
        print("// ---", fmt, architecture)
        print(triton.compile(source, target=target).asm["ptx"])


def in_process(call: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import test_coding; test_coding.{call}()"],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")


@needs_triton
@pytest.mark.slow
def test_bits_in_the_interpreter(tmp_path: Path) -> None:
    said = in_process("interpret", tmp_path, TRITON_INTERPRET="1")
    assert said == f"{len(FORMATS) * sum(1 for _ in cases())} cases compared\n"


@needs_triton
@pytest.mark.slow
def test_the_compiler_keeps_every_rounding(tmp_path: Path) -> None:
    said = in_process("emit", tmp_path, TRITON_INTERPRET="0")
    parts = said.split("// --- ")[1:]
    assert len(parts) == len(EMITTED)
    for part in parts:
        title, code = part.split("\n", 1)
        used = set(re.findall(r"^\s*(?:@\S+\s+)?([a-z][\w.]*\.\w+)", code, re.MULTILINE))
        assert "cvt.rn.satfinite.e4m3x2.f32" in used, title
        assert {"min.NaN.f32", "max.NaN.f32"} <= used, title  # the interpreter's keep NaN anyway
        assert "ld.global.v4.b32" in used, title
        divisions = {name for name in used if name.startswith(("div.", "rcp."))}
        assert divisions <= {"div.rn.f32", "rcp.rn.f32"}, title
        assert divisions, title
        assert not [name for name in used if "ftz" in name or "approx" in name], title
        assert not [name for name in used if name.startswith("fma.")], title


def test_it_serves_gpus_only() -> None:
    assert not coding.serves(torch.zeros(1, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("fmt", CATALOGUE, ids=str)
def test_formats_it_does_not_write_are_refused(fmt: Format) -> None:
    x = torch.zeros(0, 128, dtype=torch.bfloat16)  # no rows: nothing is launched
    taken = fmt.element is E4M3 and fmt.block[0] == 1 and fmt.scale is not None
    if taken and fmt.scale.name != "bf16":  # type: ignore[union-attr]
        assert difference(coding.code(x, fmt), quantise(x, fmt)) == ""
    else:
        with pytest.raises(Unsupported, match=fmt.name):
            coding.code(x, fmt)


def test_outputs_may_be_given() -> None:
    x = torch.zeros(0, 256, dtype=torch.bfloat16)
    codes, scales = torch.empty(0, 256, dtype=E4M3.dtype), torch.empty(0, 2)
    got = coding.code(x, FP8_1X128, codes=codes, scales=scales)
    assert got[0] is codes
    assert got[1] is scales
