"""What a machine has, what each kernel lacks on it, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megamoe.dispatch.select import KERNELS
from megamoe.kernels.base import Kernel, machine_objections
from megamoe.problem import Machine

REMEDIES = {
    "flashinfer": "pip install 'megamoe[gpu]' (brings flashinfer and nvshmem for CUDA 13)",
    "nvshmem": "pip install nvshmem4py-cu13",
    "nccl": "pip install the nvidia-nccl-cu13 of the version named",
    "compute capability": "another GPU; `megamoe explain MODEL --machine h200` says which",
    "CUDA GPU": "a machine with one; until then forward runs the reference",
    "multiprocessors": "another GPU of the same architecture",
}


def report(machine: Machine, kernels: Sequence[type[Kernel]] = KERNELS) -> str:
    """The machine, then every kernel with what it lacks here, then the remedies."""
    lines = [f"machine    {machine.name}"]
    if machine.capability is not None:
        major, minor = machine.capability
        gib = machine.memory_bytes / 2**30
        lines += [
            f"GPUs       {machine.gpus} (compute capability {major}.{minor}, "
            f"{machine.multiprocessors} multiprocessors, {gib:.0f} GiB)",
            f"peers      {_peers(machine)}",
            f"driver     {machine.driver or 'unknown'}",
        ]
    for name in ("torch", "cuda", "flashinfer", "nvshmem", "nccl"):
        lines.append(f"{name:<10} {getattr(machine, name) or 'not there'}")
    reasons = {kernel.sheet.name: machine_objections(kernel.sheet, machine) for kernel in kernels}
    lines.append("kernels")
    lines += [f"  {name}: {'; '.join(why) or 'ready'}" for name, why in reasons.items()]
    remedies = list(_remedies(reason for why in reasons.values() for reason in why))
    if remedies:
        lines += ["remedies", *(f"  {remedy}" for remedy in remedies)]
    return "\n".join(lines)


def _peers(machine: Machine) -> str:
    if machine.gpus < 2:
        return "one GPU: no peers to reach (several ranks can share it, for correctness)"
    return "all GPUs reach each other's memory" if machine.peer_access else "no peer access"


def _remedies(reasons: Iterable[str]) -> Iterable[str]:
    found = list(reasons)
    for word, remedy in REMEDIES.items():
        if any(word in reason for reason in found):
            yield f"{word}: {remedy}"
