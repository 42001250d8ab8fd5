"""Start-up tuning: which tactic each workspace runs, and which workspace serves which step.

Pure over a few callables. Collective: every rank calls with the same arguments, measures the same
candidates in the same order, and decides from what all ranks measured, so that the decision is the
same everywhere. What is kept is asked for here and nowhere else: a forward reads no file.

Where the ranks' caches differ in anything, nobody uses theirs and all measure anew: a rank's own
winner is only known to be safe beside the others' if they took the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megamoe.dispatch.cache import Cache, Key, digest, plain
from megamoe.dispatch.workspaces import Choice, Seconds, points, slowest
from megamoe.errors import BadInput, MegaMoEError, RankFailure, bad_input

Mode = Literal["on", "workspaces", "cached", "off"]
"""on: measure what the cache lacks. workspaces: only which of them serves which step, with tactics
that are cached or the default. cached: use the cache, measure nothing. off: neither."""

Knobs = Mapping[str, Any]
Gather = Callable[[str, str], list[str]]
"""(what, this rank's value) to every rank's, in rank order; ``Ranks.gather`` inside a step."""

MARGIN = 0.03  # a tactic must beat the default by more than this share: less is noise

IN_KERNEL: Mapping[str, Any] = {"in_kernel_fc2_reduce": False, "grouped_token_back": False}
"""Knobs that sum inside the kernel, and the value at which they do not."""


class Trial(Protocol):
    """One candidate on a temporary workspace; the two steps apart, because a rank that could not
    compile must be known before the others enter a launch that waits for it.
    """

    def open(self, capacity: int, knobs: Knobs) -> None:
        """Allocate and compile, launch nothing; may raise on one rank alone."""

    def time(self) -> float:
        """Seconds of a launch on this rank; collective."""

    def close(self) -> None:
        """Destroy what ``open`` made, as far as it came; collective, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tactic:
    """The knobs of one capacity. seconds: measured, the slowest rank's; None where it was not.

    default: the default's seconds, where both were measured. failed: why candidates were left out.
    """

    knobs: Knobs
    source: Literal["default", "cache", "tuned"] = "default"
    seconds: float | None = None
    default: float | None = None
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class Counts:
    """What a start cost: tactics and steps measured, files read and written."""

    tactics: int = 0
    steps: int = 0
    read: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """What both questions need of the world.

    key: of a cache file, by what it holds and for which capacities.
    """

    mode: Mode
    cache: Cache
    key: Callable[[Literal["tactic", "choice"], tuple[int, ...]], Key]
    gather: Gather
    deterministic: bool = True
    counts: Counts = field(default_factory=Counts)

    def tactics(self, candidates: Mapping[int, Sequence[Knobs]], trial: Trial) -> dict[int, Tactic]:
        """The tactic of each capacity. candidates: of each, the default first; equal on all ranks.

        Raises RankFailure where ranks were given different ones, MegaMoEError where no candidate of
        a capacity runs.
        """
        offered = {c: admitted(found, self.deterministic) for c, found in candidates.items()}
        several = [c for c, found in offered.items() if len(found) > 1]
        held = {c: self._recall_tactic(c, offered[c]) for c in several}
        agreed = self._agreed(
            "tactics", {str(c): None if t is None else digest(t.knobs) for c, t in held.items()},
            digest([[c, list(map(dict, found))] for c, found in offered.items()]),
        )  # fmt: skip
        made = {}
        for capacity, found in offered.items():
            known = held.get(capacity) if agreed.get(str(capacity)) else None
            if known is not None:
                made[capacity] = known
            elif self.mode == "on" and capacity in several:
                made[capacity] = self._measure(capacity, found, trial)
            else:
                made[capacity] = Tactic(knobs=found[0])
        return made

    def choice(self, tactics: Mapping[int, Tactic], time: Callable[[int, int], float]) -> Choice:
        """Which workspace serves which step.

        time: this rank's seconds of a step, by the workspace's capacity and the tokens a rank;
        collective. The workspaces are warm, so that an error here is an error of the start.
        """
        sizes = tuple(sorted(tactics))
        if len(sizes) == 1:
            return Choice.of(sizes)
        made_for = digest([[c, tactics[c].knobs] for c in sizes])
        held = self._recall_choice(sizes, made_for)
        mine = None if held is None else digest(held.to_json())
        agreed = self._agreed("choice", {"all": mine}, made_for)
        if held is not None and agreed["all"]:
            return held
        if self.mode not in ("on", "workspaces"):
            return Choice.of(sizes)
        measured: dict[tuple[int, int], float] = {}
        for capacity, tokens in points(sizes):
            measured[capacity, tokens] = _real(time(capacity, tokens))
            self.counts.steps += 1
        sent = json.dumps([[c, t, s] for (c, t), s in measured.items()])
        tables: list[Seconds] = [
            {(c, t): s for c, t, s in json.loads(text)} for text in self.gather("steps", sent)
        ]
        choice = Choice.of(sizes, slowest(tables))
        value = {"choice": choice.to_json(), "tactics": made_for}
        self._keep("choice", sizes, value)
        return choice

    # --- one capacity -----------------------------------------------------------------------------

    def _measure(self, capacity: int, candidates: Sequence[Knobs], trial: Trial) -> Tactic:
        """Times by the slowest rank; a candidate that failed on one rank is left out on all."""
        times, failed = [], []
        for knobs in candidates:
            self.counts.tactics += 1
            seconds, why = self._try(capacity, knobs, trial)
            times.append(seconds)
            if why is not None:
                failed.append(why)
        best = winner(times)
        if best is None:
            raise MegaMoEError(
                f"no tactic runs at {capacity} tokens a rank, of {len(candidates)} tried; "
                f"first: {failed[0]}"
            )
        tactic = Tactic(
            knobs=candidates[best], source="tuned", seconds=times[best],
            default=times[0] if math.isfinite(times[0]) else None, failed=tuple(failed),
        )  # fmt: skip
        value = {
            "knobs": plain(dict(tactic.knobs)), "seconds": tactic.seconds,
            "default": tactic.default, "tried": len(candidates), "failed": failed,
        }  # fmt: skip
        self._keep("tactic", (capacity,), value)
        return tactic

    def _try(self, capacity: int, knobs: Knobs, trial: Trial) -> tuple[float, str | None]:
        """(the slowest rank's seconds, None), or (infinity, why)."""

        def opened() -> float:
            trial.open(capacity, knobs)
            return 0.0

        seconds, why = self._all("opened", opened)
        if why is None:
            seconds, why = self._all("timed", lambda: _real(trial.time()))
        trial.close()  # not after a RankFailure: nothing is collective any more
        return seconds, why

    def _all(self, what: str, step: Callable[[], float]) -> tuple[float, str | None]:
        """Take a step, and learn how it went everywhere: the greatest result, or an error."""
        mine: list[Any] = [0.0, None]
        try:
            mine[0] = step()
        except RankFailure:
            raise  # a rank is gone, and no candidate is to blame
        except Exception as error:
            mine[1] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        every = [json.loads(text) for text in self.gather(what, json.dumps(mine))]
        for rank, (_, why) in enumerate(every):
            if why is not None:
                return math.inf, f"rank {rank}: {why}"
        return max(seconds for seconds, _ in every), None

    # --- what is kept -----------------------------------------------------------------------------

    def _recall(self, what: Literal["tactic", "choice"], capacities: tuple[int, ...]) -> Any:
        if self.mode == "off":
            return None
        self.counts.read += 1
        return self.cache.read(self.key(what, capacities))

    def _recall_tactic(self, capacity: int, candidates: Sequence[Knobs]) -> Tactic | None:
        """Only knobs that could be measured today are taken: as the candidate itself, which has its
        tuples.
        """
        value = self._recall("tactic", (capacity,)) or {}
        for knobs in candidates:
            if plain(dict(knobs)) == value.get("knobs"):
                seconds, default = (_seconds(value.get(name)) for name in ("seconds", "default"))
                return Tactic(knobs=knobs, source="cache", seconds=seconds, default=default)
        return None

    def _recall_choice(self, capacities: tuple[int, ...], made_for: str) -> Choice | None:
        """Only one measured with the tactics that now run."""
        value = self._recall("choice", capacities)
        if value is None or value.get("tactics") != made_for:
            return None
        try:
            choice = Choice.from_json(value.get("choice"))
        except BadInput:
            return None
        return choice if choice.capacities == capacities else None

    def _keep(
        self, what: Literal["tactic", "choice"], capacities: tuple[int, ...], value: dict[str, Any]
    ) -> None:
        """Each rank writes its own file: the key names its GPU."""
        self.counts.written += self.cache.write(self.key(what, capacities), value)

    def _agreed(self, what: str, digests: Mapping[str, str | None], given: str) -> dict[str, bool]:
        """Which digests all ranks hold alike; RankFailure where they were asked otherwise."""
        sent = json.dumps([self.mode, given, dict(digests)])
        every = [json.loads(text) for text in self.gather(what, sent)]
        for place, name in enumerate(("MEGAMOE_TUNING", f"what {what} to choose among")):
            if len({held[place] for held in every}) > 1:
                values = ", ".join(f"{held[place]} on rank {r}" for r, held in enumerate(every))
                raise RankFailure(f"the ranks disagree on {name} ({values}): set every rank alike")
        return {
            name: mine is not None and all(held[2][name] == mine for held in every)
            for name, mine in digests.items()
        }


def admitted(candidates: Sequence[Knobs], deterministic: bool) -> tuple[Knobs, ...]:
    """The candidates that may be measured, the default first; each once.

    deterministic: none that sums inside the kernel, where the order may change from run to run.
    """
    found: list[Knobs] = []
    for knobs in candidates:
        sums = any(knobs.get(name, off) != off for name, off in IN_KERNEL.items())
        if knobs not in found and not (deterministic and sums):
            found.append(knobs)
    if not found:
        raise bad_input(
            "candidates", "", "leave no tactic that sums in a fixed order",
            "offer the kernel's default first",
        )  # fmt: skip
    return tuple(found)


def winner(times: Sequence[float], margin: float = MARGIN) -> int | None:
    """Which of the measured times to take, the default's first: the fastest, of equals the first,
    but the default unless it is beaten by more than the noise. Infinite ones failed; None where all
    did.
    """
    best = min(range(len(times)), key=times.__getitem__)
    if not math.isfinite(times[best]):
        return None
    return best if times[best] < times[0] * (1 - margin) else 0


def _real(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{seconds} seconds were measured")
    return seconds


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
