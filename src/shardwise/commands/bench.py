"""`shardwise bench collectives`: the native engine beside Gloo on this host, in the same processes and minutes.

Ranks are started once; a group of each size is a subset of them while the others sleep. A round runs every contender
once, so a slow minute hits both; the slowest rank's time counts. Ratios are medians of the ratios within rounds. The
copy limit is what the operation has to move, at the fastest rate at which plain copies on all cores ran in any round:
(n+1)·M bytes for all-gather and reduce-scatter, 2n·M for all-reduce, M being the full buffer of n ranks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import engine, registration
from shardwise.commands.arguments import check_writable
from shardwise.launch.process_group import available_cores
from shardwise.testing.world import WorldPool
from shardwise.words import output_console

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
CONTENDERS = (registration.BACKEND, "gloo")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL, LARGE = 64 << 10, 64 << 20
FEW, MANY = 3, 9  # rounds of a case: at least, and at most
REPEATS_BELOW = 1 << 20  # bytes; smaller operations run REPEATS times in a round
REPEATS = 20
CASE_SECONDS = 1.5  # after which a case ends with the rounds it has


@dataclass(frozen=True)
class Case:
    """One row to be: `bytes` are those of the full buffer."""

    operation: str
    ranks: int
    bytes: int
    dtype: str = "float32"

    @property
    def moved(self) -> int:
        """Bytes that have to be copied by all ranks together."""
        return self.bytes * (2 * self.ranks if self.operation == "all_reduce" else self.ranks + 1)


STANDARD = [
    Case(operation, ranks, size, dtype)
    for ranks in (2, 4, 8)
    for size, dtype in ((SMALL, "float32"), (LARGE, "float32"), *(((LARGE, "bfloat16"),) if ranks == 4 else ()))
    for operation in OPERATIONS
]


def run_collectives(where: str | None, cases: Sequence[Case] = STANDARD, say: Callable[[str], None] = print) -> int:
    """Measure, print the table and, with `where`, write the rows as JSON.

    Raises:
        MachineError: the engine cannot be built here.
        OutputError: `where` cannot be written; told before anything is measured.
    """
    if where is not None:
        check_writable(Path(where))
    engine.build(say)
    rows = measure_collectives(cases)
    output_console().print(render(rows))
    if where is not None:
        Path(where).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


def measure_collectives(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows of `cases`, in the JSON's form."""
    ranks, cores = max(case.ranks for case in cases), available_cores()
    with WorldPool(limit=max(ranks, cores), preload=("torch", "torch.distributed")) as pool:
        times, copies = pool.run(max(ranks, cores), _rank, list(cases), cores, timeout=600)[0]
    rate = max(copies)
    return [_row(case, rounds, rate) for case, rounds in zip(cases, times, strict=True)]


def _row(case: Case, rounds: list[dict[str, float]], rate: float) -> dict[str, Any]:
    seconds = {name: statistics.median(times[name] for times in rounds) for name in CONTENDERS}
    return {
        **asdict(case),
        "seconds": seconds,
        "ratio_to_gloo": statistics.median(times["gloo"] / times[registration.BACKEND] for times in rounds),
        "share_of_copy_limit": case.moved / rate / seconds[registration.BACKEND],
    }


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(box=None)
    for name in ("operation", "ranks", "size", "dtype", "engine, ms", "Gloo, ms", "ratio", "of limit"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        times = [f"{row['seconds'][name] * 1e3:.4g}" for name in CONTENDERS]
        size = f"{row['bytes'] >> 10} KiB" if row["bytes"] < 1 << 20 else f"{row['bytes'] >> 20} MiB"
        ratios = (f"{row['ratio_to_gloo']:.1f}", f"{row['share_of_copy_limit']:.2f}")
        table.add_row(row["operation"], str(row["ranks"]), size, row["dtype"], *times, *ratios)
    return table


# --- on each rank


def _rank(cases: list[Case], cores: int) -> tuple[list[list[dict[str, float]]], list[float]]:
    """Seconds of each round of each case by contender, and the rates of plain copies in bytes/s."""
    registration.register()
    sizes = sorted({case.ranks for case in cases} | {cores})
    groups = {n: {name: dist.new_group(list(range(n)), backend=name) for name in CONTENDERS} for n in sizes}
    times, copies = [], []
    for n in sizes:
        if dist.get_rank() < n:
            times += [(case, list(_rounds(case, groups[n]))) for case in cases if case.ranks == n]
        if dist.get_rank() < cores:
            copies += [_copy_rate(groups[cores]["gloo"], cores) for _ in range(FEW)]
        dist.barrier()  # the ranks that are not in this size sleep here
    seconds_by_case = dict(times)
    return [seconds_by_case.get(case, []) for case in cases], copies


def _rounds(case: Case, groups: dict[str, Any]) -> Iterator[dict[str, float]]:
    operations = {name: _operation(case, group) for name, group in groups.items()}
    repeats = REPEATS if case.bytes < REPEATS_BELOW else 1
    for name in CONTENDERS:  # the first run meets untouched memory
        operations[name]()
    began, rounds, late = time.monotonic(), 0, torch.zeros(1)
    while rounds < FEW or (rounds < MANY and not late.item()):
        names = CONTENDERS if rounds % 2 else CONTENDERS[::-1]
        yield {name: _timed(operations[name], groups[name], repeats) for name in names}
        rounds += 1
        late.fill_(time.monotonic() - began > CASE_SECONDS)
        dist.broadcast(late, 0, groups["gloo"])  # all ranks make the same number of rounds


def _timed(run: Callable[[], Any], group: Any, repeats: int) -> float:
    """Seconds of one run on the slowest rank."""
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = torch.tensor((time.perf_counter() - began) / repeats)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()


def _operation(case: Case, group: Any) -> Callable[[], Any]:
    dtype = DTYPES[case.dtype]
    count = case.bytes // dtype.itemsize
    whole, part = torch.ones(count, dtype=dtype), torch.ones(count // case.ranks, dtype=dtype)
    if case.operation == "all_gather":
        return lambda: all_gather_single(whole, part, group=group)
    if case.operation == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole, group=group)
    whole.zero_()  # so that repeated sums stay finite
    return lambda: dist.all_reduce(whole, group=group)


def _copy_rate(group: Any, cores: int) -> float:
    """Bytes copied a second by all cores together, each copying buffers of its own."""
    source, target = torch.ones(LARGE, dtype=torch.uint8), torch.ones(LARGE, dtype=torch.uint8)
    target.copy_(source)
    return cores * LARGE / _timed(lambda: target.copy_(source), group, 3)
