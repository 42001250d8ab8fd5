"""The GPU suite's options, and its refusal to pass where nothing can be tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megamoe GPU suite")
    group.addoption("--worlds", default="1", help="world sizes, comma separated (default 1)")
    group.addoption("--kernels", default="", help="only these, comma separated")
    group.addoption("--core", action="store_true", help="the core cases only")
    group.addoption("--ranks-per-gpu", type=int, default=0, help="at most; 0 is as many as needed")
    group.addoption("--results", type=Path, default=None, help="folder for the JSON records")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = config.getoption("markexpr", "")
    if "gpu" in marked and "not gpu" not in marked and not torch.cuda.is_available():
        pytest.exit("no CUDA GPU is here: nothing was tested", returncode=1)
