"""What config.json states must be what the layer computes: nothing stated is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import published
import pytest
from published import Published
from test_bad_input import inspected, refusal

from megamoe.checkpoint import load

Builder = Callable[[], Published]

# A published checkpoint, a key of its config.json, and a value that is another function.
OTHER: tuple[tuple[Builder, str, object], ...] = (
    (published.minimax_m2, "norm_topk_prob", False),
    (published.minimax_m2, "routed_scaling_factor", 2.5),
    (published.minimax_m2, "n_group", 4),
    (published.minimax_m2, "use_routing_bias", False),
    (published.minimax_m2, "topk_method", "greedy"),
    (published.minimax_m2, "n_shared_experts", 1),
    (published.minimax_m3, "norm_topk_prob", False),
    (published.minimax_m3, "swiglu_limit_shared", 5.0),
    (published.qwen3_moe, "routed_scaling_factor", 2.5),
    (published.qwen3_moe, "scoring_func", "sigmoid"),
    (published.qwen3_moe, "topk_method", "noaux_tc"),
    (published.qwen3_moe, "use_routing_bias", True),
    (published.mixtral, "norm_topk_prob", False),
    (published.deepseek_v4, "norm_topk_prob", False),
    (published.deepseek_v4, "n_group", 4),
    (published.deepseek_v4, "topk_group", 2),
    (published.deepseek_v4, "topk_group", True),
    (published.deepseek_v4, "scoring_func", ["sqrtsoftplus"]),
    (published.deepseek_v3, "use_routing_bias", False),
    (published.deepseek_v3, "swiglu_limit", 4.0),
    (published.deepseek_v3, "swiglu_limits", [4.0, 4.0]),
    (published.deepseek_v3, "swiglu_limits_shared", [4.0, 4.0]),
    (published.deepseek_v3, "swiglu_limit_shared", 4.0),
    (published.deepseek_v3, "gemm1_clamp_limit", 4.0),
    (published.glm5_next, "swiglu_limit_shared", 5.0),
    (published.gpt_oss, "norm_topk_prob", False),
    (published.gpt_oss, "scoring_func", "sigmoid"),
)
# The same function in other words.
SAME: tuple[tuple[Builder, dict[str, object]], ...] = (
    (
        published.minimax_m2,
        {
            "norm_topk_prob": True, "routed_scaling_factor": 1, "n_group": 1, "topk_group": 1,
            "topk_method": "noaux_tc", "n_shared_experts": 0,
        },
    ),
    (published.qwen3_moe, {"scoring_func": "softmax", "topk_method": "greedy"}),
    (published.qwen3_moe, {"use_routing_bias": False, "routed_scaling_factor": None}),
    (published.deepseek_v4, {"n_group": None, "topk_group": None, "norm_topk_prob": None}),
    (published.gpt_oss, {"norm_topk_prob": True, "scoring_func": "softmax"}),
    (published.glm5_next, {"swiglu_limit_shared": None, "swiglu_limits": None}),
)  # fmt: skip


def stating(build: Builder, values: dict[str, object], directory: Path) -> tuple[Path, int | str]:
    """The checkpoint with these values in the language model's part of its config.json."""
    p = build()
    p.config.get("text_config", p.config).update(values)
    return p.write(directory), p.layer


@pytest.mark.parametrize(
    ("build", "key", "value"), OTHER, ids=[f"{b.__name__}-{k}-{v}" for b, k, v in OTHER]
)
def test_another_function_is_refused(
    build: Builder, key: str, value: object, tmp_path: Path
) -> None:
    path, layer = stating(build, {key: value}, tmp_path)
    sentence = refusal(path, layer)
    assert sentence.startswith(f"{path / 'config.json'}: {key} is ")
    assert inspected(path, layer) == sentence


@pytest.mark.parametrize(("build", "values"), SAME)
def test_the_same_function_is_taken(
    build: Builder, values: dict[str, object], tmp_path: Path
) -> None:
    load(*stating(build, values, tmp_path))
