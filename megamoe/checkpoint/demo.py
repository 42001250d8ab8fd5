"""A small checkpoint in the layout of Qwen3-MoE, the same bytes on every machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.checkpoint.files import INDEX


def write_demo(
    path: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 256,
    intermediate_size: int = 128,
    num_experts: int = 8,
    top_k: int = 2,
    layers: int = 2,
    vocabulary: int = 256,
) -> Path:
    """Write config.json, an index and one shard per layer to ``path``; returns the directory.

    Whole enough for transformers to run. Weights are sums of four 8-bit draws, rounded to BF16.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    draw = _Draws(seed)
    heads, head = 4, 64
    shards: dict[str, dict[str, Tensor]] = {}
    outer = shards.setdefault(_shard(0, layers), {})
    outer["model.embed_tokens.weight"] = draw(vocabulary, hidden_size, deviation_bits=0)
    outer["model.norm.weight"] = torch.ones(hidden_size, dtype=torch.bfloat16)
    outer["lm_head.weight"] = draw(vocabulary, hidden_size, deviation_bits=4)
    for layer in range(layers):
        shard = shards.setdefault(_shard(layer, layers), {})
        prefix = f"model.layers.{layer}."
        for name, size in (
            ("input_layernorm", hidden_size),
            ("post_attention_layernorm", hidden_size),
            ("self_attn.q_norm", head),
            ("self_attn.k_norm", head),
        ):
            shard[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj"):
            shard[f"{prefix}self_attn.{name}.weight"] = draw(heads * head, hidden_size)
        shard[f"{prefix}self_attn.o_proj.weight"] = draw(hidden_size, heads * head)
        shard[f"{prefix}mlp.gate.weight"] = draw(num_experts, hidden_size)
        for expert in range(num_experts):
            stem = f"{prefix}mlp.experts.{expert}."
            shard[f"{stem}gate_proj.weight"] = draw(intermediate_size, hidden_size)
            shard[f"{stem}up_proj.weight"] = draw(intermediate_size, hidden_size)
            shard[f"{stem}down_proj.weight"] = draw(hidden_size, intermediate_size)
    for name, tensors in shards.items():
        save_file(tensors, directory / name, metadata={"format": "pt"})
    where = {tensor: name for name, tensors in shards.items() for tensor in sorted(tensors)}
    size = sum(t.numel() * t.element_size() for s in shards.values() for t in s.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    }
    _write_json(directory / "config.json", config)
    return directory


def _shard(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class _Draws:
    """BF16 weights from integer draws only, so that no library's float generator is asked."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, *, deviation_bits: int = 5) -> Tensor:
        """Bell-shaped around 0, of standard deviation 0.58 * 2 ** -deviation_bits."""
        shape = (4, rows, columns)
        draws = torch.randint(0, 256, shape, generator=self.generator, dtype=torch.int64)
        centred = draws.sum(dim=0) - 510
        # Below 2 ** 9 in magnitude: exact in float32, so one rounding to BF16.
        return (centred.to(torch.float32) * 2.0 ** (-8 - deviation_bits)).to(torch.bfloat16)
