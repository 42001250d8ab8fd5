"""The shared expert above a kernel, on a GPU: judged as the layer of tokens without an expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import Case

from megamoe import oracle
from megamoe.dispatch.shared import SharedFFN
from megamoe.formats import FP8_BLOCK128, MXFP4, PLAIN_BF16, Format
from megamoe.problem import BF16_COMBINE, TopK

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fmt", [PLAIN_BF16, MXFP4, FP8_BLOCK128], ids=str)
def test_both_verdicts(fmt: Format) -> None:
    case = Case(
        shared=512, weights=fmt, hidden_size=1024, intermediate_size=512, tokens=300, experts=2
    )
    here, x = case.layer(), case.x().to("cuda")
    assert here.shared is not None
    shared = replace(here.shared, weights=here.shared.weights.to("cuda"))
    layer = replace(here, experts=here.experts.to("cuda"), shared=shared, router=None)
    topk = TopK(
        ids=torch.full((len(x), 1), -1, device="cuda"),
        weights=torch.zeros(len(x), 1, device="cuda"),
        scaled=True,
    )
    y = SharedFFN(shared).start(x)()
    report = oracle.judge(y, oracle.Inputs(x=x, topk=topk, weights=layer), BF16_COMBINE)
    assert report.right, str(report)
    assert report.recipe, str(report)
