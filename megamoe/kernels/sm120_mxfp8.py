"""FlashInfer's MXFP8 megakernel for SM120: weights and activations in MXFP8, over NVSHMEM.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm120/mxfp8_mxfp8_bf16_cutedsl (geometry, the
pinned tile, the clamp it lacks) and moe_ep/kernel_src/sm120/swapab_cutedsl_megakernel/src
(moe_sm120_mxfp8_swapab/kernel_fc12.py for the rounding points, topk_reduce.py for
the sum).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from megamoe.formats import BF16, MXFP8
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions
from megamoe.kernels.layout import Sm120Weights, pack_sm120_mxfp8
from megamoe.kernels.mega import CodedWorkspace, MegaKernel
from megamoe.kernels.operands import SM120_MID, canonical
from megamoe.problem import ExpertWeights, Recipe

TILE: Final = (64, 64, 128)


class Sm120Mxfp8(MegaKernel):
    """32 columns a scale before FC1 and FC2; routing weight in FC2's input.

    The tile of 64 tokens is pinned here too, as FlashInfer's layer does where nothing is said: the
    kernel's own default of 128 gives wrong answers.
    """

    sheet = Datasheet(
        name="sm120_mxfp8",
        title="SM120 MXFP8 x MXFP8 (NVSHMEM)",
        recipe=Recipe(
            name="sm120_mxfp8",
            act=MXFP8,
            weight_at="fc2_input",
            mid=SM120_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(MXFP8,),
        architectures=((12, None),),
        hidden_multiple=32,
        intermediate_multiple=32,
        top_k=range(1, 33),
        clamp="none",
        # Its final sum is not told which slots are empty.
        empty_slots="stale",
        features=frozenset({"shared GPU", "sequence parallel"}),
        transport="NVSHMEM",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="nvshmem", least="0.3.1"),
        ),
        id_dtype=torch.int64,
        notes=("holds w2 as loaded, and a copy of w13 and of the scales in the kernel's order",),
    )

    config = "Sm120_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig"
    tree = "SM120 swap-AB"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> Sm120Weights:
        return pack_sm120_mxfp8(canonical(experts))

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {"knobs": {"mma_tiler_mnk": TILE}}

    def open(self, capacity: int, tactic: Tactic | None = None) -> CodedWorkspace:
        return CodedWorkspace(self, capacity, tactic, least=1)
