"""The cache: what was written comes back, and whatever else lies there is a warning and a miss."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamoe.dispatch.cache import Cache, Key, digest, plain
from megamoe.dispatch.machine import H200
from megamoe.formats import MXFP4
from megamoe.problem import Activation, Host, Machine, Placement, Request

REQUEST = Request(
    hidden_size=256,
    intermediate_size=128,
    placement=Placement.contiguous(8, 2),
    top_k=2,
    max_tokens_per_rank=64,
)
VALUE = {"knobs": {"swap_ab": True, "mma_tiler_mnk": (128, 8, 64)}, "seconds": 0.5}


def key(request: Request = REQUEST, machine: Machine = H200, **changed: Any) -> Key:
    made = Key.of("tactic", "sm90_pull_bf16", request, machine, gpu="GPU-1", capacities=(64,))
    return dataclasses.replace(made, **changed)


@pytest.fixture(autouse=True)
def _no_unasked_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_was_written_comes_back_as_plain_json(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "made" / "here")
    assert cache.read(key()) is None
    assert cache.write(key(), VALUE)
    assert Cache(tmp_path / "made" / "here").read(key()) == plain(VALUE)
    assert [p.name for p in (tmp_path / "made" / "here").iterdir()] == [key().file]
    assert cache.write(key(), {"knobs": {}})
    assert cache.read(key()) == {"knobs": {}}


def test_without_a_folder_nothing_is_kept() -> None:
    cache = Cache(None)
    assert not cache.write(key(), VALUE)
    assert cache.read(key()) is None


@pytest.mark.parametrize(
    "other",
    [
        key(gpu="GPU-2"),
        key(what="choice"),
        key(kernel="sm90_pull_fp8"),
        key(capacities=(128,)),
        key(capacities=(32, 64)),
        key(megamoe="0.0.0"),
        *(
            key(machine=dataclasses.replace(H200, **{name: "other"}))
            for name in ("name", "driver", "cuda", "torch", "flashinfer", "nvshmem")
        ),
        *(
            key(machine=dataclasses.replace(H200, **{name: 2}))
            for name in ("multiprocessors", "ranks_per_gpu")
        ),
        *(
            key(request=dataclasses.replace(REQUEST, **{name: value}))
            for name, value in (
                ("hidden_size", 512),
                ("intermediate_size", 256),
                ("placement", Placement.contiguous(8, 4)),
                ("placement", Placement.contiguous(16, 2)),
                ("top_k", 4),
                ("weights", MXFP4),
                ("w2_weights", MXFP4),
                ("activation", Activation(limit=7.0)),
                ("host", Host(deterministic=False)),
            )
        ),
    ],
    ids=lambda k: k.file,
)
def test_another_key_is_a_miss(tmp_path: Path, other: Key) -> None:
    cache = Cache(tmp_path)
    cache.write(key(), VALUE)
    assert other.file != key().file
    assert cache.read(other) is None


def test_the_request_s_own_capacity_does_not_count() -> None:
    assert key(dataclasses.replace(REQUEST, max_tokens_per_rank=4096)) == key()


def written(folder: Path) -> Path:
    Cache(folder).write(key(), VALUE)
    return folder / key().file


def test_a_file_cut_anywhere_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):  # the last byte is a line's end
        path.write_bytes(whole[:length])
        with pytest.warns(RuntimeWarning, match=rf"{path} .*; delete it$"):
            assert Cache(tmp_path).read(key()) is None
    path.write_bytes(whole)
    assert Cache(tmp_path).read(key()) == plain(VALUE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"key": null, "value": {}}',
        b"[" * 100_000,
        json.dumps({"key": key().to_json(), "value": [], "digest": digest([])}).encode(),
        json.dumps({"key": key().to_json(), "value": {"knobs": 1}, "digest": "0"}).encode(),
        json.dumps({"key": key(gpu="x").to_json(), "value": {}, "digest": digest({})}).encode(),
        json.dumps({"key": key().to_json(), "value": {"knobs": math.nan}}).encode(),
        json.dumps({"key": key().to_json(), "value": {"knobs": 0.707}})
        .replace("0.707", "1e999")
        .encode(),
        json.dumps({"key": key().to_json(), "value": {}, "digest": math.inf}).encode(),
    ],
    ids=range(13),
)
def test_a_foreign_file_is_ignored_with_a_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / key().file
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="delete it") as caught:
        assert Cache(tmp_path).read(key()) is None
    (message,) = (str(w.message) for w in caught)
    assert str(path) in message
    assert "\n" not in message
    assert Cache(tmp_path).write(key(), VALUE)  # and the next measurement mends it
    assert Cache(tmp_path).read(key()) == plain(VALUE)


def test_a_folder_in_the_file_s_place_is_ignored_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / key().file).mkdir()
    with pytest.warns(RuntimeWarning, match="delete it"):
        assert Cache(tmp_path).read(key()) is None
    with pytest.warns(RuntimeWarning, match="MEGAMOE_CACHE_DIR"):
        assert not Cache(tmp_path).write(key(), VALUE)
    assert not list(tmp_path.glob(".*"))  # the temporary file went


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.read(key()) is None
    with pytest.warns(RuntimeWarning, match=r"file/cache cannot be written .*; set MEGAMOE_CACHE"):
        assert not cache.write(key(), VALUE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everything")
def test_a_folder_without_permission_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.chmod(0)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert Cache(tmp_path).read(key()) is None
    tmp_path.chmod(0o500)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            assert not Cache(tmp_path).write(key(), VALUE)
    finally:
        tmp_path.chmod(0o700)


def _writer(folder: str, number: int) -> None:
    cache = Cache(Path(folder))
    for turn in range(50):
        assert cache.write(key(), {"writer": number, "turn": turn, "filler": "x" * 5000})
        found = cache.read(key())
        assert found is not None
        assert len(found["filler"]) == 5000


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_writer, args=(str(tmp_path), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = Cache(tmp_path).read(key())
    assert found is not None
    assert found["turn"] == 49
    assert [p.name for p in tmp_path.iterdir()] == [key().file]


def test_the_digest_knows_values_not_their_order_or_kind_of_list() -> None:
    assert digest({"a": (1, 2), "b": None}) == digest({"b": None, "a": [1, 2]})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    assert len(digest({})) == 64
    with pytest.raises(ValueError, match="JSON"):
        digest({"a": float("nan")})


def test_a_file_s_name_says_what_it_is() -> None:
    assert key().file.startswith("sm90_pull_bf16-tactic-64-")
    assert key(what="choice", capacities=(64, 256)).file.startswith("sm90_pull_bf16-choice-256-")
