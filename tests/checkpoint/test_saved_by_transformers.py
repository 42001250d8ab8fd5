"""Checkpoints that transformers writes: the loaded layer holds what its modules hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megamoe.checkpoint import load, write_demo
from megamoe.errors import BadInput

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
SMALL = {"intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = {
    **BASE,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GLM = {**ROUTED, "head_dim": 32, "first_k_dense_replace": 1}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "image_size": 28,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **BASE, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "head_dim": 32,
    },
    "olmoe": {**BASE, **SMALL, "num_experts": 8},
    "mixtral": {**BASE, **SMALL, "num_local_experts": 8},
    "minimax": {**BASE, **SMALL, "num_local_experts": 8, "head_dim": 32},
    "minimax_m2": {**BASE, **SMALL, "num_local_experts": 8, "head_dim": 32},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, **INDEXER},
    "deepseek_v4": {
        **ROUTED, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 16, "o_lora_rank": 16,
        "o_groups": 2, "mlp_layer_types": ["hash_moe", "moe"], "index_n_heads": 2,
        "index_head_dim": 16, "intermediate_size": 32,
    },
    "glm4_moe": GLM,
    "glm_moe_dsa": {**DEEPSEEK, **INDEXER},
    "mimo_v2_flash": {**ROUTED, "head_dim": 32, "v_head_dim": 16},
    "gpt_oss": {**BASE, **SMALL, "num_local_experts": 8, "head_dim": 32},
    "glm4v_moe": {"text_config": GLM, "vision_config": VISION},
    "glm5_next": {
        "text_config": {
            **ROUTED, **LATENT, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 2, "linear_head_dim": 16, "index_n_heads": 2,
            "index_head_dim": 16, "head_dim": 0,
        },
        "vision_config": VISION,
    },
    "minimax_m3_vl": {
        "text_config": {
            **BASE, **SMALL, "num_local_experts": 8, "head_dim": 32, "dense_intermediate_size": 64,
            "shared_intermediate_size": 32, "rotary_dim": 16,
        },
        "vision_config": VISION,
    },
}  # fmt: skip


def model_of(name: str, fields: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(name, **fields)
    text_only = name not in ("glm4v_moe", "glm5_next", "minimax_m3_vl", "kimi_k25")
    auto = (
        transformers.AutoModelForCausalLM if text_only else transformers.AutoModelForImageTextToText
    )
    torch.manual_seed(0)
    model = auto.from_config(config).to(torch.bfloat16)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
        if buffer_name.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 8, buffer.shape))
    return model


def blocks_of(model: nn.Module) -> dict[int, nn.Module]:
    """The MoE blocks by layer."""
    return {
        int(name.split(".layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if hasattr(module, "experts") and ".layers." in name
    }


def first(module: nn.Module, *names: str) -> Tensor | None:
    """The first of these dotted attributes that the module has."""
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            assert isinstance(found, Tensor)
            return found
    return None


def same(held: Tensor | None, expected: Tensor | None) -> bool:
    if held is None or expected is None:
        return held is expected
    return held.dtype == expected.dtype and torch.equal(held, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_holds_what_the_module_holds(name: str, tmp_path: Path) -> None:
    model = model_of(name, MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    blocks = blocks_of(model)
    assert blocks
    for layer, block in blocks.items():
        weights = load(tmp_path, layer)
        gate_up, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
        if name == "gpt_oss":  # [E, H, 2 I] with alternating columns, and biases
            gate_up = torch.cat([gate_up[..., 0::2], gate_up[..., 1::2]], dim=-1).transpose(1, 2)
            down = down.transpose(1, 2)
            bias = block.experts.gate_up_proj_bias
            assert same(weights.experts.b13, torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=-1))
            assert same(weights.experts.b2, block.experts.down_proj_bias)
        assert same(weights.experts.w13.data, gate_up)
        assert same(weights.experts.w2.data, down)
        router = weights.router
        assert router is not None
        assert same(router.weight, first(block, "gate.weight", "router.weight"))
        assert same(router.bias, first(block, "router.bias"))
        assert same(router.table, first(block, "gate.tid2eid"))
        correction = first(block, "gate.e_score_correction_bias", "e_score_correction_bias")
        assert same(router.correction_bias, correction)
        shared = getattr(block, "shared_experts", None)
        assert (weights.shared is None) == (shared is None)
        if weights.shared is not None and shared is not None:
            both = first(shared, "gate_up_proj.weight")
            if both is None:
                both = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
            assert same(weights.shared.weights.w13.data[0], both)
            assert same(weights.shared.weights.w2.data[0], shared.down_proj.weight)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_the_layout_in_memory_loads_too(name: str, tmp_path: Path) -> None:
    """Experts stacked as [E, 2 I, H], gate rows first, in one tensor per leg."""
    model = model_of(name, MODELS[name])
    model.save_pretrained(tmp_path, save_original_format=False)
    for layer, block in blocks_of(model).items():
        for rank in range(2):
            weights = load(tmp_path, layer, rank=rank, world_size=2).experts
            part = slice(4 * rank, 4 * rank + 4)
            assert same(weights.w13.data, block.experts.gate_up_proj.data[part])
            assert same(weights.w2.data, block.experts.down_proj.data[part])


def test_kimi_k25_as_transformers_names_it_is_refused(tmp_path: Path) -> None:
    """transformers 5.24 saves its layers as "blocks", which no published file does."""
    model = model_of("kimi_k25", {"text_config": DEEPSEEK, "vision_config": VISION})
    model.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"layer 1 is absent, expected mlp\.experts\.\* tensors"):
        load(tmp_path, 1)


def test_the_demo_runs_in_transformers(tmp_path: Path) -> None:
    write_demo(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for layer, block in blocks_of(model).items():
        weights = load(tmp_path, layer)
        assert same(weights.experts.w13.data, block.experts.gate_up_proj.data)
        assert same(weights.experts.w2.data, block.experts.down_proj.data)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = torch.arange(8)[None] % config["vocab_size"]
    made = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert made.shape == (1, 11)
