"""Judge kernels on this machine: pools, cases, records; what `megamoe check` and the GPU suite
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megamoe.dispatch.machine import probe
from megamoe.dispatch.select import KERNELS
from megamoe.kernels.base import Kernel
from megamoe.problem import Machine
from megamoe.suite import cases
from megamoe.suite.cases import Case, Shape
from megamoe.suite.pool import Outcome, Pool
from megamoe.suite.results import record

START_S = 180.0  # processes, process group
FIRST_S = 400.0  # a kernel's first case compiles it; push kernels take minutes
CASE_S = 120.0
CALIBRATED = (2.0**-6, 2.0**-8)  # of inputs up to 7 and of FC2's: exact grids stay exact


def shape_of(kernel: type[Kernel], base: Shape | None = None) -> Shape:
    """A geometry that the kernel takes: its first format, and the clamp it computes."""
    sheet, rule = kernel.sheet, kernel.sheet.recipe.act.rule
    shape = base or Shape()
    return replace(
        shape,
        fmt=sheet.formats[0].name,
        limit=None if sheet.clamp == "none" else shape.limit,
        symmetric=sheet.clamp == "symmetric",
        activation_scales=CALIBRATED if rule is not None and rule.kind == "static" else None,
    )


def refused(kernel: type[Kernel], what: Case, shape: Shape, world: int, machine: Machine) -> str:
    """Why a case cannot be run here, in the kernel's own words; empty where it can."""
    shape = what.shape(shape)
    placement = cases.place(what.placement, shape.num_experts, world)
    request = cases.request_of(shape, placement, kernel, shape.capacity)
    why = list(kernel.objections(request, machine))
    if what.replays and machine.capability and not kernel.capturable(request, machine):
        why.append("reads from the device, which a CUDA graph cannot hold")
    return "; ".join(why)


def machine_for(world: int, device: str = "cuda") -> Machine:
    """This machine as ``world`` ranks see it; ranks share GPUs where there are too few."""
    here = probe(device)
    return replace(here, ranks_per_gpu=-(-world // here.gpus)) if here.gpus else here


@contextmanager
def pool(world: int) -> Iterator[Pool]:
    with Pool(
        world,
        setup=cases.setup,
        finish=cases.finish,
        start_timeout=START_S,
        environment=ENVIRONMENT,
    ) as started:
        yield started


# NVLink multicast can disturb other users of a host; no test needs it.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def judge(
    on: Pool, kernel: type[Kernel], what: Case, shape: Shape, machine: Machine, *, first: bool
) -> dict[str, Any]:
    """One case on a pool, as a record."""
    outcome: Outcome = on.run(
        cases.run,
        timeout=FIRST_S if first else CASE_S,
        kernel=kernel.sheet.name,
        shape=shape,
        name=what.name,
    )
    return record(outcome, what.shape(shape), machine)


def kernel_named(name: str, kernels: Sequence[type[Kernel]] = KERNELS) -> type[Kernel]:
    return next(kernel for kernel in kernels if kernel.sheet.name == name)
