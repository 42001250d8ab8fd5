"""What a rank process of these tests does: one problem through the production path."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel import mutants
from parallel.shares import Problem

import megamoe

Phase = Callable[[str], None]


def setup(rank: int, world_size: int, port: int) -> dict[int, Any]:
    """The group of this rank, by size: all four, and its half of them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    half = world_size // 2
    halves = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    return {world_size: dist.group.WORLD, half: halves[rank // half]}


def finish(state: dict[int, Any]) -> None:
    dist.destroy_process_group()


@contextlib.contextmanager
def environment(**values: str | None) -> Any:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def run(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: dict[int, Any],
    problem: Problem,
    kernel: str = "auto",
    force: str | None = None,
    mutant: str | None = None,
    capacity: int = 8,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """The bits [T, H] of two forward calls, of this rank's tokens in reverse and as they are."""
    group = state[problem.world_size]
    me = rank % problem.world_size
    x, topk = problem.tokens(me)
    back = torch.arange(len(x) - 1, -1, -1)
    turned = megamoe.TopK(ids=topk.ids[back], weights=topk.weights[back], scaled=topk.scaled)
    planted = contextlib.nullcontext() if mutant is None else mutants.planted(mutant, group)
    with environment(MEGAMOE_FORCE_REFERENCE=force), planted:
        phase("prepare")
        with megamoe.prepare(
            problem.weights(me), group, max_tokens_per_rank=capacity, top_k=problem.case.top_k,
            kernel=kernel, timeout=60.0,
        ) as layer:  # fmt: skip
            phase("forward")
            first = layer.forward(x[back], turned, max_tokens=max_tokens)
            second = megamoe.forward(x, topk, layer, max_tokens=max_tokens)
            return [y.view(torch.int16).numpy() for y in (first, second)]


# --- failures -------------------------------------------------------------------------------------


def fail(
    phase: Phase,
    rank: int,
    world_size: int,
    *,
    state: dict[int, Any],
    problem: Problem,
    who: int,
    how: str,
    timeout_s: float,
    idle: float = 0.0,
) -> tuple[str, str, float]:
    """Rank ``who`` misbehaves; what each rank's calls raised, and after how many seconds.

    A group of its own each time: a failed one stays dead. idle: how long who stays away.
    """
    group = dist.new_group(list(range(world_size)))
    x, topk = problem.tokens(rank)
    capacity, weights, bound = 8, problem.weights(rank), timeout_s
    begun = time.monotonic()

    def prepare() -> megamoe.PreparedWeights:
        return megamoe.prepare(
            weights, group, max_tokens_per_rank=capacity, top_k=problem.case.top_k,
            timeout=bound, on_failure="raise",
        )  # fmt: skip

    def misbehave(point: str) -> None:
        nonlocal begun, x, topk
        begun = time.monotonic()
        if rank != who or not how.endswith(point):
            return
        if how.startswith("dies"):
            time.sleep(0.5)  # the others are waiting
            os._exit(7)
        if how.startswith("stays away"):
            time.sleep(idle)
            begun = time.monotonic()
        if how == "bad tokens in forward":
            x = x[:, 1:]
        if how == "bad pair in forward":
            topk = topk.ids, topk.weights[:, 1:]

    try:
        if rank == who and how == "bad argument in prepare":
            capacity = 0
        if rank == who and how == "other capacity in prepare":
            capacity = 9
        if rank == who and how == "other rank's weights in prepare":
            weights = problem.weights(0)
        if rank == who and how == "bad timeout in prepare":
            bound = 0.0
        misbehave("before prepare")
        layer = prepare()
        phase("prepared")
        layer.forward(x, topk)
        misbehave("in forward")
        layer.forward(x, topk)
        misbehave("before close")
        layer.close()
    except Exception as error:
        first = type(error).__name__, str(error), time.monotonic() - begun
        if how.endswith("in prepare"):  # the mistake mended, nothing is left of it
            capacity, weights, bound = 8, problem.weights(rank), timeout_s
            with prepare() as layer:
                layer.forward(x, topk)
        if how.endswith("in forward"):
            x, topk = problem.tokens(rank)
            # The others have given up on a rank that raised alone, and it learns that.
            again = "the group is dead" if first[0] == "RankFailure" else f"rank {rank} raised BadI"
            with pytest.raises(megamoe.RankFailure, match=again):
                layer.forward(x, topk)
            layer.close()  # not collective any more: the others need not come
        return first
    return "", "", time.monotonic() - begun


def stuck(
    phase: Phase, rank: int, world_size: int, *, state: dict[int, Any], timeout_s: float
) -> None:
    """All but rank 1 wait as inside a megakernel, where nothing can be raised."""
    from megamoe.dispatch import watchdog
    from megamoe.dispatch.ranks import Ranks

    watchdog.GRACE = 0.2
    ranks = Ranks.of(dist.group.WORLD, world_size=world_size)
    with ranks.step("prepare"):
        ranks.fit(rank=rank, world_size=world_size, timeout=timeout_s)
        ranks.gather("ready", "")
    if rank == 1:
        phase("elsewhere")
        time.sleep(2 * timeout_s)
        return
    with ranks.step("forward") as call:
        call.launch()
        phase("in the kernel")
        time.sleep(600)
