"""FlashInfer's pull-style FP8 megakernel for Hopper, with scales for blocks.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_fp8_bf16_pull_cutedsl (geometry,
weights, staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/src/moe_hopper_fp8
(epilogue_fp8.py and epilogue_fp8_swapab.py for the rounding points).
"""

from __future__ import annotations

from typing import Any

from megamoe.formats import (
    BF16,
    FP8_1X128,
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
)
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import (
    PullFp8Weights,
    pack_pull_fp8,
    unpack_pull_fp8,
)
from megamoe.kernels.mega import PullKernel
from megamoe.kernels.operands import (
    FP8_64X128,
    PULL_MID,
    block_fp8,
    canonical,
)
from megamoe.problem import ExpertWeights, Recipe, Request


class Sm90PullFp8(PullKernel):
    """128 columns a scale before FC1, 64 before FC2; routing weight in FC2's input."""

    sheet = Datasheet(
        name="sm90_pull_fp8",
        title="SM90 pull FP8 blockwise (NVSHMEM)",
        recipe=Recipe(
            name="sm90_pull_fp8",
            act=FP8_1X128,
            weight_at="fc2_input",
            mid=PULL_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(FP8_BLOCK128, FP8_BLOCK128_BF16, FP8_BLOCK128_E8M0),
        architectures=((9, 0),),
        hidden_multiple=128,
        intermediate_multiple=128,
        top_k=range(1, 33),
        clamp="upper",
        features=frozenset({"shared GPU", "tensor parallel", "sequence parallel"}),
        transport="NVSHMEM",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="nvshmem", least="0.3.1"),
        ),
        hardware=("H200 EP1", "H200 EP2", "H200 EP4", "H200 EP8"),
        notes=(
            "gate and up blocks share the larger of their scales and the other's codes are made "
            "anew: exact where the two are a power of two apart, else rounded to E4M3",
        ),
    )

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        return block_fp8(unpack_pull_fp8(pack_pull_fp8(canonical(experts))), FP8_64X128)

    config = "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig"
    candidates = "hopper_fp8_candidates"
    launch = "hopper_fp8_mega_launch_thunk"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PullFp8Weights:
        return pack_pull_fp8(canonical(experts))

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {**super().fields(context), **cls.geometry(context.request)}

    @classmethod
    def geometry(cls, request: Request) -> dict[str, Any]:
        return {"fp8_scale_mode": "blockwise"}
