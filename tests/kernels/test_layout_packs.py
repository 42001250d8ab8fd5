"""Every kernel layout: there and back, what it is worth, and what it says it loses."""

from collections.abc import Callable
from dataclasses import fields

import layout_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_values import e8m0_values, fp8_values, mxfp4_values, nvfp4_values

from megamoe.errors import BadInput
from megamoe.kernels import layout
from megamoe.kernels.layout import CanonicalExperts, e4m3, mxfp4_window, nvfp4_balance, standalone

Maker = Callable[[int, int, int], CanonicalExperts]


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def bf16(e: int, h: int, i: int) -> CanonicalExperts:
    return CanonicalExperts(
        w13=random_bytes(e, 2 * i, h).to(torch.bfloat16),
        w2=random_bytes(e, h, i).to(torch.bfloat16),
    )


def block_fp8(e: int, h: int, i: int) -> CanonicalExperts:
    """Gate and up under equal scales, as a merge leaves them."""
    half = random_bytes(e, i // 128, h // 128).to(torch.float32) + 0.5
    return CanonicalExperts(
        w13=random_bytes(e, 2 * i, h, high=0x7F).view(torch.float8_e4m3fn),
        w13_scale=torch.cat((half, half), 1),
        w2=random_bytes(e, h, i, high=0x7F).view(torch.float8_e4m3fn),
        w2_scale=random_bytes(e, h // 128, i // 128).to(torch.float32) + 0.5,
    )


def tensor_fp8(e: int, h: int, i: int) -> CanonicalExperts:
    blocks = block_fp8(e, h, i)
    scale = torch.arange(e, dtype=torch.float32) + 0.5
    return CanonicalExperts(w13=blocks.w13, w13_scale=scale, w2=blocks.w2, w2_scale=scale * 3)


def mxfp4(e: int, h: int, i: int) -> CanonicalExperts:
    """Inside the window, and without -0, which the window writes as +0."""

    def payload(*shape: int) -> torch.Tensor:
        codes = random_bytes(*shape, high=16)
        return layout.pack_codes(torch.where(codes == 8, 0, codes))

    return CanonicalExperts(
        w13=payload(e, 2 * i, h),
        w13_scale=random_bytes(e, 2 * i, h // 32, low=110, high=122),
        w2=payload(e, h, i),
        w2_scale=random_bytes(e, h, i // 32, low=120, high=132),
    )


def nvfp4(e: int, h: int, i: int) -> CanonicalExperts:
    return CanonicalExperts(
        w13=random_bytes(e, 2 * i, h // 2),
        w13_scale=random_bytes(e, 2 * i, h // 16, high=127),
        w13_global=torch.rand(e) + 0.5,
        w2=random_bytes(e, h, i // 2),
        w2_scale=random_bytes(e, h, i // 16, high=127),
        w2_global=torch.rand(e) + 0.5,
    )


def nvfp4_balanced(e: int, h: int, i: int) -> CanonicalExperts:
    """Every expert's largest scale is 72 already."""
    experts = nvfp4(e, h, i)
    for scale in cases.scales_of(experts):
        scale.clamp_(max=0x69)
        if scale.numel():
            scale[:, 0, 0] = 0x69
    return experts


def mxfp8(e: int, h: int, i: int) -> CanonicalExperts:
    return CanonicalExperts(
        w13=random_bytes(e, 2 * i, h).view(torch.float8_e4m3fn),
        w13_scale=random_bytes(e, 2 * i, h // 32),
        w2=random_bytes(e, h, i).view(torch.float8_e4m3fn),
        w2_scale=random_bytes(e, h, i // 32),
    )


def mxfp4_any(e: int, h: int, i: int) -> CanonicalExperts:
    return CanonicalExperts(
        w13=random_bytes(e, 2 * i, h // 2),
        w13_scale=random_bytes(e, 2 * i, h // 32),
        w2=random_bytes(e, h, i // 2),
        w2_scale=random_bytes(e, h, i // 32),
    )


def pull_fp8_and_back(experts: CanonicalExperts) -> CanonicalExperts:
    back = layout.unpack_pull_fp8(layout.pack_pull_fp8(experts))
    assert back.w13_scale is not None
    # One scale for 64 rows; the merge made pairs of them equal.
    assert torch.equal(back.w13_scale[:, 0::2], back.w13_scale[:, 1::2])
    return CanonicalExperts(
        w13=back.w13, w13_scale=back.w13_scale[:, 0::2], w2=back.w2, w2_scale=back.w2_scale
    )


def per_tensor_and_back(experts: CanonicalExperts) -> CanonicalExperts:
    packed = layout.pack_pull_fp8_per_tensor(
        experts, fc1_activation_scale=0.5, fc2_activation_scale=0.25
    )
    assert packed.exactness.exact
    return layout.unpack_pull_fp8_per_tensor(packed)


def standalone_nvfp4_and_back(experts: CanonicalExperts) -> CanonicalExperts:
    weights, first, second = layout.pack_standalone_nvfp4(experts)
    assert first.exact
    assert second.exact
    return layout.unpack_standalone_nvfp4(weights)


def standalone_mxfp4_and_back(experts: CanonicalExperts) -> CanonicalExperts:
    weights = layout.pack_standalone_mxfp4(experts)
    return layout.unpack_standalone_mxfp4(weights, hidden_size=experts.w2.shape[1])


Pair = tuple[str, Maker, Callable[[CanonicalExperts], CanonicalExperts], int]
PAIRS: tuple[Pair, ...] = (
    ("pull_bf16", bf16, lambda x: layout.unpack_pull_bf16(layout.pack_pull_bf16(x)), 8),
    ("push_bf16", bf16, lambda x: layout.unpack_push_bf16(layout.pack_push_bf16(x)), 32),
    ("push_fp8", block_fp8, lambda x: layout.unpack_push_fp8(layout.pack_push_fp8(x)), 128),
    (
        "push_fp8_fused",
        block_fp8,
        lambda x: layout.unpack_push_fp8(layout.pack_push_fp8(x, fuse_fc1_epilogue=True)),
        128,
    ),
    ("pull_fp8", block_fp8, pull_fp8_and_back, 128),
    ("pull_fp8_per_tensor", tensor_fp8, per_tensor_and_back, 64),
    ("pull_mxfp4", mxfp4, lambda x: layout.unpack_pull_mxfp4(layout.pack_pull_mxfp4(x)), 128),
    *(
        (
            f"pull_nvfp4_kperm{kperm}",
            nvfp4,
            lambda x, kperm=kperm: layout.unpack_pull_nvfp4(layout.pack_pull_nvfp4(x, kperm=kperm)),
            128,
        )
        for kperm in (0, 32, 64)
    ),
    ("standalone_nvfp4", nvfp4_balanced, standalone_nvfp4_and_back, 128),
    ("standalone_mxfp4", mxfp4, standalone_mxfp4_and_back, 128),
    (
        "sm120_split",
        mxfp4_any,
        lambda x: layout.unpack_sm120_split(layout.pack_sm120_split(x)),
        32,
    ),
    ("sm120_mxfp8", mxfp8, lambda x: layout.unpack_sm120_mxfp8(layout.pack_sm120_mxfp8(x)), 32),
    ("sm120_views", mxfp4_any, lambda x: layout.view_bytes(layout.view_mxfp4(x)), 32),
)


def assert_same_bytes(got: CanonicalExperts, wanted: CanonicalExperts) -> None:
    for field in fields(CanonicalExperts):
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        assert (a is None) == (b is None), field.name
        if a is not None:
            assert a.shape == b.shape, field.name
            assert a.dtype == b.dtype, field.name
            assert torch.equal(cases.as_bytes(a), cases.as_bytes(b)), field.name


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
@settings(deadline=None, max_examples=8)
@given(e=st.integers(0, 2), h=st.integers(1, 2), i=st.integers(1, 3))
def test_there_and_back(pair: Pair, e: int, h: int, i: int) -> None:
    _, make, there_and_back, align = pair
    experts = make(e, h * align, i * align)
    kept = CanonicalExperts(
        **{
            field.name: None if (x := getattr(experts, field.name)) is None else x.clone()
            for field in fields(CanonicalExperts)
        }
    )
    assert_same_bytes(there_and_back(experts), kept)
    assert_same_bytes(experts, kept)  # packing left its input alone


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_more_experts_than_are_packed_at_a_time(pair: Pair) -> None:
    _, make, there_and_back, align = pair
    experts = make(19, align, align)
    assert_same_bytes(there_and_back(experts), experts)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_zero_intermediate_size(pair: Pair) -> None:
    name, make, there_and_back, align = pair
    experts = make(2, align, 0)
    assert there_and_back(experts).w13.shape == experts.w13.shape, name


# --- what the packs are worth ---------------------------------------------------------------------


def test_pull_mxfp4_values_and_its_losses() -> None:
    experts = cases.mxfp4_experts(100, 127)
    w13_scale, w2_scale = cases.scales_of(experts)
    back = layout.unpack_pull_mxfp4(layout.pack_pull_mxfp4(experts))
    for before, after in (
        ((experts.w13, w13_scale), (back.w13, back.w13_scale)),
        ((experts.w2, w2_scale), (back.w2, back.w2_scale)),
    ):
        assert after[1] is not None
        report = layout.window_exactness(*before)
        changed = mxfp4_values(*before) != mxfp4_values(after[0], after[1])
        assert torch.equal(report.counts, changed.view(*before[1].shape, 32).sum(-1))
        assert not report.exact
    standalone = standalone_mxfp4_and_back(experts)
    assert_same_bytes(standalone, back)  # one window for both kernels


def test_standalone_mxfp4_scales_stay_in_the_decoders_range() -> None:
    experts = cases.mxfp4_experts(90, 140)
    weights = layout.pack_standalone_mxfp4(experts)
    for tiles in (weights.l1, weights.l2):
        scales = tiles[..., 128 * 64 :]
        assert int(scales.min()) == 122
        assert int(scales.max()) == 133
    # The exact decoder, on the scales as packed, loses nothing more.
    back = standalone_mxfp4_and_back(experts)
    for data, scale, factor in (
        (back.w13, back.w13_scale, weights.l1_global),
        (back.w2, back.w2_scale, weights.l2_global),
    ):
        assert scale is not None
        shift = torch.log2(factor).to(torch.int64).view(-1, 1, 1)
        local = (scale.to(torch.int64) - shift).to(torch.uint8)
        assert layout.standalone_mxfp4_exactness(data, local).exact
        assert layout.standalone_mxfp4_exactness(data, local + 2).worst > 0
        assert layout.standalone_mxfp4_exactness(data, local - 1).worst == 1.0


@pytest.mark.parametrize("kernel", ["pull", "standalone"])
def test_nvfp4_operands_and_their_losses(kernel: str) -> None:
    """What the kernel multiplies with, times its factor, against the checkpoint's values."""
    experts = cases.nvfp4_experts(0x69)
    scale = cases.scales_of(experts)[0]
    if kernel == "pull":
        operand, factor = layout.pull_nvfp4_operand(experts.w13, scale), 8.0
        report = layout.pull_nvfp4_exactness(experts.w13, scale)
    else:
        operand, factor = layout.standalone_nvfp4_operand(experts.w13, scale), 1.0
        report = layout.standalone_nvfp4_exactness(experts.w13, scale)
    got = operand.to(torch.float64) * factor
    true = nvfp4_values(experts.w13, scale, torch.ones(cases.E))
    changed = (got != true).view(*scale.shape, 16).sum(-1)
    assert torch.equal(report.counts, changed)
    assert report.elements == true.numel()
    error = torch.where(true == 0, 0.0, (got - true) / true).abs().max()
    assert report.worst == float(error)


def test_power_of_two_scales_are_exact_in_the_pull_nvfp4_kernel_from_2_to_the_minus_5() -> None:
    payload = layout.pack_codes(torch.arange(16, dtype=torch.uint8)).view(1, 1, 8)
    for code in range(8, 127, 8):
        scale = torch.tensor([[[code]]], dtype=torch.uint8)
        value = float(scale.view(torch.float8_e4m3fn).to(torch.float64))
        assert layout.pull_nvfp4_exactness(payload, scale).exact == (value >= 2.0**-5)


def test_nvfp4_overflow_is_reported() -> None:
    payload = layout.pack_codes(torch.full((16,), 7, dtype=torch.uint8)).view(1, 1, 8)
    assert layout.standalone_nvfp4_exactness(
        payload, torch.tensor([[[0x6A]]], dtype=torch.uint8)
    ).worst == float("inf")


def test_pull_fp8_merges_to_the_larger_scale_and_counts_what_it_rounds() -> None:  # K58
    experts = cases.block_fp8_experts()
    w13_scale, _ = cases.scales_of(experts)
    packed = layout.pack_pull_fp8(experts)
    back = layout.unpack_pull_fp8(packed)
    assert back.w13_scale is not None
    before = fp8_values(experts.w13, w13_scale)
    after = fp8_values(back.w13, back.w13_scale)
    blocks = (cases.E, 2, cases.I // 128, 128, cases.H // 128, 128)
    changed = (after != before).view(blocks).sum((3, 5))
    assert torch.equal(packed.exactness.counts, changed)
    assert packed.exactness.elements == before.numel()
    assert 0 < packed.exactness.inexact < before.numel() // 4
    halves = w13_scale.view(cases.E, 2, cases.I // 128, cases.H // 128)
    assert torch.equal(packed.fc1.scale[:, 0::2], halves.amax(1))
    # A block that had the larger scale kept its bytes, and so did w2.
    larger = (halves == halves.amax(1, keepdim=True)).repeat_interleave(128, 2)
    larger = larger.repeat_interleave(128, 3).view(before.shape)
    assert torch.equal(back.w13.view(torch.uint8)[larger], experts.w13.view(torch.uint8)[larger])
    assert packed.fc2.weight.data_ptr() == experts.w2.data_ptr()


def test_any_ratio_of_scales_is_rounded_to_nearest() -> None:
    experts = block_fp8(2, 128, 128)
    scale = torch.tensor([0.3, 0.7, 0.6, 0.2]).view(2, 2, 1)
    experts = CanonicalExperts(
        w13=experts.w13, w13_scale=scale, w2=experts.w2, w2_scale=experts.w2_scale
    )
    packed = layout.pack_pull_fp8(experts)
    back = layout.unpack_pull_fp8(packed)
    assert back.w13_scale is not None
    before, after = fp8_values(experts.w13, scale), fp8_values(back.w13, back.w13_scale)
    # Half a step of E4M3: 2**-4 of the value, or half the smallest subnormal.
    allowed = (before.abs() * 2.0**-4).clamp(min=0.7 * 2.0**-10)
    assert bool(((after - before).abs() <= allowed).all())
    assert packed.exactness.worst <= 1.0


def test_zero_scales_and_nan_elements_survive_a_merge() -> None:  # K59
    experts = block_fp8(1, 128, 128)
    experts.w13.view(torch.uint8)[0, 0, 0] = 0x7F
    scale = torch.tensor([0.25, 1.0]).view(1, 2, 1)
    packed = layout.pack_pull_fp8(
        CanonicalExperts(
            w13=experts.w13, w13_scale=scale, w2=experts.w2, w2_scale=torch.ones(1, 1, 1)
        )
    )
    back = layout.unpack_pull_fp8(packed)
    assert bool(back.w13[0, 0, 0].to(torch.float32).isnan())
    zero = torch.tensor([0.0, 1.0]).view(1, 2, 1)
    packed = layout.pack_pull_fp8(
        CanonicalExperts(
            w13=block_fp8(1, 128, 128).w13, w13_scale=zero, w2=experts.w2, w2_scale=zero[:, :1]
        )
    )
    back = layout.unpack_pull_fp8(packed)
    assert packed.exactness.exact
    assert not back.w13[0, :128].to(torch.float32).any()


def test_scales_widen_exactly() -> None:
    e8m0 = torch.arange(255, dtype=torch.uint8)
    wide = layout.scale_to_fp32("s", e8m0.view(torch.float8_e8m0fnu))
    assert torch.equal(wide.to(torch.float64), e8m0_values(e8m0))
    bf16_scale = torch.tensor([0.3, 1.5], dtype=torch.bfloat16)
    assert torch.equal(layout.scale_to_fp32("s", bf16_scale), bf16_scale.to(torch.float32))
    for bad in (
        torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        torch.tensor([-1.0]),
        torch.tensor([float("inf")]),
    ):
        with pytest.raises(BadInput, match="negative or non-finite"):
            layout.scale_to_fp32("s", bad)


# --- what is copied, and what is not --------------------------------------------------------------


def test_w2_and_plain_push_fp8_are_views() -> None:
    for pack, make in ((layout.pack_pull_bf16, bf16), (layout.pack_push_bf16, bf16)):
        experts = make(2, 256, 256)
        packed = pack(experts)
        w2 = packed.fc2 if isinstance(packed, layout.PullBf16Weights) else packed.w2
        assert w2.data_ptr() == experts.w2.data_ptr()
    experts = block_fp8(2, 256, 256)
    push = layout.pack_push_fp8(experts)
    assert push.w13_fp8.data_ptr() == experts.w13.data_ptr()
    assert push.w2_fp8.data_ptr() == experts.w2.data_ptr()


@pytest.mark.parametrize(
    ("view", "make"), [(layout.view_mxfp4, mxfp4_any), (layout.view_mxfp8, mxfp8)]
)
def test_sm120_views_share_their_storage(
    view: Callable[[CanonicalExperts], CanonicalExperts], make: Maker
) -> None:
    experts = make(2, 128, 128)
    viewed = view(experts)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        assert getattr(viewed, name).data_ptr() == getattr(experts, name).data_ptr()
    assert viewed.w13_scale is not None
    assert viewed.w13_scale.dtype == torch.float8_e8m0fnu


def test_kernel_strides() -> None:
    packed = layout.pack_pull_mxfp4(mxfp4(2, 256, 128))
    nv = layout.pack_pull_nvfp4(nvfp4(2, 256, 128))
    fp8 = layout.pack_pull_fp8(block_fp8(2, 256, 128))
    for leg in (packed.fc1, packed.fc2, nv.fc1, nv.fc2, fp8.fc1, fp8.fc2):
        assert leg.weight.stride(1) == 1
    for leg4 in (packed.fc1, packed.fc2, nv.fc1, nv.fc2):
        assert leg4.scales.is_contiguous()
        assert torch.equal(leg4.unit, torch.ones(1))


def test_neither_default_device_nor_default_dtype_matters() -> None:
    """Loaders of models change both, and tables are cached."""
    wanted = [cases.digest(case.ours()) for case in cases.CASES]
    experts = mxfp4(1, 128, 128)
    scale = cases.scales_of(experts)[0]
    tables = (e4m3.values, e4m3.fp4_products, e4m3.fp4_product_errors)
    tables += (mxfp4_window._divided_codes, mxfp4_window._divided_bytes)
    tables += (mxfp4_window._divided_errors, nvfp4_balance._halved_magnitudes)
    for table in (*tables, standalone._mxfp4_decoder_errors):
        table.cache_clear()
    fp8_one = tensor_fp8(1, 64, 64)
    balanced = torch.tensor([[[0x7E]]], dtype=torch.uint8), torch.ones(1)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            layout.window_exactness(experts.w13, scale)
            layout.standalone_mxfp4_exactness(experts.w13, scale)
            layout.pull_nvfp4_exactness(experts.w13[:1, :1, :8], balanced[0])
            layout.standalone_nvfp4_operand(experts.w13[:1, :1, :8], balanced[0])
            layout.balance_nvfp4(experts.w13[:1, :1, :8], *balanced, top=layout.STANDALONE_TOP)
            layout.pack_pull_mxfp4(experts)
            per_tensor = layout.pack_pull_fp8_per_tensor(
                fp8_one, fc1_activation_scale=0.5, fc2_activation_scale=0.5
            )
    finally:
        torch.set_default_dtype(torch.float32)
    assert per_tensor.fc1.activation_scale is not None
    assert per_tensor.fc1.activation_scale.dtype == torch.float32
    assert [cases.digest(case.ours()) for case in cases.CASES] == wanted


# --- refusals -------------------------------------------------------------------------------------


# A view takes any shape; FlashInfer checks those.
@pytest.mark.parametrize(
    "pair", [p for p in PAIRS if p[0] != "sm120_views"], ids=lambda pair: pair[0]
)
def test_matrices_of_two_layers_are_refused(pair: Pair) -> None:
    _, make, there_and_back, align = pair
    one, other = make(2, align, align), make(2, 2 * align, align)
    mixed = CanonicalExperts(
        w13=one.w13,
        w13_scale=one.w13_scale,
        w13_global=one.w13_global,
        w2=other.w2,
        w2_scale=other.w2_scale,
        w2_global=other.w2_global,
    )
    with pytest.raises(BadInput, match=r"w2 .* is not of shape"):
        there_and_back(mixed)


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[1] is not bf16], ids=lambda pair: pair[0])
def test_missing_scales_are_refused(pair: Pair) -> None:
    _, make, there_and_back, align = pair
    experts = make(1, align, align)
    with pytest.raises(BadInput, match="carry no scales"):
        there_and_back(CanonicalExperts(w13=experts.w13, w2=experts.w2))


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[3] >= 64], ids=lambda pair: pair[0])
def test_misaligned_sizes_are_refused(pair: Pair) -> None:
    _, make, there_and_back, align = pair
    with pytest.raises(BadInput, match="is not a multiple of"):
        there_and_back(make(1, align, align // 2))
    with pytest.raises(BadInput, match="is not a multiple of"):
        there_and_back(make(1, align // 2, align))


def test_nvfp4_block_scales_with_a_sign_are_refused() -> None:
    experts = nvfp4(1, 128, 128)
    assert experts.w2_scale is not None
    experts.w2_scale[0, 0, 0] = 0x80
    with pytest.raises(BadInput, match="w2_scale 128 is NaN or negative"):
        layout.pack_pull_nvfp4(experts)


def test_mxfp4_scales_beyond_fp32_are_refused() -> None:
    experts = mxfp4(1, 128, 128)
    assert experts.w2_scale is not None
    experts.w2_scale.fill_(250)
    with pytest.raises(BadInput, match="E8M0 scale byte 250 is above 249"):
        layout.pack_pull_mxfp4(experts)


def test_a_wrong_hidden_size_is_refused() -> None:
    weights = layout.pack_standalone_mxfp4(mxfp4(1, 256, 128))
    with pytest.raises(BadInput, match="does not fit 2 tiles"):
        layout.unpack_standalone_mxfp4(weights, hidden_size=384)
