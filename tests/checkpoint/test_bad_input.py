"""Every bad checkpoint is refused by one sentence: file, tensor or key, found, expected, remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import published
import pytest
import stores
import torch
from published import Published

from megamoe.checkpoint import inspect, load
from megamoe.errors import BadInput
from megamoe.formats import FP8_BLOCK128, MXFP4, NVFP4, Format
from megamoe.problem import Placement

EXPERT = "model.layers.1.mlp.experts."
V4 = "layers.1.ffn.experts."
QWEN = "model.layers.0.mlp.experts."


@dataclass(frozen=True)
class Bad:
    """A published checkpoint, one thing done to it, and what the sentence must say.

    in_data: the fault is in a tensor's values, which only ``load`` reads.
    """

    name: str
    build: Callable[[], Published]
    spoil: Callable[[Published], object]
    says: tuple[str, ...]
    layer: int | str | None = None
    in_data: bool = False


def drop(name: str) -> Callable[[Published], object]:
    return lambda p: p.tensors.pop(name)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Published], object]:
    return lambda p: p.tensors.update({name: make(p.tensors[name])})


def add(name: str, tensor: torch.Tensor) -> Callable[[Published], object]:
    return lambda p: p.tensors.update({name: tensor})


def state(**values: object) -> Callable[[Published], object]:
    return lambda p: p.config.update(values)


def silent(*keys: str) -> Callable[[Published], object]:
    return lambda p: [p.config.pop(key) for key in keys]


def rename(old: str, new: str) -> Callable[[Published], object]:
    return lambda p: p.tensors.update({new: p.tensors.pop(old)})


def set_at(value: float, *index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return spoil


def restore(stem: str, store: stores.Store) -> Callable[[Published], object]:
    """Store one matrix in another way."""

    def spoil(p: Published) -> None:
        shape = p.tensors[f"{stem}.weight"].shape
        for name in [n for n in p.tensors if n.startswith(f"{stem}.")]:
            del p.tensors[name]
        made = store(torch.ones(*shape, dtype=torch.bfloat16))
        p.tensors.update({f"{stem}.{k}": v for k, v in made.tensors.items()})

    return spoil


def swap_global_scale(p: Published) -> None:
    """compressed-tensors' reciprocal under ModelOpt's name."""
    name = f"{QWEN}3.up_proj.weight_scale_2"
    p.tensors[name] = 1 / p.tensors[name]


CASES = (
    # missing, misnamed, extra, misshapen
    Bad("missing_weight", published.qwen3_moe, drop(f"{QWEN}5.up_proj.weight"),
        (f"{QWEN}5.up_proj.weight is missing", "complete the download")),
    Bad("missing_scale", published.deepseek_v3, drop(f"{EXPERT}2.down_proj.weight_scale_inv"),
        (f"{EXPERT}2.down_proj.weight_scale_inv is missing", "expected it, with weight")),
    Bad("missing_scale_everywhere", published.deepseek_v3,
        lambda p: [p.tensors.pop(n) for n in list(p.tensors) if n.endswith("weight_scale_inv")],
        (f"{EXPERT}0.gate_proj.weight is F8_E4M3 [192, 256] with no scale",
         "expected weight_scale or weight_scale_inv or scale", "a scale is absent")),
    Bad("missing_weight_scale_2", published.qwen3_moe_nvfp4,
        lambda p: [p.tensors.pop(n) for n in list(p.tensors) if n.endswith("weight_scale_2")],
        (f"{QWEN}0.gate_proj.weight_scale is F8_E4M3 [192, 16]", "expected F8_E8M0 or U8",
         "a scale is absent or of another convention")),
    Bad("missing_of_expert_0", published.qwen3_moe_nvfp4,
        drop(f"{QWEN}0.gate_proj.weight_scale_2"),
        (f"{QWEN}0.gate_proj.weight_scale_2 is missing", "complete the download")),
    Bad("missing_down_of_expert_0", published.deepseek_v3,
        drop(f"{EXPERT}0.down_proj.weight_scale_inv"),
        (f"{EXPERT}0.down_proj.weight_scale_inv is missing", "expected it, with weight")),
    Bad("missing_half", published.deepseek_v3,
        lambda p: [p.tensors.pop(f"{EXPERT}{e}.gate_proj.weight_scale_inv") for e in range(8)],
        (f"{EXPERT}0.gate_proj.weight_scale_inv is missing",)),
    Bad("misnamed", published.qwen3_moe,
        rename(f"{QWEN}1.gate_proj.weight", f"{QWEN}1.gate.weight"),
        (f"{QWEN}1.gate.weight is an extra tensor", "{gate_proj,up_proj,down_proj}")),
    Bad("extra_bias", published.qwen3_moe, add(f"{QWEN}1.gate_proj.bias", torch.zeros(192)),
        (f"{QWEN}1.gate_proj.bias is an extra tensor", "no part of an expert")),
    Bad("zero_point", published.kimi_k25,
        add("language_model.model.layers.1.mlp.experts.0.up_proj.weight_zero_point",
            torch.zeros(1)),
        ("weight_zero_point is an extra tensor",)),
    Bad("extra_expert", published.qwen3_moe, state(num_experts=7),
        (f"{QWEN}7.down_proj.weight is an extra tensor", "expected experts 0 to 6")),
    Bad("too_many_experts", published.qwen3_moe, state(num_experts=10**30),
        (f"is {10**30}, expected in [1, 16384]",)),
    Bad("no_experts", published.deepseek_v3, state(n_routed_experts=0),
        ("n_routed_experts", "is 0, expected in [1, 16384]",)),
    Bad("absent_expert", published.qwen3_moe, state(num_experts=9),
        (f"{QWEN}8.gate_proj.weight is missing",)),
    Bad("shared_expert_gate", published.qwen3_moe,
        add("model.layers.0.mlp.shared_expert_gate.weight", torch.zeros(1, 256)),
        ("model.layers.0.mlp.shared_expert_gate.weight is an extra tensor", "check model_type")),
    Bad("wrong_shape", published.qwen3_moe, put(f"{QWEN}4.gate_proj.weight", lambda t: t[:-1]),
        (f"{QWEN}4.gate_proj.weight is BF16 [191, 256], which is bf16 [191, 256]",
         "expected [192, 256], as config.json says")),
    Bad("transposed", published.qwen3_moe, put(f"{QWEN}0.down_proj.weight", lambda t: t.T),
        (f"{QWEN}0.down_proj.weight is BF16 [192, 256]", "expected [256, 192]")),
    Bad("other_width", published.qwen3_moe, state(moe_intermediate_size=256),
        ("gate_proj.weight is BF16 [192, 256]", "expected [256, 256]")),
    Bad("not_a_matrix", published.qwen3_moe, put(f"{QWEN}0.gate_proj.weight", lambda t: t[None]),
        (f"{QWEN}0.gate_proj.weight is BF16 [1, 192, 256]", "expected a matrix")),
    Bad("float16", published.qwen3_moe, put(f"{QWEN}0.gate_proj.weight", lambda t: t.half()),
        (f"{QWEN}0.gate_proj.weight is F16 [192, 256]", "cannot be held without rounding")),
    # scales
    Bad("nan_scale", published.deepseek_v3,
        put(f"{EXPERT}3.up_proj.weight_scale_inv", set_at(float("nan"), 1, 0)),
        (f"{EXPERT}3.up_proj.weight_scale_inv is nan at [1, 0]", "finite scales of at least 0"),
        in_data=True),
    Bad("nan_e8m0_scale", published.deepseek_v4,
        put(f"{V4}2.w3.scale",
            lambda t: set_at(255, 5, 1)(t.view(torch.uint8)).view(torch.float8_e8m0fnu)),
        (f"{V4}2.w3.scale is nan at [5, 1]",), in_data=True),
    Bad("negative_scale", published.deepseek_v3,
        put(f"{EXPERT}3.up_proj.weight_scale_inv", set_at(-1.0, 0, 1)),
        ("weight_scale_inv is -1.0 at [0, 1]",), in_data=True),
    Bad("reciprocal_scale", published.deepseek_v3,
        put(f"{EXPERT}3.up_proj.weight_scale_inv", lambda t: 1 / t),
        (f"{EXPERT}3.up_proj.weight_scale_inv is large enough for weights of",
         "fp8_block128 weights below 32768", "it may be the reciprocal"), in_data=True),
    Bad("reciprocal_global_scale", published.qwen3_moe_nvfp4, swap_global_scale,
        (f"{QWEN}3.up_proj.weight_scale_2 is large enough", "it may be the reciprocal"),
        in_data=True),
    Bad("zero_global_scale", published.qwen3_moe_ct_nvfp4,
        put(f"{QWEN}3.up_proj.weight_global_scale", torch.zeros_like),
        (f"{QWEN}3.up_proj.weight_global_scale is 0.0", "a finite number above 0"), in_data=True),
    Bad("two_scales", published.qwen3_moe_modelopt_fp8,
        lambda p: p.tensors.update({
            f"{QWEN}{e}.{n}.weight_scale_inv": torch.tensor(1.0)
            for e in range(8) for n in published.HF
        }),
        ("weight_scale_inv is there beside", "expected one scale")),
    Bad("two_global_scales", published.qwen3_moe_nvfp4,
        lambda p: p.tensors.update({
            f"{QWEN}{e}.{n}.weight_global_scale": torch.tensor(1.0)
            for e in range(8) for n in published.HF
        }),
        ("weight_global_scale is there beside", "expected one global scale")),
    Bad("scale_dtype", published.deepseek_v3,
        put(f"{EXPERT}0.gate_proj.weight_scale_inv", lambda t: t.half()),
        (f"{EXPERT}0.gate_proj.weight_scale_inv is F16 [2, 2]",
         "expected F32 or BF16 or F8_E8M0 or U8")),
    Bad("scale_grid", published.deepseek_v3,
        put(f"{EXPERT}0.gate_proj.weight_scale_inv", lambda t: t[:1]),
        (f"{EXPERT}0.gate_proj.weight_scale_inv is F32 [1, 2]", "expected", "for [192, 256]")),
    Bad("global_scale_shape", published.qwen3_moe_nvfp4,
        put(f"{QWEN}0.gate_proj.weight_scale_2", lambda t: torch.ones(2)),
        (f"{QWEN}0.gate_proj.weight_scale_2 is F32 [2]", "expected one F32")),
    Bad("int4_group_128", published.kimi_k25,
        put("language_model.model.layers.1.mlp.experts.0.gate_proj.weight_scale",
            lambda t: t[:, ::4].contiguous()),
        ("gate_proj.weight_scale is BF16 [192, 2]", "expected [192, 8] (int4_g32)")),
    Bad("weight_shape", published.kimi_k25,
        put("language_model.model.layers.1.mlp.experts.0.gate_proj.weight_shape",
            lambda t: torch.tensor([192, 255], dtype=torch.int32)),
        ("gate_proj.weight_shape is [192, 255]", "expected [192, 256], as the packed tensor")),
    # experts of one layer that differ
    Bad("gate_and_up_differ", published.qwen3_moe_nvfp4,
        lambda p: [restore(f"{QWEN}{e}.up_proj", stores.channel())(p) for e in range(8)],
        (f"{QWEN}0.up_proj.weight_scale_2 is missing", "must share one format")),
    Bad("one_expert_differs", published.deepseek_v3,
        restore(f"{EXPERT}6.up_proj", stores.block("weight_scale_inv", "bf16")),
        (f"{EXPERT}6.up_proj is in fp8_block128_bf16_scale",
         f"expected fp8_block128, as {EXPERT}0.gate_proj is", "not rounded on loading")),
    Bad("one_expert_plain", published.deepseek_v3,
        restore(f"{EXPERT}6.down_proj", stores.plain()),
        (f"{EXPERT}6.down_proj.weight_scale_inv is missing", "must share one format")),
    Bad("one_expert_quantised", published.qwen3_moe,
        restore(f"{QWEN}6.down_proj", stores.block("weight_scale_inv")),
        (f"{QWEN}6.down_proj.weight_scale_inv is an extra tensor", "expected weight only")),
    Bad("expert_0_quantised", published.qwen3_moe,
        restore(f"{QWEN}0.up_proj", stores.block("weight_scale_inv")),
        (f"{QWEN}0.up_proj.weight_scale_inv is an extra tensor", "expected weight only")),
    Bad("one_expert_of_another_kind", published.qwen3_moe_nvfp4,
        restore(f"{QWEN}0.up_proj", stores.block("weight_scale_inv")),
        (f"{QWEN}0.up_proj is weight and weight_scale_inv",
         "expected weight and weight_scale and weight_scale_2", "must share one format")),
    # config: silent, contradicting, unknown
    Bad("unknown_model_type", published.qwen3_moe, state(model_type="qwen9_moe"),
        ("config.json: model_type is qwen9_moe, expected one of deepseek_v3", "no row for it")),
    Bad("no_model_type", published.qwen3_moe, silent("model_type"),
        ("model_type is absent",)),
    Bad("unknown_text_type", published.kimi_k25,
        lambda p: p.config["text_config"].update(model_type="kimi_linear"),
        ("model_type is kimi_linear in kimi_k25, expected one of", "no row for it")),
    Bad("unknown_activation", published.qwen3_moe, state(hidden_act="gelu"),
        ("config.json: hidden_act is 'gelu', expected silu for qwen3_moe", "SwiGLU")),
    Bad("silent_activation", published.qwen3_moe, silent("hidden_act"),
        ("hidden_act or hidden_activation is absent", "no safe default")),
    Bad("silent_clamp", published.deepseek_v4, silent("swiglu_limit"),
        ("config.json: swiglu_limit is absent", "no safe default")),
    Bad("null_clamp", published.gpt_oss, state(swiglu_limit=None),
        ("config.json: swiglu_limit is absent", "no safe default")),
    Bad("negative_clamp", published.gpt_oss, state(swiglu_limit=-7.0),
        ("swiglu_limit is -7.0, expected a number >= 0",)),
    Bad("text_clamp", published.gpt_oss, state(swiglu_limit="7"),
        ("swiglu_limit is '7', expected a number",)),
    Bad("clamp_of_another_family", published.qwen3_moe, state(swiglu_limit=7.0),
        ("config.json: swiglu_limit is 7.0, expected no swiglu_limit: qwen3_moe has none",)),
    Bad("alpha_of_another_family", published.deepseek_v4, state(swiglu_alpha=1.702),
        ("config.json: swiglu_alpha is 1.702, expected no swiglu_alpha: deepseek_v4 has none",)),
    Bad("silent_scaling", published.deepseek_v3, silent("routed_scaling_factor"),
        ("routed_scaling_factor is absent", "no safe default")),
    Bad("null_scaling", published.deepseek_v3, state(routed_scaling_factor=None),
        ("routed_scaling_factor is absent", "no safe default")),
    Bad("zero_scaling", published.deepseek_v3, state(routed_scaling_factor=0.0),
        ("routed_scaling_factor is 0.0, expected a finite number above 0",)),
    Bad("huge_scaling", published.deepseek_v3, state(routed_scaling_factor=10**400),
        ("routed_scaling_factor is 1000", "expected a number")),
    Bad("silent_renormalise", published.qwen3_moe, silent("norm_topk_prob"),
        ("norm_topk_prob is absent",)),
    Bad("silent_groups", published.deepseek_v3, silent("n_group"), ("n_group is absent",)),
    Bad("groups", published.deepseek_v3, state(n_group=3),
        ("n_group and topk_group is 3 and 2, expected groups that divide 8 experts",)),
    Bad("no_groups", published.deepseek_v3, state(n_group=0, topk_group=0),
        ("n_group and topk_group is 0 and 0, expected groups that divide 8 experts",)),
    Bad("more_groups_kept", published.deepseek_v3, state(topk_group=9),
        ("n_group and topk_group is 4 and 9, expected groups that divide 8 experts",)),
    Bad("groups_of_one", published.deepseek_v3, state(n_group=8, topk_group=4),
        ("n_group and topk_group is 8 and 4", "two or more")),
    Bad("groups_too_small", published.deepseek_v3, state(n_group=4, topk_group=1),
        ("n_group and topk_group is 4 and 1", "4 to choose")),
    Bad("top_k", published.qwen3_moe, state(num_experts_per_tok=9),
        ("num_experts_per_tok", "is 9, expected in [1, 8]")),
    Bad("other_scoring", published.deepseek_v3, state(scoring_func="softmax"),
        ("scoring_func is 'softmax', expected 'sigmoid' for deepseek_v3", "another function")),
    Bad("other_topk_method", published.deepseek_v3, state(topk_method="group_limited_greedy"),
        ("topk_method is 'group_limited_greedy'",)),
    Bad("names_disagree", published.qwen3_moe, state(num_local_experts=16),
        ("num_local_experts 16 is not num_experts 8",)),
    Bad("block_size_disagrees", published.deepseek_v3,
        lambda p: p.config["quantization_config"].update(weight_block_size=[32, 32]),
        ("weight_scale_inv is F32 [2, 2] (fp8_block128)",
         "expected [6, 8], as weight_block_size [32, 32] in config.json says")),
    Bad("block_size_is_text", published.deepseek_v3,
        lambda p: p.config["quantization_config"].update(weight_block_size="128"),
        ("weight_block_size is 128, expected two numbers",)),
    Bad("block_size_is_zero", published.deepseek_v3,
        lambda p: p.config["quantization_config"].update(weight_block_size=[0, 128]),
        ("weight_block_size is [0, 128], expected two numbers above 0",)),
    Bad("block_size_is_true", published.deepseek_v3,
        lambda p: p.config["quantization_config"].update(weight_block_size=[True, True]),
        ("weight_block_size is [True, True], expected two numbers above 0",)),
    Bad("expert_dtype_is_a_list", published.deepseek_v4, state(expert_dtype=["fp4"]),
        ("expert_dtype is ['fp4'], expected a name",)),
    Bad("expert_dtype_disagrees", published.deepseek_v4_fp8, state(expert_dtype="fp4"),
        ("expert_dtype is 'fp4'", "what the experts of layer 1 are: fp8_block128_e8m0_scale")),
    Bad("mxfp4_config_on_bf16", published.gpt_oss_bf16,
        state(quantization_config={"quant_method": "mxfp4"}),
        ("quant_method is 'mxfp4'", "what the experts of layer 0 are: bf16")),
    Bad("dense_by_config", published.deepseek_v3, state(first_k_dense_replace=2),
        ("layer 1 is dense", "expected config and tensors to agree")),
    Bad("hash_by_config", published.deepseek_v4, state(num_hash_layers=2),
        ("layers.1.ffn.gate.tid2eid is missing", "in the hash-routed layers that config.json")),
    Bad("hash_by_tensor", published.deepseek_v4_hash, state(num_hash_layers=0),
        ("layers.0.ffn.gate.tid2eid is present", "outside of the hash-routed layers")),
    Bad("table_ids", published.deepseek_v4_hash,
        put("layers.0.ffn.gate.tid2eid", set_at(8, 3, 1)),
        ("tid2eid is ids in [0, 8], expected ids in [0, 8)",), in_data=True),
    Bad("table_vocabulary", published.deepseek_v4_hash, state(vocab_size=65),
        ("tid2eid is I64 [64, 3], expected I64 or I32 [65, 3]",)),
    Bad("table_missing", published.deepseek_v4_hash, drop("layers.0.ffn.gate.tid2eid"),
        ("layers.0.ffn.gate.tid2eid is missing",)),
    Bad("table_beside_bias", published.deepseek_v4_hash,
        add("layers.0.ffn.gate.bias", torch.zeros(8)),
        ("gate.bias is there beside gate.tid2eid",)),
    Bad("shared_missing", published.deepseek_v3,
        lambda p: [p.tensors.pop(n) for n in list(p.tensors) if ".1.mlp.shared_experts." in n],
        ("model.layers.1.mlp.shared_experts.* is missing",
         "expected 1 shared experts, as n_shared_experts says")),
    Bad("shared_unstated", published.deepseek_v3, state(n_shared_experts=0),
        ("shared_experts.* is present, expected 0 shared experts",)),
    Bad("shared_width", published.deepseek_v3, state(n_shared_experts=2),
        ("shared_experts.gate_proj.weight is F8_E4M3 [192, 256]", "expected [384, 256]")),
    Bad("shared_bias", published.deepseek_v3,
        add("model.layers.1.mlp.shared_experts.up_proj.bias", torch.zeros(192)),
        ("shared_experts.up_proj.bias is an extra tensor",)),
    # router
    Bad("router_missing", published.qwen3_moe, drop("model.layers.0.mlp.gate.weight"),
        ("model.layers.0.mlp.gate.weight is missing",)),
    Bad("router_shape", published.qwen3_moe,
        put("model.layers.0.mlp.gate.weight", lambda t: t[:-1]),
        ("gate.weight is BF16 [7, 256], expected BF16 or F32 [8, 256]",)),
    Bad("router_dtype", published.qwen3_moe,
        put("model.layers.0.mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn)),
        ("gate.weight is F8_E4M3 [8, 256], expected BF16 or F32",)),
    Bad("router_nan", published.qwen3_moe,
        put("model.layers.0.mlp.gate.weight", set_at(float("nan"), 2, 3)),
        ("gate.weight is NaN or infinite at [2, 3]",), in_data=True),
    Bad("correction_bias_missing", published.minimax_m2,
        drop("model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("block_sparse_moe.e_score_correction_bias is missing",)),
    Bad("correction_bias_shape", published.deepseek_v3,
        put("model.layers.1.mlp.gate.e_score_correction_bias", lambda t: t[:-1]),
        ("e_score_correction_bias is F32 [7], expected BF16 or F32 [8]",)),
    Bad("router_bias_missing", published.gpt_oss, drop("model.layers.0.mlp.router.bias"),
        ("model.layers.0.mlp.router.bias is missing",)),
    # gpt-oss
    Bad("oss_bias_missing", published.gpt_oss, drop(f"{QWEN}down_proj_bias"),
        (f"{QWEN}down_proj_bias is missing",)),
    Bad("oss_bias_shape", published.gpt_oss, put(f"{QWEN}gate_up_proj_bias", lambda t: t[:, 1:]),
        (f"{QWEN}gate_up_proj_bias is BF16 [4, 319], expected BF16 or F32 [4, 320]",)),
    Bad("oss_bias_nan", published.gpt_oss,
        put(f"{QWEN}gate_up_proj_bias", set_at(float("inf"), 1, 3)),
        (f"{QWEN}gate_up_proj_bias is NaN or infinite in expert 1",), in_data=True),
    Bad("oss_scales_missing", published.gpt_oss, drop(f"{QWEN}gate_up_proj_scales"),
        (f"{QWEN}gate_up_proj_scales is missing",)),
    Bad("oss_nan_scale", published.gpt_oss,
        put(f"{QWEN}down_proj_scales", set_at(255, 2, 7, 1)),
        (f"{QWEN}down_proj_scales is nan at [7, 1] of expert 2",), in_data=True),
    Bad("oss_shape", published.gpt_oss, put(f"{QWEN}down_proj_blocks", lambda t: t[:, :-1]),
        (f"{QWEN}down_proj_blocks is U8 [4, 191, 5, 16], expected U8 [4, 192, 5, 16]",)),
    Bad("oss_extra", published.gpt_oss, add(f"{QWEN}gate_up_proj_zeros", torch.zeros(1)),
        (f"{QWEN}gate_up_proj_zeros is an extra tensor",)),
    Bad("oss_both", published.gpt_oss, add(f"{QWEN}down_proj", torch.zeros(1)),
        (f"{QWEN}down_proj is there beside {QWEN}down_proj_blocks",)),
    Bad("oss_untransposed", published.gpt_oss_bf16,
        put(f"{QWEN}gate_up_proj", lambda t: t.transpose(1, 2)),
        (f"{QWEN}gate_up_proj is BF16 [4, 320, 192], expected BF16 or F32 [4, 192, 320]",)),
    # layers
    Bad("dense_layer", published.deepseek_v3, lambda p: None,
        ("layer 0 is without experts under model.layers.0.mlp.", "it is dense"), layer=0),
    Bad("dense_stage", published.mimo_v2, lambda p: None,
        ("layer mtp.0 is without experts under model.mtp.layers.0.mlp.",), layer="mtp.0"),
    Bad("absent_layer", published.deepseek_v3, lambda p: None, ("layer 7 is absent",), layer=7),
    Bad("negative_layer", published.deepseek_v3, lambda p: None,
        ("layer is -1, expected in [0, 2), or mtp.N",), layer=-1),
    Bad("layer_name", published.deepseek_v3, lambda p: None,
        ("layer is 'last', expected a number, or mtp.N",), layer="last"),
    Bad("layer_is_a_fraction", published.deepseek_v3, lambda p: None,
        ("layer is 1.5, expected a number, or mtp.N",), layer=1.5),  # type: ignore[arg-type]
    Bad("layer_twice", published.qwen3_moe,
        lambda p: p.tensors.update({n.removeprefix("model."): t for n, t in p.tensors.items()}),
        ("layer 0 is under model.layers.0.mlp. and layers.0.mlp., expected one place",)),
)  # fmt: skip


def refusal(path: Path, layer: int | str, **arguments: object) -> str:
    with pytest.raises(BadInput) as caught:
        load(path, layer, **arguments)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_refused_by_name(bad: Bad, tmp_path: Path) -> None:
    p = bad.build()
    bad.spoil(p)
    sentence = refusal(p.write(tmp_path), p.layer if bad.layer is None else bad.layer)
    assert sentence.startswith(str(tmp_path))
    assert "; " in sentence
    for words in bad.says:
        assert words in sentence, sentence


def test_every_case_is_sound_before_it_is_spoiled(tmp_path: Path) -> None:
    """Otherwise a refusal could have another cause than the one under test."""
    for build in {bad.build for bad in CASES}:
        p = build()
        load(p.write(tmp_path / build.__name__), p.layer)


HEADERS = [bad for bad in CASES if bad.layer is None and not bad.in_data]


@pytest.mark.parametrize("bad", HEADERS, ids=lambda bad: bad.name)
def test_inspect_refuses_in_the_same_words(bad: Bad, tmp_path: Path) -> None:
    p = bad.build()
    bad.spoil(p)
    path = p.write(tmp_path)
    assert inspected(path, p.layer) == refusal(path, p.layer)


def inspected(path: Path, layer: int | str) -> str | None:
    """The refusal of a layer, or of the whole checkpoint."""
    try:
        record = inspect(path)
    except BadInput as whole:
        return str(whole)
    return next(r.refusal for r in record.layers if r.name == str(layer))


def test_inspect_records_the_reason_and_goes_on(tmp_path: Path) -> None:
    p = published.deepseek_v3()
    p.tensors.pop(f"{EXPERT}2.down_proj.weight_scale_inv")
    record = inspect(p.write(tmp_path))
    dense, moe, stage = record.layers
    assert dense.moe is None
    assert dense.refusal is None
    assert moe.refusal is not None
    assert f"{EXPERT}2.down_proj.weight_scale_inv is missing" in moe.refusal
    assert stage.moe is not None
    assert f"layer 1: REFUSED: {moe.refusal}" in str(record)


# --- files ----------------------------------------------------------------------------------------


def test_truncated_shard(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path)
    shard = path / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    sentence = refusal(path, 0)
    assert str(shard) in sentence
    assert "a whole safetensors file" in sentence
    assert "truncated" in sentence


def test_missing_shard(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path)
    shard = path / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"{shard}: the shard is absent" in refusal(path, 0)


def test_missing_shard_without_an_index(tmp_path: Path) -> None:
    """The shard that is gone held expert 0's first scale: what others have names it."""
    p = published.qwen3_moe_nvfp4()
    path = p.write(tmp_path, shards=len(p.tensors))
    index = path / "model.safetensors.index.json"
    name = f"{QWEN}0.gate_proj.weight_scale_2"
    (path / json.loads(index.read_text())["weight_map"][name]).unlink()
    index.unlink()
    assert f"{name} is missing" in refusal(path, 0)


def test_index_that_names_another_shard(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path)
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    name = f"{QWEN}0.gate_proj.weight"
    where["weight_map"][name] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(where))
    sentence = refusal(path, 0)
    assert f"{name} is missing, expected in this shard" in sentence


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_unreadable_index(tmp_path: Path, text: str) -> None:
    path = published.qwen3_moe().write(tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    assert "index.json: the index is unreadable" in refusal(path, 0)


def test_shards_without_an_index_that_overlap(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path, shards=1)
    (path / "model.safetensors.index.json").unlink()
    shard = path / "model-00001-of-00001.safetensors"
    (path / "copy.safetensors").write_bytes(shard.read_bytes())
    assert "expected in one shard only" in refusal(path, 0)


@pytest.mark.parametrize("text", ["", "[]", '{"a": '])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    path = published.qwen3_moe().write(tmp_path)
    (path / "config.json").write_text(text)
    assert refusal(path, 0).startswith(str(path / "config.json"))


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path)
    index = path / "model.safetensors.index.json"
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    assert "config.json: the config is unreadable" in refusal(path, 0)
    index.chmod(0)
    if not os.access(index, os.R_OK):
        assert "index.json: the index is unreadable" in refusal(path, 0)


def test_no_config_no_weights_no_directory(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path / "model")
    assert "the checkpoint is no directory" in refusal(path / "config.json", 0)
    (path / "config.json").unlink()
    assert "config.json is absent" in refusal(path, 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert "without *.safetensors" in refusal(empty, 0)


# --- arguments ------------------------------------------------------------------------------------


def test_arguments(tmp_path: Path) -> None:
    path = published.qwen3_moe().write(tmp_path)
    assert "rank 2 is not in [0, 2)" in refusal(path, 0, rank=2, world_size=2)
    wrong = Placement.contiguous(9, 2)
    assert "does not place the layer's 8" in refusal(path, 0, placement=wrong)
    right = Placement.contiguous(8, 2)
    assert "is not the placement's 2" in refusal(path, 0, placement=right, world_size=4)
    assert "rank None is not in [0, 2)" in refusal(path, 0, rank=None, world_size=2)
    assert "layer is None, expected a number, or mtp.N" in refusal(path, None)  # type: ignore[arg-type]
    assert "layer is True, expected a number, or mtp.N" in refusal(path, True)
    assert "pass one of" in refusal(path, 0, quantise="fp3")
    assert "quantise 3 is not a format" in refusal(path, 0, quantise=3)
    no_rule = Format(name="other", element=MXFP4.element, block=(1, 32), scale=MXFP4.scale)
    assert "is not a format that weights can be rounded to" in refusal(path, 0, quantise=no_rule)


def test_rounded_weights_are_not_rounded_again(tmp_path: Path) -> None:
    path = published.deepseek_v3().write(tmp_path)
    sentence = refusal(path, 1, quantise=NVFP4)
    assert f"{EXPERT}0.gate_proj is in fp8_block128, with quantise=nvfp4" in sentence
    assert load(path, 1, quantise=FP8_BLOCK128).experts.w13.format == FP8_BLOCK128
