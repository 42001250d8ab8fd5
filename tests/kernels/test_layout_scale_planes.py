"""Block scales in the kernels' orders."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import BadInput
from megamoe.kernels.layout import (
    fold_k16,
    fold_k32,
    from_blocked,
    from_cake_vectors,
    to_blocked,
    to_cake_vectors,
    unfold_k16,
    unfold_k32,
)


def plane(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_k32_tiles_by_their_definition() -> None:
    scales = plane(2, 128, 8)
    folded = fold_k32(scales)
    assert folded.shape == (2, 2, 2, 16, 16)
    for row in range(128):
        for group in range(8):
            line, byte = row % 16, 4 * (row % 64 // 16) + group % 4
            got = folded[:, row // 64, group // 4, line, byte]
            assert torch.equal(got, scales[:, row, group])


def test_k16_tiles_by_their_definition() -> None:
    scales = plane(2, 128, 16)
    folded = fold_k16(scales)
    assert folded.shape == (2, 2, 2, 32, 16)
    for row in range(128):
        for group in range(16):
            m16, m, k32 = row % 64 // 16, row % 16, group % 8 // 2
            flat = folded[:, row // 64, group // 8].flatten(1)
            got = flat[:, ((m16 * 4 + k32) * 16 + m) * 2 + group % 2]
            assert torch.equal(got, scales[:, row, group])


def test_atoms_by_their_definition() -> None:
    scales = plane(2, 200, 6)
    blocked = to_blocked(scales)
    assert blocked.shape == (2, 256 * 8)
    atoms = blocked.view(2, 2, 2, 512)
    seen = torch.zeros_like(atoms, dtype=torch.bool)
    for row in range(200):
        for column in range(6):
            place = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert torch.equal(atoms[:, row // 128, column // 4, place], scales[:, row, column])
            seen[:, row // 128, column // 4, place] = True
    assert not atoms[~seen].any(), "padding is zero"


def test_cake_vectors_by_their_definition() -> None:
    experts, rows, groups = 2, 256, 8
    scales = plane(experts, rows, groups)
    vectors = to_cake_vectors(scales)
    assert vectors.dtype == torch.uint32
    grid = vectors.view(torch.uint8).view(experts, groups // 4, rows // 128, 8, 16, 4)
    for tile in range(rows // 128):
        for vector in range(8):
            for word in range(16):
                row = tile * 128 + 8 * (word ^ 4 * (vector // 2)) + vector
                for k128 in range(groups // 4):
                    got = grid[:, k128, tile, vector, word]
                    assert torch.equal(got, scales[:, row, 4 * k128 : 4 * k128 + 4])


@settings(deadline=None)
@given(experts=st.integers(0, 2), m64=st.integers(0, 3), k128=st.integers(0, 3))
def test_round_trips(experts: int, m64: int, k128: int) -> None:
    for fold, unfold, groups in ((fold_k32, unfold_k32, 4), (fold_k16, unfold_k16, 8)):
        scales = plane(experts, 64 * m64, groups * k128)
        assert torch.equal(unfold(fold(scales)), scales)
    scales = plane(experts, 128 * m64, 4 * k128)
    vectors = to_cake_vectors(scales)
    assert vectors.shape == (scales.numel() // 64, 16)
    back = from_cake_vectors(vectors, experts, 128 * m64)
    # Without rows or experts the vectors cannot tell how many columns there were.
    assert back.shape == scales.shape or not scales.numel()
    assert torch.equal(back.flatten(), scales.flatten())


@settings(deadline=None)
@given(
    experts=st.integers(0, 2),
    rows=st.integers(0, 300),
    columns=st.integers(0, 9),
    dtype=st.sampled_from((torch.uint8, torch.float8_e8m0fnu)),
)
def test_atoms_round_trip(experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    scales = plane(experts, rows, columns).view(dtype)
    blocked = to_blocked(scales)
    assert blocked.dtype == dtype
    back = from_blocked(blocked, rows, columns)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_refusals() -> None:
    with pytest.raises(BadInput, match="scale rows 32 is not a multiple of 64"):
        fold_k32(plane(1, 32, 4))
    with pytest.raises(BadInput, match="scale columns 4 is not a multiple of 8"):
        fold_k16(plane(1, 64, 4))
    with pytest.raises(BadInput, match="is not of shape"):
        unfold_k16(plane(1, 1, 1, 16, 16))
    with pytest.raises(BadInput, match="is not of shape"):
        from_blocked(plane(1, 512), 129, 4)
    with pytest.raises(BadInput, match="do not fit 2 experts"):
        from_cake_vectors(to_cake_vectors(plane(1, 128, 4)), 2, 128)
