"""The canary sings on this machine, and falls silent where arithmetic is not the contract's."""

from __future__ import annotations

import pytest
import torch

from megamoe.errors import MegaMoEError
from megamoe.reference import canary
from megamoe.reference.canary import check_device, digest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh():
    """Each test asks anew, and leaves no answer of its own behind."""
    check_device.cache_clear()
    yield
    check_device.cache_clear()


def test_this_machine_keeps_the_contract() -> None:
    check_device(CPU)


@pytest.mark.gpu
def test_the_gpu_keeps_the_contract() -> None:
    check_device(torch.device("cuda"))


def test_flushed_denormals_are_named() -> None:
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals: run the test where one can")
    try:
        with pytest.raises(MegaMoEError, match="denormal numbers are flushed to zero; unset"):
            check_device(CPU)
    finally:
        torch.set_flush_denormal(False)
    check_device(CPU)  # a refusal is not remembered


def test_another_exponential_is_named(monkeypatch) -> None:
    monkeypatch.setattr(canary, "exp", torch.exp)
    with pytest.raises(MegaMoEError, match=r"on cpu .* the exponential has other bits"):
        check_device(CPU)


class Reduced(torch.Tensor):
    """Matrix products in float32, as an emulation with too few slices gives."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            a, b = (t.as_subclass(torch.Tensor).to(torch.float32) for t in args)
            return (a @ b).to(torch.float64)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_reduced_matrix_products_are_named(monkeypatch) -> None:
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *args, **kwargs: arange(*args, **kwargs).as_subclass(Reduced)
    )
    with pytest.raises(MegaMoEError, match="float64 matrix products are emulated or reduced"):
        check_device(CPU)


def test_digest_reads_values_in_row_major_order() -> None:
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest(x.T) == digest(x.T.contiguous())
    assert digest(x) != digest(x.T)
    assert digest(x.to(torch.bfloat16)) != digest(x)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(0, 4)) == "e3b0c44298fc1c14"  # sha256 of nothing
