"""From an FP4 checkpoint to the first answer, with every compile cache empty.

    python benchmarks/first_answer.py [--format mxfp4 --format nvfp4] [--json FILE]

Writes one layer of real width in the layout of DeepSeek-V4 (MXFP4 experts, or NVFP4 ones as
ModelOpt exports them), then loads it in a fresh process whose compile caches are empty folders, and
counts the seconds from `megamoe.load` until the first `forward` has answered. The files themselves
are likely to be in the page cache. Afterwards the oracle judges the answer's first rows: a wrong
one does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.formats import FP8_BLOCK128_E8M0, MXFP4, NVFP4, Format, Quantised, quantise

FORMATS = {"mxfp4": MXFP4, "nvfp4": NVFP4}
JUDGED = 16  # rows
CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "FLASHINFER_AUTOTUNE_CACHE_DIR": "autotune",
    "CUTE_DSL_CACHE_DIR": "cute",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRTLLM_DG_CACHE_DIR": "deepgemm",
    "CUDA_CACHE_PATH": "driver",
    "XDG_CACHE_HOME": "xdg",
    "TMPDIR": "tmp",
}
"""Where what is compiled may be kept, by environment variable: a folder of its own each."""


def main() -> int:
    options = arguments()
    if options.one:
        answer(Path(options.one), options)
        sys.stdout.flush()
        os._exit(0)  # exit handlers of communication libraries have crashed after good runs
    if not torch.cuda.is_available():
        print("no CUDA GPU is here: nothing was timed")
        return 1
    found = {}
    for name in options.format or FORMATS:
        with tempfile.TemporaryDirectory(prefix="megamoe-first-") as folder:
            path = write_checkpoint(Path(folder) / "checkpoint", FORMATS[name], options, "cuda")
            size = sum(file.stat().st_size for file in path.iterdir())
            print(f"{name}: a checkpoint of {size / 1e6:.0f} MB is written", flush=True)
            found[name] = in_fresh_process(
                path, Path(folder) / "caches", sys.argv[1:], options.timeout
            )
        print(f"{name}: {told(found[name])}", flush=True)
        document = {
            "command": "benchmarks/first_answer.py",
            "shape": {k: getattr(options, k) for k in SHAPE},
            "results": found,
        }
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(r.get("right") and "failed" not in r for r in found.values()) else 1


SHAPE = {"hidden": 4096, "intermediate": 2048, "experts": 16, "top_k": 6, "tokens": 64}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--format", action="append", choices=list(FORMATS))
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds for one checkpoint")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(given)


# --- the checkpoint -------------------------------------------------------------------------------


def write_checkpoint(path: Path, fmt: Format, shape: argparse.Namespace, device: str) -> Path:
    """One layer of DeepSeek-V4: experts in ``fmt``, a shared expert in FP8, the router in BF16."""
    path.mkdir(parents=True)
    draw = torch.Generator(device).manual_seed(5)
    hidden, inner = shape.hidden, shape.intermediate

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=draw, device=device)
        return values * torch.full_like(values, columns**-0.5)

    tensors: dict[str, Tensor] = {}
    block = "layers.0.ffn."
    for expert in range(shape.experts):
        stem = f"{block}experts.{expert}."
        gate_up = quantise(matrix(2 * inner, hidden), fmt)  # one global scale for both
        w1, w3 = _halves(gate_up)
        for name, q in (("w1", w1), ("w3", w3), ("w2", quantise(matrix(hidden, inner), fmt))):
            tensors |= {f"{stem}{name}.{key}": value for key, value in stored(q).items()}
    for name, size in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
        q = quantise(matrix(*size), FP8_BLOCK128_E8M0)
        stem = f"{block}shared_experts.{name}."
        tensors |= {f"{stem}weight": q.data, f"{stem}scale": _e8m0(q)}
    tensors[f"{block}gate.weight"] = matrix(shape.experts, hidden).to(torch.bfloat16)
    tensors[f"{block}gate.bias"] = torch.zeros(shape.experts, device=device)
    file = "model-00001-of-00001.safetensors"
    save_file({name: t.to("cpu", copy=True) for name, t in tensors.items()}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(tensors, file)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config(shape, fmt)))
    return path


def _halves(q: Quantised) -> tuple[Quantised, Quantised]:
    assert q.scale is not None
    rows = q.data.shape[0] // 2
    first, second = (
        Quantised(
            format=q.format, data=q.data[part], scale=q.scale[part], global_scale=q.global_scale
        )
        for part in (slice(rows), slice(rows, None))
    )
    return first, second


def stored(q: Quantised) -> dict[str, Tensor]:
    """A matrix under the names and dtypes of its published form."""
    if q.format is MXFP4:
        return {"weight": q.data.view(torch.int8), "scale": _e8m0(q)}
    assert q.scale is not None
    assert q.global_scale is not None
    return {
        "weight": q.data,
        "weight_scale": q.scale,
        "weight_scale_2": q.global_scale.reshape(()),
        "input_scale": torch.ones(()),
    }


def _e8m0(q: Quantised) -> Tensor:
    assert q.scale is not None
    return q.scale.view(torch.float8_e8m0fnu)


def config(shape: argparse.Namespace, fmt: Format) -> dict[str, Any]:
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    return {
        "model_type": "deepseek_v4",
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_hash_layers": 0,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 64,
        "expert_dtype": "fp4",
        "quantization_config": quantization | ({"moe_quant_algo": "NVFP4"} if fmt is NVFP4 else {}),
    }


# --- the fresh process ----------------------------------------------------------------------------


def in_fresh_process(
    path: Path, caches: Path, given: Sequence[str], timeout: float
) -> dict[str, Any]:
    """The record of ``answer`` in a process whose caches are empty; killed when its time is up."""
    environment = dict(os.environ)
    for variable, name in CACHES.items():
        (caches / name).mkdir(parents=True)
        environment[variable] = str(caches / name)
    command = [sys.executable, "-u", __file__, *given, "--one", str(path)]
    log = caches / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(lines[-1][7:]) if lines else {}
    if code != 0:
        result["failed"] = f"no end within {timeout:.0f} s" if code is None else f"exit {code}"
        result["log"] = text[-3000:]
    return result


def answer(path: Path, options: argparse.Namespace) -> None:
    """Load, prepare, answer, judge; after each step, one line that says all there is to say."""
    import megamoe

    device = torch.device(options.device)
    result: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}

    def report() -> None:
        print("RESULT " + json.dumps(result), flush=True)

    x = torch.randn(options.tokens, options.hidden, generator=torch.Generator().manual_seed(6))
    begun = last = time.perf_counter()

    def step(name: str) -> None:
        nonlocal last
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        result[f"{name}_s"] = round(now - last, 3)
        result["total_s"] = round(now - begun, 3)
        last = now
        report()

    weights = megamoe.load(path, 0, device=device)
    step("load")
    layer = megamoe.prepare(weights, max_tokens_per_rank=options.tokens, kernel=options.kernel)
    result["kernel"] = layer.decision.name
    step("prepare")
    assert weights.router is not None
    rows = x.to(torch.bfloat16).to(device)
    topk = megamoe.route(weights.router.logits(rows), weights.router)
    y = layer.forward(rows, topk)
    step("forward")
    again = layer.forward(rows, topk)
    result["repeat_equal"] = torch.equal(y.view(torch.int16), again.view(torch.int16))
    report()
    judge(y, rows, topk, weights, layer, result)
    report()


def judge(
    y: Tensor, x: Tensor, topk: Any, weights: Any, layer: Any, result: dict[str, Any]
) -> None:
    """The oracle's verdicts on the first rows, with the weights that the kernel holds."""
    from dataclasses import replace

    from megamoe import oracle

    few = slice(0, JUDGED)
    held = replace(weights, experts=layer.decision.kernel.as_computed(weights.experts))
    some = replace(topk, ids=topk.ids[few], weights=topk.weights[few])
    inputs = oracle.Inputs(x=x[few], topk=some, weights=held)
    report = oracle.judge(y[few], inputs, layer.decision.recipe)
    result.update(right=report.right, recipe=report.recipe, message=report.message)


def told(result: dict[str, Any]) -> str:
    steps = ", ".join(f"{n} {result[n + '_s']:.1f} s" for n in STEPS if n + "_s" in result)
    if "failed" in result:
        return f"FAILED ({result['failed']}) after {steps or 'nothing'}\n{result['log']}"
    verdict = "right" if result["right"] else f"WRONG: {result['message']}"
    verdict += ", this recipe" if result["recipe"] else ", not this recipe"
    return (
        f"first answer after {result['total_s']:.1f} s ({steps}) by {result['kernel']}; {verdict}"
    )


STEPS = ("load", "prepare", "forward")

if __name__ == "__main__":
    sys.exit(main())
