"""The installed FlashInfer against what our datasheets assume, by its text alone: nothing is
imported.

A field that came, went or moved its default is named; what an adapter does about it is for people.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamoe.kernels.assumed import (
    CONFIGS,
    FP4,
    FUNCTIONS,
    RECORDS,
    REQUIRED,
    SM90,
    SM120,
    SOURCES,
    UNUSED,
)

NAMED = {"SM90_ROUTING_PROFILE_BLOCK_PERMUTATION": "block_permutation_v1"}


def installed_root() -> Path | None:
    """The folder of the installed FlashInfer package, without importing it."""
    spec = importlib.util.find_spec("flashinfer")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def differences(root: Path, records: Mapping[str, Mapping[str, Any]] = RECORDS) -> list[str]:
    """One sentence for each fact of ``records`` that FlashInfer's files under ``root`` deny."""
    return [sentence for name in records for sentence in _compare(root, name, records[name])]


def registry_differences(root: Path) -> list[str]:
    """Kernels of our architectures that FlashInfer no longer registers, or newly does."""
    ours = {str(fields["kernel_name"]) for fields in CONFIGS.values()}
    theirs = registered(root)
    return [
        *(f"kernel {name}: no longer registered" for name in sorted(ours - theirs)),
        *(f"kernel {name}: registered, and no adapter of ours" for name in sorted(theirs - ours)),
    ]


def registered(root: Path) -> set[str]:
    """The names under which FlashInfer registers its SM90 and SM120 mega kernels."""
    found: set[str] = set()
    for folder in (SM90, SM120):
        for file in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            constants = {
                target.id: node.value.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_mega_kernel":
                    name = node.args[0]
                    value = constants.get(name.id) if isinstance(name, ast.Name) else (
                        ast.literal_eval(name)
                    )  # fmt: skip
                    found.add(str(value))
    return found


def _compare(root: Path, name: str, ours: Mapping[str, Any]) -> list[str]:
    try:
        theirs = dataclass_fields(root, SOURCES[name], name)
    except (OSError, StopIteration, SyntaxError):
        return [f"{name}: not found in {SOURCES[name]}"]
    found = []
    for field in sorted((ours.keys() | theirs.keys()) - UNUSED.get(name, set())):
        if field not in theirs:
            found.append(f"{name}.{field}: gone")
        elif field not in ours:
            found.append(f"{name}.{field}: new, default {_say(theirs[field])}")
        elif theirs[field] != ours[field]:
            found.append(
                f"{name}.{field}: default {_say(theirs[field])}, assumed {_say(ours[field])}"
            )
    return found


def _say(value: Any) -> str:
    return "none: it is required" if value is REQUIRED else repr(value)


def dataclass_fields(root: Path, source: str, name: str) -> dict[str, Any]:
    """Fields and defaults of a dataclass in that file, inherited ones too; a ClassVar takes one
    back.
    """
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
            found[field] = _default(line.value)
    return found


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return REQUIRED
    if isinstance(value, ast.Call):  # field(default=...), or a factory, kept as its text
        keywords = {k.arg: k.value for k in value.keywords}
        return _default(keywords["default"]) if "default" in keywords else ast.unparse(value)
    if isinstance(value, ast.Name):
        return NAMED.get(value.id, value.id)
    if isinstance(value, ast.Attribute):  # a member of an enumeration
        return ast.unparse(value)
    return ast.literal_eval(value)


def function_differences(
    root: Path, functions: Mapping[str, tuple[str, tuple[str, ...]]] = FUNCTIONS
) -> list[str]:
    """Functions that are gone, or take other parameters."""
    found = []
    for name, (source, ours) in functions.items():
        try:
            theirs = parameters(root, source, name)
        except (OSError, StopIteration, SyntaxError):
            found.append(f"{name}: not found in {source}")
            continue
        if theirs != ours:
            found.append(f"{name}: takes {', '.join(theirs)}; assumed {', '.join(ours)}")
    return found


def parameters(root: Path, source: str, name: str) -> tuple[str, ...]:
    """Of a function, or of a class's method, in that file; keyword-only ones last."""
    nodes: list[ast.stmt] = ast.parse((root / source).read_text(encoding="utf-8")).body
    *owners, last = name.split(".")
    for owner in owners:
        nodes = next(n.body for n in nodes if isinstance(n, ast.ClassDef) and n.name == owner)
    node = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == last)
    return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def changes(root: Path) -> list[str]:
    """Everything that is not as assumed."""
    return differences(root) + function_differences(root) + registry_differences(root)


def report(root: Path | None, version: str | None) -> str:
    """What `megamoe doctor --flashinfer` prints."""
    if root is None:
        return "FlashInfer is not installed: pip install 'megamoe[gpu]'"
    lines = [f"FlashInfer {version or 'of unknown version'}; our datasheets assume 0.7.4"]
    found = changes(root)
    if not found:
        rest = f"{len(FUNCTIONS)} functions and {len(CONFIGS)} registered kernels"
        return "\n".join([*lines, f"all {len(RECORDS)} records, {rest} are as assumed"])
    lines += [f"  {sentence}" for sentence in found]
    lines.append("judge the kernels again (megamoe check) before relying on them")
    return "\n".join(lines)
