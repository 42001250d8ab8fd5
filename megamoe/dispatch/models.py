"""Published geometries, so that a decision can be explained for a model that is not on this disk.

Facts of each model's public config.json; a checkpoint's own config always wins over this table.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megamoe.errors import bad_input
from megamoe.formats import (
    FP8_BLOCK128,
    FP8_BLOCK128_BF16,
    FP8_BLOCK128_E8M0,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
    Format,
)
from megamoe.problem import (
    GPT_OSS_ALPHA,
    Activation,
    Host,
    Placement,
    Request,
    WeightAt,
)

LIMIT_10 = Activation(limit=10.0)
GPT_OSS = Activation(limit=7.0, alpha=GPT_OSS_ALPHA, up_offset=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One layer's geometry; ``formats``: those its checkpoints come in, the usual one first."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    formats: tuple[Format, ...]
    activation: Activation = Activation()
    scaling: float = 1.0
    scale_at_output: bool = False
    shared: bool = False
    bias: bool = False
    weight_at: WeightAt = "combine"

    def request(
        self,
        *,
        world_size: int,
        max_tokens_per_rank: int,
        weights: Format | None = None,
        host: Host | None = None,
    ) -> Request:
        """The request that this model makes of ``world_size`` ranks."""
        return Request(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            placement=Placement.contiguous(self.num_experts, world_size),
            top_k=self.top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            weights=weights or self.formats[0],
            activation=self.activation,
            expert_bias=self.bias,
            weight_at=self.weight_at,
            routed_scaling_factor=self.scaling,
            scale_at="output" if self.scale_at_output else "weights",
            shared=self.shared,
            host=host or Host(),
        )


_V3 = Model(
    hidden_size=7168,
    intermediate_size=2048,
    num_experts=256,
    top_k=8,
    formats=(FP8_BLOCK128, NVFP4, PLAIN_BF16),
    scaling=2.5,
    shared=True,
)
_V4 = Model(
    hidden_size=4096,
    intermediate_size=2048,
    num_experts=256,
    top_k=6,
    formats=(MXFP4, NVFP4, FP8_BLOCK128_E8M0),
    activation=LIMIT_10,
    scaling=1.5,
    shared=True,
    weight_at="fc2_input",
)
_QWEN3 = Model(
    hidden_size=2048,
    intermediate_size=768,
    num_experts=128,
    top_k=8,
    formats=(PLAIN_BF16, FP8_BLOCK128_BF16, NVFP4),
)
_GPT_OSS = Model(
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    top_k=4,
    formats=(MXFP4, PLAIN_BF16),
    activation=GPT_OSS,
    bias=True,
)

MODELS: dict[str, Model] = {
    "deepseek-v3": _V3,
    "deepseek-v4-flash": _V4,
    "deepseek-v4-pro": dataclasses.replace(
        _V4, hidden_size=7168, intermediate_size=3072, num_experts=384, scaling=2.5
    ),
    "deepseek-v4.1-flash": dataclasses.replace(
        _V4, hidden_size=5120, intermediate_size=2304, num_experts=384, formats=(MXFP4,)
    ),
    "glm-4.5-air": Model(
        hidden_size=4096,
        intermediate_size=1408,
        num_experts=128,
        top_k=8,
        formats=(PLAIN_BF16,),
        shared=True,
    ),
    "glm-5": dataclasses.replace(_V3, hidden_size=6144, formats=(PLAIN_BF16, FP8_BLOCK128, NVFP4)),
    "glm-5-next": dataclasses.replace(
        _V3,
        hidden_size=4096,
        num_experts=288,
        activation=LIMIT_10,
        formats=(PLAIN_BF16, FP8_BLOCK128),
    ),
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-235b-a22b": dataclasses.replace(_QWEN3, hidden_size=4096, intermediate_size=1536),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": dataclasses.replace(_GPT_OSS, num_experts=128),
    "mixtral-8x7b": Model(
        hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2, formats=(PLAIN_BF16,)
    ),
    "kimi-k2": dataclasses.replace(_V3, num_experts=384, scaling=2.827),
    "kimi-k2.5": dataclasses.replace(_V3, num_experts=384, scaling=2.827, formats=(INT4_G32,)),
    "mimo-v2.5-pro": dataclasses.replace(
        _V3, hidden_size=6144, num_experts=384, scaling=1.0, shared=False, formats=(FP8_BLOCK128,)
    ),
    "olmoe-1b-7b": Model(
        hidden_size=2048, intermediate_size=1024, num_experts=64, top_k=8, formats=(PLAIN_BF16,)
    ),
    "minimax-m2": Model(
        hidden_size=3072, intermediate_size=1536, num_experts=256, top_k=8, formats=(FP8_BLOCK128,)
    ),
    "minimax-m3": Model(
        hidden_size=6144,
        intermediate_size=3072,
        num_experts=128,
        top_k=4,
        formats=(PLAIN_BF16, MXFP8),
        activation=GPT_OSS,
        scaling=2.0,
        scale_at_output=True,
        shared=True,
    ),
}


def model(name: str) -> Model:
    """The row of that name; BadInput lists the names there are."""
    if name not in MODELS:
        raise bad_input("model", repr(name), "is unknown", f"use one of {', '.join(MODELS)}")
    return MODELS[name]


def published_format(of: Model, name: str | None) -> Format:
    """The format of that name among those the model is published in; the usual one for None."""
    formats = {fmt.name: fmt for fmt in of.formats}
    if name is None:
        return of.formats[0]
    if name not in formats:
        raise bad_input(
            "format", repr(name), "is not one this model is published in",
            f"use one of {', '.join(formats)}",
        )  # fmt: skip
    return formats[name]
