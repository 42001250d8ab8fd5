"""What the kernels of ``flashinfer.moe_ep`` share: one layer of packed weights, and its workspaces.

An adapter says how it packs experts and how FlashInfer's layer is configured. Its workspaces differ
in how rows get into them: pull kernels read buffers that staging fills in place, so that a call is
one staging launch and one prebuilt launch of the kernel; others are handed tensors.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.errors import MegaMoEError
from megamoe.formats import E8M0, PLAIN_BF16
from megamoe.kernels import flashinfer
from megamoe.kernels.base import Batch, Context, Datasheet, Tactic, Workspace, pooled
from megamoe.kernels.packed import PackedKernel
from megamoe.problem import Request


class MegaKernel(PackedKernel):
    """A layer of FlashInfer. config: the name of its configuration. tree: the kernels whose modules
    it shares a process with.
    """

    config: ClassVar[str]
    tree: ClassVar[str | None] = None

    def room(self, tokens: int) -> int:
        """The tokens a rank that a workspace for so many is opened with."""
        return pooled(self.context.request, tokens) if self.sheet.transport == "NVSHMEM" else tokens

    @classmethod
    @abc.abstractmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        """The configuration's fields besides the sizes."""

    @classmethod
    def handed(cls, packed: Any, context: Context) -> Any:
        """What FlashInfer's layer is given: the pack's own tensors, in FlashInfer's form."""
        return packed.transformed()

    def __init__(self, packed: Any, context: Context) -> None:
        super().__init__(packed, context)
        self.layer = self.opened(self.handed(packed, context))

    def opened(self, weights: Any, *, pack: Any = None) -> flashinfer.MegaLayer:
        request = self.context.request
        return flashinfer.MegaLayer(
            self.context,
            self.config,
            weights,
            capacity=self.room(request.max_tokens_per_rank),
            quantised=self.rows != PLAIN_BF16,
            pack=pack,
            tree=self.tree,
            intermediate_size=request.intermediate_size,
            top_k=request.top_k,
            **self.fields(self.context),
        )

    def close(self) -> None:
        self.layer.close()


class MegaWorkspace(Workspace):
    """Handed the caller's rows, which FlashInfer copies or sends by itself."""

    def __init__(self, kernel: MegaKernel, capacity: int, tactic: Tactic | None) -> None:
        self.capacity, self.tactic = capacity, tactic
        self.sheet: Datasheet = kernel.sheet
        self.device = kernel.context.device
        self.space = kernel.layer.open(kernel.room(capacity), tactic)
        self.room = kernel.room

    def run(self, batch: Batch, out: Tensor) -> None:
        self.space.run(batch, out)

    def close(self) -> None:
        self.space.close()


class CodedWorkspace(MegaWorkspace):
    """Handed MXFP8 rows, coded into buffers of ours.

    least: rows that are launched at least, where a launch of none would be skipped while the other
    ranks wait for it. bucketed: the kernel's choice follows the greatest count of any rank. view:
    it writes its own output, from which the caller's is copied. flag: what in its storage says that
    the last launch went wrong.
    """

    def __init__(
        self,
        kernel: MegaKernel,
        capacity: int,
        tactic: Tactic | None,
        *,
        least: int = 0,
        bucketed: bool = False,
        view: bool = False,
        flag: str | None = None,
    ) -> None:
        super().__init__(kernel, capacity, tactic)
        request, fmt = kernel.context.request, kernel.rows
        assert fmt.scale is E8M0
        hidden, k = request.hidden_size, request.top_k

        def empty(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(capacity, columns, dtype=dtype, device=self.device)

        self.held = Batch(
            x=empty(hidden, fmt.element.dtype),
            scales=empty(hidden // fmt.block[1], torch.uint8).view(torch.float8_e8m0fnu),
            ids=empty(k, self.sheet.id_dtype),
            weights=empty(k, torch.float32),
            count=0,
            tokens=0,
        )
        self.bucketed, self.view, self.flag = bucketed, view, flag
        self.spare = torch.empty(least, hidden, dtype=torch.bfloat16, device=self.device)
        self.flagged = torch.zeros(1, dtype=torch.int32, device=self.device)

    def inputs(self, x: Tensor, top_k: int, tokens: int) -> Batch:
        held, rows = self.held, max(x.shape[0], len(self.spare))
        assert held.scales is not None
        return Batch(
            x=held.x[:rows], scales=held.scales[:rows], ids=held.ids[:rows],
            weights=held.weights[:rows], count=x.shape[0], tokens=tokens,
        )  # fmt: skip

    def run(self, batch: Batch, out: Tensor) -> None:
        self.space.stage(batch, bucket=self.room(max(1, batch.tokens)) if self.bucketed else None)
        self.space.compute(out if len(out) == len(batch.ids) else self.spare, view=self.view)
        if self.flag is not None:  # the next launch clears it
            self.flagged.bitwise_or_(self.space.storage(self.flag).view(torch.int32)[:1])

    def check(self) -> None:
        if self.flag is not None and bool(self.flagged.item()):
            self.flagged.zero_()
            raise MegaMoEError(
                f"{self.sheet.name} flagged a {self.flag.replace('_', ' ')} on this rank since the "
                "last check, so the output of that call is invalid on every rank: close the layer "
                "and prepare it again"
            )


class PullKernel(MegaKernel):
    """The pull kernels for Hopper. candidates, launch: FlashInfer's functions that name a kernel's
    tactics, and that prebuild a launch of it.
    """

    tree = "SM90 pull"
    candidates: ClassVar[str]
    launch: ClassVar[str]

    @classmethod
    def fields(cls, context: Context) -> dict[str, Any]:
        return {"gate_up_clamp": context.request.activation.limit}

    @classmethod
    def geometry(cls, request: Request) -> dict[str, Any]:
        """What the tactics depend on besides the capacity."""
        return {}

    def tactics(self, capacity: int) -> list[Tactic]:
        geometry = self.geometry(self.context.request)
        return flashinfer.tactics(self.candidates, max_tokens=self.room(capacity), **geometry)

    def open(self, capacity: int, tactic: Tactic | None = None) -> PullWorkspace:
        return PullWorkspace(self, capacity, tactic)


def fp4_geometry(request: Request) -> dict[str, Any]:
    """What the tactics of FP4 experts depend on besides the capacity."""
    return {
        "hidden": request.hidden_size,
        "intermediate": request.intermediate_size,
        "num_experts": request.num_experts,
        "world_size": request.world_size,
    }


class PullWorkspace(MegaWorkspace):
    """Peers pull rows from buffers that staging fills in place; ids of the whole capacity are
    written, since every launch looks at all of it.

    A launch is prebuilt for each stream, since layers that share a workspace would otherwise build
    its arguments anew at every call.
    """

    def __init__(self, kernel: PullKernel, capacity: int, tactic: Tactic | None) -> None:
        # A whole dict of knobs: without one FlashInfer would look into a file of its own, keyed by
        # no version, in which another capacity's tactic may stand.
        super().__init__(kernel, capacity, tactic or kernel.tactics(capacity)[0])
        self.launch = kernel.launch
        coded = kernel.rows != PLAIN_BF16
        self.held = Batch(
            x=self.space.buffer("x"),
            scales=self.space.buffer("x_sf") if coded else None,
            ids=self.space.buffer("topk_idx"),
            weights=self.space.buffer("topk_weights"),
            count=0,
            tokens=0,
        )
        if kernel.rows.rule is not None and kernel.rows.rule.kind == "static":
            # A plane that travels with the rows and scales nothing: ones, as powers of two.
            self.space.buffer("x_sf").view(torch.uint8).fill_(127)
            self.held = dataclasses.replace(self.held, scales=None)
        self.output = self.space.buffer("output_activation")
        self._launches: dict[int, Callable[[], None]] = {}

    def inputs(self, x: Tensor, top_k: int, tokens: int) -> Batch:
        return dataclasses.replace(self.held, count=x.shape[0], tokens=tokens)

    def compile(self) -> None:
        self._launch()

    def run(self, batch: Batch, out: Tensor) -> None:
        self._launch()()
        if batch.count:
            out.copy_(self.output[: batch.count])

    def _launch(self) -> Callable[[], None]:
        stream = stream_of(self.device)
        launch = self._launches.get(stream)
        if launch is None:
            launch = self._launches[stream] = self.space.thunk(flashinfer.PULL, self.launch)
        return launch

    def close(self) -> None:
        self._launches.clear()
        super().close()


def stream_of(device: torch.device) -> int:
    """The current stream's handle; 0 where there are none."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)
