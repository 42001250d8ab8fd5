"""Our bytes against FlashInfer's: by committed digests everywhere, by its own code where it is.

FlashInfer's sources are found in MEGAMOE_FLASHINFER_SRC or as an installed package; they run on the
CPU (`layout_flashinfer.py` says how). Without them these comparisons are skipped, each by name.
"""

import re
from collections.abc import Iterator

import layout_cases as cases
import layout_flashinfer as fi
import pytest
import torch

from megamoe.kernels import layout
from megamoe.kernels.layout import mxfp4_window
from megamoe.kernels.layout.e4m3 import FP4_MAGNITUDES, fp4_products

CASES = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)


@CASES
def test_digest_of_flashinfers_bytes(case: cases.Case) -> None:
    assert cases.digest(case.ours()) == cases.golden()[case.name]


def test_every_digest_has_a_case() -> None:
    assert cases.golden().keys() == {case.name for case in cases.CASES}


@pytest.fixture(scope="module")
def sources() -> Iterator[cases.Load | None]:
    if fi.flashinfer_root() is None:
        yield None
        return
    with fi.flashinfer_on_cpu() as load:
        yield load


@pytest.fixture
def load(sources: cases.Load | None, request: pytest.FixtureRequest) -> cases.Load:
    if sources is None:
        pytest.skip(
            f"not compared with FlashInfer's own code: {request.node.name} "
            "(set MEGAMOE_FLASHINFER_SRC, or install flashinfer)"
        )
    return sources


@CASES
def test_same_bytes_as_flashinfer(case: cases.Case, load: cases.Load) -> None:
    ours, theirs = case.ours(), case.theirs(load)
    assert len(ours) == len(theirs) > 0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype, index
        assert a.shape == b.shape, index
        assert a.stride() == b.stride(), index
        assert torch.equal(cases.as_bytes(a), cases.as_bytes(b)), index


@CASES
def test_digests_are_this_flashinfers(case: cases.Case, load: cases.Load) -> None:
    """Fails when FlashInfer changes a transform: then our layout must follow, or refuse."""
    assert cases.digest(case.theirs(load)) == cases.golden()[case.name]


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (64, 128), (80, 192)])
def test_interleave_kernel(rows: int, columns: int) -> None:
    payload = cases.seeded_bytes("interleave", 3, rows, columns // 2)
    theirs = fi.interleave_fp4_fp8(payload)
    assert torch.equal(layout.to_fragments(payload), theirs)
    assert torch.equal(layout.from_fragments(theirs), payload)


def test_window_table(load: cases.Load) -> None:
    """FlashInfer's table of divided codes, whose power of two wraps around from row 128 on."""
    table = load("flashinfer.fused_moe.prepare")._humming_mxfp4_w4a8_rewrite_lut_cpu()
    ours = mxfp4_window._divided_codes()
    for raised in range(128):
        assert torch.equal(table[raised], ours[min(raised, len(ours) - 1)]), raised
    assert int(table[128, 0]) & 7 == 7, "the row our module docstring tells of"


@pytest.mark.parametrize("lowest", [0, 112, 119])
def test_window_without_interleave(load: cases.Load, lowest: int) -> None:
    prepare = load("flashinfer.fused_moe.prepare")
    experts = cases.mxfp4_experts(lowest, 126)
    scales = cases.scales_of(experts)[0]
    payload, offset, residual = prepare.preprocess_moe_weights_for_sm90_mixed_gemm_humming(
        experts.w13, scales, interleave=False
    )
    folded = layout.fold_window(experts.w13, scales)
    assert torch.equal(folded.payload, payload)
    assert torch.equal(folded.offset, offset)
    assert torch.equal(torch.exp2(folded.floor_byte.to(torch.float32) - 128), residual)


def test_kperm_index(load: cases.Load) -> None:
    module = load(f"{cases.SM90}.fp8_nvfp4_bf16_pull_cutedsl.weights")
    for kperm in (0, 32, 64):
        index = module.nvfp4_kperm_index(192, kperm)
        assert torch.equal(layout.permute_columns(torch.arange(192), kperm), index)
        x = torch.arange(2 * 192 * 3).view(2, 192, 3)
        assert torch.equal(layout.permute_columns(x, kperm, 1), module.nvfp4_kperm(x, 1, kperm))


def test_scale_atoms_with_padding(load: cases.Load) -> None:
    split = load("flashinfer.moe_ep.kernel_src.sm120.split_cutedsl_megakernel.shim.weights")
    plane = cases.seeded_bytes("plane", 2, 200, 6)
    theirs = torch.stack([split.to_blocked(expert) for expert in plane])
    assert torch.equal(layout.to_blocked(plane), theirs)


def test_standalone_decoder_tables(load: cases.Load) -> None:
    """The NVFP4 decoder's literal table is RN_E4M3(code * scale), NaN above 464, at every scale."""
    assert load is not None
    root = fi.flashinfer_root()
    assert root is not None
    text = (root / "data/include/flashinfer/megamoe/nvfp4_dequant.cuh").read_text()
    rows = re.findall(r"\{0x([0-9a-f]{8})u, 0x([0-9a-f]{8})u\}", text)
    table = [list(bytes.fromhex(x)[::-1] + bytes.fromhex(y)[::-1]) for x, y in rows]
    assert len(table) == 128
    assert fp4_products(0).tolist() == table[:127]


def kernel_text(name: str) -> str:
    root = fi.flashinfer_root()
    assert root is not None
    return root.joinpath(*fi.PULL.split(".")[1:], name).read_text()


@pytest.mark.usefixtures("load")
def test_pull_mxfp4_decoder() -> None:
    """The decoder's table for an offset, a multiply-add, is exactly code * 2**(offset - 6)."""
    text = kernel_text("src/moe_hopper_fp8/mxfp4_cutedsl.py")
    found = re.findall(r"mad\.lo\.u32 lo_lut\d, \$6, 0x(\w{8}), 0x(\w{8});", text)
    assert len(found) == 2
    constants = [(int(factor, 16), int(base, 16)) for factor, base in found]
    for offset in range(1, mxfp4_window.WINDOW + 2):
        words = [(offset * factor + base) % 2**32 for factor, base in constants]
        codes = b"".join(word.to_bytes(4, "little") for word in words)
        table = torch.tensor(list(codes), dtype=torch.uint8).view(torch.float8_e4m3fn)
        wanted = torch.tensor(FP4_MAGNITUDES) * 2.0 ** (offset - 6)
        assert torch.equal(table.to(torch.float32), wanted)


@pytest.mark.usefixtures("load")
def test_pull_nvfp4_decoder() -> None:
    """The decoder builds its table by integers from scale code 40 up: RN_E4M3(code * scale / 8)."""
    text = kernel_text("shim/nvfp4_conversion.py")
    (packed,) = re.findall(r"mov\.b64 tab, 0x(\w{16});", text)
    assert "setp.ge.u32 fast, $2, 40;" in text
    thirds = bytes.fromhex(packed)[::-1]
    for scale in range(40, 127):
        one = scale - 24
        three_halves = thirds[scale & 7] + (scale & 120) - 80
        table = [0, one - 8, one, three_halves]
        table += [one + 8, three_halves + 8, one + 16, three_halves + 16]
        assert table == fp4_products(-3)[scale].tolist()
