"""Which capacities a layer opens workspaces for, and which of them serves a step.

A kernel's tactic follows its capacity, so the smallest workspace that covers a step is often not
the fastest. The choice is therefore measured, once, and then only looked up: every rank with the
same numbers makes the same choice for the step's synchronised maximum.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megamoe.errors import bad_input

PRESET = (64, 256, 1024)
LEAST = 64  # below it a workspace saves neither time nor memory worth a compilation
MARGIN = 0.02  # a larger workspace must gain more than this share: less is noise

Seconds = Mapping[tuple[int, int], float]
"""Measured (capacity, tokens): seconds of a step, the slowest rank's."""


def decode_ceiling(
    graph_sizes: Iterable[int] = (), eager_limit: int = 0, speculative_width: int = 1
) -> int:
    """The most tokens that a decode step brings to one rank.

    graph_sizes: requests in each captured graph. eager_limit: most requests of a decode step that
    runs without one. speculative_width: most tokens of one request in a step, 1 without
    speculation. An engine that counts its graphs in tokens passes a width of 1.
    """
    sizes = tuple(graph_sizes)
    for size in sizes:
        _positive("graph_sizes", size)
    if not _whole(eager_limit) or eager_limit < 0:
        raise bad_input(
            "eager_limit", eager_limit, "is not a count of requests", "pass 0 where there is none"
        )
    _positive("speculative_width", speculative_width)
    most = max((*sizes, eager_limit))
    if most == 0:
        raise bad_input(
            "decode ceiling", "", "has neither graph sizes nor an eager limit",
            "pass one of them, or a preset such as (64, 256, 1024)",
        )  # fmt: skip
    return most * speculative_width


def profiles(decode_ceiling: int, prefill: int) -> tuple[int, ...]:
    """Capacities, ascending: powers of two from 64, or less for a lower ceiling, to the first that
    holds the ceiling; and the prefill size as it is.
    """
    _positive("decode_ceiling", decode_ceiling)
    _positive("prefill", prefill)
    top = 1 << (decode_ceiling - 1).bit_length()
    powers = {1 << bit for bit in range(top.bit_length()) if LEAST <= 1 << bit <= top}
    return tuple(sorted({*powers, top, prefill}))


def ascending(capacities: Iterable[int]) -> tuple[int, ...]:
    """A caller's capacities, sorted and each once."""
    if not isinstance(capacities, Iterable):
        raise bad_input(
            "capacities", capacities, "is not a list of token counts", "pass (64, 256, 1024), say"
        )
    found = tuple(capacities)
    for capacity in found:
        _positive("capacities", capacity)
    if not found:
        raise bad_input("capacities", "()", "hold no workspace", "pass at least one token count")
    return tuple(sorted(set(found)))


def points(capacities: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(capacity, tokens) worth measuring: each capacity's own size and powers of two from 8, each
    on every workspace that covers it.
    """
    sizes = ascending(capacities)
    powers = (1 << bit for bit in range(3, sizes[-1].bit_length()))
    tokens = sorted({*sizes, *powers})
    return tuple((c, t) for t in tokens for c in sizes if c >= t)


def slowest(tables: Sequence[Seconds]) -> dict[tuple[int, int], float]:
    """One table out of all ranks': the slowest rank's seconds, where every rank has some."""
    common = set(tables[0]).intersection(*tables[1:])
    return {point: max(table[point] for table in tables) for point in sorted(common)}


def rounds(tokens: int, capacity: int) -> tuple[int, int]:
    """(rounds, tokens a round) for a step of ``tokens``: as few rounds as can be, and equal."""
    count = max(1, -(-tokens // capacity))
    return count, -(-tokens // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workspace of each step: ``serves[i]``, an index into ``capacities``, takes the steps
    above ``bounds[i - 1]`` tokens, up to ``bounds[i]``.
    """

    capacities: tuple[int, ...]
    bounds: tuple[int, ...]
    serves: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes, bounds, serves = self.capacities, self.bounds, self.serves
        if not (
            all(_whole(n) for n in (*sizes, *bounds, *serves))
            and sizes
            and bounds
            and min(sizes[0], bounds[0]) >= 1
            and all(a < b for a, b in (*itertools.pairwise(sizes), *itertools.pairwise(bounds)))
            and len(bounds) == len(serves)
            and bounds[-1] == sizes[-1]
            and all(
                0 <= i < len(sizes) and bound <= sizes[i]
                for bound, i in zip(bounds, serves, strict=True)
            )
        ):
            raise bad_input(
                "choice", f"of {sizes}, {bounds}, {serves}",
                "does not name a workspace that covers every step", "make it with Choice.of",
            )  # fmt: skip

    @classmethod
    def of(
        cls, capacities: Iterable[int], seconds: Seconds | None = None, margin: float = MARGIN
    ) -> Choice:
        """Built from measured seconds; without any, the smallest that covers.

        A step between two measured token counts goes by the upper one. There the smallest workspace
        wins that is within ``margin`` of the fastest. One that was not measured there loses to one
        that was; where none was, the smallest that covers serves.
        """
        sizes = ascending(capacities)
        table = {(c, t): s for (c, t), s in (seconds or {}).items() if c in sizes and t <= c}
        measured = sorted({t for _, t in table if t >= 1})
        bounds: list[int] = []
        serves: list[int] = []
        for bound in sorted({*measured, *sizes}):
            place = bisect.bisect_left(measured, bound)
            found = {}
            if place < len(measured):
                at = measured[place]
                found = {c: table[c, at] for c in sizes if (c, at) in table}
            best = min(found.values(), default=0.0)
            fit = (c for c in sizes if c >= bound)
            near = (c for c, s in found.items() if s <= best * (1 + margin))
            chosen = sizes.index(min(near if found else fit))
            if serves and serves[-1] == chosen:
                bounds[-1] = bound
            else:
                bounds.append(bound)
                serves.append(chosen)
        return cls(capacities=sizes, bounds=tuple(bounds), serves=tuple(serves))

    def index(self, tokens: int) -> int:
        """Which workspace, by its place in ``capacities``, serves a step of at most the greatest
        capacity; ``rounds`` first cuts a larger one.
        """
        place = bisect.bisect_left(self.bounds, tokens)
        if place == len(self.bounds):
            raise bad_input(
                "tokens", tokens, f"exceed the greatest workspace's {self.capacities[-1]}",
                "run them in rounds",
            )  # fmt: skip
        return self.serves[place]

    def rounds(self, tokens: int) -> tuple[int, int]:
        """(rounds, tokens a round): more than one where no workspace holds them all."""
        return rounds(tokens, self.capacities[-1])

    def to_json(self) -> dict[str, list[int]]:
        return {
            "capacities": list(self.capacities),
            "bounds": list(self.bounds),
            "serves": list(self.serves),
        }

    @classmethod
    def from_json(cls, value: Any) -> Choice:
        """BadInput where ``value`` is not what ``to_json`` gives."""
        names = ("capacities", "bounds", "serves")
        held = value if isinstance(value, dict) else {}
        lists = {name: held[name] for name in names if isinstance(held.get(name), list)}
        if len(lists) < len(names):
            raise bad_input(
                "choice", type(value).__name__, f"does not hold the lists {', '.join(names)}",
                "measure anew",
            )  # fmt: skip
        return cls(**{name: tuple(found) for name, found in lists.items()})


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: int) -> None:
    if not _whole(value) or value < 1:
        raise bad_input(name, value, "is not a count of at least 1", "pass whole, positive numbers")
