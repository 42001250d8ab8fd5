"""Tiny random models of each family that transformers carries, and their MoE blocks.

A case is a row of a table: the transformers classes and the fields of a small config. Weights are
random, but scaled so that FC1 leaves the limit of a clamp on both sides and routers are decided.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.checkpoint import load
from megamoe.problem import MoEWeights

H, EXPERTS, TOP_K, VOCABULARY = 64, 8, 3, 128

ATTENTION = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 32}
DEEPSEEK = {
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
UNGROUPED = DEEPSEEK | {"n_group": 1, "topk_group": 1}
QWEN = {
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
}
MIXTRAL = {
    "intermediate_size": 48,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}


@dataclass(frozen=True)
class Case:
    """model and config: class names in transformers.models.<package>. layer: the MoE layer tested.

    text: the config's part under ``text_config`` where the published model is a wrapper.
    """

    package: str
    model: str
    config: str
    fields: dict[str, Any]
    layer: int = 1
    wrapper: dict[str, Any] = field(default_factory=dict)
    std: float = 2.0  # of FC1's output; of a clamped family its limit, so a sixth lies beyond it

    def __str__(self) -> str:
        return self.package


CASES = (
    Case("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN),
    Case("olmoe", "OlmoeForCausalLM", "OlmoeConfig", QWEN | {"norm_topk_prob": False}),
    Case("mixtral", "MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    Case("minimax", "MiniMaxForCausalLM", "MiniMaxConfig", MIXTRAL),
    Case("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config", MIXTRAL),
    Case(
        "minimax_m3_vl",
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3VLConfig",
        MIXTRAL
        | {"dense_intermediate_size": 96, "shared_intermediate_size": 32, "rotary_dim": 16}
        | {"routed_scaling_factor": 2.0},
        wrapper={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "projector_hidden_size": H,
            "image_token_index": 1,
            "video_token_index": 2,
        },
        std=7.0,
    ),
    Case("gpt_oss", "GptOssForCausalLM", "GptOssConfig", MIXTRAL, std=7.0),
    Case("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig", UNGROUPED),
    Case("glm_moe_dsa", "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", UNGROUPED | LATENT | INDEXER),
    Case("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK | LATENT),
    Case(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        DEEPSEEK | LATENT | INDEXER,
    ),
    Case(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            "moe_intermediate_size": 48,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "n_shared_experts": 1,
            "num_hash_layers": 1,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
        },
        std=10.0,
    ),
    Case(
        "glm5_next",
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        UNGROUPED
        | LATENT
        | INDEXER
        | {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]}
        | {"layer_types": ["linear_attention", "indexed_attention"]}
        | {"linear_head_dim": 16, "linear_num_heads": 4},
        wrapper={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": H,
            },
            "image_token_id": 1,
            "video_token_id": 2,
        },
        std=10.0,
    ),
)
BY_NAME = {case.package: case for case in CASES}


def build(case: Case | str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> nn.Module:
    """The whole model of a case, deterministic, in ``dtype``; correction biases stay float32."""
    case = BY_NAME[case] if isinstance(case, str) else case
    package = f"transformers.models.{case.package}"
    config_class = getattr(
        importlib.import_module(f"{package}.configuration_{case.package}"), case.config
    )
    text = ATTENTION | case.fields | fields
    config = config_class(**({"text_config": text} | case.wrapper if case.wrapper else text))
    model_class = getattr(importlib.import_module(f"{package}.modeling_{case.package}"), case.model)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval().to(dtype)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        _fill(name, parameter, case.std, generator)
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model


def _fill(name: str, tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Random values for embeddings and MoE blocks; all else keeps its initialisation."""
    if name.endswith("tid2eid"):
        rows = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(len(tensor))]
        tensor.copy_(torch.stack(rows))
        return
    if name.endswith("e_score_correction_bias"):
        scale = 0.1
    elif name.endswith("embed_tokens.weight"):
        scale = 2.0  # beside the experts' output, so that a norm after both hides neither
    elif name.endswith((".gate.weight", ".router.weight")):
        scale = 1.5 / H**0.5
    elif name.endswith(("router.bias", "experts.down_proj_bias")):
        scale = 0.5
    elif "experts" in name and name.endswith(("gate_up_proj_bias",)):
        scale = std / 4
    elif "experts" in name and ("gate" in name or "up_proj" in name):
        scale = std / H**0.5
    elif "experts" in name and "down_proj" in name:
        scale = 0.1
    else:
        return
    noise = torch.randn(tensor.shape, generator=generator) * scale
    with torch.no_grad():
        tensor.copy_(noise)


def blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The MoE blocks of the language model by layer."""
    found = {}
    for name, module in model.named_modules():
        if type(getattr(module, "experts", None)).__name__.endswith("Experts"):
            found[int(name.split("layers.")[1].split(".")[0])] = module
    return found


def router_of(block: nn.Module) -> nn.Module:
    return block.router if hasattr(block, "router") else block.gate


def hf_route(
    block: nn.Module, x: Tensor, input_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, ids) of the block's own router, its scaling folded in where it folds it."""
    router = router_of(block)
    with torch.no_grad():
        if type(router).__name__ == "MiniMaxM2TopKRouter":
            return router(x, block.e_score_correction_bias)
        if type(router).__name__ == "DeepseekV4HashRouter":
            return router(x, input_ids)
        return router(x)


def hf_block(block: nn.Module, x: Tensor, input_ids: Tensor | None = None) -> Tensor:
    """The block's output for x [T, H]."""
    with torch.no_grad():
        if "input_ids" in block.forward.__code__.co_varnames:
            out = block(x[None], input_ids)
        else:
            out = block(x[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


@contextlib.contextmanager
def implementation(block: nn.Module, name: str) -> Iterator[None]:
    """Experts run as ``experts_implementation=name`` says."""
    config = block.experts.config
    before = config._experts_implementation_internal
    config._experts_implementation_internal = name
    try:
        yield
    finally:
        config._experts_implementation_internal = before


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, generator=generator).to(dtype)


def save(model: nn.Module, directory: Path) -> Path:
    """The checkpoint that transformers writes: published names, one directory."""
    model.save_pretrained(directory)
    return directory


@functools.cache
def pair(
    package: str,
    dtype: torch.dtype = torch.bfloat16,
    limit: float | None = None,
    layer: int | None = None,
) -> tuple[nn.Module, MoEWeights]:
    """A case's Hugging Face block, and what ``megamoe.load`` makes of its saved checkpoint."""
    case = BY_NAME[package]
    layer = case.layer if layer is None else layer
    model = build(case, dtype, **({} if limit is None else {"swiglu_limit": limit}))
    with tempfile.TemporaryDirectory() as directory:
        weights = load(save(model, Path(directory)), layer)
    return blocks(model)[layer], weights
