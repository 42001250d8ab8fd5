"""The door to FlashInfer: the one file that imports it, inside functions.

Adapters hand over the name of a configuration, its fields, and weights in the kernel's own bytes;
what comes back is opened, launched and closed here. Facts: FlashInfer 0.7.4, ``moe_ep`` and
``megamoe``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from megamoe.errors import MegaMoEError, RankFailure, Unsupported, bad_input
from megamoe.kernels.base import Batch, Context, Datasheet

LEAST = "0.7.4"

T = TypeVar("T")


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
    try:
        return getattr(module, name)(**fields)
    except (AttributeError, TypeError) as error:
        raise Unsupported(
            f"the installed FlashInfer has no {name}({', '.join(fields)}) ({error}); "
            f"these adapters were written for {LEAST}"
        ) from error


# --- the ranks ----------------------------------------------------------------------------------


def agreed(context: Context, pack: Callable[[], T]) -> T:
    """``pack()``, once it succeeded on every rank: raised on every rank where it failed on one.

    What a checkpoint's values forbid is found while packing, and the next step is collective.
    """
    check_group(context)
    result, problem = None, None
    try:
        result = pack()
    except MegaMoEError as error:
        problem = error
    messages = gathered(context, None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, message in enumerate(messages):
        if message is not None:
            raise RankFailure(f"rank {rank} cannot prepare this layer: {message}")
    assert result is not None
    return result


def gathered(context: Context, value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order; collective."""
    world = context.request.world_size
    if world == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world
    dist.all_gather_object(values, value, group=context.group)
    return values


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


def check_group(context: Context) -> None:
    """Refuse a group that is not the layer's ranks: FlashInfer would take the default group for it.

    On one rank without a group, a default group of more ranks would be taken.
    """
    import torch.distributed as dist

    world = context.request.world_size
    if not (dist.is_available() and dist.is_initialized()):
        if world > 1:
            raise bad_input(
                "group", "None", f"is not the {world} ranks of the layer",
                "call torch.distributed.init_process_group first",
            )  # fmt: skip
        return
    found = dist.get_world_size(context.group)
    if found != world:
        raise bad_input(
            "group", f"of {found} ranks", f"is not the {world} ranks of the layer",
            "pass the expert-parallel group (torch.distributed.new_group makes one)",
        )  # fmt: skip


# --- a layer of flashinfer.moe_ep ---------------------------------------------------------------


class MegaLayer:
    """One ``MoEEpLayer`` in its mega mode over weights in the kernel's own bytes.

    Opening, the first launch and closing are collective, in one order on all ranks.
    """

    def __init__(
        self, context: Context, config: str, weights: Any, *, quantised: bool, **fields: Any
    ) -> None:
        """weights: the backend's ``transformed_weights``. quantised: whether scales come along."""
        request = context.request
        self.context = context
        self.api = api = load("moe_ep")
        mega = build(
            api,
            "MegaConfig",
            {
                "megakernel": build(api, config, fields),
                "quantize_input": not quantised,
                "preprocess_weights": False,
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
                "max_tokens_per_rank": request.max_tokens_per_rank,
                "token_hidden_size": request.hidden_size,
            },
        )
        with environment(context):
            self.layer = api.MoEEpLayer(bootstrap, fleet, None, backend=mega)
        self.launched = False

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, scales: Tensor | None = None
    ) -> None:
        """Stage and launch; ``out`` [n, H] is written in stream order."""
        tensors = self.api.MoEEpTensors(
            hidden_states=x, topk_ids=ids, topk_weights=weights, scales=scales, output=out
        )
        if self.launched:
            self.layer.forward(tensors)
            return
        with environment(self.context):  # the first launch allocates and compiles
            self.layer.forward(tensors)
        self.launched = True

    def close(self) -> None:
        with environment(self.context):
            self.layer.destroy()


def _ordinal(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def warmup_batch(context: Context, sheet: Datasheet) -> tuple[Batch, Tensor]:
    """A full batch over all experts, of zeros, and where its output goes."""
    request, device = context.request, context.device
    n, k = request.max_tokens_per_rank, request.top_k
    x = torch.zeros(n, request.hidden_size, dtype=torch.bfloat16, device=device)
    ids = torch.arange(n * k, device=device).view(n, k) % request.num_experts
    weights = torch.full((n, k), 1.0 / k, dtype=torch.float32, device=device)
    return Batch(x=x, ids=ids.to(sheet.id_dtype), weights=weights, tokens=n), torch.empty_like(x)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
