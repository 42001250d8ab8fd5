"""Calls judged in production: caught at the Nth and not before, and judged anew from a bundle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.shares import Problem
from parallel.work import finish, run, setup
from safetensors.torch import save_file
from strategies import Case
from torch import Tensor

import megamoe
from megamoe import bundle as bundle_file
from megamoe import parity
from megamoe.cli import main
from megamoe.dispatch.select import KERNELS
from megamoe.errors import BadInput, Mismatch
from megamoe.formats import FP8_BLOCK32, MXFP4, NVFP4, PLAIN_BF16
from megamoe.kernels.base import Batch
from megamoe.kernels.reference import Reference
from megamoe.oracle import Inputs
from megamoe.problem import Activation, Placement, TopK
from megamoe.reference.case import output
from megamoe.reference.moe import Emulated
from megamoe.suite.pool import Pool

CASE = Case(tokens=6, experts=4, hidden_size=64, intermediate_size=32, seed=3)
EVERY = (  # each thing that a bundle has to hold
    CASE,
    dataclasses.replace(CASE, weights=MXFP4, activation=Activation(limit=0.3)),
    dataclasses.replace(CASE, weights=NVFP4, routed_scaling_factor=2.5, weight_at="fc2_input"),
    dataclasses.replace(CASE, weights=FP8_BLOCK32, shared=32, shared_activation=Activation()),
    dataclasses.replace(
        CASE, bias=True, activation=Activation(alpha=1.7020000219345093, up_offset=1.0)
    ),
    dataclasses.replace(CASE, routed_scaling_factor=4.0, scale_at="output", scaled=True),
)
honest_run = Reference.run


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARITY", "DUMP", "FORCE_REFERENCE", "KERNEL"):
        monkeypatch.delenv(f"MEGAMOE_{name}", raising=False)


def asked(patch: pytest.MonkeyPatch, every: int, dump: Path | None = None) -> None:
    patch.setenv("MEGAMOE_PARITY", str(every))
    if dump is not None:
        patch.setenv("MEGAMOE_DUMP", str(dump))


def plant(patch: pytest.MonkeyPatch, token: int = 2, factor: float = 2.0) -> None:
    """A kernel that multiplies one token's row."""

    def wrong(self: Reference, batch: Batch, out: Tensor) -> None:
        honest_run(self, batch, out)
        out[token] *= factor

    patch.setattr(Reference, "run", wrong)


def layer(case: Case = CASE, **more: Any) -> megamoe.PreparedWeights:
    return megamoe.prepare(case.layer(), max_tokens_per_rank=8, top_k=case.top_k, **more)


def bundle_of(patch: pytest.MonkeyPatch, folder: Path, case: Case = CASE) -> Path:
    """What the first call of a wrong kernel leaves."""
    asked(patch, 1, folder)
    plant(patch)
    ready = layer(case)
    with pytest.raises(Mismatch) as raised:
        ready.forward(case.x(), case.topk())
    (path,) = folder.iterdir()
    assert f"megamoe replay {path}" in str(raised.value)
    return path


# --- judging --------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_caught_at_the_nth_call_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked(monkeypatch, 3)
    plant(monkeypatch)
    ready = layer()
    for number in range(1, 7):
        if number % 3:
            ready.forward(CASE.x(), CASE.topk())
            continue
        with pytest.raises(Mismatch, match=rf"^call {number}: .*token 2\b") as raised:
            ready.forward(CASE.x(), CASE.topk())
        assert "replay" not in str(raised.value)


@pytest.mark.parametrize("case", EVERY, ids=lambda c: str(c.weights) + c.scale_at)
def test_a_right_kernel_passes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    honest = parity.measure
    monkeypatch.setattr(parity, "measure", lambda *a: (judged.append(a), honest(*a))[1])
    asked(monkeypatch, 2)
    with layer(case) as ready:
        for number in range(20):
            kept = slice(0, number % (case.tokens + 1))  # no token at all among them
            topk = case.topk()
            part = TopK(ids=topk.ids[kept], weights=topk.weights[kept], scaled=topk.scaled)
            ready.forward(case.x()[kept], part)
    assert len(judged) == 10


def test_weights_are_judged_as_the_kernel_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_grouped rounds to BF16 what is no BF16 number; its datasheet says so."""
    asked(monkeypatch, 1)
    case = dataclasses.replace(CASE, weights=FP8_BLOCK32)
    with layer(case, kernel="torch_grouped") as ready:
        ready.forward(case.x(), case.topk())
    monkeypatch.setattr(ready.decision.kernel, "as_computed", classmethod(lambda cls, e: e))
    with layer(case, kernel="torch_grouped") as ready, pytest.raises(Mismatch):
        ready.forward(case.x(), case.topk())


def test_raw_weights_are_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, 2)
    plant(monkeypatch)
    weights = CASE.layer()
    megamoe.forward(CASE.x(), CASE.topk(), weights)
    with pytest.raises(Mismatch):
        megamoe.forward(CASE.x(), CASE.topk(), weights)


def test_what_entered_is_judged_whatever_the_kernel_does_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(self: Reference, batch: Batch, out: Tensor) -> None:
        batch.x.mul_(2)
        honest_run(self, batch, out)

    asked(monkeypatch, 1)
    monkeypatch.setattr(Reference, "run", wrong)
    ready = layer()
    with pytest.raises(Mismatch):
        ready.forward(CASE.x(), CASE.topk())


def test_it_is_read_at_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    ready = layer()
    asked(monkeypatch, 1)
    ready.forward(CASE.x(), CASE.topk())
    ready = layer()
    monkeypatch.delenv("MEGAMOE_PARITY")
    with pytest.raises(Mismatch):
        ready.forward(CASE.x(), CASE.topk())


def test_bad_ids_make_a_judged_call_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, 2)
    with layer() as ready:
        ready._staging.sticky.fill_(True)  # as staging on a GPU does
        ready.forward(CASE.x(), CASE.topk())
        with pytest.raises(BadInput, match="that call's output is invalid"):
            ready.forward(CASE.x(), CASE.topk())
        ready.check()


def test_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, 5)
    ready = layer()
    ready._check_capture()
    ready.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BadInput, match=r"judged on the host \(MEGAMOE_PARITY\)"):
        ready._check_capture()


# --- several ranks --------------------------------------------------------------------------------

SPLIT = Problem(
    case=Case(
        tokens=6, experts=3, top_k=2, hidden_size=32, intermediate_size=32, shared=32,
        weights=MXFP4, routed_scaling_factor=2.5, seed=11,
    ),
    placement=Placement(num_experts=3, slots=((2, 0), (1,))),
    counts=(4, 2),
    ids=tuple((t % 3, -1 if t % 4 == 3 else (t + 1) % 3) for t in range(6)),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "MEGAMOE_PARITY": "2"}
    with Pool(2, setup=setup, finish=finish, environment=environment) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [None, "ids_off_by_one_rank"])
def test_two_ranks_judge_their_own_tokens(pair: Pool, mutant: str | None) -> None:
    """The experts of both, uneven, stand on each; ``run`` calls twice."""
    outcome = pair.run(run, timeout=120.0, problem=SPLIT, mutant=mutant)
    if mutant is None:
        assert outcome.status == "done", f"{outcome}\n{outcome.log}"
        return
    assert outcome.status == "raised", outcome
    assert "Mismatch: call 2: " in str(outcome)


# --- bundles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY, ids=lambda c: str(c.weights) + c.scale_at)
def test_a_bundle_holds_the_failing_token_and_replays(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_file.read(bundle_of(monkeypatch, tmp_path, case))
    x, topk, weights = case.x(), case.topk(), case.layer()
    assert bundle.tokens == (2,)
    assert (bundle.kernel, bundle.batch, bundle.call) == ("reference", 6, 1)
    assert bundle.placement == weights.placement
    inputs, held = bundle.inputs, bundle.inputs.layer.placement.slots[0]
    assert torch.equal(inputs.x, x[2:3])
    assert torch.equal(inputs.topk.ids, topk.ids[2:3])
    assert torch.equal(inputs.topk.weights, topk.weights[2:3])
    assert set(held) == set(topk.ids[2].tolist()) - {-1}
    for name, tensor in bundle_file.tensors_of(inputs.layer.experts).items():
        whole = bundle_file.tensors_of(weights.experts)[name]
        assert torch.equal(
            tensor.view(torch.uint8), whole.view(torch.uint8)[list(held)]
        ), name  # fmt: skip
    request = megamoe.Request.of(weights, top_k=2, max_tokens_per_rank=8)
    assert bundle.recipe == Reference.recipe(request)
    # The bits of one token do not depend on its batch, nor on which experts stand beside its own.
    whole_y = output(Inputs(x, topk, weights), Emulated(bundle.recipe))[2:3]
    assert torch.equal(output(inputs, Emulated(bundle.recipe)), whole_y)
    assert not torch.equal(bundle.y, whole_y)
    report, found = bundle.replay()
    assert not report.right
    assert found == bundle.digest


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.sheet.name)
def test_every_recipe_survives_json(kernel: Any) -> None:
    recipe = kernel.sheet.recipe
    back = bundle_file._back(bundle_file._told(recipe))
    assert back == recipe
    assert back.mid.element is recipe.mid.element


def test_replay_of_a_wrong_and_of_a_right_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundle_of(monkeypatch, tmp_path)
    monkeypatch.undo()  # where it is replayed, kernel and environment are others
    assert main(["replay", str(path)]) == 1
    text = capsys.readouterr().out
    assert "tokens 2 of 6" in text
    assert "right: NO" in text
    assert re.search(r"reference digest [0-9a-f]{16}, as recorded", text)

    bundle = bundle_file.read(path)
    right = output(bundle.inputs, Emulated(bundle.recipe))
    repaired = tmp_path / "right.safetensors"
    dataclasses.replace(bundle, y=right).write(repaired)
    assert main(["replay", str(repaired)]) == 0
    assert "right: yes" in capsys.readouterr().out

    dataclasses.replace(bundle, y=right, digest="0" * 16).write(repaired)
    assert main(["replay", str(repaired)]) == 1
    assert "NOT the recorded" in capsys.readouterr().out


def test_a_fault_of_the_batch_takes_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the failing tokens alone would pass, the batch is kept."""
    honest = parity._failing
    monkeypatch.setattr(parity, "_failing", lambda report: honest(report) + 1)
    path = bundle_of(monkeypatch, tmp_path)
    assert bundle_file.read(path).tokens == (0, 1, 2, 3, 4, 5)


def test_the_size_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Reference, batch: Batch, out: Tensor) -> None:
        honest_run(self, batch, out)
        out *= 2

    asked(monkeypatch, 1, tmp_path)
    monkeypatch.setattr(Reference, "run", wrong)
    one = CASE.layer().experts.nbytes // CASE.experts
    monkeypatch.setattr(parity, "LIMIT", 3 * one)
    ready = layer()
    with pytest.raises(Mismatch, match="replay it with"):
        ready.forward(CASE.x(), CASE.topk())
    (path,) = tmp_path.iterdir()
    bundle = bundle_file.read(path)
    assert 0 < len(bundle.tokens) < CASE.tokens
    assert len(bundle.inputs.layer.placement.slots[0]) <= 2
    monkeypatch.setattr(parity, "LIMIT", one)
    with pytest.raises(Mismatch, match="no replay bundle: one token with its experts exceeds"):
        ready.forward(CASE.x(), CASE.topk())
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_refuses_does_not_hide_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, 1, tmp_path / "made" / "here")
    plant(monkeypatch)
    ready = layer()
    (tmp_path / "made" / "here").rmdir()
    with pytest.raises(Mismatch, match=r"^call 1: (?s:.*)no replay bundle: .* cannot be written"):
        ready.forward(CASE.x(), CASE.topk())


def test_a_dump_without_parity_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_DUMP", str(tmp_path))
    with pytest.raises(BadInput, match="set MEGAMOE_PARITY=N too"):
        layer()
    file = tmp_path / "file"
    file.touch()
    asked(monkeypatch, 1, file / "below")
    with pytest.raises(BadInput, match="cannot be made"):
        layer()


def test_broken_and_foreign_files_are_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = bundle_of(monkeypatch, tmp_path / "good")
    raw = good.read_bytes()
    files = {
        "absent": None,
        "empty": b"",
        "text": b"not a bundle at all",
        "cut": raw[:-40],
        "header cut": raw[:40],
        "damaged": raw[:-1] + bytes([raw[-1] ^ 1]),
        "other version": raw.replace(rb"\"version\": 1", rb"\"version\": 9"),
        "other kernel": raw.replace(rb"\"kernel\": \"reference\"", rb"\"kernel\": \"xeference\""),
        "no recipe": raw.replace(rb"\"recipe\": {", rb"\"xecipe\": {"),
        "unknown element": raw.replace(rb"\"Element\": \"bf16\"", rb"\"Element\": \"xf16\""),
    }
    paths = [tmp_path, tmp_path / "foreign.safetensors"]
    save_file({"x": torch.zeros(2)}, paths[1])
    for name, content in files.items():
        path = tmp_path / name
        if content is not None:
            assert content != raw, name
            path.write_bytes(content)
        paths.append(path)
    for path in paths:
        with pytest.raises(BadInput, match=r"replay bundle .* cannot be read"):
            bundle_file.read(path)
        assert main(["replay", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
    assert bundle_file.read(good).inputs.layer.experts.w13.format == PLAIN_BF16
