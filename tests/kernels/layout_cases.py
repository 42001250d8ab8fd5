"""What is compared with FlashInfer's own transforms: one case per kernel layout.

Each case makes seeded inputs (the same on every machine), our bytes, and FlashInfer's. The digests
of the latter are committed, so that ours are judged where FlashInfer is not; this writes them anew:

    MEGAMOE_FLASHINFER_SRC=<folder> python tests/kernels/layout_cases.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layout_flashinfer as fi
import torch

from megamoe.kernels import layout
from megamoe.kernels.layout import CanonicalExperts

GOLDEN = Path(__file__).with_name("layout_golden.json")
FLASHINFER_VERSION = "0.7.4"

E, H, I = 3, 256, 384  # noqa: E741
SM90 = f"{fi.BACKENDS}.sm90"
Tensors = Sequence[torch.Tensor]
Load = Callable[[str], Any]


def seeded_bytes(name: str, *shape: int, below: int = 256) -> torch.Tensor:
    """Return uint8 values below `below`, a function of `name` and shape alone.

    On the default device, so that `with torch.device("cuda")` moves a whole case.
    """
    count = torch.Size(shape).numel()
    raw = bytearray(hashlib.shake_256(f"{name}{shape}".encode()).digest(2 * count) or b"\0\0")
    wide = torch.frombuffer(raw, dtype=torch.uint8)[: 2 * count].view(count, 2).to(torch.int32)
    values = ((wide[:, 0] * 256 + wide[:, 1]) % below).to(torch.uint8).view(shape)
    return values.to(torch.get_default_device())


def fp4(name: str, *shape: int, negative_zero: bool = True) -> torch.Tensor:
    codes = seeded_bytes(name, *shape, below=16)
    if not negative_zero:
        codes = torch.where(codes == 8, 0, codes)
    return layout.pack_codes(codes)


def mxfp4_experts(lowest: int, highest: int, *, negative_zero: bool = True) -> CanonicalExperts:
    """MXFP4 whose every expert has both scale bytes among its own, and all between."""

    def scales(name: str, *shape: int) -> torch.Tensor:
        plane = lowest + seeded_bytes(name, *shape, below=highest - lowest + 1)
        plane[:, 0, 0], plane[:, -1, -1] = lowest, highest
        return plane

    return CanonicalExperts(
        w13=fp4("w13", E, 2 * I, H, negative_zero=negative_zero),
        w13_scale=scales("s13", E, 2 * I, H // 32),
        w2=fp4("w2", E, H, I, negative_zero=negative_zero),
        w2_scale=scales("s2", E, H, I // 32),
    )


def nvfp4_experts(largest: int) -> CanonicalExperts:
    """NVFP4 whose every expert has the scale code `largest` and none above."""

    def scales(name: str, *shape: int) -> torch.Tensor:
        plane = seeded_bytes(name, *shape, below=largest + 1)
        plane[:, 3, 1] = largest
        return plane

    return CanonicalExperts(
        w13=fp4("w13", E, 2 * I, H),
        w13_scale=scales("s13", E, 2 * I, H // 16),
        w13_global=torch.tensor([2.0**-9, 0.37, 3.1]),
        w2=fp4("w2", E, H, I),
        w2_scale=scales("s2", E, H, I // 16),
        w2_global=torch.tensor([1.0, 2.0**-14, 0.011]),
    )


def bf16_experts() -> CanonicalExperts:
    def values(name: str, *shape: int) -> torch.Tensor:
        return (seeded_bytes(name, *shape).to(torch.float32) / 64 - 2).to(torch.bfloat16)

    return CanonicalExperts(w13=values("w13", E, 2 * I, H), w2=values("w2", E, H, I))


def block_fp8_experts() -> CanonicalExperts:
    """Block FP8 with power-of-two scales, where every 64 rows of a block reach 448.

    So a quantiser that sees 64 gate rows and 64 up rows together finds the larger scale of the two,
    and FlashInfer, which only takes BF16, must arrive at the bytes of our merge. Gate and up scales
    are up to 2**9 apart: some elements are recoded exactly, some are not.
    """

    def data(name: str, *shape: int) -> torch.Tensor:
        bytes_ = seeded_bytes(name, *shape)
        bytes_ = torch.where((bytes_ & 0x7F) == 0x7F, 0x35, bytes_)
        bytes_[..., ::64, ::128] = 0x7E
        return bytes_.view(torch.float8_e4m3fn)

    def scales(name: str, *shape: int) -> torch.Tensor:
        return torch.exp2(seeded_bytes(name, *shape, below=10).to(torch.float32) - 14)

    return CanonicalExperts(
        w13=data("w13", E, 2 * I, H),
        w13_scale=scales("s13", E, 2 * I // 128, H // 128),
        w2=data("w2", E, H, I),
        w2_scale=scales("s2", E, H // 128, I // 128),
    )


def tensor_fp8_experts() -> CanonicalExperts:
    blocks = block_fp8_experts()
    gate_up = torch.tensor([[2.0**-9, 2.0**-12], [2.0**-11, 2.0**-11], [2.0**-14, 2.0**-7]])
    return CanonicalExperts(
        w13=blocks.w13, w13_scale=gate_up, w2=blocks.w2, w2_scale=torch.tensor([0.5, 2.0, 0.25])
    )


def mxfp8_experts() -> CanonicalExperts:
    blocks = block_fp8_experts()
    return CanonicalExperts(
        w13=blocks.w13,
        w13_scale=seeded_bytes("s13", E, 2 * I, H // 32),
        w2=blocks.w2,
        w2_scale=seeded_bytes("s2", E, H, I // 32),
    )


def dequantised(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return data * scale, one per block, in BF16: exact, the scales being powers of two."""
    rows, columns = (data.shape[i] // scale.shape[i] for i in (1, 2))
    out = data.to(torch.float32) * scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    assert torch.equal(out.to(torch.bfloat16).to(torch.float32), out)
    return out.to(torch.bfloat16)


def scales_of(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    return experts.w13_scale, experts.w2_scale


def dequantised_experts(experts: CanonicalExperts) -> tuple[torch.Tensor, torch.Tensor]:
    w13_scale, w2_scale = scales_of(experts)
    return dequantised(experts.w13, w13_scale), dequantised(experts.w2, w2_scale)


def _pack_of(load: Load, experts: CanonicalExperts) -> Any:
    pack = load("flashinfer.moe_ep.weights").MoEWeightPack
    return pack(experts.w13, experts.w2, experts.w13_scale, experts.w2_scale)


def _flat(legs: Any) -> list[torch.Tensor]:
    return [tensor for leg in legs for tensor in leg if tensor is not None]


def _pull_bf16(load: Load) -> Tensors:
    transform = load(f"{SM90}.bf16_bf16_bf16_pull_cutedsl.weights").preprocess_mega_weights
    return transform(_pack_of(load, bf16_experts()), intermediate_size=I, hidden_size=H)


def _push_bf16(load: Load) -> Tensors:
    module = load("flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim.cake_weights")
    experts = bf16_experts()
    out = module.make_sm90_cake_bf16_weights(experts.w13, experts.w2)
    return out.w13, out.w2


def _push_fp8_ours(*, fused: bool) -> Tensors:
    out = layout.pack_push_fp8(block_fp8_experts(), fuse_fc1_epilogue=fused)
    return out.w13_fp8, out.w13_sf, out.w2_fp8, out.w2_sf


def _push_fp8_theirs(load: Load, *, fused: bool) -> Tensors:
    module = load("flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim.weights")
    w13, w2 = dequantised_experts(block_fp8_experts())
    return module.transform_weights_for_sm90_push(w13, w2, interleave_gate_up=fused)


def _pull_fp8(load: Load) -> Tensors:
    transform = load(f"{SM90}.fp8_fp8_bf16_pull_cutedsl.weights").preprocess_mega_weights
    pack = load("flashinfer.moe_ep.weights").MoEWeightPack(
        *dequantised_experts(block_fp8_experts())
    )
    return _flat(transform(pack, intermediate_size=I, hidden_size=H, fp8_scale_mode="blockwise"))


def _pull_fp8_per_tensor(load: Load) -> Tensors:
    transform = load(f"{SM90}.fp8_fp8_bf16_pull_cutedsl.weights").preprocess_mega_weights
    experts = tensor_fp8_experts()
    w13_scale, w2_scale = scales_of(experts)
    pack = load("flashinfer.moe_ep.weights").MoEWeightPack(
        dequantised(experts.w13, w13_scale[:, :, None]),
        dequantised(experts.w2, w2_scale[:, None, None]),
    )
    legs = transform(
        pack,
        intermediate_size=I,
        hidden_size=H,
        fp8_scale_mode="per_tensor",
        fc1_activation_dequant_scale=0.5,
        fc2_activation_dequant_scale=0.125,
    )
    return _flat(legs)


def _pull_mxfp4(load: Load) -> Tensors:
    transform = load(f"{SM90}.fp8_mxfp4_bf16_pull_cutedsl.weights").preprocess_mega_weights
    pack = _pack_of(load, mxfp4_experts(100, 127))
    return _flat(transform(pack, intermediate_size=I, hidden_size=H))


def _pull_nvfp4(load: Load, kperm: int) -> Tensors:
    module = load(f"{SM90}.fp8_nvfp4_bf16_pull_cutedsl.weights")
    experts = nvfp4_experts(126)
    pack = module.Nvfp4WeightPack(
        experts.w13,
        experts.w2,
        experts.w13_scale,
        experts.w2_scale,
        experts.w13_global,
        experts.w2_global,
    )
    legs = module.preprocess_mega_weights(
        pack, intermediate_size=I, hidden_size=H, nvfp4_kperm=kperm
    )
    return _flat(legs)


def _standalone_nvfp4_ours() -> Tensors:
    weights, first, second = layout.pack_standalone_nvfp4(nvfp4_experts(0x69))  # 72: nothing moves
    assert first.exact
    assert second.exact
    return weights.l1, weights.l2


def _standalone_nvfp4_theirs(load: Load) -> Tensors:
    experts = nvfp4_experts(0x69)
    return load("flashinfer.megamoe.weights").transform_nvfp4_weights_for_mega_moe(
        (layout.to_marlin(experts.w13), experts.w13_scale),
        (layout.to_marlin(experts.w2), experts.w2_scale),
    )


def _standalone_mxfp4_ours() -> Tensors:
    # Scales of 2**-5 to 2**6: the window's own, so that no byte changes.
    weights = layout.pack_standalone_mxfp4(mxfp4_experts(122, 133, negative_zero=False))
    assert torch.equal(weights.l1_global, torch.ones(E, dtype=torch.float32))
    return weights.l1, weights.l2


def _standalone_mxfp4_theirs(load: Load) -> Tensors:
    experts = mxfp4_experts(122, 133, negative_zero=False)
    return load("flashinfer.megamoe.weights").transform_mxfp4_weights_for_mega_moe(
        (layout.to_marlin(experts.w13), experts.w13_scale),
        (layout.to_marlin(experts.w2), experts.w2_scale),
    )


def _sm120_split(load: Load) -> Tensors:
    module = load("flashinfer.moe_ep.kernel_src.sm120.split_cutedsl_megakernel.shim.weights")
    experts = layout.view_mxfp4(mxfp4_experts(0, 255))
    return _flat(
        module.transform_prequantized_weights(
            experts.w13,
            experts.w2,
            experts.w13_scale,
            experts.w2_scale,
            hidden=H,
            intermediate=I,
        )
    )


def _sm120_mxfp8_theirs(load: Load) -> Tensors:
    # The backend's own function wants a kernel tree that hides the SM90 one; these are its parts.
    split = load("flashinfer.moe_ep.kernel_src.sm120.split_cutedsl_megakernel.shim.weights")
    experts = mxfp8_experts()
    w13_scale, w2_scale = scales_of(experts)

    def blocked(plane: torch.Tensor) -> torch.Tensor:
        parts = [split.to_blocked(expert) for expert in split.as_e8m0(plane)]
        return split.stack_byte_tensors(parts)

    return (
        split.interleave_gate_up_8(experts.w13, 2 * I).permute(0, 2, 1),
        blocked(split.interleave_gate_up_8(w13_scale, 2 * I)),
        experts.w2.permute(0, 2, 1),
        blocked(w2_scale),
    )


def _cake_ours() -> Tensors:
    experts = mxfp4_experts(0, 255)
    w13_scale, w2_scale = scales_of(experts)
    return (
        layout.interleave_gate_up(experts.w13, layout.PULL_ROWS),
        layout.to_cake_vectors(layout.interleave_gate_up(w13_scale, layout.PULL_ROWS)),
        layout.to_cake_vectors(w2_scale),
    )


def _cake_theirs(load: Load) -> Tensors:
    module = load(f"{fi.BACKENDS}.sm120.mxfp4_mxfp8_bf16_cake.cake_weights")
    experts = mxfp4_experts(0, 255)
    out = module.transform_prequantized_weights(
        experts.w13,
        experts.w2,
        experts.w13_scale,
        experts.w2_scale,
        hidden_size=H,
        intermediate_size=I,
    )
    # The last segment is the shared expert's, a constant filler here.
    routed = len(out.w1_sfb) * E // (E + 1), len(out.w2_sfb) * E // (E + 1)
    return out.w1_fp4, out.w1_sfb[: routed[0]], out.w2_sfb[: routed[1]]


def _columns_ours(kperm: int) -> Tensors:
    x = seeded_bytes("x", 5, 2 * H)
    return (layout.permute_columns(x, kperm),)


def _columns_theirs(load: Load, kperm: int) -> Tensors:
    module = load(f"{SM90}.fp8_nvfp4_bf16_pull_cutedsl.weights")
    out = torch.empty(5, 2 * H, dtype=torch.uint8)
    module.copy_nvfp4_kperm_hidden(out, seeded_bytes("x", 5, 2 * H), kperm=kperm)
    return (out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ours: Callable[[], Tensors]
    theirs: Callable[[Load], Tensors]


CASES = (
    Case(
        name="pull_bf16",
        ours=lambda: layout.pack_pull_bf16(bf16_experts()).transformed(),
        theirs=_pull_bf16,
    ),
    Case(
        name="push_bf16",
        ours=lambda: (
            (packed := layout.pack_push_bf16(bf16_experts())).w13,
            packed.w2,
        ),
        theirs=_push_bf16,
    ),
    *(
        Case(
            name=f"push_fp8_{'fused' if fused else 'plain'}",
            ours=lambda fused=fused: _push_fp8_ours(fused=fused),
            theirs=lambda load, fused=fused: _push_fp8_theirs(load, fused=fused),
        )
        for fused in (False, True)
    ),
    Case(
        name="pull_fp8_blockwise",
        ours=lambda: _flat(layout.pack_pull_fp8(block_fp8_experts()).transformed()),
        theirs=_pull_fp8,
    ),
    Case(
        name="pull_fp8_per_tensor",
        ours=lambda: _flat(
            layout.pack_pull_fp8_per_tensor(
                tensor_fp8_experts(), fc1_activation_scale=0.5, fc2_activation_scale=0.125
            ).transformed()
        ),
        theirs=_pull_fp8_per_tensor,
    ),
    Case(
        name="pull_mxfp4",
        ours=lambda: _flat(layout.pack_pull_mxfp4(mxfp4_experts(100, 127)).transformed()),
        theirs=_pull_mxfp4,
    ),
    *(
        Case(
            name=f"pull_nvfp4_kperm{kperm}",
            ours=lambda kperm=kperm: _flat(
                layout.pack_pull_nvfp4(nvfp4_experts(126), kperm=kperm).legs()
            ),
            theirs=lambda load, kperm=kperm: _pull_nvfp4(load, kperm),
        )
        for kperm in (0, 32, 64)
    ),
    *(
        Case(
            name=f"nvfp4_activation_columns_kperm{kperm}",
            ours=lambda kperm=kperm: _columns_ours(kperm),
            theirs=lambda load, kperm=kperm: _columns_theirs(load, kperm),
        )
        for kperm in (32, 64)
    ),
    Case(name="standalone_nvfp4", ours=_standalone_nvfp4_ours, theirs=_standalone_nvfp4_theirs),
    Case(name="standalone_mxfp4", ours=_standalone_mxfp4_ours, theirs=_standalone_mxfp4_theirs),
    Case(
        name="sm120_split",
        ours=lambda: _flat(layout.pack_sm120_split(mxfp4_experts(0, 255)).transformed()),
        theirs=_sm120_split,
    ),
    Case(
        name="sm120_mxfp8",
        ours=lambda: _flat(layout.pack_sm120_mxfp8(mxfp8_experts()).transformed()),
        theirs=_sm120_mxfp8_theirs,
    ),
    Case(name="sm120_cake", ours=_cake_ours, theirs=_cake_theirs),
)


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 of dtypes, shapes, strides and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} ".encode())
        sha.update(bytes(as_bytes(tensor).cpu().numpy()))
    return sha.hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in logical order, flat."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def golden() -> dict[str, str]:
    stored = json.loads(GOLDEN.read_text())
    assert stored["flashinfer"] == FLASHINFER_VERSION
    return dict(stored["sha256"])


def main() -> None:
    with fi.flashinfer_on_cpu() as load:
        digests = {case.name: digest(case.theirs(load)) for case in CASES}
    GOLDEN.write_text(
        json.dumps({"flashinfer": FLASHINFER_VERSION, "sha256": digests}, indent=2) + "\n"
    )
    print(f"{GOLDEN.name}: {len(digests)} digests of FlashInfer's own bytes")


if __name__ == "__main__":
    main()
