"""Small layers made from integers alone, and Hypothesis strategies over them.

The numbers come from a counter-based integer hash, so a seed means the same tensors on any machine
and any library version. Strategies take bounds, always allow empty experts, empty slots and no
token at all, and shrink to one token and one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from megamoe.formats import PLAIN_BF16, Format, Quantised, plain, quantise
from megamoe.problem import (
    Activation,
    ExpertWeights,
    MoEWeights,
    Placement,
    SharedExpert,
    TopK,
    WeightAt,
)


def hashed(seed: int, *shape: int) -> np.ndarray:
    """uint64 of a shape: the mixing function of splitmix64 over seed and position."""
    count = int(np.prod(shape, dtype=np.int64))
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 32)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).reshape(shape)


def bell(seed: int, *shape: int) -> Tensor:
    """float32 in (-2, 2): the sum of four bytes, roughly normal, moved down by 0 to 7 binades.

    The binades make dots need more than 24 bits, so that their rounding is put to the test.
    """
    z = hashed(seed, *shape)
    total = sum(((z >> np.uint64(8 * i)) & np.uint64(255)).astype(np.int64) for i in range(4))
    binade = ((z >> np.uint64(32)) & np.uint64(7)).astype(np.int32)
    return torch.from_numpy(np.ldexp(np.asarray(total) - 510.0, -8 - binade)).to(torch.float32)


def unit(seed: int, *shape: int) -> Tensor:
    """float32 in (0, 1], all 24 bits used."""
    z = (hashed(seed, *shape) >> np.uint64(40)).astype(np.int64) + 1
    return torch.from_numpy(z).to(torch.float32) * 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One small layer and the tokens that enter it.

    shared: the shared expert's width, 0 for none. gain: multiplies w13, so that gates and ups pass
    their limits. empty: one in this many slots is empty; 0 is none.
    """

    tokens: int = 3
    experts: int = 4
    top_k: int = 2
    hidden_size: int = 40
    intermediate_size: int = 24
    weights: Format = PLAIN_BF16
    activation: Activation = Activation()
    bias: bool = False
    shared: int = 0
    shared_activation: Activation = Activation()
    gain: float = 1.0
    empty: int = 5
    routed_scaling_factor: float = 1.0
    scale_at: Literal["weights", "output"] = "weights"
    scaled: bool = False
    weight_at: WeightAt = "combine"
    seed: int = 1

    def x(self, device: str = "cpu") -> Tensor:
        return bell(self.seed, self.tokens, self.hidden_size).to(torch.bfloat16).to(device)

    def topk(self, device: str = "cpu") -> TopK:
        z = hashed(self.seed + 1, self.tokens, self.top_k).astype(np.int64) & (2**40 - 1)
        ids = torch.from_numpy(z // 1024 % self.experts)
        if self.empty:
            ids = torch.where(torch.from_numpy(z) % self.empty == 0, -1, ids)
        weights = unit(self.seed + 2, self.tokens, self.top_k)
        return TopK(ids=ids.to(device), weights=weights.to(device), scaled=self.scaled)

    def layer(self, device: str = "cpu") -> MoEWeights:
        shared = None
        if self.shared:
            shared = SharedExpert(
                weights=self._experts(1, self.shared, self.seed + 100, device),
                activation=self.shared_activation,
            )
        return MoEWeights(
            experts=self._experts(self.experts, self.intermediate_size, self.seed + 10, device),
            placement=Placement.contiguous(self.experts, 1),
            activation=self.activation,
            routed_scaling_factor=self.routed_scaling_factor,
            scale_at=self.scale_at,
            weight_at=self.weight_at,
            shared=shared,
        )

    def _experts(self, count: int, width: int, seed: int, device: str) -> ExpertWeights:
        rows, hidden = 2 * width, self.hidden_size
        w13 = bell(seed, count, rows, hidden) * self.gain / power_above(hidden)
        w2 = bell(seed + 1, count, hidden, width) / power_above(width)
        b13 = b2 = None
        if self.bias:
            b13 = bell(seed + 2, count, rows).to(device)
            b2 = bell(seed + 3, count, hidden).to(torch.bfloat16).to(device)
        return ExpertWeights(
            w13=self._quantised(w13, row_groups=2).to(device),
            w2=self._quantised(w2, row_groups=1).to(device),
            b13=b13,
            b2=b2,
        )

    def _quantised(self, values: Tensor, row_groups: int) -> Quantised:
        if self.weights.scale is None:
            return plain(values.to(self.weights.element.dtype))
        return quantise(values, self.weights, row_groups=row_groups)


def power_above(size: int) -> float:
    """A power of two near the root of a size, so that dots stay near 1."""
    return 2.0 ** (size.bit_length() // 2)


def counts(greatest: int) -> st.SearchStrategy[int]:
    """0 ... greatest; shrinks to 1, because a single token says more than none."""
    return st.sampled_from([1, 0, *range(2, greatest + 1)][: greatest + 1])


def ids(tokens: int, top_k: int, experts: int) -> st.SearchStrategy[list[list[int]]]:
    """[tokens][top_k] of logical experts, empty slots and repeated experts among them."""
    row = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    return st.lists(row, min_size=tokens, max_size=tokens)


@st.composite
def routed(
    draw: st.DrawFn, *, max_tokens: int, max_experts: int, max_top_k: int
) -> tuple[Case, TopK]:
    """A case and a routing of its tokens, drawn slot by slot."""
    tokens = draw(counts(max_tokens))
    experts = draw(st.integers(1, max_experts))
    top_k = draw(st.integers(1, max_top_k))
    case = Case(
        tokens=tokens, experts=experts, top_k=top_k, hidden_size=32, intermediate_size=16,
        seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip
    chosen = torch.tensor(draw(ids(tokens, top_k, experts)), dtype=torch.int64)
    return case, TopK(
        ids=chosen.reshape(tokens, top_k), weights=unit(case.seed + 2, tokens, top_k), scaled=False
    )
