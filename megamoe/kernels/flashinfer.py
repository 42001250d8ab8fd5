"""The door to FlashInfer: the one file that imports it, inside functions.

Adapters hand over the name of a configuration, its fields, and weights in the kernel's own bytes;
what comes back is opened, launched and closed here. Facts: FlashInfer 0.7.4, ``moe_ep`` and
``megamoe``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from megamoe.errors import Unsupported, bad_input
from megamoe.kernels.base import Batch, Context, Tactic, check_ranks
from megamoe.kernels.layout import StandaloneWeights

LEAST = "0.7.4"


def load(module: str) -> Any:
    """``flashinfer.<module>``, imported now; Unsupported naming the version where that fails."""
    try:
        return importlib.import_module(f"flashinfer.{module}")
    except ImportError as error:
        raise Unsupported(
            f"flashinfer.{module} cannot be imported ({error}); "
            f"install flashinfer-python >= {LEAST}"
        ) from error


def build(module: Any, name: str, fields: Mapping[str, Any]) -> Any:
    """``module.name(**fields)``; a FlashInfer that lacks either is named as too old or too new."""
    made = getattr(module, name, None)
    try:
        if made is None:
            raise TypeError(f"there is no {name}")
        inspect.signature(made).bind(**fields)
    except TypeError as error:
        raise Unsupported(
            f"the installed FlashInfer has no {name}({', '.join(fields)}) ({error}); "
            f"these adapters were written for {LEAST}"
        ) from error
    return made(**fields)


def function(module: str, name: str) -> Any:
    """``flashinfer.<module>.<name>``, imported now; Unsupported where either is missing."""
    found = getattr(load(module), name, None)
    if found is None:
        raise Unsupported(
            f"the installed FlashInfer has no {name}; these adapters were written for {LEAST}"
        )
    return found


# --- the ranks ----------------------------------------------------------------------------------


def together(context: Context) -> None:
    """Wait until every rank has packed its weights; RankFailure naming one that could not.

    What a checkpoint's values forbid is found while packing, and the next step is collective in a
    way that nobody can be called back from.
    """
    check_ranks(context)
    if context.request.world_size == 1:
        _check_default_group(context)
    if context.peers is not None:
        context.peers.gather("packed", "")


@contextlib.contextmanager
def environment(context: Context) -> Iterator[None]:
    """What FlashInfer's bootstrap reads from the environment, set while it runs.

    One rank needs neither a process group nor NVSHMEM; ranks that share a GPU meet over gloo,
    since NCCL refuses two ranks on one device.
    """
    wanted = {}
    if context.request.world_size == 1:
        wanted["MEGA_NO_DIST"] = "1"
    elif _backend(context.group) == "gloo":
        wanted["MEGA_SINGLE_GPU_GLOO"] = "1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _backend(group: Any) -> str:
    import torch.distributed as dist

    return str(dist.get_backend(group))


def _check_default_group(context: Context) -> None:
    """On one rank without a group FlashInfer takes the default group: refuse one of more ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    found = dist.get_world_size(context.group)
    if found != 1:
        raise bad_input(
            "group", f"of {found} ranks", "is not the one rank of the layer",
            "pass a group of this rank alone (torch.distributed.new_group makes one)",
        )  # fmt: skip


# --- a layer of flashinfer.moe_ep ---------------------------------------------------------------


_TREES: list[str] = []


def claim(tree: str) -> None:
    """Refuse a second of FlashInfer's kernel trees whose modules bear the same names.

    Each puts its own ``common`` and ``src`` on the path; whichever comes first serves both.
    """
    if not _TREES:
        _TREES.append(tree)
    if _TREES[0] != tree:
        raise Unsupported(
            f"FlashInfer's {_TREES[0]} kernels are loaded, and its {tree} kernels have modules of "
            "the same names; use another process"
        )


PULL = "moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel"


def tactics(name: str, **geometry: Any) -> list[Tactic]:
    """The pull kernels' candidates for a geometry, the default first; starts no CUDA."""
    return [dict(knobs) for knobs in function(PULL, name)(**geometry)]


def prebuilt(thunk: Callable[[], None]) -> Callable[[], None]:
    """The same launch, its arguments converted to C once instead of at every call.

    A thunk holds a function compiled by CUTLASS's DSL and its arguments; the DSL converts them in
    Python, which takes longer than the launch. A thunk that holds anything else does more than
    launch (zero an output, say), and is returned.
    """
    held = inspect.getclosurevars(thunk).nonlocals if inspect.isfunction(thunk) else {}
    if inspect.isfunction(inner := held.get("thunk")):
        held = inspect.getclosurevars(inner).nonlocals
    if held.keys() != {"compiled", "runtime_kwargs"}:
        return thunk
    compiled: Any = held["compiled"]
    arguments: Any = held["runtime_kwargs"]
    if not (hasattr(compiled, "generate_execution_args") and isinstance(arguments, dict)):
        return thunk
    values, kept = compiled.generate_execution_args(**arguments)
    run = compiled.to(None).run_compiled_program

    def launch() -> None:
        run(values)

    launch.kept = (thunk, kept)  # type: ignore[attr-defined]  # what the pointers point to
    return launch


class MegaLayer:
    """One ``MoEEpLayer`` in its mega mode, over a kernel's own bytes or a checkpoint's.

    All it does is collective, in one order on all ranks.
    """

    def __init__(
        self,
        context: Context,
        config: str,
        weights: Any,
        *,
        capacity: int,
        quantised: bool,
        pack: Any = None,
        tree: str | None = None,
        **fields: Any,
    ) -> None:
        """weights: the backend's ``transformed_weights``; None where it makes them from ``pack``.
        capacity: of its greatest workspace. quantised: whether scales come along. tree: the kernels
        it shares a process with.
        """
        if tree is not None:
            claim(tree)
        request = context.request
        self.context = context
        self.api = api = load("moe_ep")
        mega = build(
            api,
            "MegaConfig",
            {
                "megakernel": build(api, config, fields),
                "quantize_input": not quantised,
                "preprocess_weights": weights is None,
                "transformed_weights": weights,
            },
        )
        bootstrap = build(
            api,
            "BootstrapConfig",
            {
                "world_size": request.world_size,
                "rank": context.rank,
                "device": _ordinal(context.device),
                "process_group": context.group,
            },
        )
        fleet = build(
            api,
            "FleetParams",
            {
                "num_experts": request.num_experts,
                "max_tokens_per_rank": capacity,
                "token_hidden_size": request.hidden_size,
            },
        )
        with environment(context):
            self.layer = api.MoEEpLayer(bootstrap, fleet, pack, backend=mega)
        self.transformed = weights

    def open(self, capacity: int, tactic: Tactic | None) -> Space:
        """One of its workspaces; collective. FlashInfer shares it among layers of one geometry."""
        knobs = None if tactic is None else dict(tactic)
        with environment(self.context):
            return Space(self, self.layer.create_workspace(capacity, knobs=knobs))

    def close(self) -> None:
        with environment(self.context):
            self.layer.destroy()


class Space:
    """A workspace of a layer: stage and launch as FlashInfer does, or find its buffers."""

    def __init__(self, layer: MegaLayer, handle: Any) -> None:
        self.layer, self.handle, self.api = layer, handle, layer.api
        self.bucket: int | None = None
        self.launched: set[int | None] = set()

    def run(self, batch: Batch, out: Tensor) -> None:
        """Stage and launch; ``out`` [n, H] is written in stream order."""
        with self.first():
            self.layer.layer.forward(self._tensors(batch, out), workspace=self.handle)
        self.launched.add(self.bucket)

    def stage(self, batch: Batch, *, bucket: int | None = None) -> None:
        """Copy a call's inputs into the workspace, for one ``compute``.

        bucket: the greatest count of any rank, where the kernel's choice follows it.
        """
        self.bucket = bucket
        with self.first():
            self.layer.layer.stage_inputs(
                self._tensors(batch), workspace=self.handle, compile_tokens_per_rank=bucket
            )

    def compute(self, out: Tensor, *, view: bool = False) -> None:
        """Launch on what was staged; ``out`` [n, H] is written in stream order.

        view: whether the kernel is to write its own buffer, from which ``out`` is copied.
        """
        with self.first():
            y = self.layer.layer.compute_staged(output=None if view else out)
        if view:
            out.copy_(y)
        self.launched.add(self.bucket)

    def buffer(self, name: str) -> Tensor:
        """A buffer that staging fills or a launch writes, by FlashInfer's name for it."""
        return self._found(name, lambda: getattr(self.handle._backend_workspace, name))

    def storage(self, name: str) -> Tensor:
        """A buffer of the workspace's storage, there from the first staging on.

        FlashInfer shows it by a function that synchronises; this one can be captured.
        """
        return self._found(name, lambda: self.handle._backend_workspace.storage[name])

    def thunk(self, module: str, name: str) -> Callable[[], None]:
        """A launch on what lies in the buffers, with its arguments built once.

        For the current stream. The first one compiles and allocates, which is collective; the
        output lies in the workspace's ``output_activation``.
        """
        make = function(module, name)
        first, second = self.layer.transformed
        with self.first():
            made: Callable[[], None] = make(first, second, self.handle._backend_workspace)
        self.launched.add(self.bucket)
        return prebuilt(made)

    def _found(self, name: str, find: Callable[[], Any]) -> Tensor:
        try:
            found: Tensor = find()
        except (AttributeError, KeyError) as error:
            raise Unsupported(
                f"the installed FlashInfer keeps no {name} in its workspace ({error}); these "
                f"adapters were written for {LEAST}"
            ) from error
        return found

    def _tensors(self, batch: Batch, out: Tensor | None = None) -> Any:
        return self.api.MoEEpTensors(
            hidden_states=batch.x,
            topk_ids=batch.ids,
            topk_weights=batch.weights,
            scales=batch.scales,
            output=out,
        )

    def first(self) -> contextlib.AbstractContextManager[None]:
        """Around the first launch of a bucket, which allocates and compiles."""
        known = self.bucket in self.launched
        return contextlib.nullcontext() if known else environment(self.layer.context)

    def close(self) -> None:
        with environment(self.layer.context):
            self.handle.destroy()


def _ordinal(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


# --- the buffers of flashinfer.megamoe ----------------------------------------------------------


NO_LIMIT: Final = torch.finfo(torch.float32).max
"""A clamp that leaves every number as it is. Infinity is written into the kernel's source as
``inff``, which does not compile."""


class SharedBuffer:
    """One ``MegaMoESymmBuffer``, shared by all layers of one geometry: they run one after another.

    Opening is collective; so is closing, of which the last one frees it.
    """

    _open: ClassVar[dict[tuple[Any, ...], SharedBuffer]] = {}

    @classmethod
    def of(cls, context: Context, capacity: int) -> SharedBuffer:
        request = context.request
        limit = request.activation.limit
        fields = {
            "num_experts": request.num_experts,
            "num_max_tokens_per_rank": capacity,
            "num_topk": request.top_k,
            "hidden": request.hidden_size,
            "intermediate_hidden": request.intermediate_size,
            "activation_clamp": NO_LIMIT if limit is None else float(limit),
        }
        # Threads of one process can be ranks, so the rank is part of the key.
        key = (id(context.group), context.rank, context.device, *fields.values())
        found = cls._open.get(key)
        if found is None:
            found = cls._open[key] = cls(context, key, fields, capacity)
        found.users += 1
        return found

    def __init__(
        self, context: Context, key: tuple[Any, ...], fields: dict[str, Any], capacity: int
    ) -> None:
        self.key, self.users = key, 0
        self.api = load("megamoe")
        self.group, self.owned = _group(context)
        try:
            self.buffer = build(self.api, "MegaMoESymmBuffer", {"group": self.group, **fields})
            # The kernel writes as many rows as all ranks agreed on, the caller wants this rank's.
            self.rows = torch.empty(
                capacity, context.request.hidden_size, dtype=torch.bfloat16, device=context.device
            )
        except BaseException:
            self._leave()
            raise

    def inputs(self, count: int, tokens: int) -> Batch:
        """Its own rows, which a launch of ``tokens`` rows reads."""
        b = self.buffer
        return Batch(
            x=b.x[:tokens], scales=b.x_sf[:tokens], ids=b.topk_idx[:tokens],
            weights=b.topk_weights[:tokens], count=count, tokens=tokens,
        )  # fmt: skip

    def run(
        self, entry: str, packed: StandaloneWeights, batch: Batch, out: Tensor, **options: Any
    ) -> None:
        """Launch on what was staged, and hand over ``out``'s rows."""
        rows = batch.tokens
        if rows == 0:
            return  # then no rank has a token, and the kernel takes no empty batch
        self.buffer.commit_staged(rows)
        y = out if out.shape[0] == rows else self.rows[:rows]
        getattr(self.api, entry)(
            y,
            packed.l1,
            packed.l2,
            self.buffer,
            num_tokens=rows,
            l1_global_scales=packed.l1_global,
            l2_global_scales=packed.l2_global,
            **options,
        )
        if y is not out:
            out.copy_(y[: out.shape[0]])

    def plans(self, selector: Callable[[int], str], capacity: int) -> list[int]:
        """Token counts, up to ``capacity``, of which each needs another kernel; ascending.

        selector: FlashInfer's function that plans for a count.
        """
        b = self.buffer
        geometry = (
            b.num_sms, self.group.size(), b.num_experts, b.num_topk, b.hidden,
            b.intermediate_hidden, b.num_max_tokens_per_rank,
        )  # fmt: skip
        first: dict[Any, int] = {}
        for tokens in range(1, capacity + 1):
            name = selector(tokens)
            plan = function("megamoe", name)(*geometry, tokens)
            first.setdefault((name, plan), tokens)
        return list(first.values())

    def close(self) -> None:
        self.users -= 1
        if self.users:
            return
        del self._open[self.key]
        self.buffer.destroy()
        self._leave()

    def _leave(self) -> None:
        """Hand a group that was made here to another buffer over it; the last one ends it."""
        if not self.owned:
            return
        for other in self._open.values():
            if other.group is self.group:
                other.owned = True
                return
        import torch.distributed as dist

        dist.destroy_process_group()


def _group(context: Context) -> tuple[Any, bool]:
    """The ranks' process group, and whether it was made here: symmetric memory wants one of one
    rank too."""
    import torch.distributed as dist

    if context.group is not None:
        return context.group, False
    made = not dist.is_initialized()
    if made:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(store=store, rank=0, world_size=1)
    return dist.group.WORLD, made
