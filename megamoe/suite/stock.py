"""Rows with known outputs, from which the batches of a walk are put together.

A row is one token: x, ids, weights, and what each workspace gave for it, judged. Its bits depend
neither on what else is in its batch nor on its rank or the size of the call, so a batch made of
such rows is verified by comparing bits; rows of other bits are judged for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe import oracle
from megamoe.kernels.base import Kernel
from megamoe.problem import TopK
from megamoe.suite import cases
from megamoe.suite.cases import Shape
from megamoe.suite.steps import ROUTINGS, Routing, Step

Sections = Mapping[tuple[Routing, int], range]
"""Where the rows of each routing lie, by its target; the target is 0 but for "one rank"."""


@dataclass(frozen=True, slots=True, eq=False)
class Stock:
    """inputs: all rows. measure: what judges them. expected: by workspace, BF16 [rows + 1, H], what
    it gave; one more row, zeros, is what padding must give.
    """

    inputs: oracle.Inputs
    sections: Sections
    measure: oracle.Yardstick
    expected: Mapping[int, Tensor]

    @property
    def padding(self) -> int:
        return self.inputs.tokens

    def rows(self, step: Step, rank: int) -> Tensor:
        """The rows of this rank's tokens, int64 [tokens] on the CPU, the same everywhere."""
        generator = torch.Generator().manual_seed(step.seed + 7919 * rank)
        among = range(self.padding)
        if step.routing != "mixed":
            target = step.target if step.routing == "one rank" else 0
            among = self.sections[step.routing, target]
        return torch.randint(among.start, among.stop, (step.counts[rank],), generator=generator)

    def batch(self, rows: Tensor) -> tuple[Tensor, TopK]:
        """What the layer is called with for these rows; nothing is read from the device."""
        ids, weights = self.inputs.topk.ids[rows], self.inputs.topk.weights[rows]
        return self.inputs.x[rows], TopK(ids=ids, weights=weights, scaled=False)

    def differs(self, rows: Tensor, y: Tensor, space: int) -> Tensor:
        """Which rows of an output have other bits than in their workspace, bool [n]; nothing is
        read from the device.
        """
        want = self.expected[space][rows]
        return (y.view(torch.int16) != want.view(torch.int16)).any(1)

    def judge(self, rows: Tensor, y: Tensor, space: int) -> tuple[Tensor, str]:
        """Which rows of an output are wrong, bool [n], and the first fault in words."""
        padding = rows == self.padding
        wrong = padding & (y != 0).any(1)
        message = "a row of nothing but -1 is not zero" if bool(wrong.any()) else ""
        left = (~padding).nonzero().flatten()
        while len(left):  # a row that is there twice is judged in turn
            once = {int(rows[position]): position for position in reversed(left.tolist())}
            now = torch.tensor(sorted(once.values()), device=y.device)
            whole = self.expected[space][:-1].clone()
            whole[rows[now]] = y[now]
            report = self.measure.judge(whole)
            if not report.right:  # a fault of the batch as a whole has no rows of its own
                bad = torch.isin(rows[now], report.wrong_tokens)
                wrong[now] = bad if bool(bad.any()) else torch.ones_like(bad)
                message = message or report.message
            left = left[~torch.isin(left, now)]
        return wrong, message


def stocked(
    kernel: type[Kernel],
    shape: Shape,
    placement: str,
    *,
    world: int,
    rows: int,
    seed: int,
    device: torch.device,
) -> tuple[oracle.Inputs, Sections]:
    """``rows`` rows in equal parts of every routing, with the weights of every rank as loaded.

    The weights of empty slots are NaN: nothing may read them.
    """
    place = cases.place(placement, shape.num_experts, world)
    request = cases.request_of(shape, place, kernel, rows)
    inputs = oracle.CLASSES["normal"](request, kernel.recipe(request), seed, device)
    ids = inputs.topk.ids.clone()
    kinds = [(r, target) for r in ROUTINGS for target in range(world if r == "one rank" else 1)]
    sections: dict[tuple[Routing, int], range] = {}
    for number, kind in enumerate(kinds):
        part = range(number * rows // len(kinds), (number + 1) * rows // len(kinds))
        held = [expert for expert in place.slots[kind[1]] if expert >= 0]
        section = slice(part.start, part.stop)
        ids[section] = _routed(kind[0], ids[section], shape.num_experts, held)
        sections[kind] = part
    weights = torch.where(ids < 0, torch.nan, inputs.topk.weights)
    return replace(inputs, topk=TopK(ids=ids, weights=weights, scaled=False)), sections


def _routed(routing: Routing, ids: Tensor, experts: int, held: Sequence[int]) -> Tensor:
    """ids [n, k] after this routing. held: the experts of the rank that is its target."""
    row = torch.arange(ids.shape[0], device=ids.device)[:, None]
    slot = torch.arange(ids.shape[1], device=ids.device)
    if routing == "sparse":
        return torch.where((row + (row % 3 + 1) * slot) % 2 == 0, -1, ids)
    if routing == "empty":
        return cases.nothing(ids, experts)
    if routing == "twice":
        return cases.twice(ids, experts)
    if routing == "hot":
        return cases.hot(ids, experts)
    if routing == "one rank":  # different experts, as far as the rank has them
        return torch.tensor(held, device=ids.device)[(row + slot) % len(held)]
    return ids
