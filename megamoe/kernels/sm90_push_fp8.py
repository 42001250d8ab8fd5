"""FlashInfer's push-style FP8 megakernel for Hopper: block-FP8 checkpoints byte for byte.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_fp8_bf16_push_cuda (geometry,
configuration) and moe_ep/kernel_src/sm90/push_style_megamoe (shim/weights.py; src/a2a/
sm90_push_a2a_ops.cu: store_publish_fp8_kernel, silu_mul_quant_grouped_kernel,
combine_publish_kernel and combine_reduce_kernel for the rounding points).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import (
    BF16,
    FP8_1X128,
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
)
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Context, Datasheet, Kernel, Versions
from megamoe.kernels.layout import pack_push_fp8
from megamoe.kernels.operands import canonical
from megamoe.problem import MoEWeights, Recipe


class Sm90PushFp8(Kernel):
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
        hardware=("H200 EP1",),
        notes=(
            "built by nvcc at the first call (minutes); on one rank without a process group it "
            "makes one until it is closed",
        ),
    )

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> Sm90PushFp8:
        packed = pack_push_fp8(canonical(weights.experts))
        flashinfer.together(context)
        transformed = flashinfer.build(
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
        layer = flashinfer.MegaLayer(
            context,
            "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig",
            transformed,
            quantised=False,
            intermediate_size=context.request.intermediate_size,
            top_k=context.request.top_k,
            combine_dtype="bf16",
            grouped_combine=False,
        )
        return cls(layer)

    def __init__(self, layer: flashinfer.MegaLayer) -> None:
        self.layer = layer

    def run(self, batch: Batch, out: Tensor) -> None:
        self.layer.run(batch.x, batch.ids, batch.weights, out)

    def warmup(self) -> None:
        self.run(*flashinfer.warmup_batch(self.layer.context, self.sheet))
        flashinfer.synchronise(self.layer.context.device)

    def close(self) -> None:
        self.layer.close()
