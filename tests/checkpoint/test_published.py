"""Every published layout loads: bytes as stored, values as ml_dtypes decodes them, the facts."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import published
import pytest
import torch
from published import Published
from torch import Tensor

from megamoe.checkpoint import inspect, load
from megamoe.checkpoint.families import FAMILIES
from megamoe.formats import Quantised, dequantise
from megamoe.problem import MoEWeights, Placement

BUILDERS = {builder.__name__: builder for builder in published.BUILDERS}


@pytest.fixture(params=BUILDERS, scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Published, Path]:
    p = BUILDERS[request.param]()
    return p, p.write(tmp_path_factory.mktemp(request.param))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equal bytes, whatever dtypes and shapes they are seen as."""
    left, right = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(left, right)


def joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors])


def check_values(
    experts: list[tuple[Tensor, Tensor, Tensor]], w13: Quantised, w2: Quantised
) -> None:
    assert torch.equal(dequantise(w13), torch.stack([torch.cat([g, u]) for g, u, _ in experts]))
    assert torch.equal(dequantise(w2), torch.stack([down for _, _, down in experts]))


def test_values_facts_and_router(case: tuple[Published, Path]) -> None:
    p, path = case
    weights = load(path, p.layer)
    check_values(p.experts, weights.experts.w13, weights.experts.w2)
    assert (weights.experts.w13.format, weights.experts.w2.format) == p.formats
    for name, expected in p.facts.items():
        assert attrgetter(name)(weights) == expected, name
    assert weights.router is not None
    for name, tensor in p.router.items():
        held = getattr(weights.router, name)
        assert held.dtype == p.tensors[tensor].dtype
        assert torch.equal(held, p.tensors[tensor])
    for name in {"bias", "correction_bias", "table"} - set(p.router):
        assert getattr(weights.router, name) is None


def test_codes_are_the_bytes_of_the_file(case: tuple[Published, Path]) -> None:
    p, path = case
    weights = load(path, p.layer)
    for expert, (gate, up, down) in enumerate(p.stored):
        for legs, held in (((gate, up), weights.experts.w13), ((down,), weights.experts.w2)):
            for field in ("weight", "weight_packed"):
                if field in legs[0].tensors:
                    stored = joined(m.tensors[field] for m in legs)
                    assert same_bytes(held.data[expert], stored)
            if held.scale is not None:
                name = next(
                    n for n in legs[0].tensors if n in ("weight_scale", "scale", published.INV)
                )
                scales = [m.tensors[name] for m in legs]
                if held.scale.dtype != scales[0].dtype == torch.bfloat16:
                    scales = [s.float() for s in scales]  # exact: the one change ever made
                assert same_bytes(held.scale[expert], joined(scales))
                assert held.row_groups == len(legs)


def test_shared_expert(case: tuple[Published, Path]) -> None:
    p, path = case
    shared = load(path, p.layer).shared
    if p.shared is None:
        assert shared is None
        return
    assert shared is not None
    gate, up, down = p.shared
    check_values([(gate.values, up.values, down.values)], shared.weights.w13, shared.weights.w2)
    assert (shared.weights.w13.format, shared.weights.w2.format) == (gate.format, down.format)
    assert shared.activation == load(path, p.layer).activation


def test_biases(case: tuple[Published, Path]) -> None:
    p, path = case
    experts = load(path, p.layer).experts
    if p.biases is None:
        assert experts.b13 is None
        assert experts.b2 is None
        return
    assert experts.b13 is not None
    assert experts.b2 is not None
    assert torch.equal(experts.b13, p.biases[0])
    assert torch.equal(experts.b2, p.biases[1])


def tensors_of(weights: MoEWeights) -> tuple[Tensor, ...]:
    return weights.experts.tensors


def test_ranks_hold_their_share(case: tuple[Published, Path]) -> None:  # K37
    p, path = case
    whole = tensors_of(load(path, p.layer))
    shares = [tensors_of(load(path, p.layer, rank=r, world_size=3)) for r in range(3)]
    for parts, full in zip(zip(*shares, strict=True), whole, strict=True):
        assert same_bytes(joined(parts), full)


def test_placement_with_replicas_and_gaps(case: tuple[Published, Path]) -> None:
    p, path = case
    count = len(p.experts)
    held = (count - 1, 0, -1, 2, 0)
    placement = Placement(num_experts=count, slots=(tuple(range(count)), held, ()))
    weights = load(path, p.layer, rank=1, placement=placement)
    whole = load(path, p.layer)
    for part, full in zip(tensors_of(weights), tensors_of(whole), strict=True):
        for slot, expert in enumerate(held):
            if expert >= 0:
                assert same_bytes(part[slot], full[expert])
    empty = dequantise(weights.experts.w13)[2]
    assert torch.equal(empty, torch.zeros_like(empty))
    assert load(path, p.layer, rank=2, placement=placement).experts.w13.format == p.formats[0]


def test_single_file_and_inspect_agree(case: tuple[Published, Path], tmp_path: Path) -> None:
    p, path = case
    single = p.write(tmp_path / "single", shards=1)
    (single / "model.safetensors.index.json").unlink()
    for part, full in zip(
        tensors_of(load(single, p.layer)), tensors_of(load(path, p.layer)), strict=True
    ):
        assert same_bytes(part, full)
    record = next(r for r in inspect(path).layers if r.name == str(p.layer))
    assert record.refusal is None
    assert record.moe is not None
    weights = load(path, p.layer)
    assert (record.moe.w13, record.moe.w2) == p.formats
    assert record.moe.activation == weights.activation
    assert record.moe.num_experts == weights.num_experts
    biases = 0 if p.biases is None else sum(b.numel() * 2 for b in p.biases)
    # A BF16 scale per tensor is held in float32.
    widened = 2 * 3 * 8 if p.config["model_type"] == "qwen3_moe" and is_bf16_scalar(p) else 0
    assert record.moe.nbytes == weights.experts.nbytes - biases - widened


def is_bf16_scalar(p: Published) -> bool:
    scales = [t for n, t in p.tensors.items() if n.endswith(".weight_scale")]
    return bool(scales) and scales[0].numel() == 1 and scales[0].dtype == torch.bfloat16


def test_prediction_stages_are_addressed_by_name_and_number(tmp_path: Path) -> None:
    for name, layers in (("deepseek_v3", 2), ("deepseek_v4_mtp", 2)):
        path = BUILDERS[name]().write(tmp_path / name)
        by_name, by_number = load(path, "mtp.0"), load(path, layers)
        for one, other in zip(tensors_of(by_name), tensors_of(by_number), strict=True):
            assert same_bytes(one, other)


def test_every_row_of_the_table_is_built() -> None:
    reached = {builder().facts["family"] for builder in published.BUILDERS}
    assert reached == {family.name for family in FAMILIES}
