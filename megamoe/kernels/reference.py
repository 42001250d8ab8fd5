"""The reference as a kernel: what runs on a CPU, and wherever it is asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from megamoe.formats import CATALOGUE
from megamoe.kernels.base import Batch, Context, Datasheet, Tactic, check_ranks
from megamoe.kernels.packs import owned
from megamoe.kernels.plain import PlainKernel, PlainWorkspace
from megamoe.problem import BF16_COMBINE, Machine, MoEWeights, Recipe, Request, family_recipe
from megamoe.reference import parallel
from megamoe.reference.moe import Emulated


class Reference(PlainKernel):
    """Correctly rounded, bit for bit the same everywhere, and slow: the judge of all others."""

    sheet = Datasheet(
        name="reference",
        title="correctly rounded reference",
        recipe=BF16_COMBINE,
        formats=CATALOGUE,
        clamp="any",
        features=frozenset(
            {
                "any device",
                "alpha",
                "expert bias",
                "weight at input",
                "output scaling",
                "shared expert",
                "shared GPU",
                "tensor parallel",
                "sequence parallel",
            }
        ),
        transport="the process group",
        automatic="cpu",
        hardware=("any CPU",),
    )

    @classmethod
    def capturable(cls, request: Request, machine: Machine) -> bool:
        return False  # it looks at every value

    @classmethod
    def recipe(cls, request: Request) -> Recipe:
        return family_recipe(request.weight_at)

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> Reference:
        check_ranks(context)
        recipe = context.recipe or cls.recipe(context.request)
        weights = _owned(weights) if context.exchange else weights
        return cls(weights, Emulated(recipe), context)

    def __init__(self, weights: MoEWeights, arithmetic: Emulated, context: Context) -> None:
        self.weights, self.arithmetic, self.context = weights, arithmetic, context
        self.group, self.peers = context.group, context.peers

    def run(self, batch: Batch, out: Tensor) -> None:
        wait = (lambda work: work.wait()) if self.peers is None else self.peers.wait
        out.copy_(
            parallel.forward(
                batch.x, batch.ids, batch.weights, self.weights, self.arithmetic, self.group, wait
            )
        )

    def update(self, weights: MoEWeights) -> Callable[[], None]:
        fresh = _owned(weights)

        def write() -> None:
            self.weights = replace(self.weights, experts=fresh.experts, placement=fresh.placement)

        return write

    def open(self, capacity: int, tactic: Tactic | None = None) -> ReferenceWorkspace:
        return ReferenceWorkspace(self, capacity)


class ReferenceWorkspace(PlainWorkspace):
    def compiles(self) -> Sequence[int]:
        return ()  # nothing is, and a full batch takes minutes


def _owned(weights: MoEWeights) -> MoEWeights:
    """Without a byte of the caller's, who may load others into the tensors it passed."""
    shared = weights.shared
    if shared is not None:
        shared = replace(shared, weights=owned(shared.weights, shared.weights))
    return replace(weights, experts=owned(weights.experts, weights.experts), shared=shared)
