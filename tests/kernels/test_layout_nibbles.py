"""FP4 codes and their bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import BadInput
from megamoe.kernels.layout import from_marlin, pack_codes, to_marlin, unpack_codes


def test_every_byte_holds_its_even_column_in_the_low_nibble() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = unpack_codes(every)
    assert codes.tolist() == [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert torch.equal(pack_codes(codes), every)


@given(lead=st.lists(st.integers(0, 3), max_size=2), words=st.integers(0, 3))
def test_marlin_order_is_as_defined(lead: list[int], words: int) -> None:
    generator = torch.Generator().manual_seed(words)
    codes = torch.randint(0, 16, (*lead, 8 * words), dtype=torch.uint8, generator=generator)
    payload = pack_codes(codes)
    marlin = to_marlin(payload)
    assert marlin.shape == payload.shape
    words_of_codes = codes.view(*lead, words, 8)
    for byte in range(4):
        got = marlin.view(*lead, words, 4)[..., byte]
        assert torch.equal(got >> 4, words_of_codes[..., byte])
        assert torch.equal(got & 15, words_of_codes[..., byte + 4])
    assert torch.equal(from_marlin(marlin), payload)


def test_marlin_round_trips_every_byte_in_every_place() -> None:
    words = torch.zeros(4, 256, 4, dtype=torch.uint8)
    for place in range(4):
        words[place, :, place] = torch.arange(256)
    assert torch.equal(from_marlin(to_marlin(words)), words)
    assert torch.equal(to_marlin(from_marlin(words)), words)


def test_refusals() -> None:
    with pytest.raises(BadInput, match=r"payload torch\.int32 is not uint8"):
        unpack_codes(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(BadInput, match="3 is not a multiple of 2"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))
    for function in (to_marlin, from_marlin):
        with pytest.raises(BadInput, match="6 is not a multiple of 4"):
            function(torch.zeros(6, dtype=torch.uint8))
