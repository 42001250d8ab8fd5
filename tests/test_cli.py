"""The command line, as a person would use it: what it prints and how it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
