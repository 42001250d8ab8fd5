"""What an output is held to: limits from a sample of the batch's own classes, never from a table.

A class is a set of tokens whose errors under the recipe lie close together (see ``sample``). Its
limits are twice the worst of at least 256 of its tokens; its share of bits is the worst that honest
kernels show on them.

Shapes: T tokens, H hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import F64
from megamoe.problem import Recipe
from megamoe.reference import sample
from megamoe.reference.case import Inputs, Truth, output, truth
from megamoe.reference.honest import Honest, honest_output
from megamoe.reference.measure import Errors, Ruler, norms, over, same_bits
from megamoe.reference.moe import Emulated

FALSE_ALARM = 1e-6  # how often an honest kernel may fail a bound that rests on a sample
LOG = math.log(1 / FALSE_ALARM)
ALLOWANCE = 2.0  # times the recipe's own worst
CPU_CHUNK = 1 << 23  # elements of [tokens, slots, hidden] held at once
CUDA_CHUNK = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class Standard:
    """One class. members: the batch's tokens of it, an int64 index.

    error, tile_error, shift: the most that a member's may be, before the floor of its own rounding.
    batch_shift: the most that the members' mean shift may be. missed: the share of elements without
    the recipe's bits, and apart: the distance from Emulated; float64 [honest kernels, sampled
    tokens].
    """

    members: Tensor
    error: float
    tile_error: float
    shift: float
    batch_shift: float
    missed: Tensor
    apart: Tensor


def chunks(inputs: Inputs) -> Iterator[slice]:
    """Runs of tokens whose terms fit in memory; one empty run where there are no tokens."""
    room = CPU_CHUNK if inputs.x.device.type == "cpu" else CUDA_CHUNK
    step = max(1, room // max(1, inputs.topk.top_k * inputs.layer.hidden_size))
    for start in range(0, max(1, inputs.tokens), step):
        yield slice(start, start + step)


def truth_and_bits(inputs: Inputs, recipe: Recipe) -> tuple[Truth, Tensor]:
    """EXACT and Emulated(recipe) of every token."""
    pieces = [inputs.rows(rows) for rows in chunks(inputs)]
    bits = torch.cat([output(piece, Emulated(recipe)) for piece in pieces])
    return Truth.cat([truth(piece) for piece in pieces]), bits


def standard(
    members: Tensor,
    inputs: Inputs,
    recipe: Recipe,
    kernels: Sequence[Honest],
    emulated: Tensor,
    own: Errors,
    ruler: Ruler,
) -> Standard:
    """A class's standard from its own tokens, and from jittered companions where they are few.

    emulated, own, ruler: of the whole batch.
    """
    shift = own.shift[members]
    worst = torch.stack(
        [own.error[members].max(), own.tile_error[members].max(), shift.abs().max()]
    )
    few = members[:: max(1, len(members) // sample.TOKENS)]
    gaps = [_honest_gaps(inputs.rows(few), emulated[few], ruler.size[few], kernels)]
    if len(members) < sample.TOKENS:
        extra = sample.companions(inputs, members, sample.TOKENS - len(members))
        exact, bits = truth_and_bits(extra, recipe)
        extra_ruler = Ruler.of(exact, bits, inputs.topk.top_k)
        errors = extra_ruler.measure(bits)
        shown = [errors.error, errors.tile_error, errors.shift.abs()]
        worst = torch.maximum(worst, torch.stack([e[e.isfinite()].max() for e in shown]))
        gaps.append(_honest_gaps(extra, bits, extra_ruler.size, kernels))
    missed, apart, drift = torch.cat(gaps, dim=2)
    error, tile_error, most = (worst * ALLOWANCE).tolist()
    systematic = abs(float(shift.mean())) + float(drift.mean(1).abs().max())
    # What rounding adds to a token's norm, and what differs between tokens, averages out.
    spread = math.hypot(
        math.sqrt(float(shift.var(correction=0))), float(ruler.floor[members].mean())
    )
    return Standard(
        members=members,
        error=error,
        tile_error=tile_error,
        shift=most,
        batch_shift=ALLOWANCE * systematic + spread * math.sqrt(2 * LOG / len(members)),
        missed=missed,
        apart=apart,
    )


def _honest_gaps(inputs: Inputs, bits: Tensor, size: Tensor, kernels: Sequence[Honest]) -> Tensor:
    """How honest kernels differ from Emulated, float64 [3, kernels, T].

    The share of elements without its bits, the distance from it, and how much greater the norm is.
    """
    gaps = []
    for kernel in kernels:
        y = torch.cat([honest_output(inputs.rows(rows), kernel) for rows in chunks(inputs)])
        finite = y.isfinite() & bits.isfinite()
        wide, want = (torch.where(finite, values.to(F64), 0.0) for values in (y, bits))
        drift = over(norms(wide)[0] - norms(want)[0], size)
        missed = (~same_bits(y, bits)).to(F64).mean(1)
        gaps.append(torch.stack([missed, distance(y, bits, size), drift]))
    return torch.stack(gaps, dim=1)


def distance(y: Tensor, bits: Tensor, size: Tensor) -> Tensor:
    """|y - Emulated| [T] over a ruler's size, over the elements where both are finite."""
    difference = torch.where(y.isfinite() & bits.isfinite(), y.to(F64) - bits.to(F64), 0.0)
    return over(norms(difference)[0], size)


def greatest_mean(
    standards: Sequence[Standard],
    gap: Callable[[Standard], Tensor],
    event: float,
    ceiling: float = math.inf,
) -> float:
    """The mean gap over the batch that no honest kernel exceeds, but for FALSE_ALARM.

    gap: [honest kernels, sampled tokens], of a class. event: the least that one value rounding the
    other way before FC2 may do to a token's gap, where the sample shows none. ceiling: no gap is
    greater. Tokens are the independent units: such a value moves many elements of its token and
    none of another. The bounds are Bernstein's, for the batch, and its empirical form (Maurer and
    Pontil, 2009), for the sample; a token's gap is taken to reach at most twice the worst that was
    seen.
    """
    tokens = sum(len(s.members) for s in standards)
    if not tokens:
        return 0.0
    bounds = []
    for kernel in range(len(gap(standards[0]))):
        seen = [(len(s.members) / tokens, gap(s)[kernel]) for s in standards]
        mean = sum(part * float(g.mean()) for part, g in seen)
        variance = sum(part * float(g.var(correction=0)) for part, g in seen)
        most = min(ceiling, max(event, *(ALLOWANCE * float(g.max()) for _, g in seen)))
        drawn = min(len(g) for _, g in seen)
        of_batch = math.sqrt(2 * variance * LOG / tokens) + most * LOG / (3 * tokens)
        of_sample = math.sqrt(2 * variance * LOG / drawn) + 7 * most * LOG / (3 * (drawn - 1))
        bounds.append(mean + of_batch + of_sample)
    return max(bounds)
