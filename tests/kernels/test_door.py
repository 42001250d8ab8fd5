"""The door to FlashInfer: launches that are prebuilt, and buffers that layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megamoe.kernels.flashinfer import prebuilt


class Compiled:
    """A function compiled by CUTLASS's DSL."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def __call__(self, **arguments: Any) -> None:
        self.told.append(f"converts and launches {arguments}")

    def generate_execution_args(self, **arguments: Any) -> tuple[list[Any], list[Any]]:
        return [arguments], []

    def to(self, device: Any) -> Compiled:
        return self

    def run_compiled_program(self, values: list[Any]) -> None:
        self.told.append(f"launches {values[0]}")


def plain(told: list[str]) -> Callable[[], None]:
    compiled, runtime_kwargs = Compiled(told), {"x": 1}

    def thunk() -> None:
        compiled(**runtime_kwargs)

    return thunk


def after_zeroing(told: list[str]) -> Callable[[], None]:
    """As FlashInfer's is where the kernel adds to its output."""
    compiled, runtime_kwargs, output = Compiled(told), {"x": 1}, told

    def thunk() -> None:
        output.append("zeroes")
        compiled(**runtime_kwargs)

    return thunk


def wrapped(told: list[str], make: Callable[[list[str]], Any]) -> Callable[[], None]:
    """As NVFP4's is, which looks first whether its workspace is still the same."""
    thunk = make(told)

    def launch() -> None:
        thunk()

    return launch


@pytest.mark.parametrize("make", [plain, lambda told: wrapped(told, plain)])
def test_a_bare_launch_is_prebuilt(make: Callable[[list[str]], Any]) -> None:
    told: list[str] = []
    prebuilt(make(told))()
    assert told == ["launches {'x': 1}"]


@pytest.mark.parametrize("make", [after_zeroing, lambda told: wrapped(told, after_zeroing)])
def test_a_launch_that_does_more_is_left_as_it_is(make: Callable[[list[str]], Any]) -> None:
    told: list[str] = []
    prebuilt(make(told))()
    assert told == ["zeroes", "converts and launches {'x': 1}"]
