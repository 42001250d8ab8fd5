"""What our adapters assume of FlashInfer 0.7.4: fields and defaults of every record they build.

Kept whole, so that an upgrade which moves a default (a clamp of 10, an 8-bit combine) is seen:
`megamoe doctor --flashinfer` compares these with the installed files, and the tests' emulated
device is built from them. REQUIRED marks a field without a default.
"""

from __future__ import annotations

from typing import Any

REQUIRED = object()

_GEOMETRY = dict(swap_ab=None, pingpong=None, mma_tiler_mnk=None, cluster_shape_mnk=None)
_SIZES = dict(intermediate_size=REQUIRED, top_k=REQUIRED)
_PULL = dict(
    **_SIZES,
    knobs=None,
    **_GEOMETRY,
    load_balance_mode="static",
    gate_up_clamp=None,
    activation_clamp=None,
    fast_math=True,
    enable_in_kernel_fc2_reduce=False,
    token_back_by_dispatch=False,
    token_back_mode=None,
    active_dispatch_warps=1,
    fc1_store_offload=True,
    fc1_early_done_publish=False,
    fold_producer_warps=True,
    generate_c=False,
    tail_split_pairs=None,
)
_PULL_FP4 = dict(
    **_SIZES,
    kind="fp8_e4m3",
    fp8_scale_mode="mxfp4_hybrid",
    fp8_accum_mode="1xacc",
    preprocess_expert_chunk_size=4,
    knobs=None,
    **_GEOMETRY,
    load_balance_mode=None,
    gate_up_clamp=10.0,
    activation_clamp=None,
    fast_math=True,
    enable_in_kernel_fc2_reduce=False,
    token_back_mode=None,
    dedup_dispatch=None,
    grouped_token_back=False,
    combine_format="bf16",
    active_dispatch_warps=None,
    fc1_store_offload=None,
    fc1_early_done_publish=None,
    fold_producer_warps=None,
    routing_profile="block_permutation_v1",
)
_PUSH = dict(
    **_SIZES,
    capacity_factor=1.0,
    dedup_dispatch=True,
    allow_unverified_p2p=False,
    init_timeout_s=600.0,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig": dict(
        kernel_name="sm90_bf16_bf16_bf16_pull_cutedsl", **_PULL
    ),
    "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig": dict(
        kernel_name="sm90_fp8_fp8_bf16_pull_cutedsl",
        **_PULL,
        kind="fp8_e4m3",
        fp8_scale_mode="per_tensor",
        fp8_accum_mode="1xacc",
        dedup_dispatch=False,
        grouped_token_back=False,
        combine_format="bf16",
        compact_pull_buffer=True,
        fc1_activation_dequant_scale=1.0,
        fc2_activation_dequant_scale=1.0,
    ),
    "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig": dict(
        kernel_name="sm90_fp8_mxfp4_bf16_pull_cutedsl",
        **_PULL_FP4,
        humming_max_range=11,
        compact_pull_buffer=False,
    ),
    "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig": dict(
        kernel_name="sm90_fp8_nvfp4_bf16_pull_cutedsl",
        **_PULL_FP4,
        nvfp4_kperm=64,
        nvfp4_fc1_k256_overlap=None,
    ),
    "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig": dict(
        kernel_name="sm90_bf16_bf16_bf16_push_cake",
        **_PUSH,
        clamp_limit=None,
        combine_wire=None,
        pdl=None,
        pdl_late=None,
        fused_begin=None,
        fused_dispatch_max_tokens=None,
        grid_dispatch_min_tokens=None,
        compact_form=None,
        publish_form=None,
        per_route_publish_pdl=None,
        fc2_early_max_tokens=None,
        prefix_form=None,
        direct_place=None,
        direct_place_min_tokens=None,
        fc2_early_windows=None,
        wcx_max_tokens=None,
    ),
    "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig": dict(
        kernel_name="sm90_fp8_fp8_bf16_push_cuda",
        **_PUSH,
        grouped_combine=True,
        fuse_fc1_epilogue=False,
        payload_dtype="fp8",
        combine_dtype="fp8",
    ),
}

CONFIGS |= {
    "Sm120_Mxfp4_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": dict(
        **_SIZES,
        kernel_name="sm120_mxfp4_mxfp8_bf16_cutedsl",
        gate_up_clamp=None,
        activation_clamp=None,
        fast_math=True,
        data_parallel_size=1,
        tensor_parallel_size=1,
        knobs=None,
    ),
    "Sm120_Mxfp4_Mxfp8_Bf16_Cake_MegaMoeConfig": dict(
        intermediate_size=2048,
        top_k=6,
        swiglu_limit=10,
        codec_overflow_blocks=16,
        kernel_name="sm120_mxfp4_mxfp8_bf16_cake",
        shared_expert=None,
        transport_table="all_gin",
        fast_math=True,
        knobs=None,
    ),
    "Sm120_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": dict(
        **_SIZES,
        kernel_name="sm120_mxfp8_mxfp8_bf16_cutedsl",
        kind="mxfp8_e4m3",
        gate_up_clamp=None,
        activation_clamp=None,
        fast_math=True,
        enable_in_kernel_fc2_reduce=False,
        token_back_mode="epi_warps",
        knobs=None,
    ),
}

API: dict[str, dict[str, Any]] = {
    "BootstrapConfig": dict(
        world_size=REQUIRED,
        rank=REQUIRED,
        stream=0,
        auto_bootstrap=True,
        device=None,
        nccl_comm=None,
        process_group=None,
        tcp_store=None,
    ),
    "FleetParams": dict(
        num_experts=REQUIRED,
        max_tokens_per_rank=REQUIRED,
        token_hidden_size=REQUIRED,
        dtype_bytes=2,
        tuning_live_tokens=None,
    ),
    "MegaConfig": dict(
        megakernel=REQUIRED, quantize_input=True, preprocess_weights=True, transformed_weights=None
    ),
    "MoEEpTensors": dict(
        hidden_states=REQUIRED,
        topk_ids=REQUIRED,
        topk_weights=REQUIRED,
        scales=None,
        fc1_alpha=None,
        fc2_alpha=None,
        fc1_norm_const=None,
        fc1_activation_per_token_scale=None,
        recv_count=None,
        num_tokens_per_expert=None,
        output=None,
        runtime_max_tokens_per_rank=None,
    ),
}

PACK = dict(w13=None, w2=None, w13_scale=None, w2_scale=None)
PUSH_FP8_WEIGHTS = dict(
    w13_fp8=REQUIRED, w13_sf=REQUIRED, w2_fp8=REQUIRED, w2_sf=REQUIRED, w13_interleaved=False
)
PUSH_BF16_WEIGHTS = dict(
    w13=REQUIRED,
    w2=REQUIRED,
    num_local_experts=REQUIRED,
    hidden_size=REQUIRED,
    intermediate_size=REQUIRED,
    w13_interleaved=True,
    wcx=None,
)

SM90 = "moe_ep/backends/mega/kernel/sm90"
SM120 = "moe_ep/backends/mega/kernel/sm120"
PUSH = "moe_ep/kernel_src/sm90"
SPLIT = "moe_ep/kernel_src/sm120/split_cutedsl_megakernel"
FP4 = f"{SM90}/fp8_mxfp4_bf16_pull_cutedsl/config.py"
SOURCES: dict[str, str] = {
    "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig": (
        f"{SM90}/bf16_bf16_bf16_pull_cutedsl/config.py"
    ),
    "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig": f"{SM90}/fp8_fp8_bf16_pull_cutedsl/config.py",
    "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig": FP4,
    "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig": (
        f"{SM90}/fp8_nvfp4_bf16_pull_cutedsl/config.py"
    ),
    "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig": (
        f"{SM90}/bf16_bf16_bf16_push_cake/cake_config.py"
    ),
    "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig": f"{SM90}/fp8_fp8_bf16_push_cuda/config.py",
    "Sm120_Mxfp4_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": f"{SM120}/mxfp4_mxfp8_bf16_cutedsl/config.py",
    "Sm120_Mxfp4_Mxfp8_Bf16_Cake_MegaMoeConfig": f"{SM120}/mxfp4_mxfp8_bf16_cake/cake_config.py",
    "Sm120_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig": f"{SM120}/mxfp8_mxfp8_bf16_cutedsl/config.py",
    "BootstrapConfig": "moe_ep/config.py",
    "FleetParams": "moe_ep/config.py",
    "MegaConfig": "moe_ep/modes/config.py",
    "MoEEpTensors": "moe_ep/tensors.py",
    "Sm90PushWeights": f"{PUSH}/push_style_megamoe/shim/weights.py",
    "Sm90CakeBf16Weights": f"{PUSH}/cake_bf16_megamoe/shim/cake_weights.py",
}
"""Where FlashInfer defines each, below its package folder."""

RECORDS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    **API,
    "Sm90PushWeights": PUSH_FP8_WEIGHTS,
    "Sm90CakeBf16Weights": PUSH_BF16_WEIGHTS,
}

_PULL_SHIM = f"{PUSH}/pull_style_cutedsl_megakernel/shim"
_LEGS = ("transformed_l1", "transformed_l2", "symm_buffer")
_FP4_GEOMETRY = (
    "max_tokens", "hidden", "intermediate", "num_experts", "world_size", "routing_profile",
)  # fmt: skip
_STANDALONE = "megamoe/__init__.py"
_LAUNCH = (
    "y", "l1_weights", "l2_weights", "symm_buffer", "num_tokens",
    "cumulative_local_expert_recv_stats", "l1_global_scales", "l2_global_scales",
)  # fmt: skip
_PLAN = (
    "num_sms", "num_ranks", "num_experts", "num_topk", "hidden", "intermediate_hidden",
    "num_max_tokens_per_rank", "num_tokens",
)  # fmt: skip
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "MoEEpMegaLayer.create_workspace": (
        "moe_ep/modes/mega_layer.py", ("self", "max_tokens_per_rank", "live_tokens", "knobs"),
    ),
    "hopper_bf16_mega_launch_thunk": (f"{_PULL_SHIM}/hopper_bf16.py", _LEGS),
    "hopper_fp8_mega_launch_thunk": (f"{_PULL_SHIM}/hopper_fp8.py", _LEGS),
    "hopper_mxfp4_mega_launch_thunk": (f"{_PULL_SHIM}/hopper_mxfp4.py", _LEGS),
    "hopper_nvfp4_mega_launch_thunk": (f"{_PULL_SHIM}/hopper_nvfp4.py", (*_LEGS, "num_tokens")),
    "hopper_bf16_candidates": (f"{_PULL_SHIM}/autotune_bf16.py", ("max_tokens",)),
    "hopper_fp8_candidates": (f"{_PULL_SHIM}/autotune.py", ("fp8_scale_mode", "max_tokens")),
    "hopper_mxfp4_candidates": (f"{_PULL_SHIM}/mxfp4_optimization.py", _FP4_GEOMETRY),
    "hopper_nvfp4_candidates": (
        f"{_PULL_SHIM}/nvfp4_tuner.py", (*_FP4_GEOMETRY, "kperm"),
    ),
    "MoEEpMegaLayer.forward": (
        "moe_ep/modes/mega_layer.py", ("self", "t", "workspace", "return_workspace_view"),
    ),
    "MoEEpMegaLayer.stage_inputs": (
        "moe_ep/modes/mega_layer.py", ("self", "t", "workspace", "compile_tokens_per_rank"),
    ),
    "MoEEpMegaLayer.compute_staged": ("moe_ep/modes/mega_layer.py", ("self", "output")),
    "MoEWeightPack.__new__": ("moe_ep/weights.py", ("cls", *PACK)),
    "select_graph_compile_bucket": (
        f"{SPLIT}/shim/runtime.py", ("requested_tokens_per_rank", "workspace_capacity"),
    ),
    "MegaMoESymmBuffer.__init__": (
        _STANDALONE,
        (
            "self", "group", "num_experts", "num_max_tokens_per_rank", "num_topk", "hidden",
            "intermediate_hidden", "activation_clamp", "fast_math",
        ),
    ),
    "MegaMoESymmBuffer.commit_staged": (_STANDALONE, ("self", "num_tokens")),
    "MegaMoESymmBuffer.prewarm": (_STANDALONE, ("self", "kernel_family", "family_threshold")),
    "mxfp4_mega_moe": (_STANDALONE, _LAUNCH),
    "nvfp4_mega_moe": (
        _STANDALONE,
        (
            *_LAUNCH, "force_push_dispatch", "force_no_clean_barrier", "kernel_family",
            "family_threshold",
        ),
    ),
    "select_mxfp4_fused_plan": ("megamoe/heuristics.py", _PLAN),
    "select_fused_plan": (
        "megamoe/heuristics.py", (*_PLAN, "force_push_dispatch", "force_no_clean_barrier"),
    ),
    "select_split_plan": (_STANDALONE, _PLAN),
}  # fmt: skip
"""What is called besides records: where it is defined, and its parameters."""

UNUSED = {"FleetParams": {"algorithm", "layout"}}
"""Fields of other paths than the megakernels'."""
