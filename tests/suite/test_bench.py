"""The benchmark without a GPU: what it refuses to time, what it writes, and how it counts."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated import device as fake
from emulated import emulated
from rich.console import Console

import megamoe
from megamoe import oracle
from megamoe.cli import main
from megamoe.dispatch.machine import H20, H200, probe
from megamoe.dispatch.startup import Memory, Rig
from megamoe.errors import BadInput
from megamoe.formats import CATALOGUE, Format
from megamoe.kernels.base import Batch
from megamoe.kernels.reference import Reference
from megamoe.kernels.sm90_pull_bf16 import Sm90PullBf16
from megamoe.kernels.torch_grouped import TorchGrouped
from megamoe.problem import Placement
from megamoe.reference import synthetic
from megamoe.suite import bench, cases, run, timing
from megamoe.suite.cases import Shape
from megamoe.suite.pool import Outcome

TINY = Shape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, capacity=6)
WIDE = dataclasses.replace(TINY, hidden_size=256, intermediate_size=64, num_experts=4)


class Fake:
    """A clock that calls once and answers from a list, over and over."""

    def __init__(self, *seconds: float) -> None:
        self.answers: Iterator[float] = itertools.cycle(seconds)
        self.asked: list[int] = []

    def device(self, call: Callable[[], Any], count: int) -> float:
        self.asked.append(count)
        call()
        return next(self.answers)

    host = device


def state(clock: timing.Clock) -> timing.State:
    return timing.State(torch.device("cpu"), None, clock)


def measured(kernel: str, clock: timing.Clock, shape: Shape = TINY, **more: Any) -> dict[str, Any]:
    return timing.measure(
        lambda phase: None, 0, 1, state=state(clock), kernel=kernel,
        **{"shape": shape, "tokens": shape.capacity, "seconds": 0.0, **more},
    )  # fmt: skip


# --- on a rank ------------------------------------------------------------------------------------


def test_contenders_are_judged_and_timed_in_turns() -> None:
    clock = Fake(0.002)
    record = measured("reference", clock)
    assert record["status"] == "timed"
    assert list(record["times"]) == list(record["host_us"]) == ["forward", "torch_grouped"]
    assert record["times"]["forward"] == {
        "median_ms": 2.0, "quartiles_ms": [2.0, 2.0], "halves_ms": [2.0, 2.0],
        "samples": timing.ROUNDS[0],
    }  # fmt: skip
    assert record["host_us"]["forward"] == 2000.0
    for name in ("forward", "torch_grouped"):
        assert record["verdicts"][name]["right"]
        assert record["verdicts"][name]["recipe"]
        assert record["verdicts"][name]["tokens"] == TINY.capacity
    assert "calling FlashInfer by hand is not implemented for reference" in record["notes"]
    json.dumps(record)  # it goes through a pipe and into a file


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reference.run

    def wrong(self: Reference, batch: Batch, out: torch.Tensor) -> None:
        right(self, batch, out)
        out[-1] *= 1.5

    monkeypatch.setattr(Reference, "run", wrong)
    clock = Fake(1.0)
    record = measured("reference", clock)
    assert record["status"] == "wrong"
    assert not record["verdicts"]["forward"]["right"]
    assert record["message"]
    assert clock.asked == []
    assert "times" not in record


def test_a_wrong_contender_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchGrouped.run

    def wrong(self: TorchGrouped, batch: Batch, out: torch.Tensor) -> None:
        right(self, batch, out)
        out[0] = 0

    monkeypatch.setattr(TorchGrouped, "run", wrong)
    record = measured("reference", Fake(1.0))
    assert record["status"] == "timed"
    assert list(record["times"]) == ["forward"]
    assert any("torch_grouped is wrong" in note for note in record["notes"])


def test_a_contender_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TorchGrouped, batch: Batch, out: torch.Tensor) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(TorchGrouped, "run", broken)
    record = measured("reference", Fake(1.0))
    assert list(record["times"]) == ["forward"]
    assert "a contender failed: ValueError: planted" in record["notes"]


def test_the_baseline_is_not_timed_against_itself() -> None:
    record = measured("torch_grouped", Fake(1.0))
    assert list(record["times"]) == ["forward"]


def test_verdicts_are_made_once_for_the_same_rows() -> None:
    shared = state(Fake(1.0))
    for capacity in (6, 6, 9):
        shape = dataclasses.replace(TINY, capacity=capacity)
        timing.measure(
            lambda phase: None, 0, 1, state=shared, kernel="torch_grouped", shape=shape, tokens=6,
            seconds=0.0,
        )  # fmt: skip
    assert len(shared.yardsticks) == 1
    assert len(shared.experts) == 1


@pytest.mark.parametrize(("top_k", "experts"), [(6, 64), (1, 5), (4, 4), (3, 7)])
def test_routing_is_balanced_and_repeats_no_expert_in_a_row(top_k: int, experts: int) -> None:
    for tokens in (0, 1, 3, experts, 5 * experts):
        ids = timing.balanced(tokens, top_k, experts, seed=1)
        assert ids.shape == (tokens, top_k)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert int(counts.max() - counts.min()) <= 1


def test_random_routing_repeats_no_expert_in_a_row_and_hits_fewer_experts() -> None:
    ids = timing.scattered(8, 6, 64, seed=1)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert 20 < len(ids.unique()) < len(timing.balanced(8, 6, 64, seed=1).unique()) == 48
    many = torch.bincount(timing.scattered(4096, 6, 64, seed=1).flatten(), minlength=64)
    assert int(many.min()) > 256  # each is likely: 384 on average
    shape = dataclasses.replace(TINY, num_experts=64, top_k=6)
    hit = {
        routing: timing.make_tokens(shape, 8, 0, 1, torch.device("cpu"), routing).hit
        for routing in timing.ROUTINGS
    }
    assert 20 < hit["random"] < hit["balanced"] == 48


def test_the_step_s_work_adds_up_over_ranks() -> None:
    shape = dataclasses.replace(TINY, num_experts=8, top_k=3)
    parts = [timing.make_tokens(shape, 5, rank, 4, torch.device("cpu")) for rank in range(4)]
    assert sum(part.slots for part in parts) == 4 * 5 * 3
    assert [part.hit for part in parts] == [2] * 4
    assert not torch.equal(parts[0].topk.ids, parts[1].topk.ids)


@pytest.mark.parametrize("fmt", CATALOGUE, ids=str)
def test_a_rank_without_experts_has_weights_of_their_shapes(fmt: Format) -> None:
    shape = dataclasses.replace(TINY, hidden_size=256, intermediate_size=128, fmt=fmt.name)
    some, none = (timing.make_experts(shape, n, torch.device("cpu")) for n in ([0, 1], []))
    request = cases.request_of(shape, Placement.contiguous(2, 3), Reference, 4)
    last = synthetic.layers(request, lambda n: synthetic.expert(request, n, 0, "cpu"))[2].experts
    for empty in (none, last):
        assert empty.count == 0
        for ours, theirs in ((empty.w13, some.w13), (empty.w2, some.w2)):
            assert (ours.format, ours.row_groups) == (theirs.format, theirs.row_groups)
            assert ours.shape == (0, *theirs.shape[1:])


@pytest.mark.parametrize("name", oracle.CLASSES)
def test_every_class_of_inputs_has_room_for_more_ranks_than_experts(name: str) -> None:
    shape = dataclasses.replace(TINY, num_experts=2, top_k=1)
    request = cases.request_of(shape, Placement.contiguous(2, 3), Reference, 6)
    inputs = oracle.CLASSES[name](request, Reference.recipe(request), 0, "cpu")
    assert [rank.experts.count for rank in inputs.ranks] == [1, 1, 0]
    assert oracle.yardstick(inputs, Reference.recipe(request)) is not None


def test_judged_rows_replace_rows_of_the_batch_that_is_timed() -> None:
    shape = dataclasses.replace(TINY, num_experts=32, top_k=2)
    batch = timing.make_tokens(shape, 200, 0, 1, torch.device("cpu"))
    mixed = timing.with_judged(batch, shape, 0)
    assert mixed.judged is not None
    assert len(set(mixed.judged.tolist())) == timing.JUDGED_TOKENS
    experts = set(mixed.topk.ids[mixed.judged].flatten().tolist())
    assert experts == set(timing.judged_experts(shape)) == set(range(0, 32, 4))
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[mixed.judged] = False
    assert torch.equal(mixed.x[untouched], batch.x[untouched])
    assert torch.equal(mixed.topk.ids[untouched], batch.topk.ids[untouched])


def test_bursts_last_about_as_long_and_rounds_fill_the_time() -> None:
    clock = Fake(0.001)
    called = dict.fromkeys("ab", lambda: None)
    samples = timing.in_turns(called, state(clock), 0.1)
    assert clock.asked[:2] == [3, 3]
    assert set(clock.asked[2:]) == {5}
    assert {name: len(values) for name, values in samples.items()} == {"a": 10, "b": 10}


def test_turns_begin_with_each_contender_in_turn() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.in_turns(calls, state(Fake(1.0)), 0.0)
    assert "".join(order[6:15]) == "abcbcacab"


def test_a_clock_of_the_host_measures() -> None:
    assert timing.HostClock().device(lambda: time.sleep(0.01), 3) >= 0.01


# --- FlashInfer by hand ---------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """FlashInfer's layers in the order they are made; each shows how it was configured."""
    found: list[Any] = []
    construct = fake.MegaLayer.__init__

    def shown(self: Any, device: Any, bootstrap: Any, fleet: Any, weights: Any, mega: Any) -> None:
        construct(self, device, bootstrap, fleet, weights, mega)
        self._bootstrap, self._fleet_params, self._mega_config = bootstrap, fleet, mega
        found.append(self)

    monkeypatch.setattr(fake.MegaLayer, "__init__", shown)
    return found


def test_by_hand_is_flashinfer_s_own_layer_over_our_weights(made: list[Any]) -> None:
    shape = run.shape_of(Sm90PullBf16, WIDE)
    with emulated() as device:
        record = measured("sm90_pull_bf16", Fake(1.0), shape)
    assert list(record["times"]) == ["forward", "by hand", "torch_grouped"]
    assert all(v["right"] and v["recipe"] for v in record["verdicts"].values())
    ours, hand = made
    assert hand._mega_config.quantize_input
    assert hand._mega_config.transformed_weights is ours._mega_config.transformed_weights
    assert hand.key == ours.key  # one workspace
    assert device.open_workspaces == 0
    assert ours.destroyed
    assert hand.destroyed


def test_a_flashinfer_that_shows_no_configuration_is_said() -> None:
    shape = run.shape_of(Sm90PullBf16, WIDE)
    with emulated():
        record = measured("sm90_pull_bf16", Fake(1.0), shape)
    assert list(record["times"]) == ["forward", "torch_grouped"]
    assert "this FlashInfer's layer does not show how it was configured" in record["notes"]


# --- several workspaces ---------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, Any]]:
    """(capacity, knobs) of each workspace asked for; without knobs it is FlashInfer's default."""
    monkeypatch.setattr(Memory, "held", {})  # of no other test
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    asked: list[tuple[int, Any]] = []
    create = fake.MegaLayer.create_workspace

    def noted(self: Any, capacity: int, *, knobs: Any = None) -> Any:
        asked.append((capacity, knobs))
        return create(self, capacity, knobs=knobs or fake.candidates("bf16", capacity)[0])

    monkeypatch.setattr(fake.MegaLayer, "create_workspace", noted)
    return asked


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The capacity of each launch."""
    found: list[int] = []
    launch = fake.MegaLayer.launch

    def noted(self: Any, workspace: Any, bound: int | None) -> None:
        found.append(workspace.capacity)
        launch(self, workspace, bound)

    monkeypatch.setattr(fake.MegaLayer, "launch", noted)
    return found


@pytest.mark.parametrize(("fast", "chosen"), [(6, 6), (2, 2)])
def test_the_measured_workspace_and_the_smallest_are_timed_beside_each_other(
    fast: int, chosen: int, made: list[Any], opened: list[tuple[int, Any]], launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Rig, "step", lambda rig, space, n: 1.0 if space.capacity == fast else 2.0)
    shape = dataclasses.replace(run.shape_of(Sm90PullBf16, WIDE), capacity=6)
    clock = Fake(1.0)
    with emulated() as device:
        record = measured(
            "sm90_pull_bf16", clock, shape, tokens=2, workspaces=(2, 3), tuning="workspaces"
        )
    assert device.open_workspaces == 0
    names = ["forward", "smallest", "by hand", "torch_grouped"]
    assert list(record["times"]) == list(record["host_us"]) == list(record["verdicts"]) == names
    assert all(v["right"] and v["recipe"] for v in record["verdicts"].values())
    held = record["workspaces"]
    assert held["capacity"] == {"forward": chosen, "smallest": 2}
    assert held["choice"]["capacities"] == [2, 3, 6]
    assert held["steps_measured"] > 0
    assert {tactic["source"] for tactic in held["tactics"].values()} == {"default"}
    assert [capacity for capacity, _ in opened] == [2, 3, 6, 2]
    assert [knobs is None for _, knobs in opened] == [False, False, False, True]
    assert made[1]._fleet_params.max_tokens_per_rank == 2
    last = launched[-3 * timing.HOST_ROUNDS :]  # the host's times: all contenders in turn
    assert last == [chosen, 2, 2] * timing.HOST_ROUNDS
    json.dumps(record)


def test_tactics_are_measured_where_asked(
    opened: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(9, -1)
    monkeypatch.setattr(Rig, "time", lambda rig: float(next(seconds)))  # the last one wins
    monkeypatch.setattr(Rig, "step", lambda rig, space, n: 1.0)
    with emulated():
        record = measured(
            "sm90_pull_bf16", Fake(1.0), run.shape_of(Sm90PullBf16, WIDE), tokens=2,
            workspaces=(2,), tuning="on",
        )  # fmt: skip
    tactics = record["workspaces"]["tactics"]
    assert {c: t["source"] for c, t in tactics.items()} == {"2": "tuned", "6": "tuned"}
    assert tactics["2"]["knobs"]["tile"] == [256, 64]
    assert record["workspaces"]["capacity"] == {"forward": 2, "smallest": 2}


# --- records, ratios, floors ----------------------------------------------------------------------


def rank_record(milliseconds: float, *, right: bool = True) -> dict[str, Any]:
    figures = {"quartiles_ms": [1.0, 2.0], "halves_ms": [1.0, 1.0], "samples": 5}
    return {
        "status": "timed" if right else "wrong",
        "message": "row 3 is wrong",
        "verdicts": {
            name: {
                "right": right, "recipe": right, "tokens": 4, "share": 0.9, "share_floor": 0.5,
                "worst_of_budget": 0.7, "message": "" if right else "row 3 is wrong",
            }
            for name in ("forward", "by hand")
        },
        "notes": ["said"],
        "weight_bytes": 43 * 10**8,
        "operations": 79 * 10**10,
        "times": {
            name: {"median_ms": milliseconds * factor, **figures}
            for name, factor in (
                ("forward", 1.0), ("by hand", 1.5), ("forward graph", 2.0), ("torch_grouped", 4.0),
            )
        },
        "host_us": {"forward": 100.0, "by hand": 70.0},
    }  # fmt: skip


HEAD = {"kernel": "k", "tokens": 8, "operand_bits": 16}


def test_ranks_become_one_record() -> None:
    outcome = Outcome(status="done", values={0: rank_record(1.0), 1: rank_record(2.0)})
    entry = bench.finished(HEAD | bench.merged(outcome), bench.H200)
    assert entry["times"]["forward"]["median_ms"] == 1.0
    assert entry["times"]["forward"]["max_over_ranks_ms"] == 2.0
    assert entry["verdicts"]["forward"]["tokens"] == 8
    assert entry["notes"] == ["said"]
    assert entry["ratios"] == {"by hand / forward": 1.5, "torch_grouped / forward": 4.0}
    assert entry["host_added_us"] == 30.0
    assert entry["floor"] == {
        "bytes_ms": 1.0, "operations_ms": 1.0, "ms": 1.0, "forward_over_floor": 4.0,
    }  # fmt: skip


def test_floors_follow_the_operands_bits() -> None:
    work = {"weight_bytes": 0, "operations": 158 * 10**10}
    assert bench.floor({"operand_bits": 16, **work}, bench.H200)["ms"] == 2.0
    assert bench.floor({"operand_bits": 8, **work}, bench.H200)["ms"] == 1.0
    assert bench.rates_of(H200) is bench.H200
    assert bench.rates_of(H20) is None


def test_one_wrong_rank_makes_the_configuration_wrong() -> None:
    outcome = Outcome(status="done", values={0: rank_record(1.0), 1: rank_record(1.0, right=False)})
    entry = bench.finished(HEAD | bench.merged(outcome), None)
    assert entry["status"] == "wrong"
    assert not entry["verdicts"]["forward"]["right"]
    assert "not timed (wrong): row 3 is wrong" in bench.line(entry)


def test_the_table_and_notes_show_every_configuration() -> None:
    timed = bench.finished(
        HEAD | bench.merged(Outcome(status="done", values={0: rank_record(1.0)})), bench.H200
    )
    hung = HEAD | {"tokens": 64, "status": "hung", "message": "no answer within 5 s"}
    document = {
        "machine": "NVIDIA H200", "world_size": 1, "date": "today", "configurations": [timed, hung],
    }  # fmt: skip
    console = Console(width=190, file=io.StringIO())
    console.print(bench.table(document))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for cell in ("1.000+-0.500", "1.50", "4.00", "not timed: hung", "right, this recipe", "100"):
        assert cell in text, cell
    assert "…" not in text
    assert bench.workspaces(document) is None
    assert bench.notes(document) == ["k at 8: said", "k at 64: no answer within 5 s"]
    assert bench.anything_timed(document)
    assert not bench.everything_timed(document)


def test_a_second_table_shows_the_workspaces() -> None:
    record = rank_record(1.0)
    for name, factor in (("smallest", 1.25), ("smallest graph", 2.5)):
        record["times"][name] = record["times"]["forward"] | {"median_ms": factor}
    record["workspaces"] = {"capacity": {"forward": 4096, "smallest": 64}}
    entry = bench.finished(HEAD | bench.merged(Outcome(status="done", values={0: record})), None)
    assert entry["ratios"]["smallest / forward"] == 1.25
    assert entry["ratios"]["smallest graph / forward graph"] == 1.25
    hung = HEAD | {"status": "hung", "message": "no answer"}
    console = Console(width=190, file=io.StringIO())
    console.print(bench.workspaces({"configurations": [entry, hung]}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for cell in ("4096", "64", "1.250+-0.500", "2.500+-0.500", "1.25", "1.50"):
        assert cell in text, cell


# --- the command ----------------------------------------------------------------------------------


def task(phase: Any, rank: int, world: int, *, tokens: int, **_: Any) -> dict[str, Any]:
    phase("acting")
    if tokens == 2:
        raise RuntimeError("planted")
    if tokens == 3:
        time.sleep(600)
    return rank_record(float(tokens))


@pytest.mark.slow
def test_what_fails_or_hangs_is_recorded_and_the_next_configuration_runs(tmp_path: Path) -> None:
    plan = bench.Plan(
        kernels=(Reference, Sm90PullBf16), tokens=(1, 2, 3, 4), shape=TINY, timeout=3.0
    )
    written: list[int] = []
    file = tmp_path / "folder" / "bench.json"

    def tell(line: str) -> None:
        written.append(len(json.loads(file.read_text())["configurations"]))

    document = bench.bench(plan, probe("cpu"), file=file, tell=tell, task=task)
    assert json.loads(file.read_text()) == document
    assert document["complete"]
    entries = document["configurations"]
    assert [e["status"] for e in entries] == ["timed", "raised", "hung", "timed"] + ["refused"] * 4
    assert "planted" in entries[1]["message"]
    assert "rank 0 acting" in entries[2]["message"]
    assert "needs a CUDA GPU" in entries[4]["message"]
    assert written == list(range(1, 9))  # while it went on
    assert {"date", "machine", "versions", "world_size", "rates"} <= set(document)
    assert not bench.everything_timed(document)


def test_plans_name_what_does_not_fit() -> None:
    for tokens, capacity in (((0,), None), ((8, 64), 32)):
        with pytest.raises(BadInput):
            bench.Plan(kernels=(Reference,), tokens=tokens, capacity=capacity)
    for more in ({"capacity": 64}, {"workspaces": (0,)}):
        with pytest.raises(BadInput, match="--capacity" if "capacity" in more else "--workspaces"):
            bench.Plan(kernels=(Reference,), tokens=(8,), **{"workspaces": (64,), **more})
    plan = bench.Plan(kernels=(Reference,), tokens=(8, 4096), workspaces=(64, 512))
    assert [shape.capacity for _, _, shape in plan.configurations()] == [512, 4096]
    assert plan.tuning == "workspaces"
    assert dataclasses.replace(plan, tune=True).tuning == "on"
    assert bench.Plan(kernels=(Reference,)).tuning is None
    shapes = {
        tokens: shape.capacity
        for _, tokens, shape in bench.Plan(kernels=(Reference,), capacity=4096).configurations()
    }
    assert shapes == dict.fromkeys(bench.TOKENS, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (3, 2)])
def test_the_command_on_several_ranks(
    ranks: int, experts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    arguments = f"--hidden 64 --intermediate 32 --experts {experts} --top-k 2 --tokens 6"
    code = main(
        ["bench", "--kernel", "reference", *arguments.split(), "--seconds-per-config", "0",
         "--timeout", "200", "--json", str(file), "--world-size", str(ranks)]
    )  # fmt: skip
    assert code == 0
    (entry,) = json.loads(file.read_text())["configurations"]
    assert entry["verdicts"]["forward"]["tokens"] == 6 * ranks
    assert entry["ratios"]["torch_grouped / forward"] > 0
    assert "reference, 6 tokens: forward" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_with_workspaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    file = tmp_path / "bench.json"
    arguments = "--hidden 64 --intermediate 32 --experts 8 --top-k 2 --tokens 3 --workspaces 4 6"
    code = main(
        ["bench", "--kernel", "reference", *arguments.split(), "--seconds-per-config", "0",
         "--timeout", "200", "--world-size", "2", "--json", str(file), "--routing", "random"]
    )  # fmt: skip
    assert code == 0
    document = json.loads(file.read_text())
    assert document["routing"] == "random"
    (entry,) = document["configurations"]
    assert entry["workspaces"]["capacity"]["smallest"] == 4
    assert entry["ratios"]["smallest / forward"] > 0
    assert "milliseconds a layer, by workspace" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_timed_and_the_command_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA GPU is here")
    assert main(["bench", "--tokens", "8"]) == 2
    captured = capsys.readouterr()
    assert "no configuration could be timed here" in captured.err
    assert "needs a CUDA GPU" in captured.out
    assert main(["bench", "--kernel", "no_such_kernel"]) == 2
    assert main(["bench", "--tokens", "eight"]) == 2


# --- the scripts ----------------------------------------------------------------------------------


def script(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_fresh_process_answers_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    answering = script("first_answer")
    given = [
        "--hidden",
        "256",
        "--intermediate",
        "128",
        "--experts",
        "4",
        "--top-k",
        "2",
        "--tokens",
        "5",
        "--device",
        "cpu",
    ]
    options = answering.arguments(given)
    path = answering.write_checkpoint(tmp_path / "made", answering.FORMATS[name], options, "cpu")
    weights = megamoe.load(path, 0)
    assert weights.experts.w13.format is answering.FORMATS[name]
    assert weights.shared is not None
    result = answering.in_fresh_process(path, tmp_path / "caches", given, 200.0)
    assert result["right"]
    assert result["recipe"]
    assert result["repeat_equal"]
    assert {f"{step}_s" for step in answering.STEPS} <= set(result)
    assert "first answer after" in answering.told(result)


def test_a_process_that_never_answers_is_ended_and_said(tmp_path: Path) -> None:
    answering = script("first_answer")
    result = answering.in_fresh_process(tmp_path / "nothing", tmp_path / "caches", [], 0.01)
    assert result["failed"].startswith("no end within")
    assert "FAILED" in answering.told(result)


def test_without_a_gpu_no_first_answer_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["first_answer.py"])
    assert script("first_answer").main() == 1
    assert "nothing was timed" in capsys.readouterr().out


def test_the_shared_expert_is_timed_once_its_bits_are_right(
    opened: list[tuple[int, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    beside = script("shared_expert")
    monkeypatch.setattr(timing, "ROUNDS", (4, 4))  # the last call of a token count is any of them
    sizes = "--hidden 256 --intermediate 64 --experts 4 --top-k 2 --shared 64 --tokens 2 5"
    given = [*sizes.split(), "--kernel", "sm90_pull_bf16", "--seconds", "0"]
    with emulated() as device:
        beside.main(given)
    assert device.open_workspaces == 0
    assert sorted(capacity for capacity, _ in opened) == [2, 5]
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [list(row["times"]) for row in record["rows"]] == [list(beside.WAYS)] * 2

    monkeypatch.setattr(beside.SharedFFN, "__call__", lambda self, x: torch.zeros_like(x))
    with emulated(), pytest.raises(AssertionError, match="adds nothing"):
        beside.main(given)
