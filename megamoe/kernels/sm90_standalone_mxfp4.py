"""FlashInfer's standalone MXFP4 megakernel for Hopper, over torch's symmetric memory.

Source: FlashInfer 0.7.4, megamoe/__init__.py and heuristics.py (geometry, plans) and
data/include/flashinfer/megamoe (detail/fused_epilogue.inl, detail/common.cuh
get_e4m3_sf_and_sf_inv, detail/combine.inl for the rounding points).
"""

from __future__ import annotations

from megamoe.formats import BF16, FP8_1X128, MXFP4
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import (
    StandaloneWeights,
    pack_standalone_mxfp4,
    unpack_standalone_mxfp4,
)
from megamoe.kernels.operands import STANDALONE_MID, canonical, fp4, neutral
from megamoe.kernels.standalone import StandaloneKernel
from megamoe.problem import ExpertWeights, Recipe


class Sm90StandaloneMxfp4(StandaloneKernel):
    """128 columns a scale before FC1 and FC2, powers of two before FC2; weight in FC2's input."""

    sheet = Datasheet(
        name="sm90_standalone_mxfp4",
        title="SM90 standalone MXFP4 (symmetric memory)",
        recipe=Recipe(
            name="sm90_standalone_mxfp4",
            act=FP8_1X128,
            weight_at="fc2_input",
            mid=STANDALONE_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(MXFP4,),
        architectures=((9, 0),),
        hidden_multiple=256,
        intermediate_multiple=128,
        top_k=range(1, 33),
        world_sizes=frozenset({1, 2, 4, 8, 16, 32}),
        clamp="upper",
        features=frozenset({"tensor parallel", "sequence parallel"}),
        transport="torch symmetric memory",
        needs=(Versions(package="flashinfer", least=flashinfer.LEAST),),
        equal_counts=True,
        hardware=("H200 EP1", "H200 EP2"),
        notes=(
            "holds an expert's block scales within 12 powers of two below its largest: lower ones "
            "are raised and their codes rounded",
            "built by nvcc at warm-up, once for each plan the capacity needs",
        ),
    )

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        packed = pack_standalone_mxfp4(neutral(canonical(experts)))
        return fp4(unpack_standalone_mxfp4(packed, hidden_size=experts.hidden_size), MXFP4)

    entry = "mxfp4_mega_moe"
    rows = sheet.recipe.act

    def selector(self, tokens: int) -> str:
        return "select_mxfp4_fused_plan"

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> StandaloneWeights:
        return pack_standalone_mxfp4(neutral(canonical(experts)))
