"""A prepared layer: the kernel with its pack, and everything that is done above it on each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.dispatch import ops
from megamoe.dispatch.fingerprint import fingerprint, short
from megamoe.dispatch.machine import current
from megamoe.dispatch.modes import lasting
from megamoe.dispatch.placement import padded, physical, replicas
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.refuse import check_call, check_ids, check_update
from megamoe.dispatch.select import Decision
from megamoe.dispatch.shared import SharedFFN
from megamoe.dispatch.startup import (
    Rig,
    Start,
    check_capacities,
    check_options,
    check_tuning,
    tuner_of,
)
from megamoe.dispatch.tuning import Counts
from megamoe.dispatch.workspaces import Choice, ascending, rounds
from megamoe.errors import BadInput, MegaMoEError, bad_input
from megamoe.kernels.base import Context, Kernel, Workspace
from megamoe.kernels.staging import Staging
from megamoe.problem import MoEWeights, TopK

Verdict = Callable[[Tensor], None]
Watch = Callable[[Tensor, TopK, Tensor], Verdict | None]
"""Asked before each launch with (x, topk, physical ids); what it returns gets the output."""


class PreparedWeights:
    """One layer, ready to run; made by ``megamoe.prepare``, which is collective.

    ``decision`` says which kernel and why not the others. ``forward`` may be called any number of
    times; ``close`` gives the workspaces back, on every rank, and ``with`` does it.
    """

    def __init__(
        self,
        weights: MoEWeights,
        decision: Decision,
        ranks: Ranks | None = None,
        watch: Watch | None = None,
        start: Start | None = None,
    ) -> None:
        """ranks: inside their step "prepare"; None on one rank. watch: judges calls."""
        start = start or Start()
        request = decision.request
        self.decision = decision
        self.request = request
        self.rank = weights.rank
        self.device = weights.device
        self.family = weights.family
        self._ranks = ranks or Ranks()
        self._warm = False
        self._watch = watch
        features = decision.kernel.sheet.features
        self._shared = (
            SharedFFN(weights.shared)
            if weights.shared and "shared expert" not in features
            else None
        )
        self._number = ops.register(self)
        self._output_factor = (
            request.routed_scaling_factor
            if request.scale_at == "output" and "output scaling" not in features
            else 1.0
        )
        seen = dataclasses.replace(request, placement=physical(weights.placement))
        context = Context(
            request=seen,
            machine=decision.machine,
            device=weights.device,
            rank=weights.rank,
            group=self._ranks.group,
            peers=self._ranks,
            recipe=decision.recipe,
            exchange=start.most_replicas is not None,
            options=dict(start.options),
        )
        check_options(start.options, decision.kernel.sheet)
        share = padded(weights)
        facts = fingerprint(weights, decision)
        facts.update(decision.kernel.must_agree(share, context))
        if start.options:
            facts["options"] = str(sorted(start.options.items()))
        capacities = ascending((*start.capacities, request.max_tokens_per_rank))
        check_capacities(capacities, request.max_tokens_per_rank)
        check_tuning(start.tuning)
        if start.samples is not None:
            self._check_samples(*start.samples)
        if start.capacities:
            facts["workspaces"] = str(capacities)
        table = replicas(weights.placement, weights.device, start.most_replicas)
        facts["most_replicas"] = str(start.most_replicas)
        self._ranks.agree("request", facts)
        kernel = decision.kernel.prepare(share, context)
        self._kernel: Kernel | None = kernel
        self._staging = Staging(
            num_experts=request.num_experts,
            rank=weights.rank,
            sticky=torch.zeros(1, dtype=torch.bool, device=weights.device),
            replicas=None if table is None else table[0],
            counts=None if table is None else table[1],
            fmt=kernel.rows,
            stale=kernel.sheet.empty_slots == "stale",
            order=kernel.order,
        )
        self._exchange = context.exchange
        self._rig = Rig(
            kernel, self._staging, request, weights.device, self.capturable, start.samples
        )
        self._tuner = tuner_of(start, decision, seen, self._ranks, weights.device)
        self._spaces: list[Workspace] = []
        try:
            self.tactics = self._tuner.tactics(
                {c: kernel.tactics(c) for c in capacities}, self._rig
            )
            """By capacity, what each workspace runs, and where that came from."""
            self._rig.wanted.clear()
            for capacity in capacities:
                self._spaces.append(kernel.open(capacity, self.tactics[capacity].knobs or None))
        except BaseException:
            if self._ranks.world_size == 1:  # the others of several may not come to close
                self._give_back(kernel)
            raise
        self.choice = Choice.of(capacities)
        """Which workspace serves which step."""
        self._ranks.gather("ready", "")

    # --- the call ---------------------------------------------------------------------------------

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in a CUDA graph, once the layer is warm."""
        return (
            self.device.type == "cuda"
            and self._watch is None
            and self.decision.kernel.capturable(self.request, self.decision.machine)
        )

    def forward(
        self,
        x: Tensor,
        topk: TopK | tuple[Tensor, Tensor],
        *,
        max_tokens: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The layer on this rank's tokens: BF16 [T, H]; collective, and capture-safe after warmup.

        x: BF16 [T, H], any strides. max_tokens: the step's greatest T over all ranks, the same
        number on every rank; without it no rank may exceed max_tokens_per_rank. out: written and
        returned where given, apart from x. Raises BadInput before anything is launched; ranks that
        launched without this one then raise RankFailure.
        """
        if torch.compiler.is_compiling():
            return ops.call(self._number, x, topk, max_tokens, out)
        return self.run(x, topk, max_tokens, out)

    __call__ = forward

    def run(
        self,
        x: Tensor,
        topk: TopK | tuple[Tensor, Tensor],
        max_tokens: int | None,
        out: Tensor | None,
    ) -> Tensor:
        """What ``forward`` does, outside of what a compiler traces."""
        self._open()
        with current(self.device), self._ranks.step("forward") as call:
            if isinstance(topk, tuple):  # inside the step: the others are told of a bad one
                topk = TopK(ids=topk[0], weights=topk[1])
            check_call(x, topk, out, self.request, self.device)
            self._check_capture()
            factor = scaling(topk, self.request.routed_scaling_factor, self.request.scale_at)
            number, step, tokens = self._rounds(x.shape[0], max_tokens)
            check_ids(topk.ids, self.request.num_experts)
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
            verdict = None
            if self._watch is not None:
                verdict = self._watch(x, topk, self._staging.physical(topk.ids))
            call.launch(self.device)
            shared = None if self._shared is None else self._shared.start(x)
            if number == 1:
                self._run(x, topk.ids, topk.weights, y, tokens, factor)
            else:
                for first in range(0, number * step, step):
                    part = slice(first, first + step)
                    inputs = x[part], topk.ids[part], topk.weights[part]
                    self._run(*inputs, y[part], tokens, factor, first)
            if self._output_factor != 1.0:
                y *= self._output_factor  # a power of two: exact after rounding as before it
            if shared is not None:
                y += shared()  # BF16 + BF16: added in float32, rounded once
        if verdict is not None:  # outside of the step: the collective is complete on every rank
            self.check()
            verdict(y)
        return y

    def _check_samples(self, x: Tensor, topk: TopK) -> None:
        """Bad ids too: they would raise the flag that is for those who serve."""
        try:
            check_call(x, topk, None, self.request, self.device)
            check_ids(topk.ids.cpu(), self.request.num_experts)
        except BadInput as error:
            raise BadInput(f"samples: {error}") from None

    def _check_capture(self) -> None:
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        if self._watch is not None:
            raise bad_input(
                "layer", "", "has its calls judged on the host (MEGAMOE_PARITY), which a CUDA "
                "graph cannot hold", "unset it and prepare again, or run outside of graph capture",
            )  # fmt: skip
        if not self.capturable:
            raise bad_input(
                "kernel", self.decision.name, "reads from the device, which a CUDA graph cannot "
                "hold", "run it outside of graph capture",
            )  # fmt: skip
        if not self._warm:
            raise bad_input(
                "layer", "", "is being captured in a CUDA graph before it was warmed up",
                "call layer.warmup() on every rank first",
            )  # fmt: skip

    def _rounds(self, count: int, max_tokens: int | None) -> tuple[int, int, int]:
        """(rounds, tokens a round on this rank, greatest tokens a round on any rank)."""
        capacity = self.request.max_tokens_per_rank
        if max_tokens is None:
            if count > capacity:
                raise bad_input(
                    "x", f"of {count} tokens",
                    f"exceeds max_tokens_per_rank {capacity}",
                    "pass max_tokens (the greatest count of any rank) to run in rounds, or prepare "
                    "for more",
                )  # fmt: skip
            return 1, capacity, capacity
        if count > max_tokens:
            raise bad_input(
                "max_tokens", max_tokens, f"is below this rank's {count} tokens",
                "pass the greatest count of any rank",
            )  # fmt: skip
        number, step = rounds(max_tokens, capacity)
        return number, step, step

    def _run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        tokens: int,
        factor: float = 1.0,
        first: int = 0,
    ) -> None:
        """One round: staged, and launched. tokens: the greatest count of any rank."""
        space = self._space(tokens)
        batch = space.inputs(x, self.request.top_k, tokens)
        self._staging(x, ids, weights, batch, factor=factor, first=first)
        space.run(batch, out)

    def _space(self, tokens: int) -> Workspace:
        """Of a step whose greatest count is ``tokens``: the same on every rank."""
        return self._spaces[self.choice.index(tokens)] if len(self._spaces) > 1 else self._spaces[0]

    # --- the rest of its life ---------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile and allocate all that ``forward`` needs; collective."""
        self._open()
        with current(self.device), lasting(), self._ranks.step("warmup") as call:
            call.launch(self.device)
            for space in self._spaces:
                for tokens in space.compiles():
                    self._rig.run(space, tokens)
            self._rig.stage_others(self._spaces[0])
            if self._shared is not None:
                self._shared.warmup(self.request.max_tokens_per_rank)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            by_capacity = {space.capacity: space for space in self._spaces}
            self.choice = self._tuner.choice(
                self.tactics, lambda capacity, tokens: self._rig.step(by_capacity[capacity], tokens)
            )
            self._ranks.gather("warm", "")
        self._warm = True

    @property
    def started(self) -> Counts:
        """What the start measured, read and wrote: all zero but ``read`` after a warm one."""
        return self._tuner.counts

    def update(self, weights: MoEWeights) -> None:
        """Exchange the experts between two steps: other ones, or the same elsewhere; collective.

        weights: of the same geometry, formats and slots a rank; the placement may differ. The layer
        is prepared for it with ``most_replicas``, and then copies all that it packs. Written in
        place and in stream order, so that graphs captured before compute with the new experts,
        scales included. A router or a shared expert is left as it is.

        Raises BadInput where the weights do not fit, before anything is written; Unsupported where
        the kernel cannot exchange its experts in place.
        """
        kernel = self._open()
        with current(self.device), lasting(), self._ranks.step("update") as call:
            if self._watch is not None:
                raise bad_input(
                    "layer", "", "has its calls judged against the experts as they were loaded "
                    "(MEGAMOE_PARITY)", "unset it and prepare again",
                )  # fmt: skip
            if not self._exchange:
                raise bad_input(
                    "layer", "", "was prepared with experts that stay, some of which are the "
                    "caller's own bytes", "prepare it with most_replicas",
                )  # fmt: skip
            check_update(weights, self.request, self.rank, self.device)
            held = self._staging.replicas
            width = None if held is None else held.shape[1]
            table = replicas(weights.placement, self.device, width)
            facts = {"placement": short(str(weights.placement)), "update of": self.decision.name}
            self._ranks.agree("update", facts)
            write = kernel.update(padded(weights))
            self._ranks.gather("packed", "")  # a rank that could not leaves all as they are
            call.launch(self.device)
            write()
            if table is not None:
                assert self._staging.replicas is not None
                assert self._staging.counts is not None
                self._staging.replicas.copy_(table[0])
                self._staging.counts.copy_(table[1])
            self._ranks.gather("updated", "")

    def check(self) -> None:
        """Raise RankFailure where the ranks' group has failed, BadInput where an id outside [-1, E)
        was met since the last check, MegaMoEError where the kernel flagged its own output; reads
        the device.
        """
        self._ranks.check()
        if self._kernel is not None:
            for space in self._spaces:
                space.check()
        if bool(self._staging.sticky.item()):
            self._staging.sticky.zero_()
            raise BadInput(
                f"topk.ids held a value outside [-1, {self.request.num_experts}) since the last "
                "check; it was taken as an empty slot, so that call's output is invalid: fix the "
                "router"
            )

    def close(self) -> None:
        """Give the kernel's workspaces back; collective while all ranks are healthy. A second call
        does nothing.
        """
        kernel, self._kernel = self._kernel, None
        if kernel is None:
            return
        flagged: MegaMoEError | None = None
        try:
            if not self._ranks.healthy:
                return  # the others will not come
            with self._ranks.step("close") as call:
                self._ranks.gather("close", "")
                call.launch()
                flagged = self._give_back(kernel)
        finally:
            self._ranks.close()
        self.check()
        if flagged is not None:
            raise flagged

    def _give_back(self, kernel: Kernel) -> MegaMoEError | None:
        """Close all; the error that a workspace had flagged, which is this rank's own: the others
        still wait for close."""
        flagged = None
        for space in reversed(self._spaces):
            try:
                space.check()
            except MegaMoEError as error:
                flagged = error
            space.close()
        self._spaces = []
        kernel.close()
        return flagged

    def _open(self) -> Kernel:
        if self._kernel is None:
            raise MegaMoEError("this layer is closed; call megamoe.prepare again")
        return self._kernel

    def __enter__(self) -> PreparedWeights:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        kernel, self._kernel = self._kernel, None
        if kernel is not None and self._ranks.world_size == 1:
            self._give_back(kernel)
        elif kernel is not None:  # the others may be elsewhere: nothing collective now
            self._ranks.abandon(error)
            self._ranks.close()


def scaling(topk: TopK, factor: float, scale_at: str) -> float:
    """What the routing weights are multiplied by: the factor, or 1 if inside or applied later."""
    if scale_at == "output":
        return 1.0
    if topk.scaled is None and factor != 1.0:
        raise bad_input(
            "topk.scaled", "None",
            f"leaves unsaid whether routed_scaling_factor {factor:g} is inside the weights",
            "pass TopK(..., scaled=True) if your router multiplied it in, else False",
        )  # fmt: skip
    return 1.0 if topk.scaled else factor
