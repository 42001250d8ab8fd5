"""Faults planted in each adapter are seen: by other bits, or by a contract that is broken.

Each mutant is one edit that a tired programmer makes. The same cases without it give the bits of
the reference, so it is the fault that is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from emulated import ContractBroken
from emulated.layers import HIDDEN, Layer, differences

from megamoe.dispatch.machine import H200, SM120
from megamoe.dispatch.select import KERNELS
from megamoe.formats import FP8_BLOCK128, FP8_TENSOR, MXFP4, MXFP8, NVFP4, PLAIN_BF16, Format
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Kernel
from megamoe.kernels.layout import CanonicalExperts
from megamoe.kernels.staging import Staging
from megamoe.problem import Activation, Placement

WEIGHTS: dict[str, Format] = {
    "sm90_pull_bf16": PLAIN_BF16,
    "sm90_pull_fp8": FP8_BLOCK128,
    "sm90_pull_fp8_tensor": FP8_TENSOR,
    "sm90_pull_mxfp4": MXFP4,
    "sm90_pull_nvfp4": NVFP4,
    "sm90_push_bf16": PLAIN_BF16,
    "sm90_push_fp8": FP8_BLOCK128,
    "sm90_standalone_mxfp4": MXFP4,
    "sm90_standalone_nvfp4": NVFP4,
    "sm120_mxfp4_split": MXFP4,
    "sm120_mxfp4_cake": MXFP4,
    "sm120_mxfp8": MXFP8,
}
BY_NAME = {kernel.sheet.name: kernel for kernel in KERNELS}
QUANTISED = tuple(name for name in WEIGHTS if "bf16" not in name)
MEASURED = tuple(name for name in QUANTISED if not name.endswith("tensor"))  # scales in blocks
FED = tuple(name for name in MEASURED if "push" not in name)  # take codes from us, and scales
CLAMPED = tuple(name for name in WEIGHTS if name not in ("sm90_push_fp8", "sm120_mxfp8"))
MX = tuple(name for name in WEIGHTS if name.startswith("sm120"))


def case(kernel: str, *, limit: float | None = 1.0, gain: float = 12.0) -> Layer:
    """Every expert of four has a token, some slots are empty, ranks hold permuted experts."""
    world = 4 if kernel == "sm90_standalone_nvfp4" else 2
    slots = ((3,), (1,), (0,), (2, 1)) if world == 4 else ((3, 1), (0, 2, 1))
    ids = (((0, 1), (2, 3), (-1, 2)), ((3, -1), (1, 0)), ((2, 2),), ((0, 3), (-1, -1)))
    activation = Activation(limit=limit, symmetric=kernel == "sm90_push_bf16")
    return Layer(
        kernel=kernel,
        weights=WEIGHTS[kernel],
        placement=Placement(num_experts=4, slots=slots),
        ids=ids[:world],
        capacity=4,
        hidden=512 if kernel == "sm120_mxfp4_cake" else HIDDEN,
        machine=SM120 if kernel in MX else H200,
        activation=activation if kernel in CLAMPED else Activation(),
        activation_scales=(0.1, 0.01) if kernel == "sm90_pull_fp8_tensor" else None,
        gain=gain,
    )


def is_caught(layer: Layer, passes: int = 2) -> bool:
    try:
        return bool(differences(layer, passes))
    except ContractBroken:
        return True


@pytest.mark.parametrize("kernel", WEIGHTS)
def test_without_a_mutant_nothing_is_seen(kernel: str) -> None:
    assert differences(case(kernel), passes=2) == []


# --- the mutants ----------------------------------------------------------------------------------

Mutant = Callable[[type[Kernel]], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def experts_through(kernel: type[Kernel], edit: Any) -> Iterator[None]:
    """``edit`` the experts that an adapter packs, under whichever name it gets them."""
    module = sys.modules[kernel.__module__]
    name = "canonical" if hasattr(module, "canonical") else "exact_bf16"
    real = getattr(module, name)
    with mock.patch.object(module, name, lambda experts: edit(real(experts))):
        yield


def swapped(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else _bytes(t, lambda b: torch.cat(b.chunk(2, dim=1)[::-1], dim=1))


def rolled(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else _bytes(t, lambda b: b.roll(1, dims=1))


def _raw(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def _bytes(t: torch.Tensor, edit: Any) -> torch.Tensor:
    return edit(_raw(t)).view(t.dtype)  # type: ignore[no-any-return]


def gate_and_up_swapped(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    def edit(e: CanonicalExperts) -> CanonicalExperts:
        w13 = swapped(e.w13)
        assert w13 is not None
        return dataclasses.replace(e, w13=w13, w13_scale=swapped(e.w13_scale))

    return experts_through(kernel, edit)


def scales_of_the_other_half(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return experts_through(kernel, lambda e: dataclasses.replace(e, w13_scale=swapped(e.w13_scale)))


def scales_of_the_next_row_block(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return experts_through(kernel, lambda e: dataclasses.replace(e, w2_scale=rolled(e.w2_scale)))


def experts_shifted_by_one(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    def edit(e: CanonicalExperts) -> CanonicalExperts:
        return dataclasses.replace(e, w2=_bytes(e.w2, lambda b: b.roll(1, dims=0)))

    return experts_through(kernel, edit)


@contextlib.contextmanager
def batch_through(edit: Any) -> Iterator[None]:
    """``edit`` what staging has written, given the rank and what it wrote for the rank before."""
    real, lock = Staging.__call__, threading.Lock()

    def staged(self: Staging, x: Any, ids: Any, weights: Any, into: Batch, **more: Any) -> None:
        real(self, x, ids, weights, into, **more)
        with lock:
            for name, value in edit(self.rank, into).items():
                _bytes(getattr(into, name), lambda b, value=value: b.copy_(_raw(value)))

    with mock.patch.object(Staging, "__call__", staged):
        yield


def weights_applied_twice(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return batch_through(lambda _, b: {"weights": b.weights * b.weights})


def empty_slots_counted(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    def edit(_: int, b: Batch) -> dict[str, torch.Tensor]:
        weights = torch.where(b.ids < 0, 0.5, b.weights)
        return {"ids": b.ids.clamp(min=0), "weights": weights}

    return batch_through(edit)


def ids_of_the_next_rank(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    world, seats = (4, 2) if kernel.sheet.name == "sm90_standalone_nvfp4" else (2, 3)

    def edit(_: int, b: Batch) -> dict[str, torch.Tensor]:
        moved = (b.ids + seats) % (world * seats)
        return {"ids": torch.where(b.ids < 0, b.ids, moved)}

    return batch_through(edit)


@contextlib.contextmanager
def ids_mapped_twice(kernel: type[Kernel]) -> Iterator[None]:  # K74
    """Physical experts taken for logical ones, and mapped to physical ones again."""
    real = Staging.physical

    def twice(self: Staging, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        found = real(self, ids, first)
        return real(self, torch.where(found < 0, -1, found % self.num_experts), first)

    with mock.patch.object(Staging, "physical", twice):
        yield


@contextlib.contextmanager
def ids_of_the_wrong_width(kernel: type[Kernel]) -> Iterator[None]:
    other = {torch.int32: torch.int64, torch.int64: torch.int32}[kernel.sheet.id_dtype]
    with mock.patch.object(kernel, "sheet", dataclasses.replace(kernel.sheet, id_dtype=other)):
        yield


def stale_tokens(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    kept: dict[int, torch.Tensor] = {}

    def edit(rank: int, b: Batch) -> dict[str, torch.Tensor]:
        return {"x": kept.setdefault(rank, b.x.clone())}

    return batch_through(edit)


def stale_routing(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    kept: dict[int, torch.Tensor] = {}

    def edit(rank: int, b: Batch) -> dict[str, torch.Tensor]:
        return {"weights": kept.setdefault(rank, b.weights.clone())}

    return batch_through(edit)


def activation_scales_of_the_next_token(
    kernel: type[Kernel],
) -> contextlib.AbstractContextManager[Any]:
    def edit(_: int, b: Batch) -> dict[str, torch.Tensor]:
        assert b.scales is not None
        mine = _raw(b.scales).clone()
        mine[: b.count] = mine[: b.count].roll(1, dims=0)
        return {"scales": mine}

    return batch_through(edit)


@contextlib.contextmanager
def fields_through(edit: Any) -> Iterator[None]:
    """``edit`` what every FlashInfer record is built from."""
    real = flashinfer.build

    def build(module: Any, name: str, fields: Any) -> Any:
        return real(module, name, edit(dict(fields)))

    with mock.patch.object(flashinfer, "build", build):
        yield


CLAMPS = ("gate_up_clamp", "clamp_limit", "activation_clamp", "swiglu_limit")


def clamp_dropped(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    def edit(fields: dict[str, Any]) -> dict[str, Any]:
        none = {"activation_clamp": float("inf"), "swiglu_limit": 0}
        return {k: none.get(k) if k in CLAMPS else v for k, v in fields.items()}

    return fields_through(edit)


def clamp_left_at_the_default(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return fields_through(lambda f: {k: v for k, v in f.items() if k not in CLAMPS})


def wire_left_at_the_default(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    wires = ("combine_wire", "combine_dtype", "grouped_combine")
    return fields_through(lambda f: {k: v for k, v in f.items() if k not in wires})


def scale_mode_left_at_the_default(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return fields_through(lambda f: {k: v for k, v in f.items() if k != "fp8_scale_mode"})


def scale_mode_of_blocks(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    mode = {"fp8_scale_mode": "blockwise"}
    return fields_through(lambda f: f | mode if "fp8_scale_mode" in f else f)


def activation_scales_exchanged(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    """FC2's for FC1's, in the pack."""
    module = sys.modules[kernel.__module__]
    real = module.pack_pull_fp8_per_tensor  # type: ignore[attr-defined]

    def pack(experts: Any, *, fc1_activation_scale: float, fc2_activation_scale: float) -> Any:
        return real(
            experts,
            fc1_activation_scale=fc2_activation_scale,
            fc2_activation_scale=fc1_activation_scale,
        )

    return mock.patch.object(module, "pack_pull_fp8_per_tensor", pack)


def combine_left_to_the_heuristic(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return fields_through(lambda f: {k: v for k, v in f.items() if k != "knobs"})


def tile_left_to_the_kernel(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return fields_through(lambda f: f | {"knobs": None} if "knobs" in f else f)


def overflow_left_at_the_default(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    def edit(fields: dict[str, Any]) -> dict[str, Any]:
        smaller = {"codec_overflow_blocks": fields.get("codec_overflow_blocks", 0) // 4}
        return fields | smaller if "codec_overflow_blocks" in fields else fields

    return fields_through(edit)


@contextlib.contextmanager
def step_through(step: str, **changed: Any) -> Iterator[None]:
    """Keyword arguments of every staging or launch, replaced."""
    real = getattr(flashinfer.Space, step)

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs | changed)

    with mock.patch.object(flashinfer.Space, step, other):
        yield


def greatest_count_kept_back(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return step_through("stage", bucket=None)


def outputs_given_to_the_kernel(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    return step_through("compute", view=False)


def launched_before_staging(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    """Each launch computes what the call before it staged."""
    real = flashinfer.Space.stage

    def late(self: Any, batch: Batch, **kwargs: Any) -> None:
        fresh = dataclasses.replace(
            batch, **{n: getattr(batch, n).clone() for n in ("x", "scales", "ids", "weights")}
        )
        real(self, self.__dict__.setdefault("last", fresh), **kwargs)
        self.last = fresh

    return mock.patch.object(flashinfer.Space, "stage", late)


def empty_slots_weighted(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    """An empty slot's stand-in counts as if the router had chosen it."""

    return batch_through(lambda _, b: {"weights": torch.where(b.weights == 0, 0.5, b.weights)})


def counts_left_unequal(kernel: type[Kernel]) -> contextlib.AbstractContextManager[Any]:
    real = flashinfer.SharedBuffer.inputs
    return mock.patch.object(
        flashinfer.SharedBuffer, "inputs", lambda self, count, tokens: real(self, count, count)
    )


@contextlib.contextmanager
def empty_slots_left_to_the_kernel(kernel: type[Kernel]) -> Iterator[None]:
    with mock.patch.object(
        kernel, "sheet", dataclasses.replace(kernel.sheet, empty_slots="masked")
    ):
        yield


EVERY = tuple(WEIGHTS)
STALE = tuple(name for name in WEIGHTS if BY_NAME[name].sheet.empty_slots == "stale")
MUTANTS: tuple[tuple[Mutant, tuple[str, ...]], ...] = (
    (gate_and_up_swapped, EVERY),
    (scales_of_the_other_half, MEASURED),
    (scales_of_the_next_row_block, MEASURED),
    (activation_scales_exchanged, ("sm90_pull_fp8_tensor",)),
    (experts_shifted_by_one, EVERY),
    (weights_applied_twice, EVERY),
    (empty_slots_counted, tuple(set(EVERY) - set(STALE))),
    (empty_slots_left_to_the_kernel, STALE),
    (empty_slots_weighted, STALE),
    (ids_of_the_next_rank, EVERY),
    (ids_mapped_twice, EVERY),
    # The others read the buffer that staging fills.
    (ids_of_the_wrong_width, ("sm90_push_bf16", "sm90_push_fp8", *MX)),
    (stale_tokens, EVERY),
    (stale_routing, EVERY),
    (activation_scales_of_the_next_token, FED),
    (clamp_dropped, CLAMPED),
    (wire_left_at_the_default, ("sm90_push_bf16", "sm90_push_fp8")),
    (scale_mode_left_at_the_default, ("sm90_pull_fp8",)),
    (scale_mode_of_blocks, ("sm90_pull_fp8_tensor",)),
    (combine_left_to_the_heuristic, ("sm120_mxfp4_split",)),
    (overflow_left_at_the_default, ("sm120_mxfp4_cake",)),
    (tile_left_to_the_kernel, ("sm120_mxfp8",)),
    (launched_before_staging, MX),
    (greatest_count_kept_back, ("sm120_mxfp4_split", "sm120_mxfp4_cake")),
    (outputs_given_to_the_kernel, ("sm120_mxfp4_split",)),
    (counts_left_unequal, ("sm90_standalone_mxfp4", "sm90_standalone_nvfp4")),
)
PAIRS = [(mutant, kernel) for mutant, kernels in MUTANTS for kernel in sorted(kernels)]


@pytest.mark.parametrize(
    ("mutant", "kernel"), PAIRS, ids=[f"{mutant.__name__}-{kernel}" for mutant, kernel in PAIRS]
)
def test_mutant_is_caught(mutant: Mutant, kernel: str) -> None:
    with mutant(BY_NAME[kernel]):
        assert is_caught(case(kernel))


DEFAULT_OF_10 = tuple(n for n in CLAMPED if "fp4" in n and n != "sm120_mxfp4_split")


@pytest.mark.parametrize("kernel", DEFAULT_OF_10)
def test_a_clamp_of_10_by_default_is_not_left_to_an_unclamped_layer(kernel: str) -> None:
    layer = case(kernel, limit=None, gain=256.0)
    assert differences(layer) == []
    with clamp_left_at_the_default(BY_NAME[kernel]):
        assert is_caught(layer)


def test_every_adapter_has_its_mutants() -> None:
    assert {name for name in BY_NAME if name.startswith("sm")} == set(WEIGHTS)
    for kernel in WEIGHTS:
        assert inspect.getmodule(BY_NAME[kernel]) is not None
        assert sum(name == kernel for _, name in PAIRS) >= 8
