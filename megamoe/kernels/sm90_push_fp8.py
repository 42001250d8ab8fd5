"""FlashInfer's push-style FP8 megakernel for Hopper: block-FP8 checkpoints byte for byte.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_fp8_bf16_push_cuda (geometry,
configuration) and moe_ep/kernel_src/sm90/push_style_megamoe (shim/weights.py; src/a2a/
sm90_push_a2a_ops.cu: store_publish_fp8_kernel, silu_mul_quant_grouped_kernel,
combine_publish_kernel and combine_reduce_kernel for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.formats import (
    BF16,
    FP8_1X128,
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
)
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions
from megamoe.kernels.layout import PushFp8Weights, pack_push_fp8
from megamoe.kernels.mega import MegaKernel, MegaWorkspace
from megamoe.kernels.operands import canonical
from megamoe.problem import ExpertWeights, Recipe


class Sm90PushFp8(MegaKernel):
    """Weights exact; FC1's output, the SwiGLU and each expert's output rounded to BF16.

    The kernel quantises activations itself, so what enters the call is BF16 and its quantiser is
    part of the recipe. It sends BF16 rows back, one a slot: by default it would send FP8 sums.
    """

    sheet = Datasheet(
        name="sm90_push_fp8",
        title="SM90 push FP8 (peer memory)",
        recipe=Recipe(
            name="sm90_push_fp8",
            act=FP8_1X128,
            fc1_out=BF16,
            swiglu_out=BF16,
            mid=FP8_1X128,
            fc2_out=BF16,
            weight_at="term",
            term=BF16,
            combine="slots",
        ),
        formats=(FP8_BLOCK128, FP8_BLOCK128_BF16, FP8_BLOCK128_E8M0),
        architectures=((9, 0),),
        hidden_multiple=128,
        intermediate_multiple=128,
        intermediate_max=16384,
        top_k=frozenset({1, 2, 4, 6, 8}),
        world_sizes=range(1, 33),
        clamp="none",
        features=frozenset({"tensor parallel", "sequence parallel"}),
        transport="CUDA peer windows",
        needs=(Versions(package="flashinfer", least=flashinfer.LEAST),),
        id_dtype=torch.int32,
        hardware=("H200 EP1", "H200 EP2"),
        notes=(
            "built by nvcc at the first call (minutes); on one rank without a process group it "
            "makes one until it is closed",
        ),
    )

    config = "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig"

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PushFp8Weights:
        return pack_push_fp8(canonical(experts))

    @classmethod
    def handed(cls, packed: PushFp8Weights, context: Context) -> Any:
        return flashinfer.build(
            flashinfer.load("moe_ep.kernel_src.sm90.push_style_megamoe"),
            "Sm90PushWeights",
            {
                "w13_fp8": packed.w13_fp8,
                "w13_sf": packed.w13_sf,
                "w2_fp8": packed.w2_fp8,
                "w2_sf": packed.w2_sf,
                "w13_interleaved": packed.w13_interleaved,
            },
        )

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {"combine_dtype": "bf16", "grouped_combine": False}

    def open(self, capacity: int, tactic: Tactic | None = None) -> MegaWorkspace:
        return MegaWorkspace(self, capacity, tactic)
