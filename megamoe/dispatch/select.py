"""The choice of a kernel: pure, a few lines, and able to say why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamoe.errors import Unsupported, bad_input
from megamoe.kernels.base import Kernel
from megamoe.kernels.reference import Reference
from megamoe.kernels.sm90_pull_bf16 import Sm90PullBf16
from megamoe.kernels.sm90_pull_fp8 import Sm90PullFp8
from megamoe.kernels.sm90_pull_fp8_tensor import Sm90PullFp8Tensor
from megamoe.kernels.sm90_pull_mxfp4 import Sm90PullMxfp4
from megamoe.kernels.sm90_pull_nvfp4 import Sm90PullNvfp4
from megamoe.kernels.sm90_push_bf16 import Sm90PushBf16
from megamoe.kernels.sm90_push_fp8 import Sm90PushFp8
from megamoe.kernels.sm90_standalone_mxfp4 import Sm90StandaloneMxfp4
from megamoe.kernels.sm90_standalone_nvfp4 import Sm90StandaloneNvfp4
from megamoe.kernels.sm120_mxfp4_cake import Sm120Mxfp4Cake
from megamoe.kernels.sm120_mxfp4_split import Sm120Mxfp4Split
from megamoe.kernels.sm120_mxfp8 import Sm120Mxfp8
from megamoe.kernels.torch_grouped import TorchGrouped
from megamoe.problem import Machine, Recipe, Request

# Preference is this order.
KERNELS: tuple[type[Kernel], ...] = (
    # A checkpoint's own format first: a fourth or half of BF16's bytes to hold and to read. Of two
    # kernels for one format, the one that keeps the weights' values; of equals, pull before
    # standalone, which pads every rank to the same count and shares no GPU.
    Sm90PullMxfp4,
    Sm90StandaloneMxfp4,
    # Split clamps at any limit and runs on one rank; cake wants one version of NCCL.
    Sm120Mxfp4Split,
    Sm120Mxfp4Cake,
    Sm120Mxfp8,
    Sm90PullNvfp4,
    Sm90StandaloneNvfp4,
    Sm90PushFp8,
    Sm90PullFp8,
    Sm90PullFp8Tensor,
    # Pull rounds once less than push, clamps as models do, and is not built by nvcc at first use.
    Sm90PullBf16,
    Sm90PushBf16,
    TorchGrouped,
    Reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The kernel that was chosen, the recipe it rounds by, and why each earlier one was refused."""

    kernel: type[Kernel]
    recipe: Recipe
    request: Request
    machine: Machine
    refusals: Mapping[str, tuple[str, ...]]
    named: bool = False  # asked for by name, not by preference

    @property
    def name(self) -> str:
        return self.kernel.sheet.name

    def __str__(self) -> str:
        how = "as asked" if self.named else "by preference"
        lines = [f"{self.name} ({how}): {self.kernel.sheet.title}, recipe {self.recipe}"]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refusals.items()]
        return "\n".join(lines)


def select(
    request: Request,
    machine: Machine,
    kernels: Sequence[type[Kernel]] = KERNELS,
    only: str | None = None,
) -> Decision:
    """The first kernel without an objection; ``only`` considers the one of that name.

    Raises Unsupported with every kernel's reasons where none is left, BadInput for an unknown name.
    """
    if only is not None:
        names = [kernel.sheet.name for kernel in kernels]
        if only not in names:
            raise bad_input("kernel", repr(only), "is unknown", f"use one of {', '.join(names)}")
        kernels = [kernel for kernel in kernels if kernel.sheet.name == only]
    refused: dict[str, tuple[str, ...]] = {}
    for kernel in kernels:
        reasons = refusals(kernel, request, machine, named=only is not None)
        if not reasons:
            return Decision(
                kernel=kernel,
                recipe=kernel.recipe(request),
                request=request,
                machine=machine,
                refusals=refused,
                named=only is not None,
            )
        refused[kernel.sheet.name] = reasons
    what = f"kernel {only} cannot" if only else "no kernel can"
    raise Unsupported(f"{what} run this layer on {machine.name}", objections=refused)


def refusals(
    kernel: type[Kernel], request: Request, machine: Machine, *, named: bool = False
) -> tuple[str, ...]:
    """The kernel's objections, and that it is never chosen unnamed where its sheet says so."""
    reasons = kernel.objections(request, machine)
    automatic, on_gpu = kernel.sheet.automatic, machine.capability is not None
    if not named and automatic == "cpu" and on_gpu:
        reasons += ("is the judge: on a GPU it runs only where it is named",)
    if not named and automatic == "gpu" and not on_gpu:
        reasons += ("is a plain loop there: on a CPU it runs only where it is named",)
    return reasons
