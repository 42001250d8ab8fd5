"""One class per backend of `flashinfer.moe_ep`: what it takes, and what its kernel computes.

Written from FlashInfer's sources, apart from the adapters: the recipes here and those in the
datasheets are two statements of the same facts, and a test that runs both compares them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from emulated.cluster import ContractBroken
from emulated.compute import operand
from megamoe.formats import (
    BF16,
    E4M3,
    E8M0,
    FP8_BLOCK128,
    FP32,
    MXFP4,
    MXFP8,
    Format,
    Quantised,
    ScaleRule,
    plain,
    quantise,
)
from megamoe.kernels import layout
from megamoe.kernels.layout import CanonicalExperts
from megamoe.problem import Activation, ExpertWeights, Recipe

INTEGERS = (torch.int32, torch.int64)


def require(true: bool, what: str) -> None:
    if not true:
        raise ContractBroken(what)


def rows_of(blocks: int, name: str, rule: ScaleRule | None = None) -> Format:
    """E4M3 with a float32 scale for `blocks` columns of a row (0: the row)."""
    return Format(name=name, element=E4M3, block=(1, blocks), scale=FP32, rule=rule)


TRUE_448 = ScaleRule(kind="amax", top=448.0, zero_scale=1.0)
RECIPROCAL_448 = ScaleRule(
    kind="amax", top=448.0, quotient="reciprocal", apply="reciprocal", scale_floor=1e-30
)
TENSOR_FP8 = Format(name="one scale a matrix", element=E4M3, scale=FP32)
BLOCK_64_128 = Format(name="64 rows by 128", element=E4M3, block=(64, 128), scale=FP32)


@dataclass
class Backend:
    """A backend bound to one layer. ids: the dtypes its staging takes."""

    config: Any
    hidden: int
    experts_per_rank: int

    name: ClassVar[str]
    ids: ClassVar[tuple[torch.dtype, ...]] = INTEGERS
    nvshmem: ClassVar[bool] = True
    traps: ClassVar[bool] = False  # on ids past the last expert; the pull kernels read wild memory
    strict: ClassVar[bool] = False  # contiguous inputs, float32 weights
    view: ClassVar[bool] = False
    stale: ClassVar[bool] = False  # its final sum takes every slot, empty ones too
    packs: ClassVar[bool] = False  # makes its own bytes from a checkpoint's
    buckets: ClassVar[bool] = False  # takes the greatest count of any rank
    owns_output: ClassVar[bool] = False  # compiles for each output address it is given
    alone: ClassVar[bool] = True  # runs on one rank
    idles: ClassVar[bool] = True  # launches without rows too
    flags: ClassVar[bool] = False  # says on the device whether the last launch went wrong
    launch: ClassVar[str | None] = None  # prebuilds a launch on rows written in place

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        raise NotImplementedError

    def experts(self, transformed: Any) -> ExpertWeights:
        raise NotImplementedError

    def recipe(self) -> Recipe:
        raise NotImplementedError

    def activation(self) -> Activation:
        clamp = self.config.gate_up_clamp
        return Activation(limit=self.config.activation_clamp if clamp is None else clamp)

    def check_rows(self, x: Tensor, scales: Tensor | None) -> None:
        require(x.dtype == torch.bfloat16 and scales is None, f"{self.name} takes BF16 rows alone")

    def operand(self, x: Tensor, scales: Tensor | None) -> Tensor:
        """What the rows of `check_rows` mean to FC1, as float64 or BF16."""
        return x

    def wire(self) -> tuple[torch.dtype, tuple[int, torch.dtype] | None]:
        """Of the workspace: the rows' dtype, and the columns and dtype of their scales."""
        return torch.bfloat16, None

    def arrived(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """From rows as they lie in the workspace to those of `check_rows`."""
        return x, scales

    def multiples(self, hidden: int, intermediate: int) -> None:
        width = self.config.intermediate_size
        require(self.hidden % hidden == 0, f"{self.name}: hidden {self.hidden} % {hidden}")
        require(width % intermediate == 0, f"{self.name}: intermediate {width} % {intermediate}")

    def matrix(self, t: Tensor, rows: int, columns: int, dtype: torch.dtype, *, major: int) -> None:
        """A weight [E, rows, columns] whose dimension `major` has stride 1."""
        shape = (self.experts_per_rank, rows, columns)
        require(tuple(t.shape) == shape, f"{self.name}: weights {tuple(t.shape)} are not {shape}")
        require(t.dtype == dtype, f"{self.name}: weights of {t.dtype}")
        require(t.stride(major) == 1, f"{self.name}: weights of strides {t.stride()}")


class PullBf16(Backend):
    """Its last step, unlike the other pull kernels', is not told which slots are empty
    (moe_hopper_bf16/megamoe_kernel_bf16.py against moe_hopper_fp8/megamoe_kernel_fp8.py)."""

    name = "sm90_bf16_bf16_bf16_pull_cutedsl"
    stale = True
    launch = "hopper_bf16_mega_launch_thunk"

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(256, 64)
        require(1 <= self.config.top_k <= 32, f"{self.name}: top_k {self.config.top_k}")
        require(not self.config.enable_in_kernel_fc2_reduce, "floating atomics change the order")

    def experts(self, transformed: Any) -> ExpertWeights:
        fc1, fc2 = transformed
        width = self.config.intermediate_size
        self.matrix(fc1, self.hidden, 2 * width, torch.bfloat16, major=1)
        self.matrix(fc2, width, self.hidden, torch.bfloat16, major=1)
        found = layout.unpack_pull_bf16(layout.PullBf16Weights(fc1=fc1, fc2=fc2))
        return ExpertWeights(w13=plain(found.w13), w2=plain(found.w2))

    def recipe(self) -> Recipe:
        return Recipe(name="pull BF16", weight_at="fc2_input", term=BF16)


class PushBf16(Backend):
    name = "sm90_bf16_bf16_bf16_push_cake"
    ids = (torch.int32,)
    nvshmem = False
    traps = strict = True

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(256, 128)
        require(self.config.top_k in (1, 2, 4, 6, 8), f"{self.name}: top_k {self.config.top_k}")
        require(world_size <= 32 and quantize_input, f"{self.name}: world or quantize_input")
        clamp = self.config.clamp_limit
        require(clamp is None or 0 < clamp < math.inf, f"{self.name}: clamp {clamp}")
        require(
            self.config.combine_wire == "per_route",
            "any other wire groups by rank, or follows the environment and the capacity",
        )
        require(self.config.capacity_factor == 1.0, "less capacity traps on an uneven batch")

    def experts(self, transformed: Any) -> ExpertWeights:
        require(
            type(transformed).__name__ == "Sm90CakeBf16Weights", f"{self.name}: {type(transformed)}"
        )
        width = self.config.intermediate_size
        self.matrix(transformed.w13, 2 * width, self.hidden, torch.bfloat16, major=2)
        self.matrix(transformed.w2, self.hidden, width, torch.bfloat16, major=2)
        sizes = (
            transformed.num_local_experts,
            transformed.hidden_size,
            transformed.intermediate_size,
        )
        require(sizes == (self.experts_per_rank, self.hidden, width), f"{self.name}: {sizes}")
        require(transformed.w13_interleaved, f"{self.name}: w13 not interleaved")
        found = layout.unpack_push_bf16(
            layout.PushBf16Weights(w13=transformed.w13, w2=transformed.w2)
        )
        return ExpertWeights(w13=plain(found.w13), w2=plain(found.w2))

    def recipe(self) -> Recipe:
        return Recipe(name="push BF16", fc2_out=BF16, weight_at="term", term=BF16)

    def activation(self) -> Activation:
        return Activation(limit=self.config.clamp_limit, symmetric=True)


class PullFp8(Backend):
    """Both scale modes; per tensor, every rank dequantises with its own copy of the scale."""

    name = "sm90_fp8_fp8_bf16_pull_cutedsl"
    launch = "hopper_fp8_mega_launch_thunk"

    @property
    def blockwise(self) -> bool:
        return bool(self.config.fp8_scale_mode == "blockwise")

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(*((128, 128) if self.blockwise else (64, 64)))
        require(1 <= self.config.top_k <= 32, f"{self.name}: top_k {self.config.top_k}")
        require(not quantize_input, "quantises with many small kernels, and by its own rule")
        require(self.config.kind == "fp8_e4m3", f"{self.name}: kind")
        require(
            self.config.combine_format == "bf16" and not self.config.grouped_token_back,
            "an 8-bit or grouped combine",
        )

    def experts(self, transformed: Any) -> ExpertWeights:
        (w1, s1, a1, d1), (w2, s2, a2, d2) = transformed
        width = self.config.intermediate_size
        self.matrix(w1, self.hidden, 2 * width, torch.float8_e4m3fn, major=1)
        self.matrix(w2, width, self.hidden, torch.float8_e4m3fn, major=1)
        leg = layout.PullFp8Leg
        pack = layout.PullFp8Weights(
            fc1=leg(weight=w1, scale=s1, activation_scale=a1, weight_scale=d1),
            fc2=leg(weight=w2, scale=s2, activation_scale=a2, weight_scale=d2),
            exactness=layout.Exactness(counts=torch.zeros(1), elements=0, worst=0.0),
        )
        if self.blockwise:
            require(a1 is None and d1 is None, "blockwise weights carry no dequantisation scalars")
            found = layout.unpack_pull_fp8(pack)
            return ExpertWeights(
                w13=Quantised(format=BLOCK_64_128, data=found.w13, scale=found.w13_scale),
                w2=Quantised(format=FP8_BLOCK128, data=found.w2, scale=found.w2_scale),
            )
        require(a1 is not None and a1.shape == (1,), "one activation scale a matrix")
        require(d1.dtype == d2.dtype == torch.float32, "float32 weight scales")
        self.fc1_scale, self.fc2_scale = float(a1), float(a2)
        found = layout.unpack_pull_fp8_per_tensor(pack)
        return ExpertWeights(
            w13=one_factor(found.w13, found.w13_scale), w2=one_factor(found.w2, found.w2_scale)
        )

    def recipe(self) -> Recipe:
        if self.blockwise:
            act, mid = rows_of(128, "1x128"), rows_of(64, "1x64", RECIPROCAL_448)
        else:
            act = rows_of(0, "static")
            rule = ScaleRule(kind="static", top=self.fc2_scale, apply="reciprocal")
            mid = Format(name="static", element=E4M3, scale=FP32, rule=rule)
        return Recipe(name="pull FP8", act=act, mid=mid, weight_at="fc2_input", term=BF16)

    def check_rows(self, x: Tensor, scales: Tensor | None) -> None:
        require(x.dtype == torch.float8_e4m3fn and scales is not None, f"{self.name}: E4M3 rows")
        assert scales is not None
        columns, dtype = (
            (self.hidden // 128, torch.float32)
            if self.blockwise
            else (-(-self.hidden // 32), torch.float8_e8m0fnu)
        )
        require(
            scales.shape == (x.shape[0], columns) and scales.dtype == dtype,
            f"{self.name}: scales {tuple(scales.shape)} of {scales.dtype}",
        )

    def wire(self) -> tuple[torch.dtype, tuple[int, torch.dtype] | None]:
        """Rows of scales are padded to 16 bytes, or to words of four E8M0 scales."""
        if self.blockwise:
            return torch.float8_e4m3fn, (-(-(self.hidden // 128) // 4) * 4, torch.float32)
        return torch.float8_e4m3fn, (-(-self.hidden // 128) * 4, torch.float8_e8m0fnu)

    def arrived(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert scales is not None
        if not self.blockwise:
            require(bool((scales.view(torch.uint8) == 127).all()), "a plane that is not one")
        return x, scales[:, : self.hidden // 128] if self.blockwise else scales

    def operand(self, x: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        if self.blockwise:
            return operand(x, scales, rows_of(128, "1x128"))
        scale = torch.full((x.shape[0], 1), self.fc1_scale, dtype=torch.float32)
        return operand(x, scale, rows_of(0, "static"))


class PullMxfp4(Backend):
    name = "sm90_fp8_mxfp4_bf16_pull_cutedsl"
    launch = "hopper_mxfp4_mega_launch_thunk"
    ids = (torch.int64,)
    strict = view = True

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(128, 128)
        require(1 <= self.config.top_k <= 32, f"{self.name}: top_k {self.config.top_k}")
        require(not quantize_input, "quantises with many small kernels, and by its own rule")

    def experts(self, transformed: Any) -> ExpertWeights:
        fc1, fc2 = (self._leg(leg) for leg in transformed)
        found = layout.unpack_pull_mxfp4(layout.PullMxfp4Weights(fc1=fc1, fc2=fc2))
        return mxfp4(found)

    def _leg(self, leg: Any) -> layout.PullFp4Leg:
        weight, scales, unit, decode = leg
        require(weight.dtype == torch.uint8 and weight.stride(1) == 1, f"{self.name}: weight")
        require(scales.dtype == torch.uint8 and scales.is_contiguous(), f"{self.name}: scales")
        require(decode.shape == (self.experts_per_rank,), f"{self.name}: {tuple(decode.shape)}")
        require(bool((unit == 1).all()), f"{self.name}: the third slot is one")
        return layout.PullFp4Leg(weight=weight, scales=scales, unit=unit, decode=decode)

    def recipe(self) -> Recipe:
        return Recipe(
            name="pull FP4",
            act=rows_of(0, "row"),
            mid=rows_of(64, "1x64", RECIPROCAL_448),
            weight_at="fc2_input",
            term=BF16,
        )

    def check_rows(self, x: Tensor, scales: Tensor | None) -> None:
        require(
            x.dtype == torch.float8_e4m3fn
            and scales is not None
            and scales.shape == (x.shape[0], 1)
            and scales.dtype == torch.float32
            and scales.is_contiguous(),
            f"{self.name}: E4M3 rows with float32 scales [n, 1]",
        )

    def operand(self, x: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return operand(x, scales, rows_of(0, "row"))

    def wire(self) -> tuple[torch.dtype, tuple[int, torch.dtype] | None]:
        return torch.float8_e4m3fn, (4, torch.float32)

    def arrived(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert scales is not None
        same = (scales == scales[:, :1]) | scales.isnan()
        require(bool(same.all()), "four copies of a row's scale that are not equal")
        return x, scales[:, :1]


class PullNvfp4(PullMxfp4):
    name = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
    launch = "hopper_nvfp4_mega_launch_thunk"

    def arrived(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Columns in the order of the weights'."""
        natural = layout.unpermute_columns(x.view(torch.uint8), self.config.nvfp4_kperm)
        return super().arrived(natural.view(x.dtype), scales)

    def experts(self, transformed: Any) -> ExpertWeights:
        require(
            type(transformed).__name__ == "TransformedMegaWeights"
            and transformed.nvfp4_kperm == self.config.nvfp4_kperm,
            f"{self.name}: weights that do not say their column order",
        )
        fc1, fc2 = (self._leg(leg) for leg in transformed)
        found = layout.unpack_pull_nvfp4(
            layout.PullNvfp4Weights(fc1=fc1, fc2=fc2, kperm=self.config.nvfp4_kperm)
        )
        return decoded(found, layout.pull_nvfp4_operand, 8.0)


class PushFp8(Backend):
    name = "sm90_fp8_fp8_bf16_push_cuda"
    ids = (torch.int32,)
    nvshmem = False
    traps = strict = True

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(128, 128)
        require(self.config.top_k in (1, 2, 4, 6, 8), f"{self.name}: top_k {self.config.top_k}")
        require(self.config.intermediate_size <= 16384, f"{self.name}: intermediate")
        require(world_size <= 32 and quantize_input, f"{self.name}: world or quantize_input")
        require(
            self.config.combine_dtype == "bf16" and not self.config.grouped_combine,
            "an 8-bit combine",
        )
        require(self.config.capacity_factor == 1.0, "less capacity traps on an uneven batch")

    def experts(self, transformed: Any) -> ExpertWeights:
        require(
            type(transformed).__name__ == "Sm90PushWeights", f"{self.name}: {type(transformed)}"
        )
        width = self.config.intermediate_size
        self.matrix(transformed.w13_fp8, 2 * width, self.hidden, torch.float8_e4m3fn, major=2)
        self.matrix(transformed.w2_fp8, self.hidden, width, torch.float8_e4m3fn, major=2)
        require(
            transformed.w13_interleaved == self.config.fuse_fc1_epilogue, f"{self.name}: interleave"
        )
        found = layout.unpack_push_fp8(
            layout.PushFp8Weights(
                w13_fp8=transformed.w13_fp8,
                w13_sf=transformed.w13_sf,
                w2_fp8=transformed.w2_fp8,
                w2_sf=transformed.w2_sf,
                w13_interleaved=transformed.w13_interleaved,
            )
        )
        return ExpertWeights(
            w13=Quantised(format=FP8_BLOCK128, data=found.w13, scale=found.w13_scale),
            w2=Quantised(format=FP8_BLOCK128, data=found.w2, scale=found.w2_scale),
        )

    def recipe(self) -> Recipe:
        return Recipe(
            name="push FP8",
            act=rows_of(128, "1x128", TRUE_448),
            fc1_out=BF16,
            swiglu_out=BF16,
            mid=rows_of(128, "1x128", TRUE_448),
            fc2_out=BF16,
            weight_at="term",
            term=BF16,
        )

    def activation(self) -> Activation:
        return Activation()

    def operand(self, x: Tensor, scales: Tensor | None) -> Tensor:
        q = quantise(x, rows_of(128, "1x128", TRUE_448))
        assert q.scale is not None
        return operand(q.data, q.scale, q.format)


MID_120 = Format(
    name="1x32",
    element=E4M3,
    block=(1, 32),
    scale=E8M0,
    rule=ScaleRule(kind="power_of_two_up", top=448.0, quotient="reciprocal"),
)


class Sm120(Backend):
    """What the three SM120 kernels have in common: MXFP8 rows, and how they requantise."""

    ids = (torch.int64,)

    def recipe(self) -> Recipe:
        return Recipe(name=self.name, act=MXFP8, mid=MID_120, weight_at="fc2_input", term=BF16)

    def check_rows(self, x: Tensor, scales: Tensor | None) -> None:
        require(
            x.dtype == torch.float8_e4m3fn
            and scales is not None
            and scales.shape == (x.shape[0], self.hidden // 32)
            and scales.dtype == torch.float8_e8m0fnu,
            f"{self.name}: E4M3 rows with E8M0 scales [n, H / 32]",
        )

    def wire(self) -> tuple[torch.dtype, tuple[int, torch.dtype] | None]:
        return torch.float8_e4m3fn, (self.hidden // 32, torch.float8_e8m0fnu)

    def operand(self, x: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return operand(x, scales.view(torch.uint8), MXFP8)


class Sm120Split(Sm120):
    name = "sm120_mxfp4_mxfp8_bf16_cutedsl"
    stale = view = buckets = owns_output = True

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(32, 32)
        require(1 <= self.config.top_k <= 32, f"{self.name}: top_k {self.config.top_k} hangs")
        require(not quantize_input, "floors amax at 1e-4 by its own rule")
        require(
            (self.config.knobs or {}).get("rank_local_combine") is False,
            "left alone it may sum the slots of each rank first",
        )
        parallel = (self.config.data_parallel_size, self.config.tensor_parallel_size)
        require(parallel == (1, 1) and self.config.fast_math, f"{self.name}: {parallel}")

    def experts(self, transformed: Any) -> ExpertWeights:
        (fc1, s1), (fc2, s2) = transformed
        width = self.config.intermediate_size
        self.matrix(fc1, 2 * width, self.hidden // 2, torch.float4_e2m1fn_x2, major=2)
        self.matrix(fc2, self.hidden, width // 2, torch.float4_e2m1fn_x2, major=2)
        require(s1.dtype == s2.dtype == torch.float8_e8m0fnu, f"{self.name}: scales of {s1.dtype}")
        weights = layout.Sm120Weights(fc1=fc1, fc1_scale=s1, fc2=fc2, fc2_scale=s2)
        return mxfp4(layout.unpack_sm120_split(weights))


class Sm120Cake(Sm120):
    """Without the greatest count of any rank it gathers counts and waits for them on the host."""

    name = "sm120_mxfp4_mxfp8_bf16_cake"
    strict = packs = buckets = flags = True
    alone = nvshmem = False

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(512, 128)
        require(self.hidden <= 7680 and 1 <= self.config.top_k <= 9, f"{self.name}: sizes")
        require(2 <= world_size <= 32 and self.experts_per_rank <= 128, f"{self.name}: ranks")
        require(self.config.shared_expert is None, "another function than the plain BF16 recipe")
        table = self.config.transport_table
        require(table == "lsa_where_reachable", f"{table} needs NICs that write GPU memory")
        limit, blocks = self.config.swiglu_limit, self.config.codec_overflow_blocks
        require(type(limit) is int and 0 <= limit <= 65504, f"{self.name}: limit {limit!r}")
        require(16 <= blocks <= 256, f"{self.name}: {blocks} overflow blocks")
        require(64 * blocks >= self.hidden, "an answer that does not compress is lost")

    def experts(self, transformed: Any) -> ExpertWeights:
        pack, width = transformed, self.config.intermediate_size
        self.matrix(pack.w13, 2 * width, self.hidden // 2, torch.float4_e2m1fn_x2, major=2)
        self.matrix(pack.w2, self.hidden, width // 2, torch.float4_e2m1fn_x2, major=2)
        return mxfp4(
            layout.view_bytes(
                CanonicalExperts(
                    w13=pack.w13, w2=pack.w2, w13_scale=pack.w13_scale, w2_scale=pack.w2_scale
                )
            )
        )

    def activation(self) -> Activation:
        return Activation(limit=float(self.config.swiglu_limit))


class Sm120Mxfp8(Sm120):
    name = "sm120_mxfp8_mxfp8_bf16_cutedsl"
    stale, idles = True, False

    def check_config(self, quantize_input: bool, world_size: int) -> None:
        self.multiples(32, 32)
        require(1 <= self.config.top_k <= 32, f"{self.name}: top_k {self.config.top_k}")
        require(not quantize_input, "quantises with many small kernels, and by its own rule")
        require(self.activation().limit is None, "the kernel ignores its clamp")
        tile = (self.config.knobs or {}).get("mma_tiler_mnk")
        require(tile == (64, 64, 128), "any other tile is wrong")

    def experts(self, transformed: Any) -> ExpertWeights:
        (fc1, s1), (fc2, s2) = transformed
        width = self.config.intermediate_size
        self.matrix(fc1, self.hidden, 2 * width, torch.float8_e4m3fn, major=1)
        self.matrix(fc2, width, self.hidden, torch.float8_e4m3fn, major=1)
        weights = layout.Sm120Weights(fc1=fc1, fc1_scale=s1, fc2=fc2, fc2_scale=s2)
        found = layout.unpack_sm120_mxfp8(weights)
        return ExpertWeights(
            w13=Quantised(format=MXFP8, data=found.w13, scale=found.w13_scale),
            w2=Quantised(format=MXFP8, data=found.w2, scale=found.w2_scale),
        )


def mxfp4(found: CanonicalExperts) -> ExpertWeights:
    return ExpertWeights(
        w13=Quantised(format=MXFP4, data=found.w13, scale=found.w13_scale),
        w2=Quantised(format=MXFP4, data=found.w2, scale=found.w2_scale),
    )


def decoded(found: CanonicalExperts, decode: Any, gain: float) -> ExpertWeights:
    """NVFP4 as the kernel multiplies with it: E4M3 operands and one factor an expert."""
    assert found.w13_global is not None
    assert found.w2_global is not None
    return ExpertWeights(
        w13=one_factor(decode(found.w13, found.w13_scale), found.w13_global * gain),
        w2=one_factor(decode(found.w2, found.w2_scale), found.w2_global * gain),
    )


def one_factor(codes: Tensor, factor: Tensor | None) -> Quantised:
    assert factor is not None
    return Quantised(format=TENSOR_FP8, data=codes, scale=factor[:, None, None])


BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        PullBf16,
        PushBf16,
        PullFp8,
        PullMxfp4,
        PullNvfp4,
        PushFp8,
        Sm120Split,
        Sm120Cake,
        Sm120Mxfp8,
    )
}
