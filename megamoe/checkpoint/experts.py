"""The experts of a layer: their tensors found and checked by name, then this rank's share read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.checkpoint.detect import detect
from megamoe.checkpoint.files import DTYPES, Entry, Files
from megamoe.checkpoint.fused import check_fused_names, fused_bias, fused_matrices, is_fused
from megamoe.checkpoint.layer import Layer, expert_width
from megamoe.checkpoint.matrix import Matrix
from megamoe.checkpoint.refuse import refuse
from megamoe.checkpoint.stack import check_one_format, stack
from megamoe.checkpoint.storage import BESIDE, SUFFIXES
from megamoe.formats import Format
from megamoe.problem import ExpertWeights

Parts = Mapping[int, tuple[Matrix, ...]]
Found = dict[tuple[int, str], frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    """What makes w13 and w2 of some experts: by expert, matrices that stand below each other.

    b13, b2: the biases of all experts, as stored, or None.
    """

    w13: Parts
    w2: Parts
    b13: Entry | None = None
    b2: Entry | None = None

    @property
    def formats(self) -> tuple[Format, Format]:
        return next(iter(self.w13.values()))[0].format, next(iter(self.w2.values()))[0].format


def find_experts(layer: Layer, ids: Iterable[int], hidden: int) -> Legs:
    """The matrices of these experts, from headers alone; every expert's names are checked."""
    num_experts, intermediate = layer.num_experts, expert_width(layer.config)
    fused = layer.family.fused
    b13 = b2 = None
    if fused.bias:
        b13 = fused_bias(layer, fused.gate_up, num_experts, 2 * intermediate)
        b2 = fused_bias(layer, fused.down, num_experts, hidden)
    if is_fused(layer):
        check_fused_names(layer)
        gate_up, down = fused_matrices(layer, num_experts, hidden, intermediate)
        return Legs(
            w13={e: (replace(gate_up, index=e),) for e in ids},
            w2={e: (replace(down, index=e),) for e in ids},
            b13=b13,
            b2=b2,
        )
    check_expert_names(layer, num_experts)
    names = layer.family.projections
    w13: dict[int, tuple[Matrix, ...]] = {}
    w2: dict[int, tuple[Matrix, ...]] = {}
    for e in ids:
        gate, up, down = (
            detect(layer.files, layer.config, f"{layer.experts}{e}.{name}")
            for name in (names.gate, names.up, names.down)
        )
        for matrix in (gate, up):
            check_shape(matrix, intermediate, hidden)
        check_shape(down, hidden, intermediate)
        w13[e], w2[e] = (gate, up), (down,)
    for parts in (w13, w2):
        check_one_format([matrix for expert in parts.values() for matrix in expert])
    return Legs(w13=w13, w2=w2, b13=b13, b2=b2)


def load_experts(
    layer: Layer,
    legs: Legs,
    slots: Sequence[int],
    device: torch.device,
    target: Format | None = None,
) -> ExpertWeights:
    """One expert per slot, in order; a slot of -1 is all zeros. ``legs`` has every id in slots."""
    w13 = stack(layer.files, legs.w13, slots, device, target)
    w2 = stack(layer.files, legs.w2, slots, device, target)
    interleaved = layer.family.fused.interleaved
    return ExpertWeights(
        w13=w13,
        w2=w2,
        b13=None if legs.b13 is None else _bias(layer.files, legs.b13, slots, device, interleaved),
        b2=None if legs.b2 is None else _bias(layer.files, legs.b2, slots, device),
    )


def _bias(
    files: Files,
    entry: Entry,
    slots: Sequence[int],
    device: torch.device,
    interleaved: bool = False,
) -> Tensor:
    """[slots, width] in the stored dtype, rows ordered as the weights' are; 0 in empty slots."""
    held = torch.zeros(len(slots), entry.shape[1], dtype=DTYPES[entry.dtype], device=device)
    read = {e: files.read(entry, e) for e in sorted({e for e in slots if e >= 0})}
    for slot, expert in enumerate(slots):
        if expert < 0:
            continue
        row = read[expert]
        if not bool(row.isfinite().all()):
            raise refuse(
                entry.file, entry.name, f"NaN or infinite in expert {expert}", "finite",
                "download the shard again",
            )  # fmt: skip
        held[slot] = torch.cat((row[0::2], row[1::2])) if interleaved else row
    return held


def check_shape(matrix: Matrix, rows: int, columns: int) -> None:
    if (matrix.rows, matrix.columns) != (rows, columns):
        raise refuse(
            matrix.data.file, matrix.data.name,
            f"{matrix.data}, which is {matrix.format} [{matrix.rows}, {matrix.columns}]",
            f"[{rows}, {columns}], as config.json says", "take both from the same repository",
        )  # fmt: skip


def check_expert_names(layer: Layer, num_experts: int) -> None:
    """Refuse missing, misnamed and extra tensors among the experts, by name; nothing is opened."""
    files, root, names = layer.files, layer.experts, layer.family.projections
    found = _suffixes(layer, num_experts)
    # w2 may be stored in another way than gate and up, but in one way in every expert.
    usual = {
        projection: _most_common(found, leg)
        for leg in ((names.gate, names.up), (names.down,))
        for projection in leg
    }
    for expert_id in range(num_experts):
        for projection in names:
            like, have = usual[projection], found.get((expert_id, projection), frozenset())
            stem = f"{root}{expert_id}.{projection}"
            if have == like:
                continue
            if have < like:
                raise refuse(
                    files.file_of(f"{stem}.{min(have)}") if have else files.root,
                    f"{stem}.{min(like - have)}", "missing", f"it, with {_listed(like)}",
                    "complete the download; the experts of a layer must share one format",
                )  # fmt: skip
            if have > like:
                extra = f"{stem}.{min(have - like)}"
                raise refuse(
                    files.file_of(extra), extra, "an extra tensor",
                    f"{_listed(like)} only, as in most experts",
                    "the experts of a layer must share one format: export it in one",
                )  # fmt: skip
            raise refuse(
                files.file_of(f"{stem}.{min(have)}"), stem, _listed(have),
                f"{_listed(like)}, as in most experts",
                "the experts of a layer must share one format: export it in one",
            )  # fmt: skip


def _suffixes(layer: Layer, num_experts: int) -> Found:
    """What there is of each expert's projections; refuses what belongs to none of them."""
    files, root, names = layer.files, layer.experts, layer.family.projections
    found: dict[tuple[int, str], set[str]] = {}
    for name in files.under(root):
        expert, _, rest = name[len(root) :].partition(".")
        projection, _, suffix = rest.partition(".")
        if not (expert.isdecimal() and projection in names and suffix in SUFFIXES):
            raise refuse(
                files.file_of(name), name, "an extra tensor",
                f"{root}N.{{{','.join(names)}}}.<weight or a scale>",
                "no part of an expert (a bias, a zero point) may be dropped: export without it",
            )  # fmt: skip
        if int(expert) >= num_experts:
            raise refuse(
                files.file_of(name), name, "an extra tensor",
                f"experts 0 to {num_experts - 1}, as config.json says",
                "take config.json and shards of the same model",
            )  # fmt: skip
        if suffix not in BESIDE:
            found.setdefault((int(expert), projection), set()).add(suffix)
    return {place: frozenset(suffixes) for place, suffixes in found.items()}


def _most_common(found: Found, projections: tuple[str, ...]) -> frozenset[str]:
    """The set of suffixes that most matrices of a leg have: no one expert is the yardstick.

    Of equally many the larger one: what a download loses is more likely than what it gains.
    """
    counts = Counter(have for (_, projection), have in found.items() if projection in projections)
    if not counts:
        return frozenset({"weight"})
    return max(counts, key=lambda have: (counts[have], len(have), sorted(have)))


def _listed(suffixes: frozenset[str]) -> str:
    return " and ".join(sorted(suffixes))
