"""One layer on one rank, and the same layer cut over many: what the tests here compare."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import torch
from strategies import Case, unit
from strategies import ids as routes
from torch import Tensor

from megamoe.formats import FP8_BLOCK32, MXFP4, NVFP4, PLAIN_BF16, PLAIN_F32, Format, Quantised
from megamoe.problem import Activation, ExpertWeights, MoEWeights, Placement, Recipe, TopK
from megamoe.reference.moe import Emulated, layer

FORMATS: tuple[Format, ...] = (PLAIN_BF16, PLAIN_F32, FP8_BLOCK32, MXFP4, NVFP4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A layer, a placement, and each rank's tokens. counts: tokens a rank; ids: logical, of all."""

    case: Case
    placement: Placement
    counts: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.counts)

    def whole(self) -> tuple[Tensor, TopK, MoEWeights]:
        """All tokens, and the layer with every expert on one rank."""
        ids = torch.tensor(self.ids, dtype=torch.int64).view(-1, self.case.top_k)
        weights = unit(self.case.seed + 2, *ids.shape)
        weights[ids < 0] = torch.nan  # never read
        return self.case.x(), TopK(ids=ids, weights=weights, scaled=False), made(self.case)

    def expected(self, recipe: Recipe) -> Tensor:
        """One rank's answer, [T, H]."""
        return layer(*self.whole(), Emulated(recipe))

    def tokens(self, rank: int) -> tuple[Tensor, TopK]:
        x, topk, _ = self.whole()
        start = sum(self.counts[:rank])
        own = slice(start, start + self.counts[rank])
        return x[own], TopK(ids=topk.ids[own], weights=topk.weights[own], scaled=False)

    def weights(self, rank: int) -> MoEWeights:
        return share(made(self.case), self.placement, rank)


@functools.lru_cache(maxsize=4)
def made(case: Case) -> MoEWeights:
    return case.layer()


def share(weights: MoEWeights, placement: Placement, rank: int) -> MoEWeights:
    """A rank's part of a whole layer; every byte of a slot that holds no expert is 0xFF."""
    held = torch.tensor(placement.slots[rank], dtype=torch.int64)

    def part(tensor: Tensor) -> Tensor:
        raw = tensor.contiguous().view(torch.uint8)[held.clamp(min=0)]
        raw[held < 0] = 0xFF
        return raw.view(tensor.dtype)

    def quantised(q: Quantised) -> Quantised:
        return Quantised(
            format=q.format,
            data=part(q.data),
            scale=None if q.scale is None else part(q.scale),
            global_scale=None if q.global_scale is None else part(q.global_scale),
            row_groups=q.row_groups,
        )

    e = weights.experts
    experts = ExpertWeights(
        w13=quantised(e.w13),
        w2=quantised(e.w2),
        b13=None if e.b13 is None else part(e.b13),
        b2=None if e.b2 is None else part(e.b2),
    )
    return dataclasses.replace(weights, experts=experts, placement=placement, rank=rank)


@st.composite
def placements(draw: st.DrawFn, experts: int, world_size: int) -> Placement:
    """Uneven, permuted and replicated experts, ranks that hold none, and slots that hold none."""
    extra = draw(st.lists(st.integers(-1, experts - 1), max_size=4))
    slots = draw(st.permutations([*range(experts), *extra]))
    size = len(slots)
    owners = draw(st.lists(st.integers(0, world_size - 1), min_size=size, max_size=size))
    return Placement(
        num_experts=experts,
        slots=tuple(
            tuple(s for s, owner in zip(slots, owners, strict=True) if owner == rank)
            for rank in range(world_size)
        ),
    )


@st.composite
def problems(
    draw: st.DrawFn, world_sizes: st.SearchStrategy[int], formats: tuple[Format, ...] = FORMATS
) -> Problem:
    """Up to five tokens a rank, idle ranks among them."""
    world_size = draw(world_sizes)
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, 4))
    counts = tuple(draw(st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size)))
    weight_at = draw(st.sampled_from(("combine", "fc2_input", "input")))
    case = Case(
        tokens=sum(counts),
        experts=experts,
        top_k=top_k,
        hidden_size=32,
        intermediate_size=32,
        weights=draw(st.sampled_from(formats)),
        activation=Activation(limit=draw(st.sampled_from((None, 0.5)))),
        bias=weight_at != "fc2_input" and draw(st.booleans()),
        shared=draw(st.sampled_from((0, 32))),
        routed_scaling_factor=draw(st.sampled_from((1.0, 2.5))),
        scale_at=draw(st.sampled_from(("weights", "output"))),
        weight_at=weight_at,
        seed=draw(st.integers(0, 2**20)),
    )
    rows = draw(routes(case.tokens, top_k, experts))
    return Problem(
        case=case,
        placement=draw(placements(experts, world_size)),
        counts=counts,
        ids=tuple(tuple(row) for row in rows),
    )


def same_bits(found: list[Tensor], expected: Tensor) -> None:
    """Every rank's rows are the one rank's rows, bit for bit."""
    together = torch.cat(found)
    assert together.shape == expected.shape
    assert together.dtype == expected.dtype == torch.bfloat16
    differ = (together.view(torch.int16) != expected.view(torch.int16)).any(dim=1)
    assert not differ.any(), f"rows {differ.nonzero().flatten().tolist()} differ"
