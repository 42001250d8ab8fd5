"""The router: logits, and from them one defined choice of experts and their weights.

Every step is float64 arithmetic in a written order, rounded to float32 once at each named point
(score, biased score, group score, weight), so ids and weights have the same bits on every device.
Nothing is read back from the device, except by a hash-routed layer that checks its ``input_ids``.

Shapes: T tokens, E experts, K slots a token, G groups, H hidden_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import F64, rn32
from megamoe.problem import Router, TopK
from megamoe.reference.dot import dot
from megamoe.reference.elementwise import exp, log1p_exp, sigmoid

INDEX = 1 << 32  # a sort key is float32 order * INDEX + (last index - index): no two are equal
NAN_ORDER = 0x7FFFFFFF  # above infinity
MASKED_ORDER = -0x80000000  # below -infinity


def logits(x: Tensor, router: Router) -> Tensor:
    """The correctly rounded gate: RN32 of the exact x [T, H] times weight, float32 [T, E].

    A bias is added after that rounding, and the sum rounded once more. Reads back from the device
    (which elements to repair); ``Router.logits`` is the capture-safe neighbour, without the repair.
    """
    weight = router.weight
    if not x.dtype.is_floating_point or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise bad_input(
            "x", f"of {x.dtype} and shape {list(x.shape)}",
            f"is not floating [tokens, {weight.shape[1]}]", "pass the layer's input",
        )  # fmt: skip
    _check_device("x", x, "router.weight", weight)
    out = dot(x.to(F64), weight.to(F64))
    return out if router.bias is None else rn32(out.to(F64) + router.bias.to(F64))


def route(logits: Tensor, router: Router, *, input_ids: Tensor | None = None) -> TopK:
    """The chosen experts, int64 [T, K], and their weights, float32; never the scaling factor.

    logits: floating [T, E], used as float32. input_ids: integers, T in all, for a hash-routed
    layer; ignored by every other.

    Choice: the greatest biased scores of the allowed groups, ties to the lower id. Slots stand in
    that order; a hash-routed layer's stand in its table's. The bias enters the choice only. A NaN
    counts as the greatest score (as in ``torch.topk``), so that it cannot go unseen: it takes a
    slot, and its weight is NaN. softmax_of_top_k has nothing left to renormalise. A row whose
    weights sum to zero without an epsilon is NaN, as in IEEE.

    Raises BadInput on shapes, dtypes and devices, and on input_ids missing or outside the
    vocabulary; inside a CUDA graph capture, where nothing can be raised, such a token gets the
    invalid id E, which ``forward`` flags.
    """
    _check(logits, router)
    values = logits.to(torch.float32).to(F64)
    scores = _scores(values, router)
    if router.table is not None:
        ids, known = _by_table(router, input_ids, logits)
    else:
        ids, known = _choose(scores, router), None
    chosen = scores.gather(1, ids)
    if router.scoring == "softmax_of_top_k":
        weights = _softmax(chosen)
    elif router.renormalise:
        weights = chosen / (_sum_in_order(chosen)[:, None] + router.epsilon)
    else:
        weights = chosen
    if known is not None:
        ids = torch.where(known, ids, router.num_experts)
    return TopK(ids=ids, weights=rn32(weights), scaled=False)


def _scores(values_TE: Tensor, router: Router) -> Tensor:
    """float64 [T, E] of float32 values: what is compared, and what the weights are made of."""
    if router.scoring == "softmax_of_top_k":
        return values_TE  # the logits themselves; the softmax comes after the choice
    if router.scoring == "softmax":
        scores = _softmax(values_TE)
    elif router.scoring == "sigmoid":
        scores = sigmoid(values_TE)
    else:
        scores = log1p_exp(values_TE).sqrt()
    return rn32(scores).to(F64)


def _softmax(values: Tensor) -> Tensor:
    """exp(v - max) / sum over the last dimension, float64.

    The sum is of integers, in units of 2 ** -48: exact in any order, for up to MAX_EXPERTS terms.
    """
    terms = exp(values - values.amax(dim=-1, keepdim=True))
    units = (terms.nan_to_num(0.0) * 2.0**48).round().to(torch.int64).sum(-1, keepdim=True)
    total = units.to(F64) * 2.0**-48
    poisoned = terms.isnan().any(dim=-1, keepdim=True)
    return terms / torch.where(poisoned, torch.nan, total)


def _sum_in_order(values_TK: Tensor) -> Tensor:
    """((v0 + v1) + v2) + ...: a library's own sum has no defined order."""
    total = values_TK[:, 0]
    for slot in range(1, values_TK.shape[1]):
        total = total + values_TK[:, slot]
    return total


def _choose(scores_TE: Tensor, router: Router) -> Tensor:
    """The ids of the router's own choice, int64 [T, K]."""
    choice = rn32(scores_TE)
    if router.correction_bias is not None:
        choice = rn32(scores_TE + router.correction_bias.to(F64))
    order = _order(choice)
    if router.top_groups < router.num_groups:
        order = torch.where(_allowed(choice, router), order, MASKED_ORDER)
    return _greatest(order, router.top_k)


def _allowed(choice_TE: Tensor, router: Router) -> Tensor:
    """bool [T, E]: experts of the groups with the greatest sums of their two best biased scores."""
    choice_TGn = choice_TE.view(
        len(choice_TE), router.num_groups, router.num_experts // router.num_groups
    )
    best = choice_TGn.gather(2, _greatest(_order(choice_TGn), 2)).to(F64)
    group_TG = rn32(best[..., 0] + best[..., 1])
    kept = _greatest(_order(group_TG), router.top_groups)
    allowed_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter(1, kept, True)
    return allowed_TG[..., None].expand_as(choice_TGn).flatten(1)


def _order(values: Tensor) -> Tensor:
    """float32 to int64 that compare alike: -0 equals +0, and every NaN is above infinity."""
    bits = values.view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    order = torch.where(bits < 0, -magnitude, magnitude)
    return torch.where(values.isnan(), NAN_ORDER, order)


def _greatest(order: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` greatest of the last dimension, descending, ties to the lower one.

    The index is part of the key, so keys are distinct and any correct top-k gives the same answer.
    """
    last = order.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=order.device)
    keys = (order * INDEX + index).topk(count, dim=-1, sorted=True).values
    return last - (keys & (INDEX - 1))


def _by_table(
    router: Router, input_ids: Tensor | None, logits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """ids by token, int64 [T, K], and which of them exist, bool [T, K] (None: all of them)."""
    table = router.table
    assert table is not None
    if input_ids is None:
        raise bad_input(
            "input_ids", "None", "leave a hash-routed layer without its choice",
            "pass route(..., input_ids=) with one token id a row",
        )  # fmt: skip
    if input_ids.dtype not in (torch.int32, torch.int64) or input_ids.numel() != len(logits):
        raise bad_input(
            "input_ids", f"of {input_ids.dtype} and shape {list(input_ids.shape)}",
            f"are not int32 or int64, {len(logits)} in all", "pass one token id a row of logits",
        )  # fmt: skip
    _check_device("input_ids", input_ids, "logits", logits)
    tokens, vocabulary = input_ids.flatten().to(torch.int64), len(table)
    known = (tokens >= 0) & (tokens < vocabulary)
    ids = table[torch.where(known, tokens, 0)].to(torch.int64)
    exists = (ids >= 0) & (ids < router.num_experts) & known[:, None]
    ids = torch.where(exists, ids, 0)
    if logits.is_cuda and torch.cuda.is_current_stream_capturing():
        return ids, exists
    if not bool(exists.all()):
        row = int((~exists).any(dim=1).nonzero()[0, 0])
        token = int(tokens[row])
        if 0 <= token < vocabulary:
            raise bad_input(
                f"router.table row {token}", table[token].tolist(),
                f"names an expert outside [0, {router.num_experts})", "load tid2eid as stored",
            )  # fmt: skip
        raise bad_input(
            f"input_ids row {row}", token, f"is outside the vocabulary [0, {vocabulary})",
            "pass the token ids that the embedding took",
        )  # fmt: skip
    return ids, None


def _check(logits: Tensor, router: Router) -> None:
    experts = router.num_experts
    if not logits.dtype.is_floating_point or logits.dtype.itemsize < 2:
        raise bad_input(
            "logits", f"of {logits.dtype}", "are not float32, bfloat16, float16 or float64",
            "pass router.logits(x)",
        )  # fmt: skip
    if logits.dim() != 2 or logits.shape[1] != experts:
        raise bad_input(
            "logits", f"of shape {list(logits.shape)}", f"are not [tokens, {experts}]",
            "pass router.logits(x) of the same router",
        )  # fmt: skip
    for name in ("correction_bias", "table"):
        tensor = getattr(router, name)
        if tensor is not None:
            _check_device(f"router.{name}", tensor, "logits", logits)


def _check_device(name: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise bad_input(
            name, f"on {tensor.device}", f"is not on the {reference.device} of {other}", "move it"
        )
