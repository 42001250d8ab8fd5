"""A thread that watches a group of processes: it says where this rank is, and finds who is missing.

All goes through the process group's key-value store, never through a collective, which hangs just
when it is needed. The calls themselves only change a few Python attributes; the thread publishes
them, and reads the other ranks' only while this one waits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megamoe.errors import RankFailure

OnFailure = Literal["abort", "raise"]

TIMEOUT = 600.0  # seconds: one rank may compile for minutes while the others wait
LOST = 30.0  # seconds without a sign of life after which a process is taken for dead
GRACE = 5.0  # seconds for a call that can still raise, before the process is aborted
LOOK = 15.0  # seconds between two looks at the others while no call waits


State = Literal["beating", "resting", "ended"]
"""Of a process: resting while it has no layer, when its signs stop and say nothing of its health;
ended once it, or its group, is gone."""


class Step(NamedTuple):
    """One collective call of one layer; its key is the same on every rank.

    A tuple, because one is made on every call and a frozen dataclass is slower to make.
    """

    layer: int
    phase: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.phase}/{self.number}"

    def __str__(self) -> str:
        return f"{self.phase} #{self.number} of layer {self.layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank last said of itself, and when this one saw it change."""

    text: str
    launched: int = 0
    where: str = "nowhere"
    state: State = "beating"
    seen: float = 0.0


class Watchdog:
    """One a process group and process, shared by its layers.

    launched counts the collective calls begun here; on healthy ranks the counts differ for no
    longer than ranks wait for each other. failure is set once and for all: the group is beyond
    repair.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, abort: Callable[[], object] = os.abort
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = TIMEOUT
        self.on_failure: OnFailure = "abort"
        self.launched = 0
        self.layers = 0  # ever prepared
        self.failure: str | None = None
        self.told = threading.Event()  # somebody has raised the failure
        self.polling = False  # a call waits in a way that keeps the bound by itself
        self._abort = abort
        self._where: Step | str = "start"
        self._last: tuple[Step, float] | None = None  # launched
        self._stream: Any = None  # of that launch, on a GPU
        self._inside: dict[Step, float] = {}
        self._signs: dict[int, Sign] = {}
        self._beats = 0
        self._open = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> float:
        return min(LOST, self.timeout)

    # --- what the calls do ------------------------------------------------------------------------

    def enter(self, step: Step) -> None:
        self.check()
        self._where = step
        self._inside[step] = time.monotonic()

    def launch(self, step: Step, stream: Any) -> None:
        self.launched += 1
        self._last = step, time.monotonic()
        self._stream = stream

    def leave(self, step: Step) -> None:
        self._inside.pop(step, None)

    def resume(self, step: Step) -> None:
        """After :meth:`leave`: the call goes on, and its time starts anew."""
        self._inside[step] = time.monotonic()

    def check(self) -> None:
        """Raise RankFailure where the group has failed."""
        if self.failure is not None:
            self.told.set()
            raise RankFailure(f"{self.failure}; since then the group is dead: start its ranks anew")

    def fail(self, text: str) -> None:
        """The group is beyond repair: remembered here, and told to the others where possible."""
        if self.failure is None:
            self.failure = text
            try:
                self.store.set("dead", text)
            except RuntimeError:
                return  # no store is left to tell it

    # --- what the others say ----------------------------------------------------------------------

    def verdict(
        self,
        step: Step,
        since: float,
        *,
        inside: bool = True,
        missing: Iterable[int] | None = None,
    ) -> str | None:
        """Whom ``step`` waits for in vain since ``since``, in words; None while there is hope.

        inside: False where the call has returned, and only a device may still be busy with it.
        missing: the ranks waited for; without it, those that have launched fewer calls.
        """
        told = ("dead", f"error/{step.key}", f"left/{step.layer}") if inside else (
            f"error/{step.key}",
        )  # fmt: skip
        for key in told:
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        now = time.monotonic()
        signs, waited = self._look(now), now - since
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        behind = [r for r in peers if r not in signs or signs[r].launched < self.launched]
        behind = behind if missing is None else list(missing)
        for rank in peers:
            sign = signs.get(rank)
            if sign is None or sign.state == "resting":
                continue
            ended = sign.state == "ended"
            if not ended and now - sign.seen <= self.lost:
                continue
            if rank in behind or (inside and waited > self.lost):
                how = "has ended" if ended else f"died: no sign of life for {self.lost:g} s"
                return f"rank {rank} {how}; it was last in {sign.where}, and {step} waits for it"
        if waited <= self.timeout:
            return None
        last = {rank: f"last in {sign.where}" for rank, sign in signs.items()}
        if behind:
            named = ", ".join(f"rank {r} ({last.get(r, 'never seen')})" for r in behind)
            return f"{step} waited {self.timeout:g} s in vain for {named}"
        if inside:
            named = ", ".join(f"rank {r} ({last.get(r, 'never seen')})" for r in peers)
            return f"{step} did not come back within {self.timeout:g} s; the others: {named}"
        return None

    def _look(self, now: float) -> Mapping[int, Sign]:
        """Every other rank's last sign of life."""
        for rank in range(self.world_size):
            key = f"life/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            text = self.store.get(key).decode()
            if rank not in self._signs or self._signs[rank].text != text:
                _, launched, where, state = json.loads(text)
                self._signs[rank] = Sign(
                    text=text, launched=launched, where=where, state=state, seen=now
                )
        return self._signs

    # --- the thread -------------------------------------------------------------------------------

    def open(self) -> None:
        """One more layer is watched; the first starts the thread."""
        self._open += 1
        self.publish()
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="megamoe-watchdog", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """One layer fewer; the last stops the thread."""
        self._open -= 1
        if self._open == 0 and self._thread is not None:
            self._halt()
            self._say("resting")

    def end(self) -> None:
        """The group, or the interpreter, goes: the others must not wait for a sign of life."""
        self._halt()
        self._say("ended")

    def _say(self, state: State) -> None:
        try:
            self.publish(state)
        except RuntimeError:
            return  # no store is left to tell it

    def _halt(self) -> None:
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def publish(self, state: State = "beating") -> None:
        self._beats += 1
        where = self._where
        prefix = "after " if isinstance(where, Step) and where not in self._inside else ""
        sign = [self._beats, self.launched, f"{prefix}{where}", state]
        self.store.set(f"life/{self.rank}", json.dumps(sign))

    def _run(self, stop: threading.Event) -> None:
        looked = time.monotonic()
        while not stop.wait(min(1.0, self.timeout / 10)):
            calls = list(self._inside.items())  # at once: calls come and go meanwhile
            try:
                self.publish()
                text = self.failure
                if text is None and calls and not self.polling:
                    text = self.verdict(*min(calls, key=lambda call: call[1]))
                elif text is None and not calls and time.monotonic() - looked > self._pause:
                    looked = time.monotonic()
                    if self.store.check(["dead"]):
                        text = str(self.store.get("dead").decode())
                    elif self._last is not None:
                        text = self.verdict(*self._last, inside=False)
            except RuntimeError as error:
                if not calls:
                    return  # the group is gone, and nobody waits for it
                text = store_gone(self, error)
            if text is not None:
                return self._announce(text, stop)

    @property
    def _pause(self) -> float:
        return min(LOOK, self.timeout / 4)

    def _announce(self, text: str, stop: threading.Event) -> None:
        """Fail, and end the process where it is stuck and no call comes back to raise it."""
        self.fail(text)
        if self.on_failure == "raise" or self.told.wait(GRACE) or stop.is_set():
            return
        if self._inside or self._busy():
            print(f"megamoe: rank {self.rank} aborts: {text}", file=sys.stderr, flush=True)
            self._abort()

    def _busy(self) -> bool:
        """Whether the device still works on the last launch. Asked for nothing but a failure: a
        query would break a graph capture of the same moment.
        """
        try:
            return self._stream is not None and not self._stream.query()
        except RuntimeError:
            return False  # the device's own error will be raised where it is used


def store_gone(watchdog: Watchdog, error: Exception) -> str:
    """The group's store lives in rank 0 or in the launcher."""
    seen = ", ".join(f"rank {r} in {s.where}" for r, s in sorted(watchdog._signs.items()))
    return (
        "the process that holds the group's store (rank 0, or the launcher) is gone"
        f"{'; last seen: ' + seen if seen else ''} ({type(error).__name__})"
    )
