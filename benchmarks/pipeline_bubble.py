"""How long pipeline ranks idle in each schedule, measured on real ranks, beside the formula that the planner uses.

    python -m benchmarks.pipeline_bubble --ranks 4 --microbatches 8 --rounds 3 --json result.json

`benchmarks.parallelism_cpu` prints the same table beside the pipeline's step times.

The stages, schedules and messages are those of training; what a stage computes is a wait of fixed length, for a forward
and for either half of a backward, so that ranks which share cores do not slow each other down. It measures the order
of a schedule and what its messages cost on top, not a model. Of each round the bubble is 1 - busy / (ranks x time from
the first forward's start to the last end), busy being the measured length of all waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.record import header, write_json
from shardwise.job.schema import Job
from shardwise.kernels.linear import WeightGradients
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import World, resolve
from shardwise.planner.formulas.schedule import bubble
from shardwise.testing.world import WorldPool

SCHEDULES = {
    "simple": {"pipeline": "simple"},
    "interleaved": {"pipeline": "interleaved"},
    "interleaved, 2 stages a rank": {"pipeline": "interleaved", "virtual_pipeline_degree": 2},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "zero_bubble, 2 stages a rank": {"pipeline": "zero_bubble", "virtual_pipeline_degree": 2},
    "zbv": {"pipeline": "zbv"},
    "dualpipev": {"pipeline": "dualpipev"},
}


class Wait(NamedTuple):
    """One wait: what for, of which stage, from when to when (seconds of the host's monotonic clock)."""

    kind: str
    stage: int
    start: float
    end: float


class _Waits:
    """Waits in the place of computation, and when each was."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.done = seconds, list[Wait]()

    def wait(self, kind: str, stage: int) -> None:
        start = time.monotonic()
        time.sleep(self.seconds)
        self.done.append(Wait(kind, stage, start, time.monotonic()))


class _Stage(torch.autograd.Function):
    """The identity, which takes a wait in forward and two in backward, or leaves the second for later."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, waits: _Waits, stage: int, later: WeightGradients | None) -> Tensor:
        ctx.waits, ctx.stage, ctx.later = waits, stage, later
        waits.wait("forward", stage)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        waits, stage = ctx.waits, ctx.stage
        waits.wait("backward", stage)
        if ctx.later is None:
            waits.wait("weights", stage)
        else:
            ctx.later.pending.append(lambda: waits.wait("weights", stage))
        return gradients[0], None, None, None


def job_of(ranks: int, microbatches: int, parallel: dict[str, Any]) -> Job:
    """A model of two tiny blocks a rank; a microbatch is one sequence."""
    config = {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 2 * ranks, "num_attention_heads": 2,
              "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 8}  # fmt: skip
    return Job.model_validate({
        "model": {"config": config},
        "data": {"sequence_length": 8},
        "parallel": {"device": "cpu", "pipeline_parallel_degree": ranks, **parallel},
        "training": {"sequences_per_step": microbatches, "gradient_accumulation": microbatches},
    })  # fmt: skip


def measure(job: Job, rounds: int, seconds: float) -> tuple[float, list[list[Wait]]]:
    """On one rank: the formula's bubble, and the waits of each round, after one that opens the connections."""
    facts = discover(build_model(job), job)
    plan = resolve(job, World(dist.get_world_size(), "cpu", dist.get_world_size()), facts)
    layout = Layout.from_plan(plan, dist.get_rank())
    model = parallelize(build_model(job), plan, layout, facts, torch.device("cpu"))
    found = [_one_round(model, seconds) for _ in range(1 + rounds)]
    return bubble(plan), found[1:]


def _one_round(model: ParallelModel, seconds: float) -> list[Wait]:
    waits, plan = _Waits(seconds), model.plan
    start = torch.zeros(plan.microbatch, plan.positions, model.facts.hidden_size, requires_grad=True)

    def work(number: int, index: int, arrived: Tensor | None) -> Tensor:
        part = model.parts[number]
        assert part.boundary is not None
        stage, deferred = part.boundary.stage, part.weight_gradients
        output: Tensor = _Stage.apply(start if arrived is None else arrived, waits, stage, deferred)
        return output.sum() if part.is_last else output

    dist.barrier()
    model.drive(work, plan.accumulation, backward=True)
    return waits.done


def measured_bubble(ranks: Sequence[Sequence[Wait]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they waited for each other."""
    everything = [wait for rank in ranks for wait in rank]
    whole = max(wait.end for wait in everything) - min(wait.start for wait in everything)
    return 1 - sum(wait.end - wait.start for wait in everything) / (len(ranks) * whole)


def run(ranks: int, microbatches: int, rounds: int, seconds: float, names: Iterable[str]) -> list[dict[str, Any]]:
    """A row for each schedule, ready for JSON."""
    rows = []
    with WorldPool(limit=ranks, timeout=600.0) as pool:
        for name in names:
            found = pool.run(ranks, measure, job_of(ranks, microbatches, SCHEDULES[name]), rounds, seconds)
            measured = [measured_bubble(each) for each in zip(*(waits for _, waits in found), strict=True)]
            rows.append({
                "schedule": name, "formula": found[0][0], "measured": median(measured), "least": min(measured),
                "most": max(measured), "waits": sum(len(waits[0]) for _, waits in found),
            })  # fmt: skip
    return rows


def render(rows: Sequence[dict[str, Any]], ranks: int, microbatches: int, seconds: float) -> Table:
    """The bubble by formula and as measured."""
    table = Table(
        title=f"bubble of {ranks} pipeline ranks, {microbatches} microbatches, waits of {1000 * seconds:g} ms"
    )
    for column in ("schedule", "formula", "measured, median (least most)"):
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    for row in rows:
        spread = f"{row['measured']:.1%} ({row['least']:.1%} {row['most']:.1%})"
        table.add_row(row["schedule"], f"{row['formula']:.1%}", spread)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; always 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline_bubble", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="a multiple of the ranks, at least twice as many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of each wait; default %(default)s")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    options = parser.parse_args(arguments)
    seconds = options.milliseconds / 1000
    rows = run(options.ranks, options.microbatches, options.rounds, seconds, options.schedules)
    Console(width=None if sys.stdout.isatty() else 130).print(
        render(rows, options.ranks, options.microbatches, seconds)
    )
    if options.json:
        settings = {name: getattr(options, name) for name in ("ranks", "microbatches", "rounds", "milliseconds")}
        write_json(options.json, {**header(("torch", "shardwise")), **settings, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
