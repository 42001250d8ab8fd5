"""One experts module as a layer: views, cache, empty slots, scaling, and every refusal by name."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import hf_models as hf
import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import megamoe
from megamoe.errors import BadInput, Unsupported
from megamoe.formats import PLAIN_BF16, dequantise
from megamoe.integrations.transformers import (
    GATES,
    Gate,
    experts_forward,
    layers,
    register,
    weights_of,
)
from megamoe.oracle import Inputs, judge
from megamoe.problem import GPT_OSS_ALPHA, HF_EAGER, Activation, MoEWeights, TopK
from megamoe.reference.elementwise import clamp, gated

CASES = [case.package for case in hf.CASES]


def experts_of(package: str) -> nn.Module:
    """A fresh experts module, free to be spoilt."""
    return copy.deepcopy(hf.pair(package)[0].experts)


def same_values(ours: MoEWeights, loaded: MoEWeights) -> bool:
    a, b = ours.experts, loaded.experts
    pairs = [(dequantise(a.w13), dequantise(b.w13)), (dequantise(a.w2), dequantise(b.w2))]
    for mine, other in ((a.b13, b.b13), (a.b2, b.b2)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            pairs.append((mine, other))
    return all(torch.equal(x, y) for x, y in pairs)


# --- what a module becomes ------------------------------------------------------------------------


@pytest.mark.parametrize("package", CASES)
def test_a_module_is_the_layer_that_its_checkpoint_is(package: str) -> None:
    """Two independent readers of one model: the module's parameters, and the saved file."""
    block, loaded = hf.pair(package)
    layer = weights_of(block.experts)
    assert same_values(layer, loaded)
    assert layer.activation == loaded.activation
    assert layer.experts.w13.format is PLAIN_BF16
    assert layer.routed_scaling_factor == 1.0  # the router or the block has applied it
    assert layer.family == type(block.experts).__name__


@pytest.mark.parametrize("package", CASES)
def test_parameters_are_viewed_and_only_interleaved_ones_copied(package: str) -> None:
    experts = experts_of(package)
    layer = weights_of(experts)
    assert layer.experts.w2.data.data_ptr() == experts.down_proj.data_ptr()
    viewed = layer.experts.w13.data.data_ptr() == experts.gate_up_proj.data_ptr()
    assert viewed == (package != "gpt_oss")
    assert not layer.experts.w13.data.requires_grad


def test_transposed_concatenated_parameters_are_viewed() -> None:
    experts = experts_of("qwen3_moe")
    straight = weights_of(experts)
    before = dequantise(straight.experts.w13), dequantise(straight.experts.w2)
    experts.is_transposed = True
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(experts, name).data.transpose(1, 2).contiguous()
        setattr(experts, name, nn.Parameter(values))
    layer = weights_of(experts)
    assert layer.experts.w13.data.data_ptr() == experts.gate_up_proj.data_ptr()
    assert torch.equal(dequantise(layer.experts.w13), before[0])
    assert torch.equal(dequantise(layer.experts.w2), before[1])


def test_the_layer_is_kept_until_a_parameter_changes() -> None:
    experts = experts_of("gpt_oss")
    first = weights_of(experts)
    assert weights_of(experts) is first
    changes: list[Callable[[], object]] = [
        lambda: experts.gate_up_proj.mul_(2),
        lambda: experts.down_proj_bias.zero_(),
        lambda: setattr(experts, "down_proj", nn.Parameter(experts.down_proj * 3)),
        lambda: setattr(experts, "gate_up_proj", nn.Parameter(experts.gate_up_proj.float())),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        again = weights_of(experts)
        assert again is not first
        assert weights_of(experts) is again
        gate, up = experts.gate_up_proj[..., 0::2], experts.gate_up_proj[..., 1::2]
        expected = torch.cat([gate, up], dim=2).transpose(1, 2)
        assert torch.equal(again.experts.w13.data, expected)
        assert again.experts.w2.data.data_ptr() == experts.down_proj.data_ptr()
        first = again


def test_a_module_is_not_kept_alive() -> None:
    experts = experts_of("qwen3_moe")
    layer = weakref.ref(weights_of(experts))
    module = weakref.ref(experts)
    del experts
    gc.collect()
    assert (module(), layer()) == (None, None)


# --- what a call means ----------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["qwen3_moe", "gpt_oss", "deepseek_v4"])
def test_the_sentinel_is_an_empty_slot(package: str) -> None:
    """Id E contributes nothing, whatever its weight; eager and ours agree about the others."""
    block, _ = hf.pair(package)
    experts, x = block.experts, hf.tokens(64)
    _, w, ids = hf.hf_route(block, x)
    empty = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    marked = torch.where(empty, hf.EXPERTS, ids)
    y = experts_forward(experts, x, marked, torch.where(empty, torch.nan, w.float()))
    topk = TopK(ids=torch.where(empty, -1, ids), weights=w, scaled=True)
    assert torch.equal(y, megamoe.forward(x, topk, weights_of(experts)))
    assert bool((y[empty.all(1)] == 0).all())
    assert empty.all(1).any()
    if package == "gpt_oss":
        return  # its eager experts know no sentinel
    with hf.implementation(block, "eager"), torch.no_grad():
        eager = experts(x, marked, w)
    report = judge(eager, Inputs(x, topk, weights_of(experts)), HF_EAGER)
    report.raise_if_wrong()


def test_scaling_is_not_applied_again() -> None:
    """DeepSeek's router has multiplied 2.5 in: the same bits as if we multiply."""
    block, loaded = hf.pair("deepseek_v3")
    assert loaded.router is not None
    x = hf.tokens(64)
    topk = megamoe.route(loaded.router.logits(x), loaded.router)
    scaled = topk.weights * torch.tensor(loaded.routed_scaling_factor)
    through = experts_forward(block.experts, x, topk.ids, scaled)
    assert loaded.routed_scaling_factor == 2.5
    assert torch.equal(through, megamoe.forward(x, topk, replace(loaded, shared=None)))


def test_no_tokens() -> None:
    experts = experts_of("qwen3_moe")
    none = torch.empty(0, hf.TOP_K)
    y = experts_forward(experts, hf.tokens(0), none.long(), none)
    assert (y.shape, y.dtype) == ((0, hf.H), torch.bfloat16)


def test_gradients_stop_with_an_error() -> None:
    experts = experts_of("qwen3_moe")
    x = hf.tokens(2).requires_grad_()
    ids, w = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.ones(2, 3)
    y = experts_forward(experts, x, ids, w)
    with pytest.raises(Unsupported, match="backward"):
        y.sum().backward()
    with pytest.raises(Unsupported, match="training mode"):
        experts_forward(experts.train(), x, ids, w)


@pytest.mark.parametrize(
    ("message", "x", "ids"),
    [
        ("bfloat16", torch.zeros(2, hf.H), torch.zeros(2, 3).long()),
        (str(hf.EXPERTS + 1), hf.tokens(2), torch.full((2, 3), hf.EXPERTS + 1)),
        ("-2", hf.tokens(2), torch.full((2, 3), -2)),
        ("int", hf.tokens(2), torch.zeros(2, 3)),
    ],
)
def test_bad_calls(message: str, x: Tensor, ids: Tensor) -> None:
    with pytest.raises(BadInput) as caught:
        experts_forward(experts_of("qwen3_moe"), x, ids, torch.ones(2, 3))
    assert message in str(caught.value)


# --- gate functions -------------------------------------------------------------------------------


def fields_of(gate: Gate) -> dict[str, object]:
    fields: dict[str, object] = {"act_fn": ACT2FN["silu"]} if gate.act else {}
    if gate.limit:
        fields[gate.limit] = 1.5
    if gate.alpha:
        fields[gate.alpha] = 1.702
    return fields


@pytest.mark.parametrize("name", GATES)
def test_each_row_is_what_its_gate_function_computes(name: str) -> None:
    """In float64, over a grid that crosses the limit on both sides of gate and up."""
    gate = GATES[name]
    owner: object = importlib.import_module(
        ".".join(p for p in name.split(".") if p[0].islower() and not p.startswith("_"))
    )
    for part in name.split(".")[-2 if "Experts" in name else -1 :]:
        owner = getattr(owner, part)
    assert callable(owner)
    axis = torch.arange(-32, 33, dtype=torch.float64) / 8
    g, u = (v.flatten() for v in torch.meshgrid(axis, axis, indexing="ij"))
    rows = torch.stack([g, u], dim=1).view(1, -1) if gate.interleaved else torch.cat([g, u])[None]
    theirs = owner(SimpleNamespace(**fields_of(gate)), rows)[0]
    activation = Activation(
        limit=1.5 if gate.limit else None,
        alpha=1.702 if gate.alpha else 1.0,
        up_offset=gate.up_offset,
    )
    ours = gated(*clamp(torch.cat([g, u])[None], activation), activation)[0]
    roundings = 12  # exp counted twice, sums, products and quotients of both sides
    bound = roundings * 2.0**-53 * ours.abs()
    assert bool(((theirs - ours).abs() <= bound).all())


def test_alpha_is_the_float32_that_torch_multiplies_by() -> None:
    assert weights_of(experts_of("gpt_oss")).activation.alpha == GPT_OSS_ALPHA


# --- refusals -------------------------------------------------------------------------------------


def module(gate: Callable[..., Tensor] | None = None, **decoration: bool) -> nn.Module:
    """An experts module of a class of our own, decorated as transformers' are."""

    class CustomExperts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts = 2
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 6).bfloat16())
            self.down_proj = nn.Parameter(torch.zeros(2, 6, 2).bfloat16())
            self.act_fn = ACT2FN["silu"]

        def forward(self, *args: object) -> None: ...

    if gate is not None:
        CustomExperts._apply_gate = gate  # type: ignore[attr-defined]
    made: nn.Module = use_experts_implementation(CustomExperts, **decoration)(None)
    return made.eval()


def relu_gate(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.relu() * up


def spoilt(package: str, **attributes: object) -> nn.Module:
    experts = experts_of(package)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def refusals() -> dict[str, tuple[type[Exception], nn.Module]]:
    bf16 = torch.bfloat16
    return {
        "CustomExperts with the gate function test_transformers_experts.relu_gate": (
            Unsupported, module(relu_gate)),
        "CustomExperts with has_gate False": (Unsupported, module(has_gate=False)),
        "CustomExperts with has_post_expert_norm True": (
            Unsupported, module(has_post_expert_norm=True)),
        "CustomExperts with is_concatenated False": (Unsupported, module(is_concatenated=False)),
        "CustomExperts with has_bias True and biases []": (Unsupported, module(has_bias=True)),
        "GptOssExperts with has_bias False and biases": (
            Unsupported, spoilt("gpt_oss", has_bias=False)),
        "GptOssExperts with is_concatenated True": (
            Unsupported, spoilt("gpt_oss", is_concatenated=True)),
        "GptOssExperts with limit None": (Unsupported, spoilt("gpt_oss", limit=None)),
        "GptOssExperts with limit [7.0, 7.0]": (Unsupported, spoilt("gpt_oss", limit=[7.0, 7.0])),
        "GptOssExperts with alpha '1.702'": (Unsupported, spoilt("gpt_oss", alpha="1.702")),
        "DeepseekV4Experts with limit 0": (Unsupported, spoilt("deepseek_v4", limit=0)),
        "activation limit -1.0 is not": (BadInput, spoilt("deepseek_v4", limit=-1)),
        "MixtralExperts with act_fn GELUActivation": (
            Unsupported, spoilt("mixtral", act_fn=ACT2FN["gelu"])),
        "DeepseekV4Experts with act_fn ReLU": (
            Unsupported, spoilt("deepseek_v4", act_fn=nn.ReLU())),
        "Linear with the gate function None.None": (Unsupported, nn.Linear(2, 2)),
        "MixtralExperts without num_experts": (Unsupported, spoilt("mixtral", num_experts=None)),
        "MixtralExperts.gate_up_proj of shape [8, 96, 64] is not [4,": (
            BadInput, spoilt("mixtral", num_experts=4)),
        "MixtralExperts without down_proj": (Unsupported, spoilt("mixtral", down_proj=None)),
        "MixtralExperts.gate_up_proj of shape [8, 6144]": (
            BadInput,
            spoilt("mixtral", gate_up_proj=nn.Parameter(torch.zeros(8, 6144, dtype=bf16)))),
        "plain values of torch.uint8 are neither bfloat16 nor float32": (
            BadInput,
            spoilt("mixtral", gate_up_proj=nn.Parameter(
                torch.zeros(8, 96, 64, dtype=torch.uint8), requires_grad=False))),
        "w2 of shape [8, 64, 47]": (
            BadInput, spoilt("mixtral", down_proj=nn.Parameter(torch.zeros(8, 64, 47).to(bf16)))),
    }  # fmt: skip


REFUSED = refusals()


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(message: str) -> None:
    kind, experts = REFUSED[message]
    with pytest.raises(kind) as caught:
        weights_of(experts)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_custom_module_of_a_known_form_is_taken() -> None:
    """The refusals above are of what each spoils, not of the class."""
    assert weights_of(module()).hidden_size == 6


def test_block_fp8_modules_are_refused_for_what_they_are() -> None:
    """Their table of implementations is another; unknown there would say nothing of the reason."""
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    register()
    config = SimpleNamespace(
        hidden_size=128, moe_intermediate_size=128, num_experts=2, hidden_act="silu",
        _experts_implementation="megamoe",
    )  # fmt: skip
    decorated = use_experts_implementation(
        type("FP8Experts", (fp8.FP8Experts,), {}),
        experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    experts = decorated(config, block_size=(128, 128)).eval()
    with pytest.raises(Unsupported, match=r"^FP8Experts with the gate function \S+FP8Experts"):
        experts(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1))


def test_a_module_with_a_forward_of_its_own_does_not_pass_for_ours() -> None:
    """transformers runs an MXFP4 gpt-oss by other kernels, whatever the implementation's name."""
    mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
    model = hf.build("gpt_oss")
    assert list(layers(model)) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    model.model.layers[1].mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)
    with pytest.raises(Unsupported, match=r"^Mxfp4GptOssExperts with the gate function None"):
        layers(model)


def test_register_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = importlib.import_module("transformers.integrations.moe")
    monkeypatch.delattr(moe, "ExpertsInterface")
    with pytest.raises(Unsupported, match=r"transformers .* has no ExpertsInterface; install"):
        register()


def test_half_of_the_interfaces_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name known to one table only would run some models and fail in others."""
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    monkeypatch.delattr(fp8, "FP8ExpertsInterface")
    with pytest.raises(Unsupported, match=r"transformers .* has no FP8ExpertsInterface; install"):
        register("megamoe, half")
    assert "megamoe, half" not in ALL_EXPERTS_FUNCTIONS.valid_keys()
