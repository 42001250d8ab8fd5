"""The only place that looks at the machine; literal machines stand for ones you do not own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megamoe.problem import Machine

PACKAGES = {
    "flashinfer": ("flashinfer-python",),
    "nvshmem": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}

H200 = Machine(
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    memory_bytes=141 * 10**9,
    gpus=8,
    peer_access=True,
    flashinfer="0.7.4",
    nvshmem="0.4.1",
    nccl="2.30.7",
    cuda="13.0",
)
H20 = replace(H200, name="NVIDIA H20", multiprocessors=78, memory_bytes=96 * 10**9)
SM120 = replace(
    H200,
    name="NVIDIA RTX PRO 6000 Blackwell",
    capability=(12, 0),
    multiprocessors=188,
    memory_bytes=96 * 10**9,
)
CPU = Machine(name="CPU")
MACHINES = {"h200": H200, "h20": H20, "sm120": SM120, "cpu": CPU}


def installed(package: str) -> str | None:
    """The version of the first distribution found that provides ``package``; imports nothing."""
    for distribution in PACKAGES[package]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def probe(device: torch.device | str, *, ranks_per_gpu: int = 1) -> Machine:
    """What ``device`` is, and which packages are there. Starts CUDA only for a CUDA device."""
    device = torch.device(device)
    versions: dict[str, Any] = {name: installed(name) for name in PACKAGES}
    if device.type != "cuda":
        return Machine(
            name=f"CPU ({platform.machine()})", torch=torch.__version__, gpus=0, **versions
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    count = torch.cuda.device_count()
    return Machine(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        gpus=count,
        ranks_per_gpu=ranks_per_gpu,
        peer_access=all(
            torch.cuda.can_device_access_peer(index, other)
            for other in range(count)
            if other != index
        ),
        driver=_driver(),
        cuda=torch.version.cuda,
        torch=torch.__version__,
        **versions,
    )


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Within the block ``device`` is the current GPU, whose streams kernels are launched on."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        yield
        return
    with torch.cuda.device(device):
        yield


def _driver() -> str | None:
    """The NVIDIA kernel module's version, as Linux shows it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    return found[1] if found else None
