"""A prepared layer on one rank: what it takes, what it refuses in words, what it never does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel.shares import same_bits, share
from strategies import Case, bell
from torch import Tensor

import megamoe
from megamoe.dispatch import machine, session
from megamoe.dispatch.fingerprint import checksum, fingerprint
from megamoe.dispatch.machine import H200
from megamoe.dispatch.refuse import overlap
from megamoe.dispatch.select import Decision
from megamoe.dispatch.session import PreparedWeights
from megamoe.dispatch.shared import SharedFFN, terms
from megamoe.errors import BadInput, MegaMoEError, Unsupported
from megamoe.formats import FP8_BLOCK128, MXFP4
from megamoe.kernels.base import Batch, Context, Datasheet, Kernel
from megamoe.kernels.plain import PlainKernel
from megamoe.kernels.reference import Reference
from megamoe.problem import (
    BF16_COMBINE,
    Activation,
    Machine,
    MoEWeights,
    Placement,
    Recipe,
    Request,
    TopK,
)
from megamoe.reference.moe import Emulated, layer, shared_term

CASE = Case(tokens=6, experts=4, top_k=2, shared=16)


def prepared(case: Case = CASE, **more: Any) -> PreparedWeights:
    return megamoe.prepare(case.layer(), **{"max_tokens_per_rank": 8, "top_k": 2, **more})


def truth(case: Case = CASE, topk: TopK | None = None) -> Tensor:
    recipe = BF16_COMBINE if case.weight_at == "combine" else None
    assert recipe is not None
    return layer(case.x(), topk or case.topk(), case.layer(), Emulated(recipe))


def test_forward_is_the_layer_through_every_door() -> None:
    x, topk, weights = CASE.x(), CASE.topk(), CASE.layer()
    with prepared() as ready:
        assert ready.decision.name == "reference"
        for y in (
            ready.forward(x, topk),
            ready(x, topk),
            megamoe.forward(x, topk, ready),
            megamoe.forward(x, (topk.ids, topk.weights), ready),
            megamoe.forward(x, topk, weights),
            megamoe.forward(x, topk, weights),
        ):
            same_bits([y], truth())


def test_out_is_written_and_returned_and_nothing_else_is() -> None:
    x, topk = CASE.x(), CASE.topk()
    kept = x.clone(), topk.ids.clone(), topk.weights.clone()
    whole = torch.full((8, CASE.hidden_size), 7.0, dtype=torch.bfloat16)
    with prepared() as ready:
        out = whole[1:7]
        assert ready.forward(x, topk, out=out) is out
        fresh = ready.forward(x, topk)
        again = ready.forward(x, topk)
    same_bits([out], truth())
    assert (whole[[0, 7]] == 7).all()
    assert fresh.data_ptr() != again.data_ptr()  # outputs are the caller's
    for before, after in zip(kept, (x, topk.ids, topk.weights), strict=True):
        assert torch.equal(before, after)


def test_strided_tokens_and_other_types_of_ids_and_weights() -> None:  # K21, K22
    x, topk = CASE.x(), CASE.topk()
    wide = torch.zeros(6, 2 * CASE.hidden_size, dtype=torch.bfloat16)
    wide[:, ::2] = x
    halves = topk.weights.to(torch.bfloat16)
    with prepared() as ready:
        same_bits([ready.forward(wide[:, ::2], topk)], truth())
        narrow = TopK(ids=topk.ids.to(torch.int32), weights=halves)
        expected = truth(topk=TopK(ids=topk.ids, weights=halves.to(torch.float32)))
        same_bits([ready.forward(x, narrow)], expected)


def test_the_factor_is_applied_once() -> None:  # K15, K16
    for at in ("weights", "output"):
        case = dataclasses.replace(CASE, routed_scaling_factor=2.5, scale_at=at, shared=0)
        plain = case.topk()
        with prepared(case) as ready:
            y = ready.forward(case.x(), TopK(ids=plain.ids, weights=plain.weights, scaled=False))
            same_bits([y], truth(case))
            inside = TopK(ids=plain.ids, weights=plain.weights * 2.5, scaled=True)
            if at == "weights":
                same_bits([ready.forward(case.x(), inside)], truth(case))
                with pytest.raises(BadInput, match=r"routed_scaling_factor 2\.5 is inside"):
                    ready.forward(case.x(), (plain.ids, plain.weights))


def test_a_power_of_two_is_multiplied_above_a_kernel_that_cannot() -> None:
    class Plain(Reference):
        sheet = dataclasses.replace(
            Reference.sheet, features=Reference.sheet.features - {"output scaling"}
        )

        @classmethod
        def prepare(cls, weights: MoEWeights, context: Context) -> Reference:
            inner = super().prepare(weights, context)
            inner.weights = dataclasses.replace(inner.weights, scale_at="weights")
            return inner

    case = dataclasses.replace(CASE, routed_scaling_factor=4.0, scale_at="output", shared=0)
    request = Request.of(case.layer(), top_k=2, max_tokens_per_rank=8)
    assert not Plain.objections(request, H200)
    refused = dataclasses.replace(request, routed_scaling_factor=2.5)
    assert any("exact for powers of two only" in r for r in Plain.objections(refused, H200))
    ready = PreparedWeights(case.layer(), decision(Plain, request))
    same_bits([ready.forward(case.x(), case.topk())], truth(case))


def decision(kernel: type[Kernel], request: Request) -> Decision:
    return Decision(
        kernel=kernel, recipe=kernel.recipe(request), request=request, machine=H200, refusals={}
    )


def test_the_shared_expert_above_a_kernel_is_the_reference_of_it() -> None:
    for activation, fmt in (
        (Activation(), CASE.weights),
        (Activation(limit=0.3), MXFP4),
        (Activation(limit=0.3, symmetric=True), FP8_BLOCK128),
        (Activation(alpha=1.7020000219345093, up_offset=1.0), FP8_BLOCK128),
    ):
        case = Case(
            shared=32, shared_activation=activation, weights=fmt, bias=True, gain=3, tokens=7,
            hidden_size=64, intermediate_size=32,
        )  # fmt: skip
        shared = case.layer().shared
        assert shared is not None
        y = SharedFFN(shared).start(case.x())()
        wanted = shared_term(case.x(), shared, Emulated(BF16_COMBINE))
        same_bits([y], wanted.to(torch.bfloat16))


def test_a_float32_matrix_is_three_of_bf16_that_add_up() -> None:
    """What a GPU multiplies with in place of it; here only the numbers can be looked at."""
    case = Case(shared=32, weights=FP8_BLOCK128, hidden_size=64, intermediate_size=32, tokens=5)
    shared = case.layer().shared
    assert shared is not None
    ffn = SharedFFN(shared)
    for held in (ffn.w13, ffn.w2):
        assert held.dtype == torch.float32  # FP8 codes under scales that are no powers of two
        split = terms(held)
        assert (split.shape, split.dtype) == ((len(held), 3 * held.shape[1]), torch.bfloat16)
        parts = split.to(torch.float64).unflatten(1, (3, -1))
        assert torch.equal(parts.sum(1), held.to(torch.float64))
        x = bell(1, 5, held.shape[1]).bfloat16()
        assert torch.equal(ffn._product(x, split), ffn._product(x, held))
    tiny = torch.full((1, 2), 2.0**-126 + 2.0**-149)
    assert terms(tiny) is tiny


def test_rows_of_the_caller_padding_change_no_other() -> None:  # K31
    x, topk = CASE.x(), CASE.topk()
    nan = torch.full((2, CASE.hidden_size), torch.nan, dtype=torch.bfloat16)
    more = TopK(
        ids=torch.cat([topk.ids, torch.full((2, 2), -1)]),
        weights=torch.cat([topk.weights, torch.full((2, 2), torch.nan)]),
    )
    with prepared() as ready:
        y = ready.forward(torch.cat([x, nan]), more)
    same_bits([y[:6]], truth())


def test_a_repeated_expert_counts_twice() -> None:  # K24
    case = dataclasses.replace(CASE, shared=0, tokens=2)
    twice = TopK(ids=torch.tensor([[3, 3]] * 2), weights=torch.tensor([[0.25, 0.5]] * 2))
    with prepared(case) as ready:
        y = ready.forward(case.x(), twice)
        for _ in range(20):
            assert torch.equal(ready.forward(case.x(), twice), y)
    same_bits([y], truth(case, twice))


# --- capacity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 25])
def test_exact_or_an_error_never_a_part(tokens: int) -> None:  # K46
    case = dataclasses.replace(CASE, tokens=tokens)
    x, topk = case.x(), case.topk()
    with prepared(case) as ready:
        if tokens <= 8:
            same_bits([ready.forward(x, topk)], truth(case))
        else:
            with pytest.raises(BadInput) as caught:
                ready.forward(x, topk)
            assert str(caught.value) == (
                f"x of {tokens} tokens exceeds max_tokens_per_rank 8; pass max_tokens (the "
                "greatest count of any rank) to run in rounds, or prepare for more"
            )
        same_bits([ready.forward(x, topk, max_tokens=tokens)], truth(case))
        same_bits([ready.forward(x, topk, max_tokens=tokens + 30)], truth(case))
    same_bits([megamoe.forward(x, topk, case.layer())], truth(case))


def test_every_rank_runs_as_many_rounds() -> None:
    """The rounds follow from max_tokens alone: an idle rank and a full one meet in each."""
    seen: list[tuple[int, int]] = []

    class Counting(Reference):
        def run(self, batch: Batch, out: Tensor) -> None:
            seen.append((batch.count, batch.tokens))
            super().run(batch, out)

    request = Request.of(CASE.layer(), top_k=2, max_tokens_per_rank=8)
    for tokens, rounds in ((0, [0, 0, 0]), (17, [6, 6, 5]), (3, [3, 0, 0])):
        case = dataclasses.replace(CASE, tokens=tokens)
        seen.clear()
        ready = PreparedWeights(CASE.layer(), decision(Counting, request))
        ready.forward(case.x(), case.topk(), max_tokens=17)
        assert seen == [(n, 6) for n in rounds]


# --- refusals -------------------------------------------------------------------------------------


def ids_of(*rows: list[int]) -> TopK:
    ids = torch.tensor(rows)
    return TopK(ids=ids, weights=torch.ones(ids.shape))


def over(ready: PreparedWeights, part: Tensor) -> Tensor:
    """A call whose out begins in a tensor of its own routing."""
    room = torch.empty(part.nbytes + X.nbytes, dtype=torch.uint8)
    held = room[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    out = room[: X.nbytes].view(X.dtype).view(X.shape)
    ids, weights = (held if t is part else t for t in (GOOD.ids, GOOD.weights))
    return ready(X, TopK(ids=ids, weights=weights), out=out)


X = CASE.x()
GOOD = CASE.topk()
REFUSED: list[tuple[Callable[[PreparedWeights], Any], str]] = [
    (lambda r: r(X[0], GOOD), "x of shape [40] is not [tokens, 40]; flatten the batch"),
    (lambda r: r(X[:, 1:], GOOD), "x of shape [6, 39] is not [tokens, 40]; flatten the batch"),
    (lambda r: r(X.float(), GOOD), "x of torch.float32 is not bfloat16; cast with x.bfloat16()"),
    (lambda r: r(X.to("meta"), GOOD), "x on meta is not on the layer's cpu; move it"),
    (
        lambda r: r(X, TopK(ids=GOOD.ids.to("meta"), weights=GOOD.weights.to("meta"))),
        "topk.ids on meta are not on the layer's cpu; move them",
    ),
    (
        lambda r: r(X[:5], GOOD),
        "topk.ids of 6 tokens do not match x of 5; route the same tokens",
    ),
    (
        lambda r: r(X[:1], ids_of([1, 2, 3])),
        "topk of 3 slots a token is not top_k 2; prepare the layer for it",
    ),
    (
        lambda r: r(X[:1], ids_of([0, 4])),
        "topk.ids 4 is outside [-1, 4); use -1 for an empty slot",
    ),
    (
        lambda r: r(X[:1], ids_of([-2, 4])),
        "topk.ids -2 is outside [-1, 4); use -1 for an empty slot",
    ),
    (
        lambda r: r(X, GOOD, max_tokens=5),
        "max_tokens 5 is below this rank's 6 tokens; pass the greatest count of any rank",
    ),
    (
        lambda r: r(X, GOOD, out=torch.empty(6, 40)),
        "out of torch.float32 [6, 40] on cpu is not torch.bfloat16 [6, 40] on cpu; pass one like x",
    ),
    (
        lambda r: r(X, GOOD, out=torch.empty(40, 6, dtype=torch.bfloat16).T),
        "out of strides (1, 6) is not contiguous; pass one that is",
    ),
    (
        lambda r: r(X, GOOD, out=X),
        "out shares memory with x, which is read after out is written; pass another tensor",
    ),
    (
        lambda r: r(X, GOOD, out=torch.from_dlpack(X)),
        "out shares memory with x, which is read after out is written; pass another tensor",
    ),
    (
        lambda r: over(r, GOOD.ids),
        "out shares memory with topk.ids, which is read after out is written; pass another tensor",
    ),
    (
        lambda r: over(r, GOOD.weights),
        "out shares memory with topk.weights, which is read after out is written; pass another "
        "tensor",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[s[:40] for _, s in REFUSED])
def test_a_bad_call_is_refused_before_anything_runs(
    call: Callable[[PreparedWeights], Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # K38
    with prepared() as ready:
        with monkeypatch.context() as patch:
            patch.setattr(Reference, "run", lambda *_: pytest.fail("launched"))
            with pytest.raises(BadInput) as caught:
                call(ready)
        assert str(caught.value) == sentence
        same_bits([ready(X, GOOD)], truth())  # the layer is none the worse


def test_tensors_that_share_memory() -> None:
    whole = torch.zeros(6, 4)
    assert overlap(whole, whole[5:])
    assert overlap(whole[:, :2], whole[:, 2:])  # interleaved: said to overlap, to be safe
    assert not overlap(whole[:3], whole[3:])
    assert not overlap(whole[:0], whole)
    assert not overlap(whole, whole.clone())
    assert overlap(whole[:3], torch.from_dlpack(whole[2:]))  # a storage of its own
    assert not overlap(whole[:3], torch.from_dlpack(whole[3:]))
    assert not overlap(whole.to("meta"), whole.to("meta"))  # without an address


def test_prepare_refuses_in_words() -> None:
    weights = CASE.layer()
    for more, error, sentence in (
        ({"top_k": None}, BadInput, "top_k None is unknown: the weights carry no router"),
        ({"max_tokens_per_rank": 0}, BadInput, "max_tokens_per_rank 0 is below 1"),
        ({"kernel": "fastest"}, BadInput, "kernel 'fastest' is unknown; use one of auto, sm90_"),
        ({"kernel": "sm90_pull_bf16"}, Unsupported, "needs a CUDA GPU"),
    ):
        with pytest.raises(error, match=sentence):
            megamoe.prepare(weights, **{"max_tokens_per_rank": 8, "top_k": 2, **more})
    part = share(weights, Placement.contiguous(4, 2), 1)
    with pytest.raises(BadInput, match="preparing is collective"):
        megamoe.forward(X, GOOD, part)


@pytest.mark.parametrize("kernel", ["reference", "torch_grouped"])
def test_an_exchange_leaves_the_shared_expert_and_none_of_its_bytes_are_the_callers(
    kernel: str,
) -> None:
    case = dataclasses.replace(CASE, bias=True)
    old, new, kept = (dataclasses.replace(case, seed=seed).layer() for seed in (1, 9, 1))
    assert old.shared is not None
    assert kept.shared is not None
    assert old.shared.weights.b13 is not None
    with megamoe.prepare(
        old, max_tokens_per_rank=8, top_k=2, kernel=kernel, most_replicas=1
    ) as ready:
        recipe = ready.decision.recipe
        for tensor in (*old.shared.weights.tensors, *old.experts.tensors):
            tensor.zero_()
        for weights in (kept, new):
            if weights is new:
                ready.update(new)
            weights = dataclasses.replace(weights, shared=kept.shared)
            same_bits([ready(X, GOOD)], layer(X, GOOD, weights, Emulated(recipe)))


# --- its life -------------------------------------------------------------------------------------


def test_closed_once_and_for_all() -> None:
    ready = prepared()
    ready.warmup()
    ready.close()
    ready.close()
    for use in (lambda: ready(X, GOOD), ready.warmup):
        with pytest.raises(MegaMoEError, match="this layer is closed"):
            use()


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_are_given_back_also_after_an_error(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(Reference, "close", lambda self: closed.append(True))
    with contextlib.suppress(ZeroDivisionError), prepared():
        assert not (fails and 1 / 0)
    assert closed == [True]


def test_an_id_met_on_a_device_is_told_at_the_next_check() -> None:
    """On a GPU ids are not looked at: the flag is raised there. Here it is raised by hand."""
    ready = prepared()
    ready._staging.sticky.fill_(True)
    with pytest.raises(BadInput, match=r"a value outside \[-1, 4\) since the last check"):
        ready.check()
    ready.check()
    ready._staging.sticky.fill_(True)
    with pytest.raises(BadInput, match="that call's output is invalid"):
        ready.close()


def test_forced_reference_and_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dataclasses.replace(CASE.layer(), weight_at="fc2_input")
    monkeypatch.setenv("MEGAMOE_FORCE_REFERENCE", "1")
    with megamoe.prepare(weights, max_tokens_per_rank=8, top_k=2, kernel="torch_grouped") as ready:
        assert (ready.decision.name, ready.decision.recipe.weight_at) == ("reference", "fc2_input")
    monkeypatch.setenv("MEGAMOE_FORCE_REFERENCE", "emulate")
    with megamoe.prepare(weights, max_tokens_per_rank=8, top_k=2, kernel="torch_grouped") as ready:
        assert (ready.decision.name, ready.decision.recipe.name) == ("reference", "torch_grouped")
        recipe = ready.decision.recipe
        same_bits([ready(X, GOOD)], layer(X, GOOD, weights, Emulated(recipe)))
    monkeypatch.setenv("MEGAMOE_FORCE_REFERENCE", "yes")
    with pytest.raises(BadInput, match="is not one of 0, 1, emulate"):
        prepared()


NVFP4_KERNEL = {"kernel": "sm90_standalone_nvfp4", "options": {"family": "split"}}


@pytest.mark.parametrize("name", ["MEGAMOE_FORCE_REFERENCE", "MEGAMOE_KERNEL"])
def test_options_of_a_kernel_that_the_environment_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are judged by the kernel that the caller named, and none reaches the other."""
    monkeypatch.setenv(name, "1" if name.endswith("REFERENCE") else "reference")
    with prepared(**NVFP4_KERNEL) as ready:
        assert ready.decision.name == "reference"
        same_bits([ready(X, GOOD)], truth())
    with prepared(options={"family": "split"}) as ready:  # of whichever kernel was to be chosen
        assert ready.decision.name == "reference"
    with pytest.raises(BadInput, match="option 'colour' is unknown to sm90_standalone_nvfp4"):
        prepared(kernel="sm90_standalone_nvfp4", options={"colour": "split"})
    with pytest.raises(BadInput, match="option 'family' is unknown to reference"):
        prepared(kernel="reference", options={"family": "split"})


def test_a_kernel_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_KERNEL", "auto")
    with prepared(kernel="torch_grouped") as ready:
        assert (ready.decision.name, ready.decision.named) == ("reference", False)
    for forced in ("0", "1", "emulate"):
        monkeypatch.setenv("MEGAMOE_FORCE_REFERENCE", forced)
        monkeypatch.setenv("MEGAMOE_KERNEL", "typo")
        with pytest.raises(BadInput) as caught:
            prepared()
        assert str(caught.value).startswith(
            "MEGAMOE_KERNEL 'typo' is unknown; use one of auto, sm90_"
        )
        monkeypatch.delenv("MEGAMOE_KERNEL")
        with pytest.raises(BadInput, match="kernel 'typo' is unknown; use one of auto, sm90_"):
            prepared(kernel="typo")


def test_a_warm_up_does_not_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles nothing, has nothing to choose among, and takes minutes at real sizes."""
    monkeypatch.setenv("MEGAMOE_FORCE_REFERENCE", "1")
    ran: list[int] = []
    monkeypatch.setattr(Reference, "run", lambda self, batch, out: ran.append(len(out)))
    with prepared(workspaces=(2, 4), tuning="on", max_tokens_per_rank=8) as ready:
        ready.warmup()
        assert ran == []
        assert ready.choice.serves == (0, 1, 2)
        ready.forward(X, GOOD)
    assert ran == [len(X)]


# --- nothing is read back -------------------------------------------------------------------------


class Stub(PlainKernel):
    """Runs on tensors without values: it only writes."""

    sheet: Datasheet = Reference.sheet
    captured = True

    @classmethod
    def recipe(cls, request: Request) -> Recipe:
        return BF16_COMBINE

    @classmethod
    def prepare(cls, weights: MoEWeights, context: Context) -> Stub:
        made = cls()
        made.context = context
        return made

    def run(self, batch: Batch, out: Tensor) -> None:
        out.fill_(0)

    @classmethod
    def capturable(cls, request: Request, machine: Machine) -> bool:
        return cls.captured

    def close(self) -> None:
        return None


@pytest.mark.parametrize("empty_slots", ["masked", "stale"])
def test_forward_reads_nothing_back_from_a_device(empty_slots: str) -> None:  # K65
    """On tensors without values every attempt to read one raises."""

    class Kind(Stub):
        sheet = dataclasses.replace(
            Reference.sheet,
            empty_slots=empty_slots,  # type: ignore[arg-type]
        )

    case = dataclasses.replace(CASE, routed_scaling_factor=2.5, shared=0)
    placement = Placement(num_experts=4, slots=((3, -1, 0, 1, 2, 0),))
    weights = share(case.layer(), placement, 0)
    ready = PreparedWeights(
        weights, decision(Kind, Request.of(weights, top_k=2, max_tokens_per_rank=8))
    )
    ready.device = torch.device("meta")
    moved = {n: getattr(ready._staging, n).to("meta") for n in ("replicas", "counts", "sticky")}
    ready._staging = dataclasses.replace(ready._staging, **moved)
    x, topk = (
        X.to("meta"),
        TopK(ids=GOOD.ids.to("meta"), weights=GOOD.weights.to("meta"), scaled=False),
    )
    for max_tokens in (None, 6, 17):
        y = ready.forward(x, topk, max_tokens=max_tokens)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
    with pytest.raises(RuntimeError, match="meta tensors"):
        ready.check()  # which does read: so a read would have been noticed


def test_capture_wants_a_kernel_that_may_be_captured_and_a_warm_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # K67
    request = Request.of(CASE.layer(), top_k=2, max_tokens_per_rank=8)
    ready = PreparedWeights(CASE.layer(), decision(Stub, request))
    assert not ready.capturable  # on a CPU
    ready._check_capture()
    ready.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BadInput) as cold:
        ready._check_capture()
    assert str(cold.value) == (
        "layer is being captured in a CUDA graph before it was warmed up; "
        "call layer.warmup() on every rank first"
    )
    ready.device = torch.device("cpu")
    ready.warmup()
    ready.device = torch.device("cuda")
    ready._check_capture()
    assert ready.capturable
    monkeypatch.setattr(Stub, "captured", False)
    assert not ready.capturable
    with pytest.raises(BadInput) as refused:
        ready._check_capture()
    assert str(refused.value) == (
        "kernel reference reads from the device, which a CUDA graph cannot hold; "
        "run it outside of graph capture"
    )


# --- fingerprints ---------------------------------------------------------------------------------


def test_the_fingerprint_sees_what_must_agree() -> None:
    def facts(case: Case, **more: Any) -> dict[str, str]:
        weights = dataclasses.replace(case.layer(), **more)
        request = Request.of(weights, top_k=2, max_tokens_per_rank=8)
        return fingerprint(weights, decision(Reference, request))

    base = facts(CASE)
    assert facts(CASE) == base
    router = megamoe.Router(weight=bell(1, 4, 40), top_k=2)
    other = megamoe.Router(weight=bell(2, 4, 40), top_k=2)
    for case, more, names in (
        (dataclasses.replace(CASE, seed=2), {}, {"shared expert's bytes"}),
        (dataclasses.replace(CASE, weights=MXFP4, hidden_size=64, intermediate_size=32), {}, {
            "weights", "w2_weights", "hidden_size", "intermediate_size", "shared expert's bytes"
        }),
        (CASE, {"shared": None}, {"shared", "shared activation", "shared expert's bytes"}),
        (CASE, {"activation": Activation(limit=7.0)}, {"activation"}),
        (CASE, {"routed_scaling_factor": 2.0}, {"routed_scaling_factor"}),
        (CASE, {"router": router}, {"router's bytes"}),
    ):  # fmt: skip
        found = facts(case, **more)
        assert {n for n in base | found if base.get(n) != found.get(n)} == names
    assert facts(CASE, router=router) != facts(CASE, router=other)


def test_a_checksum_knows_places_and_types() -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(a) == checksum(a.clone())
    assert len(checksum(a)) == 16
    sums = {
        checksum(a), checksum(a.flip(0)), checksum(a, a), checksum(a[:2]), checksum(-a),
        checksum(a.to(torch.bfloat16)), checksum(a[:0]),
        checksum(a.to(torch.float8_e4m3fn)),
    }  # fmt: skip
    assert len(sums) == 8


def test_scaling_is_the_same_as_the_reference_reads_it() -> None:
    from megamoe.reference.moe import scaling

    for at in ("weights", "output"):
        case = dataclasses.replace(CASE, routed_scaling_factor=2.5, scale_at=at)
        for scaled in (False, True):
            topk = TopK(ids=GOOD.ids, weights=GOOD.weights, scaled=scaled)
            assert session.scaling(topk, 2.5, at) == scaling(topk, case.layer())


def test_a_layer_runs_on_its_own_gpu_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def entering(device: torch.device) -> Any:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", entering)
    for name, taken in (("cpu", 0), ("cuda:0", 0), ("cuda", 0), ("cuda:1", 1)):
        entered.clear()
        with machine.current(torch.device(name)):
            assert len(entered) == taken
