"""A seeded walk of serving steps, as data: what each rank brings, what is announced, how it runs.

A step follows from (seed, number) alone, so every rank derives the same one, and a walk may begin
anywhere. Boundaries are drawn far more often than chance would: no token, one, the edges of tiles,
the capacity and its neighbours, several rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megamoe.errors import bad_input

Routing = Literal["mixed", "sparse", "empty", "twice", "hot", "one rank"]
Mode = Literal["eager", "graph"]
Refusal = Literal["", "capacity", "max_tokens"]

ROUTINGS: dict[Routing, int] = {
    "mixed": 6, "sparse": 2, "empty": 1, "twice": 1, "hot": 2, "one rank": 3,
}  # fmt: skip
"""Which tokens a step takes, and how often. mixed: any. sparse: half of the slots are -1. empty:
nothing but -1. twice: the last slot repeats the first. hot: every token's first slot is expert 0.
one rank: all slots of all tokens go to the experts of one rank."""

EDGES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
SKEW_MS = 100  # what one rank is late by
SKEWED = 0.03  # of the steps
MOST_ROUNDS = 3
MOVED = 25  # steps between two moves of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of the layer on every rank.

    kind: how the counts were drawn. counts: tokens, by rank. target: the rank that "one rank"
    routes to. max_tokens: as every rank passes it. graph: the size of the graph that every rank
    replays, which follows from max_tokens; 0 is an eager call. refusal: why every rank must raise
    BadInput, where it must. late_ms: what each rank waits before its call. out: whether it passes a
    tensor for the result. seed: which rows are taken.
    """

    number: int
    kind: str
    counts: tuple[int, ...]
    routing: Routing
    target: int
    max_tokens: int | None
    graph: int
    refusal: Refusal
    late_ms: tuple[int, ...]
    out: bool
    seed: int

    @property
    def moves(self) -> bool:
        """Whether experts change places before it, where the layer's can."""
        return self.number % MOVED == MOVED // 2

    @property
    def mode(self) -> Mode:
        return "graph" if self.graph else "eager"

    def rounds(self, capacity: int) -> int:
        """How many launches it takes."""
        if self.refusal:
            return 0
        return max(1, -(-(self.graph or self.max_tokens or 0) // capacity))

    def __str__(self) -> str:
        parts = [f"step {self.number}: {self.kind}, {self.routing}"]
        parts += [f"to rank {self.target}"] if self.routing == "one rank" else []
        parts += [f"tokens {', '.join(map(str, self.counts))}", f"max_tokens {self.max_tokens}"]
        parts += [f"graph of {self.graph}" if self.graph else "eager"]
        parts += [f"refused for {self.refusal}"] if self.refusal else []
        late = [f"rank {r} late by {ms} ms" for r, ms in enumerate(self.late_ms) if ms]
        return "; ".join(parts + late)


def graph_sizes(capacity: int) -> tuple[int, ...]:
    """The sizes that are captured, ascending: decode, small, full, and one of two rounds."""
    return tuple(sorted({max(1, capacity // 32), max(1, capacity // 4), capacity, _half(capacity)}))


def _half(capacity: int) -> int:
    return capacity + max(1, capacity // 2)


# --- counts ---------------------------------------------------------------------------------------

Draw = Callable[[random.Random, int, int], list[int]]  # (rng, world, capacity) -> counts


def _any(rng: random.Random, world: int, capacity: int) -> list[int]:
    return [rng.randint(0, capacity) for _ in range(world)]


def _decode(rng: random.Random, world: int, capacity: int) -> list[int]:
    return [rng.randint(0, max(1, capacity // 32)) for _ in range(world)]


def _edges(rng: random.Random, world: int, capacity: int) -> list[int]:
    known = [*(e for e in EDGES if e <= capacity), capacity - 1, capacity]
    return [rng.choice(known) for _ in range(world)]


def _idle(rng: random.Random, world: int, capacity: int) -> list[int]:
    """Some ranks have nothing, which ones changes; at least one has a token where there are two."""
    counts = [rng.choice((0, rng.randint(1, capacity))) for _ in range(world)]
    counts[rng.randrange(world)] = 0
    if world > 1 and not any(counts):
        counts[rng.randrange(world)] = rng.randint(1, capacity)
    return counts


def _all_idle(rng: random.Random, world: int, capacity: int) -> list[int]:
    return [0] * world


def _one_rank(rng: random.Random, world: int, capacity: int) -> list[int]:
    counts = [0] * world
    counts[rng.randrange(world)] = rng.choice((1, rng.randint(1, capacity), capacity))
    return counts


def _one_token(rng: random.Random, world: int, capacity: int) -> list[int]:
    return [1] * world


def _brim(rng: random.Random, world: int, capacity: int) -> list[int]:
    """The capacity less one, the capacity, or one more, alike on all ranks."""
    return [capacity + rng.choice((-1, 0, 1))] * world


def _over(rng: random.Random, world: int, capacity: int) -> list[int]:
    """One rank has a token more than fits."""
    counts = _any(rng, world, capacity)
    counts[rng.randrange(world)] = capacity + 1
    return counts


def _many(rng: random.Random, world: int, capacity: int) -> list[int]:
    """Several rounds, in some of which some ranks have nothing."""
    counts = [rng.choice((0, 1, rng.randint(0, MOST_ROUNDS * capacity))) for _ in range(world)]
    counts[rng.randrange(world)] = rng.randint(capacity + 1, MOST_ROUNDS * capacity)
    return counts


KINDS: dict[str, tuple[int, Draw]] = {
    "any": (20, _any),
    "decode": (16, _decode),
    "edges": (16, _edges),
    "idle ranks": (10, _idle),
    "all idle": (3, _all_idle),
    "one rank has all": (6, _one_rank),
    "one token each": (4, _one_token),
    "brim": (6, _brim),
    "brim to one rank": (6, _brim),
    "one over": (5, _over),
    "rounds": (5, _many),
    "refused": (3, _any),
}
"""By name, how often and how the counts are drawn."""


# --- the walk -------------------------------------------------------------------------------------


def step(seed: int, number: int, *, world: int, capacity: int) -> Step:
    """The numbered step of a seed's walk."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    counts = KINDS[kind][1](rng, world, capacity)
    routing = rng.choices(list(ROUTINGS), list(ROUTINGS.values()))[0]
    max_tokens: int | None = max(counts)
    refusal: Refusal = ""
    if kind == "brim to one rank":
        routing = "one rank"
    if kind == "refused":
        refusal = rng.choice(("capacity", "max_tokens"))
        extra = rng.randint(1, capacity)
        counts = [capacity + extra] * world if refusal == "capacity" else [extra] * world
        max_tokens = None if refusal == "capacity" else rng.randrange(extra)
    most = max(counts)
    graph = 0
    if not refusal:
        size = next((s for s in graph_sizes(capacity) if s >= most), 0)
        if size and rng.random() < 0.45:
            graph = max_tokens = size
        elif most <= capacity and rng.random() < 0.4:
            max_tokens = None
        elif rng.random() < 0.3:  # a scheduler may announce more than comes
            max_tokens = most + rng.randint(1, capacity)
    late = [0] * world
    if rng.random() < SKEWED:
        late[rng.randrange(world)] = SKEW_MS
    return Step(
        number=number,
        kind=kind,
        counts=tuple(counts),
        routing=routing,
        target=rng.randrange(world),
        max_tokens=max_tokens,
        graph=graph,
        refusal=refusal,
        late_ms=tuple(late),
        out=rng.random() < 0.5,
        seed=rng.getrandbits(48),
    )


def walk(seed: int, steps: int, *, first: int = 0, world: int, capacity: int) -> Iterator[Step]:
    """``steps`` steps from the one numbered ``first``."""
    if steps < 0 or first < 0:
        raise bad_input("steps", f"{steps} from {first}", "are below 0", "pass counts")
    if capacity < 2:
        raise bad_input("capacity", capacity, "is below 2", "pass at least 2")
    for number in range(first, first + steps):
        yield step(seed, number, world=world, capacity=capacity)
