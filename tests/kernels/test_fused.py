"""Staging in one launch: in Triton's interpreter, and in what its compiler emits.

Both run in processes of their own, since the interpreter is chosen when Triton is imported. Its
cast to FP8 does not round to nearest even, so there the kernel is asked for the clamped quotients,
which ``formats`` rounds; tests/gpu/test_fused_gpu.py judges the bits of the cast, on these cases.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    E8M0,
    FP8_1X64,
    FP8_1X128,
    FP8_ROW,
    FP32,
    MXFP8,
    PLAIN_BF16,
    Format,
    Quantised,
    ScaleRule,
    encode,
    quantise,
    round_to,
)
from megamoe.kernels import fused  # noqa: E402
from megamoe.kernels.base import Batch  # noqa: E402
from megamoe.kernels.layout.kperm import permute_columns  # noqa: E402
from megamoe.kernels.operands import PULL_MID, STANDALONE_MID  # noqa: E402
from megamoe.kernels.staging import Staging  # noqa: E402


def static(top: float, **changes: object) -> Format:
    """As the kernels with calibrated activations have it; the block may be that of a row too."""
    rule = ScaleRule(kind="static", top=top)
    fmt = Format(name="fp8_static", element=E4M3, scale=FP32, rule=rule)
    return dataclasses.replace(fmt, **changes)  # type: ignore[arg-type]


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
    static(0.37),
    _variant(static(1e-3, block=(1, 0)), "fp8_static_reciprocal", apply="reciprocal"),
)
"""What the adapters take, what kernels' own epilogues do, and each constant of a rule once."""


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


# --- rows ---------------------------------------------------------------------------------------


def plan_of(fmt: Format, device: str | torch.device = "cpu", **fields: Any) -> Staging:
    """A plan of one expert, unless told otherwise."""
    sticky = torch.zeros(1, dtype=torch.bool, device=device)
    return Staging(**{"num_experts": 1, "rank": 0, "sticky": sticky, "fmt": fmt} | fields)


def coded(x: Tensor, fmt: Format, codes: torch.dtype = E4M3.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales [n, tiles] of rows that all go to expert 0."""
    assert fmt.scale is not None
    n, columns = x.shape
    width = fmt.block[1] or max(columns, 1)
    into = Batch(
        x=torch.full((n, columns), 3.0, device=x.device).to(codes),
        ids=torch.empty(n, 1, dtype=torch.int64, device=x.device),
        weights=torch.empty(n, 1, device=x.device),
        scales=torch.ones(n, -(-columns // width), device=x.device).to(fmt.scale.dtype),
        count=n,
        tokens=n,
    )
    assert into.scales is not None
    ids = torch.zeros(n, 1, dtype=torch.int64, device=x.device)
    fused.stage(plan_of(fmt, x.device), x, ids, torch.ones_like(into.weights), into)
    assert torch.equal(into.ids, ids)
    assert bool((into.weights == 1.0).all())
    return into.x, into.scales


def wanted(x: Tensor, fmt: Format) -> Quantised:
    """``quantise``, with a matrix's one scale on each row, as it is staged."""
    made = quantise(x, fmt)
    assert made.scale is not None
    if fmt.block[0] == 0:
        return dataclasses.replace(
            made,
            format=dataclasses.replace(fmt, block=(1, 0)),
            scale=made.scale.expand(-1, min(1, x.shape[1])).expand(x.shape[0], -1).contiguous(),
        )
    return made


def interpret() -> None:
    """In a process of its own: print how many cases agreed, and those that did not."""
    count = 0
    for turn, fmt in enumerate(FORMATS):
        for name, rows in cases():
            x = rows[turn % 8 :: 8] if len(rows) > 16 else rows  # it takes 9 ms a row
            quotients, scales = coded(x, fmt, torch.float32)
            codes = encode(round_to(quotients.double(), E4M3), E4M3)
            wrong = difference((codes, scales), wanted(x, fmt))
            count += 1
            if wrong:
                print(f"{fmt}, {name}: {wrong}")
    print(f"{count} cases compared")


# --- whole calls --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A plan, what a caller passes, and its kernel's buffers, filled with something else."""

    name: str
    plan: Staging
    x: Tensor
    ids: Tensor
    weights: Tensor
    factor: float
    first: int
    id_dtype: torch.dtype
    capacity: int
    scales: tuple[int, torch.dtype] | None = None
    as_they_are: bool = False
    """Whether the kernel takes the caller's rows."""

    def buffers(self, codes: torch.dtype = E4M3.dtype) -> Batch:
        device, shape = self.x.device, (self.capacity, self.ids.shape[1])
        x = self.x
        if not self.as_they_are:
            x = torch.full((self.capacity, x.shape[1]), 3.0, device=device)
            x = x.to(torch.bfloat16 if self.plan.fmt == PLAIN_BF16 else codes)
        scales = None
        if self.scales is not None:
            scales = torch.full((self.capacity, self.scales[0]), 2.0, device=device)
            scales = scales.to(self.scales[1])
        return Batch(
            x=x,
            ids=torch.full(shape, 77, dtype=self.id_dtype, device=device),
            weights=torch.full(shape, torch.nan, device=device),
            scales=scales,
            count=self.ids.shape[0],
            tokens=self.capacity,
        )

    def on(self, device: torch.device) -> Call:
        """The same call on a device, strides kept."""
        plan = self.plan
        moved = {
            name: None if tensor is None else tensor.to(device)
            for name in ("sticky", "replicas", "counts", "order")
            for tensor in [getattr(plan, name)]
        }
        tensors = {name: on_device(getattr(self, name), device) for name in ("x", "ids", "weights")}
        return dataclasses.replace(self, plan=dataclasses.replace(plan, **moved), **tensors)

    def torch_path(self) -> tuple[Staging, Batch]:
        """What torch's own operations stage."""
        plan = dataclasses.replace(self.plan, sticky=torch.zeros_like(self.plan.sticky))
        into = self.buffers()
        before, fused.serves = fused.serves, lambda x: False
        try:
            plan(self.x, self.ids, self.weights, into, factor=self.factor, first=self.first)
        finally:
            fused.serves = before
        return plan, into

    def staged(
        self, stage: Callable[..., None] = fused.stage, codes: torch.dtype = E4M3.dtype
    ) -> tuple[Staging, Batch]:
        plan = dataclasses.replace(self.plan, sticky=torch.zeros_like(self.plan.sticky))
        into = self.buffers(codes)
        stage(plan, self.x, self.ids, self.weights, into, factor=self.factor, first=self.first)
        return plan, into


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on a device with its strides and offset, which a plain copy would drop."""
    whole = tensor.untyped_storage().nbytes() // tensor.itemsize
    base = torch.as_strided(tensor, (whole,), (1,), 0).to(device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def calls(count: int) -> Iterator[Call]:
    """Calls of every kind, each choice made by a hash of its number."""
    table = {
        "rows as they are": (PLAIN_BF16, None, 0),
        "rows copied": (PLAIN_BF16, None, 0),
        "row scale four times": (FP8_ROW, (4, torch.float32), 0),
        "row scale once, in order": (FP8_ROW, (1, torch.float32), 64),
        "blocks": (FP8_1X64, (2, torch.float32), 0),
        "blocks, padded": (FP8_1X64, (5, torch.float32), 64),
        "powers, padded": (MXFP8, (8, torch.uint8), 0),
        "powers as such": (MXFP8, (4, torch.float8_e8m0fnu), 32),
        "powers, order of two blocks": (MXFP8, (4, torch.uint8), 64),
        "static": (static(0.37), None, 0),
        "static, scales written": (static(0.5, block=(1, 0)), (3, torch.float32), 64),
        "codes only": (FP8_ROW, None, 0),
    }
    for number in range(count):
        drawn = iter(hashed(number + 1000, 32).tolist())

        def one_of(*choices: Any, drawn: Iterator[int] = drawn) -> Any:
            return choices[(next(drawn) >> 20) % len(choices)]

        kind = list(table)[number % len(table)]
        fmt, scales, period = table[kind]
        experts, k = one_of(1, 5, 16), one_of(1, 2, 3, 6, 8)
        n, extra = one_of(0, 1, 3, 5), one_of(0, 2)
        if number % 24 == 0:
            n, extra = one_of(0, 150), 200  # several programs of routing; rows as they are
        elif number % 24 == 12:
            n, extra, k = 2, 1100, 1
        columns = one_of(128, 256) if scales is None or scales[0] < 2 else 128
        id_dtype = one_of(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        ids = torch.from_numpy(hashed(number, n, 2 * k) >> 40).to(torch.int64) % (experts + 3) - 1
        ids = torch.where(ids == experts + 1, -2, ids)  # -1 ... experts, and below -1
        if one_of(True, False):
            ids = ids.clamp(-1, experts - 1)
        for row in range(one_of(0, 1, 2)):
            ids[row : row + 1] = -1
        if id_dtype == torch.uint8:
            ids = ids.clamp(min=0)
        weights = bell(number, n, 2 * k)
        weights[ids < 0] = torch.nan
        weights = weights.to(one_of(torch.float32, torch.bfloat16, torch.float16, torch.float64))
        ids = ids.to(id_dtype)
        layout = one_of("contiguous", "strided", "transposed")
        if layout == "strided":
            ids, weights = ids[:, ::2], weights[:, ::2]
        else:
            ids, weights = ids[:, :k].contiguous(), weights[:, :k].contiguous()
        if layout == "transposed":
            ids, weights = ids.t().contiguous().t(), weights.t().contiguous().t()
        x = bell(number, n + 1, columns + 8).bfloat16()[1:]
        x = x[:, :columns] if one_of(True, False) else x[:, 8:]
        if one_of(True, False, False):
            x = x.t().contiguous().t()
        as_they_are = kind == "rows as they are"
        many = one_of(None, 1, 3)
        plan = plan_of(
            fmt,
            num_experts=experts,
            rank=one_of(0, 3),
            stale=not as_they_are and one_of(True, False),
            order=permute_columns(torch.arange(period, dtype=torch.int32), period)
            if period
            else None,
        )
        if many is not None:
            held = torch.from_numpy(hashed(number, experts) >> 40).to(torch.int64) % many + 1
            found = torch.from_numpy(hashed(number, experts, many) >> 40).to(torch.int64) % 100
            plan = dataclasses.replace(plan, replicas=found, counts=held)
        yield Call(
            name=f"call {number}, {kind}",
            plan=plan,
            x=x,
            ids=ids,
            weights=weights,
            factor=one_of(1.0, 2.5),
            first=one_of(0, 7, 4096),
            id_dtype=one_of(torch.int32, torch.int64),
            capacity=n + extra,
            scales=scales,
            as_they_are=as_they_are,
        )


def unlike(got: tuple[Staging, Batch], want: tuple[Staging, Batch]) -> str:
    """Empty where two staged calls are equal in every bit of every buffer, NaN being NaN."""
    (plan, mine), (other, theirs) = got, want
    for what, a, b in (
        ("sticky", plan.sticky, other.sticky),
        ("ids", mine.ids, theirs.ids),
        ("weights", mine.weights, theirs.weights),
        ("x", mine.x, theirs.x),
        ("scales", mine.scales, theirs.scales),
    ):
        if a is None or b is None:
            assert a is b
            continue
        if a.dtype == torch.float32 and b.dtype == E4M3.dtype:  # quotients: the interpreter's
            a = encode(round_to(a.double(), E4M3), E4M3)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        if a.dtype != b.dtype or not torch.equal(a.view(bits), b.view(bits)):
            return f"{what} differ: {a.tolist()} for {b.tolist()}"[:400]
    return ""


CALLS = 120


def interpret_calls() -> None:
    """In a process of its own: print how many calls agreed, and those that did not."""
    count = 0
    for call in calls(CALLS):
        wrong = unlike(call.staged(codes=torch.float32), call.torch_path())
        count += 1
        if wrong:
            print(f"{call.name}: {wrong}")
    print(f"{count} calls compared")


MUTANTS = (
    ("row = program * ROWS +", "row ="),
    ("(row < n) & (slot < K)", "(slot < K)"),
    ("weight.to(tl.float32) * factor", "weight.to(tl.float32)"),
    ("held = inside & (found >= 0) & (found < EXPERTS)", "held = inside & (found >= 0)"),
    ("bad = inside & (found != -1)", "bad = inside"),
    ("True, mask=bad", "True, mask=inside"),
    ("(first + row + slot) % count", "(first + row) % count"),
    ("plan.rank + first", "first"),
    ("(found * MOST + choice)", "(found + choice)"),
    ("weight = tl.where(held, weight, 0.0)", "weight = tl.where(inside, weight, 0.0)"),
    ("(row < n) & (found < 0)", "(found < 0)"),
    ("tl.maximum(own, 0)", "own"),
    ("there = (row < rows)", "there = (row < n)"),
    ("axis=0) != 0, narrow", "axis=0) >= 0, narrow"),
    ("weights + (at * weights_row + slot * weights_slot)", "weights + (at * K + slot)"),
    ("tl.gather(values, source, 1)", "values"),
    ("& (tile == 0)", "& (tile > 0)"),
    ("scale = tl.broadcast_to(scale, (SPREAD,))\n            there = (place < scale_columns)",
     "scale = tl.broadcast_to(scale, (SPREAD,))\n            there = (place < 1)"),
    ("row * scale_columns + place", "row * tl.cdiv(columns, WIDTH) + place"),
    ("(scale >> 23)", "(scale >> 24)"),
)  # fmt: skip
"""What breaks the kernel, each of which some call must notice."""


def mutate() -> None:
    """In a process of its own: print each mutant that no call notices."""
    text = Path(fused.__file__).read_text()
    chosen = [(call, call.torch_path()) for call in calls(CALLS)]
    for number, (old, new) in enumerate(MUTANTS):
        assert text.count(old) == 1, f"{old}: {text.count(old)} times"
        path = Path(os.environ["TRITON_CACHE_DIR"]) / f"mutant_{number}.py"
        path.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not any(unlike(call.staged(module.stage, torch.float32), w) for call, w in chosen):
            print(f"unnoticed: {old} as {new}")
    print(f"{len(MUTANTS)} mutants")


# --- the compiler -------------------------------------------------------------------------------

EMITTED = (
    (FP8_ROW, 90, False),
    (FP8_1X128, 90, False),
    (FP8_1X128, 90, True),
    (PULL_MID, 90, False),
    (static(0.37), 90, True),
    (PLAIN_BF16, 90, False),
    (MXFP8, 120, False),
)
"""Formats and the architectures for which their code is read; whether with every option."""


def emit() -> None:
    """In a process of its own: print the PTX of each case of EMITTED."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = fused._kernel()
    names = [parameter.name for parameter in kernel.params]
    for fmt, architecture, options in EMITTED:
        found = fused._settings(fmt, 4096, 6)
        constants = {
            "K": 6, "LANES": found.lanes, "ROWS": found.rows, "EXPERTS": 128, "MOST": 2,
            "STALE": options, "MODE": found.mode, "WIDTH": found.width, "BLOCKS": found.blocks,
            "SPREAD": 4 if found.whole else 0, "PERIOD": 64 if options else 0,
            **dict(zip(names[-len(found.rule) :], found.rule, strict=True)),
        }  # fmt: skip
        types = {
            "x": "*bf16", "ids": "*i32", "weights": "*fp32", "out_ids": "*i64",
            "out_weights": "*fp32", "sticky": "*i1", "factor": "fp32", "given": "fp32",
            "out_x": "*bf16" if found.mode == fused.COPY else "*fp8e4nv",
            "out_scales": "*u8" if fmt.scale is E8M0 else "*fp32",
        }  # fmt: skip
        for name, kind in (("replicas", "*i64"), ("counts", "*i64"), ("order", "*i32")):
            if options:
                types[name] = kind
            else:
                constants[name] = None
        if fmt.scale is None:
            constants["out_scales"] = None
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32") for name in names
        }
        aligned = ("x", "out_x", "columns", "stride")
        source = ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        target = GPUTarget("cuda", architecture, 32)
        print("// ---", fmt, architecture)
        print(triton.compile(source, target=target).asm["ptx"])


def specialise() -> None:
    """In a process of its own: print how many calls took a kernel that was compiled before, and
    those to which Triton would have given another."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = fused._kernel()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    again, title = 0, ""

    class Compiled:
        def __init__(self, values: Any) -> None:
            self.made_for = bind(*values)[1]

        def __getitem__(self, grid: Any) -> Any:
            return self

        def __call__(self, *values: Any) -> None:
            nonlocal again
            again += 1
            if bind(*values)[1] != self.made_for:
                print(f"{title}: {bind(*values)[1]} for {self.made_for}")

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *values, num_warps: Compiled(values)

    fused._kernel = Kernel  # type: ignore[assignment]
    for number, call in enumerate(calls(CALLS)):
        title = f"call {number}, {call.name}"
        for _ in range(2):
            call.staged(codes=torch.float32)
    rows = torch.zeros(4096, dtype=torch.bfloat16)
    sticky = torch.zeros(1, dtype=torch.bool)
    for fmt in (PLAIN_BF16, FP8_ROW):
        plan = Staging(num_experts=4, rank=0, sticky=sticky, fmt=fmt)
        for stride in (1, 0, 17, 16, 32, 33, 40, 1, 128):
            for start in (0, 1, 8):
                title = f"{fmt}, stride {stride} from {start}"
                x = rows[start:].as_strided((3, 64), (stride, 1))
                ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
                into = Batch(
                    x=torch.empty(3, 64, dtype=torch.bfloat16), ids=ids.clone(),
                    weights=weights.clone(), count=3, tokens=3,
                )  # fmt: skip
                fused.stage(plan, x, ids, weights, into)
    print(again > CALLS, "again")


def warmed_up() -> None:
    """In a process of its own: print what compiles after the calls that a warm-up makes."""
    title, again = "", 0

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return self

        def __call__(self, *values: Any) -> None:
            nonlocal again
            again += 1

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return self

        def __call__(self, *values: Any, num_warps: int) -> Compiled:
            if title:
                print(title)
            return Compiled()

    fused._kernel = Kernel  # type: ignore[assignment]
    count, columns = 3, 64
    memory = torch.zeros(8192, dtype=torch.bfloat16)
    sticky = torch.zeros(1, dtype=torch.bool)
    for fmt in (PLAIN_BF16, FP8_ROW):
        plan = Staging(num_experts=4, rank=0, sticky=sticky, fmt=fmt)

        def stage(x: Tensor, ids: Tensor, weights: Tensor, plan: Staging = plan) -> None:
            into = Batch(
                x=torch.empty(count, columns, dtype=torch.bfloat16),
                ids=torch.empty(count, 2, dtype=torch.int64), weights=torch.empty(count, 2),
                count=len(x), tokens=count,
            )  # fmt: skip
            fused.stage(plan, x, ids, weights, into)

        ids, weights = torch.zeros(count, 2, dtype=torch.int64), torch.zeros(count, 2)
        title = ""
        for id_dtype in (torch.int32, torch.int64):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                stage(memory[:columns].view(1, -1), ids[:1].to(id_dtype), weights[:1].to(dtype))
        for stride, start, n in itertools.product(
            (0, 1, 16, 17, 40, 64, 72, 128, 2000), (0, 1, 8), (0, 1, count)
        ):
            title = f"{fmt}: {n} rows, {stride} apart, from {start}"
            stage(memory[start:].as_strided((n, columns), (stride, 1)), ids[:n], weights[:n])
        title = f"{fmt}: columns apart"
        stage(memory[: count * columns].view(columns, count).T, ids, weights)
        title = f"{fmt}: weights of 64 bits"
        stage(memory[: count * columns].view(count, columns), ids, weights.double())
    print(again > 100, "again")


def in_process(call: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import test_fused; test_fused.{call}()"],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")


@needs_triton
def test_a_kernel_taken_again_is_the_one_that_triton_would_take(tmp_path: Path) -> None:
    assert in_process("specialise", tmp_path) == "True again\n"


@needs_triton
def test_a_capture_after_warm_up_never_meets_the_compiler(tmp_path: Path) -> None:  # K67
    assert in_process("warmed_up", tmp_path) == "True again\n"


@needs_triton
@pytest.mark.slow
def test_bits_in_the_interpreter(tmp_path: Path) -> None:
    said = in_process("interpret", tmp_path, TRITON_INTERPRET="1")
    assert said == f"{len(FORMATS) * sum(1 for _ in cases())} cases compared\n"


@needs_triton
@pytest.mark.slow
def test_calls_in_the_interpreter(tmp_path: Path) -> None:
    said = in_process("interpret_calls", tmp_path, TRITON_INTERPRET="1")
    assert said == f"{CALLS} calls compared\n"


@needs_triton
@pytest.mark.slow
def test_the_calls_notice_every_mutant(tmp_path: Path) -> None:
    said = in_process("mutate", tmp_path, TRITON_INTERPRET="1")
    assert said == f"{len(MUTANTS)} mutants\n"


@needs_triton
@pytest.mark.slow
def test_the_compiler_keeps_every_rounding(tmp_path: Path) -> None:
    said = in_process("emit", tmp_path, TRITON_INTERPRET="0")
    parts = said.split("// --- ")[1:]
    assert len(parts) == len(EMITTED)
    for part in parts:
        title, code = part.split("\n", 1)
        used = set(re.findall(r"^\s*(?:@\S+\s+)?([a-z][\w.]*\.\w+)", code, re.MULTILINE))
        assert "ld.global.v4.b32" in used, title
        assert not [name for name in used if "ftz" in name or "approx" in name], title
        assert not [name for name in used if name.startswith("fma.")], title
        if title.startswith("bf16"):
            assert not [name for name in used if name.startswith("cvt.rn")], title
            continue
        assert "cvt.rn.satfinite.e4m3x2.f32" in used, title
        assert {"min.NaN.f32", "max.NaN.f32"} <= used, title  # the interpreter's keep NaN anyway
        divisions = {name for name in used if name.startswith(("div.", "rcp."))}
        divisions -= {"div.s32", "div.u32"}
        assert divisions <= {"div.rn.f32", "rcp.rn.f32"}, title
        assert divisions, title


# --- here ---------------------------------------------------------------------------------------


def test_it_serves_gpus_only() -> None:
    assert not fused.serves(torch.zeros(1, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("fmt", CATALOGUE, ids=str)
def test_formats_it_does_not_write_are_refused(fmt: Format) -> None:
    x = torch.zeros(0, 128, dtype=torch.bfloat16)  # no rows: nothing is launched
    into = Batch(x=x, ids=torch.zeros(0, 2), weights=torch.zeros(0, 2), count=0, tokens=0)
    taken = fmt.element is E4M3 and fmt.block[0] == 1 and fmt.scale is not None
    if fmt == PLAIN_BF16 or (taken and fmt.scale.name != "bf16"):  # type: ignore[union-attr]
        fused.stage(plan_of(fmt), x, into.ids, into.weights, into)
    else:
        with pytest.raises(Unsupported, match=fmt.name):
            fused.stage(plan_of(fmt), x, into.ids, into.weights, into)


def test_static_scales_share_a_kernel() -> None:
    """Each layer has its own, and none of them may compile anew."""
    one, other = (fused._settings(static(top), 128, 2) for top in (0.5, 0.7))
    assert one.given != other.given
    assert (one.rule, one.width, one.blocks) == (other.rule, other.width, other.blocks)
