"""What a launch computes: the recipe, over the experts of all ranks, for one rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emulated.cluster import ContractBroken
from megamoe.formats import BF16, F64, Format, Quantised, dequantise, rnbf16
from megamoe.problem import Activation, ExpertWeights, Recipe
from megamoe.reference.elementwise import canonical_nan
from megamoe.reference.moe import Emulated, add_terms, combine


@dataclass(frozen=True, slots=True)
class Fed(Emulated):
    """Emulated, except that float64 activations are the operand already: the caller quantised."""

    def enter(self, values: Tensor, fmt: Format) -> Tensor:
        return values if values.dtype == F64 else Emulated.enter(self, values, fmt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What one rank brings to a launch: staged rows (float64 operands, or BF16) and its experts."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    experts: ExpertWeights


def operand(data: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Codes and scales as they were handed over, as exact float64 values."""
    return dequantise(Quantised(format=fmt, data=data, scale=scale))


def launch(rank: int, posts: Sequence[Post], recipe: Recipe, activation: Activation) -> Tensor:
    """The terms of this rank's tokens, float32 [n, k, H]; those of empty slots are 0."""
    mine, arithmetic = posts[rank], Fed(recipe)
    each = mine.experts.count
    terms = torch.zeros(*mine.ids.shape, mine.experts.hidden_size, dtype=torch.float32)
    for owner, post in enumerate(posts):
        held = tuple(range(owner * each, (owner + 1) * each))
        add_terms(terms, mine.x, mine.ids, mine.weights, post.experts, held, activation, arithmetic)
    return terms


def check_pool(rank: int, posts: Sequence[Post], room: int, each: int) -> None:
    """Rows that arrive lie in a pool which has room for each token's *different* experts here."""
    first, k = rank * each, posts[rank].ids.shape[1]
    arrived = sum(int(((p.ids >= first) & (p.ids < first + each)).sum()) for p in posts)
    if arrived > len(posts) * room * min(k, each):
        raise ContractBroken(f"{arrived} rows overrun a pool of {len(posts)} x {room} tokens")


def reduce(terms: Tensor, ids: Tensor, weights: Tensor, recipe: Recipe, each: int) -> Tensor:
    """The BF16 sum of terms [n, H], slots of id -1 left out. each: experts a rank."""
    arithmetic = Fed(recipe)
    owner = ids.clamp(min=0) // each
    total = combine(terms, ids, weights, arithmetic, owner)
    return canonical_nan(rnbf16(arithmetic.round(total, BF16)))
