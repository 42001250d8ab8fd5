"""Model families as rows of one table: where their tensors are, and what their layer computes.

A fact is a constant where the family fixes it, or a :class:`Key` where config.json states it; a
config that states a constant otherwise is refused (``stated.py``).
Sources: the models' own configs and inference code, and the modeling files of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megamoe.checkpoint.config import Key
from megamoe.problem import GPT_OSS_ALPHA, Scoring, WeightAt

EXPERTS = Key(("n_routed_experts", "num_experts", "num_local_experts"))
TOP_K = Key(("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"))
SHARED_COUNT = Key(("n_shared_experts", "num_shared_experts"))
LIMIT = Key(("swiglu_limit",))
ALPHA = Key(("swiglu_alpha",))
RENORMALISE = Key(("norm_topk_prob",))
SCALING = Key(("routed_scaling_factor",))
GROUPS = (Key(("n_group",)), Key(("topk_group",)))

# Where the language model's layers may begin: alone, or inside a multimodal wrapper.
PREFIXES = (
    "model.layers.{layer}.",
    "layers.{layer}.",
    "language_model.model.layers.{layer}.",
    "model.language_model.layers.{layer}.",
)


class Projections(NamedTuple):
    """The names of one FFN's matrices."""

    gate: str
    up: str
    down: str


HF = Projections("gate_proj", "up_proj", "down_proj")
W123 = Projections("w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Experts stacked in one tensor per leg, under ``experts.``.

    interleaved: row 2j is gate j and row 2j+1 is up j; else all gates come first. transposed: the
    plain (BF16) form stores [experts, columns, rows]. bias: whether both legs have one.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. Tensor names are relative to ``block``, which is relative to the layer's prefix.

    mtp: the prefix of multi-token-prediction stages that do not continue the layers' numbers.
    mtp_experts, mtp_top_k: what a stage may have of its own; 0 is the layers'.
    """

    name: str
    model_types: tuple[str, ...]
    block: str = "mlp"
    projections: Projections = HF
    fused: Fused = Fused()
    experts: Key = EXPERTS
    top_k: Key = TOP_K
    mtp: str | None = None
    mtp_experts: Key | None = None
    mtp_top_k: Key | None = None
    # router
    router: str = "gate.weight"
    router_bias: str | None = None
    correction_bias: str | None = None
    table: str | None = None
    scoring: Scoring = "softmax"
    renormalise: bool | Key = True
    epsilon: float = 0.0
    groups: tuple[Key, Key] | None = None
    # scaling
    routed_scaling_factor: float | Key = 1.0
    scale_at: Literal["weights", "output"] = "weights"
    weight_at: WeightAt = "combine"
    # activation
    activations: tuple[str, ...] = ("silu",)
    limit: Key | None = None
    alpha: float | Key = 1.0
    up_offset: float = 0.0
    # shared experts
    shared: str | None = None
    shared_projections: Projections = HF
    shared_count: Key = SHARED_COUNT
    shared_width: Key | None = None


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32"),
    correction_bias="gate.e_score_correction_bias",
    scoring="sigmoid",
    renormalise=RENORMALISE,
    epsilon=1e-20,
    groups=GROUPS,
    routed_scaling_factor=SCALING,
    shared="shared_experts",
)
DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    block="ffn",
    projections=W123,
    mtp="mtp.{stage}.",
    mtp_experts=Key(("dspark_n_routed_experts",), default=0),
    mtp_top_k=Key(("dspark_num_experts_per_tok",), default=0),
    correction_bias="gate.bias",
    table="gate.tid2eid",
    scoring="sqrtsoftplus",
    epsilon=1e-20,
    routed_scaling_factor=SCALING,
    weight_at="fc2_input",
    limit=LIMIT,
    shared="shared_experts",
    shared_projections=W123,
)
MIXTRAL = Family(
    name="mixtral", model_types=("mixtral",), block="block_sparse_moe", projections=W123
)

FAMILIES = (
    DEEPSEEK_V3,
    replace(DEEPSEEK_V3, name="kimi_k2", model_types=("kimi_k2", "kimi_k25")),
    DEEPSEEK_V4,
    replace(DEEPSEEK_V4, name="deepseek_v41", model_types=("deepseek_v41", "deepseek_v41_text")),
    replace(DEEPSEEK_V3, name="glm4_moe", model_types=("glm4_moe", "glm4v_moe", "glm4v_moe_text")),
    replace(DEEPSEEK_V3, name="glm_moe_dsa", model_types=("glm_moe_dsa",)),
    replace(
        DEEPSEEK_V3, name="glm5_next", model_types=("glm5_next", "glm5_next_text"), limit=LIMIT
    ),
    replace(
        DEEPSEEK_V3,
        name="mimo_v2",
        model_types=("mimo_v2", "mimo_v2_flash"),
        mtp="mtp.layers.{stage}.",
        routed_scaling_factor=replace(SCALING, default=1.0),
        shared_count=replace(SHARED_COUNT, default=0),
    ),
    Family(name="qwen3_moe", model_types=("qwen3_moe",), renormalise=RENORMALISE),
    Family(name="olmoe", model_types=("olmoe",), renormalise=RENORMALISE),
    MIXTRAL,
    replace(MIXTRAL, name="minimax", model_types=("minimax",)),
    replace(
        MIXTRAL,
        name="minimax_m2",
        model_types=("minimax_m2",),
        correction_bias="e_score_correction_bias",
        scoring="sigmoid",
    ),
    replace(
        MIXTRAL,
        name="minimax_m3",
        model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
        correction_bias="e_score_correction_bias",
        scoring="sigmoid",
        routed_scaling_factor=SCALING,
        scale_at="output",
        activations=("swigluoai", "silu"),  # transformers writes silu and computes swigluoai
        limit=LIMIT,
        alpha=ALPHA,
        up_offset=1.0,
        shared="shared_experts",
        shared_count=replace(SHARED_COUNT, default=1),
        shared_width=Key(("shared_intermediate_size",)),
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        fused=Fused(interleaved=True, transposed=True, bias=True),
        router="router.weight",
        router_bias="router.bias",
        scoring="softmax_of_top_k",
        renormalise=False,
        limit=LIMIT,
        alpha=replace(ALPHA, default=GPT_OSS_ALPHA),  # silent in the published config
        up_offset=1.0,
    ),
)
