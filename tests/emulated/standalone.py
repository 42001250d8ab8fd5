"""The stand-in for `flashinfer.megamoe`: a symmetric buffer, and two functions that launch."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emulated.backends import decoded, mxfp4, require, rows_of
from emulated.cluster import here
from emulated.compute import Post, check_pool, launch, operand, reduce
from megamoe.formats import BF16, E4M3, FP32, Format, ScaleRule
from megamoe.kernels import layout
from megamoe.problem import Activation, ExpertWeights, Recipe

if TYPE_CHECKING:
    from emulated.device import Device

UP_448 = ScaleRule(kind="power_of_two_up", top=448.0, quotient="reciprocal")
RECIPE = Recipe(
    name="standalone",
    act=rows_of(128, "1x128"),
    mid=Format(name="1x128 up", element=E4M3, block=(1, 128), scale=FP32, rule=UP_448),
    weight_at="fc2_input",
    term=BF16,
)


class Buffer:
    """`MegaMoESymmBuffer`: rows staged here are what the next launch reads."""

    def __init__(
        self,
        device: Device,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        activation_clamp: float = 10.0,
        fast_math: bool = True,
    ) -> None:
        world = group.size()
        require(world in (1, 2, 4, 8, 16, 32), f"{world} ranks")
        require(hidden % 256 == 0 and intermediate_hidden % 128 == 0, "sizes")
        require(0 < num_topk <= min(32, num_experts), f"top_k {num_topk}")
        require(num_experts % world == 0, f"{num_experts} experts over {world} ranks")
        require(math.isfinite(activation_clamp), "the source says inff, which nvcc does not know")
        self.device, self.rank, self.world = device, group.rank(), world
        self.cluster = here(self.rank, world)
        self.num_experts, self.capacity = num_experts, num_max_tokens_per_rank
        self.hidden, self.width, self.top_k = hidden, intermediate_hidden, num_topk
        self.num_sms, self.num_max_tokens_per_rank = 132, num_max_tokens_per_rank
        self.num_topk, self.intermediate_hidden = num_topk, intermediate_hidden
        self.limit = activation_clamp
        self.geometry = (num_experts, self.capacity, num_topk, hidden, self.width, self.limit)
        self.cluster.meet(self.rank, ("allocate", self.geometry))
        self.x = torch.full((self.capacity, hidden), torch.nan).to(torch.float8_e4m3fn)
        self.x_sf = torch.full((self.capacity, hidden // 128), torch.nan)
        self.topk_idx = torch.full((self.capacity, num_topk), -1, dtype=torch.int64)
        self.topk_weights = torch.full((self.capacity, num_topk), torch.nan)
        self.staged = 0
        self.open = True
        device.pool[(self.rank, id(self))] = self  # type: ignore[assignment]

    def commit_staged(self, num_tokens: int) -> None:
        """What was written in place is this call's input."""
        require(0 < num_tokens <= self.capacity, f"{num_tokens} tokens of {self.capacity}")
        self.staged = num_tokens

    def prewarm(self, kernel_family: str = "auto", family_threshold: int | None = None) -> int:
        self.cluster.meet(self.rank, ("prewarm", self.geometry, kernel_family, family_threshold))
        return 1

    def destroy(self) -> None:
        require(self.open, "the buffer was destroyed before")
        self.open = False
        del self.device.pool[(self.rank, id(self))]

    def run(self, y: Tensor, n: int, experts: ExpertWeights, *why: Any) -> Tensor:
        """Counts are part of what is collective: the plan, and so the kernel, follows from them."""
        require(self.open, "the buffer has been destroyed")
        require(0 < n <= self.staged, f"{n} tokens, {self.staged} staged")
        require(
            y.dtype == torch.bfloat16 and y.shape[0] >= n and y.shape[1] == self.hidden,
            f"y {tuple(y.shape)} of {y.dtype}",
        )
        require(y.is_contiguous(), "y is not contiguous")
        require(bool((self.topk_idx[:n] < self.num_experts).all()), "an id past the last expert")
        post = Post(
            x=operand(self.x[:n], self.x_sf[:n], RECIPE.act),
            ids=self.topk_idx[:n],
            weights=self.topk_weights[:n],
            experts=experts,
        )
        posts = self.cluster.meet(self.rank, ("launch", self.geometry, n, *why), post)
        check_pool(self.rank, posts, self.capacity, self.num_experts // self.world)
        self.device.count(self.device.launches, self.rank)
        terms = launch(self.rank, posts, RECIPE, Activation(limit=self.limit))
        y[:n] = reduce(terms, post.ids, post.weights, RECIPE, experts.count)
        return y


def module(device: Device) -> SimpleNamespace:
    def pack(
        b: Buffer, l1: Tensor, l2: Tensor, g1: Tensor | None, g2: Tensor | None
    ) -> layout.StandaloneWeights:
        assert g1 is not None
        assert g2 is not None
        require(l1.shape[0] == b.num_experts // b.world, f"{l1.shape[0]} experts on a rank")
        return layout.StandaloneWeights(l1=l1, l2=l2, l1_global=g1, l2_global=g2)

    def mxfp4_mega_moe(
        y: Tensor,
        l1_weights: Tensor,
        l2_weights: Tensor,
        symm_buffer: Buffer,
        num_tokens: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        l1_global_scales: Tensor | None = None,
        l2_global_scales: Tensor | None = None,
    ) -> Tensor:
        packed = pack(symm_buffer, l1_weights, l2_weights, l1_global_scales, l2_global_scales)
        found = layout.unpack_standalone_mxfp4(packed, hidden_size=symm_buffer.hidden)
        count = y.shape[0] if num_tokens is None else num_tokens
        return symm_buffer.run(y, count, mxfp4(found))

    def nvfp4_mega_moe(
        y: Tensor,
        l1_weights: Tensor,
        l2_weights: Tensor,
        symm_buffer: Buffer,
        num_tokens: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        l1_global_scales: Tensor | None = None,
        l2_global_scales: Tensor | None = None,
        force_push_dispatch: bool | None = None,
        force_no_clean_barrier: bool | None = None,
        kernel_family: str = "auto",
        family_threshold: int = 256,
    ) -> Tensor:
        require(symm_buffer.world in (4, 8), f"{symm_buffer.world} ranks")
        require(2 * symm_buffer.width <= symm_buffer.hidden, "intermediate above half of hidden")
        require(
            kernel_family == "split" or family_threshold <= 256,
            "the fused family above 256 tokens may scale 64 columns at a time",
        )
        packed = pack(symm_buffer, l1_weights, l2_weights, l1_global_scales, l2_global_scales)
        found = layout.unpack_standalone_nvfp4(packed)
        count = y.shape[0] if num_tokens is None else num_tokens
        experts = decoded(found, layout.standalone_nvfp4_operand, 1.0)
        return symm_buffer.run(y, count, experts, kernel_family, family_threshold)

    def plan(
        at: int,
        num_sms: int,
        num_ranks: int,
        experts: int,
        top_k: int,
        hidden: int,
        width: int,
        capacity: int,
        tokens: int,
    ) -> int:
        require(0 < tokens <= capacity, f"a plan for {tokens} of {capacity} tokens")
        return tokens > at  # two kernels: what is above is launched by itself

    return SimpleNamespace(
        select_mxfp4_fused_plan=functools.partial(plan, 4),
        select_fused_plan=functools.partial(plan, 3),
        select_split_plan=functools.partial(plan, 300),
        MegaMoESymmBuffer=functools.partial(Buffer, device),
        mxfp4_mega_moe=mxfp4_mega_moe,
        nvfp4_mega_moe=nvfp4_mega_moe,
    )
