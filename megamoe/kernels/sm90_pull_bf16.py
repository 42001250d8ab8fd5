"""FlashInfer's pull-style BF16 megakernel for Hopper: nothing quantised, every rank count.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/bf16_bf16_bf16_pull_cutedsl (geometry,
layout, staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel (shim/hopper_bf16.py,
src/moe_hopper_bf16/epilogue_bf16_common.py for the rounding points, src/moe_nvfp4_swapab/
topk_reduce.py for the sum).
"""

from __future__ import annotations

from megamoe.formats import (
    BF16,
    FP8_BLOCK32_E8M0,
    FP8_BLOCK128_E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
)
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import PullBf16Weights, pack_pull_bf16
from megamoe.kernels.mega import PullKernel
from megamoe.kernels.operands import exact_bf16
from megamoe.problem import ExpertWeights, Recipe


class Sm90PullBf16(PullKernel):
    """BF16 throughout, float32 accumulation, the routing weight inside FC2's input."""

    sheet = Datasheet(
        name="sm90_pull_bf16",
        title="SM90 pull BF16 (NVSHMEM)",
        recipe=Recipe(
            name="sm90_pull_bf16",
            act=PLAIN_BF16,
            weight_at="fc2_input",
            mid=PLAIN_BF16,
            term=BF16,
            combine="slots",
        ),
        formats=(PLAIN_BF16, MXFP4, NVFP4, MXFP8, FP8_BLOCK128_E8M0, FP8_BLOCK32_E8M0),
        architectures=((9, 0),),
        hidden_multiple=256,
        intermediate_multiple=64,
        top_k=range(1, 33),
        clamp="upper",
        # Unlike the other pull kernels, its final sum is not told which slots are empty.
        empty_slots="stale",
        features=frozenset({"shared GPU", "tensor parallel", "sequence parallel"}),
        transport="NVSHMEM",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="nvshmem", least="0.3.1"),
        ),
        hardware=("H200 EP1", "H200 EP2", "H200 EP4", "H200 EP8"),
        notes=(
            "other formats than bf16 are widened to BF16 where every value is a BF16 number, and "
            "refused at prepare where one is not (an NVFP4 global scale that is no power of two)",
        ),
    )

    config = "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig"
    candidates = "hopper_bf16_candidates"
    launch = "hopper_bf16_mega_launch_thunk"

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PullBf16Weights:
        return pack_pull_bf16(exact_bf16(experts))
