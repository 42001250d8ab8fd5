"""The calls: load, route, prepare, forward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megamoe import settings
from megamoe.checkpoint import load
from megamoe.dispatch.machine import current, probe
from megamoe.dispatch.modes import lasting
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.refuse import check_call, check_ids
from megamoe.dispatch.select import KERNELS, Decision, select
from megamoe.dispatch.session import PreparedWeights
from megamoe.dispatch.startup import Start, check_options
from megamoe.dispatch.tuning import Mode
from megamoe.dispatch.watchdog import TIMEOUT, OnFailure
from megamoe.dispatch.workspaces import ascending
from megamoe.errors import BadInput, bad_input
from megamoe.parity import Parity
from megamoe.problem import Host, MoEWeights, Request, TopK, family_recipe
from megamoe.reference.router import route


def prepare(
    weights: MoEWeights,
    group: Any = None,
    *,
    max_tokens_per_rank: int,
    top_k: int | None = None,
    kernel: str = "auto",
    host: Host | None = None,
    activation_scales: tuple[float, float] | None = None,
    workspaces: Iterable[int] = (),
    tuning: Mode | None = None,
    samples: tuple[Tensor, TopK] | None = None,
    most_replicas: int | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    on_failure: OnFailure = "abort",
) -> PreparedWeights:
    """Choose a kernel for a loaded layer, pack the weights for it and open its workspaces.

    Collective over ``group`` (a torch.distributed ProcessGroup; None is the default group where the
    weights were loaded for more than one rank). max_tokens_per_rank: the capacity, the same on
    every rank. top_k: where the weights carry no router. kernel: "auto", or a name that alone may
    be chosen.

    activation_scales: calibrated scales of FC1's and of FC2's input, for FP8 experts with one scale
    a matrix; kernels that measure their own scales ignore them.

    workspaces: capacities of further workspaces, tokens a rank, such as (64, 256, 1024); a step
    runs in the one that its max_tokens chooses. Which serves which is measured in ``warmup``, where
    tuning allows it. tuning: "on" also measures the kernel's tactics here, which compiles each
    (minutes); None is MEGAMOE_TUNING's. Winners are kept in MEGAMOE_CACHE_DIR, and found there by
    the next start. samples: (x, topk) like the rows that will be served, for these measurements.

    most_replicas: how many slots may come to hold one expert, where ``layer.update`` is to
    exchange experts or move them between ranks; the layer then copies all that it packs, and
    otherwise keeps views of what a kernel takes as it is.

    options: of one kernel alone, by name: {"family": "split"} for standalone NVFP4 pins which of
    its two kernels runs.

    timeout: seconds that a call waits for a rank that lives but does not come; it is then named. A
    rank that raises or dies is named earlier. Where the call cannot raise any more, because it
    waits inside a kernel, the process is aborted (on_failure "abort"), or the layer marked dead,
    after which every use raises RankFailure ("raise").

    With MEGAMOE_PARITY=N every Nth forward is judged, and raises Mismatch where a verdict goes
    against it; the layer then keeps every rank's experts as loaded, in host memory.

    Raises Unsupported with every kernel's objections where none fits, BadInput for bad arguments,
    RankFailure on every rank where they disagree, or where one of them raised or is gone.
    """
    world_size = weights.placement.world_size
    ranks = Ranks.of(group, world_size=world_size)
    try:
        with ranks.step("prepare"), current(weights.device), lasting():
            ranks.fit(
                rank=weights.rank, world_size=world_size, timeout=timeout, on_failure=on_failure
            )
            asked = read_settings()
            request = Request.of(
                weights,
                top_k=_top_k(weights, top_k),
                max_tokens_per_rank=max_tokens_per_rank,
                activation_scales=activation_scales,
                host=host,
            )
            shared_by = ranks.ranks_per_gpu(weights.device)
            decision = decide(request, weights.device, kernel, asked, ranks_per_gpu=shared_by)
            watch = Parity.of(weights, decision, ranks, asked)
            start = Start(
                capacities=ascending(workspaces) if workspaces else (),
                tuning=tuning or asked.tuning,
                cache_dir=asked.cache_dir,
                samples=samples,
                most_replicas=most_replicas,
                options=_options(decision, kernel, asked, options or {}),
            )
            return PreparedWeights(weights, decision, ranks, watch, start)
    except BaseException:
        ranks.close()
        raise


def decide(
    request: Request,
    device: torch.device,
    kernel: str,
    asked: settings.Settings,
    *,
    ranks_per_gpu: int = 1,
) -> Decision:
    """The decision, with what the environment asks for: a pinned kernel, or the reference."""
    machine = probe(device, ranks_per_gpu=ranks_per_gpu)
    _known("kernel", kernel)
    name = kernel if asked.kernel is None else _known("MEGAMOE_KERNEL", asked.kernel)
    only = None if name == "auto" else name
    if asked.force_reference == "off":
        return select(request, machine, KERNELS, only)
    recipe = family_recipe(request.weight_at)
    if asked.force_reference == "emulate":
        recipe = select(request, machine, KERNELS, only).recipe
    forced = select(request, machine, KERNELS, "reference")

    return dataclasses.replace(forced, recipe=recipe)


def _known(subject: str, name: str) -> str:
    names = ["auto", *(kernel.sheet.name for kernel in KERNELS)]
    if name not in names:
        raise bad_input(subject, repr(name), "is unknown", f"use one of {', '.join(names)}")
    return name


def _options(
    decision: Decision, kernel: str, asked: settings.Settings, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The caller's options, where its own choice of kernel stands.

    Those of one that the environment replaced are looked at by its sheet, and reach no other.
    """
    stands = asked.kernel is None and asked.force_reference == "off"
    if stands or decision.name == kernel:
        return options
    for named in KERNELS:
        if named.sheet.name == kernel:
            check_options(options, named.sheet)
    return {}


def read_settings() -> settings.Settings:
    try:
        return settings.read()
    except ValueError as error:
        raise BadInput(str(error)) from None


def _top_k(weights: MoEWeights, top_k: int | None) -> int:
    routed = None if weights.router is None else weights.router.top_k
    if top_k is None and routed is None:
        raise bad_input("top_k", "None", "is unknown: the weights carry no router", "pass top_k")
    return top_k or routed or 0


_PREPARED: weakref.WeakKeyDictionary[
    MoEWeights, tuple[PreparedWeights, weakref.finalize[[], MoEWeights]]
] = weakref.WeakKeyDictionary()
"""Of raw weights, the layer behind them and what closes it, at the latest when they are gone."""


def forward(
    x: Tensor,
    topk: TopK | tuple[Tensor, Tensor],
    weights: MoEWeights | PreparedWeights,
    *,
    max_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run one Mixture-of-Experts layer on this rank's tokens: BF16 [T, hidden_size].

    x: BF16 [T, hidden_size], any strides. topk: a TopK, or a plain (ids, weights) where the layer's
    routed_scaling_factor is 1. weights: a prepared layer, or raw MoEWeights on one rank, which are
    prepared at the first call; outside of a graph each call waits for the device and raises what
    it flagged. max_tokens: the step's greatest T over all ranks. out: written and returned where
    given.

    Raises BadInput before anything is launched: inputs are untouched and no rank is left waiting.
    """
    if isinstance(weights, PreparedWeights):
        return weights.forward(x, topk, max_tokens=max_tokens, out=out)
    if weights.placement.world_size > 1:
        raise bad_input(
            "weights", f"of rank {weights.rank} of {weights.placement.world_size}",
            "are not prepared, and preparing is collective",
            "call megamoe.prepare on every rank and pass its result",
        )  # fmt: skip
    topk = TopK(ids=topk[0], weights=topk[1]) if isinstance(topk, tuple) else topk
    layer = _prepared(x, topk, weights, out)
    y = layer.forward(x, topk, max_tokens=max_tokens, out=out)
    recorded = torch.compiler.is_compiling() or (
        x.is_cuda and torch.cuda.is_current_stream_capturing()
    )
    if not recorded:
        layer.check()  # nobody else has the layer
    return y


def _prepared(x: Tensor, topk: TopK, weights: MoEWeights, out: Tensor | None) -> PreparedWeights:
    """Raw weights' own prepared layer; grown, in powers of two, when a call brings more tokens."""
    needed = max(64, 1 << max(0, topk.tokens - 1).bit_length())
    if (held := _PREPARED.get(weights)) is not None:
        request = held[0].request
        if request.max_tokens_per_rank >= needed and request.top_k == topk.top_k:
            return held[0]
    # A call that will be refused costs no layer.
    request = Request.of(weights, top_k=topk.top_k, max_tokens_per_rank=needed)
    check_call(x, topk, out, request, weights.device)
    check_ids(topk.ids, request.num_experts)
    if held is not None:
        del _PREPARED[weights]
        held[1]()
    layer = prepare(weights, max_tokens_per_rank=needed, top_k=topk.top_k)
    closing = weakref.finalize(weights, layer.close)
    closing.atexit = False
    _PREPARED[weights] = layer, closing
    return layer


__all__ = ["forward", "load", "prepare", "route"]
