"""Layers for the emulated device: one set of experts, and how it is spread over ranks.

Weights are made so that the kernel in question holds every value exactly: then the production path
over any placement must give the bits of the reference on one rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from strategies import bell, counts, hashed, power_above, unit
from torch import Tensor

import megamoe
from emulated.cluster import run_ranks
from emulated.device import Device, emulated
from megamoe.dispatch.machine import H200
from megamoe.formats import (
    E4M3,
    NVFP4,
    PLAIN_BF16,
    Format,
    Quantised,
    encode,
    plain,
    power_of_two,
    quantise,
    round_to,
)
from megamoe.problem import Activation, ExpertWeights, Machine, MoEWeights, Placement, TopK
from megamoe.reference.moe import Emulated, layer

HIDDEN, WIDTH = 256, 128  # the least sizes that every SM90 kernel takes


def powers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """float64 powers of two, exponents in [low, high]."""
    z = (hashed(seed, *shape) >> torch.tensor(33).numpy().astype("uint64")).astype("int64")
    return power_of_two(torch.from_numpy(z) % (high - low + 1) + low)


@functools.lru_cache(maxsize=16)
def coded(
    seed: int, fmt: Format, *shape: int, row_groups: int = 1, bf16: bool = False
) -> Quantised:
    """Experts [n, rows, columns] in a format, of values that survive each kernel's own decoding.

    bf16: also numbers of that format. FP8 blocks have scales at most four apart, and elements far
    enough above the E4M3 subnormals for that; NVFP4 block scales are powers of two; MXFP4's lie in
    a window of 2**11.
    """
    columns = shape[-1]
    values = bell(seed, *shape) / power_above(columns)
    if fmt is PLAIN_BF16:
        return plain(values.to(torch.bfloat16))
    if fmt.element is not E4M3 and fmt is not NVFP4:
        return quantise(values, fmt, row_groups=row_groups)
    empty = Quantised(
        format=fmt,
        data=torch.zeros(*shape[:-1], columns // fmt.element.packed, dtype=fmt.element.dtype),
        scale=torch.zeros(_scale_shape(fmt, shape, row_groups)).to(fmt.scale.dtype),  # type: ignore[union-attr]
        global_scale=torch.ones(shape[0], row_groups) if fmt is NVFP4 else None,
        row_groups=row_groups,
    )
    assert fmt.scale is not None
    assert empty.scale is not None
    if fmt is NVFP4:
        elements = round_to(bell(seed, *shape).to(torch.float64) * 8, fmt.element)
        scale = powers(seed + 1, -3, 1, *empty.scale.shape)
        shared = torch.ones(shape[0], 1) if bf16 else unit(seed + 2, shape[0], 1) + 0.5
        shared = shared.expand(-1, row_groups) / power_above(columns)
    else:
        # Multiples of 2**-3 between 2**-3 and 15: exact in E4M3 after a division by 4.
        elements = (bell(seed, *shape).to(torch.float64) * 16).round() / 8 + 0.125
        elements = round_to(elements, fmt.element)
        scale = powers(seed + 1, -1, 1, *empty.scale.shape) / power_above(columns)
        shared = None
    return Quantised(
        format=fmt,
        data=encode(elements, fmt.element),
        scale=encode(scale, fmt.scale),
        global_scale=None if shared is None else shared.contiguous(),
        row_groups=row_groups,
    )


def _scale_shape(fmt: Format, shape: tuple[int, ...], row_groups: int) -> tuple[int, ...]:
    *lead, rows, columns = shape
    height, width = fmt.block[0] or rows, fmt.block[1] or columns
    return (*lead, row_groups * -(-(rows // row_groups) // height), -(-columns // width))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer over ranks. tokens: by rank; ids: by rank, logical, [tokens][top_k]."""

    kernel: str
    weights: Format = PLAIN_BF16
    placement: Placement
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    top_k: int = 2
    capacity: int = 8
    activation: Activation = Activation()
    gain: float = 1.0  # multiplies x, so that gates and ups pass their limits
    routed_scaling_factor: float = 1.0
    activation_scales: tuple[float, float] | None = None
    hidden: int = HIDDEN
    width: int = WIDTH
    seed: int = 1
    machine: Machine = field(default=H200)

    @property
    def world(self) -> int:
        return self.placement.world_size

    def experts(self) -> ExpertWeights:
        n, h, i = self.placement.num_experts, self.hidden, self.width
        bf16 = self.kernel.endswith("bf16")
        return ExpertWeights(
            w13=coded(self.seed, self.weights, n, 2 * i, h, row_groups=2, bf16=bf16),
            w2=coded(self.seed + 50, self.weights, n, h, i, bf16=bf16),
        )

    def whole(self) -> MoEWeights:
        return self._weights(self.experts(), Placement.contiguous(self.placement.num_experts, 1), 0)

    def held(self, rank: int) -> MoEWeights:
        whole = self.experts()
        slots = torch.tensor(self.placement.slots[rank], dtype=torch.int64).clamp(min=0)
        mine = ExpertWeights(w13=_pick(whole.w13, slots), w2=_pick(whole.w2, slots))
        return self._weights(mine, self.placement, rank)

    def _weights(self, experts: ExpertWeights, placement: Placement, rank: int) -> MoEWeights:
        return MoEWeights(
            experts=experts,
            placement=placement,
            rank=rank,
            activation=self.activation,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def x(self, rank: int, number: int = 0) -> Tensor:
        """Tokens of a rank's numbered call; the routing weights change too, the ids do not."""
        rows = bell(self.seed + 200 + rank + 20 * number, len(self.ids[rank]), self.hidden)
        return (rows * self.gain).to(torch.bfloat16)

    def topk(self, rank: int, number: int = 0) -> TopK:
        count = len(self.ids[rank])
        weights = unit(self.seed + 300 + rank + 20 * number, count, self.top_k)
        ids = torch.tensor(self.ids[rank], dtype=torch.int64).reshape(count, self.top_k)
        # Nothing may read the weight of an empty slot.
        return TopK(ids=ids, weights=torch.where(ids < 0, torch.nan, weights), scaled=False)

    def expected(self, rank: int, recipe: megamoe.Recipe, number: int = 0) -> Tensor:
        x, topk = self.x(rank, number), self.topk(rank, number)
        return layer(x, topk, self.whole(), Emulated(recipe))

    def prepare(self, rank: int) -> megamoe.PreparedWeights:
        return megamoe.prepare(
            self.held(rank),
            dist.group.WORLD if self.world > 1 else None,
            max_tokens_per_rank=self.capacity,
            top_k=self.top_k,
            kernel=self.kernel,
            activation_scales=self.activation_scales,
            on_failure="raise",  # "abort" would end the tests' own process
        )


def _pick(q: Quantised, index: Tensor) -> Quantised:
    def rows(t: Tensor | None) -> Tensor | None:
        if t is None or t.dtype.itemsize > 1:
            return None if t is None else t[index]
        return t.view(torch.uint8)[index].view(t.dtype)

    data = rows(q.data)
    assert data is not None
    return Quantised(
        format=q.format,
        data=data,
        scale=rows(q.scale),
        global_scale=rows(q.global_scale),
        row_groups=q.row_groups,
    )


def forward(case: Layer, passes: int = 1) -> tuple[list[list[Tensor]], megamoe.Recipe, Device]:
    """Outputs by rank and pass, the recipe they claim, and the device they ran on."""
    recipes: list[megamoe.Recipe] = []

    def work(rank: int) -> list[Tensor]:
        with case.prepare(rank) as prepared:
            recipes.append(prepared.decision.recipe)
            return [prepared.forward(case.x(rank, i), case.topk(rank, i)) for i in range(passes)]

    with emulated(case.machine) as device:
        outputs = run_ranks(case.world, work)
    assert device.open_workspaces == 0
    return outputs, recipes[0], device


def differences(case: Layer, passes: int = 1) -> list[str]:
    """Where the production path's bits are not the reference's: none, if all is well."""
    outputs, recipe, device = forward(case, passes)
    assert set(device.launches) == set(range(case.world))
    found = []
    for rank, ys in enumerate(outputs):
        for number, y in enumerate(ys):
            want = case.expected(rank, recipe, number)
            bad = (y.view(torch.int16) != want.view(torch.int16)).any(dim=1)
            found += [f"rank {rank} token {t} pass {number}" for t in bad.nonzero().flatten()]
    return found


@st.composite
def placements(draw: st.DrawFn, *, max_experts: int, world: int) -> Placement:
    """Permuted, uneven and replicated experts; ranks may hold none, slots may be empty."""
    experts = draw(st.integers(1, max_experts))
    if draw(st.booleans()):
        return Placement.contiguous(experts, world)
    owners = draw(st.lists(st.integers(0, world - 1), min_size=experts, max_size=experts))
    slots: list[list[int]] = [[] for _ in range(world)]
    for expert, owner in enumerate(owners):
        slots[owner].append(expert)
    extra = st.tuples(st.integers(0, world - 1), st.integers(-1, experts - 1))
    for rank, expert in draw(st.lists(extra, max_size=3)):
        slots[rank].append(expert)
    order = draw(st.randoms(use_true_random=False))
    for rank in slots:
        order.shuffle(rank)
    return Placement(num_experts=experts, slots=tuple(map(tuple, slots)))


@st.composite
def layers(
    draw: st.DrawFn,
    *,
    kernel: str,
    weights: tuple[Format, ...],
    worlds: tuple[int, ...],
    top_k: tuple[int, ...],
    activations: tuple[Activation, ...],
    max_tokens: int = 4,
    max_experts: int = 6,
    hidden: int = HIDDEN,
    machine: Machine = H200,
) -> Layer:
    world = draw(st.sampled_from(worlds))
    placement = draw(placements(max_experts=max_experts, world=world))
    k = draw(st.sampled_from(top_k))
    row = st.tuples(*[st.integers(-1, placement.num_experts - 1)] * k)
    ids = tuple(
        tuple(draw(st.lists(row, min_size=n, max_size=n)))
        for n in (draw(counts(max_tokens)) for _ in range(world))
    )
    activation = draw(st.sampled_from(activations))
    return Layer(
        kernel=kernel,
        weights=draw(st.sampled_from(weights)),
        placement=placement,
        ids=ids,
        top_k=k,
        capacity=draw(st.sampled_from([max_tokens, max_tokens + 3])),
        activation=activation,
        gain=8.0 if activation.limit else 1.0,
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        hidden=hidden,
        machine=machine,
        seed=draw(st.integers(0, 2**16)),
    )
