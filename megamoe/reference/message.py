"""The words of a mismatch: rank, token, slot, expert, the suspected fault, error and budget."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.reference.case import Inputs
from megamoe.reference.measure import TILE, Ruler, norms, same_bits
from megamoe.reference.report import Finding, Report, percent

LISTED = 6  # tokens named one by one


def wrong_message(
    report: Report,
    finding: Finding | None,
    other: tuple[str, float] | None,
    y: Tensor,
    inputs: Inputs,
    ruler: Ruler,
) -> str:
    """What is said of an output that is not right. other: the recipe whose bits it has."""
    if not len(report.wrong_tokens):
        return (
            f"rank {report.rank}: every token alone is within its limits, but the norms of all are "
            f"off together: {report.batch_ratio}"
        )
    token = int(report.wrong_tokens[0]) if finding is None else finding.token
    where = f"rank {report.rank} token {token}"
    failed = ", ".join(c.name for c in report.checks[:-1] if bool(c.failing[token]))
    figures = (
        f"error {float(report.error[token]):.3g} against a budget of "
        f"{float(report.budget[token]):.3g} (failed: {failed})"
    )
    if finding is not None:
        if finding.slot is not None:
            where += f" slot {finding.slot} expert {finding.expert}"
        lines = [
            f"{where}: {finding.fault}; {figures}, {finding.residual:.3g} if that is the fault; it "
            f"explains {finding.explains} of {finding.examined} tokens examined"
        ]
    elif other is not None:
        lines = [f"{where}: {figures}; {percent(other[1])} of bits are those with {other[0]}"]
    else:
        lines = [f"{where}: {figures}; no known fault explains it", _localise(token, y, ruler)]
    lines.append(_which(report, inputs))
    leak = _leak(token, y, ruler)
    return "\n".join([*lines, leak] if leak else lines)


def recipe_message(
    report: Report, other: tuple[str, float] | None, y: Tensor, emulated: Tensor
) -> str:
    """What is said of an output that is right, but not this recipe's."""
    bits, mean, apart, classes = report.bit_checks
    text = f"rank {report.rank}: right, but not {report.recipe_name}: "
    if not bits.passed:
        text += (
            f"{percent(report.share)} of elements have its bits where honest kernels have "
            f"{percent(report.share_floor)} or more"
        )
    elif not mean.passed:
        text += (
            f"tokens lie {float(mean.value):.3g} from it on average, honest kernels "
            f"{float(mean.limit):.3g} or less"
        )
    elif not classes.passed:
        token = int(classes.value.argmax())
        text += f"token {token} has numbers where it overflows"
    else:
        token = int(apart.excess.argmax())
        text += (
            f"token {token} lies {float(apart.value[token]):.3g} from it, honest kernels "
            f"{float(apart.limit[token]):.3g} or less"
        )
    different = (~same_bits(y, emulated)).nonzero()
    token, column = (int(index) for index in different[0].tolist())
    text += (
        f"; first at token {token} column {column}: {float(y[token, column])!r} instead of "
        f"{float(emulated[token, column])!r}; "
    )
    if other is None:
        return text + "no recipe that differs in one known point has these bits"
    return text + f"{percent(other[1])} of bits are those with {other[0]}"


def _which(report: Report, inputs: Inputs) -> str:
    """Which tokens, and the experts that they and no right token use."""
    wrong, total = report.wrong_tokens, len(report.error)
    listed = ", ".join(str(token) for token in wrong[:LISTED].tolist())
    text = f"{len(wrong)} of {total} tokens are wrong: {listed}" + ", ..." * (len(wrong) > LISTED)
    if len(wrong) == total:
        return text
    bad = torch.zeros(total, dtype=torch.bool, device=wrong.device)
    bad[wrong] = True
    ids = inputs.topk.ids.to(torch.int64)
    experts = torch.arange(inputs.layer.num_experts, device=ids.device)
    uses = torch.stack([(ids == expert).any(1) for expert in experts])
    guilty = (uses[:, bad].all(1) & ~uses[:, ~bad].any(1)).nonzero()[:, 0].tolist()
    if guilty:
        text += f"; they and no other token use expert {', '.join(str(e) for e in guilty)}"
    return text


def _localise(token: int, y: Tensor, ruler: Ruler) -> str:
    """Where in the row the error lies."""
    counted = ruler.counted[token]
    error = torch.where(counted, y[token].double() - ruler.truth.exact[token], 0.0)
    strange = (~y[token].isfinite() & counted).nonzero()[:, 0]
    if len(strange):
        return (
            f"{len(strange)} columns are NaN or infinite where the layer is finite, the first is "
            f"{int(strange[0])}"
        )
    whole, tiles = norms(error[None])
    tile = int(tiles[0].argmax())
    part = float(tiles[0, tile] / whole[0]) ** 2 if float(whole[0]) else 0.0
    last = min((tile + 1) * TILE, len(error)) - 1
    if not bool(y[token, tile * TILE : last + 1].any()):
        return f"columns {tile * TILE} to {last} are zero"
    return f"columns {tile * TILE} to {last} hold {100 * part:.0f} % of the squared error"


def _leak(token: int, y: Tensor, ruler: Ruler) -> str:
    """Other rows whose NaN may have spread to this one."""
    if not bool((~y[token].isfinite() & ruler.counted[token]).any()):
        return ""
    sources = (~ruler.truth.exact.isfinite()).any(1).nonzero()[:, 0].tolist()
    if not sources:
        return "no input of the layer gives NaN or infinity: memory that must not be read was read"
    listed = ", ".join(str(source) for source in sources[:LISTED])
    return f"rows that are rightly NaN or infinite, and may have leaked: {listed}"
