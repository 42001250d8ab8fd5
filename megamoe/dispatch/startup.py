"""What a layer does once, before it serves: which workspaces, which tactics, which serves when."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from megamoe.dispatch.cache import Cache, Key
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.select import Decision
from megamoe.dispatch.tuning import Knobs, Mode, Tuner
from megamoe.errors import MegaMoEError, bad_input
from megamoe.kernels.base import Datasheet, Kernel, Workspace
from megamoe.kernels.plain import PlainKernel
from megamoe.kernels.staging import Staging
from megamoe.problem import Request, TopK

LAUNCHES = 10  # in one graph
REPLAYS = (2, 5)  # before and while time is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a layer is to start. capacities: of workspaces besides the greatest. samples: rows and
    their routing like those that will be served, for measurements. most_replicas: ranks and slots
    that may come to hold one expert, where experts are to move later. options: the kernel's own.
    """

    capacities: tuple[int, ...] = ()
    tuning: Mode = "off"
    cache_dir: Path | None = None
    samples: tuple[Tensor, TopK] | None = None
    most_replicas: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Memory(Cache):
    """A cache of this process above the one on disk: a model's layers of one geometry are tuned
    once, also where the folder cannot be written.
    """

    held: ClassVar[dict[str, dict[str, Any]]] = {}

    def read(self, key: Key) -> dict[str, Any] | None:
        found = self.held.get(key.file)
        if found is None:
            found = super().read(key)
        if found is not None:
            self.held[key.file] = found
        return found

    def write(self, key: Key, value: dict[str, Any]) -> bool:
        self.held[key.file] = value
        return super().write(key, value)


def tuner_of(
    start: Start, decision: Decision, request: Request, ranks: Ranks, device: torch.device
) -> Tuner:
    """request: the physical one."""
    gpu = "none"
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)

    def key(what: Literal["tactic", "choice"], capacities: tuple[int, ...]) -> Key:
        return Key.of(
            what, decision.name, request, decision.machine, gpu=gpu, capacities=capacities
        )

    return Tuner(
        # Workspaces without buffers are all the same.
        mode="off" if issubclass(decision.kernel, PlainKernel) else start.tuning,
        cache=Memory(start.cache_dir),
        key=key,
        gather=ranks.gather,
        deterministic=request.host.deterministic,
    )


class Rig:
    """Runs a kernel on representative rows and takes its time; a ``tuning.Trial``.

    A tactic whose output differs in a bit from the default's is an error, so that tuning never
    changes an answer.
    """

    def __init__(
        self,
        kernel: Kernel,
        staging: Staging,
        request: Request,
        device: torch.device,
        capturable: bool,
        samples: tuple[Tensor, TopK] | None = None,
    ) -> None:
        self.kernel, self.staging, self.request, self.device = kernel, staging, request, device
        self.capturable, self.samples = capturable, samples
        self.space: Workspace | None = None
        self.wanted: dict[int, Tensor] = {}

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x, ids, weights): the samples repeated or cut; a rank that has none makes its own."""
        if self.samples is not None and len(self.samples[0]):
            x, topk = self.samples
            place = torch.arange(tokens, device=self.device) % len(x)
            return x[place], topk.ids[place], topk.weights[place].to(torch.float32)
        request, k = self.request, self.request.top_k
        experts = self.staging.num_experts
        draw = torch.Generator().manual_seed(self.staging.rank)
        x = torch.randn(tokens, request.hidden_size, generator=draw).to(torch.bfloat16)
        order = torch.stack([torch.randperm(max(experts, k), generator=draw) for _ in range(64)])
        ids = order[torch.arange(tokens) % 64, :k]
        ids = torch.where(ids < experts, ids, -1)
        weights = torch.full((tokens, k), 1.0 / max(k, 1))
        return x.to(self.device), ids.to(self.device), weights.to(self.device)

    # --- one tactic, as a trial ---------------------------------------------------------------

    def open(self, capacity: int, knobs: Knobs) -> None:
        self.space = self.kernel.open(capacity, knobs or None)
        x, ids, weights = self.rows(capacity)
        batch = self.space.inputs(x, ids.shape[1], capacity)
        self.staging(x, ids, weights, batch)
        self.space.compile()

    def time(self) -> float:
        space = self.space
        assert space is not None
        call, out = self._call(space, space.capacity)
        call()
        wanted = self.wanted.setdefault(space.capacity, out.clone())
        same = torch.equal(out.view(torch.int16), wanted.view(torch.int16))
        seconds = self._seconds(call)  # first: ranks that see nothing wrong launch too, and wait
        if not same:
            raise MegaMoEError("gives other bits than the default tactic")
        return seconds

    def close(self) -> None:
        space, self.space = self.space, None
        if space is not None:
            space.close()

    # --- warm-up ------------------------------------------------------------------------------

    def run(self, space: Workspace, tokens: int) -> None:
        """A launch of ``tokens`` a rank; collective."""
        self._call(space, tokens)[0]()

    def stage_others(self, space: Workspace) -> None:
        """Stage what callers may bring besides int64 ids and float32 weights: each compiles."""
        x, ids, weights = self.rows(1)
        for id_dtype in (torch.int32, torch.int64):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                batch = space.inputs(x, ids.shape[1], 1)
                self.staging(x, ids.to(id_dtype), weights.to(dtype), batch)

    # --- a step on one of several workspaces ------------------------------------------------------

    def step(self, space: Workspace, tokens: int) -> float:
        """Seconds of a step of ``tokens`` a rank, on this rank; collective."""
        call, _ = self._call(space, tokens)
        call()
        return self._seconds(call)

    def _call(self, space: Workspace, tokens: int) -> tuple[Callable[[], None], Tensor]:
        x, ids, weights = self.rows(tokens)
        out = torch.empty_like(x)

        def call() -> None:
            batch = space.inputs(x, ids.shape[1], tokens)
            self.staging(x, ids, weights, batch)
            space.run(batch, out)

        return call, out

    def _seconds(self, call: Callable[[], None]) -> float:
        warm, timed = REPLAYS
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun

        def launches() -> None:
            for _ in range(LAUNCHES):
                call()

        replay = launches
        torch.cuda.synchronize(self.device)
        if self.capturable:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches()
            replay = graph.replay
        taken = []
        for number in range(warm + timed):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            replay()
            last.record()
            last.synchronize()
            if number >= warm:
                taken.append(first.elapsed_time(last) / 1e3 / LAUNCHES)
        return float(statistics.median(taken))


def check_options(options: Mapping[str, Any], sheet: Datasheet) -> None:
    for name in options:
        if name not in sheet.options:
            takes = ", ".join(sheet.options) or "none"
            raise bad_input(
                "option", repr(name), f"is unknown to {sheet.name}, which takes {takes}",
                "leave it out",
            )  # fmt: skip


def check_capacities(capacities: tuple[int, ...], greatest: int) -> None:
    if max(capacities) > greatest:
        raise bad_input(
            "workspaces", max(capacities), f"is above max_tokens_per_rank {greatest}",
            "raise that, or leave it out",
        )  # fmt: skip


def check_tuning(mode: str) -> None:
    if mode not in get_args(Mode):
        raise bad_input(
            "tuning", repr(mode), "is unknown", f"use {', '.join(map(repr, get_args(Mode)))}"
        )
