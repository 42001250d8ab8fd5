"""What a failing call leaves behind (MEGAMOE_DUMP), so that ``megamoe replay`` judges it anywhere.

One safetensors file: the failing tokens, the experts they hit as they were loaded, the output as it
was given, and JSON that says the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megamoe import oracle
from megamoe.dispatch.select import KERNELS
from megamoe.errors import bad_input
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

VERSION = 1  # of the layout


def measure(inputs: Inputs, kernel: type[Kernel], recipe: Recipe) -> Yardstick:
    """The oracle's yardstick for a kernel: the experts as it multiplies with them."""
    layer = inputs.layer
    computed = replace(layer, experts=kernel.as_computed(layer.experts))
    return oracle.yardstick(replace(inputs, weights=computed), recipe)


def of_two(num_experts: int, held: Sequence[int]) -> Placement:
    """A placement must name every expert: those not held are on another rank."""
    rest = tuple(sorted(set(range(num_experts)) - set(held)))
    return Placement(num_experts=num_experts, slots=(tuple(held), rest))


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
            **{f"experts.{name}": t for name, t in tensors_of(layer.experts).items()},
        }
        if inputs.owner is not None:
            tensors["owner"] = inputs.owner
        if layer.shared is not None:
            tensors |= {f"shared.{n}": t for n, t in tensors_of(layer.shared.weights).items()}
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
            "coding": coding_of(layer.experts),
            "shared": None
            if layer.shared is None
            else (layer.shared.activation, coding_of(layer.shared.weights)),
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
        shared = SharedExpert(weights=experts_of(tensors, coding, "shared."), activation=activation)
    layer = MoEWeights(
        experts=experts_of(tensors, facts["coding"], "experts."),
        placement=of_two(facts["placement"].num_experts, facts["experts"]),
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


def tensors_of(experts: ExpertWeights) -> dict[str, Tensor]:
    """The tensors of experts by name, each [experts, ...]."""
    named = {f"{m}.{part}": getattr(getattr(experts, m), part) for m in MATRICES for part in PARTS}
    named |= {bias: getattr(experts, bias) for bias in BIASES}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def coding_of(experts: ExpertWeights) -> tuple[tuple[Format, int], ...]:
    """Of each matrix: its format and row groups."""
    return tuple((q.format, q.row_groups) for q in (experts.w13, experts.w2))


def experts_of(
    tensors: Mapping[str, Tensor], coding: Sequence[tuple[Format, int]], prefix: str = ""
) -> ExpertWeights:
    """The inverse of ``tensors_of`` and ``coding_of``."""
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
