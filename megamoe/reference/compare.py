"""The verdicts: is an output right, and is it this recipe's? Two answers, never one number.

Right: against EXACT, the error of each token, of each of its tiles and of its norm is within twice
the worst that the recipe itself shows on a sample of the token's class, plus what rounding the
output may add. This recipe: as many bits agree with Emulated as in the worst of the honest kernels,
less a margin for the tokens being few. Every limit is derived from the inputs.

Shapes: T tokens, H hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import BF16, F64
from megamoe.problem import Recipe
from megamoe.reference import sample
from megamoe.reference.case import Inputs
from megamoe.reference.diagnose import diagnose, diagnose_recipe
from megamoe.reference.honest import Honest, honest_kernels
from megamoe.reference.measure import Errors, Ruler, over, same_bits
from megamoe.reference.message import recipe_message, wrong_message
from megamoe.reference.report import Check, Ratio, Report
from megamoe.reference.standard import (
    ALLOWANCE,
    Standard,
    distance,
    greatest_mean,
    standard,
    truth_and_bits,
)


def judge(y: Tensor, inputs: Inputs, recipe: Recipe, *, exact_grid: bool = False) -> Report:
    """Both verdicts on a kernel's output.

    y: BF16 [T, H]. exact_grid: the inputs are of the exact-grid class, where no honest kernel can
    differ, so y must be torch.equal to Emulated(recipe). Raises BadInput where y does not fit the
    inputs, or the recipe computes another function than the layer. To judge several outputs of the
    same inputs, make one :func:`yardstick` and call its ``judge``.
    """
    return yardstick(inputs, recipe).judge(y, exact_grid=exact_grid)


def yardstick(inputs: Inputs, recipe: Recipe, honest: Sequence[Honest] | None = None) -> Yardstick:
    """All that a verdict needs and that does not depend on the output.

    honest: the kernels whose bits are granted; None derives them from the recipe.
    """
    _check_recipe(inputs, recipe)
    kernels = honest_kernels(recipe) if honest is None else tuple(honest)
    exact, emulated = truth_and_bits(inputs, recipe)
    ruler = Ruler.of(exact, emulated, inputs.topk.top_k)
    own = ruler.measure(emulated)
    group = sample.classes(own.error + ruler.floor)
    members = [
        (group == index).nonzero()[:, 0]
        for index in range(int(group.max()) + 1 if inputs.tokens else 0)
    ]
    standards = [standard(m, inputs, recipe, kernels, emulated, own, ruler) for m in members]
    return Yardstick(inputs, recipe, emulated, ruler, group, tuple(standards))


def _check_recipe(inputs: Inputs, recipe: Recipe) -> None:
    layer = inputs.layer
    if (recipe.weight_at == "input") != (layer.weight_at == "input"):
        raise bad_input(
            "recipe.weight_at", recipe.weight_at,
            f"is another function than the layer's {layer.weight_at}", "use the family's recipe",
        )  # fmt: skip
    if recipe.weight_at == "fc2_input" and layer.experts.b2 is not None:
        raise bad_input(
            "recipe.weight_at", "fc2_input", "would leave the bias b2 unweighted",
            "use a recipe with weight_at='combine'",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Yardstick:
    """Truth, recipe and limits for one batch; judges any number of outputs.

    emulated: BF16 [T, H], what a perfect kernel gives. group: each token's class, an index into
    ``standards``; -1 where the output is exactly zero or nowhere finite: no error to measure.
    """

    inputs: Inputs
    recipe: Recipe
    emulated: Tensor
    ruler: Ruler
    group: Tensor
    standards: tuple[Standard, ...]

    @property
    def budget(self) -> Tensor:
        """The greatest error that a right output may have, float64 [T]."""
        return self._limit(lambda s: s.error, self.ruler.floor)

    def _limit(self, worst: Callable[[Standard], float], floor: Tensor) -> Tensor:
        """A limit of each token, or of each of its tiles: its class's, and its own floor."""
        table = torch.tensor(
            [*(worst(s) for s in self.standards), 0.0], dtype=F64, device=floor.device
        )
        limit = table[self.group]
        return (limit if floor.dim() == 1 else limit[:, None]) + floor

    def judge(self, y: Tensor, *, exact_grid: bool = False) -> Report:
        """Both verdicts on ``y``, BF16 [T, H]."""
        self._check_output(y)
        errors = self.ruler.measure(y)
        by_token = self._token_checks(y, errors)
        batch = self._batch_check(errors)
        bits = self._bit_checks(y, exact_grid)
        wrong = torch.stack([check.failing for check in by_token]).any(0).nonzero()[:, 0]
        excess = torch.stack([check.excess for check in by_token]).amax(0)
        worst = int(excess.argmax()) if len(y) else None
        report = Report(
            right=not len(wrong) and batch.passed,
            recipe=all(check.passed for check in bits),
            recipe_name=str(self.recipe),
            rank=self.inputs.rank,
            error=errors.error,
            budget=by_token[0].limit,
            checks=(*by_token, batch),
            worst=worst,
            wrong_tokens=wrong[excess[wrong].argsort(descending=True, stable=True)],
            ratio=self._ratio(errors, by_token[2].limit, worst),
            batch_ratio=self._batch_ratio(errors, batch),
            bit_checks=bits,
            share=1.0 - float(bits[0].value),
            share_floor=max(0.0, 1.0 - float(bits[0].limit)),
            cosine=_cosine(y, self.ruler),
            relative_error=_relative_error(y, self.ruler),
        )
        return self._explained(report, y)

    def _explained(self, report: Report, y: Tensor) -> Report:
        """The report with its message, where a verdict went against the output."""
        if report.right and report.recipe:
            return report
        finding = other = None
        if not report.right:
            finding = diagnose(y, self.inputs, self.ruler, report.budget, report.wrong_tokens)
        if finding is None:
            floor = report.share_floor
            other = diagnose_recipe(y, self.emulated, self.inputs, self.recipe, floor)
        if report.right:
            message = recipe_message(report, other, y, self.emulated)
        else:
            message = wrong_message(report, finding, other, y, self.inputs, self.ruler)
        return replace(report, finding=finding, message=message)

    def _check_output(self, y: Tensor) -> None:
        if y.shape != self.emulated.shape or y.dtype != torch.bfloat16:
            raise bad_input(
                "y", f"of {y.dtype} {list(y.shape)}",
                f"is not BF16 {list(self.emulated.shape)}", "pass the kernel's output",
            )  # fmt: skip
        if y.device != self.emulated.device:
            raise bad_input(
                "y", f"on {y.device}", f"is not on x's {self.emulated.device}", "move it"
            )

    def _token_checks(self, y: Tensor, errors: Errors) -> list[Check]:
        ruler = self.ruler
        budget = max((s.error for s in self.standards), default=0.0)
        misplaced = ruler.misplaced(y, self.emulated, budget).to(F64)
        return [
            Check("error", errors.error, self.budget),
            Check(
                "error of a tile", errors.tile_error,
                self._limit(lambda s: s.tile_error, ruler.tile_floor),
            ),
            Check("norm", errors.shift.abs(), self._limit(lambda s: s.shift, ruler.floor)),
            Check("NaN or infinity", misplaced, torch.zeros_like(misplaced)),
        ]  # fmt: skip

    def _bit_checks(self, y: Tensor, exact_grid: bool) -> tuple[Check, ...]:
        """The second verdict: elements without the recipe's bits, and distances from it.

        Shares settle BF16 recipes. Where one value that rounds the other way before FC2 moves a
        whole row, as in FP8, bits tell little and distances tell more.
        """
        device = self.emulated.device
        missed = (~same_bits(y, self.emulated)).to(F64).mean(1)
        live = self.group >= 0
        displaced = self.ruler.displaced(y, self.emulated).to(F64)
        apart = distance(y, self.emulated, self.ruler.size)
        moved = 2.0**-self.recipe.mid.element.mantissa_bits
        moved /= math.sqrt(self.inputs.layer.intermediate_size)
        # Of the row's norm one such value moves this part; of its bits, this against BF16's unit.
        flipped = moved * 2.0**BF16.mantissa_bits
        share_limit = greatest_mean(self.standards, lambda s: s.missed, flipped, ceiling=1.0)
        apart_limit = greatest_mean(self.standards, lambda s: s.apart, moved)
        if exact_grid or not bool(live.any()):
            live, share_limit = torch.ones_like(live), 0.0

        def mean(name: str, values: Tensor, limit: float) -> Check:
            value = values[live].mean()[None] if len(values) else values.new_zeros(1)
            return Check(name, value, torch.tensor([limit], dtype=F64, device=device))

        return (
            mean("bits", missed, share_limit),
            mean("mean distance", apart, apart_limit),
            Check(
                "distance", apart,
                self._limit(lambda s: ALLOWANCE * float(s.apart.max()), 2 * self.ruler.floor),
            ),
            Check("NaN or infinity", displaced, torch.zeros_like(displaced)),
        )  # fmt: skip

    def _batch_check(self, errors: Errors) -> Check:
        """The mean shift of the norm, by class: a systematic scale that no token shows alone."""
        means = [errors.shift[s.members].mean().abs() for s in self.standards]
        limits = [s.batch_shift for s in self.standards]
        none = errors.shift.new_zeros(0)
        return Check(
            "norm of the batch",
            torch.stack(means) if means else none,
            torch.tensor(limits, dtype=F64, device=none.device),
        )

    def _ratio(self, errors: Errors, limit: Tensor, token: int | None) -> Ratio:
        """|y| over |EXACT| of one token, and its band."""
        if token is None or float(self.ruler.norm[token]) == 0:
            return Ratio(1.0, 0.0)
        scale = float(self.ruler.size[token] / self.ruler.norm[token])
        return Ratio(1 + float(errors.shift[token]) * scale, float(limit[token]) * scale)

    def _batch_ratio(self, errors: Errors, batch: Check) -> Ratio:
        """Likewise over the tokens of one class: the one furthest out, else the largest."""
        if not self.standards:
            return Ratio(1.0, 0.0)
        most = max(range(len(self.standards)), key=lambda i: len(self.standards[i].members))
        index = most if batch.passed else int(batch.excess.argmax())
        members = self.standards[index].members
        scale = float(over(self.ruler.norm[members], self.ruler.size[members]).mean())
        if scale == 0:
            return Ratio(1.0, 0.0)
        return Ratio(
            1 + float(errors.shift[members].mean()) / scale, float(batch.limit[index]) / scale
        )


def _cosine(y: Tensor, ruler: Ruler) -> float:
    a, b = _counted(y, ruler)
    return float((a * b).sum() / (a.norm() * b.norm())) if float(a.norm() * b.norm()) else 1.0


def _relative_error(y: Tensor, ruler: Ruler) -> float:
    a, b = _counted(y, ruler)
    return float(over((a - b).norm()[None], b.norm()[None])[0])


def _counted(y: Tensor, ruler: Ruler) -> tuple[Tensor, Tensor]:
    return (
        torch.where(ruler.counted, y.to(F64), 0.0),
        torch.where(ruler.counted, ruler.truth.exact, 0.0),
    )
