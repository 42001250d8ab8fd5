"""config.json with its variants: nested ``text_config``, nulls and alternative key names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.checkpoint.refuse import refuse

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Key:
    """A fact that config.json states, under one of several names.

    default: what the family means where the key is absent or null; without one it is required.
    """

    names: tuple[str, ...]
    default: Any = _REQUIRED

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED


class Config:
    """The language model's part of a config.json; ``root`` is the whole file."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "config.json"
        try:
            self.root: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise refuse(
                directory, "config.json", "absent", "a file", "point at a model's directory"
            ) from error
        except (OSError, ValueError) as error:
            raise refuse(
                self.file, "the config", f"unreadable ({error})", "JSON", "download it again"
            ) from error
        if not isinstance(self.root, dict):
            raise refuse(self.file, "the config", "no object", "a JSON object", "download it again")
        text = self.root.get("text_config")
        self.values: dict[str, Any] = text if isinstance(text, dict) else self.root

    @property
    def model_types(self) -> tuple[str, ...]:
        """The language model's type, then the wrapper's."""
        named = (self.values.get("model_type"), self.root.get("model_type"))
        return tuple(dict.fromkeys(name for name in named if isinstance(name, str)))

    def find(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first of these keys that is present and not null; two that disagree are refused."""
        found = [(n, self.values[n]) for n in names if self.values.get(n) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise refuse(
                    self.file, f"{name} {value!r}", f"not {found[0][0]} {found[0][1]!r}",
                    "two names of one fact to agree", "correct the config",
                )  # fmt: skip
        return found[0] if found else None

    def value(self, key: Key) -> tuple[str, Any]:
        """(name, value) of a fact, its default where config.json is silent and one exists."""
        found = self.find(key.names)
        if found is not None:
            return found
        if key.required:
            raise refuse(
                self.file, " or ".join(key.names), "absent", "a value: it has no safe default",
                "take config.json from the model's own repository",
            )  # fmt: skip
        return key.names[0], key.default

    def integer(self, key: Key) -> int:
        name, value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise refuse(self.file, name, repr(value), "a whole number", "correct the config")
        return value

    def number(self, key: Key) -> float:
        name, value = self.value(key)
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        except OverflowError:
            pass  # JSON's integers have no bound
        raise refuse(self.file, name, repr(value), "a number", "correct the config")

    def boolean(self, key: Key) -> bool:
        name, value = self.value(key)
        if not isinstance(value, bool):
            raise refuse(self.file, name, repr(value), "true or false", "correct the config")
        return value

    @property
    def quantization(self) -> dict[str, Any]:
        """``quantization_config`` of the text part or the root; empty where neither has one."""
        for part in (self.values, self.root):
            found = part.get("quantization_config")
            if isinstance(found, dict):
                return found
        return {}
