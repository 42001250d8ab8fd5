"""A layer made in one of PyTorch's modes serves in every other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import emulated
from emulated.layers import Layer
from kernels.test_adapters_mutants import WEIGHTS, case
from parallel.shares import same_bits

import megamoe
from megamoe.errors import BadInput
from megamoe.problem import BF16_COMBINE, MoEWeights, Placement

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "plain": contextlib.nullcontext,
}


def one(kernel: str, seed: int = 1) -> Layer:
    like = case(kernel if kernel in WEIGHTS else "sm90_pull_bf16")
    return Layer(
        kernel=kernel, weights=like.weights, placement=Placement.contiguous(4, 1),
        ids=(((0, 1), (2, 3), (-1, 2)),), capacity=4, hidden=like.hidden, machine=like.machine,
        seed=seed,
    )  # fmt: skip


def prepare(layer: Layer, weights: MoEWeights, **more: Any) -> megamoe.PreparedWeights:
    return megamoe.prepare(
        weights, max_tokens_per_rank=4, top_k=2, kernel=layer.kernel,
        activation_scales=layer.activation_scales, tuning="off", **more,
    )  # fmt: skip


def serves(ready: megamoe.PreparedWeights, layer: Layer) -> None:
    x, topk = layer.x(0), layer.topk(0)
    want = layer.expected(0, ready.decision.recipe)
    for mode in MODES.values():
        with mode():
            for most in (None, 3, 7):
                same_bits([ready.forward(x, topk, max_tokens=most)], want)
            out = torch.empty_like(x)
            same_bits([ready.forward(x, topk, out=out)], want)


KERNELS = ("reference", "torch_grouped", "sm90_pull_fp8", "sm90_push_bf16", "sm90_pull_nvfp4")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_call_of_a_cold_layer_may_come_in_any(kernel: str) -> None:
    layer = one(kernel)
    with emulated(layer.machine), prepare(layer, layer.held(0)) as ready:
        serves(ready, layer)


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_made_in_one_mode_is_used_in_all(kernel: str, made: str) -> None:
    before, after = one(kernel), one(kernel, seed=77)
    with emulated(before.machine):
        with MODES[made]():
            old, new = before.held(0), after.held(0)
            ready = prepare(before, old, most_replicas=1, workspaces=(2,))
            ready.warmup()
        serves(ready, before)
        ready.update(new)
        serves(ready, after)
        with MODES[made]():
            ready.update(old)
        serves(ready, before)
        ready.update(new)
        serves(ready, after)
        with MODES[made]():
            ready._staging.sticky.fill_(True)
        with pytest.raises(BadInput, match="since the last check"):
            ready.check()
        ready.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_default_device_is_not_followed(kernel: str) -> None:
    before, after = one(kernel), one(kernel, seed=77)
    old, new = before.held(0), after.held(0)
    with emulated(before.machine):
        with torch.device("meta"):
            ready = prepare(before, old, most_replicas=1, workspaces=(2,))
            ready.warmup()
            ready.update(new)
        y = ready.forward(after.x(0), after.topk(0))
        same_bits([y], after.expected(0, ready.decision.recipe))
        ready.close()


@pytest.mark.parametrize("made", MODES)
def test_raw_weights_too(made: str) -> None:
    layer = one("reference")
    weights = layer.held(0)
    for mode in (MODES[made], *MODES.values()):
        with mode():
            y = megamoe.forward(layer.x(0), layer.topk(0), weights)
            same_bits([y], layer.expected(0, BF16_COMBINE))
