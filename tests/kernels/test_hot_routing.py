"""All tokens of all ranks to the experts of one rank: exact, or refused before any launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulated import ContractBroken, emulated, run_ranks
from emulated.layers import Layer
from test_adapters_mutants import WEIGHTS, case

from megamoe.errors import BadInput, RankFailure
from megamoe.problem import Placement

ALL = pytest.mark.parametrize("kernel", WEIGHTS)
CAPACITY = 4


def hot(kernel: str, tokens: int, *, experts: int = 8) -> Layer:
    """``tokens`` tokens on every rank, every slot of them to rank 1."""
    base = case(kernel)
    placement = Placement.contiguous(experts, base.world)
    held = placement.slots[1]
    row = [(held[t % len(held)], held[(t + 1) % len(held)]) for t in range(tokens)]
    ids = (tuple(row),) * base.world
    return dataclasses.replace(base, placement=placement, ids=ids, capacity=CAPACITY)


@ALL
@pytest.mark.parametrize("tokens", [CAPACITY - 1, CAPACITY, CAPACITY + 1])
def test_one_rank_computes_for_all(kernel: str, tokens: int) -> None:  # K45
    """The routing that fills a receiver to its last row; one token more comes in a second round."""
    layer = hot(kernel, tokens)

    def work(rank: int) -> list[torch.Tensor]:
        x, topk = layer.x(rank), layer.topk(rank)
        with layer.prepare(rank) as prepared:
            recipe = prepared.decision.recipe
            found = [prepared.forward(x, topk, max_tokens=tokens)]
            if tokens <= CAPACITY:
                found.append(prepared.forward(x, topk))
            return [*found, layer.expected(rank, recipe)]

    with emulated(layer.machine) as device:
        for *outputs, want in run_ranks(layer.world, work):
            for y in outputs:
                assert torch.equal(y.view(torch.int16), want.view(torch.int16))
    assert set(device.launches.values()) == {2}  # two calls, or two rounds of one


@ALL
def test_above_the_capacity_without_max_tokens_every_rank_refuses(kernel: str) -> None:
    """Nothing is launched, and the layer serves on."""
    layer, fits = hot(kernel, CAPACITY + 1), hot(kernel, CAPACITY)

    def work(rank: int) -> list[torch.Tensor]:
        with layer.prepare(rank) as prepared:
            for _ in range(2):
                with pytest.raises(BadInput, match="5 tokens exceeds max_tokens_per_rank 4; pass"):
                    prepared.forward(layer.x(rank), layer.topk(rank))
            assert rank not in device.launches
            y = prepared.forward(fits.x(rank), fits.topk(rank))
            return [y, fits.expected(rank, prepared.decision.recipe)]

    with emulated(layer.machine) as device:
        for y, want in run_ranks(layer.world, work):
            assert torch.equal(y, want)


@ALL
def test_one_rank_above_the_capacity_refuses_before_any_launch(kernel: str) -> None:
    """It alone is in the wrong, and says so; the others are told which rank it was."""
    over, fits = hot(kernel, CAPACITY + 1), hot(kernel, CAPACITY)
    refused: list[int] = []

    def work(rank: int) -> None:
        prepared = fits.prepare(rank)
        mine = over if rank == 1 else fits
        try:
            prepared.forward(mine.x(rank), mine.topk(rank))
        except BadInput:
            refused.append(rank)
            raise

    with (
        emulated(fits.machine) as device,
        pytest.raises((BadInput, RankFailure, ContractBroken), match="exceeds max_tokens_per_rank"),
    ):
        run_ranks(fits.world, work)
    assert refused == [1]
    assert device.launches == {}
