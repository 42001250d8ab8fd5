"""Calls judged in production (MEGAMOE_PARITY), and what a failing one leaves behind (MEGAMOE_DUMP).

A bundle is one safetensors file: the failing tokens, the experts they hit as they were loaded, the
output as it was given, and JSON that says the rest. ``megamoe replay`` judges it anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megamoe import oracle
from megamoe.dispatch.fingerprint import short
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.select import KERNELS, Decision
from megamoe.dispatch.session import Verdict
from megamoe.errors import Mismatch, bad_input
from megamoe.formats import ELEMENTS, Element, Format, Quantised, ScaleRule
from megamoe.kernels.base import Kernel
from megamoe.oracle import Inputs, Report, Yardstick
from megamoe.problem import (
    Activation,
    ExpertWeights,
    Machine,
    MoEWeights,
    Placement,
    Recipe,
    SharedExpert,
    TopK,
)
from megamoe.reference.canary import digest
from megamoe.reference.case import one_expert, stacked
from megamoe.reference.parallel import Post
from megamoe.settings import Settings

LIMIT = 1 << 30  # bytes of a bundle; tokens are left out until it fits
VERSION = 1  # of the bundle's layout


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
            placement=_of_two(placement.num_experts, held),
            rank=0,
            shared=None
            if self.common.shared is None
            else replace(self.common.shared, weights=self.common.shared.weights.to(device)),
        )


def _named(ids: Tensor) -> list[int]:
    return sorted(set(ids.unique().tolist()) - {-1})


def _of_two(num_experts: int, held: Sequence[int]) -> Placement:
    """A placement must name every expert: those not held are on another rank."""
    rest = tuple(sorted(set(range(num_experts)) - set(held)))
    return Placement(num_experts=num_experts, slots=(tuple(held), rest))


def _every_rank(weights: MoEWeights, ranks: Ranks) -> tuple[ExpertWeights, ...]:
    experts = weights.experts
    if ranks.world_size == 1:
        return (experts.to("cpu"),)
    counts = [len(slots) for slots in weights.placement.slots]
    post = Post(ranks.group, weights.device, ranks.wait)
    gathered = {name: _gathered(tensor, counts, post) for name, tensor in _tensors(experts).items()}
    return tuple(
        _experts({name: found[rank] for name, found in gathered.items()}, _coding(experts))
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
            tensors = _tensors(weights.experts)
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


def measure(inputs: Inputs, kernel: type[Kernel], recipe: Recipe) -> Yardstick:
    """The oracle's yardstick for a kernel: the experts as it multiplies with them."""
    layer = inputs.layer
    computed = replace(layer, experts=kernel.as_computed(layer.experts))
    return oracle.yardstick(replace(inputs, weights=computed), recipe)


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


# --- a bundle -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """Some tokens of one failing call, and all that a verdict on them needs; on the CPU.

    inputs: their experts as loaded, before the kernel's own packing. digest: of Emulated(recipe).
    tokens: their rows in the call's batch of ``batch`` tokens. placement: of the whole group.
    message: what was said then, on ``machine``.
    """

    inputs: Inputs
    y: Tensor
    kernel: str
    recipe: Recipe
    digest: str
    call: int
    tokens: tuple[int, ...]
    batch: int
    placement: Placement
    message: str
    machine: Machine
    versions: Mapping[str, str]

    def __str__(self) -> str:
        held = self.inputs.layer.placement.slots[0]
        made = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        said = self.message.replace("\n", "\n  ")
        return (
            f"call {self.call} of {self.kernel}, rank {self.inputs.rank} of "
            f"{self.placement.world_size}, on {self.machine.name} ({made})\n"
            f"rows 0 to {len(self.tokens) - 1} are tokens {_listed(self.tokens)} of {self.batch}; "
            f"experts {_listed(held)} of {self.placement.num_experts}\n"
            f"said then:\n  {said}"
        )

    def replay(self) -> tuple[Report, str]:
        """Both verdicts on the stored output, and the reference's digest as it is here."""
        known = {kernel.sheet.name: kernel for kernel in KERNELS}
        ruled = measure(self.inputs, known[self.kernel], self.recipe)
        return ruled.judge(self.y), digest(ruled.emulated)

    def write(self, path: Path) -> None:
        """All of it or nothing: the name appears once the file is complete."""
        inputs, layer = self.inputs, self.inputs.layer
        tensors = {
            "x": inputs.x,
            "y": self.y,
            "ids": inputs.topk.ids,
            "weights": inputs.topk.weights,
            **{f"experts.{name}": t for name, t in _tensors(layer.experts).items()},
        }
        if inputs.owner is not None:
            tensors["owner"] = inputs.owner
        if layer.shared is not None:
            tensors |= {f"shared.{n}": t for n, t in _tensors(layer.shared.weights).items()}
        # Copies: tensors of one storage cannot be saved.
        tensors = {name: t.detach().contiguous().clone() for name, t in tensors.items()}
        facts = {
            name: getattr(self, name)
            for name in (
                "kernel", "recipe", "digest", "call", "tokens", "batch", "placement", "message",
                "machine", "versions",
            )
        } | {
            "version": VERSION,
            "contents": _contents(tensors),
            "rank": inputs.rank,
            "scaled": inputs.topk.scaled,
            "experts": layer.placement.slots[0],
            "coding": _coding(layer.experts),
            "shared": None
            if layer.shared is None
            else (layer.shared.activation, _coding(layer.shared.weights)),
            "layer": {name: getattr(layer, name) for name in LAYER},
        }  # fmt: skip
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            save_file(tensors, part, metadata={"megamoe replay": json.dumps(_told(facts))})
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(path)
        except SafetensorError as error:  # the disk's own errors among them
            raise OSError(str(error)) from error
        finally:
            part.unlink(missing_ok=True)


LAYER = ("activation", "routed_scaling_factor", "scale_at", "weight_at", "family")


def read(path: Path) -> Bundle:
    """The bundle in a file. Raises BadInput where it is none, is damaged, or is of another megamoe.

    Not checked: that the output is the kernel's; only the kernel's machine could say.
    """
    try:
        return _read(path)
    except (
        OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError
    ) as error:  # fmt: skip
        why = "has no such entry" if isinstance(error, KeyError) else "says"
        raise bad_input(
            "replay bundle", path, f"cannot be read ({why}: {error})",
            "pass a file that MEGAMOE_DUMP wrote, to the same version of megamoe",
        ) from None  # fmt: skip


def _read(path: Path) -> Bundle:
    with safe_open(path, framework="pt", device="cpu") as file:
        text = (file.metadata() or {}).get("megamoe replay")
        if text is None:
            raise ValueError("it is a safetensors file of something else")
        facts = _back(json.loads(text))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if facts["version"] != VERSION:
        raise ValueError(f"its layout is version {facts['version']}, and {VERSION} is read here")
    if facts["contents"] != _contents(tensors):
        raise ValueError("its tensors are not those that were written")
    if facts["kernel"] not in {kernel.sheet.name for kernel in KERNELS}:
        raise ValueError(f"kernel {facts['kernel']} is unknown here")
    shared = None
    if facts["shared"] is not None:
        activation, coding = facts["shared"]
        shared = SharedExpert(weights=_experts(tensors, coding, "shared."), activation=activation)
    layer = MoEWeights(
        experts=_experts(tensors, facts["coding"], "experts."),
        placement=_of_two(facts["placement"].num_experts, facts["experts"]),
        shared=shared,
        **facts["layer"],
    )
    topk = TopK(ids=tensors["ids"], weights=tensors["weights"], scaled=facts["scaled"])
    own = {field.name for field in dataclasses.fields(Bundle)} - {"inputs", "y"}
    return Bundle(
        inputs=Inputs(tensors["x"], topk, layer, facts["rank"], tensors.get("owner")),
        y=tensors["y"],
        **{name: facts[name] for name in own},
    )


# --- records as names, tensors and JSON -----------------------------------------------------------

MATRICES, PARTS, BIASES = ("w13", "w2"), ("data", "scale", "global_scale"), ("b13", "b2")


def _tensors(experts: ExpertWeights) -> dict[str, Tensor]:
    """The tensors of experts by name, each [experts, ...]."""
    named = {f"{m}.{part}": getattr(getattr(experts, m), part) for m in MATRICES for part in PARTS}
    named |= {bias: getattr(experts, bias) for bias in BIASES}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _coding(experts: ExpertWeights) -> tuple[tuple[Format, int], ...]:
    """Of each matrix: its format and row groups."""
    return tuple((q.format, q.row_groups) for q in (experts.w13, experts.w2))


def _experts(
    tensors: Mapping[str, Tensor], coding: Sequence[tuple[Format, int]], prefix: str = ""
) -> ExpertWeights:
    """The inverse of ``_tensors`` and ``_coding``."""
    w13, w2 = (
        Quantised(
            format=fmt,
            data=tensors[f"{prefix}{matrix}.data"],
            scale=tensors.get(f"{prefix}{matrix}.scale"),
            global_scale=tensors.get(f"{prefix}{matrix}.global_scale"),
            row_groups=row_groups,
        )
        for matrix, (fmt, row_groups) in zip(MATRICES, coding, strict=True)
    )
    b13, b2 = (tensors.get(f"{prefix}{bias}") for bias in BIASES)
    return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)


def _contents(tensors: Mapping[str, Tensor]) -> str:
    lines = [f"{name} {digest(tensors[name])}" for name in sorted(tensors)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


RECORDS: Mapping[str, Any] = {
    record.__name__: record
    for record in (Activation, Format, Machine, Placement, Recipe, ScaleRule)
}


def _told(value: Any) -> Any:
    """A fact as JSON: records with their names, elements by name, tuples as lists."""
    if isinstance(value, Element):
        return {"Element": value.name}
    if type(value).__name__ in RECORDS:
        fields = dataclasses.fields(value)
        return {type(value).__name__: {f.name: _told(getattr(value, f.name)) for f in fields}}
    if isinstance(value, dict):
        return {name: _told(entry) for name, entry in value.items()}
    return [_told(entry) for entry in value] if isinstance(value, tuple) else value


def _back(value: Any) -> Any:
    """The inverse of ``_told``; elements are the catalogue's own."""
    if isinstance(value, list):
        return tuple(_back(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    if list(value) == ["Element"]:
        return {element.name: element for element in ELEMENTS}[value["Element"]]
    found = {name: _back(entry) for name, entry in value.items()}
    (name, *rest) = found or ("",)
    return RECORDS[name](**found[name]) if not rest and name in RECORDS else found


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} ... ({len(numbers)} in all)"
