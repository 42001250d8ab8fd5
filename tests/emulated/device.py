"""The stand-in for `flashinfer.moe_ep`, and the door through which tests put it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
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
from emulated.compute import Post, check_pool, launch, reduce
from megamoe.dispatch.machine import H200
from megamoe.kernels import assumed, flashinfer
from megamoe.kernels.packs import tensors_of
from megamoe.problem import ExpertWeights, Machine

WRONG_TILES: set[int] = set()  # of tactics whose answers are wrong


@dataclass
class Workspace:
    """Buffers that all layers of one key share; whatever the last launch left stays in them.

    terms: each slot's row as it came back to its token's rank, never cleared.
    """

    key: Any
    knobs: Any
    terms: Tensor
    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    output_activation: Tensor
    storage: dict[str, Tensor]
    users: int = 0
    compiled: bool = False

    @property
    def capacity(self) -> int:
        return len(self.x)


@dataclass
class Handle:
    """`MoEEpMegaWorkspace`: one layer's hold on a workspace."""

    layer: MegaLayer
    _backend_workspace: Workspace
    destroyed: bool = False

    def destroy(self) -> None:
        if not self.destroyed:
            self.destroyed = True
            self.layer.release(self._backend_workspace)


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
    owners: dict[Any, MegaLayer] = field(default_factory=dict)
    lost: bool = False

    @property
    def open_workspaces(self) -> int:
        return len(self.pool)

    def count(self, what: dict[int, int], rank: int) -> int:
        with self.lock:
            what[rank] = what.get(rank, 0) + 1
            return what[rank]

    def thunk(self, name: str, first: Any, second: Any, workspace: Workspace) -> Any:
        """Of the layer whose weights these are, on the calling rank."""
        found = [layer for (_, leg), layer in self.owners.items() if leg == id(first)]
        require(len(found) == 1 and found[0].given[1] is second, "weights of no layer")
        require(found[0].backend.launch == name, f"{name} launches another kernel")
        return found[0].thunk(workspace)

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
            f"{push}.pull_style_cutedsl_megakernel": SimpleNamespace(
                **{
                    backend.launch: functools.partial(self.thunk, backend.launch)
                    for backend in BACKENDS.values()
                    if backend.launch is not None
                },
                **{
                    f"hopper_{name}_candidates": functools.partial(candidates, name)
                    for name in ("bf16", "fp8", "mxfp4", "nvfp4")
                },
            ),
            "moe_ep.kernel_src.sm120.split_cutedsl_megakernel": SimpleNamespace(
                select_graph_compile_bucket=bucket_of
            ),
            "megamoe": standalone.module(self),
        }


def candidates(name: str, max_tokens: int, **geometry: Any) -> list[dict[str, Any]]:
    """The default of a capacity, and two others."""
    asked = {"bf16": set(), "fp8": {"fp8_scale_mode"}}
    fp4 = {"hidden", "intermediate", "num_experts", "world_size"}
    wanted = asked.get(name, fp4 | ({"kperm"} if name == "nvfp4" else set()))
    require(set(geometry) == wanted, f"{name} candidates of {sorted(geometry)}")
    return [{"tile": (n, 64), "capacity": max_tokens} for n in (64, 128, 256)]


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
        self.given = given
        self._decoded: tuple[Any, ExpertWeights] = (), self.backend.experts(given)
        self.staged: tuple[Workspace, int, int | None] | None = None
        self.index = device.count(device.layers, self.rank)
        self.num_experts = fleet.num_experts
        self.key = (config.kernel_name, fleet.num_experts, _fields(config))
        self.cluster.meet(self.rank, ("construct", self.index, self.key, self.capacity))
        self.handles: list[Handle] = []
        self.own: Handle | None = None
        self.signature: Any = None
        self.destroyed = False
        if self.backend.launch is not None:
            device.owners[(self.rank, id(given[0]))] = self

    @property
    def experts(self) -> ExpertWeights:
        """Decoded anew where a byte of them was written."""
        versions = [(t.data_ptr(), t._version) for t in tensors_of(self.given)]
        if self._decoded[0] != versions:
            self._decoded = versions, self.backend.experts(self.given)
        return self._decoded[1]

    def _check_no_dist(self) -> None:
        """Read wherever symmetric memory is allocated."""
        no_dist = os.environ.get("MEGA_NO_DIST") == "1"
        require(not no_dist or self.world == 1, "MEGA_NO_DIST: memory that is not symmetric")
        if self.world == 1 and self.backend.nvshmem:
            require(no_dist, "one rank without MEGA_NO_DIST wants NVSHMEM and a group")

    def _check_process_group(self, bootstrap: Any) -> None:
        self._check_no_dist()
        if self.world > 1:
            group = bootstrap.process_group
            require(
                (dist.get_rank(group), dist.get_world_size(group)) == (self.rank, self.world),
                "the process group is not the layer's ranks",
            )
        require(self.world > 1 or self.backend.alone, f"{self.backend.name} on one rank")

    def create_workspace(
        self, max_tokens_per_rank: int, *, live_tokens: int | None = None, knobs: Any = None
    ) -> Handle:
        require(not self.destroyed, "the layer has been destroyed")
        require(live_tokens is None, "live_tokens")
        knobs = knobs or getattr(self.backend.config, "knobs", None)
        if self.backend.launch is not None:
            require(bool(knobs), "a tactic out of FlashInfer's own file")
            of = knobs.get("capacity")
            require(of == max_tokens_per_rank, f"the tactic of {of} at {max_tokens_per_rank}")
        sizes = [h._backend_workspace.capacity for h in self.handles if not h.destroyed]
        require(max_tokens_per_rank not in sizes, f"a second workspace of {max_tokens_per_rank}")
        key = (*self.key, max_tokens_per_rank, repr(knobs))
        self.cluster.meet(self.rank, ("allocate", self.index, key))
        with self.device.lock:
            found = self.device.pool.get((self.rank, key))
            if found is None:
                found = self._allocate(max_tokens_per_rank, key, knobs)
                self.device.pool[self.rank, key] = found
            found.users += 1
        handle = Handle(self, found)
        self.handles.append(handle)
        return handle

    def forward(
        self, t: Any, *, workspace: Handle | None = None, return_workspace_view: bool = False
    ) -> Tensor:
        require(not return_workspace_view or t.output is None, "a view and an output")
        self.stage_inputs(t, workspace=workspace)
        output = t.output
        if output is None and not return_workspace_view:
            output = torch.empty(t.hidden_states.shape, dtype=torch.bfloat16)
        return self.compute_staged(output=output)

    def stage_inputs(
        self,
        t: Any,
        *,
        workspace: Handle | None = None,
        compile_tokens_per_rank: int | None = None,
    ) -> None:
        self._check_alive()
        if workspace is None:  # its own, of the full capacity
            self.own = self.own or self.create_workspace(self.capacity)
            workspace = self.own
        require(
            not workspace.destroyed and workspace.layer is self, "not a workspace of this layer"
        )
        held = workspace._backend_workspace
        self._check_tensors(t, held.capacity)
        bound = compile_tokens_per_rank
        require(
            bound is not None or not self.backend.buckets,
            "the greatest count of any rank is not passed on",
        )
        require(bound is None or self.backend.buckets, f"{self.backend.name} takes no bucket")
        n = t.hidden_states.shape[0]
        require(bound is None or n <= bound <= held.capacity, f"{n} tokens, {bound} announced")
        self._stage(held, t, n)
        self.staged = held, n, bound

    def compute_staged(self, *, output: Tensor | None) -> Tensor:
        assert self.staged is not None
        workspace, n, bound = self.staged
        require(n > 0 or self.backend.idles, "a rank without rows skips its launch; peers hang")
        require(output is not None or self.backend.view, f"{self.backend.name} returns no view")
        require(output is None or not self.backend.owns_output, "a graph for every output address")
        if self.backend.owns_output:  # a graph for each bucket and output address
            bucket = bucket_of(bound or 0, workspace.capacity)
            what = (bucket, workspace.output_activation.data_ptr())
            compiled = self.device.compiled.setdefault((self.index, self.rank), set())
            if what not in compiled:  # allocates
                self._check_no_dist()
            compiled.add(what)
        self.launch(workspace, bound)
        if output is None:
            return workspace.output_activation[:n]
        require(output.shape[0] == n, "the output's rows are taken as the token count")
        output.copy_(workspace.output_activation[:n])
        return output

    def thunk(self, workspace: Workspace) -> Callable[[], None]:
        """A launch on what lies in the buffers; the first of a workspace compiles."""
        self._check_alive()
        if not workspace.compiled:
            self.cluster.meet(self.rank, ("compile", self.index, workspace.key))
            workspace.compiled = True
        return lambda: self.launch(workspace, None)

    def launch(self, workspace: Workspace, bound: int | None) -> None:
        self._check_alive()
        if self.backend.flags:
            workspace.storage["protocol_error"][0] = self.rank in self.device.faulty
        ids, weights = workspace.topk_idx, workspace.topk_weights
        live = ids >= 0
        if bool((ids >= self.num_experts).any()):
            self.device.lost = True
            raise Trap(f"expert {int(ids.max())} of {self.num_experts}")
        # Rows that no slot names are poison, and must not matter.
        rows = self.backend.operand(*self.backend.arrived(workspace.x, workspace.x_sf))
        post = Post(x=rows, ids=ids, weights=weights, experts=self.experts)
        what = ("launch", self.index, workspace.key, bound)
        posts = self.cluster.meet(self.rank, what, post)
        if self.backend.nvshmem:
            room = workspace.capacity
            if self.backend.owns_output:
                room = bucket_of(bound or 0, workspace.capacity)
            check_pool(self.rank, posts, room, self.backend.experts_per_rank)
        self.device.count(self.device.launches, self.rank)
        recipe = self.backend.recipe()
        terms = launch(self.rank, posts, recipe, self.backend.activation())
        workspace.terms[live] = terms[live]
        seen = ids.clamp(min=0) if self.backend.stale else ids
        each = self.backend.experts_per_rank
        workspace.output_activation.copy_(reduce(workspace.terms, seen, weights, recipe, each))
        if (workspace.knobs or {}).get("tile", (0,))[0] in WRONG_TILES:
            workspace.output_activation.add_(1)

    def _check_alive(self) -> None:
        require(not self.destroyed, "the layer has been destroyed")
        if self.device.lost:
            raise Trap("the device context was lost in an earlier launch")

    def _check_tensors(self, t: Any, capacity: int) -> None:
        n = t.hidden_states.shape[0]
        require(n <= capacity, f"{n} tokens exceed the capacity {capacity}")
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

    def _allocate(self, n: int, key: Any, knobs: Any) -> Workspace:
        h, k = self.backend.hidden, self.backend.config.top_k
        rows, wire = self.backend.wire()
        scales = None
        if wire is not None:
            columns, dtype = wire
            scales = torch.full((n, columns), torch.nan).to(dtype)
        return Workspace(
            key=key,
            knobs=knobs,
            terms=torch.full((n, k, h), torch.nan),
            x=torch.full((n, h), torch.nan, dtype=torch.float32).to(rows),
            x_sf=scales,
            topk_idx=torch.zeros(n, k, dtype=torch.int64),  # symmetric memory comes as zeros
            topk_weights=torch.full((n, k), torch.nan),
            output_activation=torch.full((n, h), torch.nan, dtype=torch.bfloat16),
            storage={"protocol_error": torch.zeros(4, dtype=torch.uint8)}
            if self.backend.flags
            else {},
        )

    def _stage(self, workspace: Workspace, t: Any, n: int) -> None:
        _bytes(workspace.x)[:n] = _bytes(t.hidden_states)
        if workspace.x_sf is not None:
            _bytes(workspace.x_sf)[:n] = _bytes(t.scales)
        workspace.topk_idx[:n] = t.topk_ids
        workspace.topk_idx[n:] = -1
        workspace.topk_weights[:n] = t.topk_weights

    def release(self, workspace: Workspace) -> None:
        self.cluster.meet(self.rank, ("release", self.index, workspace.key))
        with self.device.lock:
            workspace.users -= 1
            if workspace.users == 0:
                del self.device.pool[(self.rank, workspace.key)]

    def destroy(self) -> None:
        if self.destroyed:
            return
        for handle in reversed(self.handles):
            handle.destroy()
        self.cluster.meet(self.rank, ("destroy", self.index, self.key))
        self.destroyed = True


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
    """Without the tactic, which is each workspace's own."""
    fields = sorted(vars(config).items())
    return tuple((name, repr(value)) for name, value in fields if name != "knobs")


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
