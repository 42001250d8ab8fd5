"""Calls judged in production (MEGAMOE_PARITY): every Nth, with the experts of all ranks at hand."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.bundle import Bundle, coding_of, experts_of, measure, of_two, tensors_of
from megamoe.dispatch.fingerprint import short
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.select import Decision
from megamoe.dispatch.session import Verdict
from megamoe.errors import Mismatch, bad_input
from megamoe.oracle import Inputs, Report
from megamoe.problem import (
    ExpertWeights,
    MoEWeights,
    TopK,
)
from megamoe.reference.canary import digest
from megamoe.reference.case import one_expert, stacked
from megamoe.reference.parallel import Post
from megamoe.settings import Settings

LIMIT = 1 << 30  # bytes of a bundle; tokens are left out until it fits


# --- the layer, whole -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Every rank's experts as they were loaded, in host memory.

    common: this rank's weights without a router; its experts are those of ``ranks[common.rank]``.
    """

    common: MoEWeights
    ranks: tuple[ExpertWeights, ...]

    @classmethod
    def of(cls, weights: MoEWeights, ranks: Ranks) -> Layer:
        """Collective where there are several ranks, inside their step."""
        shared = weights.shared
        if shared is not None:
            shared = replace(shared, weights=shared.weights.to("cpu"))
        every = _every_rank(weights, ranks)
        common = replace(weights, experts=every[weights.rank], shared=shared, router=None)
        return cls(common, every)

    def part(self, ids: Tensor, device: torch.device) -> MoEWeights:
        """The experts that ``ids`` name, under their own numbers, as one of two ranks."""
        placement = self.common.placement
        home = {
            expert: (self.ranks[rank], slot)
            for rank, slots in enumerate(placement.slots)
            for slot, expert in enumerate(slots)
            if expert >= 0
        }
        held = _named(ids) or list(home)[:1]  # a layer of no expert at all would have no shape
        return replace(
            self.common,
            experts=stacked([one_expert(*home[expert]) for expert in held]).to(device),
            placement=of_two(placement.num_experts, held),
            rank=0,
            shared=None
            if self.common.shared is None
            else replace(self.common.shared, weights=self.common.shared.weights.to(device)),
        )


def _named(ids: Tensor) -> list[int]:
    return sorted(set(ids.unique().tolist()) - {-1})


def _every_rank(weights: MoEWeights, ranks: Ranks) -> tuple[ExpertWeights, ...]:
    experts = weights.experts
    if ranks.world_size == 1:
        return (experts.to("cpu"),)
    counts = [len(slots) for slots in weights.placement.slots]
    post = Post(ranks.group, weights.device, ranks.wait)
    gathered = {
        name: _gathered(tensor, counts, post) for name, tensor in tensors_of(experts).items()
    }
    return tuple(
        experts_of({name: found[rank] for name, found in gathered.items()}, coding_of(experts))
        for rank in range(ranks.world_size)
    )


def _gathered(tensor: Tensor, counts: Sequence[int], post: Post) -> list[Tensor]:
    """Every rank's tensor [its slots, ...] on the host, one slot a time: little is held twice."""
    rows = tensor.contiguous().flatten(1).view(torch.uint8)
    found: list[list[Tensor]] = [[] for _ in counts]
    for slot in range(max(counts)):
        sent = [rows[slot : slot + 1]] * len(counts)
        for rank, row in enumerate(post.exchange(sent, [int(slot < count) for count in counts])):
            found[rank].append(row.cpu())
    return [
        torch.cat(part).view(tensor.dtype).view(count, *tensor.shape[1:])
        for part, count in zip(found, counts, strict=True)
    ]


# --- judging --------------------------------------------------------------------------------------


class Parity:
    """Judges every Nth call of one layer on one rank; the prepared layer asks it before a launch.

    Each rank judges its own tokens, on the layer's device and after the collective call, so that a
    wrong output raises Mismatch on its rank alone and leaves the group healthy.
    """

    def __init__(self, layer: Layer, decision: Decision, asked: Settings) -> None:
        self.layer, self.decision, self.asked = layer, decision, asked
        self.calls = 0

    @classmethod
    def of(
        cls, weights: MoEWeights, decision: Decision, ranks: Ranks, asked: Settings
    ) -> Parity | None:
        """What the environment asks for; collective, inside the ranks' step "prepare".

        Raises BadInput where a bundle is asked for and no call is judged, or its folder cannot be
        made; RankFailure where the ranks were asked for different things.
        """
        every, folder = asked.parity_every, asked.dump_dir
        if folder is not None and not every:
            raise bad_input(
                "MEGAMOE_DUMP", repr(str(folder)), "has nothing to write: no call is judged",
                "set MEGAMOE_PARITY=N too, to judge every Nth call, or unset it",
            )  # fmt: skip
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise bad_input(
                    "MEGAMOE_DUMP", repr(str(folder)), f"cannot be made ({error.strerror})",
                    "name a folder that can be written",
                ) from None  # fmt: skip
        facts = {"MEGAMOE_PARITY": str(every)}
        if every:
            tensors = tensors_of(weights.experts)
            facts["placement"] = short(str(weights.placement.slots))
            facts["expert tensors"] = short(
                str([(name, t.dtype, t.shape[1:]) for name, t in tensors.items()])
            )
        ranks.agree("parity", facts)
        return cls(Layer.of(weights, ranks), decision, asked) if every else None

    def __call__(self, x: Tensor, topk: TopK, physical: Tensor) -> Verdict | None:
        """Before the launch; for an Nth call, what judges the output once the call is complete.

        physical: the ids that the kernel gets. x is copied: what entered is judged, whatever the
        kernel does to it.
        """
        self.calls += 1
        if self.calls % self.asked.parity_every:
            return None
        number, seats = self.calls, max(1, self.layer.common.placement.slots_per_rank)
        owner = torch.where(physical < 0, -1, physical // seats)
        x = x.clone()
        return lambda y: self._judge(y, x, topk, owner, number)

    def _judge(self, y: Tensor, x: Tensor, topk: TopK, owner: Tensor, number: int) -> None:
        part = self.layer.part(topk.ids, x.device)
        inputs = Inputs(x, topk, part, self.layer.common.rank, owner)
        kernel, recipe = self.decision.kernel, self.decision.recipe
        report = measure(inputs, kernel, recipe).judge(y)
        if report.right and report.recipe:
            return
        left = "" if self.asked.dump_dir is None else "\n" + self._dump(y, inputs, report, number)
        raise Mismatch(f"call {number}: {report.message}{left}")

    def _dump(self, y: Tensor, inputs: Inputs, report: Report, number: int) -> str:
        """Write the bundle; where it is, or why there is none: the verdict is raised either way."""
        assert self.asked.dump_dir is not None
        rows = _fitting(_failing(report), inputs)
        if rows is not None and len(rows) < inputs.tokens:
            judged = self._bundle(rows, y, inputs, report, number).replay()[0]
            if judged.right and judged.recipe:  # wrong as a batch only
                rows = _fitting(torch.arange(inputs.tokens, device=y.device), inputs)
        if rows is None:
            return f"no replay bundle: one token with its experts exceeds {LIMIT:,} bytes"
        bundle = self._bundle(rows, y, inputs, report, number)
        name = f"{bundle.kernel}-rank{inputs.rank}-call{number}-{digest(bundle.y)}.safetensors"
        path = self.asked.dump_dir / name
        try:
            bundle.write(path)
        except OSError as error:
            return f"no replay bundle: {path} cannot be written ({error.strerror or error})"
        return f"replay it with: megamoe replay {path}"

    def _bundle(
        self, rows: Tensor, y: Tensor, inputs: Inputs, report: Report, number: int
    ) -> Bundle:
        some, host = inputs.rows(rows), torch.device("cpu")
        ids = some.topk.ids.to(host)
        topk = replace(some.topk, ids=ids, weights=some.topk.weights.to(host))
        owner = None if some.owner is None else some.owner.to(host)
        held = Inputs(some.x.to(host), topk, self.layer.part(ids, host), inputs.rank, owner)
        kernel, recipe = self.decision.kernel, self.decision.recipe
        return Bundle(
            inputs=held,
            y=y[rows].to(host),
            kernel=self.decision.name,
            recipe=recipe,
            digest=digest(measure(held, kernel, recipe).emulated),
            call=number,
            tokens=tuple(rows.tolist()),
            batch=inputs.tokens,
            placement=self.layer.common.placement,
            message=report.message,
            machine=self.decision.machine,
            versions={
                "megamoe": _version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )


def _version() -> str:
    try:
        return importlib.metadata.version("megamoe")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _failing(report: Report) -> Tensor:
    """The tokens that a verdict went against, the worst first; all, where it was the batch's."""
    rows = report.wrong_tokens
    if report.right:
        (distance,) = (check for check in report.bit_checks if check.name == "distance")
        rows = distance.failing.nonzero()[:, 0]
    return rows if len(rows) else torch.arange(len(report.error), device=rows.device)


def _fitting(rows: Tensor, inputs: Inputs) -> Tensor | None:
    """The first of these tokens, as many as a bundle holds, in the batch's order; None: not one."""
    layer = inputs.layer
    expert = layer.experts.nbytes // layer.experts.count
    token = 4 * layer.hidden_size + 20 * inputs.topk.top_k  # x and y; ids, weights, owner
    fixed = 0 if layer.shared is None else layer.shared.weights.nbytes
    while len(rows):
        hit = max(1, len(_named(inputs.topk.ids[rows])))
        if fixed + hit * expert + len(rows) * token <= LIMIT:
            return rows.sort().values
        rows = rows[: len(rows) // 2]
    return None
