"""``quantise=`` on loading: the quantiser's result, matrix by matrix, and the family says so."""

from __future__ import annotations

from pathlib import Path

import published
import pytest
import torch
from torch import Tensor

from megamoe.checkpoint import load
from megamoe.formats import CATALOGUE, Format, Quantised, dequantise, quantise

FORMATS = [fmt for fmt in CATALOGUE if fmt.element.bits <= 8]


def halves_in(values: Tensor, fmt: Format, groups: int) -> Quantised:
    """The whole tensor at once, each projection by itself, under one global scale an expert."""
    factor = None
    if fmt.global_scale != "none":
        amax = [quantise(expert, fmt).global_scale for expert in values]
        factor = torch.stack([f for f in amax if f is not None]).repeat(1, groups)
    return quantise(values, fmt, row_groups=groups, global_scale=factor)


def same(one: Quantised, other: Quantised) -> bool:
    return one.format == other.format and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("build", [published.qwen3_moe, published.gpt_oss_bf16])
def test_as_the_quantiser_makes_it(build: object, fmt: Format, tmp_path: Path) -> None:
    assert callable(build)
    p = build()
    path = p.write(tmp_path)
    plain = load(path, p.layer).experts
    weights = load(path, p.layer, quantise=fmt.name)
    assert weights.family == f"{p.facts['family']}, {fmt.name} on loading"
    made = weights.experts
    assert made.w13.row_groups == 2
    assert same(made.w13, halves_in(plain.w13.data, fmt, 2))
    assert same(made.w2, halves_in(plain.w2.data, fmt, 1))
    share = load(path, p.layer, quantise=fmt, rank=1, world_size=2).experts
    assert same(share.w13, made.w13[len(plain.w13.data) // 2 :])


def test_router_shared_experts_and_biases_stay_as_stored(tmp_path: Path) -> None:
    p = published.minimax_m3()
    path = p.write(tmp_path)
    plain, made = load(path, 0), load(path, 0, quantise="mxfp8")
    assert plain.shared is not None
    assert made.shared is not None
    assert same(made.shared.weights.w13, plain.shared.weights.w13)
    assert plain.router is not None
    assert made.router is not None
    assert torch.equal(made.router.weight, plain.router.weight)
    oss = published.gpt_oss_bf16()
    path = oss.write(tmp_path / "oss")
    assert oss.biases is not None
    held = load(path, 0, quantise="nvfp4").experts.b13
    assert held is not None
    assert torch.equal(held, oss.biases[0])


def test_float32_is_rounded_once(tmp_path: Path) -> None:
    """Through BF16 first, a value just above a tie would fall to the other side."""
    p = published.qwen3_moe_f32()
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    p.tensors[name][0, :2] = torch.tensor([6.0, 2.5 + 2.0**-20])
    p.tensors[name][0, 2:32] = 0
    made = load(p.write(tmp_path), 0, quantise="mxfp4").experts.w13
    assert dequantise(made)[0, 0, :2].tolist() == [6.0, 3.0]
