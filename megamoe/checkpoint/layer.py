"""Where one layer's MoE block lies in the files, and whether its tensors are the expected."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megamoe.checkpoint.config import Config, Key
from megamoe.checkpoint.families import FAMILIES, PREFIXES, Family
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.refuse import refuse
from megamoe.problem import MAX_EXPERTS

LAYERS = Key(("num_hidden_layers", "num_layers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One MoE layer: ``block`` is the full prefix of its tensors, with the dot at its end."""

    files: Files
    config: Config
    family: Family
    name: str
    block: str
    stage: int | None = None  # of multi-token prediction

    @property
    def experts(self) -> str:
        return self.block + "experts."

    @property
    def num_experts(self) -> int:
        count = self._count(self.family.experts, self.family.mtp_experts)
        if not 1 <= count <= MAX_EXPERTS:
            raise refuse(
                self.config.file, " or ".join(self.family.experts.names), count,
                f"in [1, {MAX_EXPERTS}]", "correct the config",
            )  # fmt: skip
        return count

    @property
    def top_k(self) -> int:
        top_k = self._count(self.family.top_k, self.family.mtp_top_k)
        if not 1 <= top_k <= self.num_experts:
            raise refuse(
                self.config.file, " or ".join(self.family.top_k.names), top_k,
                f"in [1, {self.num_experts}], the number of experts", "correct the config",
            )  # fmt: skip
        return top_k

    def _count(self, key: Key, own: Key | None) -> int:
        """A stage's own count, where it has one, else the layers'."""
        count = 0 if own is None or self.stage is None else self.config.integer(own)
        return count or self.config.integer(key)


def family_of(config: Config) -> Family:
    """The table's row for a config's model_type: the language model's, where it states one.

    The wrapper's decides only where that is silent: a wrapper may hold another language model.
    """
    rows = {model_type: family for family in FAMILIES for model_type in family.model_types}
    family = rows.get(next(iter(config.model_types), ""))
    if family is not None:
        return family
    raise refuse(
        config.file, "model_type", " in ".join(config.model_types) or "absent",
        f"one of {', '.join(sorted(rows))}",
        "megamoe.checkpoint.families has no row for it: its names and arithmetic are unknown",
    )  # fmt: skip


def _stage_of(config: Config, layer: int | str) -> int | None:
    """Which prediction stage it is ("mtp.0", or a number past the last layer), or None."""
    layers = config.integer(LAYERS)
    if isinstance(layer, str):
        matched = re.fullmatch(r"mtp\.(\d+)", layer)
        if not matched:
            raise refuse(config.file, "layer", repr(layer), "a number, or mtp.N", "name it so")
        return int(matched[1])
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise refuse(config.file, "layer", repr(layer), "a number, or mtp.N", "name it so")
    if layer < 0:
        raise refuse(config.file, "layer", layer, f"in [0, {layers}), or mtp.N", "count from 0")
    return layer - layers if layer >= layers else None


def prefixes(family: Family, config: Config, layer: int | str) -> tuple[str, ...]:
    """Where the layer's tensors may begin."""
    stage = _stage_of(config, layer)
    if stage is not None and family.mtp is not None:
        own = family.mtp.format(stage=stage)
        return own, "model." + own
    number = layer if stage is None else config.integer(LAYERS) + stage
    return tuple(prefix.format(layer=number) for prefix in PREFIXES)


def find_layer(files: Files, config: Config, layer: int | str) -> Layer:
    """The layer's MoE block; refuses a dense layer, an absent one and one that stands twice."""
    family = family_of(config)
    tried = prefixes(family, config, layer)
    blocks = [p + family.block + "." for p in tried]
    found = [b for b in blocks if files.under(b + "experts.")]
    if len(found) > 1:
        raise refuse(
            files.root, f"layer {layer}", f"under {' and '.join(found)}", "one place",
            "remove the copy that does not belong",
        )  # fmt: skip
    says = _config_says_moe(config, layer)
    if not found:
        here = [p for p in tried if files.under(p)]
        raise refuse(
            files.root, f"layer {layer}",
            f"without experts under {here[0]}{family.block}." if here else "absent",
            f"{family.block}.experts.* tensors of {family.name}",
            "it is dense: choose one of the MoE layers that megamoe inspect lists"
            if here and says is not True
            else "choose a layer that megamoe inspect lists, or complete the download",
        )  # fmt: skip
    if says is False:
        raise refuse(
            config.file, f"layer {layer}", f"dense, but {found[0]}experts.* is there",
            "config and tensors to agree", "take both from the same repository",
        )  # fmt: skip
    return Layer(
        files=files, config=config, family=family, name=str(layer), block=found[0],
        stage=_stage_of(config, layer),
    )  # fmt: skip


def has_tensors(files: Files, config: Config, layer: int | str) -> bool:
    return any(files.under(p) for p in prefixes(family_of(config), config, layer))


def is_dense(files: Files, config: Config, layer: int | str) -> bool:
    """Whether a layer is there without experts, and config.json does not claim any."""
    family = family_of(config)
    tried = prefixes(family, config, layer)
    experts = any(files.under(f"{p}{family.block}.experts.") for p in tried)
    claimed = _config_says_moe(config, layer)
    return not experts and claimed is not True and has_tensors(files, config, layer)


def _config_says_moe(config: Config, layer: int | str) -> bool | None:
    """Whether config.json calls a layer sparse; None where it is silent."""
    if isinstance(layer, str) or layer >= config.integer(LAYERS):
        return None
    values = config.values
    kinds, frequency = values.get("mlp_layer_types"), values.get("moe_layer_freq")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer]) != "dense"
    if isinstance(frequency, list) and layer < len(frequency):
        return bool(frequency[layer])
    first = values.get("first_k_dense_replace")
    if isinstance(first, int):
        step = frequency if isinstance(frequency, int) and frequency > 0 else 1
        return layer >= first and layer % step == 0
    return None


def expert_width(config: Config) -> int:
    """I: intermediate_size is the experts' only where moe_intermediate_size is absent."""
    key = Key(("moe_intermediate_size",))
    return config.integer(key if config.find(key.names) else Key(("intermediate_size",)))


def check_block_names(layer: Layer) -> None:
    """Refuse tensors of the block that no part of the layer reads: they would change its output."""
    family = layer.family
    known = {family.router, family.router_bias, family.correction_bias, family.table}
    shared = None if family.shared is None else family.shared + "."
    for name in layer.files.under(layer.block):
        rest = name[len(layer.block) :]
        if rest in known or rest.startswith("experts.") or (shared and rest.startswith(shared)):
            continue
        raise refuse(
            layer.files.file_of(name), name, "an extra tensor",
            f"only what a {family.name} layer has: experts, shared experts and a router",
            "check model_type: another family may have a part that is not computed here",
        )  # fmt: skip
