"""A pool of rank processes that survives its ranks: tasks in, results or named failures out.

Each rank is a process of its own, started once and sent many tasks. It reports the phase it is in;
a rank that raises, dies or stays silent past the bound is named with its phase, the whole pool is
killed (peers inside a megakernel cannot be told anything), and the next task starts a new one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Phase = Callable[[str], None]
Task = Callable[..., Any]  # task(phase, rank, world_size, **arguments) -> picklable


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one task. ``values``: by rank, where it finished.

    failed: the rank that is to blame and its last phase; log: the end of that rank's output.
    """

    status: Literal["done", "raised", "died", "hung"]
    values: Mapping[int, Any] = field(default_factory=dict)
    rank: int | None = None
    phase: str = ""
    message: str = ""
    log: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.status == "done":
            return f"done in {self.seconds:.1f} s"
        return f"rank {self.rank} {self.status} in phase '{self.phase}': {self.message}"


class Pool:
    """``world_size`` processes that each run ``setup`` once and then tasks, in step.

    environment: set in each process before anything is imported there; callables get the rank.
    setup: a module-level function setup(rank, world_size, port), for devices and process groups;
    its value is passed to each task as ``state``. finish: called with it before a rank ends.
    grace: seconds between one rank's error and the kill, for the others to report their own.
    method: of starting a process; "forkserver" starts many on a CPU from one that has imported all.
    """

    def __init__(
        self,
        world_size: int,
        *,
        setup: Callable[[int, int, int], Any],
        finish: Callable[[Any], None] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
        grace: float = 5.0,
        method: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        self.world_size = world_size
        self._setup, self._finish = setup, finish
        self._environment = dict(environment or {})
        self._start_timeout, self._grace, self._method = start_timeout, grace, method
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._logs: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="megamoe-pool-")

    def run(self, task: Task, *, timeout: float, **arguments: Any) -> Outcome:
        """Send one task to every rank and wait for all of them, for ``timeout`` seconds at most."""
        if not self._processes:
            started = self._start()
            if started.status != "done":
                return started
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that died since: the collection names it
                pipe.send((task, arguments))
        return self._collect(timeout)

    def close(self) -> None:
        """End the ranks in good order, then by force."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10.0)
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """An interrupt does not wait for ranks that are at work."""
        if error is not None and not isinstance(error, Exception):
            self._kill()
        self.close()

    def _start(self) -> Outcome:
        context: Any = get_context(self._method)
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, port, self._setup, self._finish),
                kwargs={"environment": self._environment, "log": str(log)},
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._logs.append(log)
        return self._collect(self._start_timeout)

    def _collect(self, timeout: float) -> Outcome:
        begun = time.monotonic()
        deadline = begun + timeout
        phases = dict.fromkeys(range(self.world_size), "start")
        values: dict[int, Any] = {}
        failure: tuple[Literal["raised", "died"], int, str] | None = None
        waiting = set(range(self.world_size))
        while waiting and time.monotonic() < deadline:
            pipes = {self._pipes[rank]: rank for rank in waiting}
            for ready in connection.wait(list(pipes), timeout=min(0.2, timeout)):
                rank = pipes[ready]  # type: ignore[index]
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    kind, value = "died", self._epitaph(rank)
                if kind == "phase":
                    phases[rank] = value
                    continue
                waiting.discard(rank)
                if kind == "done":
                    values[rank] = value
                elif failure is None:
                    failure = kind, rank, value
                    deadline = min(deadline, time.monotonic() + self._grace)
        seconds = time.monotonic() - begun
        if failure is None and not waiting:
            return Outcome(status="done", values=values, seconds=seconds)
        if failure is not None:
            status, rank, message = failure
        else:  # the rank whose phase is the least advanced is no better known than any other
            status, rank = "hung", min(waiting)  # type: ignore[assignment]
            message = (
                "no answer within "
                + f"{timeout:.0f} s; phases: "
                + ", ".join(f"rank {r} {phases[r]}" for r in sorted(waiting))
            )
        log = self._tail(rank)
        self._kill()
        return Outcome(
            status=status, values=values, rank=rank, phase=phases[rank], message=message, log=log,
            seconds=seconds,
        )  # fmt: skip

    def _epitaph(self, rank: int) -> str:
        self._processes[rank].join(2.0)
        return f"the process ended with exit code {self._processes[rank].exitcode}"

    def _tail(self, rank: int, length: int = 4000) -> str:
        try:
            return self._logs[rank].read_text(errors="replace")[-length:]
        except OSError:
            return ""

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._logs = [], [], []


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(
    pipe: connection.Connection,
    rank: int,
    world_size: int,
    port: int,
    setup: Callable[[int, int, int], Any],
    finish: Callable[[Any], None] | None,
    *,
    environment: Mapping[str, str],
    log: str,
) -> None:
    """A rank's life: set up, serve tasks until told to stop, end without the interpreter's own exit
    (NVSHMEM's tear-down has crashed there)."""
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

    def phase(name: str) -> None:
        pipe.send(("phase", name))

    state: Any = None
    try:
        state = setup(rank, world_size, port)
        pipe.send(("done", None))
        while (message := pipe.recv()) is not None:
            task, arguments = message
            pipe.send(("done", task(phase, rank, world_size, state=state, **arguments)))
    except (EOFError, KeyboardInterrupt):
        os._exit(1)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("raised", f"{type(error).__name__}: {error}"))
        os._exit(1)
    if finish is not None:
        finish(state)
    os._exit(0)
