"""Seeded layers and tokens: the same bytes on every machine and torch version.

All numbers come from integer hashes and powers of two; a `Request` gives geometry and formats.

Shapes: T tokens, K slots a token, E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import quantise
from megamoe.problem import ExpertWeights, MoEWeights, Request, SharedExpert, TopK
from megamoe.reference.case import share
from megamoe.reference.hashing import BELL_SIGMA, bell, bits

# Streams of numbers under one seed.
X, IDS, WEIGHTS, EMPTY, W13, W2, B13, B2, SPOT, SIGN = range(10)
SHARED = 1 << 20  # the shared expert's number

Device = torch.device | str


def normal_tokens(tokens: int, hidden_size: int, seed: int = 0, device: Device = "cpu") -> Tensor:
    """BF16 [tokens, hidden_size], bell-shaped with a deviation of about 1.15."""
    return bell((tokens, hidden_size), seed, X, device=device).to(torch.bfloat16)


def routes(
    request: Request, seed: int = 0, device: Device = "cpu", *, experts: int | None = None
) -> TopK:
    """K different experts a token, weights in [1/8, 3/8), one slot in 16 empty.

    experts: draw from the first so many only.
    """
    shape = (request.max_tokens_per_rank, request.top_k)
    among = experts or request.num_experts
    if among < request.top_k:
        raise bad_input("top_k", request.top_k, f"exceeds {among} experts", "route to fewer")
    order = bits((shape[0], among), seed, IDS, device=device).argsort(dim=1, stable=True)
    ids = order[:, : request.top_k]
    if request.top_k > 1:
        ids = torch.where(bits(shape, seed, EMPTY, device=device) % 16 == 0, -1, ids)
    w = ((bits(shape, seed, WEIGHTS, device=device) >> 9) + (1 << 22)).to(torch.float32) * 2.0**-25
    return TopK(ids=ids, weights=w, scaled=False)


def matrix(rows: int, columns: int, *seeds: int, device: Device = "cpu") -> Tensor:
    """float32 [rows, columns], bell-shaped; its dot with x is about as large as x."""
    exponent = round(-math.log2(BELL_SIGMA * math.sqrt(max(1, columns))))
    return bell((rows, columns), *seeds, device=device) * 2.0**exponent


def expert(request: Request, number: int, seed: int, device: Device) -> ExpertWeights:
    """One expert in the request's formats: the same wherever it is placed."""
    hidden, inner = request.hidden_size, request.intermediate_size
    b13 = b2 = None
    if request.expert_bias:
        b13 = bell((1, 2 * inner), seed, B13, number, device=device) * 0.25
        b2 = bell((1, hidden), seed, B2, number, device=device) * 0.25
    return encoded(
        matrix(2 * inner, hidden, seed, W13, number, device=device),
        matrix(hidden, inner, seed, W2, number, device=device),
        request, b13, b2,
    )  # fmt: skip


def encoded(
    w13: Tensor, w2: Tensor, request: Request, b13: Tensor | None = None, b2: Tensor | None = None
) -> ExpertWeights:
    """float32 [2I, H] and [H, I] in the request's formats; gate and up have scales of their own."""
    return ExpertWeights(
        w13=quantise(w13[None], request.weights, row_groups=2),
        w2=quantise(w2[None], request.w2_weights or request.weights),
        b13=b13,
        b2=b2,
    )


def layers(request: Request, make: Callable[[int], ExpertWeights]) -> tuple[MoEWeights, ...]:
    """The weights of every rank; ``make(number)`` gives an expert, or the shared one."""
    shared = None
    if request.shared:
        plain = replace(make(SHARED), b13=None, b2=None)
        shared = SharedExpert(weights=plain, activation=request.activation)
    return tuple(
        MoEWeights(
            experts=share([max(0, number) for number in slots], make),
            placement=request.placement,
            rank=rank,
            activation=request.activation,
            routed_scaling_factor=request.routed_scaling_factor,
            scale_at=request.scale_at,
            weight_at=request.weight_at,
            shared=shared,
        )
        for rank, slots in enumerate(request.placement.slots)
    )
