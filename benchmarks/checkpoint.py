"""Saving and loading: shardwise, bare torch.distributed.checkpoint and torch.save on the same sharded state.

    python -m benchmarks.checkpoint --rounds 7 --json result.json

One group of processes holds the state and every contender. A round gives each contender one save and one load, and one
save amid training-like steps; the order rotates. Every load goes into tensors that were overwritten before and must
bring back the state bit for bit. Ratios are the medians of the ratios within each round; the physical limit is a plain
write and fsync of the same bytes in the same rounds.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint_contenders import Contender, Size, State, Wait, dtensors, make_state, remove
from benchmarks.harness import Summary, paired_ratio, summarize
from benchmarks.record import header, write_json
from shardwise.checkpoint.staging import Staging
from shardwise.testing.world import WorldPool

HERE = "benchmarks.checkpoint_contenders"
OURS, HALF, LIMIT = "shardwise", "shardwise, half the budget", "raw write"
CONTENDERS = {
    OURS: f"{HERE}:Shardwise",
    HALF: f"{HERE}:HalfBudget",
    "DCP": f"{HERE}:Dcp",
    "DCP, threads": f"{HERE}:DcpThreads",
    "torch.save": f"{HERE}:TorchSave",
    LIMIT: f"{HERE}:Raw",
}
ONLY_ASYNCHRONOUS = {HALF}  # its other saves are those of OURS
ONLY_SYNCHRONOUS = {"torch.save", LIMIT, "DCP, threads"}
PACKAGES = ("torch", "shardwise")
MB = 1e6

Times = dict[str, dict[str, list[float]]]  # measure -> contender -> seconds of each round


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 when some contender did not bring the state back."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    size = Size(options.layers, options.width, options.vocabulary)
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=options.directory) as directory,
        WorldPool(limit=options.ranks, timeout=3600.0) as pool,
    ):
        settings = (size, Path(directory), CONTENDERS, options.rounds, options.steps)
        results = pool.run(options.ranks, measure, *settings)
    result = summarize_run(results)
    for table in (render_speed(result), render_stall(result)):
        console.print(table)
    if options.json:
        write_json(options.json, {**header(PACKAGES), "size": vars(size), "ranks": options.ranks, **result})
        console.print(f"Written to {options.json}")
    for problem in result["problems"]:
        console.print(f"[bold red]{problem}[/]")
    return 1 if result["problems"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="training-like steps around a save")
    parser.add_argument("--directory", help="where checkpoints are written; default: the temporary directory")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the GPT-NeoX; default %(default)s")
    return parser.parse_args(arguments)


# --- on a rank -------------------------------------------------------------------------------------------------------


def measure(size: Size, directory: Path, contenders: dict[str, str], rounds: int, steps: int) -> dict[str, Any]:
    """Everything of one rank; times are equal on all. Collective."""
    torch.set_num_threads(1)
    state = make_state(size)
    expected = {name: local.clone() for name, local in state.locals.items()}
    step = Step()
    made = {name: load_class(where)(state) for name, where in contenders.items()}
    memory = {name: extra_memory(one, directory / "memory") for name, one in made.items()}
    problems: list[str] = []
    times: Times = {measure: {} for measure in ("save", "load", "steps", "held")}
    for number in range(-1, rounds):  # the first one warms up
        names = list(made)
        for name in names[max(number, 0) % len(names) :] + names[: max(number, 0) % len(names)]:
            found = one_turn(made[name], name, state, expected, directory / "turn", step, steps, problems)
            for kind, seconds in found.items():
                times[kind].setdefault(name, []).extend([seconds] if number >= 0 else [])
        plain = timed(lambda: [step() for _ in range(steps)])
        times["steps"].setdefault("none", []).extend([plain] if number >= 0 else [])
    staged = {name: getattr(one, "staged", None) for name, one in made.items()}
    budgets = {name: getattr(one, "budget", None) for name, one in made.items()}
    return {"bytes": state.bytes, "copy": copy_seconds(state), "times": times, "memory": memory, "staged": staged,
            "budgets": budgets, "problems": sorted(set(problems))}  # fmt: skip


def load_class(where: str) -> Callable[[State], Contender]:
    module, name = where.split(":")
    found: Callable[[State], Contender] = getattr(importlib.import_module(module), name)
    return found


def one_turn(
    one: Contender,
    name: str,
    state: State,
    expected: dict[str, torch.Tensor],
    path: Path,
    step: Step,
    steps: int,
    problems: list[str],
) -> dict[str, float]:
    """A save and a load, then a save amid steps; seconds of each. What was written is gone afterwards."""
    found: dict[str, float] = {}
    if name not in ONLY_ASYNCHRONOUS:
        found["save"] = timed(lambda: one.save(path))
        overwrite(state)
        found["load"] = timed(lambda: one.load(path))
        problems += check(state, expected, f"{name}: a save and a load")
        remove(path)
        found["steps" if name in ONLY_SYNCHRONOUS else "held"] = 0.0
    if name in ONLY_SYNCHRONOUS or name == OURS or name == "DCP":
        found.pop("held", None)
        found[f"steps"] = timed(lambda: amid(step, steps, lambda: one.save(path)))
        remove(path)
    return found


class Step:
    """Training-like: products on this rank's core, and a small message to all."""

    def __init__(self, width: int = 512, products: int = 8) -> None:
        self.left, self.products = torch.randn(width, width), products
        self.message = torch.zeros(4)

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.left)
        dist.all_reduce(self.message)
