"""What a kernel forbids or promises, kept by its adapter: the emulated device is strict."""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from emulated import ContractBroken, Trap, cluster, emulated, run_ranks, standalone
from emulated.layers import Layer, differences, forward
from test_adapters_mutants import BY_NAME, WEIGHTS, case, experts_through, is_caught

import megamoe
from megamoe.dispatch.machine import H200, SM120
from megamoe.errors import BadInput, MegaMoEError, RankFailure, Unsupported
from megamoe.formats import FP8_TENSOR, NVFP4, PLAIN_BF16, Quantised, dequantise
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Context
from megamoe.kernels.layout import CanonicalExperts
from megamoe.kernels.sm90_pull_fp8_tensor import recipe_of
from megamoe.problem import ExpertWeights, Placement
from megamoe.reference.moe import Emulated, layer

ALL = pytest.mark.parametrize("kernel", WEIGHTS)


def one_rank(kernel: str, **changes: Any) -> Layer:
    """Two tokens on the fewest ranks the kernel takes."""
    base = case(kernel)
    return dataclasses.replace(base, **changes)


# --- buffers, and the order of what is collective ------------------------------------------------


@ALL
def test_layers_share_a_workspace_and_outputs_are_owned(kernel: str) -> None:
    first, second = case(kernel), dataclasses.replace(case(kernel), seed=9)

    def work(rank: int) -> tuple[list[torch.Tensor], Any]:
        a, b = first.prepare(rank), second.prepare(rank)
        y = a.forward(first.x(rank), first.topk(rank))
        z = b.forward(second.x(rank), second.topk(rank))
        again = a.forward(first.x(rank), first.topk(rank))
        open_ = device.open_workspaces
        a.close()
        after = b.forward(second.x(rank), second.topk(rank))
        recipe = b.decision.recipe
        b.close()
        assert open_ == first.world
        return [y, z, again, after], recipe

    with emulated(first.machine) as device:
        results = run_ranks(first.world, work)
    assert device.open_workspaces == 0
    for rank, ((y, z, again, after), recipe) in enumerate(results):
        assert torch.equal(y, first.expected(rank, recipe))
        assert torch.equal(z, second.expected(rank, recipe))
        assert torch.equal(again, y)
        assert torch.equal(after, z)


@ALL
def test_the_caller_s_tensor_is_written(kernel: str) -> None:
    layer_ = case(kernel)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = layer_.x(rank)
        out = torch.full_like(x, torch.nan)
        with layer_.prepare(rank) as prepared:
            y = prepared.forward(x, layer_.topk(rank), out=out)
            assert y is out
            return out, prepared.forward(x, layer_.topk(rank))

    with emulated(layer_.machine):
        for out, fresh in run_ranks(layer_.world, work):
            assert torch.equal(out, fresh)


@ALL
def test_warm_up_launches_once_and_changes_no_bits(kernel: str) -> None:
    layer_ = case(kernel)

    def work(rank: int) -> tuple[torch.Tensor, Any]:
        with layer_.prepare(rank) as prepared:
            prepared.warmup()
            assert device.launches[rank] >= 1
            y = prepared.forward(layer_.x(rank), layer_.topk(rank))
            return y, prepared.decision.recipe

    with emulated(layer_.machine) as device:
        for rank, (y, recipe) in enumerate(run_ranks(layer_.world, work)):
            assert torch.equal(y, layer_.expected(rank, recipe))


@ALL
def test_more_tokens_than_capacity_run_in_rounds(kernel: str) -> None:
    layer_ = dataclasses.replace(case(kernel), capacity=2)

    def work(rank: int) -> tuple[torch.Tensor, Any]:
        with layer_.prepare(rank) as prepared:
            y = prepared.forward(layer_.x(rank), layer_.topk(rank), max_tokens=3)
            return y, prepared.decision.recipe

    with emulated(layer_.machine) as device:
        results = run_ranks(layer_.world, work)
    assert set(device.launches.values()) == {2}
    for rank, (y, recipe) in enumerate(results):
        assert torch.equal(y, layer_.expected(rank, recipe))


@ALL
def test_no_token_anywhere(kernel: str) -> None:
    world = case(kernel).world
    assert differences(dataclasses.replace(case(kernel), ids=((),) * world)) == []


@ALL
def test_a_rank_that_does_not_come_is_noticed(kernel: str) -> None:
    layer_ = case(kernel)

    def work(rank: int) -> None:
        prepared = layer_.prepare(rank)
        if rank:
            prepared.forward(layer_.x(rank), layer_.topk(rank))

    with (
        mock.patch.object(cluster, "TIMEOUT_S", 0.5),
        emulated(layer_.machine),
        pytest.raises(ContractBroken, match="waits at"),
    ):
        run_ranks(layer_.world, work)


def test_ranks_that_prepare_in_another_order_are_noticed() -> None:  # K49
    first = case("sm90_pull_bf16")
    second = dataclasses.replace(first, activation=megamoe.Activation(limit=3.0))

    def work(rank: int) -> None:
        for layer_ in (first, second)[:: 1 if rank else -1]:
            layer_.prepare(rank)

    with emulated(), pytest.raises((ContractBroken, RankFailure)):
        run_ranks(first.world, work)


@pytest.mark.parametrize("kernel", ["sm90_push_bf16", "sm90_push_fp8"])
def test_an_id_past_the_last_expert_never_reaches_a_kernel_that_traps(kernel: str) -> None:
    layer_ = dataclasses.replace(
        case(kernel), placement=Placement.contiguous(4, 1), ids=(((0, 1),),)
    )
    with emulated(layer_.machine), layer_.prepare(0) as prepared:
        topk = layer_.topk(0)
        wild = dataclasses.replace(topk, ids=topk.ids + 7)
        with pytest.raises(BadInput, match=r"outside \[-1, 4\)"):
            prepared.forward(layer_.x(0), wild)
        ids = wild.ids.to(torch.int32)
        batch = Batch(x=layer_.x(0), ids=ids, weights=topk.weights, count=1, tokens=1)
        with pytest.raises(Trap):  # what would have happened
            prepared._spaces[0].run(batch, torch.empty_like(layer_.x(0)))
        with pytest.raises(Trap, match="context was lost"):
            prepared.forward(layer_.x(0), topk)


# --- the door ------------------------------------------------------------------------------------


def test_an_absent_flashinfer_is_named_with_the_version_needed() -> None:
    with pytest.raises(Unsupported, match=r"install flashinfer-python >= 0\.7\.4"):
        flashinfer.load("moe_ep_of_another_world")


@ALL
def test_a_flashinfer_without_a_field_is_named(kernel: str) -> None:
    layer_ = case(kernel)
    real = flashinfer.build

    def older(module: Any, name: str, fields: Any) -> Any:
        if "top_k" in fields or "num_topk" in fields:
            fields = dict(fields) | {"of_the_next_release": 1}
        return real(module, name, fields)

    with (
        emulated(layer_.machine),
        mock.patch.object(flashinfer, "build", older),
        pytest.raises(Unsupported, match=r"has no .*of_the_next_release.*written for 0\.7\.4"),
    ):
        run_ranks(layer_.world, layer_.prepare)


def test_the_environment_is_left_as_it_was() -> None:
    layer_ = dataclasses.replace(
        case("sm90_pull_bf16"), placement=Placement.contiguous(4, 1), ids=(((0, 1),),)
    )
    for before in (None, "0"):
        with mock.patch.dict(os.environ, {} if before is None else {"MEGA_NO_DIST": before}):
            os.environ.pop("MEGA_NO_DIST", None) if before is None else None
            with emulated(), layer_.prepare(0) as prepared:
                assert os.environ.get("MEGA_NO_DIST") == before
                prepared.forward(layer_.x(0), layer_.topk(0))
                assert os.environ.get("MEGA_NO_DIST") == before
            assert os.environ.get("MEGA_NO_DIST") == before


def test_one_rank_of_a_larger_job_must_say_which_group_it_is() -> None:
    layer_ = dataclasses.replace(
        case("sm90_pull_bf16"), placement=Placement.contiguous(4, 1), ids=(((0, 1),),)
    )

    def work(rank: int) -> str:
        with pytest.raises(BadInput, match="is not the one rank of the layer") as caught:
            layer_.prepare(0)
        return str(caught.value)

    with emulated():
        assert "new_group" in run_ranks(2, work)[0]


@pytest.mark.parametrize("kernel", ["sm90_standalone_mxfp4"])
def test_one_rank_without_a_group_leaves_none_behind(kernel: str) -> None:
    layer_ = dataclasses.replace(
        case(kernel), placement=Placement.contiguous(4, 1), ids=(((0, 1), (2, -1)),)
    )
    assert differences(layer_) == []
    assert not dist.is_initialized()


def test_two_trees_of_kernels_do_not_share_a_process() -> None:
    hopper, split, swap = (
        dataclasses.replace(
            case(kernel), placement=Placement.contiguous(4, 1), ids=(((0, 1),),), machine=SM120
        )
        for kernel in ("sm90_pull_bf16", "sm120_mxfp4_split", "sm120_mxfp8")
    )
    with emulated(SM120):
        with split.prepare(0), pytest.raises(Unsupported, match=r"SM120 split .*another process"):
            swap.prepare(0)
        with split.prepare(0):  # of its own it has any number
            pass
    assert "SM90 pull" not in flashinfer._TREES
    with emulated(H200), dataclasses.replace(hopper, machine=H200).prepare(0):
        assert flashinfer._TREES == ["SM90 pull"]


# --- weights -------------------------------------------------------------------------------------


def inexact(q: Quantised) -> Quantised:
    assert q.global_scale is not None
    return dataclasses.replace(q, global_scale=q.global_scale * 1.2)


@pytest.mark.parametrize("kernel", ["sm90_pull_bf16", "sm90_push_bf16"])
def test_values_that_bf16_cannot_hold_are_refused_on_every_rank(kernel: str) -> None:
    layer_ = dataclasses.replace(case(kernel), weights=NVFP4)

    def work(rank: int) -> None:
        held = layer_.held(rank)
        if rank:
            experts = dataclasses.replace(held.experts, w2=inexact(held.experts.w2))
            held = dataclasses.replace(held, experts=experts)
        expected = Unsupported if rank else RankFailure
        with pytest.raises(expected, match=r"w2 of expert slot 0.* are no BF16 numbers"):
            megamoe.prepare(held, dist.group.WORLD, max_tokens_per_rank=4, top_k=2, kernel=kernel)

    with emulated() as device:
        run_ranks(layer_.world, work)
    assert device.launches == {}


@ALL
def test_weights_as_computed_are_the_weights_where_they_fit(kernel: str) -> None:
    experts = case(kernel).experts()
    computed = BY_NAME[kernel].as_computed(experts)
    assert torch.equal(dequantise(computed.w13), dequantise(experts.w13))
    assert torch.equal(dequantise(computed.w2), dequantise(experts.w2))


@pytest.mark.parametrize("kernel", ["sm90_pull_nvfp4", "sm90_standalone_nvfp4"])
def test_nvfp4_of_any_scale_is_what_as_computed_says(kernel: str) -> None:
    """A scale of 1.125 is no power of two: the kernel multiplies with other weights."""
    layer_ = case(kernel)
    odd = layer_.experts()
    scale = odd.w2.scale
    assert scale is not None
    bumped = (scale.view(torch.uint8) + 1).view(scale.dtype)  # * 1.125
    experts = dataclasses.replace(odd, w2=dataclasses.replace(odd.w2, scale=bumped))
    computed = BY_NAME[kernel].as_computed(experts)
    true, held = dequantise(experts.w2), dequantise(computed.w2)
    moved = (true != held).double().mean()
    assert 0.1 < float(moved) < 0.5
    assert bool(((true - held).abs() <= true.abs() / 21 + 1e-300).all())

    class Odd(Layer):
        def experts(self) -> Any:
            return experts

    fields = {f.name: getattr(layer_, f.name) for f in dataclasses.fields(layer_)}
    outputs, recipe, _ = forward(Odd(**fields))
    whole = dataclasses.replace(layer_.whole(), experts=computed)
    for rank, (y,) in enumerate(outputs):
        want = layer(layer_.x(rank), layer_.topk(rank), whole, Emulated(recipe))
        assert torch.equal(y, want)


@pytest.mark.parametrize("kernel", ["sm90_pull_nvfp4", "sm90_standalone_nvfp4"])
def test_nvfp4_gate_and_up_keep_their_own_global_scales(kernel: str) -> None:  # K60
    """These kernels have one factor for both: a host that passes gate's, or the larger, is seen."""
    layer_ = case(kernel)

    class Apart(Layer):
        def experts(self) -> ExpertWeights:
            experts = super().experts()
            scale = experts.w13.global_scale
            assert scale is not None
            w13 = dataclasses.replace(experts.w13, global_scale=scale * torch.tensor([1.0, 2.0]))
            return dataclasses.replace(experts, w13=w13)

    apart = Apart(**{f.name: getattr(layer_, f.name) for f in dataclasses.fields(layer_)})
    assert differences(apart) == []
    for taken in (0, 1):

        def one_for_both(e: CanonicalExperts, taken: int = taken) -> CanonicalExperts:
            assert e.w13_global is not None
            return dataclasses.replace(e, w13_global=e.w13_global[:, [taken, taken]])

        with experts_through(BY_NAME[kernel], one_for_both):
            assert is_caught(apart)


# --- pull FP8 with one scale a tensor ------------------------------------------------------------


def tensor_layer(world: int, scales: tuple[float, float] | None = (0.01, 0.003)) -> Layer:
    slots = ((3, 1), (0, 2))[:world] if world == 2 else ((0, 1, 2, 3),)
    ids = (((0, 1), (2, 3), (1, 2)), ((3, 0),))[:world]
    return Layer(
        kernel="sm90_pull_fp8_tensor",
        weights=FP8_TENSOR,
        placement=Placement(num_experts=4, slots=slots),
        ids=ids,
        capacity=3,
        activation=megamoe.Activation(limit=0.75),
        activation_scales=scales,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_pull_fp8_per_tensor(world: int) -> None:
    layer_ = tensor_layer(world)
    assert differences(layer_, passes=2) == []
    _, recipe, _ = forward(layer_)
    assert recipe == recipe_of(*(torch.tensor(s).item() for s in (0.01, 0.003)))


def test_pull_fp8_per_tensor_compares_its_scales_over_the_ranks() -> None:  # K61
    def work(rank: int) -> None:
        tensor_layer(2, (0.01, 0.003 + rank / 1000)).prepare(rank)

    with (
        emulated(),
        pytest.raises(RankFailure, match=r"activation_scales \(\(0\.01, 0\.003\) on rank 0"),
    ):
        run_ranks(2, work)


def test_pull_fp8_per_tensor_without_scales_is_refused() -> None:
    with emulated(), pytest.raises(Unsupported, match="needs calibrated activation scales"):
        tensor_layer(1, None).prepare(0)
    with pytest.raises(BadInput, match=r"activation_scales 0\.0 is not a positive"), emulated():
        tensor_layer(1, (0.0, 1.0)).prepare(0)


# --- standalone NVFP4's two families -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "capacity", "remedy"),
    [("fused", 257, "use 'auto' or 'split'"), ("both", 8, "use 'auto', 'fused' or 'split'")],
)
def test_a_family_of_another_recipe_is_refused(family: str, capacity: int, remedy: str) -> None:
    from megamoe.kernels.sm90_standalone_nvfp4 import family_of

    layer_ = case("sm90_standalone_nvfp4")
    request = megamoe.Request.of(layer_.held(0), top_k=2, max_tokens_per_rank=capacity)
    asked = Context(
        request=request, machine=layer_.machine, device=torch.device("cpu"),
        options={"family": family},
    )  # fmt: skip
    with pytest.raises(BadInput, match=remedy):
        family_of(asked)
    for fine in ("auto", "split"):
        assert family_of(dataclasses.replace(asked, options={"family": fine})) == fine


def test_options_reach_the_kernel_agree_and_are_known() -> None:
    layer_ = case("sm90_standalone_nvfp4")

    def work(rank: int, options: dict[str, str]) -> str:
        with megamoe.prepare(
            layer_.held(rank), dist.group.WORLD, max_tokens_per_rank=4, top_k=2,
            kernel=layer_.kernel, options=options, on_failure="raise",
        ) as prepared:  # fmt: skip
            kernel: Any = prepared._kernel
            y = prepared.forward(layer_.x(rank), layer_.topk(rank))
            assert torch.equal(y, layer_.expected(rank, prepared.decision.recipe))
            return str(kernel.family)

    with emulated(layer_.machine):
        assert run_ranks(4, lambda rank: work(rank, {"family": "split"})) == ["split"] * 4
    with emulated(layer_.machine), pytest.raises(RankFailure, match="disagree on options"):
        run_ranks(4, lambda rank: work(rank, {"family": "split" if rank else "auto"}))
    with emulated(layer_.machine), pytest.raises(BadInput, match="takes family"):
        run_ranks(4, lambda rank: work(rank, {"famly": "split"}))


def test_bf16_layers_have_their_own_storage() -> None:
    """A BF16 checkpoint's w2 is a view, its w13 a copy: nothing of it may be written."""
    layer_ = case("sm90_pull_bf16")
    before = layer_.experts().w2.data.clone()
    assert differences(layer_) == []
    assert torch.equal(layer_.experts().w2.data, before)
    assert layer_.weights is PLAIN_BF16
    assert issubclass(Unsupported, MegaMoEError)


@pytest.mark.parametrize("most", [256, 257])
def test_counts_on_both_sides_of_the_families_boundary_run_the_same_one(most: int) -> None:
    """Fused up to 256 tokens, split above: which, the step's maximum says, and every rank passes
    that many rows, whatever its own count."""
    base = case("sm90_standalone_nvfp4")
    counts = (3, most, 0, most - 1)
    ids = tuple(tuple((t % 4, (t + 1) % 4) for t in range(n)) for n in counts)
    layer_ = dataclasses.replace(base, ids=ids, capacity=300)
    seen: list[tuple[int, str, int]] = []
    real = standalone.Buffer.run

    def run(self: Any, y: Any, n: int, experts: Any, *why: Any) -> Any:
        seen.append((n, *why))
        return real(self, y, n, experts, *why)

    def work(rank: int) -> torch.Tensor:
        with layer_.prepare(rank) as prepared:
            return prepared.forward(layer_.x(rank), layer_.topk(rank), max_tokens=most)

    with emulated(layer_.machine), mock.patch.object(standalone.Buffer, "run", run):
        outputs = run_ranks(4, work)
    assert seen == [(most, "auto", 256)] * 4
    recipe = BY_NAME["sm90_standalone_nvfp4"].sheet.recipe
    for rank, y in enumerate(outputs):
        assert torch.equal(y, layer_.expected(rank, recipe))


@pytest.mark.parametrize(
    ("family", "capacity", "counts"),
    [("auto", 320, [1, 4, 257, 301]), ("split", 320, [1, 301]), ("fused", 256, [1, 4])],
)
def test_warm_up_launches_each_family_s_plans(
    family: str, capacity: int, counts: list[int]
) -> None:  # K67
    """The fused family's plans change after 3 tokens here, the split one's after 300."""
    layer_ = dataclasses.replace(case("sm90_standalone_nvfp4"), capacity=capacity)
    seen: list[int] = []
    real = standalone.Buffer.run

    def run(self: Any, y: Any, n: int, experts: Any, *why: Any) -> Any:
        if self.rank == 0:
            seen.append(n)
        return real(self, y, n, experts, *why)

    def work(rank: int) -> None:
        with megamoe.prepare(
            layer_.held(rank), dist.group.WORLD, max_tokens_per_rank=capacity, top_k=2,
            kernel=layer_.kernel, options={"family": family},
        ) as prepared:  # fmt: skip
            prepared.warmup()

    with emulated(layer_.machine), mock.patch.object(standalone.Buffer, "run", run):
        run_ranks(4, work)
    assert sorted(set(seen)) == counts


@pytest.mark.parametrize("kernel", ["sm90_pull_bf16", "sm90_standalone_mxfp4", "sm120_mxfp8"])
def test_one_expert_twice_in_every_row_fits_the_pool(kernel: str) -> None:
    """FlashInfer makes room for each token's different experts of a rank; here there is one."""
    base = case(kernel)
    placement = Placement.contiguous(base.placement.num_experts, base.placement.num_experts)
    world, held = placement.world_size, placement.num_experts - 1
    ids = tuple(((held, held),) * 4 for _ in range(world))
    layer_ = dataclasses.replace(base, placement=placement, ids=ids, capacity=4)
    assert differences(layer_) == []
