"""The reference over many ranks: each owns its tokens and its experts, and the bits are one rank's.

Terms are computed where the expert lives, travel to the token's owner bit for bit, and are summed
there in slot order. Ranks are a plain list (``over_ranks``) or a torch.distributed group
(``forward``). Experts are physical: rank r owns ids [r * S, (r + 1) * S).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megamoe.problem import MoEWeights
from megamoe.reference.canary import check_device
from megamoe.reference.moe import Arithmetic, add_terms, finish


def forward(
    x_TH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    weights: MoEWeights,
    arithmetic: Arithmetic,
    group: Any = None,
) -> Tensor:
    """This rank's tokens through the whole layer; collective over ``group`` where there is one."""
    check_device(x_TH.device)
    terms = x_TH.new_zeros(*ids_TK.shape, weights.hidden_size, dtype=arithmetic.dtype)
    held = tuple(range(weights.experts.count))
    add_terms(terms, x_TH, ids_TK, w_TK, weights.experts, held, weights.activation, arithmetic)
    return finish(x_TH, terms, ids_TK, w_TK, weights, arithmetic)
