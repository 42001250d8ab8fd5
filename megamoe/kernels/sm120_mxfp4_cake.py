"""FlashInfer's one-launch MXFP4 megakernel for SM120: FP4 weights, MXFP8 activations, over NCCL.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm120/mxfp4_mxfp8_bf16_cake (cake_config.py,
cake_geometry.py, cake_staging.py, cake_backend.py) and moe_ep/kernel_src/sm120/cake_mxfp4_megamoe
(src/cake_sm120_megamoe_kernel_part008.cuh for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.formats import BF16, MXFP4, MXFP8
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Tactic, Versions
from megamoe.kernels.layout import CanonicalExperts, view_mxfp4
from megamoe.kernels.mega import CodedWorkspace, MegaKernel
from megamoe.kernels.operands import SM120_MID, canonical
from megamoe.problem import ExpertWeights, Machine, Recipe, Request


class Sm120Mxfp4Cake(MegaKernel):
    """32 columns a scale before FC1 and FC2; routing weight in FC2's input.

    Results travel in blocks of 64 values, compressed without loss where they can be, and a call
    that needs more room than was set aside is wrong and only flagged on the device. So room is set
    aside for every block, and each launch's flag is kept for ``check``. Every rank passes the
    greatest count of any rank, without which the kernel would gather counts and wait for them on
    the host.
    """

    sheet = Datasheet(
        name="sm120_mxfp4_cake",
        title="SM120 MXFP4 x MXFP8, cake (NCCL device API)",
        recipe=Recipe(
            name="sm120_mxfp4_cake",
            act=MXFP8,
            weight_at="fc2_input",
            mid=SM120_MID,
            term=BF16,
            combine="slots",
        ),
        formats=(MXFP4,),
        architectures=((12, 0),),
        hidden_multiple=512,
        hidden_max=7680,
        intermediate_multiple=128,
        top_k=range(1, 10),
        world_sizes=range(2, 33),
        max_experts_per_rank=128,
        max_tokens_per_rank=32640,
        clamp="upper int",
        features=frozenset({"sequence parallel"}),
        transport="NCCL device API",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="cuda", least="13.0"),
            Versions(package="nccl", least="2.30.7", exact=True),
        ),
        id_dtype=torch.int64,
        notes=(
            "wants a process group of NCCL",
            "built by nvcc when it is prepared",
            "is handed the loaded bytes; FlashInfer keeps w2, and copies w13 and the scales",
            "its own shared expert is another function than ours and stays unused",
        ),
    )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        reasons = []
        held = request.world_size * request.placement.slots_per_rank
        if held > 1024:
            reasons.append(f"holds at most 1024 experts over all ranks, not {held}")
        limit = request.activation.limit
        if limit is not None and (limit > 65504 or limit < 1):
            reasons.append(f"takes a limit from 1 to 65504, not {limit:g}")
        return tuple(reasons)

    config = "Sm120_Mxfp4_Mxfp8_Bf16_Cake_MegaMoeConfig"
    rows = sheet.recipe.act

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> CanonicalExperts:
        return view_mxfp4(canonical(experts))

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {
            "swiglu_limit": int(context.request.activation.limit or 0),
            # Its default wants a NIC that writes GPU memory between GPUs that reach each other.
            "transport_table": "lsa_where_reachable",
            "codec_overflow_blocks": max(16, context.request.hidden_size // 64),
        }

    @classmethod
    def handed(cls, packed: CanonicalExperts, context: Context) -> Any:
        return flashinfer.build(
            flashinfer.load("moe_ep"),
            "MoEWeightPack",
            {
                "w13": packed.w13,
                "w2": packed.w2,
                "w13_scale": packed.w13_scale,
                "w2_scale": packed.w2_scale,
            },
        )

    def __init__(self, packed: CanonicalExperts, context: Context) -> None:
        super().__init__(packed, context)
        self.packed = None  # FlashInfer made the kernel's own bytes of it, and keeps what it needs

    def opened(self, weights: Any, *, pack: Any = None) -> flashinfer.MegaLayer:
        return super().opened(None, pack=weights)

    def open(self, capacity: int, tactic: Tactic | None = None) -> CodedWorkspace:
        return CodedWorkspace(self, capacity, tactic, bucketed=True, flag="protocol_error")
