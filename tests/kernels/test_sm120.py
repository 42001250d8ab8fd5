"""What the SM120 adapters promise beyond bits: bytes, buffers, steps, flags, refusals.

No SM120 GPU was ever reached; all of this is on the emulated device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from emulated import emulated, run_ranks
from emulated.layers import Layer, differences
from test_adapters_mutants import BY_NAME, MX, case

import megamoe
from megamoe.dispatch.machine import SM120
from megamoe.dispatch.select import select
from megamoe.errors import BadInput, MegaMoEError
from megamoe.formats import Quantised
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Context
from megamoe.problem import MoEWeights, Placement, Request

EACH = pytest.mark.parametrize("kernel", MX)
CAKE = "sm120_mxfp4_cake"


def evenly(kernel: str) -> Layer:
    """Four experts, held in order: no byte moves above the kernel. Cake wants two ranks."""
    world = 2 if kernel == CAKE else 1
    ids = (((0, 1), (2, -1), (-1, 3)), ((3, 0),))[:world]
    return dataclasses.replace(case(kernel), placement=Placement.contiguous(4, world), ids=ids)


def prepare(layer: Layer, weights: MoEWeights) -> megamoe.PreparedWeights:
    return megamoe.prepare(
        weights,
        dist.group.WORLD if layer.world > 1 else None,
        max_tokens_per_rank=layer.capacity,
        top_k=layer.top_k,
        kernel=layer.kernel,
        on_failure="raise",
    )


# --- bytes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def handed_over() -> Iterator[list[dict[str, torch.Tensor]]]:
    """What each rank's FlashInfer layer is given as weights, by matrix."""
    found: list[dict[str, torch.Tensor]] = []
    real = flashinfer.build

    def build(module: Any, name: str, fields: Any) -> Any:
        if name == "MoEWeightPack":
            found.append(dict(fields))
        elif name == "MegaConfig" and fields["transformed_weights"] is not None:
            (w13, w13_scale), (w2, w2_scale) = fields["transformed_weights"]
            found.append({"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale})
        return real(module, name, fields)

    with mock.patch.object(flashinfer, "build", build):
        yield found


def loaded(weights: MoEWeights) -> dict[str, torch.Tensor]:
    experts = weights.experts
    assert experts.w13.scale is not None
    assert experts.w2.scale is not None
    return {
        "w13": experts.w13.data,
        "w13_scale": experts.w13.scale,
        "w2": experts.w2.data,
        "w2_scale": experts.w2.scale,
    }


# The layouts that FlashInfer's own loaders make move w13's rows and the scales.
VIEWS = {
    "sm120_mxfp4_split": {"w2"},
    "sm120_mxfp4_cake": {"w13", "w13_scale", "w2", "w2_scale"},
    "sm120_mxfp8": {"w2"},
}


@EACH
def test_bytes_reach_the_layer_as_views_wherever_its_layout_allows(kernel: str) -> None:
    """The same addresses under other dtypes; what moves is as many bytes again, not more."""
    layer = evenly(kernel)

    def work(rank: int) -> None:
        held = layer.held(rank)
        with handed_over() if layer.world == 1 else contextlib.nullcontext(shared) as found:
            ours = loaded(held)
            prepared = prepare(layer, held)
            mine = next(f for f in found if f["w2"].data_ptr() == ours["w2"].data_ptr())
            for name, tensor in ours.items():
                same = mine[name].data_ptr() == tensor.data_ptr()
                assert same == (name in VIEWS[kernel]), name
                if name in VIEWS[kernel]:
                    assert mine[name].numel() == tensor.numel()
            assert mine["w13"].numel() == ours["w13"].numel()
            prepared.close()

    with emulated(SM120), handed_over() as shared:
        run_ranks(layer.world, work)


def test_a_layout_that_copies_says_so() -> None:
    for kernel in MX:
        said = " ".join(BY_NAME[kernel].sheet.notes)
        assert "w2 as loaded" in said or "keeps w2" in said


class Watched:
    """A tensor over memory whose end is seen: what frees the storage frees the array."""

    def __init__(self, tensor: torch.Tensor) -> None:
        raw = tensor.contiguous().view(torch.uint8).numpy().copy()
        self.gone = weakref.ref(raw)
        self.tensor = torch.from_numpy(raw).view(tensor.dtype)

    @property
    def alive(self) -> bool:
        return self.gone() is not None


def watched(q: Quantised, seen: dict[str, Watched], name: str) -> Quantised:
    assert q.scale is not None
    seen[name], seen[f"{name}_scale"] = Watched(q.data), Watched(q.scale)
    made = dataclasses.replace(q, data=seen[name].tensor, scale=seen[f"{name}_scale"].tensor)
    for w in seen.values():
        del w.tensor
    return made


@EACH
def test_loader_side_tensors_are_dropped_once_the_pack_exists(kernel: str) -> None:
    layer = evenly(kernel)

    def work(rank: int) -> tuple[Any, dict[str, Watched]]:
        held = layer.held(rank)
        seen: dict[str, Watched] = {}
        w13 = watched(held.experts.w13, seen, "w13")
        more: dict[str, Watched] = {}
        w2 = watched(held.experts.w2, more, "w2")
        seen |= more
        held = dataclasses.replace(held, experts=dataclasses.replace(held.experts, w13=w13, w2=w2))
        del w13, w2
        assert all(w.alive for w in seen.values())
        prepared = prepare(layer, held)
        y = prepared.forward(layer.x(rank), layer.topk(rank))
        assert torch.equal(y, layer.expected(rank, prepared.decision.recipe))
        return prepared, seen

    def whole(rank: int) -> None:
        prepared, seen = work(rank)
        gc.collect()
        assert {n for n, w in seen.items() if w.alive} == {"w2"}  # which is the pack
        prepared.close()
        del prepared
        gc.collect()
        if layer.world == 1:  # the emulated cluster remembers its last meetings
            assert not any(w.alive for w in seen.values())

    with emulated(SM120):
        run_ranks(layer.world, whole)


# --- buffers, buckets, steps ----------------------------------------------------------------------


def test_split_compiles_every_bucket_at_warm_up_and_none_afterwards() -> None:
    """FlashInfer compiles for each bucket and output address: whatever the caller's output and
    count are, both were met before."""
    layer = dataclasses.replace(evenly("sm120_mxfp4_split"), capacity=7)

    with emulated(SM120) as device, prepare(layer, layer.held(0)) as prepared:
        prepared.warmup()
        (warm,) = (set(what) for what in device.compiled.values())
        (space,) = prepared._spaces
        assert {bucket for bucket, _ in warm} == set(space.compiles()) == {2, 4, 7}
        assert len({address for _, address in warm}) == 1
        kept = []
        for tokens in (0, 1, 2, 3, 4, 5, 7):
            x = torch.zeros(tokens, layer.hidden, dtype=torch.bfloat16)
            topk = megamoe.TopK(
                ids=torch.zeros(tokens, 2, dtype=torch.int64),
                weights=torch.ones(tokens, 2),
                scaled=False,
            )
            for max_tokens in {None, max(tokens, 1), 7}:
                kept.append(prepared.forward(x, topk, max_tokens=max_tokens))
                kept.append(prepared.forward(x, topk, max_tokens=max_tokens, out=kept[-1].clone()))
        assert [set(what) for what in device.compiled.values()] == [warm]
        addresses = [y.data_ptr() for y in kept if y.numel()]
        assert len(set(addresses)) == len(addresses), "outputs are the caller's, each its own"


@EACH
def test_staging_and_launch_are_two_steps(kernel: str) -> None:
    """The kernel computes what was staged, whatever becomes of the inputs in between; and every
    rank announces the same bucket where the kernel wants one."""
    layer = evenly(kernel)
    steps: list[str] = []
    stage, compute = flashinfer.Space.stage, flashinfer.Space.compute

    def staged(self: Any, batch: Any, *, bucket: int | None = None) -> None:
        assert bucket == (None if kernel == "sm120_mxfp8" else layer.capacity)
        stage(self, batch, bucket=bucket)
        steps.append("stage")
        for tensor in (batch.x, batch.scales):
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in E4M3; ids and weights may be the caller's

    def launched(self: Any, out: Any, **more: Any) -> None:
        compute(self, out, **more)
        steps.append("compute")

    with (
        mock.patch.object(flashinfer.Space, "stage", staged),
        mock.patch.object(flashinfer.Space, "compute", launched),
    ):
        assert differences(layer) == []
    assert sorted(steps) == ["compute"] * layer.world + ["stage"] * layer.world


# --- cake's flag ----------------------------------------------------------------------------------


def test_a_protocol_error_is_kept_until_check_or_close() -> None:
    """The kernel clears its flag at each launch, so a later good call must not hide it."""
    layer = evenly(CAKE)

    def work(rank: int) -> None:
        prepared = prepare(layer, layer.held(rank))

        def call(faulty: bool) -> None:
            dist.barrier()
            if faulty and rank == 1:
                device.faulty.add(1)
            prepared.forward(layer.x(rank), layer.topk(rank))
            dist.barrier()
            device.faulty.discard(rank)

        def checked() -> contextlib.AbstractContextManager[Any]:
            if rank == 0:
                return contextlib.nullcontext()
            return pytest.raises(MegaMoEError, match="flagged a protocol error on this rank")

        call(False)
        prepared.check()
        call(True)
        call(False)
        with checked():
            prepared.check()
        prepared.check()
        call(True)
        with checked():
            prepared.close()

    with emulated(SM120) as device:
        run_ranks(2, work)
    assert device.open_workspaces == 0


# --- what a kernel refuses ------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "slots", [((0, 1, 2), (3,)), ((0, 1), (2, 0, 3)), ((1, 0), (2, 3))],
    ids=["uneven", "redundant", "permuted"],
)  # fmt: skip
def test_uneven_or_redundant_experts_inside_the_kernel_are_refused(
    kernel: str, slots: tuple[tuple[int, ...], ...]
) -> None:  # K33
    """``megamoe.prepare`` takes them all (test_adapters_paths); a kernel by itself takes none."""
    layer = dataclasses.replace(
        evenly(kernel), placement=Placement(num_experts=4, slots=slots), ids=((), ())
    )

    def work(rank: int) -> None:
        context = Context(
            request=Request.of(layer.held(rank), top_k=2, max_tokens_per_rank=4),
            machine=SM120,
            device=torch.device("cpu"),
            rank=rank,
            group=dist.group.WORLD,
        )
        with pytest.raises(BadInput, match="uneven, permuted or redundant experts"):
            BY_NAME[kernel].prepare(layer.held(rank), context)

    with emulated(SM120) as device:
        run_ranks(2, work)
    assert device.layers == {}


@EACH
def test_more_tokens_than_the_capacity_are_refused_before_a_launch(kernel: str) -> None:
    base = evenly(kernel)
    ids = (((0, 1), (2, -1), (-1, 3)),) * base.world
    layer = dataclasses.replace(base, capacity=2, ids=ids)

    def work(rank: int) -> None:
        prepared = prepare(layer, layer.held(rank))
        with pytest.raises(BadInput, match=r"x of 3 tokens exceeds max_tokens_per_rank 2; pass"):
            prepared.forward(layer.x(rank), layer.topk(rank))

    with emulated(SM120) as device:
        run_ranks(layer.world, work)
    assert device.launches == {}


def test_cake_is_taken_where_split_lacks_nvshmem() -> None:
    request = dataclasses.replace(
        Request.of(case(CAKE).whole(), top_k=6, max_tokens_per_rank=512),
        hidden_size=4096,
        intermediate_size=2048,
        placement=Placement.contiguous(256, 8),
    )
    bare = dataclasses.replace(SM120, nvshmem=None)
    assert select(request, SM120).name == "sm120_mxfp4_split"
    decision = select(request, bare)
    assert decision.name == CAKE
    split = BY_NAME["sm120_mxfp4_split"].objections(request, bare)
    assert split == ("needs nvshmem >= 0.3.1, and none is installed",)


def test_the_readme_claims_no_hardware_for_any_of_them() -> None:
    table = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for kernel in MX:
        (row,) = [r for r in table.splitlines() if r.startswith("|") and f"`{kernel}`" in r]
        assert "not run on hardware" in row


# --- every number of ranks ------------------------------------------------------------------------

PATTERNS = ("spread", "idle", "empty rank", "first slots", "idle and empty rows")


def ids_of(world: int, pattern: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    def row(rank: int, token: int) -> tuple[int, int]:
        first, second = (rank + token) % (world + 1), (2 * rank + token + 1) % (world + 1)
        if pattern == "first slots":
            return -1, second
        if pattern == "idle and empty rows":
            return (first, -1) if token % 2 else (-1, -1)
        return (-1, -1) if pattern == "empty rank" and rank == world - 1 else (first, second)

    idle = {"idle": 0, "idle and empty rows": world - 1}.get(pattern)
    return tuple(
        () if rank == idle else tuple(row(rank, t) for t in range(1 + rank % 3))
        for rank in range(world)
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("world", range(1, 9))
@EACH
def test_ranks_from_1_to_8(kernel: str, world: int, pattern: str) -> None:
    """One expert more than ranks, one rank holding two, some twice: two calls in a row, so that
    what the first left behind would be seen."""
    if world not in BY_NAME[kernel].sheet.world_sizes:
        assert (kernel, world) == (CAKE, 1)
        return
    slots = [[(rank + 1) % (world + 1)] for rank in range(world)]
    slots[-1].append(0)
    slots[0].append(world)
    layer = dataclasses.replace(
        case(kernel),
        placement=Placement(num_experts=world + 1, slots=tuple(map(tuple, slots))),
        ids=ids_of(world, pattern),
    )
    assert differences(layer, passes=2) == []
