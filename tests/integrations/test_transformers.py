"""Whole transformers models through ``experts_implementation="megamoe"``.

Their logits are judged as a layer's output is: against the same model whose experts are exact, each
side by twice the worst error of its own recipe. A router that takes other experts after a different
rounding changes all later tokens (attention looks back), so positions count up to the first such.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hf_models as hf
import pytest
import torch
from test_hf_blocks import HF_GROUPED_BF16_WEIGHTS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

import megamoe
from megamoe.formats import rn32, rnbf16
from megamoe.integrations.transformers import experts_forward, register, weights_of
from megamoe.problem import BF16_COMBINE, HF_EAGER, HF_GROUPED, TopK
from megamoe.reference.measure import half_unit
from megamoe.reference.moe import EXACT, Arithmetic, Emulated, layer

WHOLE = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
CASES = [case.package for case in hf.CASES]
ALLOWANCE = 2.0  # as the oracle's
Experts = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def computed_by(arithmetic: Arithmetic) -> Experts:
    """An experts implementation under one of the reference's arithmetics, BF16 at the end."""

    def run(experts: nn.Module, x: Tensor, index: Tensor, w: Tensor) -> Tensor:
        topk = TopK(ids=index, weights=w, scaled=True)
        y = layer(x, topk, weights_of(experts), arithmetic)
        return y if y.dtype == torch.bfloat16 else rnbf16(rn32(y))

    return run


def doubled(experts: nn.Module, x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return experts_forward(experts, x, index, w * 2)


def without_the_last_slot(experts: nn.Module, x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return experts_forward(experts, x, index[:, :-1], w[:, :-1])


def with_the_next_expert(experts: nn.Module, x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return experts_forward(experts, x, (index + 1) % hf.EXPERTS, w)


MUTANTS = {"doubled": doubled, "dropped": without_the_last_slot, "shifted": with_the_next_expert}
RECIPES = {
    "exact": EXACT,
    "megamoe recipe": Emulated(BF16_COMBINE),
    "eager recipe": Emulated(HF_EAGER),
    "grouped_mm recipe": Emulated(HF_GROUPED),
    "grouped_mm recipe, bfloat16 weights": Emulated(HF_GROUPED_BF16_WEIGHTS),
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    for name, arithmetic in RECIPES.items():
        ExpertsInterface.register(name, computed_by(arithmetic))
    for name, mutant in MUTANTS.items():
        ExpertsInterface.register(name, mutant)


class Run:
    """One pass of a model: its logits, and where each token went in each MoE layer."""

    def __init__(self, model: nn.Module, name: str, input_ids: Tensor) -> None:
        self.routes: list[Tensor] = []
        self.weights_dtype: torch.dtype | None = None
        hooks = [
            block.experts.register_forward_pre_hook(self._record)
            for block in hf.blocks(model).values()
        ]
        before = model.config._experts_implementation
        model.set_experts_implementation(name)
        try:
            with torch.no_grad():
                self.logits = model(input_ids).logits.double()
        finally:
            model.set_experts_implementation(before)
            for hook in hooks:
                hook.remove()
        self.shape = input_ids.shape

    def _record(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.routes.append(args[1].sort(dim=1).values)
        self.weights_dtype = args[2].dtype

    def comparable(self, other: Run) -> Tensor:
        """bool [B, S]: this token and all before it went to the same experts in both runs."""
        pairs = zip(self.routes, other.routes, strict=True)
        same = torch.stack([(a == b).all(1) for a, b in pairs]).all(0).view(self.shape)
        return same.long().cumprod(1).bool()

    def errors(self, exact: Run) -> tuple[Tensor, Tensor]:
        """Relative errors of the comparable positions' logits, and what two roundings may add."""
        positions = self.comparable(exact)
        mine, truth = self.logits[positions], exact.logits[positions]
        size = truth.norm(dim=1)
        return (mine - truth).norm(dim=1) / size, 2 * half_unit(truth).norm(dim=1) / size

    def right(self, exact: Run, recipe: Run) -> bool:
        """Within the recipe's budget at every position that counts, which are half or more."""
        error, floor = self.errors(exact)
        budget = ALLOWANCE * recipe.errors(exact)[0].max()
        return len(error) >= self.logits[..., 0].numel() / 2 and bool(
            (error <= budget + floor).all()
        )


def prompt(batch: int = 4, length: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, hf.VOCABULARY, (batch, length), generator=generator)


def recipe_of(implementation: str, run: Run) -> str:
    narrow = implementation == "grouped_mm" and run.weights_dtype == torch.bfloat16
    return f"{implementation} recipe" + (", bfloat16 weights" if narrow else "")


@pytest.mark.parametrize("package", CASES)
def test_logits(package: str) -> None:
    """megamoe, eager and grouped_mm are all right; megamoe's bits are its recipe's."""
    model = hf.build(package)
    exact = Run(model, "exact", prompt())
    runs = {name: Run(model, name, prompt()) for name in ("megamoe", "eager", "grouped_mm")}
    budgets = {}
    for name, run in runs.items():
        recipe = Run(model, recipe_of(name, run), prompt())
        assert run.right(exact, recipe), name
        budgets[name] = ALLOWANCE * recipe.errors(exact)[0].max()
    assert torch.equal(runs["megamoe"].logits, Run(model, "megamoe recipe", prompt()).logits)
    # Side by side: what the two budgets allow together.
    error, floor = runs["megamoe"].errors(runs["eager"])
    assert len(error)
    assert bool((error <= budgets["megamoe"] + budgets["eager"] + floor).all())


@pytest.mark.parametrize("package", WHOLE)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_experts_do_not_pass(package: str, mutant: str) -> None:
    model = hf.build(package)
    exact, recipe = Run(model, "exact", prompt()), Run(model, "megamoe recipe", prompt())
    assert Run(model, "megamoe", prompt()).right(exact, recipe)
    assert not Run(model, mutant, prompt()).right(exact, recipe)


@pytest.mark.parametrize("package", WHOLE)
def test_generation(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """from_pretrained with experts_implementation="megamoe" generates, every step through forward.

    Each token it takes is, for eager on that sequence, the best or within the two budgets of it.
    """
    built = hf.build(package)
    hf.save(built, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="megamoe", dtype=torch.bfloat16
    )
    assert model.config._experts_implementation == "megamoe"
    calls = 0
    forward = megamoe.forward

    def counted(*args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr("megamoe.api.forward", counted)
    start, steps = prompt(batch=2, length=6), 8
    with torch.no_grad():
        sequence = model.generate(
            start, max_new_tokens=steps, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    assert sequence.shape == (2, 6 + steps)
    assert torch.equal(sequence[:, :6], start)
    assert calls == steps * len(hf.blocks(model))
    exact = Run(model, "exact", sequence)
    eager = Run(model, "eager", sequence)
    budget = sum(
        ALLOWANCE * Run(model, f"{name} recipe", sequence).errors(exact)[0].max()
        for name in ("megamoe", "eager")
    )
    again = Run(model, "megamoe", sequence)
    counts = again.comparable(eager)[:, 5:-1]
    assert counts.sum() >= counts.numel() / 2
    scores = eager.logits[:, 5:-1]
    taken = scores.gather(2, sequence[:, 6:, None])[..., 0]
    slack = 2 * budget * scores.norm(dim=2)
    assert bool((taken >= scores.amax(2) - slack)[counts].all())
    # The slack tells a token from another: most others lie below it.
    assert bool(((scores >= (scores.amax(2) - slack)[..., None]).sum(2) < hf.VOCABULARY / 2).all())


def test_the_name_is_unknown_until_registered_and_known_after() -> None:
    register("megamoe again")
    register("megamoe again")
    assert ALL_EXPERTS_FUNCTIONS["megamoe again"] is experts_forward
    with pytest.raises(ValueError, match="not supported"):
        hf.build("qwen3_moe").set_experts_implementation("megamoe, misspelt")
