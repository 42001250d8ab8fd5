"""The demo checkpoint is the same bytes everywhere, and loads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megamoe.checkpoint import load, write_demo

GOLDEN = "f84448700cde94e53713d32a7e511b10ce2de2b502c2f423581296876a2459d2"


def digest(path: Path) -> str:
    """Of all tensors by name, not of the files: safetensors may order or pad them differently."""
    made = hashlib.sha256()
    tensors = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(bytes(tensors[name].view(torch.uint8).flatten().tolist()))
    return made.hexdigest()


def test_bytes(tmp_path: Path) -> None:
    assert digest(write_demo(tmp_path)) == GOLDEN


def test_seed_and_sizes(tmp_path: Path) -> None:
    write_demo(tmp_path / "a", seed=1, num_experts=5, top_k=3, layers=3, intermediate_size=64)
    assert digest(tmp_path / "a") != GOLDEN
    weights = load(tmp_path / "a", 2, rank=1, world_size=2)
    assert weights.experts.w13.shape == (2, 128, 256)
    assert weights.router is not None
    assert weights.router.top_k == 3


def test_draws_are_bell_shaped(tmp_path: Path) -> None:
    """Sums of four draws of a byte: no value beyond +-510 steps, and most near zero."""
    values = load(write_demo(tmp_path), 0).experts.w13.data.float() * 2.0**13
    assert values.abs().max() <= 512  # 510, rounded to BF16
    quarters = torch.tensor([(values.abs() < limit).float().mean() for limit in (128, 256)])
    assert quarters[0] > 0.5
    assert quarters[1] > 0.9


def test_index_names_every_tensor(tmp_path: Path) -> None:
    path = write_demo(tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    held = {k for file in path.glob("*.safetensors") for k in load_file(file)}
    assert set(index["weight_map"]) == held
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0 < index["metadata"]["total_size"] < size
