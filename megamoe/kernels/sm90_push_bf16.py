"""FlashInfer's push-style BF16 megakernel for Hopper: peers write into one another's memory.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/bf16_bf16_bf16_push_cake (geometry,
configuration) and moe_ep/kernel_src/sm90/cake_bf16_megamoe (shim/cake_weights.py; src/
cake_sm90_bf16_megamoe_fc1_gated_clamp_kernel.cu, cake_combine_per_route_bf16.cu and
cake_combine_tail_bf16.cu for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch

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
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions
from megamoe.kernels.layout import PushBf16Weights, pack_push_bf16
from megamoe.kernels.mega import MegaKernel, MegaWorkspace
from megamoe.kernels.operands import exact_bf16
from megamoe.problem import ExpertWeights, Recipe


class Sm90PushBf16(MegaKernel):
    """BF16 throughout, float32 accumulation, each expert's BF16 output weighted and rounded again.

    Of the kernel's three ways to send results back, the one that rounds each slot by itself
    (``per_route``) is pinned: the others group slots by rank, so that bits would follow the
    placement, and by default the choice follows the capacity and an environment variable.
    """

    sheet = Datasheet(
        name="sm90_push_bf16",
        title="SM90 push BF16 (peer memory)",
        recipe=Recipe(
            name="sm90_push_bf16",
            act=PLAIN_BF16,
            mid=PLAIN_BF16,
            fc2_out=BF16,
            weight_at="term",
            term=BF16,
            combine="slots",
        ),
        formats=(PLAIN_BF16, MXFP4, NVFP4, MXFP8, FP8_BLOCK128_E8M0, FP8_BLOCK32_E8M0),
        architectures=((9, 0),),
        hidden_multiple=256,
        intermediate_multiple=128,
        top_k=frozenset({1, 2, 4, 6, 8}),
        world_sizes=range(1, 33),
        clamp="symmetric",
        features=frozenset({"tensor parallel", "sequence parallel"}),
        transport="CUDA peer windows",
        needs=(Versions(package="flashinfer", least=flashinfer.LEAST),),
        id_dtype=torch.int32,
        hardware=("H200 EP1", "H200 EP2"),
        notes=(
            "other formats than bf16 are widened to BF16 where every value is a BF16 number, and "
            "refused at prepare where one is not",
            "built by nvcc at the first call (minutes); on one rank without a process group it "
            "makes one until it is closed",
        ),
    )

    config = "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig"

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PushBf16Weights:
        return pack_push_bf16(exact_bf16(experts))

    @classmethod
    def handed(cls, packed: PushBf16Weights, context: Context) -> Any:
        return flashinfer.build(
            flashinfer.load("moe_ep.kernel_src.sm90.cake_bf16_megamoe"),
            "Sm90CakeBf16Weights",
            {
                "w13": packed.w13,
                "w2": packed.w2,
                "num_local_experts": packed.w13.shape[0],
                "hidden_size": context.request.hidden_size,
                "intermediate_size": context.request.intermediate_size,
            },
        )

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {
            "clamp_limit": context.request.activation.limit,
            "combine_wire": "per_route",
        }

    def open(self, capacity: int, tactic: Tactic | None = None) -> MegaWorkspace:
        return MegaWorkspace(self, capacity, tactic)
