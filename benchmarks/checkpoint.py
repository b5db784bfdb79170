"""Saving and loading: shardwise, bare torch.distributed.checkpoint and torch.save on the same sharded state.

    python -m benchmarks.checkpoint --rounds 7 --json result.json
    python -m benchmarks.checkpoint --disk 125 --products 130     # stalls on a slower disk of that many MB/s, as root

One group of processes holds the state and every contender. A round gives each contender one save and one load, and
one save amid training-like steps; the order is drawn anew. Every load goes into tensors that were overwritten before
and must bring back the state bit for bit. Ratios are the medians of the ratios within each round; the physical limit of
a save is a plain write and fsync of the same bytes in the same rounds, that of a stall the same beside the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
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

from benchmarks.checkpoint_contenders import Contender, Raw, Shardwise, Size, State, Wait, make_state, remove
from benchmarks.harness import Summary, paired_ratio, summarize
from benchmarks.machine import MachineError, cleaning_up_when_terminated
from benchmarks.record import header, write_json
from benchmarks.slow_disk import slow_disk
from shardwise.checkpoint.manifest import BLOCK_BYTES
from shardwise.checkpoint.staging import Staging
from shardwise.testing.world import WorldPool

HERE = "benchmarks.checkpoint_contenders"
OURS, HALF = "shardwise", "shardwise, half the budget"
LIMIT, FLOOR = "raw write", "raw write beside the steps"
CONTENDERS = {
    OURS: f"{HERE}:Shardwise",
    HALF: f"{HERE}:HalfBudget",
    "DCP": f"{HERE}:Dcp",
    "DCP, threads": f"{HERE}:DcpThreads",
    "torch.save": f"{HERE}:TorchSave",
    LIMIT: f"{HERE}:Raw",
    FLOOR: f"{HERE}:RawBeside",
}
ALONE, AMID, ASYNCHRONOUS = "save and load", "save amid steps", "asynchronous save amid steps"
ALL = {ALONE, AMID, ASYNCHRONOUS}
PARTS = {OURS: ALL, HALF: {ASYNCHRONOUS}, FLOOR: {ASYNCHRONOUS}, "DCP": ALL}
OF_A_SLOW_DISK = (OURS, HALF, LIMIT, FLOOR)  # not what is written back from the page cache: slower on a loop device
DISK_BYTES = 4 << 30
PACKAGES = ("torch", "shardwise")
MB = 1e6

Times = dict[str, dict[str, list[float]]]  # contender -> measure -> seconds of each round
PLAIN = "steps"  # the contender that saves nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 when some contender did not bring the state back."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    size = Size(options.layers, options.width, options.vocabulary)
    contenders = {name: CONTENDERS[name] for name in OF_A_SLOW_DISK} if options.disk else CONTENDERS
    try:
        with _directory(options) as directory, WorldPool(limit=options.ranks, timeout=3600.0) as pool:
            settings = (size, directory, contenders, options.rounds, options.steps, options.products)
            results = pool.run(options.ranks, measure, *settings)
    except MachineError as error:
        console.print(f"--disk {options.disk}: {error}")
        return 2
    result = summarize_run(results, options.steps)
    for table in (render_speed(result), render_stall(result)):
        console.print(table)
    if options.json:
        write_json(options.json, {**header(PACKAGES), "size": vars(size), "ranks": options.ranks, "disk": options.disk,
                                  **result})  # fmt: skip
        console.print(f"Written to {options.json}")
    for problem in result["problems"]:
        console.print(f"[bold red]{problem}[/]")
    return 1 if result["problems"] else 0


@contextmanager
def _directory(options: argparse.Namespace) -> Iterator[Path]:
    """Where checkpoints are written, on a disk of the speed that was asked for; gone afterwards."""
    with cleaning_up_when_terminated(), contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=options.directory)))
        yield stack.enter_context(slow_disk(place, int(options.disk * MB), DISK_BYTES)) if options.disk else place


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="training-like steps around a save")
    parser.add_argument("--products", type=int, default=40, help="512 x 512 matrix products that a step takes")
    parser.add_argument("--directory", help="where checkpoints are written; default: the temporary directory")
    parser.add_argument("--disk", type=float, help="write to a disk of so many MB/s; shardwise's own saves alone")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the GPT-NeoX; default %(default)s")
    return parser.parse_args(arguments)


# --- on a rank -------------------------------------------------------------------------------------------------------


def measure(
    size: Size, directory: Path, contenders: dict[str, str], rounds: int, steps: int, products: int
) -> dict[str, Any]:
    """Everything of one rank. Collective."""
    torch.set_num_threads(1)
    bench = Bench(make_state(size), directory / "turn", steps, products)
    made = {name: load_class(where)(bench.state) for name, where in contenders.items()}
    memory = {name: bench.extra_memory(one, PARTS.get(name, {ALONE})) for name, one in made.items()}
    times: Times = {}
    for number in range(-1, rounds):  # the first one warms up
        turns = [*made, PLAIN]
        names = random.Random(number).sample(turns, len(turns))  # nobody follows the same one every time
        found = {name: bench.turn(name, made[name]) if name in made else bench.plain() for name in names}
        for name, seconds in found.items() if number >= 0 else ():
            for kind, value in seconds.items():
                times.setdefault(name, {}).setdefault(kind, []).append(value)
    rings = {name: (one.budget, one.staged) for name, one in made.items() if isinstance(one, Shardwise)}
    return {"bytes": bench.state.bytes, "copy": bench.copy_seconds(), "times": times, "memory": memory,
            "rings": rings, "problems": sorted(set(bench.problems))}  # fmt: skip


def load_class(where: str) -> Callable[[State], Contender]:
    module, name = where.split(":")
    found: Callable[[State], Contender] = getattr(importlib.import_module(module), name)
    return found


def timed(work: Callable[[], Any]) -> float:
    """Seconds between two barriers."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


class Bench:
    """One rank's state, the steps around a save, and what went wrong."""

    def __init__(self, state: State, path: Path, steps: int, products: int = 40, width: int = 512) -> None:
        self.state, self.path, self.steps, self.products = state, path, steps, products
        self.expected = {name: local.clone() for name, local in state.locals.items()}
        self.matrix, self.message = torch.randn(width, width), torch.zeros(4)
        self.problems: list[str] = []
        self.held = 0.0  # how long the last save in `train` took to return

    def turn(self, name: str, one: Contender) -> dict[str, float]:
        """One round of one contender. What was written is gone afterwards."""
        found: dict[str, float] = {}
        parts = PARTS.get(name, {ALONE})
        if ALONE in parts:
            self.level()
            found["save"] = timed(lambda: one.save(self.path))
            self.overwrite()
            found["load"] = timed(lambda: one.load(self.path))
            self.state.refresh()
            self.check(f"{name}: what was saved is not what was loaded")
            remove(self.path)
        if AMID in parts:
            self.level()
            found[AMID] = timed(lambda: self.train(lambda: one.save(self.path)))
            remove(self.path)
        if ASYNCHRONOUS in parts:
            waits: list[Wait] = []
            self.level()
            found[ASYNCHRONOUS] = timed(lambda: self.train(lambda: waits.append(one.begin(self.path))))
            found["held"] = self.held
            found["left"] = timed(waits[0])
            remove(self.path)
            if isinstance(one, Shardwise):
                found["processor"] = one.processor
        return found

    def plain(self) -> dict[str, float]:
        """The steps of one round without a save."""
        self.level()
        return {AMID: timed(lambda: self.train(lambda: None))}

    def level(self) -> None:
        """Write as much as a save does and remove it: what a page of the page cache costs hangs on who had it last.

        What removed files may still cost the disk (blocks discarded at the journal's next commit) comes before.
        """
        Raw(self.state).save(self.path)
        remove(self.path)
        os.sync()
        dist.barrier()

    def train(self, save: Callable[[], Any]) -> None:
        """Training-like steps with a save amid them.

        Each is products on this rank's core, a small message to all, and the optimizer's step, which without gradients
        changes nothing but must find the state saved or copied. A real step of this model takes seconds.
        """
        for number in range(self.steps):
            if number == self.steps // 4:
                start = time.perf_counter()
                save()
                self.held = time.perf_counter() - start
            for _ in range(self.products):
                torch.mm(self.matrix, self.matrix)
            dist.all_reduce(self.message)
            self.state.optimizer.inner.step()

    def overwrite(self) -> None:
        for local in self.state.locals.values():
            local.fill_(-1.0)

    def check(self, problem: str) -> None:
        """Note what is not bit-equal to the state at the start, and put that back."""
        for name, local in self.state.locals.items():
            if not torch.equal(local, self.expected[name]):
                self.problems.append(f"rank {dist.get_rank()}: {problem} ({name})")
                local.copy_(self.expected[name])

    def extra_memory(self, one: Contender, parts: set[str]) -> dict[str, int]:
        """Resident bytes that a first save of each kind adds at its peak, sampled every 2 ms."""
        found: dict[str, int] = {}
        if ALONE in parts:
            with peak_resident() as peak:
                one.save(self.path)
            found["save"] = peak()
            remove(self.path)
        if ASYNCHRONOUS in parts:
            with peak_resident() as peak:
                one.begin(self.path)()
            found["asynchronous"] = peak()
            remove(self.path)
        return found

    def copy_seconds(self) -> float:
        """What an update does where nothing is written yet and the ring holds all: a copy into memory that is there."""
        staging, parts = Staging(self.state.bytes + BLOCK_BYTES), list(self.state.locals.values())
        seconds = 0.0
        for _ in range(3):
            staging.begin(parts)
            seconds = timed(staging.settle)
            for _ in staging.drain():
                pass
        return seconds


@contextmanager
def peak_resident() -> Iterator[Callable[[], int]]:
    """Gives a function for the most bytes by which this process grew inside."""
    process, done = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most - before
    finally:
        done.set()
        thread.join()


# --- the tables ------------------------------------------------------------------------------------------------------


def summarize_run(results: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The numbers of the tables from those of each rank; of times the slowest rank's."""
    times: Times = {
        name: {kind: [max(each) for each in zip(*(r["times"][name][kind] for r in results))] for kind in kinds}
        for name, kinds in results[0]["times"].items()
    }
    size, plain = results[0]["bytes"], times[PLAIN][AMID]
    rows = []
    for name, found in times.items():
        row: dict[str, Any] = {"contender": name, "seconds": found}
        for kind in ("save", "load"):
            if kind in found and OURS in times:
                row[kind] = vars(summarize([len(results) * size / MB / seconds for seconds in found[kind]]))
                row[f"{kind}_ratio"] = vars(paired_ratio(times[OURS][kind], found[kind]))
        for kind in (AMID, ASYNCHRONOUS):
            if kind in found and name != PLAIN:
                row[kind] = vars(summarize([a - b for a, b in zip(found[kind], plain)]))
        if AMID in row and ASYNCHRONOUS in row:
            row["of_synchronous"] = row[ASYNCHRONOUS]["median"] / row[AMID]["median"]
        for kind in ("held", "left", "processor"):
            row[kind] = vars(summarize(found[kind])) if kind in found else None
        row["memory"] = {k: max(r["memory"][name][k] for r in results) for k in results[0]["memory"].get(name, {})}
        rows.append(row)
    predict(rows, results, summarize(plain).median / steps)
    return {"bytes_of_a_rank": size, "copy_seconds": max(r["copy"] for r in results), "rows": rows,
            "plain_steps": vars(summarize(plain)), "problems": [p for r in results for p in r["problems"]]}  # fmt: skip


def predict(rows: list[dict[str, Any]], results: Sequence[dict[str, Any]], step: float) -> None:
    """The closed form of `shardwise.checkpoint.staging` for the asynchronous saves; `step` is seconds to the update."""
    by_name = {row["contender"]: row for row in rows}
    size, copy = results[0]["bytes"], max(result["copy"] for result in results)
    speed = size / summarize(by_name[OURS]["seconds"]["save"]).median
    rest = max(0.0, size - speed * step)
    for name, (budget, staged) in results[0]["rings"].items():
        by_name[name]["budget"], by_name[name]["staged"] = budget, staged
        by_name[name]["predicted"] = copy * min(rest, budget) / size + max(0.0, rest - budget) / speed


def render_speed(result: dict[str, Any]) -> Table:
    """Saves and loads, one after the other."""
    size = result["bytes_of_a_rank"] / MB
    table = Table(title=f"{size:.0f} MB of parameters and AdamW state a rank; MB/s of all ranks, median (quartiles)")
    for column in ("contender", "save", "shardwise ÷ it", "load", "shardwise ÷ it", "of raw write", "extra MB, peak"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    raw = next((row["save"]["median"] for row in result["rows"] if row["contender"] == LIMIT), None)
    for row in result["rows"]:
        if "save" not in row:
            continue
        cells = [
            spread(row[kind], form) for k in ("save", "load") for kind, form in ((k, ".0f"), (f"{k}_ratio", ".2f"))
        ]
        of_limit = f"{row['save']['median'] / raw:.0%}" if raw else ""
        table.add_row(row["contender"], *cells, of_limit, f"{row['memory'].get('save', 0) / MB:.0f}")
    return table


def render_stall(result: dict[str, Any]) -> Table:
    """What a save adds to the steps around it."""
    plain = result["plain_steps"]["median"]
    table = Table(title=f"Seconds that a save adds to steps of {plain:.2f} s; {result['copy_seconds']:.3f} s is a copy")
    columns = ("contender", "synchronous", "asynchronous", "ratio", "in the call", "left after the steps",
               "writer's processor", "predicted", "budget MB", "extra MB, peak")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in result["rows"]:
        if ASYNCHRONOUS not in row:
            continue
        cells = [spread(row.get(kind), ".3f") for kind in (AMID, ASYNCHRONOUS, "held", "left", "processor")]
        cells.insert(2, f"{row['of_synchronous']:.2f}" if "of_synchronous" in row else "")
        predicted = f"{row['predicted']:.3f}" if "predicted" in row else ""
        budget = f"{row['budget'] / MB:.0f}" if "budget" in row else ""
        table.add_row(row["contender"], *cells, predicted, budget, f"{row['memory']['asynchronous'] / MB:.0f}")
    return table


def spread(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return ""
    summary = Summary(**values)
    return f"{summary.median:{form}} ({summary.low:{form}}-{summary.high:{form}})"


if __name__ == "__main__":
    sys.exit(main())
