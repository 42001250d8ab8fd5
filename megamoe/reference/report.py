"""What a verdict says, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.errors import Mismatch


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One demand: ``value`` is at most ``limit``, both [n] or [n, tiles]; NaN is no pass."""

    name: str
    value: Tensor
    limit: Tensor

    @property
    def failing(self) -> Tensor:
        """bool [n]."""
        bad = ~(self.value <= self.limit)
        return bad if bad.dim() == 1 else bad.any(1)

    @property
    def passed(self) -> bool:
        return not bool(self.failing.any())

    @property
    def excess(self) -> Tensor:
        """value over limit, float64 [n]; infinite for NaN, 0 for a value of 0."""
        ratio = torch.where(self.value == 0, 0.0, self.value / self.limit).nan_to_num(torch.inf)
        return ratio if ratio.dim() == 1 else ratio.amax(1)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A norm over the one it should be, and how far from 1 it may lie."""

    value: float
    slack: float

    def __str__(self) -> str:
        return f"{self.value:.5f} in [{1 - self.slack:.5f}, {1 + self.slack:.5f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The fault under which a wrong token would be right.

    residual: the error that is left under it, within ``allowed``. explains, examined: how many of
    the wrong tokens looked at it explains.
    """

    fault: str
    token: int
    slot: int | None
    expert: int | None
    residual: float
    allowed: float
    explains: int
    examined: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The two verdicts on one output, and what they rest on.

    error, budget: float64 [tokens], relative to |sum |w y|| + |shared|. checks, bit_checks: all the
    demands of the first and of the second verdict. worst: the token nearest to its limits or
    furthest past them; None without tokens. wrong_tokens: those that fail, the worst first. ratio:
    the worst token's norm over EXACT's; batch_ratio: likewise over all tokens of a class. share: of
    elements bit-equal to Emulated, and the floor that honest kernels set. cosine, relative_error:
    the field's figures, on which no verdict rests. message: empty where both verdicts are yes.
    """

    right: bool
    recipe: bool
    recipe_name: str
    rank: int
    error: Tensor
    budget: Tensor
    checks: tuple[Check, ...]
    worst: int | None
    wrong_tokens: Tensor
    ratio: Ratio
    batch_ratio: Ratio
    bit_checks: tuple[Check, ...]
    share: float
    share_floor: float
    cosine: float
    relative_error: float
    finding: Finding | None = None
    message: str = ""

    def raise_if_wrong(self, *, recipe: bool = True) -> None:
        """Raise Mismatch with the message if a verdict went against the output.

        recipe=False asks only whether it is right.
        """
        if not self.right or (recipe and not self.recipe):
            raise Mismatch(self.message)

    def __str__(self) -> str:
        tokens = len(self.error)
        right = f"right: {_yes(self.right)}, {tokens - len(self.wrong_tokens)} of {tokens} tokens"
        if self.worst is not None:
            right += (
                f"; worst token {self.worst}: error {float(self.error[self.worst]):.3g} of budget "
                f"{float(self.budget[self.worst]):.3g}, norm ratio {self.ratio}; "
                f"batch {self.batch_ratio}"
            )
        return "\n".join(
            (
                right,
                f"this recipe ({self.recipe_name}): {_yes(self.recipe)}, {percent(self.share)} of "
                f"elements have its bits, honest kernels {percent(self.share_floor)} or more",
                f"for comparison only: cosine {self.cosine:.7f}, "
                f"relative error {self.relative_error:.3g}",
                *([self.message] if self.message else []),
            )
        )


def percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def _yes(verdict: bool) -> str:
    return "yes" if verdict else "NO"
