"""`torch.compile` sees one opaque call, with the bits of the layer called outside of it."""

from __future__ import annotations

import pytest
import torch
from parallel.shares import same_bits
from strategies import Case
from torch import Tensor

import megamoe
from megamoe.dispatch import ops
from megamoe.errors import BadInput, MegaMoEError

CASE = Case(tokens=6, experts=4, top_k=2, shared=16)


def test_a_compiled_graph_holds_the_call_whole() -> None:
    x, topk = CASE.x(), CASE.topk()
    with megamoe.prepare(CASE.layer(), max_tokens_per_rank=8, top_k=2) as layer:
        want = layer.forward(x, topk)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def step(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            routed = megamoe.TopK(ids=ids + 0, weights=weights * 1, scaled=False)
            return (
                layer.forward(x, routed),
                megamoe.forward(x, (ids, weights), layer, max_tokens=6),
                layer.forward(x, routed, out=out),
            )

        out = torch.empty_like(x)
        for y in (*step(x, topk.ids, topk.weights, out), out):
            same_bits([y], want)
        wild = topk.ids.clone()
        wild[2, 1] = 9
        with pytest.raises(BadInput, match=r"topk\.ids 9 is outside \[-1, 4\)"):
            step(x, wild, topk.weights, out)


def test_a_bad_call_is_refused_where_it_runs_and_in_the_same_words() -> None:
    x, topk = CASE.x(), CASE.topk()
    with megamoe.prepare(CASE.layer(), max_tokens_per_rank=8, top_k=2) as layer:

        def step(x: Tensor, ids: Tensor, weights: Tensor, most: int | None) -> Tensor:
            return layer.forward(x, (ids, weights), max_tokens=most)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        same_bits([compiled(x, topk.ids, topk.weights, 6)], step(x, topk.ids, topk.weights, None))
        for given, words in (
            ((topk.ids, topk.weights[:, :1], None), "do not match ids of shape"),
            ((topk.ids.float(), topk.weights, None), "are neither int32 nor int64"),
            ((topk.ids, topk.weights, -1), "max_tokens -1 is below this rank's 6 tokens"),
        ):
            for way in (step, compiled):
                with pytest.raises(BadInput, match=words):
                    way(x, *given)


def test_raw_weights_that_were_prepared_by_a_call_compile_too() -> None:
    x, topk, raw = CASE.x(), CASE.topk(), CASE.layer()
    want = megamoe.forward(x, topk, raw)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return megamoe.forward(x, (ids, weights), raw)

    same_bits([step(x, topk.ids, topk.weights)], want)


def test_the_operators_say_what_they_do() -> None:
    x, topk = CASE.x(), CASE.topk()
    with megamoe.prepare(CASE.layer(), max_tokens_per_rank=8, top_k=2) as layer:
        given = x, topk.ids, topk.weights
        torch.library.opcheck(torch.ops.megamoe.forward, (*given, layer._number, False, None))
        out = torch.empty_like(x)
        torch.library.opcheck(
            torch.ops.megamoe.forward_out, (*given, out, layer._number, False, None)
        )


def test_a_layer_that_is_gone_is_said() -> None:
    x, topk = CASE.x(), CASE.topk()
    with pytest.raises(MegaMoEError, match="layer 123456 of a compiled graph is gone"):
        ops.call(123456, x, topk, None, None)
