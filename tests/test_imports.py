"""Importing megamoe starts nothing: no kernel library is loaded and CUDA is left alone.

import-linter checks the rules between our own modules; it cannot tell an import at the top of a
file from one inside a function, which is what matters here.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megamoe"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LAZY = {"flashinfer", "nvshmem", "triton"}
"""Doors to a GPU: imported inside the function that needs them, or not at all."""

NEVER = {"jax", "transformers", "compressed_tensors", "ml_dtypes", "gfloat"}
"""No part of the package: JAX by decision, the others because they judge it."""

# A finder at the front of the path sees every attempt, also one for a package that is not installed
# and whose ImportError is swallowed. torch comes first: what it imports is not ours to answer for.
PROBE = """
import importlib.abc, json, pkgutil, sys
import torch

class Recorder(importlib.abc.MetaPathFinder):
    asked = []
    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)
        return None

before = set(sys.modules)
sys.meta_path.insert(0, Recorder())
import megamoe
if {every_module}:
    for module in pkgutil.walk_packages(megamoe.__path__, "megamoe."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
names = {{*Recorder.asked, *sys.modules}} - before
print(json.dumps({{
    "roots": sorted({{name.partition(".")[0] for name in names}}),
    "cuda": torch.cuda.is_initialized(),
}}))
"""


@pytest.mark.parametrize("every_module", [False, True], ids=["megamoe", "every_module"])
def test_import_starts_nothing(every_module: bool) -> None:
    probe = PROBE.format(every_module=every_module)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "megamoe" in seen["roots"]
    assert not (LAZY | NEVER) & set(seen["roots"])
    assert seen["cuda"] is False


def test_sources_were_found() -> None:
    assert PACKAGE / "errors.py" in SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_of_one_file(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    at_import_time = {root for node in _outside_functions(tree) for root in _roots(node)}
    anywhere = {root for node in ast.walk(tree) for root in _roots(node)}
    assert not at_import_time & LAZY, "move it into the function that needs it"
    assert not anywhere & NEVER


@pytest.mark.parametrize(
    "text",
    [
        "import triton",
        "import triton.language as tl",
        "from triton import jit",
        "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "if True:\n    import os, triton",
        "class A:\n    import triton",
    ],
)
def test_the_file_check_sees(text: str) -> None:
    assert "triton" in {r for node in _outside_functions(ast.parse(text)) for r in _roots(node)}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import triton",
        "class A:\n    def f(self):\n        import triton",
        "from . import triton",
        "if TYPE_CHECKING:\n    import triton",
        "if typing.TYPE_CHECKING:\n    import triton",
    ],
)
def test_the_file_check_allows(text: str) -> None:
    found = {root for node in _outside_functions(ast.parse(text)) for root in _roots(node)}
    assert "triton" not in found


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the file is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _outside_functions(child)


def _roots(node: ast.AST) -> set[str]:
    """Return the top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return {node.module.partition(".")[0]}
    return set()
