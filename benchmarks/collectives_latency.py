"""Latency of collectives of CPU ranks, the native engine beside Gloo and, where it is installed, Open MPI.

    python -m benchmarks.collectives_latency --json latency.json

Medians and 99th percentiles of single calls from 8 bytes to 1 MiB, the time of 1,000 small all-reduces, and a step of
DDP on a small network. Contenders take turns in blocks of calls, in the same processes; a call takes as long as on its
slowest rank. Ratios are medians of the ratios within rounds. Where `mpirun` and mpi4py are installed they start the
ranks. On a quiet machine it takes at most a minute and a half.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from benchmarks import mpi
from benchmarks.record import header, write_json
from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import engine, registration
from shardwise.launch import environment, loopback
from shardwise.testing.world import WorldPool

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (8, 64, 512, 4096, 32 << 10, 256 << 10, 1 << 20)  # bytes of the full buffer
MANY = 1000  # all-reduces one after the other
WIDTH = 64  # of the network of a DDP step
CONTENDERS = (registration.BACKEND, "gloo", mpi.NAME)
TABLE_WIDTH = 150  # characters; a narrower one would cut figures
STEP = "DDP step"
AIMS = {f"{MANY} all_reduce": 10.0, STEP: 1.3}  # times Gloo's speed


@dataclass(frozen=True)
class Case:
    """One row of the result; `bytes` are those of the full buffer."""

    operation: str
    ranks: int
    bytes: int


@dataclass(frozen=True)
class Contender:
    """What runs a case: the group whose backend does, or MPI's communicator, whose times that group gathers."""

    group: Any
    communicator: Any = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _parse(arguments)
    if mpi.has_started_this():
        return _report(options, _rank_of_mpi(options))
    engine.build()
    if mpi.is_installed():
        words = sys.argv[1:] if arguments is None else arguments
        return mpi.start(max(options.ranks), ["-m", "benchmarks.collectives_latency", *words])
    with WorldPool(preload=("torch", "torch.distributed")) as pool:
        rows = pool.run(max(options.ranks), _rank, _cases(options), options.rounds, options.seconds, timeout=1800)[0]
    return _report(options, rows)


def _cases(options: argparse.Namespace) -> list[Case]:
    cases = [Case(operation, n, size) for n in options.ranks for operation in OPERATIONS for size in options.sizes]
    return cases + [Case(what, n, 8) for n in options.ranks for what in AIMS]


def _report(options: argparse.Namespace, rows: Sequence[dict[str, Any]] | None) -> int:
    """Print and write the rows; other ranks than the first have none."""
    if rows is None:
        return 0
    console = Console(force_terminal=False if mpi.has_started_this() else None)  # mpirun's terminal is none
    console.width = max(console.width, TABLE_WIDTH)
    console.print(render(rows))
    for row in rows:
        if row["operation"] in AIMS:
            console.print(against_aim(row))
    if options.json:
        about = {"mpi": mpi.version() if mpi.has_started_this() else mpi.NOT_INSTALLED}
        write_json(options.json, header(("torch", "shardwise")) | about | {"rounds": options.rounds, "rows": rows})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender has its turn")
    parser.add_argument("--seconds", type=float, default=45, help="time of all blocks of calls, about")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the full buffer")
    return parser.parse_args(arguments)


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table: microseconds of each contender, median and 99th percentile."""
    table = Table(box=None)
    columns = [f"{name}, {what}" for name in CONTENDERS for what in ("median", "p99")]
    for name in ("operation", "ranks", "bytes", *columns, "Gloo / engine", "MPI / engine"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        times = [text for name in CONTENDERS for text in _texts(row["microseconds"].get(name), row)]
        ratios = [_ratio_text(row[f"ratio_to_{name}"], row) for name in CONTENDERS[1:]]
        table.add_row(row["operation"], str(row["ranks"]), str(row["bytes"]), *times, *ratios)
    return table


def _texts(times: Sequence[float] | None, row: Mapping[str, Any]) -> list[str]:
    return (
        [_absent(row)] * 2 if times is None else [f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in times]
    )


def _ratio_text(ratio: float | None, row: Mapping[str, Any]) -> str:
    return _absent(row) if ratio is None else f"{ratio:.1f}"


def _absent(row: Mapping[str, Any]) -> str:
    """Return why a row has no figure of MPI: torch's DDP has no backend for it."""
    return "no backend" if row["operation"] == STEP else mpi.NOT_INSTALLED


def against_aim(row: dict[str, Any]) -> str:
    """Return a line that compares a row's ratio with what is asked of it."""
    aim, ratio = AIMS[row["operation"]], row["ratio_to_gloo"]
    verdict = "met" if ratio >= aim else "missed"
    return f"{row['operation']} on {row['ranks']} ranks: {ratio:.2f} times Gloo's speed; {aim:g} is asked: {verdict}"


# --- on each rank


def _rank_of_mpi(options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Run the cases on a rank that mpirun has started; return the rows on the first."""
    os.environ["GLOO_SOCKET_IFNAME"] = loopback.interface() or ""
    torch.set_num_threads(1)
    environment.detect()
    dist.init_process_group("gloo")
    try:
        rows = _rank(_cases(options), options.rounds, options.seconds)
        return rows if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _rank(cases: list[Case], rounds: int, seconds: float) -> list[dict[str, Any]]:
    registration.register()
    block = seconds / (len(cases) * rounds * len(CONTENDERS))
    rows = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with Progress(console=console, transient=True, auto_refresh=False) as progress:  # no thread beside what is timed
        task = progress.add_task("collectives", total=len(cases))
        for ranks in sorted({case.ranks for case in cases}):
            contenders = _contenders(ranks)
            for case in cases if dist.get_rank() < ranks else ():
                if case.ranks == ranks:
                    rows.append(_row(case, contenders, rounds, block))
                    console.print(_said(rows[-1]))
                    progress.update(task, advance=1, refresh=True)
            dist.barrier()  # the ranks that are not in this size sleep here
    return rows


def _contenders(ranks: int) -> dict[str, Contender]:
    """Return who runs the cases of the first ranks."""
    members = list(range(ranks))
    found = {name: Contender(dist.new_group(members, backend=name)) for name in (registration.BACKEND, "gloo")}
    if mpi.has_started_this():
        found[mpi.NAME] = Contender(found["gloo"].group, mpi.group(ranks))
    return found


def _said(row: dict[str, Any]) -> str:
    medians = ", ".join(f"{name} {times[0]:.4g}" for name, times in row["microseconds"].items())
    return f"{row['operation']}, {row['ranks']} ranks, {row['bytes']} bytes: {medians} microseconds"


def _row(case: Case, contenders: Mapping[str, Contender], rounds: int, seconds: float) -> dict[str, Any]:
    runs = {name: _operation(case, each) for name, each in contenders.items() if _can_run(case, each)}
    groups = {name: contenders[name].group for name in runs}
    calls = {name: _block(run, groups[name], seconds) for name, run in runs.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            times[name].append(_timed(runs[name], groups[name], calls[name]))
    all_calls = {name: sorted(second for block in blocks for second in block) for name, blocks in times.items()}
    return {
        **asdict(case),
        "microseconds": {
            name: [statistics.median(found) * 1e6, found[int(len(found) * 0.99)] * 1e6]
            for name, found in all_calls.items()
        },
        "calls": {name: len(found) for name, found in all_calls.items()},
        **{f"ratio_to_{name}": _ratio(times, name) for name in CONTENDERS[1:]},
    }


def _can_run(case: Case, contender: Contender) -> bool:
    """Return whether there is such a case: DDP needs a backend of torch."""
    return contender.communicator is None or case.operation != STEP


def _ratio(times: Mapping[str, list[list[float]]], name: str) -> float | None:
    """Return the median of a contender's time over the engine's within each round; None without that contender."""
    if name not in times:
        return None
    pairs = zip(times[name], times[registration.BACKEND])
    return statistics.median(statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs)


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


def _operation(case: Case, contender: Contender) -> Callable[[], Any]:
    if case.operation == STEP:
        return _ddp_step(contender.group)
    count = max(case.bytes // 4, case.ranks)
    name = case.operation.removeprefix(f"{MANY} ")
    if contender.communicator is None:
        one = _call(name, count, case.ranks, contender.group)
    else:
        one = mpi.call(name, count, contender.communicator)
    return one if name == case.operation else lambda: [one() for _ in range(MANY)]


def _call(operation: str, count: int, ranks: int, group: Any) -> Callable[[], Any]:
    """Return a call of a backend of torch on a full buffer of fp32."""
    whole, part = torch.zeros(count), torch.zeros(count // ranks)
    received = torch.zeros(count)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
    }[operation]


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
