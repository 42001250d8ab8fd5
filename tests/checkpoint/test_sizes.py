"""The published sizes: one MoE layer of each model with its real shapes, in sparse files.

Headers are whole and the data are holes, so hundreds of gigabytes take no room. The shapes are
those of the published files, written out; only headers are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megamoe.checkpoint import MoERecord, inspect
from megamoe.checkpoint.files import DTYPES

Shape = tuple[int, ...]
Suffixes = dict[str, tuple[str, Shape]]
HF = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def sparse(file: Path, tensors: dict[str, tuple[str, Shape]]) -> None:
    """A safetensors file of these dtypes and shapes whose data are a hole."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + offset)


@dataclass(frozen=True)
class Model:
    """up, down: the tensors of one expert's gate (and up) projection and of its down projection."""

    config: dict[str, Any]
    layer: int | str
    root: str
    names: tuple[str, str, str]
    experts: int
    up: Suffixes
    down: Suffixes
    rest: dict[str, tuple[str, Shape]]
    expected: dict[str, Any]
    shared: tuple[str, Suffixes, Suffixes] | None = None
    wrap: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, tuple[str, Shape]]]:
        stems = [(f"experts.{e}.", self.names, self.up, self.down) for e in range(self.experts)]
        if self.shared:
            stems.append((f"{self.shared[0]}.", self.names, self.shared[1], self.shared[2]))
        for stem, names, up, down in stems if self.up else []:
            for name, suffixes in zip(names, (up, up, down), strict=True):
                for suffix, kind in suffixes.items():
                    yield f"{self.root}{stem}{name}.{suffix}", kind
        for name, kind in self.rest.items():
            yield self.root + name, kind


def block(rows: int, columns: int, scale: str, suffix: str = "weight_scale_inv") -> Suffixes:
    grid = (math.ceil(rows / 128), math.ceil(columns / 128))
    return {"weight": ("F8_E4M3", (rows, columns)), suffix: (scale, grid)}


def mxfp4(rows: int, columns: int) -> Suffixes:
    return {
        "weight": ("I8", (rows, columns // 2)),
        "scale": ("F8_E8M0", (rows, columns // 32)),
    }


def int4(rows: int, columns: int) -> Suffixes:
    """Without weight_shape, whose values a hole does not have."""
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // 32)),
    }


def nvfp4(rows: int, columns: int) -> Suffixes:
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def bf16(rows: int, columns: int) -> Suffixes:
    return {"weight": ("BF16", (rows, columns))}


SIGMOID = {
    "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
BIAS = "gate.e_score_correction_bias"

DEEPSEEK_V3 = Model(
    config={
        **SIGMOID, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
        "quantization_config": FP8,
    },
    layer=3,
    root="model.layers.3.mlp.",
    names=HF,
    experts=256,
    up={"weight": ("F8_E4M3", (2048, 7168)), "weight_scale_inv": ("F32", (16, 56))},
    down={"weight": ("F8_E4M3", (7168, 2048)), "weight_scale_inv": ("F32", (56, 16))},
    rest={"gate.weight": ("BF16", (256, 7168)), BIAS: ("F32", (256,))},
    shared=("shared_experts", block(2048, 7168, "F32"), block(7168, 2048, "F32")),
    expected={"w13.name": "fp8_block128", "top_k": 8, "nbytes": 256 * 3 * 14683648},
)  # fmt: skip


def deepseek_v4(hidden: int, width: int, experts: int, scaling: float, store: Any) -> Model:
    return Model(
        config={
            "model_type": "deepseek_v4", "hidden_act": "silu", "hidden_size": hidden,
            "moe_intermediate_size": width, "num_hidden_layers": 43, "num_hash_layers": 3,
            "n_routed_experts": experts, "num_experts_per_tok": 6, "n_shared_experts": 1,
            "expert_dtype": "fp4", "swiglu_limit": 10.0, "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": scaling,
            "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "vocab_size": 129280,
        },
        layer=0,
        root="layers.0.ffn.",
        names=W123,
        experts=experts,
        up=store(width, hidden),
        down=store(hidden, width),
        rest={
            "gate.weight": ("BF16", (experts, hidden)),
            "gate.tid2eid": ("I64", (129280, 6)),
        },
        shared=(
            "shared_experts",
            block(width, hidden, "F8_E8M0", "scale"), block(hidden, width, "F8_E8M0", "scale"),
        ),
        expected={"routed_scaling_factor": scaling, "activation.limit": 10.0, "top_k": 6},
    )  # fmt: skip


MODELS = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V4-Flash": deepseek_v4(4096, 2048, 256, 1.5, mxfp4),
    "DeepSeek-V4-Pro": deepseek_v4(7168, 3072, 384, 2.5, mxfp4),
    "DeepSeek-V4-Flash-NVFP4": deepseek_v4(4096, 2048, 256, 1.5, nvfp4),
    "GLM-4.5-Air": Model(
        config={
            **SIGMOID, "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
            "moe_intermediate_size": 1408, "intermediate_size": 10944, "n_routed_experts": 128,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        },
        layer=45, root="model.layers.45.mlp.", names=HF, experts=128,
        up=bf16(1408, 4096), down=bf16(4096, 1408),
        rest={"gate.weight": ("BF16", (128, 4096)), BIAS: ("F32", (128,))},
        shared=("shared_experts", bf16(1408, 4096), bf16(4096, 1408)),
        expected={"w13.name": "bf16", "intermediate_size": 1408},
    ),
    "GLM-5.1-FP8, prediction layer": Model(
        config={
            **SIGMOID, "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "first_k_dense_replace": 3,
            "moe_router_dtype": "float32", "quantization_config": FP8,
        },
        layer="mtp.0", root="model.layers.78.mlp.", names=HF, experts=256,
        up=block(2048, 6144, "F32"), down=block(6144, 2048, "F32"),
        rest={"gate.weight": ("BF16", (256, 6144)), BIAS: ("F32", (256,))},
        shared=("shared_experts", block(2048, 6144, "F32"), block(6144, 2048, "F32")),
        expected={"w13.name": "fp8_block128"},
    ),
    "Qwen3-30B-A3B-FP8": Model(
        config={
            "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048,
            "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "quantization_config": FP8,
        },
        layer=47, root="model.layers.47.mlp.", names=HF, experts=128,
        up={"weight": ("F8_E4M3", (768, 2048)), "weight_scale_inv": ("BF16", (6, 16))},
        down={"weight": ("F8_E4M3", (2048, 768)), "weight_scale_inv": ("BF16", (16, 6))},
        rest={"gate.weight": ("BF16", (128, 2048))},
        expected={"w13.name": "fp8_block128_bf16_scale", "shared": None},
    ),
    "gpt-oss-120b": Model(
        config={
            "model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": 2880,
            "intermediate_size": 2880, "num_hidden_layers": 36, "num_local_experts": 128,
            "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        layer=35, root="model.layers.35.mlp.", names=HF, experts=128, up={}, down={},
        rest={
            "experts.gate_up_proj_blocks": ("U8", (128, 5760, 90, 16)),
            "experts.gate_up_proj_scales": ("U8", (128, 5760, 90)),
            "experts.gate_up_proj_bias": ("BF16", (128, 5760)),
            "experts.down_proj_blocks": ("U8", (128, 2880, 90, 16)),
            "experts.down_proj_scales": ("U8", (128, 2880, 90)),
            "experts.down_proj_bias": ("BF16", (128, 2880)),
            "router.weight": ("BF16", (128, 2880)),
            "router.bias": ("BF16", (128,)),
        },
        expected={"w13.name": "mxfp4", "bias": True, "nbytes": 128 * 8640 * 90 * 17},
    ),
    "Kimi-K2.5": Model(
        config={
            **SIGMOID, "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_hidden_layers": 61,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "moe_layer_freq": 1,
        },
        wrap={"model_type": "kimi_k25"},
        layer=60, root="language_model.model.layers.60.mlp.", names=HF, experts=384,
        up=int4(2048, 7168), down=int4(7168, 2048),
        rest={"gate.weight": ("BF16", (384, 7168)), BIAS: ("F32", (384,))},
        shared=("shared_experts", bf16(2048, 7168), bf16(7168, 2048)),
        expected={"w13.name": "int4_g32", "shared.w13.name": "bf16"},
    ),
    "MiMo-V2.5-Pro": Model(
        config={
            **SIGMOID, "model_type": "mimo_v2", "hidden_size": 6144, "num_hidden_layers": 70,
            "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": None,
            "routed_scaling_factor": None, "moe_layer_freq": [0, *[1] * 69],
            "quantization_config": {**FP8, "ignored_layers": ["o_proj"]},
        },
        layer=69, root="model.layers.69.mlp.", names=HF, experts=384,
        up={"weight": ("F8_E4M3", (2048, 6144)), "weight_scale_inv": ("F32", (16, 48))},
        down={"weight": ("F8_E4M3", (6144, 2048)), "weight_scale_inv": ("F32", (48, 16))},
        rest={"gate.weight": ("F32", (384, 6144)), BIAS: ("F32", (384,))},
        expected={"w13.name": "fp8_block128", "routed_scaling_factor": 1.0, "shared": None},
    ),
    "MiniMax-M2.7": Model(
        config={
            "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072,
            "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 62, "scoring_func": "sigmoid", "use_routing_bias": True,
            "quantization_config": {**FP8, "fmt": "float8_e4m3fn"},
        },
        layer=0, root="model.layers.0.block_sparse_moe.", names=W123, experts=256,
        up=block(1536, 3072, "F32"), down=block(3072, 1536, "F32"),
        rest={"gate.weight": ("F32", (256, 3072)), "e_score_correction_bias": ("F32", (256,))},
        expected={"w13.name": "fp8_block128"},
    ),
    "Mixtral-8x7B": Model(
        config={
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
        },
        layer=31, root="model.layers.31.block_sparse_moe.", names=W123, experts=8,
        up=bf16(14336, 4096), down=bf16(4096, 14336),
        rest={"gate.weight": ("BF16", (8, 4096))},
        expected={"w13.name": "bf16", "nbytes": 8 * 3 * 14336 * 4096 * 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_real_shapes(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    config = {**model.wrap, "text_config": model.config} if model.wrap else model.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    sparse(tmp_path / "model.safetensors", dict(model.tensors()))
    record = next(r for r in inspect(tmp_path).layers if r.name == str(model.layer))
    assert record.refusal is None
    assert record.moe is not None
    assert record.moe.num_experts == model.experts
    assert record.moe.hidden_size == model.config["hidden_size"]
    for path, expected in model.expected.items():
        assert reach(record.moe, path) == expected, path


def reach(record: MoERecord, path: str) -> Any:
    found: Any = record
    for part in path.split("."):
        found = getattr(found, part)
    return found
