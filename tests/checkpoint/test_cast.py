"""MXFP4 to NVFP4: ModelOpt's bytes, the same values, and a refusal where it would round.

GOLDEN was printed by running this file where nvidia-modelopt 0.47.0 can be imported: the digests
are of what its lossless cast of a DeepSeek-V4 expert returns, one k_max for w1 and w3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import published
import pytest
import torch
from torch import Tensor

from megamoe.checkpoint import load, mxfp4_to_nvfp4
from megamoe.errors import BadInput
from megamoe.formats import MXFP4, NVFP4, Quantised, dequantise

ROWS, BLOCKS = 48, 4
Expert = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # w1, w3: bytes and E8M0 bytes


def mixed(count: int, salt: int) -> Tensor:
    """Integers below 2^16 that look random and are the same everywhere: no generator is asked."""
    return ((torch.arange(count) + salt) * 40503 % 65521 * 31153 % 65521) & 0xFFFF


def projection(salt: int, low: int, span: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales 2^(low - 127) to 2^(low + span - 127), both ends reached."""
    codes = (mixed(ROWS * BLOCKS * 16, salt) >> 3).to(torch.uint8).reshape(ROWS, BLOCKS * 16)
    scales = low + mixed(ROWS * BLOCKS, salt + 7) % (span + 1)
    scales[0], scales[1] = low, low + span
    return codes, scales.to(torch.uint8).reshape(ROWS, BLOCKS)


def ordinary() -> Expert:
    return projection(1, 110, 8), projection(2, 112, 9)


def whole_range() -> Expert:
    """The lowest block is exactly 2^17 below the greatest of the pair."""
    return projection(3, 104, 12), projection(4, 106, 15)


def zeros() -> Expert:
    """Zero blocks under the scale byte 0, under one out of range, and zeros of either sign."""
    (codes, scales), up = projection(5, 110, 8), projection(6, 110, 8)
    blocks = codes.reshape(ROWS, BLOCKS, 16)
    blocks[2, 1], scales[2, 1] = 0, 0
    blocks[3, 2], scales[3, 2] = 0x88, 0
    blocks[4, 0], scales[4, 0] = 0x80, 60
    blocks[5] = 0x08
    return (codes, scales), up


def nothing() -> Expert:
    """No scale but 0: every value is zero."""
    empty = torch.zeros(ROWS, BLOCKS * 16, dtype=torch.uint8)
    return (empty, empty[:, :BLOCKS].clone()), (empty.clone(), empty[:, :BLOCKS].clone())


CASES: tuple[Callable[[], Expert], ...] = (ordinary, whole_range, zeros, nothing)
GOLDEN = {
    "ordinary": "35cd8f8f22369b9be53c4ee11c2dc82981a96203f689d10c9c93de7a45560fa1",
    "whole_range": "6c84ed7d2799eb7997ca1d8d1c0ad18c826b9ac046069178d3f1ed10a4fc531e",
    "zeros": "52c6c20003ba5842ae2409af3407cd6740c9cdca15f9e75722f3b3de291a7acd",
    "nothing": "77d995eb3b31cfaa6c208a95c20ce521c709056730865e70d6d9c0687b3de27b",
}


def digest(parts: list[Tensor]) -> str:
    """Of data, scale and global scale of w1, then of w3."""
    made = hashlib.sha256()
    for part in parts:
        made.update(bytes(part.contiguous().reshape(-1).view(torch.uint8).tolist()))
    return made.hexdigest()


def held(expert: Expert) -> Quantised:
    (gate, gate_scale), (up, up_scale) = expert
    return Quantised(
        format=MXFP4,
        data=torch.cat([gate, up])[None],
        scale=torch.cat([gate_scale, up_scale])[None],
        row_groups=2,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bytes_are_those_of_modelopt(case: Callable[[], Expert]) -> None:
    made = mxfp4_to_nvfp4(held(case()))
    assert made.format == NVFP4
    assert made.scale is not None
    assert made.global_scale is not None
    parts = []
    for group, rows in enumerate((slice(0, ROWS), slice(ROWS, None))):
        parts += [made.data[0, rows], made.scale[0, rows], made.global_scale[0, group]]
    assert digest(parts) == GOLDEN[case.__name__]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_are_the_same(case: Callable[[], Expert]) -> None:
    source = held(case())
    assert torch.equal(dequantise(mxfp4_to_nvfp4(source)), dequantise(source))


def test_one_step_too_low_is_refused() -> None:
    (codes, scales), up = whole_range()
    scales[7, 3] = 103
    codes[7, 48:] = 0x10
    with pytest.raises(BadInput, match=r"expert 0, row 7, block 3 is not exact"):
        mxfp4_to_nvfp4(held(((codes, scales), up)))
    codes[7, 48:] = 0x80  # nothing but zeros there: exact under any scale
    source = held(((codes, scales), up))
    assert torch.equal(dequantise(mxfp4_to_nvfp4(source)), dequantise(source))


def test_experts_have_their_own_range() -> None:
    """The second expert lies 2^40 above the first: neither is out of range."""
    low, high = (
        held((projection(1, 60, 3), projection(2, 60, 3))),
        held((projection(1, 100, 3), projection(2, 100, 3))),
    )
    assert low.scale is not None
    assert high.scale is not None
    both = Quantised(
        format=MXFP4,
        data=torch.cat([low.data, high.data]),
        scale=torch.cat([low.scale, high.scale]),
        row_groups=2,
    )
    made = mxfp4_to_nvfp4(both)
    assert torch.equal(dequantise(made), dequantise(both))
    assert made.global_scale is not None
    assert made.global_scale.log2().tolist() == [[63 - 127 - 8] * 2, [103 - 127 - 8] * 2]


def test_on_loading(tmp_path: Path) -> None:
    p = published.deepseek_v4("cast", expert_dtype="fp4")
    path = p.write(tmp_path)
    weights, source = load(path, 1, quantise="nvfp4"), load(path, 1)
    assert weights.family == "deepseek_v4, nvfp4 on loading"
    for made, was in (
        (weights.experts.w13, source.experts.w13), (weights.experts.w2, source.experts.w2)
    ):  # fmt: skip
        assert made.format == NVFP4
        assert torch.equal(dequantise(made), dequantise(was))
        whole = mxfp4_to_nvfp4(was)
        for one, other in zip(made.tensors, whole.tensors, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_on_loading_out_of_range_is_refused(tmp_path: Path) -> None:
    p = published.deepseek_v4("cast", expert_dtype="fp4")
    scale = p.tensors["layers.1.ffn.experts.5.w3.scale"].view(torch.uint8)
    scale[3, 2] = 60
    p.tensors["layers.1.ffn.experts.5.w3.weight"][3, 32:48] = 0x11
    path = p.write(tmp_path)
    with pytest.raises(BadInput, match=r"experts\.5\.w3 is out of nvfp4's range in row 3, block 2"):
        load(path, 1, quantise=NVFP4)
    assert load(path, 1).experts.w13.format == MXFP4


def test_only_mxfp4_experts() -> None:
    with pytest.raises(BadInput, match="is not of mxfp4 experts"):
        mxfp4_to_nvfp4(mxfp4_to_nvfp4(held(ordinary())))


def modelopt(expert: Expert) -> list[Tensor]:
    from modelopt.torch.export import shard_cast_utils as theirs  # type: ignore[import-not-found]

    top = max(theirs.mxfp4_kmax(scales) for _, scales in expert)
    parts: list[Tensor] = []
    for codes, scales in expert:
        made = theirs.quantize_mxfp4_to_nvfp4_lossless(codes, scales, top, "cpu")
        parts += made[:3]
    return parts


if __name__ == "__main__":
    for case in CASES:
        print(f'    "{case.__name__}": "{digest(modelopt(case()))}",')
