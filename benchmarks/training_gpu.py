"""Training on one CUDA device: shardwise beside bare PyTorch with transformers, Llama- and GPT-NeoX-shaped, bf16.

    python -m benchmarks.training_gpu --sizes 0.5B 1B 3B --sequences 2048 8192 --json result.json

Each contender trains with the largest micro-batch of a ladder that fits it. Printed: tokens/s, model TFLOP/s
(6P + 6Lsh: attention is causal), their share of a bf16 matrix product of 8192^3 measured in the same process (MFU),
and peak memory. A configuration that fails is reported and does not end the run; without a GPU the exit code is 2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_case import Case, run_case
from benchmarks.gpu_contenders import BUILDERS
from benchmarks.gpu_models import FAMILIES, SHAPES, SIZES
from benchmarks.harness import agree, environment, paired_ratio, redirect_output, summarize
from benchmarks.record import header, write_json

FIRST_LOSS_TOLERANCE = 0.05  # bf16 forward of the same weights and ids through different kernels
PACKAGES = ("torch", "transformers", "triton", "shardwise")
DEFAULT_CONTENDERS = ("shardwise", "shardwise-compile", "torch", "torch-compile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; 2 without the device asked for, 1 when a case yielded nothing or losses disagree."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.training_gpu needs a CUDA device and torch sees none here; "
            "`--device cpu --toy` runs its logic at toy size.",
            file=sys.stderr,
        )
        return 2
    deadline = time.monotonic() + options.budget_seconds
    results: list[dict[str, Any]] = []
    content = {**header(PACKAGES), "device": _device_name(options.device), "cases": results}
    for case in _cases(options):
        console.log(case.name)
        result = measure(case, deadline, console)
        results.append(result)
        console.print(render(result))
        if options.json:
            write_json(options.json, content)  # after every case: what is measured is kept whatever happens next
    problems = [problem for result in results for problem in check(result)]
    for problem in problems:
        console.print(problem, style="bold red", markup=False)
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.training_gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="toy models, sequences and matrices: a test of the logic")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1B", "3B"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--contenders", nargs="+", choices=BUILDERS, default=list(DEFAULT_CONTENDERS))
    parser.add_argument("--ladder", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="micro-batches to try")
    parser.add_argument(
        "--base", choices=BUILDERS, help="whose tokens/s are divided by the others'; unset: shardwise's"
    )
    parser.add_argument("--memory-gb", type=float, help="of the device that a contender may fill; unset: all of it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of one turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them; compilation happens here")
    parser.add_argument("--compile-mode", choices=("model", "blocks"), default="model", help="of bare PyTorch")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="then the running case is cut short")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    options = parser.parse_args(arguments)
    if options.toy:
        options.sizes, options.sequences = ["toy"], [32]
    return options


def _cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(
            family=family,
            size=size,
            sequence=sequence,
            device=options.device,
            contenders=tuple(options.contenders),
            ladder=tuple(options.ladder),
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
            compile_mode=options.compile_mode,
            product=256 if options.toy else 8192,
            base=options.base or "",
            memory_bytes=None if options.memory_gb is None else int(options.memory_gb * 1e9),
        )
        for size in options.sizes
        for family in options.families
        for sequence in options.sequences
        if (family, size) in SHAPES
    ]


def measure(case: Case, deadline: float, console: Console) -> dict[str, Any]:
    """Run a case in its own process and collect what it sends until it ends, dies or the time is up."""
    messages: list[tuple[str, Any]] = []
    ended = "not started: the time budget was spent"
    if time.monotonic() < deadline:
        with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as scratch:
            ended = _run_child(case, Path(scratch) / "log", deadline, messages, console)
    return collect(case, messages, ended)


def _run_child(case: Case, log: Path, deadline: float, messages: list[tuple[str, Any]], console: Console) -> str:
    """Fill `messages`; returns "" when the case ran to its end, else why not."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, theirs, str(log)), daemon=True)
    with environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"):  # little fragmentation up the ladder
        process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(max(0.0, min(deadline - time.monotonic(), 1e6))):
                return "cut short: the time budget was spent"
            kind, value = ours.recv()
            if kind == "end":
                return str(value)
            messages.append((kind, value))
            if kind in ("ladder", "turn", "failed"):
                console.log(f"  {kind}: {value}", markup=False, highlight=False)
    except EOFError:
        process.join(10)
        tail = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
        return "\n".join([f"the process died (exit code {process.exitcode})", *tail])
    finally:
        process.kill()
        process.join()
        ours.close()


def _child(case: Case, pipe: Connection, log: str) -> None:
    redirect_output(Path(log))
    try:
        run_case(case, lambda kind, value: pipe.send((kind, value)))
        pipe.send(("end", ""))
    except BaseException:
        pipe.send(("end", traceback.format_exc(limit=-6)))
    pipe.close()
    os._exit(0)


def collect(case: Case, messages: list[tuple[str, Any]], ended: str) -> dict[str, Any]:
    """The messages of a case as numbers for the table and JSON."""
    flops = next((value for kind, value in messages if kind == "flops_per_token"), None)
    limits = [value for kind, value in messages if kind == "limit"]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in case.contenders}
    rows: dict[str, dict[str, Any]] = {name: {"contender": name} for name in case.contenders}
    for kind, value in messages:
        if kind == "ladder":
            rows[value["contender"]] |= value
        elif kind == "failed":
            rows[value["contender"]]["failed"] = value["reason"]
        elif kind == "turn":
            turns[value["contender"]].append(value)
    for name, taken in turns.items():
        if taken:
            speed = summarize([turn["tokens"] / turn["seconds"] for turn in taken])
            achieved = speed.median * (flops or 0.0)
            peaks = [turn["peak_memory_bytes"] for turn in taken]
            rows[name] |= {
                "tokens_per_second": vars(speed),
                "tflops": achieved / 1e12,
                "mfu": achieved / max(limits),
                "peak_memory_bytes": None if None in peaks else max(peaks),
                "turns": taken,
            }
    _add_ratios(rows, turns, case.base)
    return {
        "case": vars(case),
        "name": case.name,
        "ended": ended,
        "limit_flops_per_second": max(limits, default=None),
        "flops_per_token": flops,
        "rows": list(rows.values()),
    }


def _add_ratios(rows: dict[str, dict[str, Any]], turns: dict[str, list[dict[str, Any]]], base: str) -> None:
    """Tokens/s of `base` over each row's, round by round; without one of shardwise, compiled where the row is."""
    for name, taken in turns.items():
        ours = turns.get(base or ("shardwise-compile" if name.endswith("-compile") else "shardwise"), [])
        if taken and len(ours) == len(taken):
            mine, its = ([turn["seconds"] / turn["tokens"] for turn in side] for side in (ours, taken))
            rows[name]["base_ratio"] = vars(paired_ratio(mine, its))


def check(result: dict[str, Any]) -> list[str]:
    """What went wrong, in sentences."""
    problems = [f"{result['name']}: {result['ended']}"] if result["ended"] else []
    for row in result["rows"]:
        if "failed" in row:
            problems.append(f"{result['name']}: {row['contender']} failed: {row['failed']}")
    losses = {row["contender"]: row["first_loss"] for row in result["rows"] if row.get("first_loss") is not None}
    if not agree(losses.values(), FIRST_LOSS_TOLERANCE):
        problems.append(f"{result['name']}: first losses disagree by more than {FIRST_LOSS_TOLERANCE}: {losses}")
    return problems


def render(result: dict[str, Any]) -> Table:
    """The table of one case."""
    limit = result["limit_flops_per_second"]
    side = result["case"]["product"]
    peak = f"bf16 product of {side}^3: {limit / 1e12:.3g} TFLOP/s." if limit else "No peak measured."
    base = result["case"]["base"] or "shardwise"
    table = Table(title=result["name"], caption=f"{peak} {result['ended']}".strip())
    for column in (
        "contender",
        "micro-batch",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak GiB",
        f"{base} ÷ it",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in result["rows"]:
        if "tokens_per_second" not in row:
            reason = row.get("failed") or row.get("stopped_by") or "not measured"
            table.add_row(row["contender"], str(row.get("microbatch") or "none"), reason.strip().splitlines()[-1])
            continue
        memory, ratio = row["peak_memory_bytes"], row.get("base_ratio")
        table.add_row(
            row["contender"],
            str(row["microbatch"]),
            f"{row['tokens_per_second']['median']:.0f}",
            f"{row['tflops']:.3g}",
            f"{row['mfu']:.1%}",
            "" if memory is None else f"{memory / 2**30:.1f}",
            "" if ratio is None else f"{ratio['median']:.3f}",
        )
    return table


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
