"""FlashInfer's standalone NVFP4 megakernels for Hopper, over torch's symmetric memory.

Source: FlashInfer 0.7.4, megamoe/__init__.py and heuristics.py (geometry, plans, families) and
data/include/flashinfer/megamoe (detail/fused_epilogue.inl, sm90_nvfp4_mega_moe_split_l1_body.inl,
detail/common.cuh get_e4m3_sf_and_sf_inv, detail/combine.inl for the rounding points).
"""

from __future__ import annotations

from typing import Any, Final

from megamoe.errors import bad_input
from megamoe.formats import BF16, FP8_1X128, NVFP4
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions
from megamoe.kernels.layout import (
    STANDALONE_TOP,
    StandaloneWeights,
    pack_standalone_nvfp4,
    standalone_nvfp4_operand,
)
from megamoe.kernels.operands import STANDALONE_MID, balanced, canonical, nvfp4_operands
from megamoe.kernels.packed import PackedKernel
from megamoe.kernels.standalone import SharedWorkspace, StandaloneKernel
from megamoe.problem import ExpertWeights, Machine, MoEWeights, Recipe, Request

FUSED_TOKENS: Final = 256
"""Up to here the fused kernel scales 128 columns of FC2's input at a time, above it 64."""


class Sm90StandaloneNvfp4(StandaloneKernel):
    """128 columns a scale before FC1 and FC2, powers of two before FC2; weight in FC2's input.

    Two kernels: one launch up to 256 tokens a rank, two above. ``Context.options["family"]``
    ("fused", "split") overrides the choice; their recipe is the same.
    """

    sheet = Datasheet(
        name="sm90_standalone_nvfp4",
        title="SM90 standalone NVFP4 (symmetric memory)",
        recipe=Recipe(
            name="sm90_standalone_nvfp4",
            act=FP8_1X128,
            weight_at="fc2_input",
            mid=STANDALONE_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(NVFP4,),
        architectures=((9, 0),),
        hidden_multiple=256,
        intermediate_multiple=128,
        top_k=range(1, 33),
        world_sizes=frozenset({4, 8}),
        multiprocessors=frozenset({78, 132}),
        clamp="upper",
        features=frozenset({"tensor parallel", "sequence parallel"}),
        transport="torch symmetric memory",
        needs=(Versions(package="flashinfer", least=flashinfer.LEAST),),
        equal_counts=True,
        options=("family",),
        notes=(
            "multiplies with code * block scale rounded to E4M3: exact for scales that are powers "
            "of two, else a quarter of the elements move by up to 1/21",
            "gate and up get one global scale, their block scales moved below 72",
            "built by nvcc at warm-up, once for each plan the capacity needs",
        ),
    )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        reasons = [*super().own_objections(request, machine)]
        hidden, width = request.hidden_size, request.intermediate_size
        if hidden > 4096 and hidden % 512:
            reasons.append(f"hidden_size {hidden} is above 4096 and not a multiple of 512")
        if 2 * width > hidden:
            reasons.append(f"intermediate_size {width} is above half of hidden_size {hidden}")
        return tuple(reasons)

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        found = balanced(canonical(experts), STANDALONE_TOP)
        return nvfp4_operands(found, standalone_nvfp4_operand, 1.0)

    entry = "nvfp4_mega_moe"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> StandaloneWeights:
        return pack_standalone_nvfp4(canonical(experts))[0]

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> PackedKernel:
        family_of(context)  # refused before anything is packed
        return super().prepare(weights, context)

    @property
    def family(self) -> str:
        return family_of(self.context)

    def selector(self, tokens: int) -> str:
        fused = self.family == "fused" or (self.family == "auto" and tokens <= FUSED_TOKENS)
        return "select_fused_plan" if fused else "select_split_plan"

    def launch_options(self) -> dict[str, Any]:
        return {"kernel_family": self.family, "family_threshold": FUSED_TOKENS}

    def open(self, capacity: int, tactic: Tactic | None = None) -> SharedWorkspace:
        space = super().open(capacity, tactic)
        space.buffer.buffer.prewarm(**space.options)
        return space


def family_of(context: Context) -> str:
    """ "auto", or the family asked for; the fused one only where it has the datasheet's recipe."""
    family = str(context.options.get("family", "auto"))
    if family not in ("auto", "fused", "split"):
        raise bad_input("family", repr(family), "is unknown", "use 'auto', 'fused' or 'split'")
    capacity = context.request.max_tokens_per_rank
    if family == "fused" and capacity > FUSED_TOKENS:
        raise bad_input(
            "family", "'fused'", f"scales 64 columns at a time above {FUSED_TOKENS} tokens a rank, "
            f"and max_tokens_per_rank is {capacity}", "use 'auto' or 'split'",
        )  # fmt: skip
    return family
