"""The one shape of every kernel: a datasheet, its objections, prepare, and workspaces that run.

A kernel computes the routed experts' weighted sum of a *physical* problem: ``world_size`` ranks
with equal, contiguous experts. Everything else (placement, scaling, empty slots, unequal counts,
shared experts) is done above it, once for all kernels, in :mod:`megamoe.dispatch`.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from megamoe.errors import Unsupported, bad_input
from megamoe.formats import PLAIN_BF16, Format
from megamoe.problem import Activation, ExpertWeights, Machine, MoEWeights, Recipe, Request

Feature = Literal[
    "any device",  # runs on a CPU too
    "expert bias",
    "alpha",  # alpha and up_offset other than SwiGLU's
    "weight at input",
    "output scaling",  # multiplies the float32 sum itself, before its rounding
    "shared expert",  # computes it, so that nothing is added above
    "shared GPU",  # several ranks on one device
    "tensor parallel",
    "sequence parallel",
    "stochastic order",  # sums in an order that changes from run to run
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The least version of a package that a kernel needs; ``exact`` admits no other."""

    package: Literal["flashinfer", "nvshmem", "nccl", "cuda"]
    least: str
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """What a kernel is, as data: the same record decides, explains, tests and fills the README.

    architectures: compute capabilities, (9, 0) exactly or (12, None) for any minor; empty means
    any.
    hidden_multiple, intermediate_multiple: required divisors. top_k, world_sizes: accepted values.
    clamp: ``upper`` clamps gate above and up on both sides, any float; ``upper int`` the same with
    an integer limit; ``symmetric`` clamps both on both sides; ``any`` does either; ``none`` cannot.
    empty_slots: what the kernel does with id -1: ``masked`` skips it, ``stale`` may add an old row.
    equal_counts: whether all ranks must pass the same token count. id_dtype: of ids at the call.
    options: names of what ``prepare`` may pass on to it. hardware: where it was run and judged;
    empty means never.
    """

    name: str
    title: str
    recipe: Recipe
    formats: tuple[Format, ...]
    architectures: tuple[tuple[int, int | None], ...] = ()
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    hidden_max: int | None = None
    intermediate_max: int | None = None
    top_k: frozenset[int] | range = range(1, 1 << 16)
    world_sizes: frozenset[int] | range = range(1, 1 << 16)
    max_experts_per_rank: int | None = None
    max_tokens_per_rank: int | None = None
    multiprocessors: frozenset[int] | None = None
    clamp: Literal["upper", "upper int", "symmetric", "any", "none"] = "upper"
    features: frozenset[Feature] = frozenset()
    transport: str = "none"
    needs: tuple[Versions, ...] = ()
    empty_slots: Literal["masked", "stale"] = "masked"
    equal_counts: bool = False
    id_dtype: torch.dtype = torch.int64
    automatic: Literal["always", "cpu", "gpu"] = "always"
    options: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One round's inputs as they enter a launch: a kernel's own buffers, which staging fills.

    x: [rows, H], BF16 or codes; scales: of the codes, [rows, columns]; ids: physical experts
    [rows, k] in the datasheet's id_dtype, empty slots as it wants them; weights: float32 [rows, k],
    the scaling factor applied. All contiguous. count: this rank's tokens, the first rows; in the
    others every slot is empty, and x is not read. tokens: the greatest count of any rank.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    count: int
    tokens: int
    scales: Tensor | None = None


class Peers(Protocol):
    """The group's other processes, as a kernel may need them; ``dispatch.ranks.Ranks`` is one."""

    def gather(self, what: str, value: str) -> list[str]:
        """Every rank's value in rank order, during ``prepare`` and ``warmup``; never hangs."""

    def wait(self, work: Any) -> None:
        """Wait for a collective's handle on the host, or raise RankFailure once it is hopeless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a kernel is prepared: the physical request, the machine, and the ranks' group.

    group: a torch.distributed ProcessGroup, None on one rank. peers: None where nobody watches.
    exchange: whether ``update`` is to come, so that no byte of the pack may be the caller's.
    """

    request: Request
    machine: Machine
    device: torch.device
    rank: int = 0
    group: Any = None
    peers: Peers | None = None
    recipe: Recipe | None = None  # the reference's only: which recipe it emulates
    exchange: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Kernel(abc.ABC):
    """A prepared kernel. Class methods answer before anything is touched; instances own memory."""

    sheet: ClassVar[Datasheet]

    @classmethod
    def objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        """Every reason why this kernel cannot take the request on this machine; empty means yes."""
        return (
            *sheet_objections(cls.sheet, request, machine),
            *cls.own_objections(request, machine),
        )

    @classmethod
    def own_objections(cls, request: Request, machine: Machine) -> tuple[str, ...]:
        """What the datasheet's fields cannot say."""
        return ()

    @classmethod
    def recipe(cls, request: Request) -> Recipe:
        """Where this kernel rounds, for this request."""
        return cls.sheet.recipe

    @classmethod
    def capturable(cls, request: Request, machine: Machine) -> bool:
        """Whether a launch may be captured in a CUDA graph: it reads nothing back."""
        return machine.capability is not None

    @classmethod
    def must_agree(cls, weights: MoEWeights, context: Context) -> Mapping[str, str]:
        """What has to be equal on all ranks before ``prepare`` may be called: scales, say."""
        return {}

    @classmethod
    def as_computed(cls, experts: ExpertWeights) -> ExpertWeights:
        """The experts as the kernel multiplies with them: the same values where it holds them all.

        Where a datasheet says that weights are rounded, a verdict on the kernel takes these.
        """
        return experts

    @classmethod
    @abc.abstractmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> Kernel:
        """Pack the weights; collective over the group.

        weights: this rank's experts, padded to the physical request's equal count. The kernel keeps
        no reference to them beyond its own pack.
        """

    rows: Format = PLAIN_BF16
    """What token rows enter a launch in: BF16, or E4M3 under a scale."""
    order: Tensor | None = None
    """int32 [period]: in each period of columns, place p is taken by column order[p]."""

    @abc.abstractmethod
    def open(self, capacity: int, tactic: Tactic | None = None) -> Workspace:
        """Buffers for up to ``capacity`` tokens a rank; collective.

        tactic: one of ``tactics``; None is the default.
        """

    def tactics(self, capacity: int) -> Sequence[Tactic]:
        """What a workspace of ``capacity`` can be opened with, the default first; the same on every
        rank. An empty one leaves all to the kernel.
        """
        return ({},)

    def update(self, weights: MoEWeights) -> Callable[[], None]:
        """Pack other experts; what comes back writes them in place, in stream order: every pointer
        stays, so that captured graphs compute with the new ones. weights: as for ``prepare``.
        """
        raise Unsupported(
            f"{self.sheet.name} cannot exchange its experts in place; close the layer and prepare "
            "it again"
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the pack; collective, once, after every workspace is closed."""


Tactic = Mapping[str, Any]


class Workspace(abc.ABC):
    """One capacity of a prepared kernel: what a launch reads, and the launch.

    capacity: tokens a rank. sheet, device: of the kernel.
    """

    capacity: int
    sheet: Datasheet
    device: torch.device

    def inputs(self, x: Tensor, top_k: int, tokens: int) -> Batch:
        """Where one round of x, BF16 [n, H], is staged; tokens: the greatest n of any rank.

        As it stands for kernels that read the caller's rows where these lie.
        """
        n = x.shape[0]
        rows = tokens if self.sheet.equal_counts else n
        assert rows == n
        return Batch(
            x=x
            if x.is_contiguous()
            else torch.empty_like(x, memory_format=torch.contiguous_format),
            ids=torch.empty(rows, top_k, dtype=self.sheet.id_dtype, device=x.device),
            weights=torch.empty(rows, top_k, dtype=torch.float32, device=x.device),
            count=n,
            tokens=tokens,
        )

    @abc.abstractmethod
    def run(self, batch: Batch, out: Tensor) -> None:
        """Write the weighted sum of the routed experts into ``out``, BF16 [n, H]; collective."""

    def compile(self) -> None:
        """What a first launch would compile, as far as that can be had without one."""
        return None

    def compiles(self) -> Sequence[int]:
        """Token counts of which each needs a launch of its own to compile; ascending."""
        return (self.capacity,)

    def check(self) -> None:
        """Raise MegaMoEError where a launch since the last check flagged its own output as wrong on
        the device; reads the device.
        """
        return None

    def close(self) -> None:
        """Give the buffers back; collective, once."""
        return None


def check_ranks(context: Context) -> None:
    """Refuse to prepare one rank's share of a layer without the group that holds the rest, and
    experts that are not laid out as every kernel takes them.
    """
    world = context.request.world_size
    if not context.request.placement.is_contiguous:
        raise bad_input(
            "placement", "", "has uneven, permuted or redundant experts, and a kernel holds equal, "
            "contiguous ones", "call megamoe.prepare, which maps them to physical slots above it",
        )  # fmt: skip
    if world > 1 and context.group is None:
        raise bad_input(
            "group", "None", f"does not hold the {world} ranks of the layer",
            "pass the expert-parallel group",
        )  # fmt: skip


# --- objections, one sentence each --------------------------------------------------------------


def sheet_objections(sheet: Datasheet, request: Request, machine: Machine) -> tuple[str, ...]:
    """Every reason that the datasheet's own fields give, machine first."""
    reasons = (reason for rule in RULES for reason in rule(sheet, request, machine))
    return (*machine_objections(sheet, machine), *reasons)


def machine_objections(sheet: Datasheet, machine: Machine) -> tuple[str, ...]:
    """What the kernel lacks on this machine, whatever the layer."""
    reasons = [*_architecture(sheet, machine), *_packages(sheet, machine)]
    return tuple(reasons)


Rule = Callable[[Datasheet, Request, Machine], Iterable[str]]


def _architecture(sheet: Datasheet, machine: Machine) -> Iterable[str]:
    if machine.capability is None:
        if "any device" not in sheet.features:
            yield f"needs a CUDA GPU, and the layer is on {machine.name}"
        return
    if not sheet.architectures:
        return
    major, minor = machine.capability
    if not any(major == a and b in (None, minor) for a, b in sheet.architectures):
        wanted = " or ".join(f"{a}.x" if b is None else f"{a}.{b}" for a, b in sheet.architectures)
        yield f"needs compute capability {wanted}, and {machine.name} has {major}.{minor}"
    if sheet.multiprocessors and machine.multiprocessors not in sheet.multiprocessors:
        yield (
            f"needs a GPU of {_either(sheet.multiprocessors)} multiprocessors, and {machine.name} "
            f"has {machine.multiprocessors}"
        )


def _packages(sheet: Datasheet, machine: Machine) -> Iterable[str]:
    for need in sheet.needs:
        found = getattr(machine, need.package)
        sign = "==" if need.exact else ">="
        if found is None:
            yield f"needs {need.package} {sign} {need.least}, and none is installed"
        elif (_version(found) != _version(need.least)) if need.exact else (
            _version(found) < _version(need.least)
        ):  # fmt: skip
            yield f"needs {need.package} {sign} {need.least}, and {found} is installed"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _placement(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    world = request.world_size
    if world not in sheet.world_sizes:
        yield f"runs on {_either(sheet.world_sizes)} ranks, not on {world}"
    held = request.placement.slots_per_rank
    if sheet.max_experts_per_rank is not None and held > sheet.max_experts_per_rank:
        yield f"holds at most {sheet.max_experts_per_rank} experts a rank, not {held}"
    if machine.capability is None or world == 1:
        return
    if machine.ranks_per_gpu > 1 and "shared GPU" not in sheet.features:
        yield (
            f"wants a GPU for each rank ({sheet.transport} refuses to share one), and "
            f"{machine.ranks_per_gpu} ranks share one here"
        )
    if (
        machine.ranks_per_gpu == 1
        and not machine.peer_access
        and sheet.transport in PEER_TRANSPORTS
    ):
        yield f"reads peers' memory over {sheet.transport}, and the GPUs have no peer access"


PEER_TRANSPORTS = ("NVSHMEM", "CUDA peer windows", "torch symmetric memory", "NCCL device API")


def pooled(request: Request, tokens: int) -> int:
    """The tokens a rank that FlashInfer is asked to make room for, for so many.

    A rank's pool has room for the different experts that each token may name there; but a caller
    may name one twice, and empty slots of some kernels are filled with an expert of their row.
    """
    return tokens * max(1, -(-request.top_k // max(1, request.placement.slots_per_rank)))


def slots_beyond_experts(request: Request) -> tuple[str, ...]:
    """Of kernels that want different experts in a token's slots."""
    held = request.world_size * request.placement.slots_per_rank
    if request.top_k > held:
        return (f"takes at most as many slots as experts, {held}, not {request.top_k}",)
    return ()


def _geometry(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    for name, value, multiple, most in (
        ("hidden_size", request.hidden_size, sheet.hidden_multiple, sheet.hidden_max),
        (
            "intermediate_size", request.intermediate_size, sheet.intermediate_multiple,
            sheet.intermediate_max,
        ),
    ):  # fmt: skip
        if value % multiple:
            yield f"{name} {value} is not a multiple of {multiple}"
        if most is not None and value > most:
            yield f"{name} {value} is above {most}"
    if request.top_k not in sheet.top_k:
        yield f"takes top_k {_either(sheet.top_k)}, not {request.top_k}"
    most = sheet.max_tokens_per_rank
    if most is not None and request.max_tokens_per_rank > most:
        yield f"takes at most {most} tokens a rank, not {request.max_tokens_per_rank}"


def _formats(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    taken = ", ".join(fmt.name for fmt in sheet.formats)
    found = {request.weights.name, (request.w2_weights or request.weights).name}
    for name in sorted(found - {fmt.name for fmt in sheet.formats}):
        yield f"does not take {name} weights (takes {taken})"


def _activation(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    activation = request.activation
    if not activation.is_swiglu and "alpha" not in sheet.features:
        yield f"computes plain SwiGLU only, not {_plain(activation)}"
    if request.expert_bias and "expert bias" not in sheet.features:
        yield "adds no expert biases, and the layer has them"
    limit = activation.limit
    if limit is None or sheet.clamp == "any":
        return
    if sheet.clamp == "none":
        yield f"does not clamp, and the layer clamps at {limit:g}"
    elif (sheet.clamp == "symmetric") != activation.symmetric:
        theirs = "on both sides" if sheet.clamp == "symmetric" else "from above only"
        ours = "on both sides" if activation.symmetric else "from above only"
        yield f"clamps the gate {theirs}, and the layer clamps it {ours} (at {limit:g})"
    elif sheet.clamp == "upper int" and not float(limit).is_integer():
        yield f"takes an integer limit, not {limit:g}"


def _plain(activation: Activation) -> str:
    return f"alpha {activation.alpha:g} with up + {activation.up_offset:g}"


def _weights(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    if request.weight_at == "input" and "weight at input" not in sheet.features:
        yield "weights terms after FC1, and the model scales the token before it"
    if (
        request.scale_at == "output"
        and "output scaling" not in sheet.features
        and not _power_of_two(request.routed_scaling_factor)
    ):
        yield (
            f"rounds the sum before routed_scaling_factor {request.routed_scaling_factor:g} could "
            "multiply it, and that is exact for powers of two only"
        )


def _power_of_two(value: float) -> bool:
    return value.hex().split("p")[0] in ("0x1.0000000000000",)


def _host(sheet: Datasheet, request: Request, machine: Machine) -> Iterable[str]:
    host = request.host
    if host.tp_size > 1 and "tensor parallel" not in sheet.features:
        yield f"cannot run inside tensor parallelism of {host.tp_size}"
    if host.two_batch_overlap and sheet.name not in ("reference",):
        yield "runs one batch at a time per workspace, and the host overlaps two"
    if host.external_all_to_all is not None:
        yield (
            f"dispatches and combines by itself, and the host wants {host.external_all_to_all} to"
        )
    if host.deterministic and "stochastic order" in sheet.features:
        yield "sums in an order that changes from run to run, and the host asks for determinism"


RULES: tuple[Rule, ...] = (
    _placement,
    _geometry,
    _formats,
    _activation,
    _weights,
    _host,
)


def _either(values: frozenset[int] | range) -> str:
    if isinstance(values, range):
        if values.stop >= 1 << 16:
            return f"{values.start} or more"
        return str(values.start) if len(values) == 1 else f"{values.start} to {values.stop - 1}"
    *rest, last = map(str, sorted(values))
    return f"{', '.join(rest)} or {last}" if rest else last
