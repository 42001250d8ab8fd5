"""FlashInfer's pull-style NVFP4 megakernel for Hopper: FP4 weights, FP8 activations.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_nvfp4_bf16_pull_cutedsl (geometry,
weights, staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel (shim/
nvfp4_conversion.py; src/moe_hopper_fp8/epilogue_fp8_swapab.py for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.formats import BF16, FP8_ROW, NVFP4
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import (
    NVFP4_KPERM,
    PULL_TOP,
    PullNvfp4Weights,
    pack_pull_nvfp4,
    permute_columns,
    pull_nvfp4_operand,
)
from megamoe.kernels.mega import PullKernel, fp4_geometry
from megamoe.kernels.operands import PULL_MID, balanced, canonical, nvfp4_operands
from megamoe.problem import ExpertWeights, Recipe, Request


class Sm90PullNvfp4(PullKernel):
    """One scale a token before FC1, one for 64 columns before FC2; weight in FC2's input."""

    sheet = Datasheet(
        name="sm90_pull_nvfp4",
        title="SM90 pull NVFP4 (NVSHMEM)",
        recipe=Recipe(
            name="sm90_pull_nvfp4",
            act=FP8_ROW,
            weight_at="fc2_input",
            mid=PULL_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(NVFP4,),
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
            "multiplies with code * block scale rounded to E4M3: exact for scales that are powers "
            "of two, else a quarter of the elements move by up to 1/21",
            "gate and up get one global scale, their block scales moved to fit",
            "a block of FC2's input below 4.48e-28 is scaled by another rule",
        ),
    )

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        found = balanced(canonical(experts), PULL_TOP)
        return nvfp4_operands(found, pull_nvfp4_operand, 8.0)

    config = "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig"
    candidates = "hopper_nvfp4_candidates"
    launch = "hopper_nvfp4_mega_launch_thunk"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PullNvfp4Weights:
        return pack_pull_nvfp4(balanced(canonical(experts), PULL_TOP))

    @classmethod
    def handed(cls, packed: PullNvfp4Weights, context: Context) -> Any:
        tagged = flashinfer.load(
            "moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl.weights"
        ).TransformedMegaWeights
        return tagged(*packed.legs(), nvfp4_kperm=packed.kperm)

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {**super().fields(context), "nvfp4_kperm": NVFP4_KPERM}

    @classmethod
    def geometry(cls, request: Request) -> dict[str, Any]:
        return {**fp4_geometry(request), "kperm": NVFP4_KPERM}

    def __init__(self, packed: PullNvfp4Weights, context: Context) -> None:
        self.order = column_order(packed.kperm, context.device)
        super().__init__(packed, context)


def column_order(period: int, device: torch.device) -> Tensor:
    """int32 [period]: the columns of a period in the order in which the kernel reads them."""
    return permute_columns(torch.arange(period), period).to(torch.int32).to(device)
