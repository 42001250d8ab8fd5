"""The README cannot drift from what it describes."""

from __future__ import annotations

import re
from pathlib import Path

from readme import measured, verdicts

from megamoe.dispatch.explain import support_table
from megamoe.dispatch.select import KERNELS
from megamoe.suite.results import load, passed

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_support_table_is_the_generated_one() -> None:
    found = re.search(r"<!-- support-table -->\n(.*)\n<!-- /support-table -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == support_table(), "run: python -m tests.readme to write it anew"


def test_every_command_named_exists() -> None:
    from megamoe.cli import _parser

    named = set(re.findall(r"`megamoe (\w+)", README))
    assert named
    for command in named:
        assert command in _parser().format_help(), command


def test_every_variable_is_read_in_settings() -> None:
    source = (Path(__file__).parents[1] / "megamoe" / "settings.py").read_text()
    for variable in set(re.findall(r"MEGAMOE_[A-Z_]+", README)):
        assert variable in source, variable


def test_the_verdicts_page_is_the_generated_one() -> None:
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "verdicts-h200.md").read_text()
    assert page == verdicts(docs / "verdicts" / "h200"), "run: python -m tests.readme"


def test_the_page_of_measurements_is_the_generated_one() -> None:
    docs = Path(__file__).parents[1] / "docs"
    assert (docs / "bench-h200.md").read_text() == measured(docs), "run: python -m tests.readme"


def test_a_datasheet_claims_the_hardware_it_was_judged_on() -> None:
    found = load(Path(__file__).parents[1] / "docs" / "verdicts" / "h200")
    for kernel in KERNELS:
        name = kernel.sheet.name
        judged = {f"H200 EP{world}" for which, world in found if which == name}
        if name != "reference":
            assert set(kernel.sheet.hardware) == judged, name


def test_every_record_passed() -> None:
    for (kernel, world), cases in load(
        Path(__file__).parents[1] / "docs" / "verdicts" / "h200"
    ).items():
        for name, entry in cases.items():
            assert passed(entry), (kernel, world, name, entry.get("message"))
