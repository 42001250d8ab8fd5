"""``inspect``: records for programs, lines for people, and a judge for kernels."""

from __future__ import annotations

from pathlib import Path

import published
import pytest

from megamoe.checkpoint import inspect, load, write_demo
from megamoe.checkpoint.files import Files
from megamoe.problem import Request

RENDERED = """\
{path}
family deepseek_v4 (model_type deepseek_v41_text, deepseek_v41): 3 MoE layers of 3, experts 1.6 MB

layer 0: 8 experts, top 3, hidden_size 256, intermediate_size 192
  experts     626.7 kB, 78.3 kB each
    w13       mxfp4 [384, 256]
    w2        mxfp4 [256, 192]
  router      sqrtsoftplus, BF16 weight, chosen by token id, renormalised (sum + 1e-20)
  scaling     1.5 at the weights; routing weight at fc2_input
  activation  swiglu, limit 10
  shared      fp8_block32_e8m0_scale and fp8_block32_e8m0_scale, intermediate_size 192, 147.6 kB
  reference: yes
  sm90: no: intermediate_size 192

layer 1: 8 experts, top 3, hidden_size 256, intermediate_size 192
  experts     626.7 kB, 78.3 kB each
    w13       mxfp4 [384, 256]
    w2        mxfp4 [256, 192]
  router      sqrtsoftplus, BF16 weight, correction bias for the choice, renormalised (sum + 1e-20)
  scaling     1.5 at the weights; routing weight at fc2_input
  activation  swiglu, limit 10
  shared      fp8_block32_e8m0_scale and fp8_block32_e8m0_scale, intermediate_size 192, 147.6 kB
  reference: yes
  sm90: no: intermediate_size 192

layer mtp.0: 4 experts, top 2, hidden_size 256, intermediate_size 192
  experts     313.3 kB, 78.3 kB each
    w13       mxfp4 [384, 256]
    w2        mxfp4 [256, 192]
  router      sqrtsoftplus, BF16 weight, correction bias for the choice, renormalised (sum + 1e-20)
  scaling     1.5 at the weights; routing weight at fc2_input
  activation  swiglu, limit 10
  shared      fp8_block32_e8m0_scale and fp8_block32_e8m0_scale, intermediate_size 192, 147.6 kB
  reference: yes
  sm90: no: intermediate_size 192"""


def test_lines(tmp_path: Path) -> None:
    path = published.deepseek_v41().write(tmp_path)
    asked: list[Request] = []

    def judge(request: Request) -> list[str]:
        asked.append(request)
        return ["reference: yes", f"sm90: no: intermediate_size {request.intermediate_size}"]

    record = inspect(path, judge=judge, world_size=2, max_tokens_per_rank=64)
    expected = RENDERED.format(path=path).replace("family deepseek_v4 ", "family deepseek_v41 ")
    assert str(record) == expected
    # Once for each kind of layer.
    assert [r.num_experts for r in asked] == [8, 8, 4]
    assert {(r.world_size, r.max_tokens_per_rank) for r in asked} == {(2, 64)}


def test_like_layers_are_told_together(tmp_path: Path) -> None:
    lines = str(inspect(write_demo(tmp_path, layers=5))).splitlines()
    assert "layers 0 to 4: 8 experts, top 2, hidden_size 256, intermediate_size 128" in lines


def test_a_prediction_stage_is_told_apart(tmp_path: Path) -> None:
    text = str(inspect(published.deepseek_v3().write(tmp_path)))
    titles = [line.split(":")[0] for line in text.splitlines() if line.startswith("layer")]
    assert titles == ["layer 0", "layer 1", "layer mtp.0"]


@pytest.mark.parametrize("build", published.BUILDERS, ids=lambda build: build.__name__)
def test_the_request_is_that_of_the_loaded_layer(build: object, tmp_path: Path) -> None:
    assert callable(build)
    p = build()
    path = p.write(tmp_path)
    record = next(r for r in inspect(path).layers if r.name == str(p.layer))
    assert record.moe is not None
    weights = load(path, p.layer, world_size=2)
    assert weights.router is not None
    assert record.moe.request(world_size=2, max_tokens_per_rank=16) == Request.of(
        weights, top_k=weights.router.top_k, max_tokens_per_rank=16
    )


def test_no_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # K70
    path = published.deepseek_v3().write(tmp_path)
    monkeypatch.setattr(Files, "read", lambda *_: pytest.fail("inspect read a tensor"))
    assert [layer.moe is not None for layer in inspect(path).layers] == [False, True, True]
