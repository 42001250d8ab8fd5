"""Which fault would make a wrong output right: hypotheses built from EXACT, tried one by one.

Each per-slot fault is tried in every slot alone and in all at once. The fault whose residual falls
within the budget is named; one with a number fitted to the output yields to one without.

Shapes: K slots of the token, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import BF16, F64, dequantise, rn32, rnbf16
from megamoe.problem import Recipe
from megamoe.reference.blocks import misread_blocks
from megamoe.reference.case import Inputs, output
from megamoe.reference.faults import ACTIVATION_FAULTS, RECIPE_FAULTS, SLOT_FAULTS, TOKEN_FAULTS
from megamoe.reference.measure import Ruler, same_bits, same_class
from megamoe.reference.moe import Emulated
from megamoe.reference.report import Finding
from megamoe.reference.suspect import Suspect

EXAMINED = 3  # wrong tokens looked at, the worst first
SEARCHED = 1 << 26  # bytes of weights up to which every expert is tried in a slot
RECIPE_TOKENS = 64  # tokens on which other recipes are tried
SLACK = 1.5  # a fault with fewer fitted numbers is preferred up to this factor in residual
# Where no token has a budget to lend (all slots empty): twice three BF16 roundings.
SPARE_BUDGET = 2 * 3 * 2.0 ** -(BF16.mantissa_bits + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """The output [H] under a fault. detail: what its name adds for this token alone. fitted: how
    many numbers were taken from the output."""

    fault: str
    y: Tensor
    slot: int | None = None
    fitted: int = 0
    detail: str = ""


def diagnose(
    y: Tensor, inputs: Inputs, ruler: Ruler, budget: Tensor, wrong: Tensor
) -> Finding | None:
    """The fault that explains most of the first few tokens of ``wrong``, or None."""
    if not inputs.topk.top_k:
        return None
    lent = float(budget[budget.isfinite()].max()) if len(budget) else 0.0
    fits: dict[str, list[tuple[float, Hypothesis, int, float]]] = {}
    examined = wrong[:EXAMINED].tolist()
    for token in examined:
        suspect = Suspect.of(inputs, token, y)
        allowed = float(budget[token]) or lent or SPARE_BUDGET
        size = float(ruler.size[token])
        # To explain an error a fault must leave at most half of it, however wide the budget is.
        enough = min(allowed, _residual(suspect, suspect.exact, size) / 2)
        tried = [(_residual(suspect, h.y, size), h) for h in _hypotheses(suspect, ruler)]
        good = [(residual, h) for residual, h in tried if residual <= enough]
        least = min((residual for residual, _ in good), default=0.0)
        near = [(h.fitted, residual, h) for residual, h in good if residual <= SLACK * least]
        fewest = min((fitted for fitted, _, _ in near), default=0)
        seen: set[str] = set()
        for fitted, residual, h in sorted(near, key=lambda n: n[1]):
            if fitted == fewest and h.fault not in seen:
                seen.add(h.fault)
                fits.setdefault(h.fault, []).append((residual, h, token, allowed))
    if not fits:
        return None
    best = max(fits.values(), key=lambda found: (len(found), -sum(f[0] for f in found)))
    residual, h, token, allowed = best[0]
    suspect_ids = inputs.topk.ids[token].tolist()
    return Finding(
        fault=h.fault + h.detail,
        token=int(token),
        slot=h.slot,
        expert=None if h.slot is None else int(suspect_ids[h.slot]),
        residual=residual,
        allowed=allowed,
        explains=len(best),
        examined=len(examined),
    )


def _residual(s: Suspect, y: Tensor, size: float) -> float:
    """How far the kernel's row is from a hypothesis, relative to the greater of the two sizes."""
    if not bool(same_class(rnbf16(rn32(y)), s.y).all()):
        return float("inf")
    finite = y.isfinite() & s.y.isfinite()
    miss = torch.where(finite, s.y - y, 0.0).norm()
    scale = max(size, float(torch.where(finite, y, 0.0).norm()))
    return float(miss) / scale if scale > 0 else float(miss > 0) * float("inf")


def _hypotheses(s: Suspect, ruler: Ruler) -> Iterator[Hypothesis]:
    for fault, token in TOKEN_FAULTS:
        yield Hypothesis(fault, token(s))
    replaced = [(fault, terms(s)) for fault, terms in SLOT_FAULTS] if s.ids else []
    replaced += _activation_faults(s)
    for fault, terms in replaced:
        changed = [k for k in range(len(s.ids)) if not torch.equal(terms[k], s.terms[k])]
        if len(changed) > 1:
            yield Hypothesis(f"{fault}, every slot", terms.sum(0) + s.shared)
        for k in changed:
            yield Hypothesis(fault, s.exact - s.terms[k] + terms[k], slot=k)
    yield from _fitted(s)
    yield from _other_rows(s, ruler)
    yield from _other_experts(s)
    for k in range(len(s.ids)):
        for fault, term in misread_blocks(s, k):
            yield Hypothesis(fault, s.exact - s.terms[k] + term, slot=k, fitted=1)


def _activation_faults(s: Suspect) -> list[tuple[str, Tensor]]:
    """What each slot would add under each of ACTIVATION_FAULTS: (fault, [K, H])."""
    layer, experts = s.layer, s.experts
    terms = s.terms.repeat(len(ACTIVATION_FAULTS), 1, 1)
    for k, expert in enumerate(s.ids):
        if expert < 0:
            continue
        x, after = s.alone.x.to(F64), s.w[k]
        if layer.weight_at == "input":
            x, after = x * after, torch.ones_like(after)
        if layer.scale_at == "output":
            after = after * layer.routed_scaling_factor
        h = x @ dequantise(experts.w13[k : k + 1])[0].T
        if experts.b13 is not None:
            h = h + experts.b13[k].to(F64)
        gate, up = h.chunk(2, dim=-1)
        mid = torch.cat([f(gate, up, layer.activation) for _, f in ACTIVATION_FAULTS])
        out = mid @ dequantise(experts.w2[k : k + 1])[0].T
        if experts.b2 is not None:
            out = out + experts.b2[k].to(F64)
        terms[:, k] = out * after
    return [(fault, terms[row]) for row, (fault, _) in enumerate(ACTIVATION_FAULTS)]


def _fitted(s: Suspect) -> Iterator[Hypothesis]:
    """Factors and routing weights that fit the output best."""
    given = s.y - s.shared
    if not bool(given.isfinite().all()):
        return
    factor = _projection(s.y, s.exact)
    yield Hypothesis("multiplied by ", s.exact * factor, fitted=1, detail=f"{factor:.3g}")
    factor = _projection(given, s.routed)
    fitted = s.routed * factor + s.shared
    yield Hypothesis("routed part multiplied by ", fitted, fitted=1, detail=f"{factor:.3g}")
    factor = _projection(s.y - s.routed, s.shared)
    fitted = s.routed + s.shared * factor
    yield Hypothesis("shared expert multiplied by ", fitted, fitted=1, detail=f"{factor:.3g}")
    for k, term in enumerate(s.terms):
        more = _projection(s.y - s.exact, term)
        fitted = s.exact + more * term
        yield Hypothesis("multiplied by ", fitted, slot=k, fitted=1, detail=f"{1 + more:.3g}")
    live = [k for k, expert in enumerate(s.ids) if expert >= 0]
    if len(live) < 2 or s.layer.weight_at == "input":
        return
    unweighted, w = s.weighted(torch.ones_like(s.w))[live], s.w[live]
    if not bool(unweighted.isfinite().all()):
        return
    found = torch.linalg.lstsq(unweighted.T.cpu(), given[:, None].cpu()).solution[:, 0]
    found = found.to(w.device)
    ordered = w.sort().values[found.argsort().argsort()]
    yield Hypothesis("routing weights permuted", ordered @ unweighted + s.shared, fitted=1)
    listed = ", ".join(f"{weight:.3g}" for weight in found.tolist())
    yield Hypothesis(
        "routing weights are not those given but ", found @ unweighted + s.shared,
        fitted=len(live), detail=listed,
    )  # fmt: skip


def _projection(given: Tensor, direction: Tensor) -> float:
    square = float(direction @ direction)
    return float(given @ direction) / square if square else 1.0


def _other_rows(s: Suspect, ruler: Ruler) -> Iterator[Hypothesis]:
    """The row of another token: stale memory, or rows permuted."""
    rows = ruler.truth.exact
    distance = (rows - s.y).square().sum(1).nan_to_num(torch.inf)
    distance[s.token] = torch.inf
    distance = torch.where(ruler.norm > 0, distance, torch.inf)
    nearest = int(distance.argmin())
    if bool(distance[nearest].isfinite()):
        yield Hypothesis("holds the row of token ", rows[nearest], detail=str(nearest))


def _other_experts(s: Suspect) -> Iterator[Hypothesis]:
    """One slot computed with some other expert: every expert is tried on the token."""
    ranks = s.batch.ranks
    if sum(rank.experts.nbytes for rank in ranks) > SEARCHED:
        return
    found: list[tuple[float, int, int, Tensor]] = []
    missing = s.y - s.exact
    held = {expert for rank in ranks for expert in rank.placement.slots[rank.rank]}
    for expert in sorted(held - {-1}):
        term = s.by(expert)
        for k in range(len(s.ids)):
            change = term[k] - s.terms[k]
            found.append((float((missing - change).norm()), expert, k, s.exact + change))
    if found:
        _, expert, k, y = min(found, key=lambda f: f[0])
        yield Hypothesis("computed with expert ", y, slot=k, fitted=1, detail=str(expert))


def diagnose_recipe(
    y: Tensor, emulated: Tensor, inputs: Inputs, recipe: Recipe, floor: float
) -> tuple[str, float] | None:
    """The recipe that differs in one point and whose bits these are: (what, share), or None."""
    index = torch.arange(len(y), device=y.device)[:: max(1, len(y) // RECIPE_TOKENS)]
    few = inputs.rows(index)
    best = ("", _share(y[index], emulated[index]))
    for fault, change in RECIPE_FAULTS:
        other_inputs, other = change(few, recipe)
        if other == recipe and other_inputs is few:
            continue
        if other.weight_at == "fc2_input" and inputs.layer.experts.b2 is not None:
            continue
        share = _share(y[index], output(other_inputs, Emulated(other)))
        if share > best[1]:
            best = (fault, share)
    return best if best[0] and best[1] >= floor else None


def _share(y: Tensor, emulated: Tensor) -> float:
    return float(same_bits(y, emulated).to(F64).mean()) if y.numel() else 1.0
