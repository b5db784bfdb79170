"""The choice of a collective's algorithm: one table by operation and bytes, given or measured when a group is made.

The table of a group holds for its shape (hosts, ranks on each), its hosts and what carries the bytes. A measurement
walks a short ladder of sizes, all ranks together, and is kept in the user's cache under what it holds for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.cache import cache_root

Algorithm = Literal["flat", "two_level", "direct"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

LADDER = tuple(2**power for power in (14, 18, 22, 24))  # bytes of full buffer
ROUNDS = 2
PATIENCE = 0.5  # seconds of one call after which no larger size is tried
GAIN = 0.95  # of flat's time that another algorithm has to stay under: below that it is noise

TimedCall = Callable[[Operation, Algorithm, Tensor], None]  # one call with a full buffer


@dataclass(frozen=True)
class AlgorithmTable:
    """Operation -> (bytes of full buffer up to which, algorithm), ascending; the last holds for all that is larger."""

    rows: dict[Operation, tuple[tuple[int, Algorithm], ...]]

    @classmethod
    def given(cls, algorithm: str) -> AlgorithmTable:
        """Return a table with one algorithm for everything."""
        return cls({operation: ((0, ALGORITHMS[ALGORITHMS.index(algorithm)]),) for operation in OPERATIONS})

    @classmethod
    def from_json(cls, text: str) -> AlgorithmTable:
        """Return the table that `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        data = json.loads(text)
        rows: dict[Operation, tuple[tuple[int, Algorithm], ...]] = {}
        if not isinstance(data, dict) or set(data) != set(OPERATIONS):
            raise ValueError(f"a table has the operations {', '.join(OPERATIONS)}")
        for operation in OPERATIONS:
            row = tuple((int(size), algorithm) for size, algorithm in data[operation])
            if not row or any(algorithm not in ALGORITHMS for _, algorithm in row):
                raise ValueError(f"{operation} needs sizes with one of {', '.join(ALGORITHMS)}")
            rows[operation] = row
        return cls(rows)

    def to_json(self) -> str:
        return json.dumps(self.rows)

    def algorithm(self, operation: Operation, size: int) -> Algorithm:
        """Return the algorithm of an operation on a full buffer of `size` bytes."""
        row = self.rows[operation]
        return next((algorithm for limit, algorithm in row[:-1] if size <= limit), row[-1][1])

    def describe(self) -> str:
        """`all_gather flat to 64 KiB, then direct; ...`"""
        return "; ".join(f"{operation} {_row(row)}" for operation, row in self.rows.items())


def _row(row: Sequence[tuple[int, Algorithm]]) -> str:
    parts = [f"{algorithm} to {limit / 1024:.0f} KiB" for limit, algorithm in row[:-1]]
    return ", then ".join([*parts, row[-1][1]])


def measure_algorithms(run: TimedCall, control: dist.ProcessGroup, device: torch.device) -> AlgorithmTable:
    """Time every algorithm on the ladder; all ranks of `control` together, the slowest rank's time counts."""
    rows: dict[Operation, tuple[tuple[int, Algorithm], ...]] = {}
    for operation in OPERATIONS:
        best: list[tuple[int, Algorithm]] = []
        for size in LADDER:
            whole = torch.zeros(size // 4 // control.size() * control.size(), device=device)
            seconds = _slowest(_times(run, operation, whole), control, device)
            best.append((size, _fastest(seconds)))
            if max(seconds) > PATIENCE:
                break
        rows[operation] = _merged_rows(best)
    return AlgorithmTable(rows)


def _times(run: TimedCall, operation: Operation, whole: Tensor) -> list[float]:
    """Seconds of each algorithm: the best of interleaved rounds after one that is not counted."""
    taken: list[list[float]] = [[] for _ in ALGORITHMS]
    for _ in range(ROUNDS + 1):
        for algorithm, times in zip(ALGORITHMS, taken, strict=True):
            began = time.perf_counter()
            run(operation, algorithm, whole)
            if accelerator.on_accelerator(whole):
                torch.accelerator.synchronize(whole.device)
            times.append(time.perf_counter() - began)
    return [min(times[1:]) for times in taken]


def _slowest(seconds: list[float], control: dist.ProcessGroup, device: torch.device) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    control.allreduce([times], options).wait()
    return [float(value) for value in times.tolist()]


def _fastest(seconds: Sequence[float]) -> Algorithm:
    flat, *others = seconds
    best = min(others)
    return ALGORITHMS[1 + others.index(best)] if best < GAIN * flat else "flat"


def _merged_rows(best: Sequence[tuple[int, Algorithm]]) -> tuple[tuple[int, Algorithm], ...]:
    """One entry for each run of equal algorithms; a boundary lies at the geometric mean of the sizes beside it."""
    rows: list[tuple[int, Algorithm]] = []
    for (size, algorithm), (larger, other) in itertools.pairwise(best):
        if algorithm != other:
            rows.append((round((size * larger) ** 0.5), algorithm))
    return (*rows, (0, best[-1][1]))


# --- kept


def table_file(holds_for: Sequence[object]) -> Path:
    """Return the file of the table that holds for these hosts, shape and carriers (whatever names them)."""
    text = "\0".join(map(str, (torch.__version__, *LADDER, *holds_for)))
    return cache_root() / "collectives" / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def read_algorithm_table(path: Path) -> AlgorithmTable | None:
    """The table kept there; None where there is none that can be read."""
    try:
        return AlgorithmTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep_algorithm_table(path: Path, table: AlgorithmTable) -> None:
    """Keep `table`, whole or not at all; a cache that cannot be written only costs the next measurement."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(table.to_json(), encoding="utf-8")
        os.replace(beside, path)
