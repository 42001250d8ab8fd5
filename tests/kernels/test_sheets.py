"""Every refusal of every datasheet, by the sentence it gives on literal machines.

The sentences stand here in full, so that a limit changed by mistake does not change its own test.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from megamoe.dispatch.machine import CPU, H20, H200, SM120
from megamoe.dispatch.select import KERNELS, refusals
from megamoe.formats import (
    FP8_BLOCK128,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_G32,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN_BF16,
    PLAIN_F32,
    Format,
)
from megamoe.kernels.base import Datasheet, Kernel
from megamoe.problem import Activation, Host, Machine, Placement, Request

SHEETS: dict[str, type[Kernel]] = {
    kernel.sheet.name: kernel for kernel in KERNELS if kernel.sheet.name.startswith("sm")
}


def plain_request(fmt: Format, world: int, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 2048,
        "placement": Placement.contiguous(64, world),
        "top_k": 6,
        "max_tokens_per_rank": 512,
        "weights": fmt,
        "activation_scales": (1.0, 1.0) if fmt is FP8_TENSOR else None,
    }
    return Request(**fields | changes)


def home(name: str) -> Machine:
    """The literal machine that a kernel is made for."""
    return H200 if name.startswith("sm90") else SM120


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One change to a request, or to the machine, that a kernel takes offence at.

    of: the datasheet's field behind it, or what else it is about.
    """

    of: str
    says: str
    request: dict[str, Any] = field(default_factory=dict)
    machine: Machine | None = None
    placement: tuple[int, int] | None = None  # experts, ranks


def host(of: str, says: str, **changes: Any) -> Refusal:
    return Refusal(of=of, says=says, request={"host": Host(**changes)})


LIMIT = Activation(limit=10.0)
SYMMETRIC = Activation(limit=10.0, symmetric=True)
GPT_OSS = Activation(alpha=1.702, up_offset=1.0)

PACKAGES = {"flashinfer": "0.7.4", "nvshmem": "0.4.1", "nccl": "2.30.7", "cuda": "13.0"}


def everywhere(machine: Machine) -> tuple[Refusal, ...]:
    """What no megakernel takes."""
    return (
        Refusal(
            of="architectures",
            says="needs a CUDA GPU, and the layer is on CPU",
            machine=dataclasses.replace(CPU, **PACKAGES),
        ),
        Refusal(
            of="needs",
            says="needs flashinfer >= 0.7.4, and none is installed",
            machine=dataclasses.replace(machine, flashinfer=None),
        ),
        Refusal(
            of="needs",
            says="needs flashinfer >= 0.7.4, and 0.7.3 is installed",
            machine=dataclasses.replace(machine, flashinfer="0.7.3"),
        ),
        *LAYERS_AND_HOSTS,
    )


LAYERS_AND_HOSTS = (
    Refusal(
        of="alpha",
        says="computes plain SwiGLU only, not alpha 1.702 with up + 1",
        request={"activation": GPT_OSS},
    ),
    Refusal(
        of="expert bias",
        says="adds no expert biases, and the layer has them",
        request={"expert_bias": True},
    ),
    Refusal(
        of="weight at input",
        says="weights terms after FC1, and the model scales the token before it",
        request={"weight_at": "input"},
    ),
    Refusal(
        of="output scaling",
        says="rounds the sum before routed_scaling_factor 2.5 could multiply it, and that is exact "
        "for powers of two only",
        request={"scale_at": "output", "routed_scaling_factor": 2.5},
    ),
    host(
        "two batches",
        "runs one batch at a time per workspace, and the host overlaps two",
        two_batch_overlap=True,
    ),
    host(
        "external all to all",
        "dispatches and combines by itself, and the host wants deepep to",
        external_all_to_all="deepep",
    ),
)
HOPPER = (
    *everywhere(H200),
    Refusal(
        of="architectures",
        says="needs compute capability 9.0, and NVIDIA RTX PRO 6000 Blackwell has 12.0",
        machine=dataclasses.replace(SM120, multiprocessors=132),
    ),
)
WORKSTATION = (
    *everywhere(SM120),
    host(
        "tensor parallel",
        "cannot run inside tensor parallelism of 2",
        tp_size=2,
    ),
)


def nvshmem(machine: Machine) -> tuple[Refusal, ...]:
    return tuple(
        Refusal(
            of="nvshmem",
            says=f"needs nvshmem >= 0.3.1, and {says}",
            machine=dataclasses.replace(machine, nvshmem=version),
        )
        for version, says in ((None, "none is installed"), ("0.2.9", "0.2.9 is installed"))
    )


TOO_MANY_SLOTS = Refusal(of="top_k", says="takes top_k 1 to 32, not 33", request={"top_k": 33})
UPPER_ONLY = Refusal(
    of="clamp",
    says="clamps the gate from above only, and the layer clamps it on both sides (at 10)",
    request={"activation": SYMMETRIC},
)


def peers(transport: str, machine: Machine = H200) -> Refusal:
    return Refusal(
        of="transport",
        says=f"reads peers' memory over {transport}, and the GPUs have no peer access",
        machine=dataclasses.replace(machine, peer_access=False),
        placement=(64, 8),
    )


def alone(transport: str, machine: Machine = H200) -> Refusal:
    return Refusal(
        of="shared GPU",
        says=f"wants a GPU for each rank ({transport} refuses to share one), and 8 ranks share one "
        "here",
        machine=dataclasses.replace(machine, ranks_per_gpu=8),
        placement=(64, 8),
    )


def size(name: str, value: int, multiple: int) -> Refusal:
    return Refusal(
        of=f"{name.removesuffix('_size')}_multiple",
        says=f"{name} {value} is not a multiple of {multiple}",
        request={name: value},
    )


def weights(found: Format, taken: str) -> Refusal:
    return Refusal(
        of="formats",
        says=f"does not take {found} weights (takes {taken})",
        request={"weights": found},
    )


NVSHMEM = (*nvshmem(H200), TOO_MANY_SLOTS, UPPER_ONLY, peers("NVSHMEM"))
BF16_FORMATS = "bf16, mxfp4, nvfp4, mxfp8, fp8_block128_e8m0_scale, fp8_block32_e8m0_scale"
BLOCKS = "fp8_block128, fp8_block128_bf16_scale, fp8_block128_e8m0_scale"
PUSH_TOP_K = Refusal(of="top_k", says="takes top_k 1, 2, 4, 6 or 8, not 3", request={"top_k": 3})
PUSH_WORLD = Refusal(of="world_sizes", says="runs on 1 to 32 ranks, not on 33", placement=(66, 33))
PUSH = (
    PUSH_TOP_K,
    PUSH_WORLD,
    peers("CUDA peer windows"),
    alone("CUDA peer windows"),
)
FEW_EXPERTS = Refusal(
    of="own", says="takes at most as many slots as experts, 4, not 6", placement=(4, 4)
)
SYMMETRIC_MEMORY = (
    TOO_MANY_SLOTS,
    UPPER_ONLY,
    peers("torch symmetric memory"),
    alone("torch symmetric memory"),
    FEW_EXPERTS,
    Refusal(
        of="hidden_multiple",
        says="hidden_size 3968 is not a multiple of 256",
        request={"hidden_size": 3968, "intermediate_size": 1920},
    ),
    size("intermediate_size", 1984, 128),
)

# Kernel: the weights and ranks of a request that it takes, and what it refuses.
REFUSALS: dict[str, tuple[Format, int, tuple[Refusal, ...]]] = {
    "sm90_pull_bf16": (
        PLAIN_BF16,
        1,
        (
            *HOPPER,
            *NVSHMEM,
            size("hidden_size", 4224, 256),
            size("intermediate_size", 2016, 64),
            weights(FP8_BLOCK128, BF16_FORMATS),
            weights(PLAIN_F32, BF16_FORMATS),
            weights(INT4_G32, BF16_FORMATS),
        ),
    ),
    "sm90_pull_fp8": (
        FP8_BLOCK128,
        1,
        (
            *HOPPER,
            *NVSHMEM,
            size("hidden_size", 4160, 128),
            size("intermediate_size", 1984, 128),
            weights(PLAIN_BF16, BLOCKS),
            weights(FP8_CHANNEL, BLOCKS),
        ),
    ),
    "sm90_pull_fp8_tensor": (
        FP8_TENSOR,
        1,
        (
            *HOPPER,
            *NVSHMEM,
            size("hidden_size", 4128, 64),
            size("intermediate_size", 2016, 64),
            weights(FP8_BLOCK128, "fp8_tensor"),
            Refusal(
                of="own",
                says="needs calibrated activation scales for FC1 and FC2, and none were given",
                request={"activation_scales": None},
            ),
        ),
    ),
    "sm90_pull_mxfp4": (
        MXFP4,
        1,
        (
            *HOPPER,
            *NVSHMEM,
            size("hidden_size", 4160, 128),
            size("intermediate_size", 1984, 128),
            weights(NVFP4, "mxfp4"),
        ),
    ),
    "sm90_pull_nvfp4": (
        NVFP4,
        1,
        (
            *HOPPER,
            *NVSHMEM,
            size("hidden_size", 4160, 128),
            size("intermediate_size", 1984, 128),
            weights(MXFP4, "nvfp4"),
        ),
    ),
    "sm90_push_bf16": (
        PLAIN_BF16,
        1,
        (
            *HOPPER,
            *PUSH,
            size("hidden_size", 4224, 256),
            size("intermediate_size", 1984, 128),
            weights(FP8_TENSOR, BF16_FORMATS),
            Refusal(
                of="clamp",
                says="clamps the gate on both sides, and the layer clamps it from above only "
                "(at 10)",
                request={"activation": LIMIT},
            ),
        ),
    ),
    "sm90_push_fp8": (
        FP8_BLOCK128,
        1,
        (
            *HOPPER,
            *PUSH,
            size("hidden_size", 4160, 128),
            size("intermediate_size", 1984, 128),
            Refusal(
                of="intermediate_max",
                says="intermediate_size 16512 is above 16384",
                request={"intermediate_size": 16512},
            ),
            weights(PLAIN_BF16, BLOCKS),
            Refusal(
                of="clamp",
                says="does not clamp, and the layer clamps at 10",
                request={"activation": LIMIT},
            ),
        ),
    ),
    "sm90_standalone_mxfp4": (
        MXFP4,
        1,
        (
            *HOPPER,
            *SYMMETRIC_MEMORY,
            Refusal(
                of="world_sizes",
                says="runs on 1, 2, 4, 8, 16 or 32 ranks, not on 3",
                placement=(66, 3),
            ),
            weights(PLAIN_BF16, "mxfp4"),
        ),
    ),
    "sm90_standalone_nvfp4": (
        NVFP4,
        8,
        (
            *HOPPER,
            *SYMMETRIC_MEMORY,
            Refusal(of="world_sizes", says="runs on 4 or 8 ranks, not on 2", placement=(64, 2)),
            Refusal(
                of="multiprocessors",
                says="needs a GPU of 78 or 132 multiprocessors, and NVIDIA H100 PCIe has 114",
                machine=dataclasses.replace(H200, name="NVIDIA H100 PCIe", multiprocessors=114),
            ),
            Refusal(
                of="own",
                says="hidden_size 4352 is above 4096 and not a multiple of 512",
                request={"hidden_size": 4352},
            ),
            Refusal(
                of="own",
                says="intermediate_size 2176 is above half of hidden_size 4096",
                request={"intermediate_size": 2176},
            ),
            weights(MXFP4, "nvfp4"),
        ),
    ),
}
OTHER_CLAMP = Refusal(
    of="clamp",
    says="does not clamp, and the layer clamps at 10",
    request={"activation": LIMIT},
)
HOPPER_REFUSED = Refusal(
    of="architectures",
    says="needs compute capability 12.x, and NVIDIA H200 has 9.0",
    machine=H200,
)
REFUSALS |= {
    "sm120_mxfp4_split": (
        MXFP4,
        1,
        (
            *WORKSTATION,
            *nvshmem(SM120),
            HOPPER_REFUSED,
            UPPER_ONLY,
            FEW_EXPERTS,
            TOO_MANY_SLOTS,
            peers("NVSHMEM", SM120),
            size("hidden_size", 4112, 32),
            size("intermediate_size", 2040, 32),
            weights(NVFP4, "mxfp4"),
        ),
    ),
    "sm120_mxfp8": (
        MXFP8,
        1,
        (
            *WORKSTATION,
            *nvshmem(SM120),
            HOPPER_REFUSED,
            OTHER_CLAMP,
            TOO_MANY_SLOTS,
            peers("NVSHMEM", SM120),
            size("hidden_size", 4112, 32),
            size("intermediate_size", 2040, 32),
            weights(MXFP4, "mxfp8"),
            weights(FP8_BLOCK128, "mxfp8"),  # K59: float32 scales where powers of two are read
        ),
    ),
    "sm120_mxfp4_cake": (
        MXFP4,
        8,
        (
            *WORKSTATION,
            Refusal(
                of="architectures",
                says="needs compute capability 12.0, and NVIDIA GB10 has 12.1",
                machine=dataclasses.replace(SM120, name="NVIDIA GB10", capability=(12, 1)),
            ),
            Refusal(
                of="needs",
                says="needs nccl == 2.30.7, and 2.30.8 is installed",
                machine=dataclasses.replace(SM120, nccl="2.30.8"),
            ),
            Refusal(
                of="needs",
                says="needs nccl == 2.30.7, and none is installed",
                machine=dataclasses.replace(SM120, nccl=None),
            ),
            Refusal(
                of="needs",
                says="needs cuda >= 13.0, and 12.9 is installed",
                machine=dataclasses.replace(SM120, cuda="12.9"),
            ),
            Refusal(of="world_sizes", says="runs on 2 to 32 ranks, not on 1", placement=(64, 1)),
            Refusal(
                of="max_experts_per_rank",
                says="holds at most 128 experts a rank, not 129",
                placement=(129 * 4, 4),
            ),
            Refusal(
                of="own",
                says="holds at most 1024 experts over all ranks, not 1032",
                placement=(1032, 12),
            ),
            Refusal(
                of="max_tokens_per_rank",
                says="takes at most 32640 tokens a rank, not 32768",
                request={"max_tokens_per_rank": 32768},
            ),
            size("hidden_size", 4352, 512),
            Refusal(
                of="hidden_max",
                says="hidden_size 8192 is above 7680",
                request={"hidden_size": 8192},
            ),
            size("intermediate_size", 1984, 128),
            Refusal(of="top_k", says="takes top_k 1 to 9, not 10", request={"top_k": 10}),
            UPPER_ONLY,
            Refusal(
                of="clamp",
                says="takes an integer limit, not 7.5",
                request={"activation": Activation(limit=7.5)},
            ),
            Refusal(
                of="own",
                says="takes a limit from 1 to 65504, not 70000",
                request={"activation": Activation(limit=70000.0)},
            ),
            peers("NCCL device API", SM120),
            alone("NCCL device API", SM120),
            weights(NVFP4, "mxfp4"),
        ),
    ),
}
CASES = [(name, refusal) for name, (_, _, found) in REFUSALS.items() for refusal in found]


def test_every_datasheet_is_here() -> None:
    assert REFUSALS.keys() == SHEETS.keys()


@pytest.mark.parametrize("name", REFUSALS)
def test_the_plain_request_is_taken(name: str) -> None:
    fmt, world, _ = REFUSALS[name]
    for machine in (H200, H20) if home(name) is H200 else (SM120,):
        assert SHEETS[name].objections(plain_request(fmt, world), machine) == ()


@pytest.mark.parametrize(
    ("name", "refusal"), CASES, ids=[f"{name}-{r.says[:50]}" for name, r in CASES]
)
def test_a_refusal_says_its_sentence(name: str, refusal: Refusal) -> None:  # K59
    fmt, world, _ = REFUSALS[name]
    changes = dict(refusal.request)
    if refusal.placement is not None:
        changes["placement"] = Placement.contiguous(*refusal.placement)
    request = plain_request(fmt, world, **changes)
    found = SHEETS[name].objections(request, refusal.machine or home(name))
    assert refusal.says in found
    assert found == (refusal.says,), "one change, one reason"


@pytest.mark.parametrize("name", REFUSALS)
def test_every_limit_of_a_datasheet_is_refused_somewhere(name: str) -> None:
    refused = {refusal.of for refusal in REFUSALS[name][2]}
    assert restrictions(SHEETS[name]) <= refused


def restrictions(kernel: type[Kernel]) -> set[str]:
    """What a datasheet rules out: its fields that are not the dataclass's defaults, and the
    features that it lacks."""
    sheet = kernel.sheet
    fields = {f.name: f.default for f in dataclasses.fields(Datasheet)}
    described = {
        "name", "title", "recipe", "features", "empty_slots", "equal_counts", "id_dtype",
        "automatic", "hardware", "notes", "options",
    }  # fmt: skip
    limits = {n for n in fields if n not in described and getattr(sheet, n) != fields[n]}
    limits |= {"clamp"}
    limits |= {"nvshmem" for need in sheet.needs if need.package == "nvshmem"}
    features = {"alpha", "expert bias", "weight at input", "output scaling", "shared GPU"}
    limits |= (features | {"tensor parallel"}) - sheet.features
    limits |= {"two batches", "external all to all"}
    return limits | ({"own"} if "own_objections" in vars(kernel) else set())


@pytest.mark.parametrize("name", REFUSALS)
def test_hosts_that_are_welcome(name: str) -> None:
    """Tensor parallelism around the expert-parallel group on Hopper, split sequences anywhere."""
    fmt, world, _ = REFUSALS[name]
    tp_size = 8 if home(name) is H200 else 1
    request = plain_request(fmt, world, host=Host(tp_size=tp_size, sequence_parallel=True))
    assert SHEETS[name].objections(request, home(name)) == ()


def test_the_hidden_size_of_gpt_oss_is_for_few() -> None:  # K63
    """2880 is a multiple of 64, and not of 128."""
    able = {
        name
        for name, (fmt, world, _) in REFUSALS.items()
        if not SHEETS[name].objections(plain_request(fmt, world, hidden_size=2880), home(name))
    }
    assert able == {"sm90_pull_fp8_tensor", "sm120_mxfp4_split", "sm120_mxfp8"}


def test_many_ranks_on_one_gpu_are_for_nvshmem() -> None:
    able = {
        name
        for name, (fmt, _, _) in REFUSALS.items()
        if not SHEETS[name].objections(
            plain_request(fmt, 8), dataclasses.replace(home(name), ranks_per_gpu=8)
        )
    }
    assert able == {name for name in REFUSALS if SHEETS[name].sheet.transport == "NVSHMEM"}


def test_a_world_of_one_needs_no_peer_access() -> None:
    for name, (fmt, world, _) in REFUSALS.items():
        machine = dataclasses.replace(home(name), peer_access=False)
        if world == 1:
            assert SHEETS[name].objections(plain_request(fmt, 1), machine) == ()


@pytest.mark.parametrize(
    ("fmt", "activation", "world", "first"),
    [
        (MXFP4, Activation(limit=9.5), 1, "sm120_mxfp4_split"),
        (MXFP8, Activation(), 8, "sm120_mxfp8"),
        (MXFP4, LIMIT, 8, "sm90_pull_mxfp4"),
        (NVFP4, LIMIT, 8, "sm90_pull_nvfp4"),
        (FP8_BLOCK128, Activation(), 8, "sm90_push_fp8"),
        (FP8_BLOCK128, LIMIT, 8, "sm90_pull_fp8"),
        (PLAIN_BF16, LIMIT, 8, "sm90_pull_bf16"),
        (PLAIN_BF16, SYMMETRIC, 8, "sm90_push_bf16"),
        (PLAIN_BF16, Activation(), 1, "sm90_pull_bf16"),
    ],
)
def test_preference(fmt: Format, activation: Activation, world: int, first: str) -> None:
    request = plain_request(fmt, world, activation=activation)
    taken = [k.sheet.name for k in KERNELS if not refusals(k, request, home(first))]
    assert taken[0] == first


def test_none_claims_hardware_that_it_was_not_run_on() -> None:
    """An entry here comes from a recorded run, in docs/verdicts-h200.md."""
    for name, kernel in SHEETS.items():
        for claim in kernel.sheet.hardware:
            assert "H200" in claim
            assert name.startswith("sm90"), "no SM120 GPU was ever reached"
