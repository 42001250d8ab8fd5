"""What a prepared layer refuses, in one line each, before anything is launched."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.problem import MoEWeights, Request, TopK


def check_call(
    x: Tensor, topk: TopK, out: Tensor | None, request: Request, device: torch.device
) -> None:
    """What a call brings, against what the layer was prepared for."""
    hidden = request.hidden_size
    if x.dim() != 2 or x.shape[1] != hidden:
        raise bad_input(
            "x", f"of shape {list(x.shape)}", f"is not [tokens, {hidden}]", "flatten the batch"
        )
    if x.dtype != torch.bfloat16:
        raise bad_input("x", f"of {x.dtype}", "is not bfloat16", "cast with x.bfloat16()")
    if x.device != device:
        raise bad_input("x", f"on {x.device}", f"is not on the layer's {device}", "move it")
    if topk.ids.device != device:
        raise bad_input(
            "topk.ids", f"on {topk.ids.device}", f"are not on the layer's {device}",
            "move them",
        )  # fmt: skip
    if topk.tokens != x.shape[0]:
        raise bad_input(
            "topk.ids", f"of {topk.tokens} tokens", f"do not match x of {x.shape[0]}",
            "route the same tokens",
        )  # fmt: skip
    if topk.top_k != request.top_k:
        raise bad_input(
            "topk", f"of {topk.top_k} slots a token", f"is not top_k {request.top_k}",
            "prepare the layer for it",
        )  # fmt: skip
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise bad_input(
            "out", f"of {out.dtype} {list(out.shape)} on {out.device}",
            f"is not {x.dtype} {list(x.shape)} on {x.device}", "pass one like x",
        )  # fmt: skip
    if out is not None and not out.is_contiguous():
        raise bad_input(
            "out", f"of strides {out.stride()}", "is not contiguous", "pass one that is"
        )
    if out is None:
        return
    for name, read in (("x", x), ("topk.ids", topk.ids), ("topk.weights", topk.weights)):
        if overlap(read, out):
            raise bad_input(
                "out", "", f"shares memory with {name}, which is read after out is written",
                "pass another tensor",
            )  # fmt: skip


def check_ids(ids: Tensor, experts: int) -> None:
    """On a CPU, where looking costs nothing; on a GPU staging raises the flag."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high >= experts:
            raise bad_input(
                "topk.ids", low if low < -1 else high,
                f"is outside [-1, {experts})", "use -1 for an empty slot",
            )  # fmt: skip


def check_update(weights: MoEWeights, before: Request, rank: int, device: torch.device) -> None:
    """Experts that are to take the place of a layer's. before: the layer's request."""
    if (weights.rank, weights.device) != (rank, device):
        raise bad_input(
            "weights", f"of rank {weights.rank} on {weights.device}",
            f"are not rank {rank}'s on {device}", "pass this rank's share",
        )  # fmt: skip
    after = dataclasses.replace(
        Request.of(
            weights, top_k=before.top_k, max_tokens_per_rank=before.max_tokens_per_rank,
            activation_scales=before.activation_scales, host=before.host,
        ),
        placement=before.placement,
    )  # fmt: skip
    for field in dataclasses.fields(after):
        old, new = (getattr(request, field.name) for request in (before, after))
        if old != new:
            raise bad_input(
                f"weights' {field.name}", new, f"is not the layer's {old}",
                "close the layer and prepare it again",
            )  # fmt: skip
    old_places, places = before.placement, weights.placement
    sizes = [(p.num_experts, p.world_size, p.slots_per_rank) for p in (old_places, places)]
    if sizes[0] != sizes[1]:
        raise bad_input(
            "placement", f"of {sizes[1]} (experts, ranks, slots a rank)",
            f"is not the layer's {sizes[0]}", "close the layer and prepare it again",
        )  # fmt: skip


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share bytes, by the range that each one's strides span."""
    (low, high), (start, stop) = _span(a), _span(b)
    return low < stop and start < high


def _span(t: Tensor) -> tuple[int, int]:
    """The addresses that a tensor reaches, [first, past the last): two storages may be one memory.

    A tensor without values has no address.
    """
    first = t.data_ptr()
    if first == 0 or t.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first, first + (int(reach) + 1) * t.element_size()
