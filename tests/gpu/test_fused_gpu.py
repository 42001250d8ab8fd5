"""Staging in one launch on a GPU: the bits of ``formats.quantise`` and of torch's operations."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import test_fused as on_cpu

from megamoe.formats import FP8_1X128, FP8_ROW, MXFP8, PLAIN_BF16, Format, quantise
from megamoe.kernels import fused
from megamoe.kernels.base import Batch
from megamoe.kernels.staging import Staging

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", on_cpu.FORMATS, ids=str)
DEVICE = torch.device("cuda", 0)


def test_it_serves_here() -> None:
    assert fused.serves(torch.zeros(1, 32, dtype=torch.bfloat16, device=DEVICE))


@FORMATS
def test_bits(fmt: Format) -> None:
    wrong = []
    for name, x in on_cpu.cases():
        if fmt.block[1] == 0 and x.shape[1] not in (100, 256, 260, 257, 1024):
            continue  # each width of rows compiles another kernel
        codes, scales = on_cpu.coded(on_cpu.on_device(x, DEVICE), fmt)
        said = on_cpu.difference((codes.cpu(), scales.cpu()), on_cpu.wanted(x, fmt))
        if said:
            wrong.append(f"{name}: {said}")
    assert not wrong, "\n".join(wrong)


@FORMATS
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_bits_of_layers(fmt: Format, rows: int) -> None:
    x = torch.randn(rows, 7168, generator=torch.Generator().manual_seed(rows))
    x = (x * torch.logspace(-30, 30, rows)[:, None]).bfloat16().to(DEVICE)
    assert on_cpu.difference(on_cpu.coded(x, fmt), on_cpu.wanted(x, fmt)) == ""


def test_calls_are_those_of_torch() -> None:
    wrong = []
    for call in on_cpu.calls(48):  # many constants, each of which compiles
        here = call.on(DEVICE)
        for said in (
            on_cpu.unlike(here.staged(), here.torch_path()),
            on_cpu.unlike(_on_host(here.staged()), call.torch_path()),
        ):
            if said:
                wrong.append(f"{call.name}: {said}")
    assert not wrong, "\n".join(wrong)


def _on_host(staged: tuple[Staging, Batch]) -> tuple[Staging, Batch]:
    plan, into = staged
    names = ("x", "ids", "weights", "scales")
    moved = {name: getattr(into, name) for name in names if getattr(into, name) is not None}
    moved = {name: tensor.cpu() for name, tensor in moved.items()}
    return dataclasses.replace(plan, sticky=plan.sticky.cpu()), dataclasses.replace(into, **moved)


class Layer:
    """A decode step's inputs and buffers for one format: 8 of 64 tokens, 4096 columns, 6 of 128."""

    def __init__(self, fmt: Format, *, capacity: int = 64, count: int = 8) -> None:
        sticky = torch.zeros(1, dtype=torch.bool, device=DEVICE)
        replicas = torch.arange(256, device=DEVICE).view(128, 2)
        self.plan = Staging(
            num_experts=128,
            rank=1,
            sticky=sticky,
            replicas=replicas,
            counts=torch.arange(128, device=DEVICE) % 2 + 1,
            fmt=fmt,
            stale=True,
        )
        self.x = torch.empty(count, 4096, dtype=torch.bfloat16, device=DEVICE)
        self.ids = torch.empty(count, 6, dtype=torch.int32, device=DEVICE)
        self.weights = torch.empty(count, 6, device=DEVICE)
        self.fill(0)
        self.into = self.buffers(capacity)

    def fill(self, seed: int) -> None:
        draw: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        self.x.copy_(torch.randn(self.x.shape, **draw))
        self.ids.copy_(torch.randint(-1, 128, self.ids.shape, **draw))
        self.ids[seed % len(self.ids)] = -1
        self.weights.copy_(torch.rand(self.weights.shape, **draw))

    def buffers(self, capacity: int) -> Batch:
        def empty(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(capacity, columns, device=DEVICE).to(dtype)

        fmt = self.plan.fmt
        width = fmt.block[1] or 4096
        scales = None if fmt.scale is None else empty(4096 // width, fmt.scale.dtype)
        return Batch(
            x=empty(4096, fmt.element.dtype),
            ids=empty(6, torch.int64),
            weights=empty(6, torch.float32),
            scales=scales,
            count=len(self.x),
            tokens=capacity,
        )

    def stage(self) -> None:
        fused.stage(self.plan, self.x, self.ids, self.weights, self.into, factor=2.5, first=3)

    def check(self) -> None:
        """What was staged is what torch's own operations stage now."""
        into = self.buffers(len(self.into.ids))
        fused_serves, fused.serves = fused.serves, lambda x: False
        try:
            self.plan(self.x, self.ids, self.weights, into, factor=2.5, first=3)
        finally:
            fused.serves = fused_serves
        assert on_cpu.unlike((self.plan, self.into), (self.plan, into)) == ""


ONE_OF_EACH = pytest.mark.parametrize("fmt", [PLAIN_BF16, FP8_ROW, FP8_1X128, MXFP8], ids=str)


@ONE_OF_EACH
def test_a_plan_takes_it(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls, stage = Layer(fmt), [], fused.stage
    monkeypatch.setattr(fused, "stage", lambda *a, **k: calls.append(a) or stage(*a, **k))
    layer.plan(layer.x, layer.ids, layer.weights, layer.into, factor=2.5, first=3)
    assert len(calls) == 1
    layer.check()


@ONE_OF_EACH
def test_a_graph_replays_it(fmt: Format) -> None:
    layer = Layer(fmt)
    layer.stage()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.stage()
    for seed in (1, 2):
        layer.fill(seed)
        graph.replay()
        layer.check()


@ONE_OF_EACH
def test_it_reads_nothing_back(fmt: Format) -> None:  # K65
    layer = Layer(fmt)
    layer.stage()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.stage()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ONE_OF_EACH
def test_a_call_is_one_launch(fmt: Format) -> None:
    layer = Layer(fmt, capacity=4096)
    layer.stage()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        layer.stage()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [e.name for e in profile.events() if e.device_type == on_device]
    assert len(names) == 1, names
    layer.check()


def test_other_counts_compile_nothing() -> None:
    """A capture after the first call must not meet the compiler."""
    layer = Layer(FP8_1X128)
    layer.stage()
    kernel = fused._kernel()
    compiled = {id(k) for k in _compiled(kernel)}
    assert compiled
    for count, first, capacity, start in (
        (1, 0, 64, 0),
        (0, 1, 1, 0),
        (3, 16, 7, 1),
        (8, 1, 16, 0),
    ):
        x, ids, weights = (
            tensor[start : start + count] for tensor in (layer.x, layer.ids, layer.weights)
        )
        into = dataclasses.replace(layer.buffers(capacity), count=len(x))
        fused.stage(layer.plan, x, ids, weights, into, first=first)
    assert {id(k) for k in _compiled(kernel)} == compiled


def _compiled(kernel: Any) -> list[Any]:
    """Every compiled kernel of a JIT function, on this device."""
    return list(kernel.device_caches[torch.cuda.current_device()][0].values())


def test_nothing_to_stage() -> None:
    layer = Layer(FP8_1X128, count=8)
    into = dataclasses.replace(layer.into, count=0)
    fused.stage(layer.plan, layer.x[:0], layer.ids[:0], layer.weights[:0], into)
    assert bool((into.ids == -1).all())
    assert not into.weights.any()
    assert not into.x.float().any()
    assert torch.equal(quantise(layer.x, FP8_1X128).data[:0].float(), into.x[:0].float())
