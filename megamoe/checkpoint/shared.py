"""The shared experts of a layer: one FFN, as wide as all of them together."""

from __future__ import annotations

import torch

from megamoe.checkpoint.detect import detect
from megamoe.checkpoint.experts import check_shape
from megamoe.checkpoint.layer import Layer, expert_width
from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.stack import stack
from megamoe.checkpoint.storage import SUFFIXES
from megamoe.problem import Activation, ExpertWeights, SharedExpert


def find_shared(layer: Layer, hidden: int) -> tuple[Matrix, Matrix, Matrix] | None:
    """(gate, up, down), from headers alone; config and files must agree on whether there is one."""
    family, config, files = layer.family, layer.config, layer.files
    if family.shared is None:
        return None
    root, names = f"{layer.block}{family.shared}.", family.shared_projections
    present = files.under(root)
    key, _ = config.value(family.shared_count)
    count = config.integer(family.shared_count)
    if bool(present) != bool(count):
        raise refuse(
            files.file_of(present[0]) if present else files.root, f"{root}*",
            "present" if present else "missing", f"{count} shared experts, as {key} says",
            "take config.json and shards of the same model",
        )  # fmt: skip
    if not count:
        return None
    for name in present:
        projection, _, suffix = name[len(root) :].partition(".")
        if projection not in names or suffix not in SUFFIXES:
            raise refuse(
                files.file_of(name), name, "an extra tensor",
                f"{root}{{{','.join(names)}}}.<weight or a scale>",
                "no part of an expert may be dropped: export without it",
            )  # fmt: skip
    each = expert_width(config) if family.shared_width is None else config.integer(
        family.shared_width
    )  # fmt: skip
    gate, up, down = (detect(files, config, root + name) for name in names)
    for matrix in (gate, up):
        check_shape(matrix, each * count, hidden)
    check_shape(down, hidden, each * count)
    return gate, up, down


def load_shared(
    layer: Layer, hidden: int, activation: Activation, device: torch.device
) -> SharedExpert | None:
    """The shared expert in its own formats; every family of the table gives it the same clamp."""
    found = find_shared(layer, hidden)
    if found is None:
        return None
    gate, up, down = found
    weights = ExpertWeights(
        w13=stack(layer.files, {0: (gate, up)}, [0], device),
        w2=stack(layer.files, {0: (down,)}, [0], device),
    )
    return SharedExpert(weights=weights, activation=activation)
