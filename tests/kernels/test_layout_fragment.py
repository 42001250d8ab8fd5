"""Signs within a word, and words within a matrix fragment."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import BadInput
from megamoe.kernels.layout import (
    braid_signs,
    from_fragments,
    pack_codes,
    to_fragments,
    unbraid_signs,
    unpack_codes,
)


def random_payload(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def decoded(braided: torch.Tensor) -> torch.Tensor:
    """What both decoders read: magnitudes from their nibbles, signs by two masks of four.

    The word's bytes' top bits are the signs of columns 0 to 3; those of the word shifted left by
    four are the signs of columns 4 to 7.
    """
    nibbles = unpack_codes(braided).unflatten(-1, (-1, 8))
    first, second = nibbles[..., 1::2], nibbles[..., 0::2]
    return ((nibbles & 7) | (torch.cat((first, second), -1) & 8)).flatten(-2)


def test_braided_words_decode_to_their_columns() -> None:
    every_bit = torch.zeros(33, 4, dtype=torch.uint8)
    for bit in range(32):
        every_bit[bit, bit // 8] = 1 << bit % 8
    for words in (every_bit, random_payload(0, 500, 4)):
        assert torch.equal(decoded(braid_signs(words)), unpack_codes(words))
        assert torch.equal(unbraid_signs(braid_signs(words)), words)
        assert torch.equal(braid_signs(unbraid_signs(words)), words)


def test_braiding_takes_unaligned_views() -> None:
    """Slices of a checkpoint's storage start anywhere; a wider view of them needs a copy."""
    storage = random_payload(1, 66)
    for offset in (1, 2):
        words = storage[offset : offset + 64].view(4, 16)
        assert torch.equal(braid_signs(words), braid_signs(words.clone()))


def scalar_fragments(payload: torch.Tensor) -> torch.Tensor:
    """The kernel's order, written lane by lane."""
    experts, rows, row_bytes = payload.shape
    codes = unpack_codes(payload)
    out = torch.zeros(experts, rows, row_bytes * 2, dtype=torch.uint8)
    for row in range(0, rows, 16):
        for lane_row in range(8):
            for column in range(0, row_bytes * 2, 64):
                for lane in range(16):
                    k = column + 4 * lane
                    upper, lower = row + lane_row, row + lane_row + 8
                    word = torch.cat(
                        (codes[:, upper, k : k + 4], codes[:, lower, k : k + 4]), dim=-1
                    )
                    target_row = lower if lane % 8 >= 4 else upper
                    target = column + 32 * (lane // 8) + 8 * (lane % 4)
                    braided = unpack_codes(braid_signs(pack_codes(word)))
                    out[:, target_row, target : target + 8] = braided
    return pack_codes(out)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 64), (16, 192)])
def test_fragments_are_in_the_kernels_order(rows: int, columns: int) -> None:
    payload = random_payload(2, 2, rows, columns // 2)
    assert torch.equal(to_fragments(payload), scalar_fragments(payload))


@settings(deadline=None)
@given(experts=st.integers(0, 3), m16=st.integers(0, 4), k64=st.integers(0, 4))
def test_fragments_round_trip(experts: int, m16: int, k64: int) -> None:
    payload = random_payload(3, experts, 16 * m16, 32 * k64)
    there = to_fragments(payload)
    assert there.shape == payload.shape
    assert there.is_contiguous()
    assert torch.equal(from_fragments(there), payload)
    assert torch.equal(to_fragments(from_fragments(payload)), payload)


def test_fragments_of_one_expert_do_not_depend_on_the_others() -> None:
    payload = random_payload(4, 3, 32, 64)
    assert torch.equal(to_fragments(payload)[1:2], to_fragments(payload[1:2]))


def test_refusals() -> None:
    with pytest.raises(BadInput, match="FP4 rows 8 is not a multiple of 16"):
        to_fragments(torch.zeros(1, 8, 32, dtype=torch.uint8))
    with pytest.raises(BadInput, match="FP4 columns 32 is not a multiple of 64"):
        to_fragments(torch.zeros(1, 16, 16, dtype=torch.uint8))
    with pytest.raises(BadInput, match="is not 3-dimensional"):
        from_fragments(torch.zeros(16, 32, dtype=torch.uint8))
    with pytest.raises(BadInput, match="is not uint8"):
        braid_signs(torch.zeros(4, dtype=torch.int8))
