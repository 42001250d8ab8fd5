"""The command line, as a person would use it: what it prints and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megamoe.checkpoint import write_demo
from megamoe.cli import main
from megamoe.dispatch.models import MODELS
from megamoe.dispatch.select import KERNELS


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_demo_shows_decision_digest_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "demo", "--device", "cpu", "--tokens", "16")
    assert "reference (by preference)" in text
    assert all(f"not {kernel.sheet.name}:" in text for kernel in KERNELS[:-1])
    assert re.search(r"digest [0-9a-f]{16}", text)
    assert "right: yes, 16 of 16 tokens" in text
    assert "this recipe (bf16, weight at combine): yes, 100.000 %" in text


def test_demo_has_one_digest_on_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "demo", "--device", "cpu")
    assert "digest b856440e2d34bea3" in text


def test_demo_on_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_demo(tmp_path / "c", seed=3))
    text = printed(
        capsys, "demo", "--checkpoint", path, "--layer", "1", "--device", "cpu", "--tokens", "8"
    )
    assert "layer 1 loaded (qwen3_moe" in text
    assert "right: yes" in text


def test_demo_without_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[0, 256]" in printed(capsys, "demo", "--device", "cpu", "--tokens", "0")


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "demo", "--checkpoint", str(tmp_path), "--device", "cpu")
    assert said.startswith("megamoe demo: ")
    assert "config.json" in said
    assert len(said.strip().split("\n")) == 1
    assert "is below 0" in refused(capsys, "demo", "--tokens", "-1", "--device", "cpu")
    assert "is unknown" in refused(capsys, "explain", "no-such-model")
    assert "is unknown" in refused(capsys, "check", "--kernel", "none")


def test_a_traceback_only_if_asked() -> None:
    with pytest.raises(ValueError, match="is unknown"):
        main(["--traceback", "explain", "no-such-model"])


def interrupt(*_: object) -> str:
    raise KeyboardInterrupt


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamoe.dispatch.doctor.report", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "megamoe doctor: interrupted\n"


COMMAND = (sys.executable, "-m", "megamoe.cli")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""argparse swallows its own writes' failures, but never the buffer's."""


@pytest.mark.parametrize("command", ["explain --table", "explain deepseek-v3", "--help"])
def test_a_reader_that_leaves_ends_it_quietly(command: str) -> None:
    gone, out = os.pipe()
    os.close(gone)
    ended = subprocess.run(
        [*COMMAND, *command.split()], stdout=out, stderr=subprocess.PIPE, env=BUFFERED
    )
    os.close(out)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["explain --table", "doctor", "--version"])
def test_a_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            env=BUFFERED,
        )  # fmt: skip
    assert ended.returncode == 2
    assert "No space left" in ended.stderr
    assert len(ended.stderr.strip().split("\n")) == 1


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(numbers: list[str]) -> list[str]:
    return [number for number in numbers if Path("/proc", number).exists()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_no_folders_and_no_ranks(name: str, tmp_path: Path) -> None:
    number = signal.Signals[name]
    ended = subprocess.Popen(
        [*COMMAND, "check", "--kernel", "reference"], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    until(lambda: list(tmp_path.glob("megamoe-pool-*/rank0.log")))
    children = Path(f"/proc/{ended.pid}/task/{ended.pid}/children").read_text().split()
    assert processes(children)
    ended.send_signal(number)
    _, said = ended.communicate(timeout=60)
    assert ended.returncode == 128 + number
    assert "Traceback" not in said
    assert list(tmp_path.glob("megamoe-pool-*")) == []
    until(lambda: not processes(children))


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "foo", "meta", "cpu:1:2"])
def test_a_device_that_is_not_here_is_refused(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(capsys, "demo", "--device", device)
    assert said == f"megamoe demo: --device '{device}' is not on this machine; use one of cpu\n"


def test_a_demo_of_too_many_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tokens 99999999999 is above" in refused(capsys, "demo", "--tokens", "99999999999")


def test_a_prediction_stage_is_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_demo(tmp_path / "c"))
    for command in ("demo", "explain"):
        said = refused(capsys, command, "--checkpoint", path, "--layer", "mtp.0")
        assert "layer" in said
        assert "mtp.0" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("check --kernel reference --soak 2 --soak-from -3", "--soak-from -3 is below"),
        ("check --kernel reference --soak 0", "--soak 0 is below 1 step"),
        ("check --kernel reference --soak-seed 0", "--soak-seed 0 means nothing without --soak"),
        ("check --kernel reference --soak-from 3", "--soak-from 3 means nothing without --soak"),
        ("check --kernel reference --soak 2 --core", "--core True means nothing beside --soak"),
        ("check --soak 2 --case full", "--case ['full'] means nothing beside --soak"),
        ("bench --timeout -5", "--timeout -5.0 is"),
        ("bench --timeout 0", "--timeout 0.0 is"),
        ("bench --timeout nan", "--timeout nan is"),
        ("bench --seconds-per-config nan", "--seconds-per-config nan is"),
        ("bench --seconds-per-config -1", "--seconds-per-config -1.0 is"),
        ("bench --seconds-per-config inf", "--seconds-per-config inf is"),
        ("bench --experts 0", "--experts 0 is below 1"),
        ("bench --experts -1", "--experts -1 is below 1"),
        ("bench --experts 4 --top-k 5 --routing random", "--top-k 5 is above 4 experts"),
    ],
)
def test_arguments_out_of_range_are_named_before_any_work(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().split("\n")) == 1


@pytest.mark.parametrize("machine", ["h200", "h20", "sm120"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", ["1", "8"])
def test_explain_every_model_on_machines_one_may_not_own(
    name: str, machine: str, world: str, capsys: pytest.CaptureFixture[str]
) -> None:  # K70
    """Exactly one choice, and a reason for each kernel that is none."""
    text = printed(capsys, "explain", name, "--machine", machine, "--world-size", world)
    verdicts = re.findall(r"^  (no|YES|also) +(\w+)", text, re.MULTILINE)
    assert [kernel for _, kernel in verdicts] == [k.sheet.name for k in KERNELS]
    assert sum(word == "YES" for word, _ in verdicts) == 1
    blocks = re.split(r"^  (?:no|YES|also) +", text, flags=re.MULTILINE)[1:]
    for (word, kernel), block in zip(verdicts, blocks, strict=True):
        assert word != "no" or len(block.strip().split("\n")) > 1, f"{kernel} gives no reason"


@pytest.mark.parametrize(
    ("name", "machine", "chosen"),
    [
        ("deepseek-v4-flash", "h200", "sm90_pull_mxfp4"),
        ("deepseek-v4-flash", "sm120", "sm120_mxfp4_split"),
        ("deepseek-v3", "h200", "sm90_push_fp8"),
        ("qwen3-30b-a3b", "h200", "sm90_pull_bf16"),
        ("mixtral-8x7b", "h20", "sm90_pull_bf16"),
        ("gpt-oss-120b", "h200", "torch_grouped"),
        ("minimax-m3", "h200", "torch_grouped"),
    ],
)
def test_what_is_chosen(
    name: str, machine: str, chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "explain", name, "--machine", machine, "--world-size", "8")
    assert re.search(rf"^  YES  {chosen}:", text, re.MULTILINE), text


def reasons(text: str) -> dict[str, tuple[str, list[str]]]:
    """By kernel: the verdict, and the lines below it."""
    parts = re.split(r"^  (no|YES|also) +(\w+).*\n", text, flags=re.MULTILINE)[1:]
    return {
        name: (word, [line.strip() for line in rest.splitlines() if line.strip()])
        for word, name, rest in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def test_explain_deepseek_v4_flash_on_a_literal_sm120_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Split or cake, each with what it asks for; every other kernel with why not."""
    ask = ("explain", "deepseek-v4-flash", "--machine", "sm120", "--world-size")
    eight, one = (reasons(printed(capsys, *ask, world)) for world in ("8", "1"))
    assert eight["sm120_mxfp4_split"][0] == one["sm120_mxfp4_split"][0] == "YES"
    assert eight["sm120_mxfp4_cake"][0] == "also"
    for name in ("sm120_mxfp4_split", "sm120_mxfp4_cake"):
        assert "note: not run on hardware" in eight[name][1]
    assert one["sm120_mxfp4_cake"] == (
        "no",
        ["runs on 2 to 32 ranks, not on 1", "holds at most 128 experts a rank, not 256"],
    )
    assert eight["sm120_mxfp8"] == (
        "no",
        [
            "does not take mxfp4 weights (takes mxfp8)",
            "does not clamp, and the layer clamps at 10",
        ],
    )
    for name, (word, lines) in eight.items():
        if name.startswith("sm90"):
            assert word == "no"
            assert any(line.startswith("needs compute capability 9.0") for line in lines), name


def test_explain_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_demo(tmp_path / "c"))
    text = printed(capsys, "explain", "--checkpoint", path, "--machine", "h200")
    assert "8 experts, top_k 2, bf16 weights" in text
    assert "is not there" in refused(
        capsys, "explain", "--checkpoint", path, "--layer", "9", "--machine", "h200"
    )


def test_doctor_names_what_each_kernel_lacks_and_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = printed(capsys, "doctor")
    assert "machine    CPU" in text
    assert "sm90_pull_bf16: needs a CUDA GPU" in text
    assert "reference: ready" in text
    assert "remedies" in text
    assert "megamoe[gpu]" in text


def test_inspect_tells_layers_and_takers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "inspect", str(write_demo(tmp_path / "c")))
    assert "family qwen3_moe" in text
    assert "layers 0 to 1" in text
    assert "on NVIDIA H200" in text
    assert "does not take bf16 weights" in text
