"""The one form of a checkpoint's refusals: file, tensor or key, found, expected, remedy."""

from __future__ import annotations

from pathlib import Path

from megamoe.errors import BadInput, one_line


def refuse(file: Path | str, what: str, found: object, expected: object, remedy: str) -> BadInput:
    """Return (not raise) "{file}: {what} is {found}, expected {expected}; {remedy}"."""
    return BadInput(one_line(f"{file}: {what}", f"is {found},", f"expected {expected}", remedy))
