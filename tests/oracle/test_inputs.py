"""The input classes hold what they promise, in the same bytes everywhere."""

from dataclasses import replace

import pytest
import torch
from emulations import plain_torch
from mutants import FP8_PULL

from megamoe.errors import BadInput
from megamoe.formats import (
    FP8_1X64,
    FP8_BLOCK128,
    FP8_ROW,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
    Format,
)
from megamoe.oracle import CLASSES, Inputs, saturated
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    GPT_OSS_ALPHA,
    HF_EAGER,
    HF_GROUPED,
    Activation,
    Placement,
    Recipe,
    Request,
)
from megamoe.reference.canary import digest
from megamoe.reference.case import contributions, output
from megamoe.reference.grid import MARGIN, distance_to_ties
from megamoe.reference.hashing import BELL_SIGMA, bell, bits, hashed
from megamoe.reference.honest import honest_kernels, honest_output
from megamoe.reference.inputs import SATURATED, saturation
from megamoe.reference.moe import Emulated

MX = Recipe(name="mxfp8", act=MXFP8, mid=MXFP8, weight_at="fc2_input")
ROWS = Recipe(name="fp8 rows", act=FP8_ROW, mid=FP8_1X64, weight_at="fc2_input")


def request(**changes: object) -> Request:
    fields: dict[str, object] = dict(
        hidden_size=128,
        intermediate_size=64,
        placement=Placement.contiguous(8, 1),
        top_k=3,
        max_tokens_per_rank=32,
        activation=Activation(limit=7.0),
    )
    return Request(**(fields | changes))  # type: ignore[arg-type]


def tensors(inputs: Inputs) -> list[torch.Tensor]:
    made = [inputs.x, inputs.topk.ids, inputs.topk.weights]
    for rank in inputs.ranks:
        made += rank.experts.tensors
        if rank.shared is not None:
            made += rank.shared.weights.tensors
    return made


# sha256 of every tensor of a class, joined: a change of any byte on any machine shows here.
DIGESTS = {
    "normal": "054bdeeecdfacd8a",
    "saturating": "9f2d4b89b3953fb1",
    "exact-grid": "ee125b2210915e93",
    "outlier": "64346af7bce93d73",
    "denormal": "66e7703502330d40",
    "near-cancelling": "5d79850804e1addd",
    "poisoned": "5ce705f7c5d69ef5",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_bytes_everywhere(kind: str) -> None:
    inputs = CLASSES[kind](request(shared=True, weights=MXFP4), BF16_COMBINE, 5, "cpu")
    every = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors(inputs)])
    assert digest(every) == DIGESTS[kind]
    again = CLASSES[kind](request(shared=True, weights=MXFP4), BF16_COMBINE, 6, "cpu")
    assert not torch.equal(tensors(again)[0], inputs.x) or kind == "exact-grid"


@pytest.mark.parametrize("kind", CLASSES)
def test_more_tokens_begin_with_the_same(kind: str) -> None:
    few, many = (
        CLASSES[kind](request(max_tokens_per_rank=n), BF16_COMBINE, 0, "cpu") for n in (32, 48)
    )
    for a, b in zip(tensors(few)[:3], tensors(many)[:3], strict=True):
        assert digest(a) == digest(b[:32])


@pytest.mark.parametrize("kind", CLASSES)
def test_experts_do_not_depend_on_where_they_lie(kind: str) -> None:
    one = CLASSES[kind](request(), BF16_COMBINE, 0, "cpu")
    placed = Placement(num_experts=8, slots=((7, 3, 1), (0, 2, 4, 5, 6, 3)))
    two = CLASSES[kind](request(placement=placed), BF16_COMBINE, 0, "cpu")
    a, b = (output(inputs, Emulated(BF16_COMBINE)) for inputs in (one, two))
    assert digest(a) == digest(b)


def test_hashes_spread() -> None:
    """Every bit is set about half the time, seeds and positions are unlike, and nothing repeats."""
    words = bits((1 << 16,), 1, 2)
    assert int(words.min()) >= 0
    assert int(words.max()) < 1 << 32
    ones = torch.stack([(words >> bit) & 1 for bit in range(32)]).double().mean(1)
    sigma = 0.5 / len(words) ** 0.5
    assert bool(((ones - 0.5).abs() < 6 * sigma).all())
    assert len(hashed(torch.arange(1 << 16), 3).unique()) == 1 << 16
    assert not torch.equal(words, bits((1 << 16,), 2, 1))
    sample = bell((1 << 16,), 4).double()
    assert abs(float(sample.mean())) < 6 * BELL_SIGMA / len(sample) ** 0.5
    assert abs(float(sample.var()) / BELL_SIGMA**2 - 1) < 6 * (2 / len(sample)) ** 0.5


# --- classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1.0, 7.0, 10.0])
@pytest.mark.parametrize("weights", [PLAIN_BF16, NVFP4], ids=str)
def test_saturating_passes_both_limits(limit: float | None, weights: Format) -> None:
    asked = request(activation=Activation(limit=limit), weights=weights)
    inputs = CLASSES["saturating"](asked, BF16_COMBINE, 0, "cpu")
    assert all(share >= SATURATED for share in saturation(inputs))
    normal = CLASSES["normal"](asked, BF16_COMBINE, 0, "cpu")
    assert limit == 1.0 or not all(share >= SATURATED for share in saturation(normal))


def test_saturating_works_for_weights_of_any_origin() -> None:
    normal = CLASSES["normal"](request(expert_bias=True), BF16_COMBINE, 0, "cpu")
    assert all(share >= SATURATED for share in saturation(saturated(normal)))
    with pytest.raises(BadInput, match="cannot be saturated"):
        saturated(replace(normal, x=normal.x * 0))


def test_outlier_in_every_block() -> None:
    x = CLASSES["outlier"](request(hidden_size=256), BF16_COMBINE, 0, "cpu").x
    plain = CLASSES["normal"](request(hidden_size=256), BF16_COMBINE, 0, "cpu").x
    changed = (x != plain).unflatten(1, (2, 128)).sum(2)
    assert bool((changed <= 1).all())
    assert int((changed == 1).sum()) > int((changed == 0).sum())  # an outlier of zero is none


def test_denormal_has_denormals_in_and_out() -> None:
    inputs = CLASSES["denormal"](request(), BF16_COMBINE, 0, "cpu")
    least_normal = torch.finfo(torch.bfloat16).smallest_normal

    def denormal(values: torch.Tensor) -> torch.Tensor:
        return (values != 0) & (values.abs() < least_normal)

    y = output(inputs, Emulated(BF16_COMBINE))
    assert bool(denormal(inputs.x[0::4]).any())
    assert bool(denormal(inputs.x[1::4]).any())
    assert not bool((inputs.x[2::4].abs() >= least_normal).any())
    assert not bool(denormal(inputs.x[3::4]).any())
    assert bool(denormal(y[0::4]).any())


def test_near_cancelling_cancels() -> None:
    inputs = CLASSES["near-cancelling"](request(), BF16_COMBINE, 0, "cpu")
    w13 = inputs.layer.experts.w13.data[0].double()
    x = inputs.x.double()
    h, terms = x @ w13.T, x.abs() @ w13.abs().T
    assert float((h.abs() / terms).mean()) < 2.0**-7  # of random signs it would be 1 / sqrt(H)
    slots, _ = contributions(inputs)
    y, size = slots.sum(1), slots.abs().sum(1)
    full = (inputs.topk.ids[1::2] >= 0).all(1)
    assert bool((y[1::2].norm(dim=1) < 2.0**-15 * size[1::2].norm(dim=1))[full].all())
    flipped = replace(
        inputs,
        topk=replace(inputs.topk, ids=inputs.topk.ids.flip(1), weights=inputs.topk.weights.flip(1)),
    )
    a, b = (output(i, Emulated(BF16_COMBINE)) for i in (inputs, flipped))
    assert not torch.equal(a[1::2], b[1::2])


@pytest.mark.parametrize("weights", [PLAIN_BF16, FP8_BLOCK128, MXFP4, INT4_G32], ids=str)
def test_poison_stays_out(weights: Format) -> None:
    """The reference reads none of it: without it the bits are the same."""
    inputs = CLASSES["poisoned"](request(weights=weights), BF16_COMBINE, 0, "cpu")
    empty = inputs.topk.ids < 0
    assert bool(inputs.topk.weights[empty].isnan().all())
    assert bool(inputs.x[empty.all(1)].isnan().all())
    last = inputs.layer.experts.w13[7:8]
    assert bool((last.data.view(torch.uint8) == 0xFF).all())
    clean = CLASSES["normal"](request(weights=weights), BF16_COMBINE, 0, "cpu")
    w = torch.where(empty, 0.0, inputs.topk.weights)
    clean = replace(clean, x=inputs.x.nan_to_num(0.0), topk=replace(inputs.topk, weights=w))
    a, b = (output(i, Emulated(BF16_COMBINE)) for i in (inputs, clean))
    assert bool(a.isfinite().all())
    assert digest(a) == digest(b)
    with pytest.raises(BadInput, match="no expert unused"):
        CLASSES["poisoned"](request(top_k=8), BF16_COMBINE, 0, "cpu")


# --- the exact grid -----------------------------------------------------------------------------

GPT_OSS = Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0)
GRIDS: dict[str, tuple[Recipe, dict[str, object]]] = {
    "bf16": (BF16_COMBINE, {"shared": True, "routed_scaling_factor": 2.5}),
    "bf16, fc2_input": (BF16_FC2_INPUT, {"weight_at": "fc2_input"}),
    "bf16, input": (BF16_INPUT, {"weight_at": "input"}),
    "unclamped": (BF16_COMBINE, {"activation": Activation()}),
    "small limit": (BF16_COMBINE, {"activation": Activation(limit=0.5)}),
    "gpt-oss": (BF16_COMBINE, {"activation": GPT_OSS, "expert_bias": True}),
    "hf": (HF_EAGER, {}),
    "hf, unclamped": (HF_GROUPED, {"activation": Activation()}),
    "fp8 pull": (FP8_PULL, {"weights": FP8_BLOCK128, "weight_at": "fc2_input"}),
    "fp8 on mxfp4": (ROWS, {"weights": MXFP4, "weight_at": "fc2_input"}),
    "fp8 on nvfp4": (ROWS, {"weights": NVFP4, "weight_at": "fc2_input"}),
    "mxfp8 on mxfp4": (MX, {"weights": MXFP4, "weight_at": "fc2_input"}),
    "int4": (BF16_COMBINE, {"weights": INT4_G32}),
}


@pytest.mark.parametrize("name", GRIDS)
def test_no_honest_kernel_can_leave_the_exact_grid(name: str) -> None:
    recipe, changes = GRIDS[name]
    inputs = CLASSES["exact-grid"](request(**changes), recipe, 0, "cpu")
    assert distance_to_ties(inputs, recipe) >= MARGIN
    y = output(inputs, Emulated(recipe))
    live = (inputs.topk.ids >= 0).any(1)
    assert bool(y[live].any(1).all())
    for kernel in honest_kernels(recipe):
        assert torch.equal(honest_output(inputs, kernel), y), str(kernel)
    if recipe == BF16_COMBINE and inputs.layer.shared is None and "gpt" not in name:
        assert torch.equal(plain_torch(inputs), y)


def test_the_exact_grid_tells_layouts_apart() -> None:
    """Each output names its expert and row: swapped halves, experts or slots give other bits."""
    inputs = CLASSES["exact-grid"](request(), BF16_COMBINE, 0, "cpu")
    y = output(inputs, Emulated(BF16_COMBINE))
    experts = inputs.layer.experts
    w13 = experts.w13
    halves = torch.cat(w13.data.chunk(2, dim=1)[::-1], dim=1)
    others = [
        replace(experts, w13=replace(w13, data=halves)),
        replace(experts, w13=replace(w13, data=w13.data.roll(1, 0))),
        replace(experts, w13=replace(w13, data=w13.data.roll(8, 1))),
        replace(experts, w2=replace(experts.w2, data=experts.w2.data.roll(1, 2))),
    ]
    for other in others:
        wrong = replace(inputs, weights=replace(inputs.layer, experts=other))
        assert not torch.equal(output(wrong, Emulated(BF16_COMBINE)), y)


def test_an_ordinary_batch_is_not_on_the_grid() -> None:
    inputs = CLASSES["normal"](request(), BF16_COMBINE, 0, "cpu")
    assert distance_to_ties(inputs, BF16_COMBINE) < MARGIN


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 16}, "no room"),
        ({"intermediate_size": 62}, "no room"),
        ({"top_k": 9}, "exceeds 8 experts"),
        ({"scale_at": "output", "routed_scaling_factor": 2.5}, "no exact grid"),
    ],
)
def test_grids_that_cannot_be(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        CLASSES["exact-grid"](request(**changes), BF16_COMBINE, 0, "cpu")
