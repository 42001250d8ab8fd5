"""The oracle on a GPU: the same inputs and bits as on a CPU, and real tensor cores are honest."""

from dataclasses import replace

import pytest
import torch
from emulations import eager_bf16
from test_inputs import DIGESTS, request, tensors

from megamoe.formats import FP8_ROW, MXFP4
from megamoe.oracle import CLASSES, Honest, yardstick
from megamoe.problem import BF16_COMBINE, HF_GROUPED, Placement, Recipe
from megamoe.reference.canary import digest
from megamoe.reference.case import output
from megamoe.reference.moe import Emulated
from megamoe.reference.standard import ALLOWANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is here"),
]

# Long sums, where the order and the width of accumulators show.
LARGE = {"hidden_size": 2048, "intermediate_size": 1024, "max_tokens_per_rank": 300}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_bytes_on_a_gpu(kind: str) -> None:
    inputs = CLASSES[kind](request(shared=True, weights=MXFP4), BF16_COMBINE, 5, "cuda")
    every = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors(inputs)])
    assert digest(every) == DIGESTS[kind]


@pytest.mark.parametrize("kind", CLASSES)
def test_tensor_cores_pass_both_verdicts(kind: str) -> None:
    asked = request(placement=Placement.contiguous(16, 1), **LARGE)
    inputs = CLASSES[kind](asked, HF_GROUPED, 0, "cuda")
    yard = yardstick(inputs, HF_GROUPED)
    report = yard.judge(eager_bf16(inputs), exact_grid=kind == "exact-grid")
    assert report.right, str(report)
    assert report.recipe, str(report)


def test_a_wrong_layer_is_named_on_a_gpu() -> None:
    inputs = CLASSES["normal"](request(shared=True), BF16_COMBINE, 0, "cuda")
    ids = inputs.topk.ids.clone()
    slot = int((ids[7] >= 0).nonzero()[0])
    ids[7, slot] = -1
    y = output(replace(inputs, topk=replace(inputs.topk, ids=ids)), Emulated(BF16_COMBINE))
    report = yardstick(inputs, BF16_COMBINE).judge(y)
    for words in ("token 7", f"slot {slot}", "dropped"):
        assert words in report.message


@pytest.mark.parametrize("fast", [True, False], ids=["fast accumulation", "promoted"])
def test_the_model_of_the_fp8_accumulator_errs_no_less_than_the_real_one(fast: bool) -> None:
    a, b = (
        CLASSES["normal"](request(**LARGE), BF16_COMBINE, seed, "cuda").x.to(torch.float8_e4m3fn)
        for seed in (0, 1)
    )
    a, b = a[:256], b[:256]
    one = torch.ones((), device="cuda")
    real = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    recipe = Recipe(name="fp8 rows", act=FP8_ROW, mid=FP8_ROW)
    codes = torch.cat([a.double(), torch.ones(len(a), 1, device="cuda").double()], dim=1)
    model = Honest(recipe, fp8_promote=0 if fast else 128).dot(codes, b.double())
    exact = a.double() @ b.double().T
    assert float((real - exact).norm()) <= ALLOWANCE * float((model - exact).norm())
