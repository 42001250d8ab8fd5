"""A rank reads its share and no more, opens no other rank's shard, and holds little beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import published
import pytest
import torch
from published import Published
from safetensors.torch import save_file

from megamoe.checkpoint import load, write_demo
from megamoe.checkpoint.config import Config
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.layer import find_layer
from megamoe.checkpoint.loading import load_layer
from megamoe.checkpoint.stack import STRIP
from megamoe.problem import MoEWeights, Placement

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "load_share.py"


def counted(
    path: Path, layer: int | str, rank: int, world_size: int, placement: Placement | None = None
) -> tuple[MoEWeights, int]:
    with Files(path) as files:
        weights = load_layer(
            find_layer(files, Config(path), layer), rank=rank, world_size=world_size,
            placement=placement, device=torch.device("cpu"), target=None,
        )  # fmt: skip
        return weights, files.bytes_read


def replicated(weights: MoEWeights) -> int:
    """Router and shared experts: every rank has them whole."""
    router = weights.router
    assert router is not None
    parts = (router.weight, router.bias, router.correction_bias, router.table)
    held = sum(t.numel() * t.element_size() for t in parts if t is not None)
    return held + (weights.shared.weights.nbytes if weights.shared else 0)


@pytest.mark.parametrize("world_size", [1, 4, 8])
@pytest.mark.parametrize(
    "build",
    [
        published.qwen3_moe, published.deepseek_v3, published.deepseek_v4, published.gpt_oss,
        published.qwen3_moe_nvfp4, published.kimi_k25,
    ],
)  # fmt: skip
def test_bytes_asked_are_the_share(build: object, world_size: int, tmp_path: Path) -> None:
    assert callable(build)
    p: Published = build()
    path = p.write(tmp_path)
    for rank in range(world_size):
        weights, asked = counted(path, p.layer, rank, world_size)
        # The packed INT4 form tells its shape once more: two int32 a matrix.
        shapes = 0
        if build is published.kimi_k25:
            shapes = 3 * 8 * weights.experts.count
            if not weights.experts.count:
                shapes = 3 * 8  # read of expert 0, for the format
        assert asked == weights.experts.nbytes + replicated(weights) + shapes


def test_a_replica_is_read_once(tmp_path: Path) -> None:
    p = published.qwen3_moe()
    path = p.write(tmp_path)
    placement = Placement(num_experts=8, slots=((3, 3, -1, 3), tuple(range(8))))
    weights, asked = counted(path, 0, 0, 2, placement)
    assert 4 * (asked - replicated(weights)) == weights.experts.nbytes


def test_shards_of_other_ranks_are_not_opened(tmp_path: Path) -> None:
    """One shard per expert: those of other ranks may be absent altogether."""
    p = published.deepseek_v3()
    where: dict[str, str] = {}
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in p.tensors.items():
        expert = name.partition(".experts.")[2].split(".")[0]
        shard = f"expert-{expert}.safetensors" if expert else "rest.safetensors"
        shards.setdefault(shard, {})[name] = tensor.contiguous()
        where[name] = shard
    whole = load(p.write(tmp_path / "whole"), p.layer)
    for rank in range(4):
        path = tmp_path / f"rank-{rank}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(p.config))
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        for shard in ("rest", f"expert-{2 * rank}", f"expert-{2 * rank + 1}"):
            save_file(shards[f"{shard}.safetensors"], path / f"{shard}.safetensors")
        weights = load(path, p.layer, rank=rank, world_size=4)
        assert weights.experts.count == 2
        data = whole.experts.w13.data[2 * rank : 2 * rank + 2]
        assert torch.equal(weights.experts.w13.data.view(torch.uint8), data.view(torch.uint8))


def test_a_rank_without_experts_has_biases_of_the_stored_dtype(tmp_path: Path) -> None:
    p = published.gpt_oss()
    for leg in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{leg}_bias"
        p.tensors[name] = p.tensors[name].float()
    path = p.write(tmp_path)
    for rank in (0, 5):
        weights = load(path, 0, rank=rank, world_size=6)
        assert any(e >= 0 for e in weights.placement.slots[rank]) == (rank == 0)
        for bias in (weights.experts.b13, weights.experts.b2):
            assert bias is not None
            assert bias.dtype == torch.float32
            assert len(bias) == weights.experts.count


def one_rank(path: Path, world_size: int, *options: str) -> dict[str, int]:
    """The benchmark's measurement, in a process of its own.

    With a fixed threshold glibc gives freed tensors back at once: what it would keep is not ours.
    """
    one = json.dumps([str(path), 0, world_size])
    fixed = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--one", one, *options],
        capture_output=True, text=True, env={**os.environ, **fixed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made: dict[str, int] = json.loads(done.stdout)
    return made


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("options", [(), ("--quantise", "mxfp4"), ("--quantise", "fp8_block128")])
def test_peak_memory_is_the_share_and_one_expert(options: tuple[str, ...], tmp_path: Path) -> None:
    """A layer of 75 MB: beside the share, matrices on their way and the quantiser's strip."""
    hidden, width, experts = 1024, 384, 32
    path = write_demo(
        tmp_path, hidden_size=hidden, intermediate_size=width, num_experts=experts, layers=1
    )
    expert = 3 * hidden * width
    for world_size in (1, 4):
        row = one_rank(path, world_size, *options)
        assert row["share"] > experts // world_size * expert // 2
        beside = row["memory"] - row["share"]
        assert beside <= 2 * expert + (24 * 8 * STRIP * hidden if options else 0), row
