"""The command line: each command is a thin door to the calls that a program would make."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

import megamoe
from megamoe import bundle, oracle
from megamoe.api import decide, read_settings
from megamoe.checkpoint import inspect, write_demo
from megamoe.dispatch import doctor, upgrade
from megamoe.dispatch.explain import describe, explain, support_table
from megamoe.dispatch.machine import MACHINES, installed, probe
from megamoe.dispatch.models import MODELS, model, published_format
from megamoe.dispatch.select import KERNELS
from megamoe.errors import MegaMoEError, Mismatch, bad_input
from megamoe.kernels.base import Kernel
from megamoe.problem import Machine, Request
from megamoe.reference.canary import digest
from megamoe.reference.router import logits as exact_logits
from megamoe.suite import bench, results, run, soak, timing
from megamoe.suite.cases import CASES, Shape, case

DEMO_TOKENS = 1 << 14  # more would show no more, and at some count no machine has the memory


class Terminal(Console):
    """Standard output; that its reader left is for `main` to say, where rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


say = Terminal(highlight=False, soft_wrap=True, markup=False).print


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors are one line on standard error, with a traceback only if asked.

    Returns 2 for an error, and what a shell says of these signals: 130 when interrupted, 141 where
    the reader of standard output left.
    """
    args = argparse.Namespace(command="", traceback=False)
    try:
        with _signals_unwind():
            try:
                _parser().parse_args(arguments, args)
                return int(args.run(args) or 0)
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _ended(args, "interrupted", 130)
    except BrokenPipeError:
        _drop_output()
        return 141
    except (MegaMoEError, OSError) as error:
        if isinstance(error, OSError):
            _drop_output()
        if args.traceback:
            raise
        return _ended(args, str(error), 2)


def _ended(args: argparse.Namespace, why: str, code: int) -> int:
    print(f"{' '.join(('megamoe', args.command)).strip()}: {why}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let signals that end a process unwind it, so that rank processes and folders go with it."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    ours = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGHUP")]
    ours = [s for s in ours if signal.getsignal(s) is signal.SIG_DFL]  # under nohup one is ignored
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may
    for number in ours:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _drop_output() -> None:
    """Send what is still buffered nowhere: the interpreter would fail on it again at its end."""
    with contextlib.suppress(OSError):  # not a file of the system's: nothing is left in it
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megamoe", description=(megamoe.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"megamoe {megamoe.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run and judge one layer, on any machine")
    demo.add_argument(
        "--checkpoint", type=Path, help="a checkpoint directory (default: a small one)"
    )
    demo.add_argument("--layer", type=_layer, default=0, help="a number, or mtp.N")
    demo.add_argument("--tokens", type=int, default=64)
    demo.add_argument("--device", default=_here())
    demo.set_defaults(run=_demo)

    check = commands.add_parser("doctor", help="what this machine has and lacks, with remedies")
    check.add_argument(
        "--flashinfer",
        action="store_true",
        help="compare the installed FlashInfer with what the datasheets assume",
    )
    check.set_defaults(run=_doctor)

    judge = commands.add_parser("check", help="judge this machine's kernels on real rank processes")
    judge.add_argument("--kernel", action="append", help="only this one; may be given again")
    judge.add_argument("--world-size", type=int, default=1, metavar="N")
    judge.add_argument("--core", action="store_true", help="the core cases only")
    judge.add_argument("--case", action="append", help="only this one; may be given again")
    judge.add_argument("--results", type=Path, help="a folder for the records, as JSON")
    judge.add_argument(
        "--soak", type=int, metavar="N", help="walk N random serving steps instead of the cases"
    )
    judge.add_argument("--soak-seed", type=int, metavar="S", help="of the walk (default 0)")
    judge.add_argument("--soak-from", type=int, metavar="K", help="its first step (default 0)")
    judge.set_defaults(run=_check)

    timed = commands.add_parser("bench", help="time kernels that the oracle finds right")
    timed.add_argument("--kernel", action="append", help="only this one; may be given again")
    timed.add_argument("--world-size", type=int, default=1, metavar="N")
    timed.add_argument("--tokens", default=",".join(map(str, bench.TOKENS)), help="of each rank")
    for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
        flag = f"--{name.replace('_size', '').replace('num_', '').replace('_', '-')}"
        default = getattr(bench.SHAPE, name)
        timed.add_argument(flag, dest=name, type=int, default=default, metavar="N")
    timed.add_argument(
        "--routing", choices=timing.ROUTINGS, default="balanced",
        help="balanced: all experts equally often; random: few tokens hit fewer of them",
    )  # fmt: skip
    timed.add_argument("--capacity", default="each", help="of the workspace; each: the token count")
    timed.add_argument(
        "--workspaces", type=int, nargs="+", default=(), metavar="N",
        help="capacities of one layer; also times the smallest that covers beside the measured one",
    )  # fmt: skip
    timed.add_argument(
        "--tune", action="store_true", help="measure the kernels' tactics first (minutes)"
    )
    timed.add_argument("--seconds-per-config", type=float, default=bench.SECONDS, metavar="S")
    timed.add_argument(
        "--timeout", type=float, default=run.FIRST_S, metavar="S", help="of one configuration"
    )
    timed.add_argument("--json", type=Path, metavar="FILE", help="written after each configuration")
    timed.set_defaults(run=_bench)

    why = commands.add_parser("explain", help="which kernel, and why not the others")
    why.add_argument("model", nargs="?", help=f"one of {', '.join(MODELS)}")
    why.add_argument("--checkpoint", type=Path, help="a checkpoint directory instead of a model")
    why.add_argument("--layer", type=_layer, default=0, help="a number, or mtp.N")
    why.add_argument("--format", help="of the weights, where the model is published in several")
    why.add_argument("--machine", choices=[*MACHINES, "here"], default="here")
    why.add_argument("--world-size", type=int, default=1, metavar="N")
    why.add_argument("--tokens", type=int, default=512, help="max_tokens_per_rank")
    why.add_argument("--table", action="store_true", help="print the support table and stop")
    why.set_defaults(run=_explain)

    look = commands.add_parser("inspect", help="what a checkpoint holds, layer by layer")
    look.add_argument("path", type=Path, help="a checkpoint directory")
    look.add_argument("--world-size", type=int, default=1, metavar="N")
    look.add_argument("--tokens", type=int, default=512, help="max_tokens_per_rank")
    look.set_defaults(run=_inspect)

    again = commands.add_parser("replay", help="judge anew what MEGAMOE_DUMP wrote")
    again.add_argument("file", type=Path, help="a replay bundle")
    again.set_defaults(run=_replay)
    return parser


def _layer(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _demo(args: argparse.Namespace) -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ["cpu", *(["cuda"] if count else []), *(f"cuda:{n}" for n in range(count))]
    if args.device not in devices:
        remedy = f"use one of {', '.join(devices)}"
        raise bad_input("--device", repr(args.device), "is not on this machine", remedy)
    if args.tokens < 0:
        raise bad_input("--tokens", args.tokens, "is below 0", "pass a count")
    if args.tokens > DEMO_TOKENS:
        raise bad_input("--tokens", args.tokens, f"is above {DEMO_TOKENS}", "pass a smaller count")
    if args.checkpoint is not None:
        return _run_layer(args, args.checkpoint)
    with tempfile.TemporaryDirectory(prefix="megamoe-demo-") as folder:
        say("1. a small checkpoint in the layout of Qwen3-MoE")
        path = write_demo(Path(folder) / "checkpoint")
        for file in sorted(path.iterdir()):
            say(f"   {file.name}: {file.stat().st_size:,} bytes")
        return _run_layer(args, path)


def _run_layer(args: argparse.Namespace, path: Path) -> int:
    weights = megamoe.load(path, args.layer, device=args.device)
    if weights.router is None:
        raise bad_input("layer", args.layer, "has no router", "choose a layer that has one")
    request = Request.of(
        weights, top_k=weights.router.top_k, max_tokens_per_rank=max(1, args.tokens)
    )
    say(f"2. layer {args.layer} loaded ({weights.family}, {weights.nbytes:,} bytes):")
    say(f"   {describe(request)}")
    x = oracle.normal_tokens(args.tokens, weights.hidden_size, device=weights.device)
    tokens = None  # a hash-routed layer chooses by token: any will do
    if weights.router.table is not None:
        tokens = torch.arange(args.tokens, device=x.device) % len(weights.router.table)
    topk = megamoe.route(exact_logits(x, weights.router), weights.router, input_ids=tokens)
    say("3. the decision")
    decision = decide(request, weights.device, "auto", read_settings())
    say("   " + str(decision).replace("\n", "\n   "))
    with megamoe.prepare(weights, max_tokens_per_rank=max(1, args.tokens)) as layer:
        start = time.perf_counter()
        y = megamoe.forward(x, topk, layer)
        took = time.perf_counter() - start
        recipe = layer.decision.recipe
    say(f"4. megamoe.forward: {list(y.shape)} {y.dtype} in {took:.3f} s, digest {digest(y)}")
    report = oracle.judge(y, oracle.Inputs(x=x, topk=topk, weights=weights), recipe)
    say("5. the verdict")
    say("   " + str(report).replace("\n", "\n   "))
    try:
        report.raise_if_wrong()
    except Mismatch:
        return 1
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.flashinfer:
        root = upgrade.installed_root()
        say(upgrade.report(root, installed("flashinfer")))
        return 1 if root is None or upgrade.changes(root) else 0
    say(doctor.report(probe(_here())))
    return 0


def _check(args: argparse.Namespace) -> int:
    walks = args.soak is not None
    for name in ("case", "core") if walks else ("soak_seed", "soak_from"):
        value = getattr(args, name)
        if value is not None and value is not False:
            how = "beside" if walks else "without"
            raise bad_input(
                f"--{name.replace('_', '-')}", value, f"means nothing {how} --soak", "leave it out"
            )
    machine = run.machine_for(args.world_size, _here())
    kernels = _kernels(args.kernel or [k.sheet.name for k in KERNELS])
    verdicts: list[bool] = []
    for kernel in kernels if args.results is not None else ():
        results.usable(_records(args), kernel.sheet.name, args.world_size)
    for kernel in kernels:
        shape = run.shape_of(kernel)
        why = run.refused(kernel, CASES[0], shape, args.world_size, machine)
        if why:
            say(f"{kernel.sheet.name}: not run: {why}")
        elif args.soak is not None:
            verdicts.append(_soak(args, kernel, shape, machine))
        else:
            verdicts += _cases(args, kernel, shape, machine)
    kind = "case" if args.soak is None else "walk"
    kind += "" if len(verdicts) == 1 else "s"
    say(f"{len(verdicts)} {kind} judged on {machine.name}, {verdicts.count(False)} failed")
    if not verdicts:
        raise MegaMoEError("no kernel could be run here: nothing was judged")
    return 0 if all(verdicts) else 1


def _cases(
    args: argparse.Namespace, kernel: type[Kernel], shape: Shape, machine: Machine
) -> list[bool]:
    """Whether each case passed that the kernel can run; all on one pool of ranks."""
    verdicts: list[bool] = []
    wanted = [case(name) for name in args.case or ()]
    with run.pool(args.world_size) as pool:
        for what in wanted or [c for c in CASES if c.core or not args.core]:
            head = f"{kernel.sheet.name}, {what.name}"
            why = run.refused(kernel, what, shape, args.world_size, machine)
            if why:
                say(f"{head}: not run: {why}")
                continue
            entry = run.judge(pool, kernel, what, shape, machine, first=not verdicts)
            good = results.passed(entry)
            verdicts.append(good)
            say(f"{head}: {'passed' if good else 'FAILED'}")
            if not good:
                say("   " + str(entry.get("message") or entry).replace("\n", "\n   "))
            if args.results is not None:
                results.store(_records(args), kernel.sheet.name, args.world_size, what.name, entry)
    return verdicts


def _soak(args: argparse.Namespace, kernel: type[Kernel], shape: Shape, machine: Machine) -> bool:
    """One kernel's walk; whether it passed."""
    with run.pool(args.world_size) as pool:
        entry = soak.soak(
            pool, kernel, shape, machine,
            steps=args.soak, seed=args.soak_seed or 0, first=args.soak_from or 0, tell=say,
        )  # fmt: skip
    if args.results is not None:
        name = f"seed {args.soak_seed or 0}, from step {args.soak_from or 0}"
        results.store(_records(args), kernel.sheet.name, args.world_size, name, entry)
    return soak.passed(entry)


def _records(args: argparse.Namespace) -> Path:
    """The folder of this run's records: walks have one of their own."""
    folder: Path = args.results
    return folder if args.soak is None else folder / "soak"


def _kernels(wanted: Sequence[str]) -> list[type[Kernel]]:
    """The kernels of these names, in their order."""
    known = {k.sheet.name: k for k in KERNELS}
    for name in wanted:
        if name not in known:
            raise bad_input("--kernel", repr(name), "is unknown", f"use one of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def _bench(args: argparse.Namespace) -> int:
    plan = bench.Plan(
        kernels=tuple(_kernels(args.kernel or bench.DEFAULT_KERNELS)),
        world_size=args.world_size,
        tokens=tuple(_count("--tokens", text) for text in args.tokens.split(",")),
        shape=dataclasses.replace(
            bench.SHAPE,
            hidden_size=args.hidden_size,
            intermediate_size=args.intermediate_size,
            num_experts=args.num_experts,
            top_k=args.top_k,
        ),
        routing=args.routing,
        capacity=None if args.capacity == "each" else _count("--capacity", args.capacity),
        workspaces=tuple(args.workspaces),
        tune=args.tune,
        seconds=args.seconds_per_config,
        timeout=args.timeout,
    )
    machine = run.machine_for(args.world_size, _here())
    document = bench.bench(plan, machine, file=args.json, tell=say)
    if not bench.anything_timed(document):
        raise MegaMoEError("no configuration could be timed here")
    wide = Terminal(highlight=False, width=max(190, Console().width))
    wide.print(bench.table(document))
    if (by_workspace := bench.workspaces(document)) is not None:
        wide.print(by_workspace)
    for note in bench.notes(document):
        say(note)
    return 0 if bench.everything_timed(document) else 1


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise bad_input(name, repr(text), "is not a count", "pass whole numbers") from None


def _explain(args: argparse.Namespace) -> int:
    if args.table:
        print(support_table())
        return 0
    say(explain(_request(args), _machine(args)))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    record = inspect(
        args.path, judge=_takers, world_size=args.world_size, max_tokens_per_rank=args.tokens
    )
    say(str(record))
    return 0


def _replay(args: argparse.Namespace) -> int:
    found = bundle.read(args.file)
    say(str(found))
    report, seen = found.replay()
    say("the verdict here")
    say("   " + str(report).replace("\n", "\n   "))
    same = seen == found.digest
    recorded = "as recorded" if same else f"NOT the recorded {found.digest}"
    say(f"reference digest {seen}, {recorded}")
    return 0 if report.right and report.recipe and same else 1


def _takers(request: Request) -> list[str]:
    """The decision on machines that one may not own."""
    return [
        line
        for name in ("h200", "sm120")
        for line in explain(request, MACHINES[name]).split("\n")[1:]
    ]


def _machine(args: argparse.Namespace) -> Machine:
    if args.machine != "here":
        return MACHINES[args.machine]
    return probe(_here())


def _request(args: argparse.Namespace) -> Request:
    if args.checkpoint is not None:
        found = {layer.name: layer for layer in inspect(args.checkpoint).layers}
        layer = found.get(str(args.layer))
        if layer is None or layer.moe is None:
            why = "is not there" if layer is None else layer.refusal or "is dense"
            raise bad_input("layer", args.layer, why, "name an MoE layer")
        return layer.moe.request(world_size=args.world_size, max_tokens_per_rank=args.tokens)
    if args.model is None:
        raise bad_input("model", "None", "is not given", f"name one of {', '.join(MODELS)}")
    chosen = model(args.model)
    return chosen.request(
        world_size=args.world_size,
        max_tokens_per_rank=args.tokens,
        weights=published_format(chosen, args.format),
    )


if __name__ == "__main__":
    sys.exit(main())
