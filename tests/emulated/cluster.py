"""Ranks as threads of one process: a rendezvous that checks the order of what is collective."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

T = TypeVar("T")
TIMEOUT_S = 60.0


class ContractBroken(AssertionError):
    """The adapter did what the kernel forbids: on hardware an error, a hang or wrong bits."""


class Trap(RuntimeError):
    """The kernel trapped: the device context is lost."""


class Cluster:
    """Where all ranks meet. Each meeting is numbered, and every rank must come for the same."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, tuple[Any, Any]]] = {}
        self._counts = [0] * world_size
        self._dead: str | None = None

    def meet(self, rank: int, what: Any, value: Any = None) -> list[Any]:
        """Every rank's ``value`` in rank order, once all have come for ``what``."""
        with self._condition:
            number = self._counts[rank]
            self._counts[rank] += 1
            came = self._rounds.setdefault(number, {})
            came[rank] = (what, value)
            self._rounds.pop(number - 2, None)
            self._condition.notify_all()
            done = self._condition.wait_for(
                lambda: len(came) == self.world_size or self._dead is not None, TIMEOUT_S
            )
            if not done or len(came) < self.world_size:
                missing = sorted(set(range(self.world_size)) - set(came))
                raise ContractBroken(
                    f"rank {rank} waits at {what} for ranks {missing} ({self._dead or 'timed out'})"
                )
            wanted = {repr(w) for w, _ in came.values()}
            if len(wanted) > 1:
                raise ContractBroken(f"ranks disagree on what is collective: {sorted(wanted)}")
            return [came[r][1] for r in range(self.world_size)]

    def bury(self, why: str) -> None:
        """Wake every rank that waits for one that will not come."""
        with self._condition:
            self._dead = self._dead or why
            self._condition.notify_all()


_HERE = threading.local()


def here(rank: int, world_size: int) -> Cluster:
    """The cluster of this thread's rank; a fresh one where a single rank runs by itself."""
    cluster: Cluster | None = getattr(_HERE, "cluster", None)
    if cluster is None:
        if world_size != 1:
            raise ContractBroken(f"rank {rank} of {world_size} runs outside of run_ranks")
        return Cluster(1)
    if (rank, world_size) != (_HERE.rank, cluster.world_size):
        raise ContractBroken(
            f"rank {_HERE.rank} of {cluster.world_size} says it is {rank} of {world_size}"
        )
    return cluster


def run_ranks(world_size: int, work: Callable[[int], T]) -> list[T]:
    """``work(rank)`` on every rank at once, a torch.distributed group around them.

    Raises the first rank's error that is not the echo of another's.
    """
    if world_size == 1:
        return [work(0)]
    cluster, store = Cluster(world_size), dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def one(rank: int) -> None:
        _HERE.cluster, _HERE.rank = cluster, rank
        torch.set_num_threads(1)
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error
            cluster.bury(f"rank {rank} raised {error!r}")
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        assert not late, f"ranks {late} hang"
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    raised = [error for error in errors if error is not None]
    for error in sorted(raised, key=_is_echo):
        detail = "".join(traceback.format_exception(error))
        error.add_note(f"of one rank of {world_size}; on that rank:\n{detail}")
        raise error
    return results


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, SystemExit) or "waits at" in str(error)
