"""Several workspaces, tuned at start, and experts exchanged in place: over the emulated device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from emulated import emulated, run_ranks
from emulated.layers import Layer
from kernels.test_adapters_mutants import BY_NAME, CLAMPED, WEIGHTS, case
from torch import Tensor

import megamoe
from megamoe.dispatch.cache import Cache
from megamoe.dispatch.fingerprint import checksum
from megamoe.dispatch.startup import Memory, Rig
from megamoe.errors import BadInput, MegaMoEError, RankFailure, Unsupported
from megamoe.kernels.mega import MegaKernel, PullWorkspace
from megamoe.kernels.packs import tensors_of
from megamoe.problem import MoEWeights, Placement

PULL = ("sm90_pull_bf16", "sm90_pull_fp8", "sm90_pull_mxfp4", "sm90_pull_nvfp4")
CAPACITIES = (2, 3, 4)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    with mock.patch.object(Memory, "held", {}):
        yield


def short(kernel: str) -> Layer:
    """At most two tokens a rank."""
    layer = case(kernel)
    return dataclasses.replace(layer, ids=tuple(rows[:2] for rows in layer.ids))


def prepare(
    layer: Layer, rank: int, weights: MoEWeights | None = None, **more: Any
) -> megamoe.PreparedWeights:
    return megamoe.prepare(
        weights or layer.held(rank),
        dist.group.WORLD if layer.world > 1 else None,
        max_tokens_per_rank=layer.capacity,
        top_k=layer.top_k,
        kernel=layer.kernel,
        activation_scales=layer.activation_scales,
        on_failure="raise",
        **more,
    )


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


# --- workspaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [name for name in WEIGHTS if "nvfp4" not in name])
def test_a_step_runs_in_the_workspace_that_its_maximum_chooses(kernel: str) -> None:
    layer = short(kernel)

    def work(rank: int) -> None:
        used: list[int] = []
        ready = prepare(layer, rank, workspaces=CAPACITIES[:-1], tuning="off")
        assert [space.capacity for space in ready._spaces] == list(CAPACITIES)
        ready.warmup()
        for space in ready._spaces:
            real = space.run

            def run(batch: Any, out: Any, real: Any = real, space: Any = space) -> None:
                used.append(space.capacity)
                real(batch, out)

            space.run = run  # type: ignore[method-assign]
        want = layer.expected(rank, ready.decision.recipe)
        for most, served in ((2, 2), (3, 3), (4, 4), (None, 4), (5, 3), (9, 3)):
            used.clear()
            assert same(ready.forward(layer.x(rank), layer.topk(rank), max_tokens=most), want)
            assert set(used) == {served}
        ready.close()

    with emulated(layer.machine) as device:
        run_ranks(layer.world, work)
    assert device.open_workspaces == 0


def test_layers_of_one_geometry_share_workspaces_and_the_last_frees_them() -> None:
    first = short("sm90_pull_fp8")
    second = dataclasses.replace(first, seed=9)

    def work(rank: int) -> None:
        a, b = (prepare(c, rank, workspaces=(2,), tuning="off") for c in (first, second))
        for ready in (a, b):
            ready.warmup()
        for _ in range(2):
            for ready, c in ((a, first), (b, second)):
                for most in (2, 4):
                    y = ready.forward(c.x(rank), c.topk(rank), max_tokens=most)
                    assert same(y, c.expected(rank, ready.decision.recipe))
        dist.barrier()
        assert device.open_workspaces == 2 * first.world
        a.close()
        dist.barrier()
        assert device.open_workspaces == 2 * first.world
        y = b.forward(second.x(rank), second.topk(rank))
        assert same(y, second.expected(rank, b.decision.recipe))
        b.close()

    with emulated() as device:
        run_ranks(first.world, work)
    assert device.open_workspaces == 0


def test_a_workspace_above_the_capacity_and_ranks_that_disagree_are_refused() -> None:
    layer = case("sm90_pull_fp8")
    with pytest.raises(BadInput, match="capacities 64 is not a list of token counts"), emulated():
        run_ranks(2, lambda rank: prepare(layer, rank, workspaces=64))
    with pytest.raises(BadInput, match="workspaces 5 is above max_tokens_per_rank 4"), emulated():
        run_ranks(2, lambda rank: prepare(layer, rank, workspaces=(5,)))
    with pytest.raises(RankFailure, match="disagree on workspaces"), emulated():
        run_ranks(2, lambda rank: prepare(layer, rank, workspaces=(2 + rank,)))


def test_one_rank_whose_start_fails_half_way_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*given: Any) -> None:
        raise MegaMoEError("no memory")

    for kernel in ("sm90_pull_fp8", "sm90_standalone_mxfp4"):
        base = case(kernel)
        layer = dataclasses.replace(base, placement=Placement.contiguous(4, 1), ids=base.ids[:1])
        adapter: Any = BY_NAME[kernel]
        real = adapter.open

        def scarce(self: Any, capacity: int, *more: Any, real: Any = real) -> Any:
            return refuse() if capacity == 4 else real(self, capacity, *more)

        with emulated() as device, monkeypatch.context() as patch:
            patch.setattr(adapter, "open", scarce)
            with pytest.raises(MegaMoEError, match="no memory"):
                prepare(layer, 0, workspaces=(2,), tuning="off")
            assert device.open_workspaces == 0
            patch.setattr(adapter, "open", real)
            prepare(layer, 0, workspaces=(2,), tuning="off").close()
            assert device.open_workspaces == 0


# --- tuning ---------------------------------------------------------------------------------------


def test_a_start_that_cannot_be_is_refused_in_one_line() -> None:
    layer = dataclasses.replace(
        case("sm90_pull_fp8"), placement=Placement.contiguous(4, 1), ids=(((0, 1), (2, 3)),)
    )
    x, topk = layer.x(0), layer.topk(0)
    outside = dataclasses.replace(topk, ids=topk.ids + 1)
    with emulated() as device:
        for more, words in (
            ({"tuning": "bogus"}, "tuning 'bogus' is unknown; use 'on', 'workspaces', 'cached'"),
            ({"samples": (x[:, 1:], topk)}, r"samples: x of shape \[2, 255\] is not"),
            ({"samples": (x.float(), topk)}, "samples: x of torch.float32 is not bfloat16"),
            ({"samples": (x[:1], topk)}, "samples: topk.ids of 2 tokens do not match x of 1"),
            ({"samples": (x, outside)}, r"samples: topk.ids 4 is outside \[-1, 4\)"),
        ):
            with pytest.raises(BadInput, match=words):
                prepare(layer, 0, **more)
        assert device.open_workspaces == 0


def started(layer: Layer, tuning: str) -> Any:
    """(counts, tactics, outputs) by rank, of a whole life; no file is touched in a forward."""
    found: dict[int, Any] = {}
    serving = threading.local()

    def guarded(real: Any) -> Any:
        def touched(*given: Any) -> Any:
            assert not getattr(serving, "now", False), "the cache is touched in a forward"
            return real(*given)

        return touched

    def work(rank: int) -> None:
        ready = prepare(layer, rank, workspaces=(2,), tuning=tuning)
        ready.warmup()
        serving.now = True
        steps = (2, 4, None, 7)
        ys = [ready.forward(layer.x(rank), layer.topk(rank), max_tokens=most) for most in steps]
        serving.now = False
        found[rank] = ready.started, ready.tactics, ys
        ready.close()

    with (
        emulated(layer.machine) as device,
        mock.patch.object(Cache, "read", guarded(Cache.read)),
        mock.patch.object(Cache, "write", guarded(Cache.write)),
    ):
        run_ranks(layer.world, work)
    assert device.open_workspaces == 0
    return found


@pytest.mark.parametrize("kernel", PULL)
def test_a_cold_start_tunes_and_a_warm_one_does_not(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    layer = short(kernel)
    off = started(layer, "off")
    assert (off[0][0].tactics, off[0][0].steps, off[0][0].read) == (0, 0, 0)
    assert not list(tmp_path.iterdir())
    cold = started(layer, "on")
    assert cold[0][0].tactics == 2 * 3  # of two capacities, three candidates each
    assert cold[0][0].steps > 0
    again = started(layer, "on")  # the same process, the next layer
    Memory.held.clear()
    warm = started(layer, "on")  # another process
    for counts, tactics, _ in (again[0], warm[0]):
        assert (counts.tactics, counts.steps, counts.written) == (0, 0, 0)
        assert {c: t.knobs for c, t in tactics.items()} == {
            c: t.knobs for c, t in cold[0][1].items()
        }
    for rank in range(layer.world):
        for mine in (cold, again, warm):
            assert all(same(a, b) for a, b in zip(mine[rank][2], off[rank][2], strict=True))


def test_a_tactic_with_other_bits_is_left_out_however_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    times = {64: 1.0, 128: 0.5, 256: 0.1}  # by tile

    def seconds(self: Rig, call: Any) -> float:
        call()
        space: Any = self.space
        return 1.0 if space is None else times[space.tactic["tile"][0]]

    monkeypatch.setattr(Rig, "_seconds", seconds)
    for wrong, taken in (((), 256), ((256,), 128), ((256, 128), 64)):
        Memory.held.clear()
        monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / str(taken)))
        with mock.patch("emulated.device.WRONG_TILES", set(wrong)):
            found = started(short("sm90_pull_fp8"), "on")
        for tactic in found[0][1].values():
            assert tactic.knobs["tile"][0] == taken
            assert len(tactic.failed) == len(wrong)
            assert all("gives other bits than the default" in why for why in tactic.failed)


def test_a_tactic_wrong_on_one_rank_alone_is_left_out_and_no_rank_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other rank, which sees nothing wrong, launches on: the one that does has to as well."""
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("emulated.cluster.TIMEOUT_S", 5.0)
    real = PullWorkspace.run

    def run(self: Any, batch: Any, out: Tensor) -> None:
        real(self, batch, out)
        if self.tactic["tile"][0] == 256 and self.space.layer.context.rank == 1:
            out.add_(1)

    def seconds(self: Rig, call: Any) -> float:
        call()
        space: Any = self.space
        return 1.0 if space is None else 1.0 / float(space.tactic["tile"][0])

    monkeypatch.setattr(Rig, "_seconds", seconds)
    monkeypatch.setattr(PullWorkspace, "run", run)
    found = started(short("sm90_pull_fp8"), "on")
    for tactic in found[0][1].values():
        assert tactic.knobs["tile"][0] == 128
        assert tactic.failed[0].startswith("rank 1: MegaMoEError: gives other bits")


def test_representative_rows_are_repeated_or_cut_and_idle_ranks_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = dataclasses.replace(case("sm90_pull_bf16"), ids=(((0, 1), (2, 3), (-1, 2)), ()))
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    real = Rig.rows

    def rows(self: Rig, tokens: int) -> Any:
        found = real(self, tokens)
        assert [len(t) for t in found] == [tokens] * 3
        seen[self.staging.rank].append(found[0])
        return found

    monkeypatch.setattr(Rig, "rows", rows)

    def work(rank: int) -> None:
        samples = layer.x(rank), layer.topk(rank)
        ready = prepare(layer, rank, workspaces=(2,), tuning="workspaces", samples=samples)
        ready.warmup()
        ready.close()

    with emulated():
        run_ranks(2, work)
    mine = layer.x(0)
    for x in seen[0]:
        assert torch.equal(x, mine.repeat(2, 1)[: len(x)])
    assert all(bool((x != 0).any()) for x in seen[1])


# --- experts that move ----------------------------------------------------------------------------


def pointers(ready: megamoe.PreparedWeights) -> list[int]:
    """Of the staging tables and of every tensor of the pack."""
    kernel: Any = ready._kernel
    pack = kernel.layer.transformed if isinstance(kernel, MegaKernel) else kernel.packed
    found = [
        t.data_ptr() for t in tensors_of((ready._staging.replicas, ready._staging.counts, pack))
    ]
    assert len(found) >= 4
    return found


MOVABLE = [name for name in WEIGHTS if name != "sm120_mxfp4_cake"]


@pytest.mark.parametrize("kernel", MOVABLE)
def test_other_experts_in_other_places_between_two_steps(kernel: str) -> None:  # K66
    """Nothing that a graph could have captured moves: not a pointer, not a staging table."""
    before = case(kernel, limit=1.0 if kernel in CLAMPED else None)
    slots = tuple(tuple(reversed(held)) for held in reversed(before.placement.slots))
    widest = max(map(len, before.placement.slots))
    slots = tuple((*held, *[-1] * (widest - len(held))) for held in slots)
    after = dataclasses.replace(before, seed=77, placement=Placement(num_experts=4, slots=slots))

    def work(rank: int) -> None:
        old, new = before.held(rank), after.held(rank)  # of which nothing is written over
        kept = [checksum(*experts.experts.tensors) for experts in (old, new)]
        ready = prepare(before, rank, old, most_replicas=4)
        ready.warmup()
        held = pointers(ready)
        recipe = ready.decision.recipe
        for layer, experts in [(after, new), (before, old)] * 2:
            ready.update(experts)
            y = ready.forward(layer.x(rank), layer.topk(rank))
            assert same(y, layer.expected(rank, recipe))
        assert [checksum(*experts.experts.tensors) for experts in (old, new)] == kept
        assert pointers(ready) == held
        ready.close()

    with emulated(before.machine):
        run_ranks(before.world, work)


@pytest.mark.parametrize("kernel", ["reference", "torch_grouped", "sm90_pull_fp8"])
def test_a_layer_of_experts_to_come_keeps_none_of_the_callers_bytes(kernel: str) -> None:
    """A caller may load the next layer's experts into the tensors it passed."""
    one = {"placement": Placement.contiguous(4, 1), "ids": (((0, 1), (2, 3)),), "kernel": kernel}
    before = dataclasses.replace(case("sm90_pull_fp8"), **one)
    after = dataclasses.replace(before, seed=77)
    with emulated():
        ready = prepare(before, 0, held := before.held(0), most_replicas=1)
        for layer in (before, after):
            if layer is after:
                ready.update(held := after.held(0))
            for tensor in held.experts.tensors:
                tensor.view(torch.uint8).zero_()
            y = ready.forward(layer.x(0), layer.topk(0))
            assert same(y, layer.expected(0, ready.decision.recipe))
        ready.close()


def test_what_cannot_be_exchanged_is_refused_and_the_layer_goes_on() -> None:
    layer = dataclasses.replace(
        case("sm90_pull_fp8"), placement=Placement.contiguous(4, 2), ids=(((0, 1),), ((2, 3),))
    )
    moved = dataclasses.replace(layer, placement=Placement(num_experts=4, slots=((1, 0), (3, 2))))
    fewer = dataclasses.replace(layer, placement=Placement(num_experts=4, slots=((0, 1, 2), (3,))))
    narrow = dataclasses.replace(layer, activation=megamoe.Activation(limit=3.0))

    def work(rank: int) -> None:
        fixed = prepare(layer, rank)
        with pytest.raises(BadInput, match="prepare it with most_replicas"):
            fixed.update(moved.held(rank))
        fixed.close()
        ready = prepare(layer, rank, most_replicas=1)
        for other, words in (
            (fewer, r"is not the layer's \(4, 2, 2\)"),
            (narrow, "weights' activation"),
        ):
            with pytest.raises(BadInput, match=words):
                ready.update(other.held(rank))
        with pytest.raises(BadInput, match="are not rank"):
            ready.update(layer.held(1 - rank))
        y = ready.forward(layer.x(rank), layer.topk(rank))
        assert same(y, layer.expected(rank, ready.decision.recipe))
        ready.close()

    with emulated():
        run_ranks(2, work)


def test_ranks_that_expect_other_exchanges_are_refused() -> None:
    """Also where the placement's own replicas make their tables as wide."""
    slots = ((0, 1, 2, 3), (0, 1, 2, 3))
    base = case("sm90_pull_fp8")
    layer = dataclasses.replace(base, placement=Placement(num_experts=4, slots=slots))
    words = r"disagree on most_replicas \(None on rank 0, 2 on rank 1\)"
    with pytest.raises(RankFailure, match=words), emulated():
        run_ranks(2, lambda rank: prepare(layer, rank, most_replicas=(None, 2)[rank]))


def test_more_replicas_than_prepared_for_are_refused() -> None:
    layer = case("sm90_pull_fp8")
    with pytest.raises(BadInput, match="exceeds most_replicas 1"), emulated():
        run_ranks(2, lambda rank: prepare(layer, rank, most_replicas=1))


def test_cake_says_that_it_cannot_and_goes_on() -> None:
    layer = case("sm120_mxfp4_cake")

    def work(rank: int) -> None:
        ready = prepare(layer, rank, most_replicas=2)
        with pytest.raises(Unsupported, match="cannot exchange its experts in place"):
            ready.update(layer.held(rank))
        y = ready.forward(layer.x(rank), layer.topk(rank))
        assert same(y, layer.expected(rank, ready.decision.recipe))
        ready.close()

    with emulated(layer.machine) as device:
        run_ranks(layer.world, work)
    assert device.open_workspaces == 0


def test_experts_that_one_rank_cannot_pack_are_written_on_no_rank() -> None:
    layer = case("sm90_pull_bf16")
    other = dataclasses.replace(layer, seed=77)
    adapter: Any = BY_NAME["sm90_pull_bf16"]
    real = adapter.pack

    def work(rank: int) -> None:
        ready = prepare(layer, rank, most_replicas=2)
        refused.add(rank)
        dist.barrier()
        words = "are no BF16 numbers" if rank == 1 else "rank 1 raised Unsupported"
        with pytest.raises(MegaMoEError, match=words):
            ready.update(other.held(rank))
        for after in (layer, other):
            y = ready.forward(after.x(rank), after.topk(rank))
            assert same(y, after.expected(rank, ready.decision.recipe))
            refused.discard(rank)
            dist.barrier()
            if after is layer:
                ready.update(other.held(rank))
        ready.close()

    refused: set[int] = set()

    def pack(experts: Any, context: Any) -> Any:
        if context.rank == 1 and refused:
            raise Unsupported("values are no BF16 numbers")
        return real(experts, context)

    with emulated(), mock.patch.object(adapter, "pack", staticmethod(pack)):
        run_ranks(2, work)
