"""Why this kernel and not that one, in words; and the support table, from the same datasheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megamoe.dispatch.select import KERNELS, refusals
from megamoe.kernels.base import Datasheet, Kernel
from megamoe.problem import Machine, Request


def explain(request: Request, machine: Machine, kernels: Sequence[type[Kernel]] = KERNELS) -> str:
    """Every kernel with its verdict, in order of preference: the choice first comes first."""
    chosen = False
    lines = [describe(request), f"on {machine.name}, {request.world_size} ranks:"]
    for kernel in kernels:
        reasons = refusals(kernel, request, machine)
        if reasons:
            lines.append(f"  no   {kernel.sheet.name}")
            lines += [f"         {reason}" for reason in reasons]
            continue
        word = "also" if chosen else "YES"
        lines.append(f"  {word:<4} {kernel.sheet.name}: recipe {kernel.recipe(request)}")
        lines += [f"         note: {note}" for note in kernel.sheet.notes]
        if not kernel.sheet.hardware:
            lines.append("         note: not run on hardware")
        chosen = True
    if not chosen:
        lines.append("  nothing can run it; see the reasons above")
    return "\n".join(lines)


def describe(request: Request) -> str:
    """One line that says what the layer is."""
    parts = [
        f"hidden_size {request.hidden_size}",
        f"intermediate_size {request.intermediate_size}",
        f"{request.num_experts} experts",
        f"top_k {request.top_k}",
        f"{request.weights} weights",
        str(request.activation),
    ]
    if request.routed_scaling_factor != 1.0:
        parts.append(f"scaling {request.routed_scaling_factor:g} at {request.scale_at}")
    if request.expert_bias:
        parts.append("expert biases")
    if request.shared:
        parts.append("shared expert")
    return ", ".join(parts)


COLUMNS = (
    "kernel",
    "GPU",
    "weights",
    "activations FC1 / FC2",
    "hidden / intermediate",
    "top_k",
    "ranks",
    "clamp",
    "run on hardware",
)


def support_table(kernels: Sequence[type[Kernel]] = KERNELS) -> str:
    """The README's table, in Markdown, one row a kernel in order of preference."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    rows += [tuple(_row(kernel.sheet)) for kernel in kernels]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(sheet: Datasheet) -> Iterable[str]:
    yield f"`{sheet.name}`"
    yield " or ".join(_architecture(a) for a in sheet.architectures) or (
        "any, or none" if "any device" in sheet.features else "any CUDA"
    )
    yield ", ".join(fmt.name for fmt in sheet.formats) if len(sheet.formats) < 9 else "all formats"
    yield f"{sheet.recipe.act} / {sheet.recipe.mid}"
    yield f"x{sheet.hidden_multiple} / x{sheet.intermediate_multiple}"
    yield _values(sheet.top_k)
    yield _values(sheet.world_sizes)
    yield sheet.clamp
    yield ", ".join(sheet.hardware) or "not run on hardware"


def _architecture(capability: tuple[int, int | None]) -> str:
    major, minor = capability
    return f"SM{major}x" if minor is None else f"SM{major}{minor}"


def _values(values: frozenset[int] | range) -> str:
    if isinstance(values, range):
        return "any" if values.stop >= 1 << 16 else f"{values.start}-{values.stop - 1}"
    return ", ".join(map(str, sorted(values)))
