"""The door to FlashInfer: launches that are prebuilt, and buffers that layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from emulated import emulated, standalone
from emulated.layers import Layer

import megamoe
from megamoe.formats import MXFP4
from megamoe.kernels.flashinfer import SharedBuffer, prebuilt
from megamoe.problem import Placement


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


# --- symmetric buffers ----------------------------------------------------------------------------


@pytest.mark.parametrize("workspaces", [(), (2,)])
def test_the_group_of_one_rank_lasts_as_long_as_a_buffer_over_it(workspaces: Any) -> None:
    case = Layer(
        kernel="sm90_standalone_mxfp4", weights=MXFP4, placement=Placement.contiguous(2, 1),
        ids=(((0, 1),),), capacity=4,
    )  # fmt: skip

    def prepare(capacity: int, **more: Any) -> megamoe.PreparedWeights:
        return megamoe.prepare(
            case.held(0), max_tokens_per_rank=capacity, top_k=2, kernel=case.kernel, tuning="off",
            **more,
        )  # fmt: skip

    with emulated():
        made_it, other = prepare(4), prepare(4 if workspaces else 8, workspaces=workspaces)
        made_it.close()
        assert dist.is_initialized()
        for held in list(SharedBuffer._open.values()):
            real = held.buffer.destroy

            def destroy(real: Any = real) -> None:
                assert dist.is_initialized()
                real()

            held.buffer.destroy = destroy
        other.close()
        assert not dist.is_initialized()


def test_a_buffer_that_cannot_be_made_leaves_no_group() -> None:
    case = Layer(
        kernel="sm90_standalone_mxfp4", weights=MXFP4, placement=Placement.contiguous(2, 1),
        ids=(((0, 1),),),
    )  # fmt: skip
    held = dict(SharedBuffer._open)
    full = mock.patch.object(standalone.Buffer, "__init__", side_effect=MemoryError("full"))
    with emulated(), full, pytest.raises(MemoryError, match="full"):
        case.prepare(0)
    assert not dist.is_initialized()
    assert SharedBuffer._open == held
