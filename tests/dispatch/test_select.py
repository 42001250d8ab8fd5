"""The choice: the first without an objection, every reason kept; never the reference unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.dispatch.machine import CPU, H20, H200, SM120
from megamoe.dispatch.models import MODELS
from megamoe.dispatch.select import KERNELS, refusals, select
from megamoe.errors import BadInput, Unsupported
from megamoe.kernels.base import Kernel
from megamoe.kernels.reference import Reference
from megamoe.problem import Request

REQUEST = MODELS["qwen3-30b-a3b"].request(world_size=8, max_tokens_per_rank=64)
SENTENCE = "is the judge: on a GPU it runs only where it is named"


def only_the_reference() -> tuple[type[Kernel], ...]:
    return (Reference,)


@pytest.mark.parametrize("machine", [H200, H20, SM120], ids=lambda m: m.name)
def test_on_a_gpu_the_reference_is_never_chosen_silently(machine) -> None:
    for model in MODELS.values():
        request = model.request(world_size=1, max_tokens_per_rank=64)
        assert select(request, machine).name != "reference"
    with pytest.raises(Unsupported) as refused:
        select(REQUEST, machine, kernels=only_the_reference())
    assert refused.value.objections == {"reference": (SENTENCE,)}
    assert SENTENCE in str(refused.value)


def test_named_it_runs_anywhere_and_on_a_cpu_unasked() -> None:
    decision = select(REQUEST, H200, only="reference")
    assert (decision.name, decision.named) == ("reference", True)
    assert select(REQUEST, CPU).name == "reference"


def test_the_first_without_an_objection_and_every_reason_before_it() -> None:
    decision = select(REQUEST, H200)
    names = [kernel.sheet.name for kernel in KERNELS]
    before = names[: names.index(decision.name)]
    assert list(decision.refusals) == before
    assert all(decision.refusals.values())
    text = str(decision)
    for name, why in decision.refusals.items():
        assert f"not {name}: {'; '.join(why)}" in text


def test_preference_is_the_order_of_the_tuple() -> None:
    able = [k for k in KERNELS if not refusals(k, REQUEST, H200)]
    assert len(able) > 1
    for order in (able, able[::-1]):
        assert select(REQUEST, H200, kernels=order).kernel is order[0]


def test_a_name_that_objects_is_refused_with_its_own_reasons() -> None:
    with pytest.raises(Unsupported, match="kernel sm120_mxfp8 cannot run this layer") as refused:
        select(REQUEST, H200, only="sm120_mxfp8")
    assert list(refused.value.objections) == ["sm120_mxfp8"]
    with pytest.raises(BadInput, match="'none' is unknown; use one of sm90_pull_mxfp4"):
        select(REQUEST, H200, only="none")


def test_nothing_left_names_every_kernel() -> None:
    old = replace(H200, name="old GPU", capability=(7, 0), flashinfer=None)
    with pytest.raises(Unsupported, match="no kernel can run this layer on old GPU") as refused:
        select(REQUEST, old)
    assert list(refused.value.objections) == [kernel.sheet.name for kernel in KERNELS]


def test_a_request_needs_no_tensors() -> None:
    assert isinstance(REQUEST, Request)
    assert MODELS["qwen3-30b-a3b"].request(world_size=8, max_tokens_per_rank=64) == REQUEST
