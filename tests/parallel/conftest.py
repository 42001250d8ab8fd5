"""Four real rank processes over gloo, started once and sent many cases."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch
from parallel.work import finish, setup

from megamoe.suite.pool import Pool


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    multiprocessing.set_forkserver_preload(["parallel.work"])
    with pytest.MonkeyPatch.context() as patch:
        # What the server cannot import it skips without a word, and then each rank imports torch.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    # gloo on the loopback device: a test machine's own name need not resolve.
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with Pool(
        4, setup=setup, finish=finish, environment=environment, grace=15.0, method="forkserver"
    ) as pool:
        yield pool
