"""Raw weights on one rank: a layer behind them, that no call breaks and that goes when they go."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from emulated import emulated
from kernels.test_adapters_mutants import case
from parallel.shares import same_bits
from strategies import Case

import megamoe
from megamoe import api
from megamoe.dispatch import session
from megamoe.errors import BadInput
from megamoe.problem import Placement, TopK
from megamoe.reference.moe import Emulated, layer

FEW = Case(tokens=6, experts=4, top_k=2)
MANY = dataclasses.replace(FEW, tokens=100)


def wanted(case: Case) -> torch.Tensor:
    recipe = megamoe.prepare(case.layer(), max_tokens_per_rank=1, top_k=2).decision.recipe
    return layer(case.x(), case.topk(), case.layer(), Emulated(recipe))


def test_a_layer_that_cannot_grow_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = FEW.layer()
    same_bits([megamoe.forward(FEW.x(), FEW.topk(), weights)], wanted(FEW))
    with monkeypatch.context() as patch:
        patch.setenv("MEGAMOE_PARITY", "abc")
        with pytest.raises(BadInput, match="MEGAMOE_PARITY"):
            megamoe.forward(MANY.x(), MANY.topk(), weights)
    for good in (FEW, MANY, FEW):
        same_bits([megamoe.forward(good.x(), good.topk(), weights)], wanted(good))


def test_what_a_layer_says_as_it_closes_to_grow_is_said_once() -> None:
    weights = FEW.layer()
    megamoe.forward(FEW.x(), FEW.topk(), weights)
    api._PREPARED[weights][0]._staging.sticky.fill_(True)
    with pytest.raises(BadInput, match="since the last check"):
        megamoe.forward(MANY.x(), MANY.topk(), weights)
    for good in (FEW, MANY):
        same_bits([megamoe.forward(good.x(), good.topk(), weights)], wanted(good))


@pytest.mark.parametrize("grown", [False, True])
def test_a_bad_call_leaves_the_layer_as_it_was(grown: bool) -> None:
    weights, x, topk = FEW.layer(), MANY.x(), MANY.topk()
    if grown:
        megamoe.forward(FEW.x(), FEW.topk(), weights)
    before = api._PREPARED.get(weights)
    none = TopK(ids=topk.ids[:, :0], weights=topk.weights[:, :0])
    for given, words in (
        ((x, none), "top_k 0 is below 1"),
        ((x, (topk.ids, topk.weights[:, :1])), "do not match ids of shape"),
        ((x[0, 0], topk), r"x of shape \[\] is not \[tokens, 40\]"),
        ((x[:, 1:], topk), r"x of shape \[100, 39\] is not \[tokens, 40\]"),
        ((x, TopK(ids=topk.ids + 9, weights=topk.weights)), r"is outside \[-1, 4\)"),
    ):
        with pytest.raises(BadInput, match=words):
            megamoe.forward(*given, weights)
        assert api._PREPARED.get(weights) is before
    with pytest.raises(BadInput, match=r"out of torch\.float32"):
        megamoe.forward(x, topk, weights, out=torch.empty(100, 40))
    assert api._PREPARED.get(weights) is before
    same_bits([megamoe.forward(FEW.x(), FEW.topk(), weights)], wanted(FEW))


def test_an_id_that_only_the_device_saw_is_told_by_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where ids are not looked at on the host."""
    for module in (api, session):
        monkeypatch.setattr(module, "check_ids", lambda *_: None, raising=False)
    weights, x, topk = FEW.layer(), FEW.x(), FEW.topk()
    wild = TopK(ids=topk.ids + 9, weights=topk.weights)
    for _ in range(2):
        with pytest.raises(BadInput, match=r"a value outside \[-1, 4\)"):
            megamoe.forward(x, wild, weights)
        same_bits([megamoe.forward(x, topk, weights)], wanted(FEW))


def test_workspaces_go_with_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(
        case("sm90_pull_fp8"), placement=Placement.contiguous(4, 1), ids=(((0, 1), (2, 3)),)
    )
    many = dataclasses.replace(one, ids=(one.ids[0] * 40,))
    monkeypatch.setenv("MEGAMOE_KERNEL", one.kernel)
    with emulated() as device:
        weights = one.held(0)
        megamoe.forward(one.x(0), one.topk(0), weights)
        small = weakref.ref(api._PREPARED[weights][0])
        megamoe.forward(many.x(0), many.topk(0), weights)
        gc.collect()
        assert small() is None
        assert device.open_workspaces == 1
        del weights
        gc.collect()
        assert device.open_workspaces == 0
