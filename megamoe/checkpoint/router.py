"""The router of a layer, as stored, with the facts of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.checkpoint.config import Key
from megamoe.checkpoint.files import DTYPES, Entry
from megamoe.checkpoint.layer import Layer
from megamoe.checkpoint.refuse import refuse
from megamoe.errors import BadInput
from megamoe.problem import Router

FLOATS = ("BF16", "F32")
INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRouter:
    """A router without its data: ``entries`` are its tensors by field.

    outline: the whole router, with tensors of the right dtype and shape and of no value.
    """

    outline: Router
    entries: Mapping[str, Entry]


def find_router(layer: Layer, hidden: int) -> FoundRouter:
    """The router, from config.json and headers alone."""
    family, config, block = layer.family, layer.config, layer.block
    num_experts, top_k = layer.num_experts, layer.top_k
    entries = {"weight": _checked(layer, block + family.router, (num_experts, hidden), FLOATS)}
    if family.router_bias is not None:
        entries["bias"] = _checked(layer, block + family.router_bias, (num_experts,), FLOATS)
    entries |= _table_or_correction(layer, num_experts, top_k)
    groups, top_groups = 1, 1
    if family.groups is not None:
        groups, top_groups = (config.integer(key) for key in family.groups)
    fact = family.renormalise
    renormalise = config.boolean(fact) if isinstance(fact, Key) else fact
    shapes = {
        name: torch.empty(1, dtype=DTYPES[entry.dtype]).expand(entry.shape)
        for name, entry in entries.items()
    }
    try:
        outline = Router(
            weight=shapes["weight"],
            top_k=top_k,
            scoring=family.scoring,
            renormalise=renormalise,
            epsilon=family.epsilon,
            bias=shapes.get("bias"),
            correction_bias=shapes.get("correction_bias"),
            num_groups=groups,
            top_groups=top_groups,
            table=shapes.get("table"),
        )
    except BadInput as error:
        raise refuse(
            config.file, " and ".join(key.names[0] for key in family.groups or ()),
            f"{groups} and {top_groups}",
            f"groups that divide {num_experts} experts, of two or more, which leave at least "
            f"{top_k} to choose from",
            "correct the config",
        ) from error  # fmt: skip
    return FoundRouter(outline=outline, entries=entries)


def load_router(layer: Layer, found: FoundRouter, device: torch.device) -> Router:
    """Tensors keep the dtype they have in the file, except that ids become int64."""
    read = {name: _read(layer, entry) for name, entry in found.entries.items()}
    if "table" in read:
        read["table"] = _ids(found.entries["table"], read["table"], layer.num_experts)
    held = {name: tensor.to(device, copy=True) for name, tensor in read.items()}
    return replace(
        found.outline,
        weight=held["weight"],
        bias=held.get("bias"),
        correction_bias=held.get("correction_bias"),
        table=held.get("table"),
    )


def describe_router(found: FoundRouter) -> str:
    """The router in words."""
    router = found.outline
    parts = [router.scoring, f"{found.entries['weight'].dtype} weight"]
    if router.bias is not None:
        parts.append("bias")
    if router.table is not None:
        parts.append("chosen by token id")
    elif router.correction_bias is not None:
        parts.append("correction bias for the choice")
    if router.num_groups > 1:
        parts.append(f"{router.top_groups} of {router.num_groups} groups")
    if router.renormalise:
        parts.append(
            f"renormalised (sum + {router.epsilon:g})" if router.epsilon else "renormalised"
        )
    return ", ".join(parts)


def _read(layer: Layer, entry: Entry) -> Tensor:
    tensor = layer.files.read(entry)
    if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
        place = tensor.isfinite().logical_not().nonzero()[0].tolist()
        raise refuse(
            entry.file, entry.name, f"NaN or infinite at {place}", "finite", "download it again"
        )
    return tensor


def _ids(entry: Entry, table: Tensor, num_experts: int) -> Tensor:
    """int64 ids of experts that exist."""
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_experts:
        raise refuse(
            entry.file, entry.name, f"ids in [{int(table.min())}, {int(table.max())}]",
            f"ids in [0, {num_experts})", "download the shard again",
        )  # fmt: skip
    return table.to(torch.int64)


def _checked(layer: Layer, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Entry:
    entry = layer.files.entry(name)
    if entry.shape != shape or entry.dtype not in dtypes:
        raise refuse(
            entry.file, name, entry, f"{' or '.join(dtypes)} {list(shape)}",
            "take config.json and shards of the same model",
        )  # fmt: skip
    return entry


def _table_or_correction(layer: Layer, num_experts: int, top_k: int) -> dict[str, Entry]:
    """What a choice takes beside the scores: a hash-routed layer's ids by token id, or a bias.

    Empty where the family has neither; config and files must agree on which it is.
    """
    family, files = layer.family, layer.files
    table = family.table is not None and _is_hashed(layer, layer.block + family.table)
    if family.correction_bias is None and not table:
        return {}
    if not table:
        name = f"{layer.block}{family.correction_bias}"
        return {"correction_bias": _checked(layer, name, (num_experts,), FLOATS)}
    bias = f"{layer.block}{family.correction_bias}"
    if bias in files:
        raise refuse(
            files.file_of(bias), bias, f"there beside {family.table}",
            "one of the two: a hash-routed layer chooses by its table",
            "take shards of one revision",
        )  # fmt: skip
    vocabulary = layer.config.integer(Key(("vocab_size",)))
    name = f"{layer.block}{family.table}"
    return {"table": _checked(layer, name, (vocabulary, top_k), INTEGERS)}


def _is_hashed(layer: Layer, table: str) -> bool:
    """Whether the layer's table is there; refuses one where config.json says otherwise."""
    present, hashed = table in layer.files, _config_says_hashed(layer)
    if hashed is not None and hashed != present:
        raise refuse(
            layer.files.file_of(table) if present else layer.files.root, table,
            "present" if present else "missing",
            f"it {'in' if hashed else 'outside of'} the hash-routed layers that config.json states",
            "take both from the same repository",
        )  # fmt: skip
    return present


def _config_says_hashed(layer: Layer) -> bool | None:
    values = layer.config.values
    if layer.stage is not None:
        return False
    number = int(layer.name)
    kinds = values.get("mlp_layer_types")
    if isinstance(kinds, list):
        return number < len(kinds) and str(kinds[number]) == "hash_moe"
    count = values.get("num_hash_layers")
    return None if not isinstance(count, int) else number < count
