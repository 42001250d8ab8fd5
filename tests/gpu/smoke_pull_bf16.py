"""Run one megakernel through `megamoe.prepare` and `forward` on a GPU, and judge it; prints JSON.

    python3 tests/gpu/smoke_pull_bf16.py --world 2

Ranks are processes; more ranks than GPUs share them, over gloo. The parent kills them all at
--timeout seconds and still prints what they had reported. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

CASES = ("full", "idle", "empty slots", "permuted and replicated", "again")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--kernel", default="sm90_pull_bf16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=float, default=1.0, help="of the clamp; 0 is none")
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    return parent(args) if args.rank is None else child(args)


def parent(args: argparse.Namespace) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", *sys.argv, "--store", str(Path(folder) / "store")]
        logs = [open(Path(folder) / f"rank{r}.log", "w+") for r in range(args.world)]  # noqa: SIM115
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(args.world)
        ]
        deadline = started + args.timeout
        while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
            if any(p.poll() not in (None, 0) for p in ranks):
                deadline = min(deadline, time.monotonic() + 15)  # let the others report
            time.sleep(0.2)
        late = [r for r, p in enumerate(ranks) if p.poll() is None]
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        results: dict[str, Any] = {}
        for rank, log in enumerate(logs):
            log.seek(0)
            text = log.read()
            log.close()
            found = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
            for line in found:
                case = json.loads(line)
                results.setdefault(case.pop("case"), {})[f"rank{rank}"] = case
            print(f"----- rank {rank}, exit {ranks[rank].returncode}")
            print(text[-3000:], flush=True)
    good = not late and all(p.returncode == 0 for p in ranks)
    summary = {
        "kernel": args.kernel,
        "world": args.world,
        "shape": vars(args) | {"rank": None, "store": None},
        "exit": [p.returncode for p in ranks],
        "killed": late,
        "seconds": round(time.monotonic() - started, 1),
        "cases": results,
        "completed": good and set(CASES) <= set(results),
    }
    print("JSON " + json.dumps(summary), flush=True)
    return 0 if summary["completed"] else 1


def child(args: argparse.Namespace) -> int:
    try:
        judge(args)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NVSHMEM's own exit handlers have crashed an interpreter that ended normally


def judge(args: argparse.Namespace) -> None:
    began = time.monotonic()

    def phase(what: str) -> None:
        print(f"[{time.monotonic() - began:7.2f}s] {what}", flush=True)

    import torch
    import torch.distributed as dist

    import megamoe
    from megamoe.dispatch.select import KERNELS
    from megamoe.formats import PLAIN_BF16, plain, quantise
    from megamoe.problem import Activation, ExpertWeights, MoEWeights, Placement, TopK
    from megamoe.reference.moe import EXACT, Emulated, layer

    world, rank = args.world, args.rank
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    phase(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
    group = None
    if world > 1:
        backend = "gloo" if world > torch.cuda.device_count() else "nccl"
        dist.init_process_group(
            backend, init_method=f"file://{args.store}", rank=rank, world_size=world
        )
        group = dist.group.WORLD
        phase(f"{backend} group of {world}")
    E, H, k = args.experts, args.hidden, args.top_k
    half = args.intermediate
    generator = torch.Generator(device).manual_seed(7)  # the same experts on every rank
    w13 = torch.randn(E, 2 * half, H, generator=generator, device=device) * (2.0 / H**0.5)
    w2 = torch.randn(E, H, half, generator=generator, device=device) / half**0.5
    chosen = next(kernel for kernel in KERNELS if kernel.sheet.name == args.kernel)
    fmt, clamp = chosen.sheet.formats[0], chosen.sheet.clamp
    if fmt is PLAIN_BF16:
        experts = ExpertWeights(w13=plain(w13.bfloat16()), w2=plain(w2.bfloat16()))
    else:
        experts = ExpertWeights(w13=quantise(w13, fmt, row_groups=2), w2=quantise(w2, fmt))
    activation = Activation(
        limit=None if clamp == "none" else args.limit, symmetric=clamp == "symmetric"
    )
    phase(f"experts in {fmt}, {activation}")

    def held(placement: Placement, which: int) -> MoEWeights:
        index = torch.tensor(placement.slots[which], device=device)
        return MoEWeights(
            experts=ExpertWeights(w13=experts.w13[index], w2=experts.w2[index]),
            placement=placement,
            rank=which,
            activation=activation,
            weight_at="fc2_input",
        )

    # What the kernel computes with: other values where its datasheet says that it rounds weights.
    whole = dataclasses.replace(
        held(Placement.contiguous(E, 1), 0), experts=chosen.as_computed(experts)
    )
    mixed = Placement(  # permuted, uneven, expert 0 on every rank
        num_experts=E,
        slots=tuple((*reversed(range(r, E, world)), 0) for r in range(world)),
    )

    def batch(seed: int, tokens: int, empty: bool) -> tuple[torch.Tensor, TopK]:
        g = torch.Generator(device).manual_seed(100 * seed + rank)
        x = torch.randn(tokens, H, generator=g, device=device).bfloat16()
        scores = torch.rand(tokens, E, generator=g, device=device)
        weights, ids = scores.topk(k)
        if empty:
            hole = torch.rand(tokens, k, generator=g, device=device) < 0.3
            ids = torch.where(hole, -1, ids)
            ids[:2] = -1
        return x, TopK(ids=ids, weights=weights / weights.sum(1, keepdim=True))

    def case(name: str, prepared: megamoe.PreparedWeights, tokens: int, empty: bool) -> None:
        x, topk = batch(len(name), tokens, empty)
        start = time.monotonic()
        y = prepared.forward(x, topk)
        again = prepared.forward(x, topk)
        torch.cuda.synchronize()
        took = time.monotonic() - start
        recipe = prepared.decision.recipe
        want = layer(x, topk, whole, Emulated(recipe))
        true = layer(x, topk, whole, EXACT)
        scale = true.norm().clamp(min=1e-300)
        report = {
            "case": name,
            "tokens": tokens,
            "seconds": round(took, 3),
            "equal_bits": float((y == want).double().mean()) if tokens else 1.0,
            "against_recipe": float((y.double() - want.double()).norm() / scale),
            "against_truth": float((y.double() - true).norm() / scale),
            "recipe_against_truth": float((want.double() - true).norm() / scale),
            "repeat_equal": bool(torch.equal(y, again)),
            "finite": bool(y.isfinite().all()),
            "empty_rows_zero": bool((y[(topk.ids < 0).all(1)] == 0).all()),
        }
        print("RESULT " + json.dumps(report), flush=True)
        phase(name)

    def prepare(weights: MoEWeights) -> megamoe.PreparedWeights:
        return megamoe.prepare(
            weights,
            group,
            max_tokens_per_rank=max(128, args.tokens),
            top_k=k,
            kernel=args.kernel,
        )

    prepared = prepare(held(Placement.contiguous(E, world), rank))
    phase(f"prepared: {prepared.decision}")
    prepared.warmup()
    phase("warmed up")
    case("full", prepared, args.tokens, False)
    case("idle", prepared, 0 if rank == world - 1 else args.tokens // 2 + rank, False)
    case("empty slots", prepared, args.tokens - rank, True)
    second = prepare(held(mixed, rank))
    phase("second layer prepared")
    case("permuted and replicated", second, args.tokens, True)
    second.close()
    prepared.close()
    phase("closed")
    reopened = prepare(held(Placement.contiguous(E, world), rank))
    phase("prepared again after everything was closed")
    case("again", reopened, args.tokens, False)
    reopened.close()
    phase("done")


if __name__ == "__main__":
    sys.exit(main())
