"""The records our adapters build, made of FlashInfer's own classes where its files are at hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import layout_flashinfer as fi
import pytest
from emulated import emulated, run_ranks
from test_adapters_mutants import WEIGHTS, case

from megamoe.kernels import flashinfer
from megamoe.kernels.assumed import CONFIGS, SOURCES


@pytest.mark.parametrize("kernel", [name for name in WEIGHTS if "standalone" not in name])
def test_flashinfer_s_own_records_take_what_the_adapters_pass(kernel: str) -> None:
    """Built for real, from FlashInfer's own files, by name and value; no GPU is asked."""
    if fi.flashinfer_root() is None:
        pytest.skip(
            f"{kernel}'s records are not built from FlashInfer's own classes "
            "(set MEGAMOE_FLASHINFER_SRC, or install flashinfer)"
        )
    passed: list[tuple[str, dict[str, Any]]] = []
    real = flashinfer.build

    def build(module: Any, name: str, fields: Any) -> Any:
        passed.append((name, dict(fields)))
        return real(module, name, fields)

    def call(rank: int) -> None:
        with layer.prepare(rank) as prepared:
            prepared.forward(layer.x(rank), layer.topk(rank))

    layer = case(kernel)
    with emulated(layer.machine), mock.patch.object(flashinfer, "build", build):
        run_ranks(layer.world, call)
    built = set()
    with fi.flashinfer_on_cpu() as load:
        for name, fields in passed:
            if name not in SOURCES or name.startswith("Sm90Cake") or name == "Sm90PushWeights":
                continue
            source = SOURCES[name].removesuffix(".py").replace("/", ".")
            made = getattr(load(f"flashinfer.{source}"), name)(**fields)
            for field, value in fields.items():
                assert getattr(made, field) is value, (name, field)
            if name.endswith("MegaMoeConfig"):
                assert made.kernel_name == CONFIGS[name]["kernel_name"]
            built.add(name)
    assert {"BootstrapConfig", "FleetParams", "MegaConfig"} < built
    assert sum(name.endswith("MegaMoeConfig") for name in built) == 1


def test_cake_s_flag_is_where_the_adapter_reads_it() -> None:
    """FlashInfer's layer keeps `_workspace`, whose `storage` holds the flag by that name."""
    root = fi.flashinfer_root()
    if root is None:
        pytest.skip("not read in FlashInfer's own files (set MEGAMOE_FLASHINFER_SRC)")
    cake = root / "moe_ep/backends/mega/kernel/sm120/mxfp4_mxfp8_bf16_cake/cake_backend.py"
    text = cake.read_text(encoding="utf-8")
    assert '.storage["protocol_error"].view(torch.int32)[0]' in text
    layer = (root / "moe_ep/modes/mega_layer.py").read_text(encoding="utf-8")
    assert "self._workspace = self._kernel.prepare_workspace(" in layer
