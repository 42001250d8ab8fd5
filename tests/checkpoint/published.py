"""Tiny random checkpoints in the layouts that the models' publishers use, one builder each.

Names, dtypes and shapes are written out here from the published files, not taken from the table
under test. Sizes are small and awkward: I is no multiple of 128 where the format allows it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stores
import torch
from safetensors.torch import save_file
from stores import Store, Stored, Tensors
from torch import Tensor

from megamoe.formats import Format

HF = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
OSS_ALPHA = 1.7020000219345093


@dataclass
class Published:
    """A checkpoint before it is written, and what its MoE layer ``layer`` holds."""

    config: dict[str, Any]
    layer: int | str
    facts: dict[str, Any]  # of the MoEWeights; "router.x" and "activation.x" reach into it
    tensors: Tensors = field(default_factory=dict)
    experts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    stored: list[tuple[Stored, Stored, Stored]] = field(default_factory=list)
    shared: tuple[Stored, Stored, Stored] | None = None
    formats: tuple[Format, Format] | None = None
    router: dict[str, str] = field(default_factory=dict)  # Router field: tensor name
    biases: tuple[Tensor, Tensor] | None = None  # [E, 2 I] gates first, [E, H]

    def __post_init__(self) -> None:
        self.config = copy.deepcopy(self.config)  # tests spoil it

    def write(self, directory: Path, shards: int = 3) -> Path:
        """config.json, shards that cut every layer anywhere, and their index."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        files: dict[str, Tensors] = {}
        where = {}
        for number, (name, tensor) in enumerate(self.tensors.items()):
            shard = f"model-{number % shards + 1:05d}-of-{shards:05d}.safetensors"
            files.setdefault(shard, {})[name] = tensor.contiguous()
            where[name] = shard
        for shard, tensors in files.items():
            save_file(tensors, directory / shard)
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory


class Random:
    """Draws of weights, seeded by the checkpoint's name."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * 0.05).to(dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)


def ffn(
    draw: Random,
    tensors: Tensors,
    stem: str,
    names: tuple[str, str, str],
    hidden: int,
    width: int,
    store: Store,
    down_store: Store | None = None,
) -> tuple[Stored, Stored, Stored]:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    made = []
    for name, shape in zip(names, shapes, strict=True):
        stored = (down_store or store if name == names[2] else store)(draw(*shape))
        tensors.update({f"{stem}{name}.{k}": v for k, v in stored.tensors.items()})
        made.append(stored)
    return made[0], made[1], made[2]


def moe(
    p: Published,
    draw: Random,
    block: str,
    names: tuple[str, str, str],
    hidden: int,
    width: int,
    experts: int,
    store: Store,
    *,
    shared: tuple[str, tuple[str, str, str], int, Store] | None = None,
    keep: bool = True,
) -> None:
    """The experts of a block, and its shared ones; ``keep``: this is the layer that is loaded."""
    for expert in range(experts):
        made = ffn(draw, p.tensors, f"{block}experts.{expert}.", names, hidden, width, store)
        if keep:
            p.stored.append(made)
            p.experts.append((made[0].values, made[1].values, made[2].values))
            p.formats = (made[0].format, made[2].format)
    if shared is not None:
        name, shared_names, shared_width, shared_store = shared
        made = ffn(
            draw, p.tensors, f"{block}{name}.", shared_names, hidden, shared_width, shared_store
        )
        if keep:
            p.shared = made


def router(
    p: Published, draw: Random, fields: Mapping[str, tuple[str, tuple[int, ...], torch.dtype]]
) -> None:
    for field_name, (name, shape, dtype) in fields.items():
        p.tensors[name] = draw(*shape, dtype=dtype)
        p.router[field_name] = name


BF16, F32 = torch.bfloat16, torch.float32


# --- DeepSeek-V3 and what shares its layout -------------------------------------------------------


def deepseek_like(
    name: str,
    store: Store,
    *,
    prefix: str = "model.layers.",
    hidden: int = 256,
    width: int = 192,
    experts: int = 8,
    shared_store: Store | None = None,
    shared_count: int = 1,
    gate_dtype: torch.dtype = BF16,
    mtp: bool = True,
    wrap: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **config: Any,
) -> Published:
    """Layer 0 dense, layer 1 with experts, layer 2 the prediction stage (with experts)."""
    draw = Random(name)
    values: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": 512,
        "moe_intermediate_size": width,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": shared_count,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "hidden_act": "silu",
        "vocab_size": 64,
        **config,
    }
    p = Published(
        config=values if wrap is None else {**wrap, "text_config": values},
        layer=1,
        facts={
            "family": "deepseek_v3",
            "routed_scaling_factor": 2.5,
            "scale_at": "weights",
            "weight_at": "combine",
            "activation.limit": None,
            "activation.alpha": 1.0,
            "activation.up_offset": 0.0,
            "router.scoring": "sigmoid",
            "router.top_k": 4,
            "router.renormalise": True,
            "router.epsilon": 1e-20,
            "router.num_groups": 4,
            "router.top_groups": 2,
            "router.bias": None,
            "router.table": None,
            **(facts or {}),
        },
    )
    ffn(draw, p.tensors, f"{prefix}0.mlp.", HF, hidden, 512, shared_store or store)
    for layer in (1, 2) if mtp else (1,):
        block = f"{prefix}{layer}.mlp."
        moe(
            p, draw, block, HF, hidden, width, experts, store,
            shared=("shared_experts", HF, width * shared_count, shared_store or store)
            if shared_count else None,
            keep=layer == 1,
        )  # fmt: skip
        fields = {
            "weight": (f"{block}gate.weight", (experts, hidden), gate_dtype),
            "correction_bias": (f"{block}gate.e_score_correction_bias", (experts,), F32),
        }
        if layer == 1:
            router(p, draw, fields)
        else:
            router(Published(config={}, layer=0, facts={}, tensors=p.tensors), draw, fields)
    p.tensors[f"{prefix}1.input_layernorm.weight"] = torch.ones(hidden, dtype=BF16)
    return p


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
ONE_GROUP_FACTS = {"router.num_groups": 1, "router.top_groups": 1}
INV = "weight_scale_inv"


def deepseek_v3() -> Published:
    return deepseek_like("deepseek_v3", stores.block(INV), quantization_config=FP8_CONFIG)


def deepseek_v32() -> Published:
    return deepseek_like(
        "deepseek_v32", stores.block(INV), model_type="deepseek_v32", quantization_config=FP8_CONFIG
    )


def kimi_k2() -> Published:
    return deepseek_like(
        "kimi_k2", stores.block(INV), model_type="kimi_k2", experts=12,
        routed_scaling_factor=2.827, quantization_config=FP8_CONFIG, mtp=False, **ONE_GROUP,
        facts={"family": "kimi_k2", "routed_scaling_factor": 2.827, **ONE_GROUP_FACTS},
    )  # fmt: skip


def kimi_k25() -> Published:
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return deepseek_like(
        "kimi_k25", stores.int4, prefix="language_model.model.layers.", model_type="kimi_k2",
        shared_store=stores.plain(), mtp=False, quantization_config=quantization, **ONE_GROUP,
        wrap={"model_type": "kimi_k25", "quantization_config": quantization},
        facts={"family": "kimi_k2", **ONE_GROUP_FACTS},
    )  # fmt: skip


def glm4_moe() -> Published:
    return deepseek_like(
        "glm4_moe", stores.plain(), model_type="glm4_moe", routed_scaling_factor=1.0, **ONE_GROUP,
        facts={"family": "glm4_moe", "routed_scaling_factor": 1.0, **ONE_GROUP_FACTS},
    )  # fmt: skip


def glm4_moe_fp8(scale: str = "f32") -> Published:
    return deepseek_like(
        f"glm4_moe_fp8_{scale}", stores.channel(scale), model_type="glm4_moe",
        quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"},
        facts={"family": "glm4_moe", **ONE_GROUP_FACTS}, **ONE_GROUP,
    )  # fmt: skip


def glm4v_moe() -> Published:
    return deepseek_like(
        "glm4v_moe", stores.plain(), prefix="model.language_model.layers.",
        model_type="glm4v_moe_text", wrap={"model_type": "glm4v_moe"}, mtp=False, **ONE_GROUP,
        facts={"family": "glm4_moe", **ONE_GROUP_FACTS},
    )  # fmt: skip


def glm_moe_dsa() -> Published:
    return deepseek_like(
        "glm_moe_dsa", stores.block(INV), model_type="glm_moe_dsa", quantization_config=FP8_CONFIG,
        moe_router_dtype="float32", facts={"family": "glm_moe_dsa", **ONE_GROUP_FACTS}, **ONE_GROUP,
    )  # fmt: skip


def glm_moe_dsa_nvfp4() -> Published:
    return deepseek_like(
        "glm_moe_dsa_nvfp4", stores.nvfp4_modelopt, model_type="glm_moe_dsa",
        shared_store=stores.plain(), mtp=False,
        quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"},
        facts={"family": "glm_moe_dsa", **ONE_GROUP_FACTS}, **ONE_GROUP,
    )  # fmt: skip


def glm5_next() -> Published:
    return deepseek_like(
        "glm5_next", stores.block(INV), model_type="glm5_next_text",
        wrap={"model_type": "glm5_next"}, prefix="model.language_model.layers.",
        swiglu_limit=10.0, quantization_config=FP8_CONFIG, **ONE_GROUP,
        facts={"family": "glm5_next", "activation.limit": 10.0, **ONE_GROUP_FACTS},
    )  # fmt: skip


def mimo_v2() -> Published:
    p = deepseek_like(
        "mimo_v2", stores.block(INV), model_type="mimo_v2", shared_count=0, gate_dtype=F32,
        mtp=False, routed_scaling_factor=None, n_shared_experts=None, moe_layer_freq=[0, 1],
        quantization_config={**FP8_CONFIG, "ignored_layers": ["o_proj"]}, **ONE_GROUP,
        facts={"family": "mimo_v2", "routed_scaling_factor": 1.0, **ONE_GROUP_FACTS},
    )  # fmt: skip
    ffn(Random("mimo"), p.tensors, "model.mtp.layers.0.mlp.", HF, 256, 512, stores.block(INV))
    return p


# --- DeepSeek-V4 ----------------------------------------------------------------------------------


def deepseek_v4(
    name: str = "deepseek_v4",
    store: Store | None = None,
    *,
    layer: int | str = 1,
    block: int = 128,
    stage_experts: int | None = None,
    wrap: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    quantization: dict[str, Any] | None = None,
    **config: Any,
) -> Published:
    """Layer 0 hash-routed, layer 1 not, one prediction stage; no prefix "model."."""
    draw, hidden, width, experts = Random(name), 256, 192, 8
    values: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_hash_layers": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 64,
        **config,
    }
    quant = {**FP8_CONFIG, "scale_fmt": "ue8m0", "weight_block_size": [block, block]}
    values["quantization_config"] = {**quant, **(quantization or {})}
    p = Published(
        config=values if wrap is None else {**wrap, "text_config": values},
        layer=layer,
        facts={
            "family": "deepseek_v4",
            "routed_scaling_factor": 1.5,
            "scale_at": "weights",
            "weight_at": "fc2_input",
            "activation.limit": 10.0,
            "activation.alpha": 1.0,
            "activation.up_offset": 0.0,
            "router.scoring": "sqrtsoftplus",
            "router.top_k": 3,
            "router.renormalise": True,
            "router.epsilon": 1e-20,
            "router.num_groups": 1,
            "router.bias": None,
            **(facts or {}),
        },
    )
    shared = stores.block("scale", "e8m0", block)
    for prefix, key in (("layers.0.", 0), ("layers.1.", 1), ("mtp.0.", "mtp.0")):
        count = stage_experts if stage_experts and key == "mtp.0" else experts
        moe(
            p, draw, f"{prefix}ffn.", W123, hidden, width, count,
            store or stores.mxfp4("deepseek"), shared=("shared_experts", W123, width, shared),
            keep=key == layer,
        )  # fmt: skip
        gate = f"{prefix}ffn.gate."
        p.tensors[f"{gate}weight"] = draw(count, hidden)
        if key == 0:
            p.tensors[f"{gate}tid2eid"] = draw.ints(0, count, 64, 3)
        else:
            p.tensors[f"{gate}bias"] = draw(count, dtype=F32)
        if key == layer:
            p.router = {"weight": f"{gate}weight"}
            p.router["table" if key == 0 else "correction_bias"] = (
                f"{gate}tid2eid" if key == 0 else f"{gate}bias"
            )
    return p


def deepseek_v4_hash() -> Published:
    return deepseek_v4("deepseek_v4_hash", layer=0, expert_dtype="fp4")


def deepseek_v4_mtp() -> Published:
    return deepseek_v4("deepseek_v4_mtp", layer="mtp.0", expert_dtype="fp4")


def deepseek_v4_fp8() -> Published:
    return deepseek_v4("deepseek_v4_fp8", stores.block("scale", "e8m0"))


def deepseek_v4_nvfp4() -> Published:
    return deepseek_v4(
        "deepseek_v4_nvfp4", stores.nvfp4_modelopt, expert_dtype="fp4",
        quantization={"moe_quant_algo": "NVFP4"},
    )  # fmt: skip


def deepseek_v41(layer: int | str = 1) -> Published:
    stage = {"router.top_k": 2} if layer == "mtp.0" else {}
    return deepseek_v4(
        f"deepseek_v41_{layer}", layer=layer, block=32, stage_experts=4,
        model_type="deepseek_v41_text", wrap={"model_type": "deepseek_v41"},
        dspark_n_routed_experts=4, dspark_num_experts_per_tok=2,
        quantization={"expert_dtype": "fp4"}, facts={"family": "deepseek_v41", **stage},
    )  # fmt: skip


# --- Qwen3-MoE, OLMoE, Mixtral, MiniMax -----------------------------------------------------------


def plain_router(
    name: str,
    store: Store,
    *,
    block: str = "mlp",
    names: tuple[str, str, str] = HF,
    prefix: str = "model.layers.0.",
    width: int = 192,
    gate_dtype: torch.dtype = BF16,
    correction: bool = False,
    shared: tuple[str, tuple[str, str, str], int, Store] | None = None,
    wrap: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **config: Any,
) -> Published:
    draw, hidden, experts = Random(name), 256, 8
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "vocab_size": 64,
        **config,
    }
    p = Published(
        config=values if wrap is None else {**wrap, "text_config": values},
        layer=0,
        facts={
            "routed_scaling_factor": 1.0,
            "scale_at": "weights",
            "weight_at": "combine",
            "activation.limit": None,
            "activation.alpha": 1.0,
            "router.scoring": "softmax",
            "router.top_k": 2,
            "router.renormalise": True,
            "router.epsilon": 0.0,
            "router.num_groups": 1,
            "router.bias": None,
            "router.table": None,
            **(facts or {}),
        },
    )
    root = f"{prefix}{block}."
    moe(p, draw, root, names, hidden, width, experts, store, shared=shared)
    fields = {"weight": (f"{root}gate.weight", (experts, hidden), gate_dtype)}
    if correction:
        fields["correction_bias"] = (f"{root}e_score_correction_bias", (experts,), F32)
    router(p, draw, fields)
    return p


def qwen3_moe(
    name: str = "qwen3_moe", store: Store | None = None, quantization: dict[str, Any] | None = None
) -> Published:
    extra = {"quantization_config": quantization} if quantization else {}
    return plain_router(
        name, store or stores.plain(), model_type="qwen3_moe", num_experts=8,
        moe_intermediate_size=192, intermediate_size=768, norm_topk_prob=True,
        facts={"family": "qwen3_moe"}, **extra,
    )  # fmt: skip


def qwen3_moe_fp8() -> Published:
    return qwen3_moe("qwen3_moe_fp8", stores.block(INV, "bf16"), FP8_CONFIG)


def qwen3_moe_nvfp4() -> Published:
    return qwen3_moe("qwen3_moe_nvfp4", stores.nvfp4_modelopt, {"quant_method": "modelopt"})


def qwen3_moe_modelopt_fp8() -> Published:
    return qwen3_moe("qwen3_moe_modelopt_fp8", stores.per_tensor(), {"quant_method": "modelopt"})


def qwen3_moe_quark_tensor() -> Published:
    return qwen3_moe("qwen3_moe_quark_tensor", stores.per_tensor(), {"quant_method": "quark"})


def qwen3_moe_bf16_tensor_scale() -> Published:
    return qwen3_moe("qwen3_moe_bf16_tensor_scale", stores.per_tensor(shape=(1,), dtype=BF16))


def qwen3_moe_quark_channel() -> Published:
    return qwen3_moe(
        "qwen3_moe_quark_channel", stores.channel(vector=True), {"quant_method": "quark"}
    )


def qwen3_moe_quark_mxfp4() -> Published:
    return qwen3_moe("qwen3_moe_quark_mxfp4", stores.mxfp4("quark"), {"quant_method": "quark"})


def qwen3_moe_ct_mxfp4() -> Published:
    return qwen3_moe("qwen3_moe_ct_mxfp4", stores.mxfp4("compressed-tensors"))


def qwen3_moe_ct_nvfp4() -> Published:
    return qwen3_moe("qwen3_moe_ct_nvfp4", stores.nvfp4_compressed_tensors)


def qwen3_moe_ct_block() -> Published:
    return qwen3_moe("qwen3_moe_ct_block", stores.block("weight_scale"))


def qwen3_moe_f32() -> Published:
    return qwen3_moe("qwen3_moe_f32", stores.plain(F32))


def olmoe() -> Published:
    return plain_router(
        "olmoe", stores.plain(), model_type="olmoe", num_experts=8, intermediate_size=192,
        norm_topk_prob=False, facts={"family": "olmoe", "router.renormalise": False},
    )  # fmt: skip


def mixtral() -> Published:
    return plain_router(
        "mixtral", stores.plain(), block="block_sparse_moe", names=W123, model_type="mixtral",
        num_local_experts=8, intermediate_size=192, facts={"family": "mixtral"},
    )  # fmt: skip


def minimax() -> Published:
    return plain_router(
        "minimax", stores.plain(), block="block_sparse_moe", names=W123, model_type="minimax",
        num_local_experts=8, intermediate_size=192, facts={"family": "minimax"},
    )  # fmt: skip


def minimax_m2() -> Published:
    quantization = {
        **FP8_CONFIG,
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    return plain_router(
        "minimax_m2", stores.block(INV), block="block_sparse_moe", names=W123, gate_dtype=F32,
        correction=True, model_type="minimax_m2", num_local_experts=8, intermediate_size=192,
        scoring_func="sigmoid", use_routing_bias=True, quantization_config=quantization,
        facts={"family": "minimax_m2", "router.scoring": "sigmoid"},
    )  # fmt: skip


def minimax_m3(name: str = "minimax_m3", store: Store | None = None) -> Published:
    return plain_router(
        name, store or stores.plain(), block="block_sparse_moe", names=W123, gate_dtype=F32,
        prefix="language_model.model.layers.0.", correction=True,
        shared=("shared_experts", HF, 256, stores.plain()), wrap={"model_type": "minimax_m3_vl"},
        model_type="minimax_m3_vl_text", num_local_experts=8, intermediate_size=192,
        dense_intermediate_size=512, shared_intermediate_size=256, n_shared_experts=1,
        hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=7.0, routed_scaling_factor=2.0,
        scoring_func="sigmoid", use_routing_bias=True,
        facts={
            "family": "minimax_m3", "router.scoring": "sigmoid", "routed_scaling_factor": 2.0,
            "scale_at": "output", "activation.limit": 7.0, "activation.alpha": OSS_ALPHA,
            "activation.up_offset": 1.0,
        },
    )  # fmt: skip


def minimax_m3_mxfp8() -> Published:
    return minimax_m3("minimax_m3_mxfp8", stores.mxfp8(INV))


def minimax_m31_nvfp4() -> Published:
    return minimax_m3("minimax_m31_nvfp4", stores.nvfp4_compressed_tensors)


# --- gpt-oss --------------------------------------------------------------------------------------


def gpt_oss(name: str = "gpt_oss", *, bf16: bool = False) -> Published:
    """Rows of gate_up alternate: gate 0, up 0, gate 1, ...; the BF16 re-release is transposed."""
    draw, hidden, width, experts = Random(name), 192, 160, 4
    quantization = {} if bf16 else {"quantization_config": {"quant_method": "mxfp4"}}
    p = Published(
        config={
            "model_type": "gpt_oss", "hidden_size": hidden, "intermediate_size": width,
            "num_hidden_layers": 1, "num_local_experts": experts, "num_experts_per_tok": 2,
            "experts_per_token": 2, "hidden_act": "silu", "swiglu_limit": 7.0, "vocab_size": 64,
            **quantization,
        },
        layer=0,
        facts={
            "family": "gpt_oss", "routed_scaling_factor": 1.0, "scale_at": "weights",
            "weight_at": "combine", "activation.limit": 7.0, "activation.alpha": OSS_ALPHA,
            "activation.up_offset": 1.0, "router.scoring": "softmax_of_top_k", "router.top_k": 2,
            "router.correction_bias": None,
        },
    )  # fmt: skip
    root = "model.layers.0.mlp."
    legs: dict[str, list[Stored]] = {"gate_up_proj": [], "down_proj": []}
    for _ in range(experts):
        for leg, shape in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width))):
            store = stores.plain() if bf16 else stores.mxfp4("quark")
            legs[leg].append(store(draw(*shape)))
    for leg, made in legs.items():
        stem = f"{root}experts.{leg}"
        if bf16:
            p.tensors[stem] = torch.stack([m.tensors["weight"].T for m in made])
        else:
            blocks = torch.stack([m.tensors["weight"] for m in made])
            p.tensors[f"{stem}_blocks"] = blocks.unflatten(-1, (-1, 16))
            p.tensors[f"{stem}_scales"] = torch.stack([m.tensors["weight_scale"] for m in made])
        p.tensors[f"{stem}_bias"] = draw(experts, made[0].values.shape[0])
    for gate_up, down in zip(*legs.values(), strict=True):
        p.experts.append((gate_up.values[0::2], gate_up.values[1::2], down.values))
    p.formats = (legs["gate_up_proj"][0].format, legs["down_proj"][0].format)
    both = p.tensors[f"{root}experts.gate_up_proj_bias"]
    p.biases = (
        torch.cat([both[:, 0::2], both[:, 1::2]], dim=1),
        p.tensors[f"{root}experts.down_proj_bias"],
    )
    router(
        p, draw,
        {
            "weight": (f"{root}router.weight", (experts, hidden), BF16),
            "bias": (f"{root}router.bias", (experts,), BF16),
        },
    )  # fmt: skip
    return p


def gpt_oss_bf16() -> Published:
    return gpt_oss("gpt_oss_bf16", bf16=True)


def deepseek_v41_stage() -> Published:
    return deepseek_v41("mtp.0")


def glm4_moe_fp8_bf16_scale() -> Published:
    return glm4_moe_fp8("bf16")


BUILDERS: tuple[Callable[[], Published], ...] = (
    deepseek_v3, deepseek_v32, kimi_k2, kimi_k25, glm4_moe, glm4_moe_fp8, glm4_moe_fp8_bf16_scale,
    glm4v_moe, glm_moe_dsa, glm_moe_dsa_nvfp4, glm5_next, mimo_v2, deepseek_v4, deepseek_v4_hash,
    deepseek_v4_mtp, deepseek_v4_fp8, deepseek_v4_nvfp4, deepseek_v41, deepseek_v41_stage,
    qwen3_moe, qwen3_moe_f32, qwen3_moe_fp8, qwen3_moe_nvfp4, qwen3_moe_modelopt_fp8,
    qwen3_moe_quark_tensor, qwen3_moe_bf16_tensor_scale, qwen3_moe_quark_channel,
    qwen3_moe_quark_mxfp4, qwen3_moe_ct_mxfp4, qwen3_moe_ct_nvfp4, qwen3_moe_ct_block, olmoe,
    mixtral, minimax, minimax_m2, minimax_m3, minimax_m3_mxfp8, minimax_m31_nvfp4, gpt_oss,
    gpt_oss_bf16,
)  # fmt: skip
