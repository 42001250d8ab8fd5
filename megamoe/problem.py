"""The nouns of one Mixture-of-Experts layer: frozen records, validated once, passed everywhere.

Shapes: T tokens of this rank, k slots a token, E logical experts, S physical slots of this rank,
H hidden_size, I intermediate_size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from megamoe.errors import bad_input
from megamoe.formats import BF16, PLAIN_BF16, Element, Format, Quantised

WeightAt = Literal["input", "fc2_input", "term", "combine"]
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_of_top_k"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """SwiGLU with an optional clamp before it: ((up + up_offset) * gate) * sigmoid(alpha * gate).

    limit: gate is clamped from above and up from both sides; None or 0 is no clamp. ``symmetric``
    clamps the gate from below too, which is another function (one FlashInfer kernel computes it).
    alpha 1 and up_offset 0 are SwiGLU; RN32(1.702) and 1 are gpt-oss.
    """

    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    symmetric: bool = False

    def __post_init__(self) -> None:
        limit = self.limit
        if limit is not None and not limit >= 0:  # NaN too
            raise bad_input(
                "activation limit", limit, "is not a number >= 0", "use None or 0 for no clamp"
            )
        for name in ("alpha", "up_offset"):
            if not math.isfinite(getattr(self, name)):
                raise bad_input(
                    f"activation {name}", getattr(self, name), "is not finite", "pass a finite one"
                )
        if not limit or math.isinf(limit):
            object.__setattr__(self, "limit", None)

    @property
    def is_swiglu(self) -> bool:
        return self.alpha == 1.0 and self.up_offset == 0.0

    def __str__(self) -> str:
        form = (
            "swiglu" if self.is_swiglu else f"swiglu(alpha {self.alpha:g}, up + {self.up_offset:g})"
        )
        clamp = f", limit {self.limit:g}" if self.limit else ""
        return form + clamp + (" symmetric" if self.symmetric and self.limit else "")


GPT_OSS_ALPHA = 1.7020000219345093  # RN32(1.702)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TopK:
    """Where each token goes.

    ids: int32 or int64 [T, k], global logical experts; -1 is an empty slot whatever its weight.
    weights: floating [T, k]; used as float32.
    scaled: whether ``routed_scaling_factor`` is already inside the weights. None leaves it unsaid,
    which only a layer whose factor is 1 accepts.
    """

    ids: Tensor
    weights: Tensor
    scaled: bool | None = None

    def __post_init__(self) -> None:
        ids, weights = self.ids, self.weights
        if ids.dtype not in (torch.int32, torch.int64):
            raise bad_input(
                "topk.ids", f"of {ids.dtype}", "are neither int32 nor int64", "cast with ids.long()"
            )
        if ids.dim() != 2:
            raise bad_input(
                "topk.ids", f"of shape {list(ids.shape)}", "are not [tokens, top_k]", "reshape them"
            )
        if not weights.dtype.is_floating_point or weights.dtype.itemsize < 2:
            raise bad_input(
                "topk.weights", f"of {weights.dtype}", "are not a float of 16 bits or more",
                "cast with weights.float()",
            )  # fmt: skip
        if weights.shape != ids.shape:
            raise bad_input(
                "topk.weights", f"of shape {list(weights.shape)}",
                f"do not match ids of shape {list(ids.shape)}", "pass one weight per slot",
            )  # fmt: skip
        if weights.device != ids.device:
            raise bad_input(
                "topk.weights",
                f"on {weights.device}",
                f"are not on the ids' {ids.device}",
                "move them",
            )

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[1])


MAX_EXPERTS = 1 << 14  # the router's softmax counts its terms in units of 2 ** -48, in 63 bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Router:
    """How logits become ids and weights; the scaling factor is never part of it.

    weight: [E, H] as stored; bias: [E] added to logits (gpt-oss) or None. correction_bias: [E],
    for the choice only. num_groups, top_groups: choose groups first, by the sum of each group's two
    best biased scores. renormalise: divide by (sum + epsilon). table: int64 [V, k], ids by token id
    (hash-routed layers) or None.
    """

    weight: Tensor
    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = True
    epsilon: float = 0.0
    bias: Tensor | None = None
    correction_bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    table: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise bad_input(
                "router.weight", f"of shape {list(self.weight.shape)}",
                "is not [experts, hidden_size]", "pass the gate's matrix",
            )  # fmt: skip
        experts = self.num_experts
        if experts > MAX_EXPERTS:
            raise bad_input(
                "router", f"of {experts} experts", f"exceeds {MAX_EXPERTS}", "use fewer"
            )
        if not 1 <= self.top_k <= experts:
            raise bad_input(
                "router.top_k", self.top_k, f"is not in [1, {experts}]", "check the model's config"
            )
        for name in ("bias", "correction_bias"):
            vector = getattr(self, name)
            if vector is not None and tuple(vector.shape) != (experts,):
                raise bad_input(
                    f"router.{name}", f"of shape {list(vector.shape)}", f"is not [{experts}]",
                    "pass one value per expert",
                )  # fmt: skip
        groups, kept = self.num_groups, self.top_groups
        if groups < 1 or experts % groups or not 1 <= kept <= groups:
            raise bad_input(
                "router groups", f"{kept} of {groups}", f"do not divide {experts} experts",
                "check n_group and topk_group",
            )  # fmt: skip
        size = experts // groups
        if kept < groups and (size < 2 or size * kept < self.top_k):
            raise bad_input(
                "router groups", f"of {size} experts, {kept} kept,",
                f"cannot give two best scores and {self.top_k} experts",
                "check n_group, topk_group and num_experts_per_tok",
            )  # fmt: skip
        if self.table is not None and (self.table.dim() != 2 or self.table.shape[1] != self.top_k):
            raise bad_input(
                "router.table", f"of shape {list(self.table.shape)}",
                f"is not [vocabulary, {self.top_k}]", "pass tid2eid as stored",
            )  # fmt: skip

    @property
    def num_experts(self) -> int:
        return int(self.weight.shape[0])

    def logits(self, x: Tensor) -> Tensor:
        """x [T, H] times the gate, float32 [T, E]: a float64 product rounded once.

        Capture-safe, and within half a unit of float32's last place and a hair;
        ``megamoe.reference.router.logits`` is the correctly rounded one.
        """
        product = x.to(torch.float64) @ self.weight.to(torch.float64).T
        if self.bias is not None:
            product = product.to(torch.float32).to(torch.float64) + self.bias.to(torch.float64)
        return product.to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ExpertWeights:
    """Some experts' matrices. w13: [n, 2I, H], gate rows first, then up rows; w2: [n, H, I].

    b13 [n, 2I] and b2 [n, H]: floating, or None. Validated against each other.
    """

    w13: Quantised
    w2: Quantised
    b13: Tensor | None = None
    b2: Tensor | None = None

    def __post_init__(self) -> None:
        w13, w2 = self.w13.shape, self.w2.shape
        if len(w13) != 3 or len(w2) != 3:
            raise bad_input(
                "expert weights", f"of shapes {list(w13)} and {list(w2)}",
                "are not [experts, rows, columns]", "stack the experts first",
            )  # fmt: skip
        count, rows, hidden = w13
        if rows % 2 or w2 != (count, hidden, rows // 2):
            raise bad_input(
                "w2", f"of shape {list(w2)}", f"does not fit w13 of shape {list(w13)}",
                f"expected [{count}, {hidden}, {rows // 2}]",
            )  # fmt: skip
        for name, bias, width in (("b13", self.b13, rows), ("b2", self.b2, hidden)):
            if bias is not None and tuple(bias.shape) != (count, width):
                raise bad_input(
                    name, f"of shape {list(bias.shape)}", f"is not [{count}, {width}]",
                    "pass one bias per output row",
                )  # fmt: skip
        for name, tensor in (("w2", self.w2.data), ("b13", self.b13), ("b2", self.b2)):
            if tensor is not None and tensor.device != self.w13.device:
                raise bad_input(
                    name, f"on {tensor.device}", f"is not on w13's {self.w13.device}", "move it"
                )

    @property
    def count(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    @property
    def device(self) -> torch.device:
        return self.w13.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        biases = tuple(b for b in (self.b13, self.b2) if b is not None)
        return self.w13.tensors + self.w2.tensors + biases

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def to(self, device: torch.device | str) -> ExpertWeights:
        return ExpertWeights(
            w13=self.w13.to(device),
            w2=self.w2.to(device),
            b13=None if self.b13 is None else self.b13.to(device),
            b2=None if self.b2 is None else self.b2.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class SharedExpert:
    """An FFN that every token passes: replicated whole on every rank, applied to its own tokens.

    weights: an :class:`ExpertWeights` of one expert, with its own intermediate_size; activation:
    its own, limits included.
    """

    weights: ExpertWeights
    activation: Activation = Activation()

    def __post_init__(self) -> None:
        if self.weights.count != 1:
            raise bad_input(
                "shared expert", f"of {self.weights.count} experts", "is not one FFN",
                "concatenate shared experts along their intermediate dimension",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which logical expert each physical slot of each rank holds; -1 is a slot that holds none.

    slots: one tuple a rank, of any length. Every logical expert stands at least once; more than
    once means replicas.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = [expert for rank in self.slots for expert in rank]
        bad = [e for e in held if not -1 <= e < self.num_experts]
        if bad:
            raise bad_input(
                "placement", f"names expert {bad[0]}", f"outside [-1, {self.num_experts})",
                "use logical ids, and -1 for an empty slot",
            )  # fmt: skip
        missing = sorted(set(range(self.num_experts)) - set(held))
        if missing:
            raise bad_input(
                "placement", f"leaves out expert {missing[0]}",
                f"but all {self.num_experts} must be held", "give each expert a slot",
            )  # fmt: skip

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> Placement:
        """Experts in order; where the count does not divide, the first ranks hold one more."""
        if world_size < 1:
            raise bad_input("world_size", world_size, "is below 1", "pass the group's size")
        each, extra = divmod(num_experts, world_size)
        slots, start = [], 0
        for rank in range(world_size):
            stop = start + each + (rank < extra)
            slots.append(tuple(range(start, stop)))
            start = stop
        return cls(num_experts=num_experts, slots=tuple(slots))

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """The greatest count of any rank: what a kernel that wants equal counts pads to."""
        return max((len(rank) for rank in self.slots), default=0)

    @property
    def is_contiguous(self) -> bool:
        """Equal, in order, without replicas or gaps: what a megakernel takes as it is."""
        held = [expert for rank in self.slots for expert in rank]
        equal = len({len(rank) for rank in self.slots}) == 1
        return equal and held == list(range(self.num_experts))

    @property
    def has_replicas(self) -> bool:
        held = [expert for rank in self.slots for expert in rank if expert >= 0]
        return len(held) > self.num_experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MoEWeights:
    """One layer on one rank.

    experts: this rank's, one per entry of ``placement.slots[rank]``, in that order.
    routed_scaling_factor multiplies the routing weights (``scale_at`` "weights") or the float32 sum
    over slots ("output", MiniMax-M3). weight_at: where the family applies the routing weight.
    shared: replicated whole on every rank, or None. family: the checkpoint's, for messages.
    """

    experts: ExpertWeights
    placement: Placement
    rank: int = 0
    router: Router | None = None
    activation: Activation = Activation()
    routed_scaling_factor: float = 1.0
    scale_at: Literal["weights", "output"] = "weights"
    weight_at: WeightAt = "combine"
    shared: SharedExpert | None = None
    family: str = "custom"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.placement.world_size:
            raise bad_input(
                "weights.rank", self.rank, f"is not in [0, {self.placement.world_size})",
                "pass this process's rank in the expert-parallel group",
            )  # fmt: skip
        held = len(self.placement.slots[self.rank])
        if self.experts.count != held:
            raise bad_input(
                "weights.experts", f"of {self.experts.count} experts",
                f"do not fill the {held} slots of rank {self.rank}",
                "load with the same placement",
            )  # fmt: skip
        if not (math.isfinite(self.routed_scaling_factor) and self.routed_scaling_factor > 0):
            raise bad_input(
                "routed_scaling_factor", self.routed_scaling_factor,
                "is not a finite number above 0", "use 1.0 for a model without one",
            )  # fmt: skip
        if self.experts.b2 is not None and self.weight_at == "fc2_input":
            raise bad_input(
                "weight_at", "fc2_input", "is wrong with a bias b2: the bias would go unweighted",
                "use weight_at='combine'",
            )  # fmt: skip
        for name, part in (("shared expert", self.shared), ("router", self.router)):
            if part is None:
                continue
            hidden = part.weights.hidden_size if isinstance(part, SharedExpert) else (
                part.weight.shape[1]
            )  # fmt: skip
            if hidden != self.hidden_size:
                raise bad_input(
                    f"{name}'s hidden_size", hidden, f"is not the experts' {self.hidden_size}",
                    "load both from the same layer",
                )  # fmt: skip
        if self.router is not None and self.router.num_experts != self.num_experts:
            raise bad_input(
                "router", f"of {self.router.num_experts} experts",
                f"does not choose among the layer's {self.num_experts}",
                "load both from the same layer",
            )  # fmt: skip

    @property
    def num_experts(self) -> int:
        return self.placement.num_experts

    @property
    def hidden_size(self) -> int:
        return self.experts.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.experts.intermediate_size

    @property
    def device(self) -> torch.device:
        return self.experts.device

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes + (self.shared.weights.nbytes if self.shared else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every rounding point between x and y, in order; None is no rounding there.

    act, mid: formats in which activations enter FC1 and FC2. fc1_out, fc2_out: after FC and its
    bias.
    gate_out: gate * sigmoid(alpha * gate), before it meets up. swiglu_out: their product.
    weight_at: where the routing weight enters. term: one expert's output for one token.
    combine: ``slots`` sums in slot order; ``experts`` in ascending expert order; ``ranks`` sums
    each source rank's slots first. partial: rounding after every addition (``experts``) or of each
    rank's sum (``ranks``). The result is BF16.
    """

    name: str
    act: Format = PLAIN_BF16
    fc1_out: Element | None = None
    gate_out: Element | None = None
    swiglu_out: Element | None = None
    weight_at: WeightAt = "combine"
    mid: Format = PLAIN_BF16
    fc2_out: Element | None = None
    term: Element | None = BF16
    combine: Literal["slots", "experts", "ranks"] = "slots"
    partial: Element | None = None

    def __post_init__(self) -> None:
        for name in ("act", "mid"):
            fmt: Format = getattr(self, name)
            static = fmt.rule is not None and fmt.rule.kind == "static"
            if (fmt.scale is not None and fmt.block[0] != 1 and not static) or (
                fmt.global_scale != "none"
            ):
                raise bad_input(
                    f"recipe.{name}", fmt, "makes one scale for several tokens",
                    "use a format of one row a block, so that no token's bits depend on its batch",
                )  # fmt: skip

    def __str__(self) -> str:
        return self.name


BF16_COMBINE = Recipe(name="bf16, weight at combine")
BF16_FC2_INPUT = Recipe(name="bf16, weight at fc2_input", weight_at="fc2_input")
BF16_INPUT = Recipe(name="bf16, weight at input", weight_at="input")
HF_EAGER = Recipe(
    name="Hugging Face eager experts",
    fc1_out=BF16,
    gate_out=BF16,
    swiglu_out=BF16,
    fc2_out=BF16,
    weight_at="term",
    combine="experts",
    partial=BF16,
)
HF_GROUPED = Recipe(
    name="Hugging Face grouped experts", fc1_out=BF16, gate_out=BF16, swiglu_out=BF16, fc2_out=BF16
)


def family_recipe(weight_at: WeightAt) -> Recipe:
    """The BF16 recipe of a family: its own place of the routing weight, nothing else rounded."""
    recipes = {r.weight_at: r for r in (BF16_COMBINE, BF16_FC2_INPUT, BF16_INPUT)}
    return recipes.get(weight_at) or replace(
        BF16_COMBINE, name=f"bf16, weight at {weight_at}", weight_at=weight_at
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the engine around the layer does, so that a kernel can object to it."""

    tp_size: int = 1
    two_batch_overlap: bool = False
    external_all_to_all: str | None = None
    sequence_parallel: bool = False
    deterministic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A problem without its tensors: all that a kernel may object to."""

    hidden_size: int
    intermediate_size: int
    placement: Placement
    top_k: int
    max_tokens_per_rank: int
    weights: Format = PLAIN_BF16
    w2_weights: Format | None = None  # where it differs from w13's
    activation: Activation = Activation()
    expert_bias: bool = False
    weight_at: WeightAt = "combine"
    routed_scaling_factor: float = 1.0
    scale_at: Literal["weights", "output"] = "weights"
    shared: bool = False
    activation_scales: tuple[float, float] | None = None  # calibrated, of FC1's and FC2's input
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        for scale in self.activation_scales or ():
            if not 0 < scale < math.inf:
                raise bad_input(
                    "activation_scales", scale, "is not a positive, finite number",
                    "pass the two calibrated scales, FC1's input first",
                )  # fmt: skip
        for name in ("hidden_size", "intermediate_size", "top_k", "max_tokens_per_rank"):
            if getattr(self, name) < 1:
                raise bad_input(name, getattr(self, name), "is below 1", "pass a positive count")
        if self.w2_weights is None:
            object.__setattr__(self, "w2_weights", self.weights)

    @property
    def num_experts(self) -> int:
        return self.placement.num_experts

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @classmethod
    def of(
        cls,
        weights: MoEWeights,
        *,
        top_k: int,
        max_tokens_per_rank: int,
        activation_scales: tuple[float, float] | None = None,
        host: Host | None = None,
    ) -> Request:
        """The request that a loaded layer makes."""
        experts = weights.experts
        return cls(
            hidden_size=weights.hidden_size,
            intermediate_size=weights.intermediate_size,
            placement=weights.placement,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            weights=experts.w13.format,
            w2_weights=experts.w2.format,
            activation=weights.activation,
            expert_bias=experts.b13 is not None or experts.b2 is not None,
            weight_at=weights.weight_at,
            routed_scaling_factor=weights.routed_scaling_factor,
            scale_at=weights.scale_at,
            shared=weights.shared is not None,
            activation_scales=activation_scales,
            host=host or Host(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One rank's machine as a kernel sees it; literal ones stand for machines one does not own.

    capability is None on a CPU. Versions are None where the package is absent. ranks_per_gpu above
    1 means that several ranks share a device.
    """

    name: str
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    ranks_per_gpu: int = 1
    peer_access: bool = False
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    flashinfer: str | None = None
    nvshmem: str | None = None
    nccl: str | None = None
