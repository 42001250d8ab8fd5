"""FlashInfer's split MXFP4 megakernel for SM120: FP4 weights, MXFP8 activations, over NVSHMEM.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm120/mxfp4_mxfp8_bf16_cutedsl (geometry,
outputs) and moe_ep/kernel_src/sm120/split_cutedsl_megakernel (shim/runtime.py for buckets, shim/
staging.py; src/moe_sm120_mxfp4mxfp8_split: kernel_fc12.py for the rounding points,
kernel_combine_reduce.py for the sum, heuristic.py for what is pinned here).
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.formats import BF16, MXFP4, MXFP8
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions, slots_beyond_experts
from megamoe.kernels.layout import Sm120Weights, pack_sm120_split
from megamoe.kernels.mega import CodedWorkspace, MegaKernel
from megamoe.kernels.operands import SM120_MID, canonical
from megamoe.problem import ExpertWeights, Machine, Recipe, Request


class Sm120Mxfp4Split(MegaKernel):
    """32 columns a scale before FC1 and FC2; routing weight in FC2's input.

    By shape and device the kernel would sum the slots of each rank first, so that bits would follow
    the placement: that is switched off. It writes its own buffer, from which the answer is copied,
    because it compiles a graph for every output address it is given.
    """

    sheet = Datasheet(
        name="sm120_mxfp4_split",
        title="SM120 MXFP4 x MXFP8, split (NVSHMEM)",
        recipe=Recipe(
            name="sm120_mxfp4_split",
            act=MXFP8,
            weight_at="fc2_input",
            mid=SM120_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(MXFP4,),
        architectures=((12, None),),
        hidden_multiple=32,
        intermediate_multiple=32,
        top_k=range(1, 33),
        clamp="upper",
        # Its final sum is not told which slots are empty.
        empty_slots="stale",
        features=frozenset({"shared GPU", "sequence parallel"}),
        transport="NVSHMEM",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="nvshmem", least="0.3.1"),
        ),
        id_dtype=torch.int64,
        notes=(
            "compiled at warm-up, once for each bucket of tokens up to the capacity",
            "holds w2 as loaded, and a copy of w13 and of the scales in the kernel's order",
        ),
    )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        return slots_beyond_experts(request)

    config = "Sm120_Mxfp4_Mxfp8_Bf16_Cutedsl_MegaMoeConfig"
    tree = "SM120 split"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> Sm120Weights:
        return pack_sm120_split(canonical(experts))

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {
            "gate_up_clamp": context.request.activation.limit,
            "knobs": {"rank_local_combine": False},
        }

    def open(self, capacity: int, tactic: Tactic | None = None) -> SplitWorkspace:
        return SplitWorkspace(self, capacity, tactic, bucketed=True, view=True)


class SplitWorkspace(CodedWorkspace):
    def compiles(self) -> list[int]:
        """One count of each bucket that is compiled apart."""
        tree = flashinfer.load("moe_ep.kernel_src.sm120.split_cutedsl_megakernel")
        room = self.room(self.capacity)
        counts = range(1, self.capacity + 1)
        last = {tree.select_graph_compile_bucket(self.room(n), room): n for n in counts}
        return list(last.values())
