"""Every environment variable megamoe obeys, read here and nowhere else (decision D9).

This file imports nothing of ours, so a bad value is a plain `ValueError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

Said = TypeVar("Said")

ForceReference = Literal["off", "family", "emulate"]
Tuning = Literal["on", "workspaces", "cached", "off"]
"""As `dispatch.tuning` has it, which reads no settings."""

_FORCE_REFERENCE: Mapping[str, ForceReference] = {
    "": "off",
    "0": "off",
    "1": "family",
    "emulate": "emulate",
}
_TUNING: Mapping[str, Tuning] = {
    "": "workspaces",
    "on": "on",
    "workspaces": "workspaces",
    "cached": "cached",
    "off": "off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for; the defaults are those of an empty environment."""

    force_reference: ForceReference = "off"
    """`family`: run the reference, with the model family's BF16 recipe, in place of any kernel.
    `emulate`: run the reference with the recipe of the kernel that would have been chosen."""

    parity_every: int = 0
    """Judge every Nth call; 0 judges none."""

    dump_dir: Path | None = None
    """Where a failing call leaves its replay bundle. Neither created nor looked at here."""

    kernel: str | None = None
    """Name of the only kernel that may be chosen, whatever the caller named; `auto` lets the order
    of preference choose. Whether it exists is the dispatcher's to say."""

    tuning: Tuning = "workspaces"
    """What start-up may do: `on` measures what the cache lacks, kernels' tactics (minutes) and
    which workspace serves which step (seconds); `workspaces` measures only the latter; `cached`
    uses the cache and measures nothing; `off` does neither."""

    cache_dir: Path | None = None
    """Where measurements are kept from one start to the next: `megamoe` in XDG_CACHE_HOME or in
    `~/.cache` unless said. None, where there is no home directory, keeps nothing. Neither created
    nor looked at here."""


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the `MEGAMOE_*` variables, XDG_CACHE_HOME and HOME as they are at this moment; nothing
    is cached.

    An unset variable and an empty one mean the same. Raises ValueError, naming the variable, its
    value, what is accepted and the remedy.
    """
    return Settings(
        force_reference=_one_of(
            environ, "MEGAMOE_FORCE_REFERENCE", _FORCE_REFERENCE, "set it to 1 to run the reference"
        ),
        parity_every=_parity_every(environ.get("MEGAMOE_PARITY", "")),
        dump_dir=Path(dump) if (dump := environ.get("MEGAMOE_DUMP")) else None,
        kernel=environ.get("MEGAMOE_KERNEL") or None,
        tuning=_one_of(
            environ, "MEGAMOE_TUNING", _TUNING, "set it to cached to measure nothing at start-up"
        ),
        cache_dir=_cache_dir(environ),
    )


def _one_of(environ: Mapping[str, str], name: str, known: Mapping[str, Said], remedy: str) -> Said:
    value = environ.get(name, "")
    if value not in known:
        accepted = ", ".join(word for word in known if word)
        raise ValueError(f"{name}={value!r} is not one of {accepted}; {remedy}, or unset it")
    return known[value]


def _parity_every(value: str) -> int:
    # int() alone would also take "-1", "1_000" and other scripts' digits.
    if value and not (value.isascii() and value.isdecimal()):
        raise ValueError(
            f"MEGAMOE_PARITY={value!r} is not a whole number of calls, 0 or more; "
            "set it to N to judge every Nth call, or unset it"
        )
    return int(value or "0")


def _cache_dir(environ: Mapping[str, str]) -> Path | None:
    if said := environ.get("MEGAMOE_CACHE_DIR"):
        return Path(said)
    # A relative XDG_CACHE_HOME is invalid, and ignored, by the XDG specification.
    if os.path.isabs(base := environ.get("XDG_CACHE_HOME", "")):
        return Path(base, "megamoe")
    return Path(home, ".cache", "megamoe") if (home := environ.get("HOME")) else None
