"""What was measured on this machine, kept from one start to the next: one JSON file a key.

A file that cannot be read, written or believed is a warning and a miss, never an error: the worst
that may happen is to measure again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megamoe.errors import one_line
from megamoe.problem import Machine, Request

FORMAT = 1  # of the files; another number is another key


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a measurement holds for: this very GPU, these versions, this geometry.

    gpu: its UUID. multiprocessors and ranks_per_gpu: how much of it a rank has. capacities: one, or
    all that a choice was made among. deterministic: which tactics were admitted.
    """

    what: Literal["tactic", "choice"]
    kernel: str
    gpu: str
    gpu_name: str
    multiprocessors: int
    ranks_per_gpu: int
    driver: str | None
    cuda: str | None
    torch: str | None
    flashinfer: str | None
    nvshmem: str | None
    megamoe: str
    world_size: int
    capacities: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    experts_per_rank: int
    top_k: int
    weights: str
    w2_weights: str
    activation: str
    deterministic: bool

    @classmethod
    def of(
        cls,
        what: Literal["tactic", "choice"],
        kernel: str,
        request: Request,
        machine: Machine,
        *,
        gpu: str,
        capacities: tuple[int, ...],
    ) -> Key:
        """request: the physical one, whose own capacity is not looked at."""
        return cls(
            what=what,
            kernel=kernel,
            gpu=gpu,
            gpu_name=machine.name,
            multiprocessors=machine.multiprocessors,
            ranks_per_gpu=machine.ranks_per_gpu,
            driver=machine.driver,
            cuda=machine.cuda,
            torch=machine.torch,
            flashinfer=machine.flashinfer,
            nvshmem=machine.nvshmem,
            megamoe=_own_version(),
            world_size=request.world_size,
            capacities=capacities,
            hidden_size=request.hidden_size,
            intermediate_size=request.intermediate_size,
            experts_per_rank=request.placement.slots_per_rank,
            top_k=request.top_k,
            weights=request.weights.name,
            w2_weights=(request.w2_weights or request.weights).name,
            activation=repr(request.activation),
            deterministic=request.host.deterministic,
        )

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **plain(dataclasses.asdict(self))}

    @property
    def file(self) -> str:
        """The file's name: for people, and a digest of the whole key."""
        most = self.capacities[-1]
        return f"{self.kernel}-{self.what}-{most}-{digest(self.to_json())[:16]}.json"


class Cache:
    """A folder of such files. Safe for many processes: a file is complete or not there."""

    def __init__(self, folder: Path | None) -> None:
        """folder: made when first written to; None keeps nothing."""
        self.folder = folder

    def read(self, key: Key) -> dict[str, Any] | None:
        """What was written for ``key``; None where there is nothing, or nothing to believe."""
        if self.folder is None:
            return None
        path = self.folder / key.file
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            value = held.get("value") if isinstance(held, dict) else None
            found = digest(value)  # refuses numbers that are none, which a file may hold
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            _ignored(path, f"cannot be read ({_reason(error)})")
            return None
        if not isinstance(held, dict) or held.get("key") != key.to_json():
            _ignored(path, "is not of this machine and layer")
            return None
        if not isinstance(value, dict) or held.get("digest") != found:
            _ignored(path, "was changed since it was written")
            return None
        return value

    def write(self, key: Key, value: dict[str, Any]) -> bool:
        """Keep ``value``, plain JSON; False, with a warning, where that fails."""
        if self.folder is None:
            return False
        value = plain(value)
        held = {"key": key.to_json(), "value": value, "digest": digest(value)}
        text = json.dumps(held, indent=1, sort_keys=True, allow_nan=False) + "\n"
        path = self.folder / key.file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            warnings.warn(
                one_line(
                    "cache folder", self.folder, f"cannot be written ({_reason(error)})",
                    "set MEGAMOE_CACHE_DIR to one that can; until then every start tunes anew",
                ),
                RuntimeWarning,
                stacklevel=2,
            )  # fmt: skip
            return False
        return True


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON: what ranks compare."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists, mappings dicts."""
    return json.loads(json.dumps(value))


def _own_version() -> str:
    try:
        return importlib.metadata.version("megamoe")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _ignored(path: Path, why: str) -> None:
    warnings.warn(
        one_line("cache file", path, f"{why} and is ignored", "delete it"),
        RuntimeWarning,
        stacklevel=3,
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
