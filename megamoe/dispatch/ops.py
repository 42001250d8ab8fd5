"""A prepared layer's call as torch operators, so that ``torch.compile`` sees one opaque call.

``megamoe::forward`` stages and launches; it is not cut in two, because what is staged lies in
buffers that no operator's arguments show, and a compiler may reorder operators it sees no tie
between. Layers are known to operators by number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from megamoe.errors import MegaMoEError
from megamoe.problem import TopK

NOT_SAID = -1  # of ``scaled`` and ``max_tokens``, which are None in Python


class Layer(Protocol):
    def run(self, x: Tensor, topk: TopK, max_tokens: int | None, out: Tensor) -> Tensor: ...


_NUMBERS = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


def register(layer: Layer) -> int:
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def call(number: int, x: Tensor, topk: TopK, max_tokens: int | None, out: Tensor | None) -> Tensor:
    """What is traced in place of the layer's call."""
    scaled = NOT_SAID if topk.scaled is None else int(topk.scaled)
    most = NOT_SAID if max_tokens is None else max_tokens
    if out is None:
        y: Tensor = torch.ops.megamoe.forward(x, topk.ids, topk.weights, number, scaled, most)
        return y
    torch.ops.megamoe.forward_out(x, topk.ids, topk.weights, out, number, scaled, most)
    return out


@torch.library.custom_op("megamoe::forward", mutates_args=())
def _forward(
    x: Tensor, ids: Tensor, weights: Tensor, layer: int, scaled: int, max_tokens: int
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _run(x, ids, weights, out, layer, scaled, max_tokens)


@_forward.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, layer: int, scaled: int, max_tokens: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("megamoe::forward_out", mutates_args=("out",))
def _forward_out(
    x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, layer: int, scaled: int, max_tokens: int
) -> None:
    _run(x, ids, weights, out, layer, scaled, max_tokens)


@_forward_out.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, layer: int, scaled: int, max_tokens: int
) -> None:
    return None


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, layer: int, scaled: int, max_tokens: int
) -> Tensor:
    found = _LAYERS.get(layer)
    if found is None:
        raise MegaMoEError(
            f"layer {layer} of a compiled graph is gone; compile again with a prepared one"
        )
    topk = TopK(ids=ids, weights=weights, scaled=None if scaled == NOT_SAID else bool(scaled))
    return found.run(x, topk, None if max_tokens == NOT_SAID else max_tokens, out)
