"""Loaded values against the dequantisers of compressed-tensors and transformers, bit for bit.

Both sides read the same files. Theirs may round to float32 or BF16 where ours is exact, so ours is
rounded once to their dtype: that they compute in it is theirs, that the bits agree is the test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import published
import pytest
import stores
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from published import HF, Published
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megamoe.checkpoint import load
from megamoe.formats import BF16, FP32, Quantised, dequantise

FLOAT = QuantizationType.FLOAT
GROUP, TENSOR_GROUP = QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP
ARGS: dict[str, QuantizationArgs] = {
    "int4": QuantizationArgs(num_bits=4, type="int", strategy=GROUP, group_size=32),
    "nvfp4": QuantizationArgs(num_bits=4, type=FLOAT, strategy=TENSOR_GROUP, group_size=16),
    "mxfp4": QuantizationArgs(num_bits=4, type=FLOAT, strategy=GROUP, group_size=32),
    "mxfp8": QuantizationArgs(num_bits=8, type=FLOAT, strategy=GROUP, group_size=32),
    "channel": QuantizationArgs(num_bits=8, type=FLOAT, strategy="channel"),
    "tensor": QuantizationArgs(num_bits=8, type=FLOAT, strategy="tensor"),
    "block": QuantizationArgs(num_bits=8, type=FLOAT, strategy="block", block_structure=[128, 128]),
}
COMPRESSORS = {
    "int4": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "channel": "float-quantized",
    "tensor": "float-quantized",
    "block": "float-quantized",
}


def half(q: Quantised, expert: int, projection: str) -> Tensor:
    """One projection's float64 values of a loaded expert."""
    values = dequantise(q)[expert]
    gate, up = values.chunk(2)
    return {HF[0]: gate, HF[1]: up, HF[2]: values}[projection]


def state_of(p: Published, stem: str) -> dict[str, Tensor]:
    return {n[len(stem) + 1 :]: t for n, t in p.tensors.items() if n.startswith(f"{stem}.")}


def compare(
    p: Published, path: Path, root: str, theirs: Callable[[dict[str, Tensor]], Tensor]
) -> None:
    weights = load(path, p.layer).experts
    compared = 0
    for expert in range(weights.count):
        for projection in HF:
            made = theirs(state_of(p, f"{root}experts.{expert}.{projection}"))
            ours = half(weights.w2 if projection == HF[2] else weights.w13, expert, projection)
            element = FP32 if made.dtype == torch.float32 else BF16
            rounded = ours.to(torch.float32)
            if element is BF16:
                rounded = rounded.to(torch.bfloat16)
            assert rounded.dtype == made.dtype
            assert torch.equal(rounded, made), (expert, projection)
            compared += made.numel()
    assert compared == weights.count * 3 * weights.hidden_size * weights.intermediate_size


CT_CASES = {
    "int4": (published.kimi_k25, "language_model.model.layers.1.mlp."),
    "nvfp4": (published.qwen3_moe_ct_nvfp4, "model.layers.0.mlp."),
    "mxfp4": (published.qwen3_moe_ct_mxfp4, "model.layers.0.mlp."),
    "mxfp8": (
        lambda: published.qwen3_moe("ct_mxfp8", stores.mxfp8("weight_scale")),
        "model.layers.0.mlp.",
    ),
    "channel": (published.glm4_moe_fp8, "model.layers.1.mlp."),
    "tensor": (
        lambda: published.qwen3_moe("ct_tensor", stores.per_tensor(shape=(1,))),
        "model.layers.0.mlp.",
    ),
    "block": (published.qwen3_moe_ct_block, "model.layers.0.mlp."),
}


@pytest.mark.parametrize("kind", CT_CASES)
def test_compressed_tensors_reads_the_same_values(kind: str, tmp_path: Path) -> None:
    build, root = CT_CASES[kind]
    p = build()
    compressor = BaseCompressor.get_value_from_registry(COMPRESSORS[kind])
    scheme = QuantizationScheme(targets=["Linear"], weights=ARGS[kind])

    def theirs(state: dict[str, Tensor]) -> Tensor:
        return compressor.decompress(state, scheme)["weight"].data

    compare(p, p.write(tmp_path), root, theirs)


@pytest.mark.parametrize("kind", CT_CASES)
def test_what_compressed_tensors_writes_is_read(kind: str, tmp_path: Path) -> None:
    """Their compressor makes the tensors; scales are amax based, made here."""
    generator = torch.Generator().manual_seed(7)
    compressor = BaseCompressor.get_value_from_registry(COMPRESSORS[kind])
    args = ARGS[kind]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    p = published.qwen3_moe()
    for name in [n for n in p.tensors if ".experts." in n]:
        weight = torch.randn(p.tensors[name].shape, generator=generator, dtype=torch.bfloat16)
        state = {"weight": weight, **scales_for(kind, weight)}
        del p.tensors[name]
        stem = name.removesuffix(".weight")
        written = compressor.compress(state, scheme)
        p.tensors.update({f"{stem}.{k}": v.contiguous() for k, v in written.items()})

    def theirs(state: dict[str, Tensor]) -> Tensor:
        return compressor.decompress(state, scheme)["weight"].data

    compare(p, p.write(tmp_path), "model.layers.0.mlp.", theirs)


def scales_for(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Scales of the shapes and dtypes that compressed-tensors expects before compression."""
    rows, columns = weight.shape
    w = weight.float()
    if kind == "tensor":
        return {"weight_scale": w.abs().amax().reshape(1) / 448}
    if kind == "channel":
        return {"weight_scale": w.abs().amax(dim=1, keepdim=True) / 448}
    if kind == "block":
        height, width = -rows % 128, -columns % 128
        tiles = torch.nn.functional.pad(w, (0, width, 0, height))
        tiles = tiles.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax(dim=(1, 3))
        return {"weight_scale": tiles / 448}
    group = {"nvfp4": 16}.get(kind, 32)
    amax = w.unflatten(1, (-1, group)).abs().amax(dim=-1)
    if kind == "int4":
        return {"weight_scale": (amax / 7).to(torch.bfloat16)}
    if kind == "nvfp4":
        factor = (448 * 6) / w.abs().amax()
        scale = (amax / 6 * factor).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scale, "weight_global_scale": factor.reshape(1)}
    top = 448 if kind == "mxfp8" else 6
    return {"weight_scale": torch.exp2(torch.ceil(torch.log2(amax / top)))}


TF_CASES: dict[str, tuple[Callable[[], Published], str, torch.dtype]] = {
    "block128_f32": (
        lambda: published.deepseek_like(
            "even", stores.block("weight_scale_inv"), width=256,
            quantization_config=published.FP8_CONFIG,
        ),
        "model.layers.1.mlp.",
        torch.float32,
    ),
    "block128_e8m0": (
        lambda: published.deepseek_like(
            "even_e8m0", stores.block("weight_scale_inv", "e8m0"), width=256
        ),
        "model.layers.1.mlp.",
        torch.bfloat16,
    ),
    "mxfp8": (
        lambda: published.qwen3_moe("tf_mxfp8", stores.mxfp8("weight_scale_inv")),
        "model.layers.0.mlp.",
        torch.bfloat16,
    ),
    "mxfp4": (
        lambda: published.qwen3_moe("tf_mxfp4", stores.mxfp4("deepseek")),
        "model.layers.0.mlp.",
        torch.bfloat16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TF_CASES)
def test_transformers_reads_the_same_values(kind: str, tmp_path: Path) -> None:
    build, root, dtype = TF_CASES[kind]
    p = build()
    op = Fp8Dequantize(hf_quantizer=None)

    def theirs(state: dict[str, Tensor]) -> Tensor:
        scale = next(state[s] for s in ("weight_scale_inv", "scale") if s in state)
        return op._dequantize_one(state["weight"], scale, output_dtype=dtype)

    compare(p, p.write(tmp_path), root, theirs)


def test_transformers_reads_the_same_gpt_oss(tmp_path: Path) -> None:  # K10
    p = published.gpt_oss()
    weights = load(p.write(tmp_path), 0).experts
    root = "model.layers.0.mlp.experts."
    made = {}
    for leg in ("gate_up_proj", "down_proj"):
        blocks, scales = p.tensors[f"{root}{leg}_blocks"], p.tensors[f"{root}{leg}_scales"]
        # [E, K, rows], as transformers holds them: transposed, rows alternating
        made[leg] = convert_moe_packed_tensors(blocks, scales)
    gate_up = made["gate_up_proj"].transpose(1, 2)
    both = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
    assert torch.equal(dequantise(weights.w13).to(torch.bfloat16), both)
    assert torch.equal(dequantise(weights.w2).to(torch.bfloat16), made["down_proj"].transpose(1, 2))


def test_every_e2m1_and_e8m0_code(tmp_path: Path) -> None:
    """Codes that random weights do not reach: all nibbles, and scales over the whole range."""
    p = published.qwen3_moe("all_codes", stores.mxfp4("deepseek"))
    stem = "model.layers.0.mlp.experts.0.gate_proj"
    nibbles = torch.arange(192 * 128) % 256
    p.tensors[f"{stem}.weight"] = nibbles.to(torch.uint8).view(torch.int8).reshape(192, 128)
    exponents = torch.arange(192 * 8) % 139  # 2^-127 to 2^11: beyond it, no weight is plausible
    p.tensors[f"{stem}.scale"] = (
        exponents.to(torch.uint8).view(torch.float8_e8m0fnu).reshape(192, 8)
    )
    op = Fp8Dequantize(hf_quantizer=None)
    theirs = op._dequantize_one(
        p.tensors[f"{stem}.weight"], p.tensors[f"{stem}.scale"], output_dtype=torch.float32
    )
    held = dequantise(load(p.write(tmp_path), 0).experts.w13)[0, :192]
    assert torch.equal(held, theirs.to(torch.float64))
    assert held.unique().numel() == theirs.unique().numel()
