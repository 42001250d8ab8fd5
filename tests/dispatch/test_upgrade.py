"""The facts we assume of FlashInfer against its own files, and an upgrade that moves them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megamoe.cli import main
from megamoe.dispatch import upgrade
from megamoe.dispatch.upgrade import (
    changes,
    differences,
    function_differences,
    installed_root,
    registered,
    registry_differences,
    report,
)
from megamoe.kernels.assumed import CONFIGS, FP4, RECORDS, SM90, SM120, SOURCES

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import layout_flashinfer as fi

NAME = "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig"


def test_every_record_has_a_source() -> None:
    assert RECORDS.keys() == SOURCES.keys()


def test_the_installed_flashinfer_is_as_assumed(request: pytest.FixtureRequest) -> None:
    root = fi.flashinfer_root()
    if root is None:
        pytest.skip(
            f"not compared with FlashInfer's own files: {request.node.name} "
            "(set MEGAMOE_FLASHINFER_SRC, or install flashinfer)"
        )
    assert changes(root) == []
    assert registered(root) == {fields["kernel_name"] for fields in CONFIGS.values()}


def test_each_kind_of_change_is_named(tmp_path: Path) -> None:
    file = tmp_path / FP4
    file.parent.mkdir(parents=True)
    file.write_text(
        "@dataclass\n"
        f"class {NAME}:\n"
        "    kernel_name: ClassVar[str]\n"
        "    intermediate_size: int\n"
        "    top_k: int = 8\n"
        "    gate_up_clamp: float = 7.0\n"
        "    brand_new: int = field(default=3)\n"
    )
    ours = {"intermediate_size": upgrade.REQUIRED, "top_k": upgrade.REQUIRED}
    ours |= {"gate_up_clamp": 10.0, "dropped": None}
    assert differences(tmp_path, {NAME: ours}) == [
        f"{NAME}.brand_new: new, default 3",
        f"{NAME}.dropped: gone",
        f"{NAME}.gate_up_clamp: default 7.0, assumed 10.0",
        f"{NAME}.top_k: default 8, assumed none: it is required",
    ]
    assert differences(tmp_path, {"MegaConfig": {}}) == [
        "MegaConfig: not found in moe_ep/modes/config.py"
    ]
    assert "judge the kernels again" in report(tmp_path, "0.8.0")


def test_functions_that_take_something_else_are_named(tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(
        "class Layer:\n    def open(self, capacity, *, knobs=None):\n        pass\n"
        "def thunk(first, second, /, buffer):\n    pass\n"
    )
    same = {
        "Layer.open": ("layer.py", ("self", "capacity", "knobs")),
        "thunk": ("layer.py", ("first", "second", "buffer")),
    }
    assert function_differences(tmp_path, same) == []
    other = {
        "Layer.open": ("layer.py", ("self", "capacity")),
        "Layer.close": ("layer.py", ("self",)),
        "gone": ("none.py", ()),
    }
    assert function_differences(tmp_path, other) == [
        "Layer.open: takes self, capacity, knobs; assumed self, capacity",
        "Layer.close: not found in layer.py",
        "gone: not found in none.py",
    ]


def test_kernels_that_came_and_went_are_named(tmp_path: Path) -> None:
    names = sorted(str(fields["kernel_name"]) for fields in CONFIGS.values())
    for number, name in enumerate(names[1:]):
        folder = tmp_path / (SM90 if name.startswith("sm90") else SM120) / str(number)
        folder.mkdir(parents=True)
        said = "NAME" if number % 2 else repr(name)
        (folder / "backend.py").write_text(
            f"NAME = {name!r}\n@register_mega_kernel(\n    {said}, deprecated_aliases=()\n)\n"
            "class Backend:\n    pass\n"
        )
    extra = tmp_path / SM90 / "extra.py"
    extra.write_text('@register_mega_kernel("sm90_brand_new")\nclass New:\n    pass\n')
    assert registry_differences(tmp_path) == [
        f"kernel {names[0]}: no longer registered",
        "kernel sm90_brand_new: registered, and no adapter of ours",
    ]


def test_doctor_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "installed_root", lambda: tmp_path)
    assert main(["doctor", "--flashinfer"]) == 1
    assert f"{NAME}: not found" in capsys.readouterr().out
    monkeypatch.setattr(upgrade, "installed_root", lambda: None)
    assert main(["doctor", "--flashinfer"]) == 1
    assert "is not installed" in capsys.readouterr().out


def test_the_package_is_found_without_importing_it() -> None:
    root = installed_root()
    assert root is None or (root / "moe_ep").is_dir()
    assert "flashinfer" not in sys.modules or root is not None
