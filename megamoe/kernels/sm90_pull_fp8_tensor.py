"""FlashInfer's pull-style FP8 megakernel for Hopper with one scale a tensor, activations included.

Source: FlashInfer 0.7.4, moe_ep/backends/mega/kernel/sm90/fp8_fp8_bf16_pull_cutedsl (geometry,
weights, staging) and moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/src/moe_hopper_fp8
(epilogue_fp8.py and epilogue_fp8_swapab.py for the rounding points).
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.formats import BF16, E4M3, FP8_TENSOR, FP32, Format, ScaleRule
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context, Datasheet, Versions
from megamoe.kernels.layout import (
    PullFp8Weights,
    pack_pull_fp8_per_tensor,
    unpack_pull_fp8_per_tensor,
)
from megamoe.kernels.mega import PullKernel
from megamoe.kernels.operands import canonical, matrix_fp8
from megamoe.problem import ExpertWeights, Machine, Recipe, Request


def static(scale: float) -> Format:
    """E4M3 under a scale that is given, elements divided by it."""
    rule = ScaleRule(kind="static", top=scale)
    return Format(name="fp8_static", element=E4M3, scale=FP32, rule=rule)


def recipe_of(fc1_scale: float, fc2_scale: float) -> Recipe:
    """Where the kernel rounds with these activation scales."""
    rule = ScaleRule(kind="static", top=fc2_scale, apply="reciprocal")
    return Recipe(
        name=f"sm90_pull_fp8_tensor({fc1_scale:g}, {fc2_scale:g})",
        act=static(fc1_scale),
        weight_at="fc2_input",
        mid=Format(name="fp8_static_reciprocal", element=E4M3, scale=FP32, rule=rule),
        term=BF16,
        combine="slots",
    )


def activation_scales(request: Request) -> tuple[float, float]:
    """The calibrated scales of FC1's and FC2's input, as the float32 numbers they are on a GPU."""
    found = request.activation_scales or (1.0, 1.0)
    first, second = (float(torch.tensor(scale, dtype=torch.float32)) for scale in found)
    return first, second


class Sm90PullFp8Tensor(PullKernel):
    """One scale a matrix, and one static scale for the activations before each of FC1 and FC2.

    The activation scales come from a calibration (``Request.activation_scales``), are powers of
    nothing in particular, and must be the same on every rank: a rank dequantises its peers' tokens
    with its own copy. Without them there is no recipe, so the kernel objects.
    """

    sheet = Datasheet(
        name="sm90_pull_fp8_tensor",
        title="SM90 pull FP8 per tensor (NVSHMEM)",
        recipe=recipe_of(1.0, 1.0),
        formats=(FP8_TENSOR,),
        architectures=((9, 0),),
        hidden_multiple=64,
        intermediate_multiple=64,
        top_k=range(1, 33),
        clamp="upper",
        features=frozenset({"shared GPU", "tensor parallel", "sequence parallel"}),
        transport="NVSHMEM",
        needs=(
            Versions(package="flashinfer", least=flashinfer.LEAST),
            Versions(package="nvshmem", least="0.3.1"),
        ),
        hardware=("H200 EP1", "H200 EP2", "H200 EP4", "H200 EP8"),
        notes=("needs calibrated activation scales; values past 448 times a scale saturate",),
    )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        if request.activation_scales is None:
            return ("needs calibrated activation scales for FC1 and FC2, and none were given",)
        return ()

    @classmethod
    def recipe(cls, request: Request) -> Recipe:
        return recipe_of(*activation_scales(request))

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        packed = pack_pull_fp8_per_tensor(
            canonical(experts), fc1_activation_scale=1.0, fc2_activation_scale=1.0
        )
        found = unpack_pull_fp8_per_tensor(packed)
        return matrix_fp8((found.w13, found.w2), (found.w13_scale, found.w2_scale))

    config = "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig"
    candidates = "hopper_fp8_candidates"
    launch = "hopper_fp8_mega_launch_thunk"

    @classmethod
    def pack(cls, experts: ExpertWeights, context: Context) -> PullFp8Weights:
        fc1_scale, fc2_scale = activation_scales(context.request)
        return pack_pull_fp8_per_tensor(
            canonical(experts),
            fc1_activation_scale=fc1_scale,
            fc2_activation_scale=fc2_scale,
        )

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        fc1_scale, fc2_scale = activation_scales(context.request)
        return {
            **super().fields(context),
            **cls.geometry(context.request),
            "fc1_activation_dequant_scale": fc1_scale,
            "fc2_activation_dequant_scale": fc2_scale,
        }

    @classmethod
    def geometry(cls, request: Request) -> dict[str, Any]:
        return {"fp8_scale_mode": "per_tensor"}

    def __init__(self, packed: PullFp8Weights, context: Context) -> None:
        self.rows = static(activation_scales(context.request)[0])
        super().__init__(packed, context)
