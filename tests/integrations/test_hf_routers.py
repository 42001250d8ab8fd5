"""Our routers against transformers' own modules: the same choice, and weights to counted roundings.

Each family's facts (scoring, epsilon, groups, ...) come from its saved checkpoint. Where
transformers computes in float32 the two differ by what its roundings add up to and by nothing else;
where it computes otherwise on purpose (bfloat16 logits, scores or weights), that has its own test.
"""

from __future__ import annotations

import hf_models as hf
import pytest
import torch
from torch import Tensor, nn

from megamoe.problem import MoEWeights, Router
from megamoe.reference.router import logits, route

FLOAT32 = torch.finfo(torch.float32).eps / 2  # unit roundoffs
BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2
EXP = 2  # torch's vectorised exp and log1p: within one unit in the last place, two roundings
TOKENS = 512

CASES = [case.package for case in hf.CASES]
BF16_LOGITS = ["qwen3_moe", "olmoe", "mixtral", "minimax", "minimax_m2", "minimax_m3_vl", "gpt_oss"]
FLOAT32_LOGITS = ["glm4_moe", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm5_next"]
BF16_WEIGHTS = ["qwen3_moe", "olmoe", "gpt_oss", "deepseek_v4"]


def dense(ids: Tensor, values: Tensor, experts: int) -> Tensor:
    """[T, E] with each slot's value at its expert, NaN elsewhere: slot order forgotten."""
    return torch.full((len(ids), experts), torch.nan, dtype=torch.float64).scatter(
        1, ids, values.double()
    )


def roundings(router: Router, values: Tensor) -> Tensor:
    """How many float32 roundings there are from logits to both sides' weights, [T, 1].

    An error in exp's argument counts with the argument's size (a softmax's x - max).
    """
    spread = (values.amax(1) - values.amin(1)).double()[:, None]
    if router.scoring == "sigmoid":
        score = torch.full_like(spread, EXP + 2)
    elif router.scoring == "sqrtsoftplus":
        score = torch.full_like(spread, (EXP + EXP + 1) / 2 + 1)
    else:
        terms = router.top_k if router.scoring == "softmax_of_top_k" else router.num_experts
        score = 2 * (spread + EXP) + terms
    if router.renormalise:
        score = 2 * score + router.top_k + 1
    scaling, ours = 1, 4
    return score + scaling + ours


def compared(weights: MoEWeights, values: Tensor, input_ids: Tensor | None) -> tuple[Tensor, ...]:
    """Our ids and weights of these logits, with the factor that transformers' routers fold in."""
    assert weights.router is not None
    topk = route(values.float(), weights.router, input_ids=input_ids)
    factor = weights.routed_scaling_factor if weights.scale_at == "weights" else 1.0
    return topk.ids, topk.weights * torch.tensor(factor, dtype=torch.float32)


def assert_close(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Within a relative bound of what was chosen, and nothing else chosen."""
    assert torch.equal(found.isnan(), expected.isnan())
    error = ((found - expected).abs() / expected.abs()).nan_to_num(0.0)
    assert bool((error <= bound).all()), f"worst {float((error / bound).max()):.3g} of its bound"


@pytest.mark.parametrize("package", CASES)
def test_float32_routers_choose_and_weigh_alike(package: str) -> None:
    """The whole model in float32: from the same logits, the same experts and weights."""
    block, weights = hf.pair(package, torch.float32)
    router = weights.router
    assert router is not None
    x = hf.tokens(TOKENS, torch.float32)
    input_ids = torch.arange(TOKENS) % hf.VOCABULARY
    hf_logits, hf_weights, hf_ids = hf.hf_route(block, x, input_ids)
    assert (hf_logits.dtype, hf_weights.dtype) == (torch.float32, torch.float32)
    ids, w = compared(weights, hf_logits, input_ids)
    assert torch.equal(ids.sort(dim=1).values, hf_ids.sort(dim=1).values)
    count = roundings(router, hf_logits)
    assert_close(
        dense(hf_ids, hf_weights, router.num_experts),
        dense(ids, w, router.num_experts),
        count * FLOAT32 / (1 - count * FLOAT32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("package", CASES)
def test_logits_differ_by_their_roundings(package: str, dtype: torch.dtype) -> None:
    """A float32 sum in any order, and transformers' cast to bfloat16 in a bfloat16 model."""
    block, weights = hf.pair(package, dtype)
    router = weights.router
    assert router is not None
    x = hf.tokens(TOKENS, dtype)
    hf_logits = hf.hf_route(block, x, torch.arange(TOKENS) % hf.VOCABULARY)[0]
    expected = torch.bfloat16 if dtype == torch.bfloat16 and package not in FLOAT32_LOGITS else (
        torch.float32
    )  # fmt: skip
    assert hf_logits.dtype == expected
    terms = x.double().abs() @ router.weight.double().abs().T
    bound = terms * (hf.H + 1) * FLOAT32
    if router.bias is not None:
        bound = bound + router.bias.double().abs() * 2 * FLOAT32
    if expected == torch.bfloat16:
        # The sum's cast, and a bias's where it is added to a rounded sum.
        magnitude = hf_logits.double().abs() + (0 if router.bias is None else terms)
        bound = bound + magnitude * BFLOAT16
    assert bool(((hf_logits.double() - logits(x, router).double()).abs() <= bound).all())


@pytest.mark.parametrize("package", FLOAT32_LOGITS)
def test_bfloat16_models_with_float32_routers_agree_from_x(package: str) -> None:
    """End to end, the gate product included: a token's experts are ours unless two scores touch."""
    block, weights = hf.pair(package)
    router = weights.router
    assert router is not None
    assert router.correction_bias is not None
    x = hf.tokens(TOKENS)
    _, hf_weights, hf_ids = hf.hf_route(block, x)
    values = logits(x, router)
    ids, w = compared(weights, values, None)
    assert torch.equal(ids.sort(dim=1).values, hf_ids.sort(dim=1).values)
    # A sigmoid's relative slope is at most 1: the logits' absolute error comes on top, twice.
    gate = (x.double().abs() @ router.weight.double().abs().T).amax(1, keepdim=True) * (hf.H + 1)
    count = roundings(router, values) + 2 * gate
    assert_close(
        dense(hf_ids, hf_weights, router.num_experts),
        dense(ids, w, router.num_experts),
        count * FLOAT32 / (1 - count * FLOAT32),
    )


@pytest.mark.parametrize("package", BF16_LOGITS)
def test_from_bfloat16_logits_only_a_cast_of_the_weights_differs(package: str) -> None:
    """Scores are float32 again; qwen3_moe, olmoe and gpt_oss then cast the weights to bfloat16."""
    block, weights = hf.pair(package)
    router = weights.router
    assert router is not None
    hf_logits, hf_weights, hf_ids = hf.hf_route(block, hf.tokens(TOKENS))
    ids, w = compared(weights, hf_logits, None)
    bound = roundings(router, hf_logits.float()) * FLOAT32
    if package in BF16_WEIGHTS:
        assert hf_weights.dtype == torch.bfloat16
        # The named difference: they hold 8 bits, ours 24, and rounding ours gives theirs or, where
        # the two float32 values lie across a midpoint, its neighbour.
        assert not torch.equal(w, w.bfloat16().float())
        bound = bound + BFLOAT16
    else:
        assert hf_weights.dtype == torch.float32
    same = ids_without_ties(router, hf_logits.float(), ids)
    assert same.sum() > TOKENS // 2
    assert_close(
        dense(hf_ids, hf_weights, router.num_experts)[same],
        dense(ids, w, router.num_experts)[same],
        (bound / (1 - bound))[same],
    )


def ids_without_ties(router: Router, values: Tensor, ids: Tensor) -> Tensor:
    """bool [T]: no expert outside ties with the last one inside.

    bfloat16 logits tie often; transformers' topk leaves open which of the two it takes.
    """
    inside = values.gather(1, ids)
    outside = values.scatter(1, ids, torch.nan)
    tie = (outside[:, :, None] == inside[:, None, :]).any(2)
    return ~tie.any(1)


def test_bfloat16_logits_lose_a_choice_that_float32_makes() -> None:
    """The named difference of seven families: logits within one bfloat16 tie in transformers."""
    block, weights = hf.pair("mixtral")
    router = weights.router
    assert router is not None
    gate = hf.router_of(block)
    w = torch.zeros_like(gate.weight)
    w[:, 0], w[5, 1] = 1.0, 2.0**-10  # expert 5 leads by an eighth of a unit in the last place
    x = torch.zeros(1, hf.H).bfloat16()
    x[0, :2] = 1.0
    kept = gate.weight.data
    gate.weight.data = w
    try:
        hf_logits = hf.hf_route(block, x)[0]
    finally:
        gate.weight.data = kept
    mine = Router(weight=w, top_k=1)
    assert len(hf_logits.unique()) == 1
    assert route(logits(x, mine), mine).ids.tolist() == [[5]]
    assert route(hf_logits.float(), mine).ids.tolist() == [[0]]


def test_deepseek_v4_scores_in_bfloat16() -> None:
    """The named difference of V4 in transformers: scores, sums and weights are all bfloat16.

    Every weight is within the bfloat16 roundings counted below; some tokens get other experts, and
    there the scores of the exchanged experts are within the scores' own roundings of each other.
    """
    block, weights = hf.pair("deepseek_v4")
    router = weights.router
    assert router is not None
    assert router.correction_bias is not None
    x = hf.tokens(4 * TOKENS)
    hf_logits, hf_weights, hf_ids = hf.hf_route(block, x)
    assert hf_weights.dtype == torch.bfloat16
    ids, w = compared(weights, hf_logits, None)
    softplus, root, total, division, scaling = 1, 1, 2, 1, 1
    score = softplus / 2 + root
    bound = (2 * score + total + division + scaling) * BFLOAT16
    bound = bound + roundings(router, hf_logits.float()) * FLOAT32
    same = (ids.sort(dim=1).values == hf_ids.sort(dim=1).values).all(1)
    assert_close(
        dense(hf_ids, hf_weights, router.num_experts)[same],
        dense(ids, w, router.num_experts)[same],
        (bound / (1 - bound))[same],
    )
    assert 0 < int((~same).sum()) < len(x) // 8
    scores = nn.functional.softplus(hf_logits.double()).sqrt()
    biased = scores + router.correction_bias.double()
    for t in (~same).nonzero()[:, 0].tolist():
        mine, theirs = set(ids[t].tolist()), set(hf_ids[t].tolist())
        for a in mine - theirs:
            for b in theirs - mine:
                allowed = (scores[t, a] + scores[t, b]) * score * BFLOAT16
                assert 0 <= biased[t, a] - biased[t, b] <= allowed * (1 + BFLOAT16)


def test_deepseek_v4_hash_layer() -> None:
    """The table chooses, the scores weigh; the slots keep the table's order."""
    block, weights = hf.pair("deepseek_v4", torch.float32, layer=0)
    router = weights.router
    assert router is not None
    assert type(hf.router_of(block)).__name__ == "DeepseekV4HashRouter"
    input_ids = torch.arange(TOKENS) % hf.VOCABULARY
    hf_logits, hf_weights, hf_ids = hf.hf_route(block, hf.tokens(TOKENS, torch.float32), input_ids)
    ids, w = compared(weights, hf_logits, input_ids)
    assert torch.equal(ids, hf_ids)
    bound = roundings(router, hf_logits) * FLOAT32
    error = (hf_weights.double() - w.double()).abs() / w.double()
    assert bool((error <= bound / (1 - bound)).all())


@pytest.mark.parametrize("package", ["deepseek_v3", "glm4_moe", "minimax_m2", "minimax_m3_vl"])
def test_each_family_has_its_own_epsilon(package: str) -> None:
    """Scores of 1e-26 meet 1e-20: DeepSeek's weights vanish beside it, MiniMax's still sum to 1."""
    block, weights = hf.pair(package, torch.float32)
    router = weights.router
    assert router is not None
    gate = hf.router_of(block)
    kept = gate.weight.data
    gate.weight.data = torch.full_like(kept, -60.0 / hf.H)
    try:
        hf_logits, hf_weights, hf_ids = hf.hf_route(block, torch.ones(1, hf.H))
    finally:
        gate.weight.data = kept
    ids, w = compared(weights, hf_logits, None)
    # The biases alone decide, and no two of them are equal.
    assert torch.equal(ids.sort(dim=1).values, hf_ids.sort(dim=1).values)
    count = roundings(router, hf_logits)
    assert_close(
        dense(hf_ids, hf_weights, router.num_experts),
        dense(ids, w, router.num_experts),
        count * FLOAT32,
    )
    vanished = float(w.sum()) < 0.5  # a normalised row sums to the factor, which is 1 or more
    assert vanished == (router.epsilon > 0)
    assert (router.epsilon > 0) == package.startswith(("deepseek", "glm"))


@pytest.mark.parametrize("package", CASES)
def test_slots_are_in_our_order_whatever_the_order_of_theirs(package: str) -> None:
    """transformers asks topk for no order (sorted=False); ours descends by the score that chose."""
    _, weights = hf.pair(package, torch.float32)
    router = weights.router
    assert router is not None
    values = logits(hf.tokens(TOKENS, torch.float32), router)
    topk = route(values, router)
    if router.correction_bias is None:
        order = topk.weights
    else:
        score = values.sigmoid() if router.scoring == "sigmoid" else (
            nn.functional.softplus(values).sqrt()
        )  # fmt: skip
        order = (score.double() + router.correction_bias.double()).gather(1, topk.ids)
    assert bool((order[:, 1:] <= order[:, :-1]).all())
