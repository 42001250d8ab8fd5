"""The stand-in for `flashinfer.moe_ep`, and the door through which tests put it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from emulated import facts, standalone
from emulated.backends import BACKENDS, Backend, require
from emulated.cluster import ContractBroken, Trap, here
from emulated.compute import Post, launch, reduce
from megamoe.dispatch.machine import H200
from megamoe.kernels import assumed, flashinfer
from megamoe.problem import Machine


@dataclass
class Workspace:
    """Buffers that all layers of one key share; whatever the last launch left stays in them.

    terms: each slot's row as it came back to its token's rank, never cleared.
    """

    terms: Tensor
    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    output: Tensor
    storage: dict[str, Tensor]
    users: int = 0


@dataclass
class Device:
    """The machine of all ranks. launches: how many each rank took part in. compiled: by layer and
    rank, what was compiled apart. faulty: ranks whose launches flag a protocol error.
    """

    pool: dict[Any, Workspace] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    layers: dict[int, int] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)
    compiled: dict[tuple[int, int], set[Any]] = field(default_factory=dict)
    faulty: set[int] = field(default_factory=set)
    lost: bool = False

    @property
    def open_workspaces(self) -> int:
        return len(self.pool)

    def count(self, what: dict[int, int], rank: int) -> int:
        with self.lock:
            what[rank] = what.get(rank, 0) + 1
            return what[rank]

    def modules(self) -> dict[str, Any]:
        """By name under `flashinfer`, what the door may import."""
        records = {name: facts.record(name, fields) for name, fields in assumed.API.items()}
        configs = {name: facts.record(name, fields) for name, fields in assumed.CONFIGS.items()}

        def layer(bootstrap: Any, fleet: Any, weights: Any, *, backend: Any) -> MegaLayer:
            return MegaLayer(self, bootstrap, fleet, weights, backend)

        push = "moe_ep.kernel_src.sm90"
        return {
            "moe_ep": SimpleNamespace(
                **records,
                **configs,
                MoEEpLayer=layer,
                MoEWeightPack=facts.record("MoEWeightPack", assumed.PACK),
            ),
            f"{push}.push_style_megamoe": SimpleNamespace(
                Sm90PushWeights=facts.record("Sm90PushWeights", assumed.PUSH_FP8_WEIGHTS)
            ),
            f"{push}.cake_bf16_megamoe": SimpleNamespace(
                Sm90CakeBf16Weights=facts.record("Sm90CakeBf16Weights", assumed.PUSH_BF16_WEIGHTS)
            ),
            "moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl.weights": SimpleNamespace(
                TransformedMegaWeights=TransformedMegaWeights
            ),
            "moe_ep.kernel_src.sm120.split_cutedsl_megakernel": SimpleNamespace(
                select_graph_compile_bucket=bucket_of
            ),
            "megamoe": standalone.module(self),
        }


class TransformedMegaWeights(tuple[Any, Any]):
    """Two legs that carry their column order."""

    nvfp4_kperm: int

    def __new__(cls, w13: Any, w2: Any, *, nvfp4_kperm: int) -> TransformedMegaWeights:
        made = super().__new__(cls, (w13, w2))
        made.nvfp4_kperm = nvfp4_kperm
        return made


class MegaLayer:
    """`MoEEpMegaLayer`: collective construction, first launch and destruction."""

    def __init__(self, device: Device, bootstrap: Any, fleet: Any, weights: Any, mega: Any) -> None:
        config = mega.megakernel
        self.device, self.rank, self.world = device, bootstrap.rank, bootstrap.world_size
        require(fleet.num_experts % self.world == 0, f"{fleet.num_experts} experts of {self.world}")
        self.cluster = here(self.rank, self.world)
        self.capacity, self.quantize_input = fleet.max_tokens_per_rank, mega.quantize_input
        self.backend: Backend = BACKENDS[config.kernel_name](
            config, fleet.token_hidden_size, fleet.num_experts // self.world
        )
        require(
            (weights is None, mega.preprocess_weights, mega.transformed_weights is None)
            == ((False, True, True) if self.backend.packs else (True, False, False)),
            "weights in a pack that FlashInfer transforms, or kernel-ready ones",
        )
        self._check_process_group(bootstrap)
        require(bootstrap.stream == 0, "the kernels launch on the current stream")
        self.backend.check_config(mega.quantize_input, self.world)
        given = _transformed(weights) if weights is not None else mega.transformed_weights
        self.experts = self.backend.experts(given)
        self.staged: tuple[Workspace, int, int | None] | None = None
        self.index = device.count(device.layers, self.rank)
        self.num_experts = fleet.num_experts
        self.key = (config.kernel_name, fleet.num_experts, self.capacity, _fields(config))
        self.cluster.meet(self.rank, ("construct", self.index, self.key))
        self.workspace: Workspace | None = None
        self.signature: Any = None
        self.destroyed = False

    def _check_process_group(self, bootstrap: Any) -> None:
        no_dist = os.environ.get("MEGA_NO_DIST") == "1"
        if self.world > 1:
            require(not no_dist, "MEGA_NO_DIST with peers: their memory is not symmetric")
            group = bootstrap.process_group
            require(
                (dist.get_rank(group), dist.get_world_size(group)) == (self.rank, self.world),
                "the process group is not the layer's ranks",
            )
        require(self.world > 1 or self.backend.alone, f"{self.backend.name} on one rank")
        if self.world == 1 and self.backend.nvshmem:
            require(no_dist, "one rank without MEGA_NO_DIST wants NVSHMEM and a group")

    @property
    def _workspace(self) -> Workspace | None:
        return self.workspace

    def forward(self, t: Any, *, return_workspace_view: bool = False) -> Tensor:
        require(not return_workspace_view or t.output is None, "a view and an output")
        self.stage_inputs(t)
        output = t.output
        if output is None and not return_workspace_view:
            output = torch.empty(t.hidden_states.shape, dtype=torch.bfloat16)
        return self.compute_staged(output=output)

    def stage_inputs(self, t: Any, *, compile_tokens_per_rank: int | None = None) -> None:
        require(not self.destroyed, "the layer has been destroyed")
        if self.device.lost:
            raise Trap("the device context was lost in an earlier launch")
        self._check_tensors(t)
        bound = compile_tokens_per_rank
        require(
            bound is not None or not self.backend.buckets,
            "the greatest count of any rank is not passed on",
        )
        require(bound is None or self.backend.buckets, f"{self.backend.name} takes no bucket")
        n = t.hidden_states.shape[0]
        require(bound is None or n <= bound <= self.capacity, f"{n} tokens, {bound} announced")
        workspace = self._acquire(t)
        self._stage(workspace, t, n)
        self.staged = workspace, n, bound

    def compute_staged(self, *, output: Tensor | None) -> Tensor:
        assert self.staged is not None
        workspace, n, bound = self.staged
        require(output is not None or self.backend.view, f"{self.backend.name} returns no view")
        require(output is None or not self.backend.owns_output, "a graph for every output address")
        if self.backend.owns_output:  # a graph for each bucket and output address
            what = (bucket_of(bound or 0, self.capacity), workspace.output.data_ptr())
            self.device.compiled.setdefault((self.index, self.rank), set()).add(what)
        if self.backend.flags:
            workspace.storage["protocol_error"][0] = self.rank in self.device.faulty
        live = workspace.ids >= 0
        if bool((workspace.ids >= self.num_experts).any()):
            self.device.lost = True
            raise Trap(f"expert {int(workspace.ids.max())} of {self.num_experts}")
        # Rows that no slot names are poison, and must not matter.
        rows = self.backend.operand(workspace.x, workspace.scales)
        post = Post(x=rows, ids=workspace.ids, weights=workspace.weights, experts=self.experts)
        posts = self.cluster.meet(self.rank, ("launch", self.index, self.key, bound), post)
        self.device.count(self.device.launches, self.rank)
        recipe = self.backend.recipe()
        terms = launch(self.rank, posts, recipe, self.backend.activation())
        workspace.terms[live] = terms[live]
        seen = workspace.ids.clamp(min=0) if self.backend.stale else workspace.ids
        each = self.backend.experts_per_rank
        workspace.output.copy_(reduce(workspace.terms, seen, workspace.weights, recipe, each))
        if output is None:
            return workspace.output[:n]
        require(output.shape[0] == n, "the output's rows are taken as the token count")
        output.copy_(workspace.output[:n])
        return output

    def _check_tensors(self, t: Any) -> None:
        n = t.hidden_states.shape[0]
        require(n <= self.capacity, f"{n} tokens exceed the capacity {self.capacity}")
        require(
            tuple(t.hidden_states.shape) == (n, self.backend.hidden),
            f"hidden_states {tuple(t.hidden_states.shape)}",
        )
        require(
            tuple(t.topk_ids.shape)
            == tuple(t.topk_weights.shape)
            == (n, self.backend.config.top_k),
            f"topk of {tuple(t.topk_ids.shape)}",
        )
        require(t.topk_ids.dtype in self.backend.ids, f"topk_ids of {t.topk_ids.dtype}")
        if self.quantize_input:
            require(t.hidden_states.dtype == torch.bfloat16, f"rows of {t.hidden_states.dtype}")
        self.backend.check_rows(t.hidden_states, t.scales)
        if self.backend.strict:
            require(t.topk_weights.dtype == torch.float32, f"weights of {t.topk_weights.dtype}")
            for tensor in (t.hidden_states, t.topk_ids, t.topk_weights):
                require(tensor.is_contiguous(), "an input is not contiguous")
        signature = tuple(
            (tensor.dtype, tensor.dim(), tensor.shape[1])
            for tensor in (t.hidden_states, t.topk_ids, t.topk_weights)
        )
        require(self.signature in (None, signature), "dtypes or widths changed between calls")
        self.signature = signature

    def _acquire(self, t: Any) -> Workspace:
        if self.workspace is None:
            self.cluster.meet(self.rank, ("allocate", self.index, self.key))
            with self.device.lock:
                key = (self.rank, self.key)
                if key not in self.device.pool:
                    self.device.pool[key] = self._allocate(t)
                self.workspace = self.device.pool[key]
                self.workspace.users += 1
        return self.workspace

    def _allocate(self, t: Any) -> Workspace:
        n, h, k = self.capacity, self.backend.hidden, self.backend.config.top_k
        x = torch.full((n, h), torch.nan, dtype=torch.float32).to(t.hidden_states.dtype)
        scales = None
        if t.scales is not None:
            scales = torch.full((n, t.scales.shape[1]), torch.nan).to(t.scales.dtype)
        return Workspace(
            terms=torch.full((n, k, h), torch.nan),
            x=x,
            scales=scales,
            ids=torch.full((n, k), -1, dtype=torch.int64),
            weights=torch.full((n, k), torch.nan),
            output=torch.full((n, h), torch.nan, dtype=torch.bfloat16),
            storage={"protocol_error": torch.zeros(4, dtype=torch.uint8)}
            if self.backend.flags
            else {},
        )

    def _stage(self, workspace: Workspace, t: Any, n: int) -> None:
        _bytes(workspace.x)[:n] = _bytes(t.hidden_states)
        if workspace.scales is not None:
            _bytes(workspace.scales)[:n] = _bytes(t.scales)
        workspace.ids[:n] = t.topk_ids
        workspace.ids[n:] = -1
        workspace.weights[:n] = t.topk_weights

    def destroy(self) -> None:
        if self.destroyed:
            return
        self.cluster.meet(self.rank, ("destroy", self.index, self.key))
        self.destroyed = True
        if self.workspace is None:
            return
        with self.device.lock:
            self.workspace.users -= 1
            if self.workspace.users == 0:
                del self.device.pool[(self.rank, self.key)]


def _transformed(pack: Any) -> Any:
    """What cake keeps of a pack: w2 itself, and copies of all that its order moves."""
    moved = ("w13", "w13_scale", "w2_scale")
    return SimpleNamespace(
        w2=pack.w2,
        **{n: _bytes(getattr(pack, n)).clone().view(getattr(pack, n).dtype) for n in moved},
    )


def bucket_of(tokens: int, capacity: int) -> int:
    """Fewer buckets than there are; what matters is that each is compiled apart."""
    return next((b for b in (2, 4) if tokens <= b <= capacity), capacity)


def _bytes(tensor: Tensor) -> Tensor:
    """8-bit floats as bytes, since not all operations know them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _fields(config: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(value)) for name, value in sorted(vars(config).items()))


@contextlib.contextmanager
def emulated(machine: Machine = H200) -> Iterator[Device]:
    """Within the block, `megamoe` runs on `machine` and FlashInfer is this stand-in."""
    device = Device()
    modules = device.modules()

    def load(name: str) -> Any:
        if name not in modules:
            raise ContractBroken(f"flashinfer.{name} is not part of what the adapters use")
        return modules[name]

    def probe(*_: Any, **__: Any) -> Machine:
        return machine

    with (
        mock.patch.object(flashinfer, "load", load),
        mock.patch.object(flashinfer, "_TREES", []),
        mock.patch("megamoe.api.probe", probe),
    ):
        yield device
