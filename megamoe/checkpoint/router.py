"""The router of a layer, as stored, with the facts of its family."""

from __future__ import annotations

import torch

from megamoe.checkpoint.config import Key
from megamoe.checkpoint.files import Entry
from megamoe.checkpoint.layer import Layer
from megamoe.checkpoint.refuse import refuse
from megamoe.problem import Router

DTYPES = ("BF16", "F32")


def load_router(layer: Layer, hidden: int, device: torch.device) -> Router:
    """Tensors keep the dtype they have in the file; facts come from the family's row and config."""
    family, config, block = layer.family, layer.config, layer.block
    num_experts, top_k = layer.num_experts, layer.top_k
    table = _table(layer, top_k, device)
    correction = None
    if family.correction_bias is not None:
        name = block + family.correction_bias
        if table is None:
            correction = _tensor(layer, name, (num_experts,), DTYPES, device)
        elif name in layer.files:
            raise refuse(
                layer.files.file_of(name), name, f"there beside {family.table}",
                "one of the two: a hash-routed layer chooses by its table",
                "take shards of one revision",
            )  # fmt: skip
    groups, top_groups = 1, 1
    if family.groups is not None:
        groups, top_groups = (config.integer(key) for key in family.groups)
        if groups < 1 or num_experts % groups or not 1 <= top_groups <= groups:
            raise refuse(
                config.file, " and ".join(key.names[0] for key in family.groups),
                f"{groups} and {top_groups}", f"groups that divide {num_experts} experts",
                "correct the config",
            )  # fmt: skip
    renormalise = family.renormalise
    return Router(
        weight=_tensor(layer, block + family.router, (num_experts, hidden), DTYPES, device),
        top_k=top_k,
        scoring=family.scoring,
        renormalise=config.boolean(renormalise) if isinstance(renormalise, Key) else renormalise,
        epsilon=family.epsilon,
        bias=None
        if family.router_bias is None
        else _tensor(layer, block + family.router_bias, (num_experts,), DTYPES, device),
        correction_bias=correction,
        num_groups=groups,
        top_groups=top_groups,
        table=table,
    )


def describe_router(layer: Layer, hidden: int) -> str:
    """The router in words, from headers alone."""
    family, config, files = layer.family, layer.config, layer.files
    weight = _checked(layer, layer.block + family.router, (layer.num_experts, hidden), DTYPES)
    fact = family.renormalise
    renormalise = config.boolean(fact) if isinstance(fact, Key) else fact
    parts = [family.scoring, f"{weight.dtype} weight"]
    if family.router_bias is not None:
        parts.append("bias")
    if family.table is not None and layer.block + family.table in files:
        parts.append("chosen by token id")
    elif family.correction_bias is not None:
        parts.append("correction bias for the choice")
    if family.groups is not None:
        groups, top = (config.integer(key) for key in family.groups)
        if groups > 1:
            parts.append(f"{top} of {groups} groups")
    if renormalise:
        parts.append(
            f"renormalised (sum + {family.epsilon:g})" if family.epsilon else "renormalised"
        )
    return ", ".join(parts)


def _tensor(
    layer: Layer, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], device: torch.device
) -> torch.Tensor:
    entry = _checked(layer, name, shape, dtypes)
    tensor = layer.files.read(entry)
    if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
        place = tensor.isfinite().logical_not().nonzero()[0].tolist()
        raise refuse(entry.file, name, f"NaN or infinite at {place}", "finite", "download it again")
    return tensor.to(device, copy=True)


def _checked(layer: Layer, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Entry:
    entry = layer.files.entry(name)
    if entry.shape != shape or entry.dtype not in dtypes:
        raise refuse(
            entry.file, name, entry, f"{' or '.join(dtypes)} {list(shape)}",
            "take config.json and shards of the same model",
        )  # fmt: skip
    return entry


def _table(layer: Layer, top_k: int, device: torch.device) -> torch.Tensor | None:
    """The ids of a hash-routed layer by token id, or None; config and files must agree."""
    family, config = layer.family, layer.config
    if family.table is None:
        return None
    name = layer.block + family.table
    present = name in layer.files
    hashed = _config_says_hashed(layer)
    if hashed is not None and hashed != present:
        raise refuse(
            layer.files.file_of(name) if present else layer.files.root, name,
            "present" if present else "missing",
            f"it {'in' if hashed else 'outside of'} the hash-routed layers that config.json states",
            "take both from the same repository",
        )  # fmt: skip
    if not present:
        return None
    entry = layer.files.entry(name)
    vocabulary = config.integer(Key(("vocab_size",)))
    table = _tensor(layer, name, (vocabulary, top_k), ("I64", "I32"), device).to(torch.int64)
    experts = layer.num_experts
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < experts:
        raise refuse(
            entry.file, name, f"ids in [{int(table.min())}, {int(table.max())}]",
            f"ids in [0, {experts})", "download the shard again",
        )  # fmt: skip
    return table


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
