"""Digests of the reference's bits, committed: any CPU and any GPU must give the same.

The inputs come from integers alone (`strategies`). To print the digests of this machine:

    PYTHONPATH=tests python tests/reference/test_golden.py [cpu or cuda]

The committed file changes only with the numeric contract, and then CHANGELOG says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from strategies import Case, bell, unit

from megamoe.formats import (
    BF16,
    CATALOGUE,
    F64,
    FP8_1X64,
    FP8_1X128,
    FP8_ROW,
    MXFP8,
    PLAIN_BF16,
    dequantise,
    quantise,
)
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    GPT_OSS_ALPHA,
    HF_EAGER,
    HF_GROUPED,
    Activation,
    Recipe,
)
from megamoe.reference import elementwise, moe
from megamoe.reference.canary import digest
from megamoe.reference.dot import dot
from megamoe.reference.moe import Emulated

FILE = Path(__file__).parents[1] / "data" / "golden.json"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

RECIPES = {
    "bf16_combine": BF16_COMBINE,
    "bf16_fc2_input": BF16_FC2_INPUT,
    "bf16_input": BF16_INPUT,
    "hf_eager": HF_EAGER,
    "hf_grouped": HF_GROUPED,
    "fp8_row_1x64": Recipe(name="r", act=FP8_ROW, weight_at="fc2_input", mid=FP8_1X64),
    "fp8_1x128": Recipe(name="b", act=FP8_1X128, swiglu_out=BF16, mid=FP8_1X128),
    "mxfp8": Recipe(name="m", act=MXFP8, weight_at="fc2_input", mid=MXFP8),
}
CLAMPS = {
    "none": Activation(),
    "limit_10": Activation(limit=10.0),
    "limit_0.75": Activation(limit=0.75),
    "symmetric_0.75": Activation(limit=0.75, symmetric=True),
    "gpt_oss": Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0),
}
BASE = Case(
    tokens=16, experts=6, top_k=3, hidden_size=200, intermediate_size=104, gain=96.0, seed=2026
)
VARIANTS = {
    "bias": dataclasses.replace(BASE, bias=True, activation=CLAMPS["gpt_oss"]),
    "shared": dataclasses.replace(BASE, shared=72, shared_activation=Activation(limit=2.0)),
    "scaled_weights": dataclasses.replace(BASE, routed_scaling_factor=2.826),
    "scaled_output": dataclasses.replace(BASE, routed_scaling_factor=1.75, scale_at="output"),
    "wide": dataclasses.replace(BASE, hidden_size=1056, intermediate_size=544, tokens=24),
}


def entries() -> dict[str, Callable[[str], str]]:
    """name: the function of a device that gives its digest."""
    made: dict[str, Callable[[str], str]] = {}
    for recipe in RECIPES:
        for clamp, activation in CLAMPS.items():
            case = dataclasses.replace(BASE, activation=activation)
            made[f"layer/{recipe}/{clamp}"] = _layer(case, RECIPES[recipe])
    for variant, case in VARIANTS.items():
        for recipe in ("bf16_combine", "hf_eager"):
            made[f"layer/{recipe}/{variant}"] = _layer(case, RECIPES[recipe])
    for fmt in CATALOGUE:
        if fmt is not PLAIN_BF16:
            case = dataclasses.replace(BASE, weights=fmt, activation=CLAMPS["limit_0.75"])
            made[f"layer/bf16_fc2_input/{fmt}"] = _layer(case, BF16_FC2_INPUT)
        made[f"codes/{fmt}"] = _codes(fmt)
    made["layer/bf16_combine/spoiled"] = _spoiled
    made["dot"] = _dot
    for name in ("exp", "sigmoid", "log1p_exp"):
        made[name] = _elementwise(name)
    return made


def _layer(case: Case, recipe: Recipe) -> Callable[[str], str]:
    def run(device: str) -> str:
        y = moe.layer(case.x(device), case.topk(device), case.layer(device), Emulated(recipe))
        assert int(y.count_nonzero()) > y.numel() / 2
        return digest(y)

    return run


def _spoiled(device: str) -> str:
    """NaN and infinities among the tokens and the weights: their rows' NaN has one spelling."""
    x, topk = BASE.x(device), BASE.topk(device)
    x[3, 5], x[7, 0], x[8, 1] = math.nan, math.inf, -math.inf
    topk.weights[11] = math.nan
    y = moe.layer(x, topk, BASE.layer(device), Emulated(BF16_COMBINE))
    assert int(y.isnan().sum()) > 0
    return digest(y)


def _codes(fmt) -> Callable[[str], str]:
    """The bytes a quantiser writes, and what they mean, over a range of magnitudes and specials."""

    def run(device: str) -> str:
        x = bell(9, 2, 136, 264)
        x *= torch.from_numpy(np.ldexp(np.float32(1), np.arange(-150, 122, 2)))[:, None]
        x[1, 40, 3], x[1, 70, 200], x[0, 50] = math.nan, -math.inf, 0.0
        q = quantise(x.to(device), fmt, row_groups=2)
        parts = [*q.tensors, moe.canonical_nan(dequantise(q, to=BF16))]
        return hashlib.sha256("".join(map(digest, parts)).encode()).hexdigest()[:16]

    return run


def _dot(device: str) -> str:
    """Normal, wide-range and cancelling rows, 600 terms each."""
    a, b = bell(31, 24, 600).to(F64), bell(32, 40, 600).to(F64)
    wide = torch.from_numpy(np.ldexp(1.0, np.arange(600) * 37 % 97 - 48))
    a[8:16] *= wide * (1 + bell(33, 8, 600).to(F64) * 2.0**-30)
    a[16:, 300:] = -a[16:, :300] * (1 + 2.0**-40)
    b[:, 300:] = b[:, :300]
    return digest(dot(a.to(device), b.to(device)))


def _elementwise(name: str) -> Callable[[str], str]:
    def run(device: str) -> str:
        reach = torch.from_numpy(np.ldexp(1.0, np.arange(20000) % 12 - 1))
        x = (unit(41, 20000).to(F64) - 0.5) * reach
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 708.0, -708.0, 709.0], dtype=F64)
        return digest(getattr(elementwise, name)(torch.cat([x, special]).to(device)))

    return run


ENTRIES = entries()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENTRIES)
def test_digest(name: str, device: str) -> None:
    assert ENTRIES[name](device) == json.loads(FILE.read_text())[name]


def test_the_file_holds_these_digests_and_no_other() -> None:
    committed = json.loads(FILE.read_text())
    assert sorted(committed) == sorted(ENTRIES)


def test_each_recipe_and_clamp_shows_in_the_bits() -> None:
    """Equal digests would mean that the inputs meet no limit, or that a rounding does nothing."""
    committed = json.loads(FILE.read_text())
    names = [f"layer/{recipe}/{clamp}" for recipe in RECIPES for clamp in CLAMPS]
    names += [f"layer/{recipe}/{v}" for recipe in ("bf16_combine", "hf_eager") for v in VARIANTS]
    assert len({committed[name] for name in names}) == len(names)


def test_another_exponential_has_another_digest(monkeypatch) -> None:
    monkeypatch.setattr(elementwise, "exp", lambda x: torch.exp(x) * (1 + 2.0**-30))
    assert ENTRIES["sigmoid"]("cpu") != json.loads(FILE.read_text())["sigmoid"]


def test_inputs_are_made_of_integers() -> None:
    """The generator itself: a digest of numbers that no library version can change."""
    assert digest(bell(1, 1000)) == "18f1a5ffa46d55cb"
    assert digest(unit(1, 1000)) == "e08645ab47bc9d26"


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(json.dumps({name: run(where) for name, run in ENTRIES.items()}, indent=1))
