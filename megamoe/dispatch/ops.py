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

Routing = TopK | tuple[Tensor, Tensor]


class Layer(Protocol):
    def run(self, x: Tensor, topk: Routing, max_tokens: int | None, out: Tensor) -> Tensor: ...


_NUMBERS = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


def register(layer: Layer) -> int:
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def call(
    number: int, x: Tensor, topk: Routing, max_tokens: int | None, out: Tensor | None
) -> Tensor:
    """What is traced in place of the layer's call. A pair is looked at where the layer runs."""
    ids, weights, scaled = (
        (*topk, None) if isinstance(topk, tuple) else (topk.ids, topk.weights, topk.scaled)
    )
    if out is None:
        y: Tensor = torch.ops.megamoe.forward(x, ids, weights, number, scaled, max_tokens)
        return y
    torch.ops.megamoe.forward_out(x, ids, weights, out, number, scaled, max_tokens)
    return out


@torch.library.custom_op("megamoe::forward", mutates_args=())
def _forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: int,
    scaled: bool | None,
    max_tokens: int | None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _run(x, ids, weights, out, layer, scaled, max_tokens)


@_forward.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("megamoe::forward_out", mutates_args=("out",))
def _forward_out(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    layer: int,
    scaled: bool | None,
    max_tokens: int | None,
) -> None:
    _run(x, ids, weights, out, layer, scaled, max_tokens)


@_forward_out.register_fake
def _(*_: object) -> None:
    return None


def _run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    layer: int,
    scaled: bool | None,
    max_tokens: int | None,
) -> Tensor:
    found = _LAYERS.get(layer)
    if found is None:
        raise MegaMoEError(
            f"layer {layer} of a compiled graph is gone; compile again with a prepared one"
        )
    topk: Routing = (ids, weights)
    if scaled is not None:
        topk = TopK(ids=ids, weights=weights, scaled=scaled)
    return found.run(x, topk, max_tokens, out)
