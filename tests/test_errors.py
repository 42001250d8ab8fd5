"""The errors: their ancestry, their one-line messages, and that they survive a process boundary."""

import pickle

import pytest
import torch

from megamoe.errors import (
    BadInput,
    MegaMoEError,
    Mismatch,
    RankFailure,
    Unsupported,
    bad_input,
    one_line,
)

OBJECTIONS = {
    "sm90_pull_bf16": ("needs compute capability 9.0, found 8.0", "top_k 12 is above 8"),
    "torch_grouped": ("needs CUDA",),
}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (BadInput, ValueError),
        (Unsupported, Exception),
        (Mismatch, AssertionError),
        (RankFailure, RuntimeError),
    ],
)
def test_ancestry(error: type[MegaMoEError], builtin: type[Exception]) -> None:
    assert issubclass(error, MegaMoEError)
    assert issubclass(error, builtin)
    with pytest.raises(builtin, match=r"^why$"):
        raise error("why")


def test_bad_input_message() -> None:
    error = bad_input("hidden_size", 1000, "is not a multiple of 128", "pad to 1024")
    assert type(error) is BadInput
    assert str(error) == "hidden_size 1000 is not a multiple of 128; pad to 1024"


@pytest.mark.parametrize("value", [torch.zeros(3, 3), "two\nlines", "", (1, 2), torch.float32])
def test_message_stays_on_one_line(value: object) -> None:
    message = one_line("x", value, "is wrong", "mend it")
    assert "\n" not in message
    assert "  " not in message
    assert message.startswith("x ")
    assert message.endswith(" is wrong; mend it")


def test_unsupported_carries_and_shows_every_objection() -> None:
    error = Unsupported("no kernel computes this layer", objections=OBJECTIONS)
    assert error.objections == OBJECTIONS
    assert str(error).splitlines() == [
        "no kernel computes this layer",
        "  sm90_pull_bf16: needs compute capability 9.0, found 8.0; top_k 12 is above 8",
        "  torch_grouped: needs CUDA",
    ]


def test_unsupported_without_objections_is_its_message() -> None:
    error = Unsupported("no kernel computes this layer")
    assert error.objections == {}
    assert str(error) == "no kernel computes this layer"


def test_unsupported_keeps_its_own_copy() -> None:
    given = dict(OBJECTIONS)
    error = Unsupported("no kernel", objections=given)
    given.clear()
    assert error.objections == OBJECTIONS


def test_errors_cross_a_process_boundary() -> None:
    error = Unsupported("no kernel", objections=OBJECTIONS)
    error.add_note("on rank 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is Unsupported
    assert str(copy) == str(error)
    assert copy.objections == OBJECTIONS
    assert copy.__notes__ == ["on rank 3"]
