"""Hugging Face transformers as a client: a whole model's experts through ``megamoe.forward``.

    from megamoe.integrations.transformers import layers, register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="megamoe")
    layers(model)  # raises before the first token where an experts module cannot be taken

transformers keeps attention, router, shared experts and its own expert parallelism; each experts
module, with the parameters it holds, becomes a :class:`MoEWeights`. Its routers fold the scaling
factor into the weights, so what arrives here is scaled; its sentinel id E is our empty slot -1.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.errors import Unsupported, bad_input, one_line
from megamoe.formats import F64, plain, rn32
from megamoe.problem import Activation, ExpertWeights, MoEWeights, Placement, TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What one of transformers' gate functions computes, and which attributes state its numbers.

    act: it calls the module's ``act_fn``. interleaved: gates are the even columns and ups the odd
    ones; else all gates come first.
    """

    act: bool = False
    limit: str | None = None
    alpha: str | None = None
    up_offset: float = 0.0
    interleaved: bool = False


# By the function that transformers would call between the two products: another name may be another
# function, so it is refused.
GATES = {
    "transformers.integrations.moe._default_apply_gate": Gate(act=True),
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": Gate(
        act=True, limit="limit"
    ),
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": Gate(
        limit="swiglu_limit"
    ),
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": Gate(
        limit="limit", alpha="alpha", up_offset=1.0, interleaved=True
    ),
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": Gate(
        limit="swiglu_limit", alpha="swiglu_alpha", up_offset=1.0
    ),
}
# What transformers' decorator and the class state about the layout.
STATED = (
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "is_concatenated",
    "num_experts",
)
# Block-FP8 modules look in a table of their own; there they are refused for what they are.
TABLES = (
    ("transformers.integrations.moe", "ExpertsInterface"),
    ("transformers.integrations.finegrained_fp8", "FP8ExpertsInterface"),
)
SILU = ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU")


def register(name: str = "megamoe") -> None:
    """Make ``experts_implementation=name`` known to transformers; again is harmless.

    Raises Unsupported, with nothing registered, where transformers is absent or too old to have
    experts implementations.
    """
    tables = [_table(*place) for place in TABLES]
    for table in tables:
        table.register(name, experts_forward)


def _table(module: str, name: str) -> Any:
    try:
        # By name: type checkers need not read transformers, and importing megamoe never loads it.
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _refusal(
            "transformers", f"({error})", f"has no {name}", "install transformers 5.24 or newer"
        ) from error


def layers(model: nn.Module) -> dict[str, MoEWeights]:
    """Every experts module of a model as a layer, by its name.

    Raises as :func:`weights_of` does, also for a module that would never call megamoe: one that a
    quantiser put in place with a forward of its own (MXFP4 gpt-oss; load it dequantised).
    """
    found = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Experts")}
    return {name: weights_of(module) for name, module in found.items()}


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls: the weighted sum over each token's experts, BF16 [T, H].

    hidden_states: BF16 [T, H]. top_k_index: [T, K], E is an empty slot. top_k_weights: [T, K],
    floating, the scaling factor inside.

    For inference: gradients stop with an error, in the backward pass or in training mode at once.
    Raises BadInput and Unsupported as :func:`weights_of` and ``megamoe.forward`` do.
    """
    if experts.training:
        name = type(experts).__name__
        raise _refusal(name, "in training mode", "asks for gradients", "call model.eval()")
    run: Callable[..., Tensor] = _Inference.apply
    return run(experts, hidden_states, top_k_index, top_k_weights)


class _Inference(torch.autograd.Function):
    """A gradient through the layer is an error: silently dropped, it would train a wrong model."""

    @staticmethod
    def forward(
        ctx: Any, experts: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        from megamoe.api import forward

        layer = weights_of(experts)
        ids = torch.where(index == layer.num_experts, -1, index)
        return forward(hidden_states, TopK(ids=ids, weights=weights, scaled=True), layer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        remedy = 'train with experts_implementation="grouped_mm"'
        raise _refusal("a backward pass", "through megamoe", "has no gradient", remedy)


_LAYERS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], MoEWeights]] = (
    weakref.WeakKeyDictionary()
)


def weights_of(experts: nn.Module) -> MoEWeights:
    """The module's experts as a layer, the same object until a parameter moves or is written to.

    Views of the parameters, transposed where they are; interleaved rows (gpt-oss) are copied once,
    because no view puts all gates before all ups. A write through ``.data`` goes unseen: it leaves
    no trace in a tensor.

    Raises Unsupported, by name, for a gate function, layout or bias without a row here, and
    BadInput for parameters of another type or shape.
    """
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    parameters = {
        n: p.detach() for n in names if isinstance(p := getattr(experts, n, None), Tensor)
    }
    stamp = tuple(_stamp(parameter) for parameter in parameters.values())
    cached = _LAYERS.get(experts)
    if cached is not None and cached[0] == stamp:
        return cached[1]
    layer = _wrap(experts, parameters)
    _LAYERS[experts] = (stamp, layer)
    return layer


def _stamp(tensor: Tensor) -> tuple[object, ...]:
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)


def _wrap(experts: nn.Module, parameters: dict[str, Tensor]) -> MoEWeights:
    name, gate = type(experts).__name__, _gate(experts)
    transposed, count = _check_layout(experts, gate, parameters)
    w13, w2 = parameters["gate_up_proj"], parameters["down_proj"]
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    b13, b2 = parameters.get("gate_up_proj_bias"), parameters.get("down_proj_bias")
    if gate.interleaved:
        w13 = torch.cat([w13[:, 0::2], w13[:, 1::2]], dim=1)
        b13 = None if b13 is None else torch.cat([b13[:, 0::2], b13[:, 1::2]], dim=1)
    return MoEWeights(
        experts=ExpertWeights(w13=plain(w13), w2=plain(w2), b13=b13, b2=b2),
        placement=Placement.contiguous(count, 1),
        activation=_activation(experts, gate),
        family=name,
    )


def _check_layout(
    experts: nn.Module, gate: Gate, parameters: dict[str, Tensor]
) -> tuple[bool, int]:
    """(is_transposed, num_experts), once what the module states of its parameters is true."""
    name = type(experts).__name__
    stated: dict[str, Any] = {n: getattr(experts, n, None) for n in STATED}
    unsaid = [n for n, value in stated.items() if value is None]
    if unsaid:
        raise _unsupported(name, f"without {unsaid[0]}")
    if not stated["has_gate"]:
        raise _unsupported(name, "with has_gate False")
    if stated["has_post_expert_norm"]:
        raise _unsupported(name, "with has_post_expert_norm True")
    if gate.interleaved == stated["is_concatenated"]:
        raise _unsupported(name, f"with is_concatenated {stated['is_concatenated']} and its gate")
    biases = sorted(n for n in parameters if n.endswith("_bias"))
    if len(biases) != 2 * stated["has_bias"]:
        raise _unsupported(name, f"with has_bias {stated['has_bias']} and biases {biases}")
    for parameter in ("gate_up_proj", "down_proj"):
        if parameter not in parameters:
            raise _unsupported(name, f"without {parameter}")
        if hasattr(parameters[parameter], "to_local"):
            raise _unsupported(name, f"with {parameter} as a DTensor")
        shape = list(parameters[parameter].shape)
        if len(shape) != 3 or shape[0] != stated["num_experts"]:
            raise bad_input(
                f"{name}.{parameter}", f"of shape {shape}",
                f"is not [{stated['num_experts']}, rows, columns]", "load the model unquantised",
            )  # fmt: skip
    return bool(stated["is_transposed"]), int(stated["num_experts"])


def _gate(experts: nn.Module) -> Gate:
    function = getattr(experts, "_apply_gate", None)
    function = getattr(function, "__func__", function)
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    if name not in GATES:
        raise _unsupported(type(experts).__name__, f"with the gate function {name}")
    gate = GATES[name]
    act = type(getattr(experts, "act_fn", None))
    if gate.act and f"{act.__module__}.{act.__qualname__}" not in SILU:
        raise _unsupported(type(experts).__name__, f"with act_fn {act.__qualname__}")
    return gate


def _activation(experts: nn.Module, gate: Gate) -> Activation:
    limit = None if gate.limit is None else _number(experts, gate.limit)
    if limit == 0:  # transformers clamps to 0, ours would not clamp at all
        raise _unsupported(type(experts).__name__, f"with {gate.limit} 0")
    alpha = 1.0 if gate.alpha is None else _number(experts, gate.alpha)
    return Activation(
        limit=limit,
        alpha=float(rn32(torch.tensor(alpha, dtype=F64))),  # as torch scales BF16 by a number
        up_offset=gate.up_offset,
    )


def _number(experts: nn.Module, name: str) -> float:
    value = getattr(experts, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unsupported(type(experts).__name__, f"with {name} {value!r}")
    return float(value)


def _unsupported(name: str, what: str) -> Unsupported:
    remedy = 'use experts_implementation="grouped_mm" for this model'
    return _refusal(name, what, "has no row in megamoe.integrations.transformers", remedy)


def _refusal(subject: str, value: str, limit: str, remedy: str) -> Unsupported:
    return Unsupported(one_line(subject, value, limit, remedy))
