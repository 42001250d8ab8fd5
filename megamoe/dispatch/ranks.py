"""What one layer needs of its group of processes: agreement before a launch, and a watched launch.

``Ranks`` is one layer's view of the group; the thread behind it is shared by the group's layers
(:mod:`megamoe.dispatch.watchdog`). A layer on one rank has a ``Ranks`` too, which does nothing.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from megamoe.dispatch.watchdog import TIMEOUT, OnFailure, Step, Watchdog, store_gone
from megamoe.errors import RankFailure, bad_input

# One watchdog a process group, however many layers it has.
_WATCHDOGS: weakref.WeakKeyDictionary[Any, Watchdog] = weakref.WeakKeyDictionary()

TRANSPORT_ERRORS = ("gloo", "NCCL", "Connection", "connection", "Broken pipe")


class Ranks:
    """rank of world_size; collective calls are steps, and inside a step ranks can be compared."""

    def __init__(self, watchdog: Watchdog | None = None, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if watchdog is None else watchdog.rank
        self.world_size = 1 if watchdog is None else watchdog.world_size
        self._watchdog = watchdog
        self._counts: Counter[str] = Counter()
        self._gathers = 0
        self._opened = False  # the watchdog, for this layer
        self._unsettled = False  # this rank's last call was refused before its launch
        self._step = Step(layer=0, phase="start", number=0)
        if watchdog is not None:
            watchdog.layers += 1
            self._layer = watchdog.layers

    @classmethod
    def of(cls, group: Any, *, world_size: int) -> Ranks:
        """The ranks of a group, and a layer's number in it.

        group: a torch.distributed ProcessGroup; None is the default group, where weights were
        loaded for more than one rank. Raises BadInput where there is no group to be told of it; all
        else is looked at in ``fit``.
        """
        if world_size == 1 and group is None:
            return cls()
        import torch.distributed as dist

        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise bad_input(
                    "group", "None", f"stands for the default group of {world_size} ranks, and "
                    "there is none", "call torch.distributed.init_process_group on every rank",
                )  # fmt: skip
            group = dist.group.WORLD
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise bad_input(
                "group", "", "does not hold this process", "pass the one that its weights are for"
            )
        if size == 1:
            return cls()
        watchdog = _WATCHDOGS.get(group)
        if watchdog is None:
            watchdog = Watchdog(connection(_store_of(group)), rank, size)
            _WATCHDOGS[group] = watchdog
            weakref.finalize(group, watchdog.end)
        return cls(watchdog, group)

    def fit(
        self,
        *,
        rank: int,
        world_size: int,
        timeout: float = TIMEOUT,
        on_failure: OnFailure = "abort",
    ) -> None:
        """Take a layer's bounds, and weights loaded for ``rank`` of ``world_size``; be watched.

        Inside a step: what one rank alone is refused for is told to the others, and the layers'
        numbers stay the same everywhere. Raises BadInput where the group does not fit the weights.
        """
        if not timeout > 0:
            raise bad_input("timeout", timeout, "is not above 0 seconds", "pass seconds to wait")
        if on_failure not in ("abort", "raise"):
            raise bad_input("on_failure", repr(on_failure), "is unknown", "use 'abort' or 'raise'")
        if (self.rank, self.world_size) != (rank, world_size):
            raise bad_input(
                "group", f"in which this is rank {self.rank} of {self.world_size}",
                f"does not fit weights loaded for rank {rank} of {world_size}",
                "pass the expert-parallel group that the weights were loaded for",
            )  # fmt: skip
        if self._watchdog is not None:
            self._watchdog.timeout, self._watchdog.on_failure = timeout, on_failure
            self._watchdog.open()
            self._opened = True

    # --- steps ------------------------------------------------------------------------------------

    def step(self, phase: str) -> _Watched | _Unwatched:
        """``with ranks.step("forward"):`` around a collective call.

        An error inside is told to the other ranks, whose own step then raises RankFailure naming
        this rank and it; a transport's error becomes a RankFailure that names the rank behind it.
        From ``step.launch()`` on, an error leaves the group dead: a collective is half done. After
        an error before it, the next step first asks whether all ranks had it: a rank alone with it
        must not enter, one call late, a collective that the others are about to give up.
        """
        if self._watchdog is None:
            return _UNWATCHED
        self._counts[phase] += 1
        self._gathers = 0
        self._step = Step(layer=self._layer, phase=phase, number=self._counts[phase])
        return _Watched(self, self._watchdog, self._step)

    def gather(self, what: str, value: str) -> list[str]:
        """Every rank's value, in rank order; inside a step.

        Raises RankFailure naming a rank that has raised in this step, that died, or that does not
        come within the bound.
        """
        watchdog = self._watchdog
        if watchdog is None:
            return [value]
        step, self._gathers = self._step, self._gathers + 1
        keys = [f"{what}/{self._gathers}/{step.key}/{rank}" for rank in range(self.world_size)]
        since, pause = time.monotonic(), 0.001
        watchdog.leave(step)  # this thread keeps the bound itself
        watchdog.polling = True
        try:
            watchdog.store.set(keys[self.rank], value)
            while not watchdog.store.check(keys):
                missing = [r for r, key in enumerate(keys) if not watchdog.store.check([key])]
                text = watchdog.verdict(step, since, missing=missing)
                # What another rank did after it had everyone's value is no failure of this gather.
                if text is not None and not watchdog.store.check(keys):
                    raise RankFailure(text)
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            return [watchdog.store.get(key).decode() for key in keys]
        except RankFailure:
            raise
        except RuntimeError as error:
            raise RankFailure(store_gone(watchdog, error)) from error
        finally:
            watchdog.polling = False
            watchdog.resume(step)

    def agree(self, what: str, facts: Mapping[str, str]) -> None:
        """Compare facts over the ranks, inside a step: RankFailure on every rank where they differ.

        The message names each fact that differs, its values, and the ranks that hold them.
        """
        watchdog = self._watchdog
        if watchdog is None:
            return
        sent = json.dumps([watchdog.launched, dict(facts)])
        every = [json.loads(text) for text in self.gather(what, sent)]
        watchdog.launched = max(launched for launched, _ in every)
        differences = []
        for name in dict.fromkeys(name for _, held in every for name in held):
            holders: dict[str, list[int]] = {}
            for rank, (_, held) in enumerate(every):
                holders.setdefault(held.get(name, "nothing"), []).append(rank)
            if len(holders) > 1:
                values = (f"{value} on rank {_list(who)}" for value, who in holders.items())
                differences.append(f"{name} ({', '.join(values)})")
        if differences:
            raise RankFailure(
                f"the ranks disagree on {'; '.join(differences)}: prepare every rank alike"
            )

    def ranks_per_gpu(self, device: torch.device) -> int:
        """How many ranks share the busiest GPU; 1 on CPUs. Inside a step."""
        if device.type != "cuda" or self._watchdog is None:
            self.gather("device", "")
            return 1
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return max(Counter(u for u in self.gather("device", uuid) if u).values())

    def wait(self, work: Any) -> None:
        """Wait for a collective on CPU tensors, as long as the group is healthy."""
        watchdog = self._watchdog
        if watchdog is None:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=0.1))
                return
            except RuntimeError:
                if work.is_completed():  # between the time-out and here, or with an error
                    work.wait()
                    return
            watchdog.check()

    # --- the end ----------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self._watchdog is None or self._watchdog.failure is None

    def check(self) -> None:
        """Raise RankFailure where the group has failed."""
        if self._watchdog is not None:
            self._watchdog.check()

    def abandon(self, error: BaseException) -> None:
        """This rank leaves the layer on an error of its own: whoever waits in it is told."""
        watchdog = self._watchdog
        if watchdog is not None:
            text = f"rank {self.rank} left layer {self._layer} on {_told(error)}"
            _try_set(watchdog, f"left/{self._layer}", text)

    def close(self) -> None:
        """The layer needs its group no longer; once."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None and self._opened:
            watchdog.close()


class _Unwatched:
    def __enter__(self) -> _Unwatched:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def launch(self, device: torch.device | None = None) -> None:
        return None


_UNWATCHED = _Unwatched()


class _Watched:
    """One step. Entering and leaving it costs a few attribute changes."""

    __slots__ = ("launched", "ranks", "step", "watchdog")

    def __init__(self, ranks: Ranks, watchdog: Watchdog, step: Step) -> None:
        self.ranks, self.watchdog, self.step, self.launched = ranks, watchdog, step, False

    def __enter__(self) -> _Watched:
        self.watchdog.enter(self.step)
        if self.ranks._unsettled:
            try:
                self.ranks.gather("settle", "")
            except BaseException as error:
                self.launched = True  # by the others, and this rank missed it
                self.__exit__(type(error), error, None)
                raise
            self.ranks._unsettled = False
        return self

    def launch(self, device: torch.device | None = None) -> None:
        """device: the GPU, where the call returns before its current stream's work is done."""
        self.launched = True
        on_gpu = device is not None and device.type == "cuda"
        self.watchdog.launch(self.step, torch.cuda.current_stream(device) if on_gpu else None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        watchdog, step = self.watchdog, self.step
        watchdog.leave(step)
        if error is None:
            return
        text = f"rank {watchdog.rank} raised {_told(error)} in {step}"
        failure: RankFailure | None = error if isinstance(error, RankFailure) else None
        if failure is None and _of_transport(error):
            found = self._culprit()
            failure = None if found is None else RankFailure(found)
        if failure is not None:
            text = str(failure)
            watchdog.told.set()
        if self.launched:
            watchdog.fail(text)
        else:
            self.ranks._unsettled = True
        _try_set(watchdog, f"error/{step.key}", text)
        if failure is not None and failure is not error:
            raise failure from error

    def _culprit(self) -> str | None:
        """Who broke the transport: looked for until every dead process must have been noticed."""
        watchdog, since = self.watchdog, time.monotonic()
        try:
            while time.monotonic() - since < 1.5 * watchdog.lost:
                text = watchdog.verdict(self.step, since)
                if text is not None:
                    return text
                time.sleep(0.05)
        except RuntimeError as error:
            return store_gone(watchdog, error)
        return None


def _store_of(group: Any) -> Any:
    import torch.distributed as dist

    # A group made outside of init_process_group and new_group knows of none by itself.
    return group.get_group_store() or dist.distributed_c10d._world.pg_map[group][1]


def connection(store: Any) -> Any:
    """The store over a connection of its own: another thread may block on the first one."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore("megamoe", store.clone())


def _of_transport(error: BaseException) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in TRANSPORT_ERRORS)
    )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _try_set(watchdog: Watchdog, key: str, text: str) -> None:
    try:
        watchdog.store.set(key, text)
    except RuntimeError:
        return  # nobody is left to be told


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
