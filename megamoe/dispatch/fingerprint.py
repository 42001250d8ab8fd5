"""What all ranks must have in common before the first launch, in words to compare and print."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from megamoe.dispatch.select import Decision
from megamoe.problem import MoEWeights

# Names, memory and links may differ between the machines of one group.
MACHINE_FIELDS = (
    "capability", "multiprocessors", "ranks_per_gpu", "cuda", "torch", "flashinfer", "nvshmem",
    "nccl",
)  # fmt: skip
PIECE = 1 << 22
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(weights: MoEWeights, decision: Decision) -> dict[str, str]:
    """Shapes, capacity, kernel, recipe and versions; and which layer it is, by what every rank
    holds whole: router and shared expert.
    """
    request = decision.request
    facts = {"kernel": decision.name, "recipe": short(repr(decision.recipe), decision.recipe.name)}
    for field in dataclasses.fields(request):
        facts[field.name] = short(str(getattr(request, field.name)))
    for name in MACHINE_FIELDS:
        facts[name] = str(getattr(decision.machine, name))
    facts["device"] = weights.device.type
    facts["family"] = weights.family
    router, shared = weights.router, weights.shared
    if router is not None:
        tensors = (router.weight, router.bias, router.correction_bias, router.table)
        facts["router's bytes"] = checksum(*(t for t in tensors if t is not None))
    if shared is not None:
        facts["shared activation"] = str(shared.activation)
        facts["shared expert's bytes"] = checksum(*shared.weights.tensors)
    return facts


def short(text: str, name: str = "") -> str:
    """``text``, or its beginning (or ``name``) and a digest where it is long."""
    if len(text) <= 60:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name or text[:40] + '...'} ({digest})"


def checksum(*tensors: Tensor) -> str:
    """A sum over the bits that knows their places, on the tensors' own device; 16 digits."""
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().flatten().view(BITS[tensor.dtype.itemsize])
        place = torch.arange(1, PIECE + 1, dtype=torch.int64, device=tensor.device)
        place = place[: bits.numel()] * 0x9E3779B97F4A7 + 1
        for piece in bits.split(PIECE):
            part = (piece.to(torch.int64) * place[: piece.numel()]).sum()  # modulo 2 ** 64
            total = (total * 1000003 + int(part)) % 2**64
    return f"{total:016x}"
