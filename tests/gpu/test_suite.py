"""Every kernel that this machine can run, on real rank processes, judged by the oracle.

pytest -m gpu --worlds 1,8 --core --results verdicts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megamoe.dispatch.select import KERNELS
from megamoe.kernels.base import Kernel
from megamoe.suite import results, run
from megamoe.suite.cases import CASES, Case
from megamoe.suite.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    named = [name for name in option("--kernels").split(",") if name]
    kernels = [k for k in KERNELS if k.sheet.name in named or not named]
    worlds = [int(w) for w in option("--worlds").split(",")]
    picked = [c for c in CASES if c.core or not option("--core")]
    metafunc.parametrize(
        ("kernel", "world", "what"),
        [(k, w, c) for k in kernels for w in worlds for c in picked],
        ids=[f"{k.sheet.name}-{w}-{c.name}" for k in kernels for w in worlds for c in picked],
    )


class Pools:
    """The pool of the moment: one a (kernel, world size), started when its first case comes."""

    def __init__(self) -> None:
        self.key: Any = None
        self.pool: Pool | None = None
        self.context: Any = None

    def get(self, kernel: type[Kernel], world: int) -> tuple[Pool, bool]:
        """The pool, and whether this is its first case."""
        key = kernel.sheet.name, world
        if key == self.key and self.pool is not None:
            return self.pool, False
        self.close()
        self.context = run.pool(world)
        self.pool = self.context.__enter__()
        self.key = key
        return self.pool, True

    def close(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
        self.key = self.pool = self.context = None


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    held = Pools()
    yield held
    held.close()


def test_kernel(
    request: pytest.FixtureRequest,
    pools: Pools,
    kernel: type[Kernel],
    world: int,
    what: Case,
) -> None:
    machine = run.machine_for(world)
    limit = request.config.getoption("--ranks-per-gpu")
    if limit and machine.ranks_per_gpu > limit:
        pytest.skip(f"{world} ranks need {machine.ranks_per_gpu} on each GPU, allowed are {limit}")
    shape = run.shape_of(kernel)
    why = run.refused(kernel, what, shape, world, machine)
    if why:
        pytest.skip(why)
    pool, first = pools.get(kernel, world)
    entry = run.judge(pool, kernel, what, shape, machine, first=first)
    folder = request.config.getoption("--results")
    if folder is not None:
        results.store(folder, kernel.sheet.name, world, what.name, entry)
    assert results.passed(entry), entry.get("message") or entry
    assert torch.cuda.is_available()
