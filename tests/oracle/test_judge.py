"""The verdicts on honest kernels, their limits, their messages and their bad input."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from emulations import EveryProduct, eager_bf16, plain_torch
from mutants import FP8_PULL, bench, layered, routed, run

from megamoe.errors import BadInput, Mismatch
from megamoe.formats import FP8_BLOCK128, FP8_TENSOR, MXFP4, NVFP4
from megamoe.kernels.sm90_pull_fp8_tensor import recipe_of
from megamoe.oracle import CLASSES, Honest, Inputs, judge, normal_tokens, yardstick
from megamoe.problem import (
    BF16_COMBINE,
    BF16_FC2_INPUT,
    BF16_INPUT,
    HF_EAGER,
    HF_GROUPED,
    Activation,
    Placement,
    Recipe,
    Request,
)
from megamoe.reference import sample
from megamoe.reference.case import output
from megamoe.reference.honest import honest_kernels, honest_output
from megamoe.reference.moe import Emulated, layer
from megamoe.reference.standard import FALSE_ALARM, Standard, greatest_mean


def request(seed: int = 0, **changes: object) -> Request:
    """Geometry, limit and routing that vary with the seed."""
    fields: dict[str, object] = dict(
        hidden_size=(64, 128, 96)[seed % 3],
        intermediate_size=(32, 64)[seed % 2],
        placement=Placement.contiguous(6, 1),
        top_k=(3, 1, 4, 2)[seed % 4],
        max_tokens_per_rank=(24, 1, 300, 5)[seed % 4],
        activation=Activation(limit=(7.0, None, 1.0)[seed % 3]),
    )
    return Request(**(fields | changes))  # type: ignore[arg-type]


FLAVOURS: dict[str, tuple[Recipe, dict[str, object]]] = {
    "bf16": (BF16_COMBINE, {"shared": True}),
    "bf16, fc2_input": (BF16_FC2_INPUT, {"weight_at": "fc2_input"}),
    "fp8": (FP8_PULL, {"weight_at": "fc2_input", "weights": FP8_BLOCK128}),
    "fp8, static": (
        recipe_of(2.0**-6, 2.0**-8),
        {
            "weight_at": "fc2_input",
            "weights": FP8_TENSOR,
            "activation_scales": (2.0**-6, 2.0**-8),
        },
    ),
    "hf": (HF_EAGER, {}),
}
# Seeds of honest runs: a few of each flavour and class. Together with the rigs of the mutants they
# are some 300 verdicts; longer searches raise the range.
SEEDS = range(2)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_honest_kernels_pass_both_verdicts(flavour: str, kind: str) -> None:  # K14
    recipe, changes = FLAVOURS[flavour]
    for seed in SEEDS:
        inputs = CLASSES[kind](request(seed, **changes), recipe, seed, "cpu")
        yard = yardstick(inputs, recipe)
        for kernel in (*honest_kernels(recipe), Honest(recipe, split_k=2, approximate_exp=False)):
            report = yard.judge(honest_output(inputs, kernel), exact_grid=kind == "exact-grid")
            assert report.right, (seed, str(kernel), str(report))
            assert report.recipe, (seed, str(kernel), str(report))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_plain_float32_layer_passes_both_verdicts(kind: str) -> None:
    for seed in SEEDS:
        asked = request(seed, routed_scaling_factor=2.5)
        inputs = CLASSES[kind](asked, BF16_COMBINE, seed + 100, "cpu")
        report = judge(plain_torch(inputs), inputs, BF16_COMBINE, exact_grid=kind == "exact-grid")
        assert report.right, str(report)
        assert report.recipe, str(report)


@pytest.mark.parametrize("kind", CLASSES)
def test_torchs_own_bf16_operations_pass_both_verdicts(kind: str) -> None:
    """Without oneDNN, whose products on a CPU with AVX512_BF16 flush denormals: the oracle says so
    there, and is right.
    """
    inputs = CLASSES[kind](request(0), HF_GROUPED, 7, "cpu")
    with torch.backends.mkldnn.flags(enabled=False):
        y = eager_bf16(inputs)
    report = judge(y, inputs, HF_GROUPED, exact_grid=kind == "exact-grid")
    assert report.right, str(report)
    assert report.recipe, str(report)


@pytest.mark.parametrize("kind", ["normal", "exact-grid", "near-cancelling"])
def test_an_fp8_accumulator_product_by_product_passes(kind: str) -> None:
    """The oracle's model of Hopper's accumulator stands for the real thing."""
    wide = {"hidden_size": 256, "intermediate_size": 128, "max_tokens_per_rank": 12}
    asked = request(0, weights=FP8_BLOCK128, weight_at="fc2_input", **wide)
    inputs = CLASSES[kind](asked, FP8_PULL, 3, "cpu")
    y = honest_output(inputs, EveryProduct(FP8_PULL, fp8_promote=128))
    yard = yardstick(inputs, FP8_PULL)
    report = yard.judge(y, exact_grid=kind == "exact-grid")
    assert report.right, str(report)
    assert report.recipe, str(report)
    if kind == "normal":  # it costs bits, or the model would be of no use
        assert not yardstick(inputs, FP8_PULL, honest=[Honest(FP8_PULL)]).judge(y).recipe


def test_honest_kernels_differ_from_the_perfect_one() -> None:
    """A model that never missed a bit would grant nothing, and this suite would not notice."""
    inputs = CLASSES["near-cancelling"](request(0), BF16_COMBINE, 0, "cpu")
    perfect = output(inputs, Emulated(BF16_COMBINE))
    for kernel in honest_kernels(BF16_COMBINE):
        assert not torch.equal(honest_output(inputs, kernel), perfect)
    a, b = (normal_tokens(4, 512, seed).double() / 3 for seed in (1, 2))
    sums = [Honest(BF16_COMBINE, split_k=runs).dot(a, b) for runs in (1, 4, 16)]
    sums.append(Honest(FP8_PULL, fp8_promote=0).dot(a, b))
    sums.append(Honest(FP8_PULL, fp8_promote=64).dot(a, b))
    for i, one in enumerate(sums):
        assert all(not torch.equal(one, other) for other in sums[:i])


def test_kernels_of_a_known_accumulator_are_held_to_it() -> None:
    """Full float32 sums leave an FP8 kernel no excuse for the weight's place."""
    yard = bench("fp8")
    y = run(yard, recipe=replace(FP8_PULL, weight_at="combine"))
    strict = yardstick(yard.inputs, FP8_PULL, honest=[Honest(FP8_PULL)])
    assert strict.judge(yard.emulated).recipe
    assert "routing weight in combine" in strict.judge(y).message


# --- whose truth ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [HF_EAGER, HF_GROUPED], ids=str)
def test_another_engine_is_judged_by_its_own_recipe(recipe: Recipe) -> None:
    inputs = CLASSES["normal"](request(0), recipe, 0, "cpu")
    y = output(inputs, Emulated(recipe))
    assert judge(y, inputs, recipe).recipe
    ours = judge(y, inputs, BF16_COMBINE)
    assert not ours.recipe
    assert float(judge(y, inputs, recipe).budget.max()) > float(ours.budget.max())


def test_weight_at_input_is_another_function() -> None:
    inputs = CLASSES["normal"](request(0, weight_at="input"), BF16_INPUT, 0, "cpu")
    y = output(inputs, Emulated(BF16_INPUT))
    assert judge(y, inputs, BF16_INPUT).recipe
    with pytest.raises(BadInput, match="another function"):
        judge(y, inputs, BF16_COMBINE)


@pytest.mark.parametrize("weights", [MXFP4, NVFP4], ids=str)
def test_quantised_weights_are_the_truth(weights: object) -> None:
    """Rounding that went into the weights is no error of the kernel."""
    inputs = CLASSES["normal"](request(0, weights=weights), BF16_COMBINE, 0, "cpu")
    report = judge(plain_torch(inputs), inputs, BF16_COMBINE)
    assert report.right, str(report)
    assert report.recipe, str(report)


def test_ranks_together_are_one_layer() -> None:
    one = CLASSES["normal"](request(0, shared=True), BF16_COMBINE, 0, "cpu")
    slots = ((5, 0), (1, 2, 3), (4, -1, 2))  # permuted, padded, replicated
    placed = Placement(num_experts=6, slots=slots)
    many = CLASSES["normal"](request(0, shared=True, placement=placed), BF16_COMBINE, 0, "cpu")
    assert len(many.ranks) == len(slots)
    y = output(one, Emulated(BF16_COMBINE))
    assert torch.equal(y, layer(one.x, one.topk, one.layer, Emulated(BF16_COMBINE)))
    report = judge(y, replace(many, rank=2), BF16_COMBINE)
    assert report.right
    assert report.share == 1
    y[3] = 0
    with pytest.raises(Mismatch, match="rank 2 token 3"):
        judge(y, replace(many, rank=2), BF16_COMBINE).raise_if_wrong()


def test_scaling_of_the_output() -> None:
    asked = request(0, routed_scaling_factor=2.0, scale_at="output", shared=True)
    inputs = CLASSES["normal"](asked, BF16_COMBINE, 0, "cpu")
    y = output(inputs, Emulated(BF16_COMBINE))
    assert judge(y, inputs, BF16_COMBINE).recipe
    unscaled = layered(inputs, lambda rank: replace(rank, routed_scaling_factor=1.0))
    y = output(unscaled, Emulated(BF16_COMBINE))
    assert "routed_scaling_factor not applied" in judge(y, inputs, BF16_COMBINE).message


# --- few tokens, odd tokens ---------------------------------------------------------------------


def test_no_tokens() -> None:
    inputs = CLASSES["normal"](request(0), BF16_COMBINE, 0, "cpu").rows(slice(0, 0))
    report = judge(inputs.x.clone(), inputs, BF16_COMBINE)
    assert report.right
    assert report.recipe
    assert report.worst is None
    assert "right: yes" in str(report)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_nothing_but_empty_slots(shared: bool) -> None:
    inputs = CLASSES["normal"](request(0, shared=shared), BF16_COMBINE, 0, "cpu")
    inputs = routed(inputs, lambda ids, w: (torch.full_like(ids, -1), w * math.nan))
    y = output(inputs, Emulated(BF16_COMBINE))
    assert bool(y.any()) == shared
    assert judge(y, inputs, BF16_COMBINE).recipe
    y[2, 1] += 2.0**-133
    report = judge(y, inputs, BF16_COMBINE)
    assert report.right == shared
    if not shared:
        assert report.wrong_tokens.tolist() == [2]


def test_non_finite_rows_compare_classes() -> None:
    inputs = CLASSES["normal"](request(0), BF16_COMBINE, 0, "cpu")
    inputs.x[1] = math.nan
    inputs.topk.weights[2, inputs.topk.ids[2] >= 0] = math.inf
    yard = yardstick(inputs, BF16_COMBINE)
    assert yard.judge(yard.emulated).recipe
    other_nan = yard.emulated.clone()
    other_nan[1] = -math.nan
    assert yard.judge(other_nan).recipe
    finite = yard.emulated.clone()
    finite[1, 0] = 0.0
    assert yard.judge(finite).wrong_tokens.tolist() == [1]
    wrong_sign = -yard.emulated
    assert 2 in yard.judge(wrong_sign).wrong_tokens.tolist()
    leaked = yard.emulated.clone()
    leaked[0, 0] = math.inf
    assert yard.judge(leaked).wrong_tokens.tolist() == [0]


def test_a_recipe_may_overflow_where_the_truth_does_not() -> None:
    inputs = CLASSES["normal"](request(0, activation=Activation()), BF16_COMBINE, 0, "cpu")
    inputs = replace(inputs, x=inputs.x * 2.0**64)
    yard = yardstick(inputs, BF16_COMBINE)
    assert not bool(yard.emulated.isfinite().all())
    assert bool(yard.ruler.truth.exact.isfinite().all())
    report = yard.judge(yard.emulated)
    assert report.right, str(report)
    assert report.recipe


def test_where_only_the_recipe_overflows_a_number_must_be_the_truth_s() -> None:
    """Row 5's terms pass BF16's greatest and cancel: EXACT is finite, the recipe NaN."""
    inputs = CLASSES["normal"](request(0, activation=Activation(), top_k=2), BF16_COMBINE, 0, "cpu")
    x = inputs.x.double()
    x[5] *= 2.0**63
    yard = yardstick(replace(inputs, x=x.float().bfloat16()), BF16_COMBINE)
    exact = yard.ruler.truth.exact
    assert not bool(yard.emulated[5].isfinite().any())
    assert bool(exact.isfinite().all())

    def verdicts(row: torch.Tensor | float) -> tuple[bool, bool]:
        y = yard.emulated.clone()
        y[5] = row
        report = yard.judge(y)
        return report.right, report.recipe

    assert verdicts(yard.emulated[5]) == (True, True)
    assert verdicts(exact[5].float().bfloat16()) == (True, False)
    for row in (0.0, 1.0, exact[4].float().bfloat16(), -exact[5].float().bfloat16()):
        assert verdicts(row) == (False, False)


# --- limits -------------------------------------------------------------------------------------


def test_a_difficult_row_lends_no_budget_to_its_neighbours() -> None:
    """One row of denormal results among normal ones: neighbours are held as before."""
    plain = CLASSES["normal"](request(0, top_k=2), BF16_COMBINE, 0, "cpu")
    mixed = replace(plain, x=plain.x.clone())
    mixed.x[4] *= 2.0**-66
    easy, hard = yardstick(plain, BF16_COMBINE), yardstick(mixed, BF16_COMBINE)
    assert float(hard.budget[4]) > float(easy.budget[4])
    others = torch.arange(plain.tokens) != 4
    assert torch.equal(hard.group[others], torch.zeros_like(hard.group[others]))
    y = run(
        hard, routed(mixed, lambda ids, w: (ids, torch.where(torch.arange(2) == 1, 0.9 * w, w)))
    )
    wrong = hard.judge(y).wrong_tokens.tolist()
    live = (mixed.topk.ids[:, 1] >= 0) & others
    assert set(wrong) == set(live.nonzero()[:, 0].tolist())


def test_the_budget_is_twice_the_recipes_worst_and_the_floor() -> None:
    """At 256 tokens or more the batch alone is the sample."""
    inputs = CLASSES["normal"](request(2), BF16_COMBINE, 0, "cpu")
    assert inputs.tokens >= sample.TOKENS
    yard = yardstick(inputs, BF16_COMBINE)
    own = yard.ruler.measure(yard.emulated).error
    assert len(yard.standards) == 1
    assert torch.equal(yard.budget, 2 * own.max() + yard.ruler.floor)


def test_rounding_the_output_stays_within_the_floor() -> None:
    yard = bench("plain")
    exact = yard.ruler.truth.exact
    error = yard.ruler.measure(exact.float().bfloat16()).error
    assert bool((error <= yard.ruler.floor).all())


def test_jitter_keeps_structure() -> None:
    x = CLASSES["near-cancelling"](request(0), BF16_COMBINE, 0, "cpu").x[:4]
    x[0, :6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-133])
    x[1, 0] = torch.finfo(torch.bfloat16).max
    copies = torch.arange(4)
    moved = sample.jitter(x, copies)
    codes, new, again, other = (
        t.view(torch.int16).int()
        for t in (x, moved, sample.jitter(x.clone(), copies), sample.jitter(x, copies + 1))
    )
    assert torch.equal(new, again)
    assert not torch.equal(new, other)
    assert bool(((codes < 0) == (new < 0)).all())
    assert bool(((codes - new).abs() <= sample.JITTER).all())
    fixed = (x == 0) | ~x.isfinite()
    assert torch.equal(codes[fixed], new[fixed])
    assert torch.equal(x.isfinite(), moved.isfinite())
    assert torch.equal(x == 0, moved == 0)
    assert torch.equal(moved[2, 0::2], moved[2, 1::2])  # pairs that cancel still do


def test_rows_of_rising_difficulty_lend_no_budget_down_the_chain() -> None:
    """Four tokens clipped by a static scale, each a little more: no gap between neighbours."""
    recipe = recipe_of(2.0**-6, 2.0**-8)
    scales = (2.0**-6, 2.0**-8)
    asked = request(
        2, weight_at="fc2_input", weights=FP8_TENSOR, activation_scales=scales,
        activation=Activation(limit=10.0), hidden_size=256, intermediate_size=128, top_k=4,
    )  # fmt: skip
    inputs = CLASSES["normal"](asked, recipe, 0, "cpu")
    for row, factor in ((250, 2), (251, 3), (252, 5), (253, 12)):
        inputs.x[row] *= factor
    yard = yardstick(inputs, recipe)
    assert yard.judge(yard.emulated).right
    own = yard.ruler.measure(yard.emulated).error
    worst = [float(own[yard.group == index].max()) for index in range(len(yard.standards))]
    least = [float(own[yard.group == index].min()) for index in range(len(yard.standards))]
    assert all(high <= 2 * sample.SPAN * low for high, low in zip(worst, least, strict=True))
    full = int(((inputs.topk.ids >= 0).all(1) & (own < 0.05)).nonzero()[0])
    for row in (0 * yard.emulated[full], yard.emulated[full + 1], 2 * yard.emulated[full]):
        y = yard.emulated.clone()
        y[full] = row
        assert yard.judge(y).wrong_tokens.tolist() == [full]


def test_classes_are_separated_by_gaps() -> None:
    chain = torch.tensor([1.0, 3.0, 9.0, 3.5, 27.0, 80.0], dtype=torch.float64)
    assert sample.classes(chain).tolist() == [0, 0, 1, 0, 1, 2]
    key = torch.tensor([3.0, 1.0, 100.0, 2.0, 0.0, torch.inf, 300.0], dtype=torch.float64)
    assert sample.classes(key).tolist() == [0, 0, 1, 0, -1, -1, 1]
    assert sample.classes(key[:0]).tolist() == []


def test_the_bound_of_few_tokens_holds() -> None:
    """Batches of any size, drawn from a population with rare large gaps, stay below the bound."""
    generator = torch.Generator().manual_seed(0)
    population = torch.rand(4096, generator=generator, dtype=torch.float64)
    population = torch.where(population > 0.97, population, 0.0)
    for tokens in (1, 8, 64, 512):
        drawn = torch.randint(4096, (200, sample.TOKENS), generator=generator)
        batches = torch.randint(4096, (200, tokens), generator=generator)
        for seen, batch in zip(population[drawn], population[batches], strict=True):
            standard = Standard(
                members=torch.arange(tokens), error=0.0, tile_error=0.0, shift=0.0,
                batch_shift=0.0, missed=seen[None], apart=seen[None],
            )  # fmt: skip
            assert float(batch.mean()) <= greatest_mean([standard], lambda s: s.missed, 0.0)
    assert FALSE_ALARM < 1 / (4 * 200)


def test_a_batch_is_held_together() -> None:
    """The more tokens, the narrower the band of the batch's norm, and the higher the share."""
    inputs = CLASSES["normal"](request(2), BF16_COMBINE, 0, "cpu")
    few, many = (yardstick(inputs.rows(slice(0, n)), BF16_COMBINE) for n in (4, 300))
    assert many.standards[0].batch_shift < few.standards[0].batch_shift
    reports = [yard.judge(yard.emulated) for yard in (few, many)]
    assert reports[0].share_floor < reports[1].share_floor


# --- the report ---------------------------------------------------------------------------------


def test_report_is_frozen_and_readable() -> None:
    yard = bench("plain")
    y = yard.emulated.clone()
    report = yard.judge(y)
    report.raise_if_wrong()
    with pytest.raises(FrozenInstanceError):
        report.right = False  # type: ignore[misc]
    for words in ("right: yes", "budget", "norm ratio", "this recipe", "cosine"):
        assert words in str(report)
    y[6] = -y[6]
    report = yard.judge(y)
    assert report.worst == 6
    for words in ("right: NO", "47 of 48 tokens", "token 6", "multiplied by -1"):
        assert words in str(report)


@pytest.mark.parametrize("rig", ["fp8", "gpt-oss"])
def test_any_garbage_is_judged(rig: str) -> None:
    yard = bench(rig)
    y = yard.emulated
    noise = normal_tokens(*y.shape, seed=9)
    for wrong in (y * math.nan, torch.full_like(y, math.inf), noise, y.flip(0)):
        report = yard.judge(wrong)
        assert not report.right
        assert "rank 0" in report.message
        assert "right: NO" in str(report)


def test_no_slots_leave_the_shared_expert() -> None:
    inputs = CLASSES["normal"](request(0, shared=True), BF16_COMBINE, 0, "cpu")
    inputs = routed(inputs, lambda ids, w: (ids[:, :0], w[:, :0]))
    yard = yardstick(inputs, BF16_COMBINE)
    assert yard.judge(yard.emulated).recipe
    assert yard.judge(yard.emulated * 2).message


def test_exact_grid_demands_equality() -> None:
    inputs = CLASSES["exact-grid"](request(0), BF16_COMBINE, 0, "cpu")
    yard = yardstick(inputs, BF16_COMBINE)
    y = yard.emulated.clone()
    size = y[5].abs()
    column = int(torch.where(size > 0, size, torch.inf).argmin())
    y[5, column] *= 1 + 2.0**-6
    assert yard.judge(y).right
    report = yard.judge(y, exact_grid=True)
    assert report.right
    assert not report.recipe
    assert f"first at token 5 column {column}" in report.message


TWO_RANKS = Placement(num_experts=6, slots=((0,) * 6, (1, 2, 3, 4, 5)))


def _whole(inputs: Inputs) -> torch.Tensor:
    return output(inputs, Emulated(BF16_COMBINE))


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda i: judge(_whole(i).float(), i, BF16_COMBINE), "is not BF16"),
        (lambda i: judge(_whole(i)[1:], i, BF16_COMBINE), "is not BF16"),
        (lambda i: judge(_whole(i), replace(i, x=i.x.float()), BF16_COMBINE), "is not BF16"),
        (lambda i: replace(i, x=i.x[:, 1:]), "is not BF16"),
        (lambda i: replace(i, x=i.x[1:]), "does not fit"),
        (lambda i: judge(_whole(i), routed(i, lambda d, w: (d + 9, w)), BF16_COMBINE), "outside"),
        (lambda i: replace(i, x=i.x.to("meta")), "not on x's"),
        (
            lambda i: replace(i, weights=replace(i.layer, placement=TWO_RANKS)),
            "do not hold expert",
        ),
    ],
)  # fmt: skip
def test_bad_input(break_it: Callable[[Inputs], object], says: str) -> None:
    inputs = CLASSES["normal"](request(0), BF16_COMBINE, 0, "cpu")
    with pytest.raises(BadInput, match=says):
        break_it(inputs)


def test_a_bias_forbids_the_weight_in_fc2s_input() -> None:
    inputs = CLASSES["normal"](request(0, expert_bias=True), BF16_COMBINE, 0, "cpu")
    with pytest.raises(BadInput, match="b2 unweighted"):
        judge(_whole(inputs), inputs, BF16_FC2_INPUT)
