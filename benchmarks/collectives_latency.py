"""Latency of collectives of CPU ranks, the native engine beside Gloo and, where torch has it, MPI.

    python -m benchmarks.collectives_latency --json latency.json

Medians and 99th percentiles of single calls from 8 bytes to 1 MiB, the time of 1,000 small all-reduces, and a step of
DDP on a small network. Contenders take turns in blocks of calls, in the same processes; a call takes as long as on its
slowest rank. Ratios are medians of the ratios within rounds. On a quiet machine it takes at most a minute
and a half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import header, write_json
from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import engine, registration
from shardwise.testing.world import WorldPool

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (8, 64, 512, 4096, 32 << 10, 256 << 10, 1 << 20)  # bytes of the full buffer
MANY = 1000  # all-reduces one after the other
WIDTH = 64  # of the network of a DDP step
TABLE_WIDTH = 110  # characters; a narrower one would cut figures
STEP = "DDP step"
AIMS = {f"{MANY} all_reduce": 10.0, STEP: 1.3}  # times Gloo's speed


@dataclass(frozen=True)
class Case:
    """One row of the result; `bytes` are those of the full buffer."""

    operation: str
    ranks: int
    bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _parse(arguments)
    engine.build()
    cases = [Case(operation, n, size) for n in options.ranks for operation in OPERATIONS for size in SIZES]
    cases += [Case(what, n, 8) for n in options.ranks for what in AIMS]
    with WorldPool(preload=("torch", "torch.distributed")) as pool:
        rows = pool.run(max(options.ranks), _rank, cases, options.rounds, options.seconds, timeout=1800)[0]
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(render(rows))
    for row in rows:
        if row["operation"] in AIMS:
            console.print(against_aim(row))
    if options.json:
        write_json(options.json, header(("torch", "shardwise")) | {"rounds": options.rounds, "rows": rows})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender has its turn")
    parser.add_argument("--seconds", type=float, default=45, help="time of all blocks of calls, about")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    return parser.parse_args(arguments)


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table: microseconds of each contender, median and 99th percentile."""
    table = Table(box=None)
    contenders = [*rows[0]["microseconds"]]
    columns = [f"{name}, {what}" for name in contenders for what in ("median", "p99")]
    for name in ("operation", "ranks", "bytes", *columns, "Gloo / engine"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        times = [f"{value:.4g}" for name in contenders for value in row["microseconds"][name]]
        table.add_row(row["operation"], str(row["ranks"]), str(row["bytes"]), *times, f"{row['ratio_to_gloo']:.1f}")
    return table


def against_aim(row: dict[str, Any]) -> str:
    """Return a line that compares a row's ratio with what is asked of it."""
    aim, ratio = AIMS[row["operation"]], row["ratio_to_gloo"]
    verdict = "met" if ratio >= aim else "missed"
    return f"{row['operation']} on {row['ranks']} ranks: {ratio:.2f} times Gloo's speed; {aim:g} is asked: {verdict}"


# --- on each rank


def _rank(cases: list[Case], rounds: int, seconds: float) -> list[dict[str, Any]]:
    registration.register()
    contenders = [registration.BACKEND, "gloo", *(["mpi"] if dist.is_mpi_available() else [])]
    block = seconds / (len(cases) * rounds * len(contenders))
    rows = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with Progress(console=console, transient=True, auto_refresh=False) as progress:  # no thread beside what is timed
        task = progress.add_task("collectives", total=len(cases))
        for ranks in sorted({case.ranks for case in cases}):
            groups = {name: dist.new_group(list(range(ranks)), backend=name) for name in contenders}
            for case in cases if dist.get_rank() < ranks else ():
                if case.ranks == ranks:
                    rows.append(_row(case, groups, rounds, block))
                    console.print(_said(rows[-1]))
                    progress.update(task, advance=1, refresh=True)
            dist.barrier()  # the ranks that are not in this size sleep here
    return rows


def _said(row: dict[str, Any]) -> str:
    medians = ", ".join(f"{name} {times[0]:.4g}" for name, times in row["microseconds"].items())
    return f"{row['operation']}, {row['ranks']} ranks, {row['bytes']} bytes: {medians} microseconds"


def _row(case: Case, groups: dict[str, Any], rounds: int, seconds: float) -> dict[str, Any]:
    runs = {name: _operation(case, group) for name, group in groups.items()}
    calls = {name: _block(run, groups[name], seconds) for name, run in runs.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in groups}
    for number in range(rounds):
        for name in list(groups)[:: 1 if number % 2 else -1]:
            times[name].append(_timed(runs[name], groups[name], calls[name]))
    all_calls = {name: sorted(second for block in blocks for second in block) for name, blocks in times.items()}
    medians = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    ratios = [gloo / ours for gloo, ours in zip(medians["gloo"], medians[registration.BACKEND])]
    return {
        **asdict(case),
        "microseconds": {
            name: [statistics.median(found) * 1e6, found[int(len(found) * 0.99)] * 1e6]
            for name, found in all_calls.items()
        },
        "calls": {name: len(found) for name, found in all_calls.items()},
        "ratio_to_gloo": statistics.median(ratios),
    }


def _block(run: Callable[[], Any], group: Any, seconds: float) -> int:
    """Calls that take about `seconds`; the first one meets untouched memory."""
    one = statistics.median(_timed(run, group, 4)[1:])
    return max(1, min(2000, int(seconds / one)))


def _timed(run: Callable[[], Any], group: Any, calls: int) -> list[float]:
    """Seconds of each call on its slowest rank."""
    dist.barrier(group)
    seconds = torch.tensor(list(_durations(run, calls)), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.tolist()


def _durations(run: Callable[[], Any], calls: int) -> Iterator[float]:
    for _ in range(calls):
        began = time.perf_counter()
        run()
        yield time.perf_counter() - began


def _operation(case: Case, group: Any) -> Callable[[], Any]:
    if case.operation == STEP:
        return _ddp_step(group)
    count = max(case.bytes // 4, case.ranks)
    whole, part = torch.zeros(count), torch.zeros(count // case.ranks)
    received = torch.zeros(count)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        f"{MANY} all_reduce": lambda: [dist.all_reduce(whole, group=group) for _ in range(MANY)],
    }[case.operation]


def _ddp_step(group: Any) -> Callable[[], Any]:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    module = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.05)
    optimizer, values = torch.optim.SGD(module.parameters(), 1e-3), torch.ones(4, WIDTH)

    def step() -> None:
        module(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main())
