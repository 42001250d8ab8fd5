"""FlashInfer's own weight transforms, run on the CPU, to judge ours.

The sources are read where they are (MEGAMOE_FLASHINFER_SRC, a folder that holds `flashinfer/`, or
the installed package) and their package `__init__` files are passed over, since those want CUDA.
What is
replaced, and nothing else: `is_cuda` (always true), the decorators that log calls, the DSL's
Float32, and the launch of the FP4 interleave kernel, whose body a C++ compiler builds from the .cu
file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PULL = "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel"
BACKENDS = "flashinfer.moe_ep.backends.mega.kernel"
INTERLEAVE_SOURCE = (
    "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu"
)

# Top-level names that the kernel trees put into sys.modules.
_TREES = ("flashinfer", "cutlass", "common", "src", "moe_hopper_fp8", "moe_nvfp4_swapab")


def flashinfer_root() -> Path | None:
    """Return the folder of the flashinfer package, or None where there is none."""
    given = os.environ.get("MEGAMOE_FLASHINFER_SRC")
    if given:
        folder = Path(given)
        root = folder / "flashinfer" if (folder / "flashinfer").is_dir() else folder
        if not (root / "megamoe" / "weights.py").is_file():
            raise FileNotFoundError(f"MEGAMOE_FLASHINFER_SRC={given} holds no flashinfer package")
        return root
    spec = importlib.util.find_spec("flashinfer")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@contextlib.contextmanager
def flashinfer_on_cpu() -> Iterator[Callable[[str], Any]]:
    """Within the block, import FlashInfer's source files by name; afterwards all is as it was.

    Yields `load(name)`, which returns the module of one file.
    """
    root = flashinfer_root()
    assert root is not None
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    source = root.joinpath(*PULL.split(".")[1:], "src")
    sys.path.insert(0, str(source))
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,misc]
    try:
        helpers = importlib.import_module(f"{PULL}.shim.kernel_helpers")
        vars(sys.modules[PULL])["__getattr__"] = helpers.__getattr__
        prepare = importlib.import_module("flashinfer.fused_moe.prepare")
        prepare.interleave_moe_weights_for_sm90_mixed_gemm = _interleave
        yield importlib.import_module
    finally:
        del torch.Tensor.is_cuda  # type: ignore[misc]
        sys.path.remove(str(source))
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(held)


def interleave_fp4_fp8(payload: torch.Tensor) -> torch.Tensor:
    """Run FlashInfer's FP4-for-FP8 interleave kernel on the CPU: uint8 [E, N, K/2]."""
    root = flashinfer_root()
    assert root is not None
    kernel = _kernel(root / INTERLEAVE_SOURCE)
    payload = payload.contiguous()
    # The kernel is launched once per expert, on rows x columns of FP4.
    out = torch.zeros_like(payload)
    for expert in range(payload.shape[0]):
        rows, row_bytes = payload.shape[1:]
        kernel(payload[expert].data_ptr(), out[expert].data_ptr(), rows, row_bytes * 2)
    return out


def _interleave(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    assert quant_type == "fp4_fp8"
    return interleave_fp4_fp8(weight)


@functools.cache
def _kernel(source: Path) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "a C++ compiler is needed to run the interleave kernel on the CPU"
    text = source.read_text()
    # Everything up to the launches, which are not C++; the kernels themselves are.
    start = text.index("__global__ void interleave_fp4_weights_for_sm90")
    end = text.index("void interleave_fp4_weights_for_sm90_mixed_gemm(uint8_t*")
    name = "interleave_fp4_fp8_weights_for_sm90_mixed_gemm_kernel"
    program = f"""
        #include <cstdint>
        #define __global__
        #define __device__
        #define __forceinline__ inline
        struct Dim {{ int x, y, z; }};
        static Dim blockIdx, threadIdx, gridDim, blockDim;
        {text[start:end]}
        extern "C" void run(uint8_t* source, uint8_t* target, int rows, int cols) {{
          gridDim = {{1, 1, 1}};
          blockDim = {{16, 32, 1}};
          for (threadIdx.y = 0; threadIdx.y < 32; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < 16; ++threadIdx.x)
              {name}(source, target, rows, cols);
        }}
    """
    folder = Path(tempfile.mkdtemp(prefix="megamoe-layout-"))
    try:
        (folder / "kernel.cpp").write_text(program)
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", "kernel.so", "kernel.cpp"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        run = ctypes.CDLL(str(folder / "kernel.so")).run
    finally:
        shutil.rmtree(folder)
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    run.restype = None
    return run


def _ours(name: str) -> bool:
    return name.split(".")[0] in _TREES


class _Finder:
    """Finds FlashInfer's files; a folder becomes a package without running its `__init__`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _STUBS:
            return importlib.machinery.ModuleSpec(name, _Stub(), is_package=True)
        parts = name.split(".")
        if parts[0] != "flashinfer":
            return None
        place = self.root.joinpath(*parts[1:])
        if place.is_dir():
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))


def _undecorated(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda wrapped: wrapped


_STUBS: dict[str, dict[str, Any]] = {
    "cutlass": {},
    "cutlass.cutlass_dsl": {"Float32": float},
    "flashinfer.api_logging": {"flashinfer_api": _undecorated},
    "flashinfer.trace.templates.moe": {},
    "flashinfer.utils": {},
}


class _Stub:
    """Loads a module whose attributes are those given, and None for every other."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_STUBS[module.__name__])
        vars(module)["__getattr__"] = lambda name: None
