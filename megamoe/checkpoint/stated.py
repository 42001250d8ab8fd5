"""What config.json states is held against the family's row: none of it may be dropped."""

from __future__ import annotations

from megamoe.checkpoint.config import Key
from megamoe.checkpoint.families import ALPHA, GROUPS, LIMIT, RENORMALISE, SCALING, Family
from megamoe.checkpoint.layer import Layer
from megamoe.checkpoint.refuse import refuse

# Clamps by layer, or of the shared experts alone: no row reads them.
UNREAD = ("swiglu_limits", "swiglu_limits_shared", "swiglu_limit_shared", "gemm1_clamp_limit")


def check_stated(layer: Layer) -> None:
    """Refuse a config that states another function than the family's row computes."""
    config, family = layer.config, layer.family
    for key in absent(family):
        value = config.values.get(key)
        if value is not None:
            raise refuse(
                config.file, key, repr(value), f"no {key}: {family.name} has none",
                "it must not be dropped; check model_type",
            )  # fmt: skip
    for key, expected in constants(family).items():
        value = config.values.get(key)
        # JSON tells true from 1, which Python calls equal.
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        if value is not None and not same:
            raise refuse(
                config.file, key, repr(value), f"{expected!r} for {family.name}",
                "this is another function, which has no row in megamoe.checkpoint.families",
            )  # fmt: skip


def absent(family: Family) -> tuple[str, ...]:
    """Keys that the family cannot have."""
    limit = () if isinstance(family.limit, Key) else LIMIT.names
    alpha = () if isinstance(family.alpha, Key) else ALPHA.names
    return (*limit, *alpha, *UNREAD)


def constants(family: Family) -> dict[str, object]:
    """Keys that the family need not state, and the one value each may have: what its row fixes."""
    biased = family.correction_bias is not None
    # A softmax over the chosen logits is one over all of them, renormalised.
    of_top_k = family.scoring == "softmax_of_top_k"
    fixed: dict[str, object] = {
        "scoring_func": "softmax" if of_top_k else family.scoring,
        "topk_method": "noaux_tc" if biased else "greedy",
        "use_routing_bias": biased,
    }
    if not isinstance(family.renormalise, Key):
        fixed |= dict.fromkeys(RENORMALISE.names, family.renormalise or of_top_k)
    if not isinstance(family.routed_scaling_factor, Key):
        fixed |= dict.fromkeys(SCALING.names, family.routed_scaling_factor)
    if family.groups is None:
        fixed |= {name: 1 for key in GROUPS for name in key.names}
    if family.shared is None:
        fixed |= dict.fromkeys(family.shared_count.names, 0)
    return fixed
