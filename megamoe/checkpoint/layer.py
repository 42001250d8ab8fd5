"""Where one layer's MoE block lies in the files, and whether its tensors are the expected."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megamoe.checkpoint.config import Config, Key
from megamoe.checkpoint.detect import SUFFIXES
from megamoe.checkpoint.families import FAMILIES, PREFIXES, Family
from megamoe.checkpoint.files import Files
from megamoe.checkpoint.refuse import refuse

LAYERS = Key(("num_hidden_layers", "num_layers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One MoE layer: ``block`` is the full prefix of its tensors, with the dot at its end."""

    files: Files
    config: Config
    family: Family
    name: str
    block: str

    @property
    def experts(self) -> str:
        return self.block + "experts."


def family_of(config: Config) -> Family:
    """The table's row for a config's model_type, the language model's before its wrapper's."""
    rows = {model_type: family for family in FAMILIES for model_type in family.model_types}
    for model_type in config.model_types:
        if model_type in rows:
            return rows[model_type]
    raise refuse(
        config.file, "model_type", " in ".join(config.model_types) or "absent",
        f"one of {', '.join(sorted(rows))}",
        "megamoe.checkpoint.families has no row for it: its names and arithmetic are unknown",
    )  # fmt: skip


def prefixes(family: Family, config: Config, layer: int | str) -> tuple[str, ...]:
    """Where the layer's tensors may begin. "mtp.0" is the first multi-token-prediction stage."""
    layers = config.integer(LAYERS)
    stage = None
    if isinstance(layer, str):
        matched = re.fullmatch(r"mtp\.(\d+)", layer)
        if not matched:
            raise refuse(
                config.file, "layer", repr(layer), "a number, or mtp.N", "name the layer so"
            )
        stage = int(matched[1])
    elif layer >= layers:
        stage = layer - layers
    elif layer < 0:
        raise refuse(config.file, "layer", layer, f"in [0, {layers}), or mtp.N", "count from 0")
    if stage is not None and family.mtp is not None:
        return (family.mtp.format(stage=stage), "model." + family.mtp.format(stage=stage))
    number = layer if stage is None else layers + stage
    return tuple(prefix.format(layer=number) for prefix in PREFIXES)


def find_layer(files: Files, config: Config, layer: int | str) -> Layer:
    """The layer's MoE block; refuses a dense layer, an absent one and one that stands twice."""
    family = family_of(config)
    tried = prefixes(family, config, layer)
    # transformers writes the table's own name for a block, so that is the other place to look.
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
        dense = here and says is not True
        raise refuse(
            files.root, f"layer {layer}",
            f"without experts under {here[0]}{family.block}." if here else "absent",
            f"{family.block}.experts.* tensors of {family.name}",
            "it is a dense layer: choose an MoE layer (megamoe inspect lists them)" if dense
            else "choose a layer that megamoe inspect lists, or complete the download",
        )  # fmt: skip
    if says is False:
        raise refuse(
            config.file, f"layer {layer}", f"dense, but {found[0]}experts.* is there",
            "config and tensors to agree", "take both from the same repository",
        )  # fmt: skip
    return Layer(files=files, config=config, family=family, name=str(layer), block=found[0])


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


def check_expert_names(layer: Layer, num_experts: int) -> None:
    """Refuse missing, misnamed and extra tensors among the experts, by name; nothing is opened."""
    files, root = layer.files, layer.experts
    kinds = layer.family.projections
    known = {kinds.gate, kinds.up, kinds.down}
    suffixes: dict[tuple[int, str], set[str]] = {}
    for name in files.under(root):
        expert, _, rest = name[len(root) :].partition(".")
        projection, _, suffix = rest.partition(".")
        if not (expert.isdecimal() and projection in known and suffix in SUFFIXES):
            raise refuse(
                files.file_of(name), name, "an extra tensor",
                f"{root}N.{{{kinds.gate},{kinds.up},{kinds.down}}}.<weight or a scale>",
                "no part of an expert (a bias, a zero point) may be dropped: export without it",
            )  # fmt: skip
        if int(expert) >= num_experts:
            raise refuse(
                files.file_of(name), name, "an extra tensor",
                f"experts 0 to {num_experts - 1}, as config.json says",
                "take config.json and shards of the same model",
            )  # fmt: skip
        suffixes.setdefault((int(expert), projection), set()).add(suffix)
    first = suffixes.get((0, kinds.gate), set())
    for expert_id in range(num_experts):
        for projection in (kinds.gate, kinds.up, kinds.down):
            have = suffixes.get((expert_id, projection), set())
            # w2 may be stored in another format than gate and up, but in the same one everywhere.
            like = suffixes.get((0, projection), first) if projection == kinds.down else first
            stem = f"{root}{expert_id}.{projection}"
            for suffix in sorted(like - have):
                raise refuse(
                    files.file_of(f"{stem}.{sorted(have)[0]}" if have else ""),
                    f"{stem}.{suffix}", "missing", f"beside the same tensor of expert 0 in {root}",
                    "complete the download; experts of one layer must share one format",
                )  # fmt: skip
            for suffix in sorted(have - like):
                raise refuse(
                    files.file_of(f"{stem}.{suffix}"), f"{stem}.{suffix}", "an extra tensor",
                    f"only {', '.join(sorted(like))}, as for expert 0",
                    "experts of one layer must share one format: export the layer in one",
                )  # fmt: skip
