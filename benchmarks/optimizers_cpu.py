"""A step of each optimizer of this package, and of torch's AdamW, over ranks that shard one model: time and state.

    python -m benchmarks.optimizers_cpu --json result.json

Every optimizer updates the same weights, with gradients that are drawn. A round gives each of them one step in turn, so
that a slow minute hits all; the slowest rank's time counts. `copy` is a plain copy of as many bytes as AdamW in fp32
reads and writes, beside which it is to be seen.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.muon_cpu import run_ranks, sharded_model
from benchmarks.record import header, write_json
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.model.parameter_optimizers import MUON
from shardwise.parallel.model import ParallelModel
from shardwise.training.optimizer import ShardedOptimizer

PACKAGES = ("torch", "transformers", "shardwise")
USUAL = "AdamW"
NAMES = (USUAL, *RECORDS)
ADAMW_BYTES = 28  # of an element: weight, gradient and two moments are read, all but the gradient written


class Measured(NamedTuple):
    """Of one rank: seconds of every round, bytes of state, elements that are updated."""

    seconds: dict[str, list[float]]
    state: dict[str, int]
    elements: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options, by_rank = run_ranks("optimizers_cpu", __doc__, measure, arguments, rounds=9)
    Console(width=None if sys.stdout.isatty() else 120).print(render(by_rank))
    if options.json:
        record = {"options": {**vars(options), "json": None}, "ranks": [rank._asdict() for rank in by_rank]}
        write_json(options.json, {**header(PACKAGES), **record})
    return 0


def measure(layers: int, width: int, rounds: int) -> Measured:
    """Return what this rank measured. Collective."""
    model = sharded_model(layers, width, "fp32")
    optimizers = {name: optimizer_of(model, name) for name in NAMES}
    torch.manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in (*NAMES, "copy")}
    source = torch.ones(ADAMW_BYTES * elements_of(optimizers[USUAL]) // 8)  # in fp32, read once and written once
    target = torch.empty_like(source)
    for _ in range(rounds + 1):  # the first makes state
        for name, optimizer in optimizers.items():
            for _, local in optimizer.locals:
                local.grad = torch.randn_like(local)
            seconds[name].append(timed(optimizer.inner.step))
        seconds["copy"].append(timed(lambda: target.copy_(source)))
    state = {name: optimizer.state_bytes() for name, optimizer in optimizers.items()}
    return Measured({name: each[1:] for name, each in seconds.items()}, state, elements_of(optimizers[USUAL]))


def optimizer_of(model: ParallelModel, name: str) -> ShardedOptimizer:
    """Return an optimizer over all weights of the model, with the options that it has by itself."""
    if name == MUON:  # with AdamW for what it leaves, as the model's plan has it
        return ShardedOptimizer.of(model)
    return ShardedOptimizer(model.tensor_map, OptimizerSection(name=name, learning_rate=1e-4), model=model)


def elements_of(optimizer: ShardedOptimizer) -> int:
    """Return the elements that this rank updates."""
    return sum(local.numel() for _, local in optimizer.locals)


def timed(action: Any) -> float:
    """Return the seconds in which every rank has done it. Collective."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def render(by_rank: list[Measured]) -> Table:
    """Return a table of median times, ratios to AdamW's in the same round, and bytes of state an element."""
    slowest = {
        name: [max(rounds) for rounds in zip(*(rank.seconds[name] for rank in by_rank), strict=True)]
        for name in by_rank[0].seconds
    }
    elements = sum(rank.elements for rank in by_rank)
    table = Table(box=None)
    for heading in ("optimizer", "ms a step, median", "of AdamW's, median of rounds", "state, bytes an element"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for name, values in slowest.items():
        ratio = statistics.median(own / usual for own, usual in zip(values, slowest[USUAL], strict=True))
        state = f"{sum(rank.state[name] for rank in by_rank) / elements:.2f}" if name in NAMES else ""
        table.add_row(name, f"{statistics.median(values) * 1e3:.1f}", f"{ratio:.2f}", state)
    return table


if __name__ == "__main__":
    sys.exit(main())
