"""The emulated device's facts against FlashInfer's own files, where those are at hand.

Fields and defaults of every record an adapter builds. FlashInfer is found in
MEGAMOE_FLASHINFER_SRC or as an installed package, and only its text is read.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import layout_flashinfer as fi
import pytest
from emulated import facts

SM90 = "moe_ep/backends/mega/kernel/sm90"
SM120 = "moe_ep/backends/mega/kernel/sm120"
PUSH = "moe_ep/kernel_src/sm90"
FP4 = f"{SM90}/fp8_mxfp4_bf16_pull_cutedsl/config.py"
SOURCES = {
    "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig": (
        f"{SM90}/bf16_bf16_bf16_pull_cutedsl/config.py"
    ),
    "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig": f"{SM90}/fp8_fp8_bf16_pull_cutedsl/config.py",
    "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig": FP4,
    "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig": (
        f"{SM90}/fp8_nvfp4_bf16_pull_cutedsl/config.py"
    ),
    "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig": (
        f"{SM90}/bf16_bf16_bf16_push_cake/cake_config.py"
    ),
    "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig": f"{SM90}/fp8_fp8_bf16_push_cuda/config.py",
    "Sm120_Mxfp4_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": f"{SM120}/mxfp4_mxfp8_bf16_cutedsl/config.py",
    "Sm120_Mxfp4_Mxfp8_Bf16_Cake_MegaMoeConfig": f"{SM120}/mxfp4_mxfp8_bf16_cake/cake_config.py",
    "Sm120_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": f"{SM120}/mxfp8_mxfp8_bf16_cutedsl/config.py",
    "BootstrapConfig": "moe_ep/config.py",
    "FleetParams": "moe_ep/config.py",
    "MegaConfig": "moe_ep/modes/config.py",
    "MoEEpTensors": "moe_ep/tensors.py",
    "Sm90PushWeights": f"{PUSH}/push_style_megamoe/shim/weights.py",
    "Sm90CakeBf16Weights": f"{PUSH}/cake_bf16_megamoe/shim/cake_weights.py",
}
OURS: dict[str, dict[str, Any]] = {
    **facts.CONFIGS,
    **facts.API,
    "Sm90PushWeights": facts.PUSH_FP8_WEIGHTS,
    "Sm90CakeBf16Weights": facts.PUSH_BF16_WEIGHTS,
}
# What this device has no use for: fields of other paths.
LEFT_OUT = {"FleetParams": {"algorithm", "layout"}}
NAMED = {"SM90_ROUTING_PROFILE_BLOCK_PERMUTATION": "block_permutation_v1"}


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    found = fi.flashinfer_root()
    if found is None:
        pytest.skip(
            f"not compared with FlashInfer's own files: {request.node.name} "
            "(set MEGAMOE_FLASHINFER_SRC, or install flashinfer)"
        )
    return found


def test_every_record_has_a_source() -> None:
    assert OURS.keys() == SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_fields_and_defaults(name: str, root: Path) -> None:
    theirs = dataclass_fields(root, SOURCES[name], name)
    theirs = {k: v for k, v in theirs.items() if k not in LEFT_OUT.get(name, set())}
    assert OURS[name] == theirs


def dataclass_fields(root: Path, source: str, name: str) -> dict[str, Any]:
    """Fields of a dataclass in that file, inherited ones too; a ClassVar takes one back."""
    tree = ast.parse((root / source).read_text(encoding="utf-8"))
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    found: dict[str, Any] = {}
    for base in node.bases:
        found |= dataclass_fields(root, FP4, ast.unparse(base))
    for line in node.body:
        if not isinstance(line, ast.AnnAssign):
            continue
        field = ast.unparse(line.target)
        if ast.unparse(line.annotation).startswith("ClassVar"):
            found.pop(field, None)
        else:
            found[field] = default(line.value)
    return found


def default(value: ast.expr | None) -> Any:
    if value is None:
        return facts.REQUIRED
    if isinstance(value, ast.Call):  # field(default=...)
        return default({k.arg: k.value for k in value.keywords}["default"])
    if isinstance(value, ast.Name):
        return NAMED[value.id]
    if isinstance(value, ast.Attribute):  # a member of an enumeration
        return ast.unparse(value)
    return ast.literal_eval(value)
