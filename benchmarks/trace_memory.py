"""Peak memory and step time of drawn full-size jobs: what the trace of real code says, beside the closed forms.

    python -m benchmarks.trace_memory --seed 1 --jobs 20 --json result.json

Each job is drawn by seed and number (`trace_jobs`); the first rank of each of its stages is traced at full size, as
`shardwise plan JOB --trace` does it. Printed is the rank whose closed form departs most, and of whose bytes: those of
weights, of the optimizer's state, of gradients with the buffers of sharding, or of activations with temporaries.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import header, write_json
from benchmarks.trace_jobs import DrawnJob, drawn_job
from shardwise.launch.process_group import available_cores
from shardwise.parallel.layout import Layout
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.trace.job import JobTrace
from shardwise.testing.trace.kinds import first_of_stage, ranks_of_kinds
from shardwise.testing.trace.rank import RankTrace, trace_rank
from shardwise.testing.trace.step_time import step_time
from shardwise.testing.trace.storages import ACTIVATIONS, GRADIENTS, SHARDING, STATE, TEMPORARIES, WEIGHTS
from shardwise.testing.trace.traced_batch import traced_batch

PACKAGES = ("torch", "transformers", "shardwise")
GIB = 2**30
# Whose bytes -> owners of the trace, and causes of the closed form.
BOTH = {
    "weights": ((WEIGHTS,), ("parameters", "reference", "ema")),
    "state": ((STATE,), ("optimizer",)),
    "sharding": ((GRADIENTS, SHARDING), ("gradients", "gathered", "communication")),
    "activations": ((ACTIVATIONS, TEMPORARIES), ("activations", "working", "logits", "unsharded_gradients")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace the drawn jobs, and print both numbers of each."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 240)
    rows = []
    numbers = options.numbers or range(options.jobs)
    for row in in_processes(partial(row_of, options.seed), numbers, options.processes):
        rows.append(row)
        console.print(line(row))
    console.print(render(rows, options.seed))
    if options.json:
        write_json(options.json, {**header(PACKAGES), "seed": options.seed, "rows": rows})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.trace_memory", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the draws; default %(default)s")
    parser.add_argument("--jobs", type=int, default=20, help="how many; default %(default)s")
    parser.add_argument("--numbers", type=int, nargs="+", help="these alone")
    parser.add_argument("--processes", type=int, default=available_cores(), help="that trace at once")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args(arguments)


def in_processes(
    row_of: Callable[[Any], dict[str, Any]], jobs: Sequence[Any], processes: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of each job, each traced by a process of its own: torch does not forget a simulated device."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(row_of, jobs)


def row_of(seed: int, number: int) -> dict[str, Any]:
    """Trace job `number` of a seed's, and return its row."""
    job = drawn_job(seed, number)
    trace = trace_stages(job)
    _, facts = job.resolved()
    time = step_time(trace, facts, job.cluster)
    return {
        "number": number,
        "job": job.described(),
        "settings": job.settings,
        "ranks": [_both(rank) for rank in trace.ranks],
        "seconds": {"traced": time.seconds, "closed_form": time.closed_form},
    }


def trace_stages(job: DrawnJob) -> JobTrace:
    """Trace the first rank of each stage."""
    plan, facts = job.resolved()
    kinds, microbatch = ranks_of_kinds(Layout.from_plan(plan, 0)), traced_batch(plan)
    traces = tuple(
        trace_rank(plan, facts, rank, microbatch) for kind, rank in kinds.items() if kind == first_of_stage(kind)
    )
    planned = tuple(estimate(plan, facts, pipeline=trace.coordinates["pipeline"]) for trace in traces)
    return JobTrace(plan, traces, planned, None)


def _both(rank: RankTrace) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "traced": rank.peak,
        "closed_form": rank.closed_form.total,
        "error": rank.error,
        "moment": rank.closed_form.moment,
        "by_owner": by_owner(rank.owners, rank.closed_form),
        "owners": rank.owners,
        "causes": rank.closed_form.causes(),
    }


def by_owner(owners: dict[str, int], closed_form: MemoryEstimate) -> dict[str, float]:
    """Return the bytes by which the closed form is above the trace, by whose they are."""
    causes = closed_form.causes()
    return {
        name: sum(causes[cause] for cause in planned) - sum(owners[owner] for owner in traced)
        for name, (traced, planned) in BOTH.items()
    }


def worst(row: dict[str, Any]) -> dict[str, Any]:
    """Return the rank of a row whose closed form departs most."""
    return max(row["ranks"], key=lambda rank: abs(rank["error"]))


def line(row: dict[str, Any]) -> str:
    """Return a row in brief."""
    rank, seconds = worst(row), row["seconds"]
    known = "" if seconds["closed_form"] is None else f"; {seconds['closed_form'] / seconds['traced'] - 1:+.1%} of time"
    return f"{row['number']}: {row['job']}: rank {rank['rank']} {rank['error']:+.1%} of memory{known}"


def render(rows: Sequence[dict[str, Any]], seed: int) -> Table:
    """Both numbers of each job."""
    table = Table(title=f"Seed {seed}: a rank's peak in GiB and a step's seconds, traced and by the closed forms")
    columns = (
        "",
        "job",
        "rank",
        "traced",
        "closed form",
        "error",
        "most by",
        "GiB",
        "s traced",
        "s closed form",
        "error",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("job", "most by") else "right")
    for row in rows:
        rank, seconds = worst(row), row["seconds"]
        owner, size = max(rank["by_owner"].items(), key=lambda item: abs(item[1]))
        known = seconds["closed_form"]
        times = ("", "") if known is None else (f"{known:.2f}", f"{known / seconds['traced'] - 1:+.1%}")
        table.add_row(
            str(row["number"]), row["job"], str(rank["rank"]), f"{rank['traced'] / GIB:.2f}",
            f"{rank['closed_form'] / GIB:.2f}", f"{rank['error']:+.1%}", owner, f"{size / GIB:+.2f}",
            f"{seconds['traced']:.2f}", *times,
        )  # fmt: skip
    errors = [abs(worst(row)["error"]) for row in rows]
    table.caption = f"Of memory {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most."
    return table


if __name__ == "__main__":
    sys.exit(main())
