"""The README cannot drift from what it describes."""

from __future__ import annotations

import re
from pathlib import Path

from megamoe.dispatch.explain import support_table

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
