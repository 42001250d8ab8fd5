"""Mixture-of-Experts layers on FlashInfer's megakernels, and a bitwise reference that proves them.

weights = megamoe.load(path, layer)
topk = megamoe.route(weights.router.logits(x), weights.router)
y = megamoe.forward(x, topk, weights)
"""

from megamoe import oracle
from megamoe.api import forward, load, prepare, route
from megamoe.dispatch.select import Decision, select
from megamoe.dispatch.session import PreparedWeights
from megamoe.dispatch.workspaces import decode_ceiling, profiles
from megamoe.errors import BadInput, MegaMoEError, Mismatch, RankFailure, Unsupported
from megamoe.problem import (
    Activation,
    ExpertWeights,
    Host,
    Machine,
    MoEWeights,
    Placement,
    Recipe,
    Request,
    Router,
    SharedExpert,
    TopK,
)

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "BadInput",
    "Decision",
    "ExpertWeights",
    "Host",
    "Machine",
    "MegaMoEError",
    "Mismatch",
    "MoEWeights",
    "Placement",
    "PreparedWeights",
    "RankFailure",
    "Recipe",
    "Request",
    "Router",
    "SharedExpert",
    "TopK",
    "Unsupported",
    "decode_ceiling",
    "forward",
    "load",
    "oracle",
    "prepare",
    "profiles",
    "route",
    "select",
]
