"""FlashInfer's pull-style MXFP4 megakernel for Hopper: FP4 weights, FP8 activations.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_mxfp4_bf16_pull_cutedsl (geometry,
staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/src/moe_hopper_fp8
(epilogue_fp8_swapab.py for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.formats import BF16, FP8_ROW, MXFP4
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import PullMxfp4Weights, pack_pull_mxfp4, unpack_pull_mxfp4
from megamoe.kernels.mega import PullKernel, fp4_geometry
from megamoe.kernels.operands import PULL_MID, canonical, fp4, neutral
from megamoe.problem import ExpertWeights, Recipe, Request


class Sm90PullMxfp4(PullKernel):
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
        hardware=("H200 EP1", "H200 EP2", "H200 EP4", "H200 EP8"),
        notes=(
            "holds an expert's block scales within 12 powers of two below its largest: lower ones "
            "are raised and their codes rounded",
            "a block of FC2's input below 4.48e-28 is scaled by another rule",
        ),
    )

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        return fp4(unpack_pull_mxfp4(pack_pull_mxfp4(neutral(canonical(experts)))), MXFP4)

    config = "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig"
    candidates = "hopper_mxfp4_candidates"
    launch = "hopper_mxfp4_mega_launch_thunk"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PullMxfp4Weights:
        return pack_pull_mxfp4(neutral(canonical(experts)))

    @classmethod
    def geometry(cls, request: Request) -> dict[str, Any]:
        return fp4_geometry(request)
