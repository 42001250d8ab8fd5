"""The weight layouts on a GPU: our bytes there, and those of FlashInfer's interleave kernel.

Not yet run on a GPU. FlashInfer's own module for that kernel takes many minutes to build; here its
one small file is compiled alone, from the installed package (or MEGAMOE_FLASHINFER_SRC).
"""

import ctypes
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import layout_cases as cases
import layout_flashinfer as fi

from megamoe.kernels import layout

pytestmark = pytest.mark.gpu

CASES = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
# The SM120 transforms belong to a kernel tree that cannot share a process with the SM90 one.
SM90_CASES = pytest.mark.parametrize(
    "case",
    [case for case in cases.CASES if not case.name.startswith("sm120")],
    ids=lambda case: case.name,
)

Interleave = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def interleave(tmp_path_factory: pytest.TempPathFactory) -> Interleave:
    """FlashInfer's FP4-for-FP8 interleave, with its signature: uint8 CUDA [E, N, K/2]."""
    root = fi.flashinfer_root()
    if root is None:
        pytest.skip("not compared with FlashInfer's interleave kernel: flashinfer is not installed")
    assert CUDA_HOME is not None, "nvcc is needed to compile FlashInfer's interleave kernel"
    folder = tmp_path_factory.mktemp("interleave")
    library = compile_interleave(root / fi.INTERLEAVE_SOURCE, folder, Path(CUDA_HOME) / "bin/nvcc")
    run = ctypes.CDLL(str(library)).run
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

    def interleave(weight: torch.Tensor, quant_type: str = "fp4_fp8") -> torch.Tensor:
        assert quant_type == "fp4_fp8"
        weight = weight.contiguous()
        out = torch.empty_like(weight)
        torch.cuda.synchronize()
        for expert in range(weight.shape[0]):
            rows, row_bytes = weight.shape[1:]
            error = run(weight[expert].data_ptr(), out[expert].data_ptr(), rows, row_bytes * 2)
            assert error == 0, f"CUDA error {error}"
        return out

    return interleave


def compile_interleave(source: Path, folder: Path, nvcc: Path, arch: str = "native") -> Path:
    """Compile the one .cu file with a C entry point; return the library."""
    (folder / "interleave.cu").write_text(
        f"""
        #include "{source}"
        extern "C" int run(void* source, void* target, int rows, int columns) {{
          tensorrt_llm::kernels::cutlass_kernels::interleave_fp4_fp8_weights_for_sm90_mixed_gemm(
              static_cast<uint8_t*>(source), static_cast<uint8_t*>(target), rows, columns, 0);
          cudaError_t const error = cudaDeviceSynchronize();
          return error != cudaSuccess ? error : cudaGetLastError();
        }}
        """
    )
    command = [str(nvcc), "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}"]
    command += ["-o", "interleave.so", "interleave.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "interleave.so"


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (80, 192), (512, 256), (4096, 2048)])
def test_interleave_kernel(interleave: Interleave, rows: int, columns: int) -> None:
    payload = cases.seeded_bytes("interleave", 2, rows, columns // 2).cuda()
    theirs = interleave(payload)
    assert torch.equal(layout.to_fragments(payload), theirs)
    assert torch.equal(layout.from_fragments(theirs), payload)


@CASES
def test_same_bytes_on_cpu_and_gpu(case: cases.Case) -> None:
    with torch.device("cuda"):
        ours = case.ours()
    assert all(tensor.is_cuda for tensor in ours)
    assert cases.digest(ours) == cases.golden()[case.name]


@pytest.fixture
def load(interleave: Interleave, monkeypatch: pytest.MonkeyPatch) -> cases.Load:
    """Import from the installed FlashInfer, with the kernel above in place of its slow build."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("not compared with FlashInfer's GPU transforms: flashinfer is not installed")
    prepare: Any = importlib.import_module("flashinfer.fused_moe.prepare")
    monkeypatch.setattr(prepare, "interleave_moe_weights_for_sm90_mixed_gemm", interleave)
    return importlib.import_module


@SM90_CASES
def test_digests_are_the_installed_flashinfers(case: cases.Case, load: cases.Load) -> None:
    with torch.device("cuda"):
        theirs = case.theirs(load)
    assert cases.digest(theirs) == cases.golden()[case.name]
