"""What loading one rank's share reads and holds, at EP 1, 4 and 8.

    python benchmarks/load_share.py [--experts 128] [--hidden 1024] [--width 384]

Writes a Qwen3-MoE layer to a temporary directory, drops it from the page cache and loads one rank's
experts in a fresh process each time. "asked" is what the loader asked of the files, "disk" is what
the kernel read from the device for the process (/proc/self/io; whole pages, and its readahead), and
"memory" is the peak of the anonymous memory above the start (/proc/self/status).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MB = 1e6


def proc(file: str, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


class Peak(threading.Thread):
    """The greatest RssAnon seen until stopped, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_value = self.value = 1024 * proc("status", "RssAnon")
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.001):
            self.value = max(self.value, 1024 * proc("status", "RssAnon"))

    def stop(self) -> int:
        self.ended.set()
        self.join()
        self.value = max(self.value, 1024 * proc("status", "RssAnon"))
        return self.value - self.start_value


def measure(path: Path, rank: int, world_size: int, quantise: str | None) -> dict[str, int]:
    """In a process of its own: load, and say what it took."""
    import torch

    from megamoe.checkpoint import write_demo
    from megamoe.checkpoint.config import Config
    from megamoe.checkpoint.files import Files
    from megamoe.checkpoint.layer import find_layer
    from megamoe.checkpoint.loading import format_of, load, load_layer

    with tempfile.TemporaryDirectory() as small:  # imports and first-use costs come before
        load(write_demo(small), 0, quantise=quantise)
    disk, peak = proc("io", "read_bytes"), Peak()
    peak.start()
    with Files(path) as files:
        weights = load_layer(
            find_layer(files, Config(path), 0), rank=rank, world_size=world_size, placement=None,
            device=torch.device("cpu"), target=format_of(quantise),
        )  # fmt: skip
    memory = peak.stop()
    return {
        "share": weights.experts.nbytes,
        "asked": files.bytes_read,
        "disk": proc("io", "read_bytes") - disk,
        "memory": memory,
    }


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--quantise", default=None)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        path, rank, world_size = json.loads(arguments.one)
        print(json.dumps(measure(Path(path), rank, world_size, arguments.quantise)))
        return
    from megamoe.checkpoint import write_demo

    with tempfile.TemporaryDirectory() as directory:
        path = write_demo(
            directory, hidden_size=arguments.hidden, intermediate_size=arguments.width,
            num_experts=arguments.experts, layers=1,
        )  # fmt: skip
        print(f"{arguments.experts} experts, H {arguments.hidden}, I {arguments.width}, in MB")
        print(f"{'EP':>3} {'rank':>5} {'share':>8} {'asked':>8} {'disk':>8} {'memory':>8}")
        for world_size in (1, 4, 8):
            for rank in dict.fromkeys((0, world_size - 1)):
                drop_from_cache(path)
                one = json.dumps([str(path), rank, world_size])
                command = [sys.executable, __file__, "--one", one]
                if arguments.quantise:
                    command += ["--quantise", arguments.quantise]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = json.loads(done.stdout)
                numbers = " ".join(
                    f"{row[k] / MB:8.1f}" for k in ("share", "asked", "disk", "memory")
                )
                print(f"{world_size:>3} {rank:>5} {numbers}")


if __name__ == "__main__":
    main()
