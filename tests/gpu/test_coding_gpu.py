"""The fused coding of activations on a GPU: the bits of ``formats.quantise``, for every rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import test_coding as on_cpu

from megamoe.formats import E4M3, FP8_1X128, FP8_ROW, MXFP8, Format, quantise
from megamoe.kernels import coding
from megamoe.kernels.operands import coded, mx_coded

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", on_cpu.FORMATS, ids=str)
DEVICE = torch.device("cuda", 0)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """``x`` on the GPU with its strides and offset, which a plain copy would drop."""
    whole = x.untyped_storage().nbytes() // x.itemsize
    base = torch.as_strided(x, (whole,), (1,), 0).to(DEVICE)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def test_it_serves_here() -> None:
    assert coding.serves(torch.zeros(1, 32, dtype=torch.bfloat16, device=DEVICE))


@FORMATS
def test_bits(fmt: Format) -> None:
    wrong = []
    for name, x in on_cpu.cases():
        want = quantise(x, fmt)
        codes, scales = coding.code(on_device(x), fmt)
        said = on_cpu.difference((codes.cpu(), scales.cpu()), want)
        if said:
            wrong.append(f"{name}: {said}")
    assert not wrong, "\n".join(wrong)


@FORMATS
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_bits_of_layers(fmt: Format, rows: int) -> None:
    x = torch.randn(rows, 7168, generator=torch.Generator().manual_seed(rows))
    x = (x * torch.logspace(-30, 30, rows)[:, None]).bfloat16()
    want = quantise(x.to(DEVICE), fmt)
    assert on_cpu.difference(coding.code(x.to(DEVICE), fmt), want) == ""


@pytest.mark.parametrize("fmt", [FP8_ROW, FP8_1X128, MXFP8], ids=str)
def test_the_adapters_take_it(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = coding.code
    monkeypatch.setattr(coding, "code", lambda *args: calls.append(args) or fused(*args))
    x = on_cpu.patterns(64, 1024).to(DEVICE)

    def taken() -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = mx_coded(x) if fmt is MXFP8 else coded(x, fmt)
        return codes, scales.view(torch.uint8) if fmt is MXFP8 else scales

    got = taken()
    assert len(calls) == 1
    assert on_cpu.difference(got, quantise(x, fmt)) == ""
    monkeypatch.setattr(coding, "serves", lambda x: False)
    codes, scales = taken()
    assert len(calls) == 1
    # torch's own operations give the same, but for the sign and payload of NaN.
    assert torch.equal(scales.float().nan_to_num(-1.0), got[1].float().nan_to_num(-1.0))
    assert torch.equal(codes.float().nan_to_num(512.0), got[0].float().nan_to_num(512.0))


@pytest.mark.parametrize("fmt", [FP8_ROW, FP8_1X128, MXFP8], ids=str)
def test_a_graph_replays_it(fmt: Format) -> None:
    x = on_cpu.patterns(8, 4096).to(DEVICE)
    want = quantise(x, fmt)
    assert want.scale is not None
    codes = torch.empty(x.shape, dtype=E4M3.dtype, device=DEVICE)
    scales = torch.empty_like(want.scale)
    coding.code(x, fmt)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coding.code(x, fmt, codes=codes, scales=scales)
        fresh = coding.code(x, fmt)
    for start in (0, 30_000):
        x.copy_(on_cpu.patterns(8, 4096, start))
        graph.replay()
        want = quantise(x, fmt)
        assert on_cpu.difference((codes, scales), want) == ""
        assert on_cpu.difference(fresh, want) == ""


def test_it_reads_nothing_back() -> None:
    x = torch.zeros(8, 4096, dtype=torch.bfloat16, device=DEVICE)
    coding.code(x, FP8_1X128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        coding.code(x, FP8_1X128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
