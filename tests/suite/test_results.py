"""Files of records: written whole, and refused before the work where they cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megamoe.cli import main
from megamoe.errors import BadInput
from megamoe.suite import results
from megamoe.suite.pool import Pool

BENCH = ("bench", "--kernel", "reference", "--tokens", "4", "--json")
CHECK = ("check", "--kernel", "reference", "--case", "idle rank", "--results")
SOAK = ("check", "--kernel", "reference", "--soak", "1", "--results")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task may be sent to a rank."""

    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("a task was run")

    monkeypatch.setattr(Pool, "run", run)


def made(folder: Path, what: str) -> Path:
    """A path that no record can be written to, or whose records cannot be read."""
    path = folder / "there"
    if what == "below a file":
        path.write_text("")
        return path / "below"
    if what == "a file":
        path.write_text("")
    elif what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        for inside in (path, path / "soak"):
            inside.mkdir()
            (inside / "reference-world1.json").write_text(what)
    return path


CUT, LIST = '{"idle rank": {"status"', "[1, 2]"


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (BENCH, "below a file"),
        (BENCH, "a folder"),
        (BENCH, "a pipe"),
        *((command, what) for command in (CHECK, SOAK)
          for what in ("below a file", "a file", CUT, LIST)),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_before_the_first_task(
    command: tuple[str, ...], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path, what)
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert len(said.strip().split("\n")) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_records_are_added_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        results.store(folder, "k", 2, name, {"value": value})
    assert results.load(folder) == {("k", 2): {"a": {"value": 3}, "b": {"value": 2}}}
    assert [file.name for file in folder.iterdir()] == ["k-world2.json"]


def test_a_write_that_fails_leaves_the_records_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.store(tmp_path, "k", 1, "a", {"value": 1})
    (file,) = tmp_path.iterdir()
    before = file.read_text()

    def full(self: Path, text: str) -> None:
        with self.open("w") as half:
            half.write(text[:5])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadInput, match=r"k-world1\.json .*No space left"):
        results.store(tmp_path, "k", 1, "b", {"value": 2})
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", [CUT, LIST, "\udcff"])
def test_records_that_cannot_be_read_are_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "k-world1.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    for act in (
        lambda: results.load(tmp_path),
        lambda: results.store(tmp_path, "k", 1, "a", {}),
    ):
        with pytest.raises(BadInput, match=r"k-world1\.json .*; restore it or move it away"):
            act()


def test_a_file_of_another_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "k-worldwide.json").write_text(json.dumps({}))
    with pytest.raises(BadInput, match=r"k-worldwide\.json"):
        results.load(tmp_path)
