"""A prepared layer: the kernel with its pack, and everything that is done above it on each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.dispatch.fingerprint import fingerprint
from megamoe.dispatch.placement import padded, physical, replicas
from megamoe.dispatch.ranks import Ranks
from megamoe.dispatch.select import Decision
from megamoe.dispatch.shared import SharedFFN
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
    ) -> None:
        """ranks: inside their step "prepare"; None on one rank. watch: judges calls."""
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
        self._output_factor = (
            request.routed_scaling_factor
            if request.scale_at == "output" and "output scaling" not in features
            else 1.0
        )
        context = Context(
            request=dataclasses.replace(request, placement=physical(weights.placement)),
            machine=decision.machine,
            device=weights.device,
            rank=weights.rank,
            group=self._ranks.group,
            peers=self._ranks,
            recipe=decision.recipe,
        )
        share = padded(weights)
        facts = fingerprint(weights, decision)
        facts.update(decision.kernel.must_agree(share, context))
        self._ranks.agree("request", facts)
        kernel = decision.kernel.prepare(share, context)
        self._kernel: Kernel | None = kernel
        self._spaces = [kernel.open(request.max_tokens_per_rank)]
        table = replicas(weights.placement, weights.device)
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
        self._ranks.gather("ready", "")

    # --- the call ---------------------------------------------------------------------------------

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
        kernel = self._open()
        with self._ranks.step("forward") as call:
            topk = TopK(ids=topk[0], weights=topk[1]) if isinstance(topk, tuple) else topk
            self._check(x, topk, out)
            self._check_capture(kernel)
            factor = scaling(topk, self.request.routed_scaling_factor, self.request.scale_at)
            rounds, step, tokens = self._rounds(x.shape[0], max_tokens)
            self._check_ids(topk.ids)
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
            verdict = None
            if self._watch is not None:
                verdict = self._watch(x, topk, self._staging.physical(topk.ids))
            call.launch(self.device)
            shared = None if self._shared is None else self._shared.start(x)
            if rounds == 1:
                self._run(x, topk.ids, topk.weights, y, tokens, factor)
            else:
                for first in range(0, rounds * step, step):
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

    __call__ = forward

    def _check(self, x: Tensor, topk: TopK, out: Tensor | None) -> None:
        hidden = self.request.hidden_size
        if x.dim() != 2 or x.shape[1] != hidden:
            raise bad_input(
                "x", f"of shape {list(x.shape)}", f"is not [tokens, {hidden}]", "flatten the batch"
            )
        if x.dtype != torch.bfloat16:
            raise bad_input("x", f"of {x.dtype}", "is not bfloat16", "cast with x.bfloat16()")
        if x.device != self.device:
            raise bad_input(
                "x", f"on {x.device}", f"is not on the layer's {self.device}", "move it"
            )
        if topk.ids.device != self.device:
            raise bad_input(
                "topk.ids", f"on {topk.ids.device}", f"are not on the layer's {self.device}",
                "move them",
            )  # fmt: skip
        if topk.tokens != x.shape[0]:
            raise bad_input(
                "topk.ids", f"of {topk.tokens} tokens", f"do not match x of {x.shape[0]}",
                "route the same tokens",
            )  # fmt: skip
        if topk.top_k != self.request.top_k:
            raise bad_input(
                "topk", f"of {topk.top_k} slots a token", f"is not top_k {self.request.top_k}",
                "prepare the layer for it",
            )  # fmt: skip
        if out is not None and (
            out.shape != x.shape or out.dtype != x.dtype or out.device != x.device
        ):
            raise bad_input(
                "out", f"of {out.dtype} {list(out.shape)} on {out.device}",
                f"is not {x.dtype} {list(x.shape)} on {x.device}", "pass one like x",
            )  # fmt: skip
        if out is not None and not out.is_contiguous():
            raise bad_input(
                "out", f"of strides {out.stride()}", "is not contiguous", "pass one that is"
            )
        if out is not None and overlap(x, out):
            raise bad_input(
                "out", "", "shares memory with x, which is read after out is written",
                "pass another tensor",
            )  # fmt: skip

    def _check_capture(self, kernel: Kernel) -> None:
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        if self._watch is not None:
            raise bad_input(
                "layer", "", "has its calls judged on the host (MEGAMOE_PARITY), which a CUDA "
                "graph cannot hold", "unset it and prepare again, or run outside of graph capture",
            )  # fmt: skip
        if not kernel.capturable:
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
        rounds = max(1, -(-max_tokens // capacity))
        step = -(-max_tokens // rounds)
        return rounds, step, step

    def _check_ids(self, ids: Tensor) -> None:
        """On a CPU, where looking costs nothing; on a GPU staging raises the flag."""
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < -1 or high >= self.request.num_experts:
                raise bad_input(
                    "topk.ids", low if low < -1 else high,
                    f"is outside [-1, {self.request.num_experts})", "use -1 for an empty slot",
                )  # fmt: skip

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
        return self._spaces[0]

    # --- the rest of its life ---------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile and allocate all that ``forward`` needs; collective."""
        self._open()
        with self._ranks.step("warmup") as call:
            call.launch(self.device)
            for space in self._spaces:
                for tokens in space.compiles():
                    self._run(*self._dummy(tokens), tokens)
            if self._shared is not None:
                self._shared.warmup(self.request.max_tokens_per_rank)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._ranks.gather("warm", "")
        self._warm = True

    def _dummy(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of zeros over all experts, and where their output goes."""
        request, device = self.request, self.device
        k, experts = request.top_k, request.num_experts
        x = torch.zeros(tokens, request.hidden_size, dtype=torch.bfloat16, device=device)
        ids = torch.arange(tokens * k, device=device).view(tokens, k)
        ids = ids % experts if experts else torch.full_like(ids, -1)
        weights = torch.full((tokens, k), 1.0 / k, dtype=torch.float32, device=device)
        return x, ids, weights, torch.empty_like(x)

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


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share bytes, by the range that each one's strides span."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (low, high), (start, stop) = _span(a), _span(b)
    return low < stop and start < high


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches, [first, past the last)."""
    if t.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset()) * t.element_size()
    return first, first + (int(reach) + 1) * t.element_size()


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
