"""FlashInfer's pull-style MXFP4 megakernel for Hopper: FP4 weights, FP8 activations.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_mxfp4_bf16_pull_cutedsl (geometry,
staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/src/moe_hopper_fp8
(epilogue_fp8_swapab.py for the rounding points).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import BF16, FP8_ROW, MXFP4
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Context, Datasheet, Kernel, Versions
from megamoe.kernels.layout import pack_pull_mxfp4, unpack_pull_mxfp4
from megamoe.kernels.operands import PULL_MID, canonical, coded, fp4, neutral
from megamoe.problem import ExpertWeights, MoEWeights, Recipe


class Sm90PullMxfp4(Kernel):
    """One scale a token before FC1, one for 64 columns before FC2; weight in FC2's input."""

    sheet = Datasheet(
        name="sm90_pull_mxfp4",
        title="SM90 pull MXFP4 (NVSHMEM)",
        recipe=Recipe(
            name="sm90_pull_mxfp4",
            act=FP8_ROW,
            weight_at="fc2_input",
            mid=PULL_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(MXFP4,),
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
        id_dtype=torch.int64,
        hardware=("H200 EP1", "H200 EP8"),
        notes=(
            "holds an expert's block scales within 12 powers of two below its largest: lower ones "
            "are raised and their codes rounded",
            "a block of FC2's input below 4.48e-28 is scaled by another rule",
        ),
    )

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        return fp4(unpack_pull_mxfp4(pack_pull_mxfp4(neutral(canonical(experts)))), MXFP4)

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> Sm90PullMxfp4:
        packed = pack_pull_mxfp4(neutral(canonical(weights.experts)))
        flashinfer.together(context)
        layer = flashinfer.MegaLayer(
            context,
            "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig",
            packed.transformed(),
            quantised=True,
            tree="SM90 pull",
            intermediate_size=context.request.intermediate_size,
            top_k=context.request.top_k,
            gate_up_clamp=context.request.activation.limit,
        )
        return cls(layer)

    def __init__(self, layer: flashinfer.MegaLayer) -> None:
        self.layer = layer

    def run(self, batch: Batch, out: Tensor) -> None:
        codes, scales = coded(batch.x, self.sheet.recipe.act)
        self.layer.run(codes, batch.ids, batch.weights, out, scales)

    def warmup(self) -> None:
        self.run(*flashinfer.warmup_batch(self.layer.context, self.sheet))
        flashinfer.synchronise(self.layer.context.device)

    def close(self) -> None:
        self.layer.close()
