"""Weight layouts of the megakernels in plain PyTorch: logical bytes to kernel bytes, and back.

Every layout is a pair of pure functions, `pack_x` and `unpack_x` (or `to_x` and `from_x`), that
run on any device and never load FlashInfer. Where the two are not inverse byte for byte, something
the kernel cannot hold was rounded: `unpack_x` then returns what the kernel computes with, and an
`..._exactness` function counts the elements that differ.
"""

from __future__ import annotations

from megamoe.kernels.layout.fp8_blocks import merge_gate_up, scale_to_fp32
from megamoe.kernels.layout.fragment import (
    braid_signs,
    from_fragments,
    to_fragments,
    unbraid_signs,
)
from megamoe.kernels.layout.kperm import (
    permute_columns,
    permute_payload,
    unpermute_columns,
    unpermute_payload,
)
from megamoe.kernels.layout.mxfp4_window import (
    FoldedMxfp4,
    fold_window,
    neutral_zero_blocks,
    unfold_window,
    window_exactness,
)
from megamoe.kernels.layout.nibbles import from_marlin, pack_codes, to_marlin, unpack_codes
from megamoe.kernels.layout.nvfp4_balance import (
    PULL_TOP,
    STANDALONE_TOP,
    BalancedNvfp4,
    balance_nvfp4,
)
from megamoe.kernels.layout.pull_bf16 import PullBf16Weights, pack_pull_bf16, unpack_pull_bf16
from megamoe.kernels.layout.pull_fp8 import (
    PullFp8Leg,
    PullFp8Weights,
    pack_pull_fp8,
    pack_pull_fp8_per_tensor,
    unpack_pull_fp8,
    unpack_pull_fp8_per_tensor,
)
from megamoe.kernels.layout.pull_mxfp4 import (
    PullFp4Leg,
    PullMxfp4Weights,
    pack_pull_mxfp4,
    unpack_pull_mxfp4,
)
from megamoe.kernels.layout.pull_nvfp4 import (
    NVFP4_KPERM,
    PullNvfp4Weights,
    pack_pull_nvfp4,
    pull_nvfp4_exactness,
    pull_nvfp4_operand,
    unpack_pull_nvfp4,
)
from megamoe.kernels.layout.push import (
    PushBf16Weights,
    PushFp8Weights,
    pack_push_bf16,
    pack_push_fp8,
    unpack_push_bf16,
    unpack_push_fp8,
)
from megamoe.kernels.layout.records import CanonicalExperts, Exactness
from megamoe.kernels.layout.rows import (
    PULL_ROWS,
    PUSH_BF16_ROWS,
    PUSH_FP8_ROWS,
    deinterleave_gate_up,
    interleave_gate_up,
)
from megamoe.kernels.layout.scale_planes import (
    fold_k16,
    fold_k32,
    from_blocked,
    to_blocked,
    unfold_k16,
    unfold_k32,
)
from megamoe.kernels.layout.sm120 import (
    Sm120Weights,
    from_cake_vectors,
    pack_sm120_mxfp8,
    pack_sm120_split,
    to_cake_vectors,
    unpack_sm120_mxfp8,
    unpack_sm120_split,
    view_bytes,
    view_mxfp4,
    view_mxfp8,
)
from megamoe.kernels.layout.standalone import (
    StandaloneWeights,
    pack_standalone_mxfp4,
    pack_standalone_nvfp4,
    standalone_mxfp4_exactness,
    standalone_nvfp4_exactness,
    standalone_nvfp4_operand,
    unpack_standalone_mxfp4,
    unpack_standalone_nvfp4,
)

__all__ = [
    "NVFP4_KPERM",
    "PULL_ROWS",
    "PULL_TOP",
    "PUSH_BF16_ROWS",
    "PUSH_FP8_ROWS",
    "STANDALONE_TOP",
    "BalancedNvfp4",
    "CanonicalExperts",
    "Exactness",
    "FoldedMxfp4",
    "PullBf16Weights",
    "PullFp4Leg",
    "PullFp8Leg",
    "PullFp8Weights",
    "PullMxfp4Weights",
    "PullNvfp4Weights",
    "PushBf16Weights",
    "PushFp8Weights",
    "Sm120Weights",
    "StandaloneWeights",
    "balance_nvfp4",
    "braid_signs",
    "deinterleave_gate_up",
    "fold_k16",
    "fold_k32",
    "fold_window",
    "from_blocked",
    "from_cake_vectors",
    "from_fragments",
    "from_marlin",
    "interleave_gate_up",
    "merge_gate_up",
    "neutral_zero_blocks",
    "pack_codes",
    "pack_pull_bf16",
    "pack_pull_fp8",
    "pack_pull_fp8_per_tensor",
    "pack_pull_mxfp4",
    "pack_pull_nvfp4",
    "pack_push_bf16",
    "pack_push_fp8",
    "pack_sm120_mxfp8",
    "pack_sm120_split",
    "pack_standalone_mxfp4",
    "pack_standalone_nvfp4",
    "permute_columns",
    "permute_payload",
    "pull_nvfp4_exactness",
    "pull_nvfp4_operand",
    "scale_to_fp32",
    "standalone_mxfp4_exactness",
    "standalone_nvfp4_exactness",
    "standalone_nvfp4_operand",
    "to_blocked",
    "to_cake_vectors",
    "to_fragments",
    "to_marlin",
    "unbraid_signs",
    "unfold_k16",
    "unfold_k32",
    "unfold_window",
    "unpack_codes",
    "unpack_pull_bf16",
    "unpack_pull_fp8",
    "unpack_pull_fp8_per_tensor",
    "unpack_pull_mxfp4",
    "unpack_pull_nvfp4",
    "unpack_push_bf16",
    "unpack_push_fp8",
    "unpack_sm120_mxfp8",
    "unpack_sm120_split",
    "unpack_standalone_mxfp4",
    "unpack_standalone_nvfp4",
    "unpermute_columns",
    "unpermute_payload",
    "view_bytes",
    "view_mxfp4",
    "view_mxfp8",
    "window_exactness",
]
