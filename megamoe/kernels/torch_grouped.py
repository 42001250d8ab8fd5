"""Grouped GEMMs of plain PyTorch, in BF16: any CUDA GPU, and all that the megakernels lack.

Each slot's token row goes to the rank of its expert (NCCL, or gloo where ranks share a GPU), is
sorted by expert there, passes two grouped products, and its BF16 term comes back to the token's
owner, which weights and sums in slot order. On a CPU the products are a plain loop in float64, so
that everything around them can be tested bit for bit.

Source: torch.nn.functional.grouped_mm (2.10 and later; torch._grouped_mm before), whose fast path
(compute capability 9.0 and 10.x) reads no offsets back and leaves rows past the last one unwritten.

Shapes: n tokens, k slots a token, m slots of all tokens in some order, S experts of this rank, W
ranks, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.formats import BF16, CATALOGUE, PLAIN_BF16, plain
from megamoe.kernels.base import Batch, Context, Datasheet, check_ranks
from megamoe.kernels.exchange import Exchange
from megamoe.kernels.operands import rounded_bf16
from megamoe.kernels.packs import owned, write_over
from megamoe.kernels.plain import PlainKernel
from megamoe.problem import (
    Activation,
    ExpertWeights,
    Machine,
    MoEWeights,
    Recipe,
    Request,
)

# A product's K must be a multiple of 16 bytes; a bias takes three of these columns.
BIAS_COLUMNS = 8


class TorchGrouped(PlainKernel):
    """BF16 between the steps as PyTorch gives it, the routing weight in the float32 sum."""

    sheet = Datasheet(
        name="torch_grouped",
        title="PyTorch grouped GEMM (BF16)",
        recipe=Recipe(
            name="torch_grouped",
            act=PLAIN_BF16,
            fc1_out=BF16,
            mid=PLAIN_BF16,
            fc2_out=BF16,
            term=BF16,
            weight_at="combine",
            combine="slots",
        ),
        formats=(PLAIN_BF16, *(fmt for fmt in CATALOGUE if fmt is not PLAIN_BF16)),
        hidden_multiple=8,
        intermediate_multiple=8,
        clamp="any",
        features=frozenset(
            {
                "any device",
                "alpha",
                "expert bias",
                "weight at input",
                "output scaling",
                "shared GPU",
                "tensor parallel",
                "sequence parallel",
            }
        ),
        transport="NCCL, or gloo where ranks share a GPU",
        automatic="gpu",
        hardware=("H200 EP1", "H200 EP2"),
        notes=(
            "weights of other formats are held in BF16: exactly where their scales are powers of "
            "two, else each value rounded once",
            "a bias enters its product as three BF16 columns, which hold float32 exactly",
            "over several ranks it reads the token counts back, so no CUDA graph can hold it",
        ),
    )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        if machine.capability is not None and machine.capability < (8, 0):
            found = ".".join(map(str, machine.capability))
            return (f"needs compute capability 8.0 or above, and {machine.name} has {found}",)
        return ()

    @classmethod
    def capturable(cls, request: Request, machine: Machine) -> bool:
        capability = machine.capability
        return request.world_size == 1 and capability is not None and capability[0] in (9, 10)

    @classmethod
    def recipe(cls, request: Request) -> Recipe:
        if request.weight_at != "input":
            return cls.sheet.recipe
        return replace(cls.sheet.recipe, name="torch_grouped, weight at input", weight_at="input")

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        held = rounded_bf16(experts)
        return replace(experts, w13=plain(held.w13), w2=plain(held.w2))

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> TorchGrouped:
        check_ranks(context)
        experts = rounded_bf16(weights.experts)
        w13 = with_bias(experts.w13, weights.experts.b13)
        w2 = with_bias(experts.w2, weights.experts.b2)
        if context.exchange:
            w13, w2 = owned((w13, w2), weights.experts)
        return cls(w13, w2, context, None if context.group is None else Exchange(context))

    def __init__(
        self, w13: Tensor, w2: Tensor, context: Context, exchange: Exchange | None
    ) -> None:
        self.w13, self.w2, self.context, self.exchange = w13, w2, context, exchange
        self.activation = context.request.activation
        self.at_input = context.request.weight_at == "input"
        request = context.request
        self.factor = request.routed_scaling_factor if request.scale_at == "output" else 1.0

    def run(self, batch: Batch, out: Tensor) -> None:
        n, k = batch.ids.shape
        experts = self.context.request.num_experts
        home = torch.where(batch.ids < 0, experts, batch.ids).flatten()  # empty slots come last
        order = home.argsort(stable=True)
        ones = torch.ones_like(home)
        counts = home.new_zeros(experts + 1).scatter_add_(0, home, ones)[:experts]
        x_mH = batch.x[order // max(k, 1)]
        if self.at_input:
            x_mH = narrow(batch.weights.flatten()[order, None] * x_mH.to(torch.float32))
        if self.exchange is None:
            term_mH = self._experts(x_mH, counts)
        else:
            term_mH = self._elsewhere(self.exchange, x_mH, counts)
        terms = torch.empty_like(term_mH)
        terms[order] = term_mH
        out.copy_(self._sum(terms.view(n, k, terms.shape[1]), batch))

    def update(self, weights: MoEWeights) -> Callable[[], None]:
        experts = rounded_bf16(weights.experts)
        w13 = with_bias(experts.w13, weights.experts.b13)
        w2 = with_bias(experts.w2, weights.experts.b2)
        return write_over((self.w13, self.w2), (w13, w2))

    # --- the parts of a run -----------------------------------------------------------------------

    def _elsewhere(self, exchange: Exchange, x_mH: Tensor, counts: Tensor) -> Tensor:
        """The terms of rows sorted by expert, each computed on its expert's rank."""
        wanted = exchange.counts(counts)  # [W, S]: what each rank wants of this one's experts
        sizes = torch.stack([counts.view_as(wanted).sum(1), wanted.sum(1)]).tolist()
        sent, received = sizes
        arrived = exchange.rows(x_mH[: sum(sent)], sent, received)
        world, slots = wanted.shape
        seat = torch.arange(slots, device=wanted.device).repeat(world)
        seat = seat.repeat_interleave(wanted.flatten(), output_size=len(arrived))
        order = seat.argsort(stable=True)
        served = self._experts(arrived[order], wanted.sum(0))
        back = torch.empty_like(served)
        back[order] = served
        terms = served.new_empty(len(x_mH), served.shape[1])
        terms[: sum(sent)] = exchange.rows(back, received, sent)
        return terms

    def _experts(self, x_mH: Tensor, counts: Tensor) -> Tensor:
        """BF16 terms of rows sorted by this rank's experts; rows past the counts are undefined."""
        return grouped(gated(grouped(x_mH, self.w13, counts), self.activation), self.w2, counts)

    def _sum(self, terms_nkH: Tensor, batch: Batch) -> Tensor:
        """The float32 sum in slot order; empty slots are skipped, whatever stands in them."""
        total = torch.zeros_like(terms_nkH[:, 0], dtype=torch.float32)
        for slot in range(terms_nkH.shape[1]):
            term = terms_nkH[:, slot].to(torch.float32)
            if not self.at_input:
                term = term * batch.weights[:, slot, None]
            total = torch.where(batch.ids[:, slot, None] >= 0, total + term, total)
        return total if self.factor == 1.0 else total * self.factor


# --- arithmetic -----------------------------------------------------------------------------------


def narrow(values: Tensor) -> Tensor:
    """To BF16 through float32."""
    return values.to(torch.float32).to(torch.bfloat16)


def with_bias(w_SNK: Tensor, bias_SN: Tensor | None) -> Tensor:
    """Weights [S, N, K], with BIAS_COLUMNS more columns where there is a bias: it enters the sum.

    The first three hold the float32 bias exactly, as three BF16 terms; rows bring ones for them.
    """
    if bias_SN is None:
        return w_SNK.contiguous()
    columns = w_SNK.new_zeros(*w_SNK.shape[:2], BIAS_COLUMNS)
    rest = bias_SN.to(torch.float32)
    for column in range(3):
        columns[..., column] = rest.to(torch.bfloat16)
        rest = rest - columns[..., column].to(torch.float32)
        rest = torch.where(rest.isfinite(), rest, 0.0)  # an infinite bias is all in the first
    return torch.cat([w_SNK, columns], dim=-1)


def grouped(a_mK: Tensor, w_SNK: Tensor, counts_S: Tensor) -> Tensor:
    """Rows sorted by expert times their expert's matrix, BF16 [m, N]; later rows are undefined."""
    if w_SNK.shape[2] != a_mK.shape[1]:
        ones = a_mK.new_zeros(len(a_mK), BIAS_COLUMNS)
        ones[:, :3] = 1.0
        a_mK = torch.cat([a_mK, ones], dim=1)
    if not len(a_mK):
        return a_mK.new_empty(0, w_SNK.shape[1])
    if a_mK.is_cuda:
        return _grouped_mm(a_mK, w_SNK.transpose(1, 2), counts_S.cumsum(0).to(torch.int32))
    out = a_mK.new_full((len(a_mK), w_SNK.shape[1]), torch.nan)
    start = 0
    for expert, count in enumerate(counts_S.tolist()):
        rows = a_mK[start : start + count].to(torch.float64)
        out[start : start + count] = narrow(rows @ w_SNK[expert].to(torch.float64).T)
        start += count
    return out


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)
    result: Tensor = (public or torch._grouped_mm)(a, b, offs=offsets)
    return result


def gated(h_mG: Tensor, activation: Activation) -> Tensor:
    """BF16 [m, 2I], gate half first, to BF16 [m, I]."""
    gate, up = h_mG.to(torch.float32).chunk(2, dim=1)
    limit = activation.limit
    if limit is not None:
        gate = gate.clamp(max=limit)
        gate = gate.clamp(min=-limit) if activation.symmetric else gate
        up = up.clamp(-limit, limit)
    if not h_mG.is_cuda:
        gate, up = gate.to(torch.float64), up.to(torch.float64)
    up = up + activation.up_offset if activation.up_offset else up
    argument = gate if activation.alpha == 1.0 else gate * activation.alpha
    return narrow((up * gate) * torch.sigmoid(argument))
