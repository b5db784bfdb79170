"""Step time by the replayed trace and by the closed form, at the published rows that the planner's constants rest on.

    python -m benchmarks.trace_time tests/data/perf-tables/{fms_fsdp,[!f]*}.csv --rows 12 --seed 1 --json result.json

Of the rows whose `fit_role` is `calibrate`, one of each model and table, `--rows` are drawn: their model, layout and
batch as a job of shardwise, in bf16 and uncompiled, on the row's accelerators. Both numbers are of that job under
shardwise's own constants; what was measured of the row is of other software. Traced are two and four blocks of a stage:
each further one takes what those between have taken. Rows with experts or latent attention are left out.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.record import header, write_json
from benchmarks.trace_jobs import DrawnJob
from benchmarks.trace_memory import PACKAGES, in_processes, trace_stages
from shardwise.errors import ShardwiseError
from shardwise.launch.process_group import available_cores
from shardwise.planner.constants.presets import preset_config
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.published.mapping import mapped
from shardwise.planner.published.row import Row, Unmapped
from shardwise.planner.published.tables import read_table
from shardwise.testing.trace.job import JobTrace
from shardwise.testing.trace.program import Operators
from shardwise.testing.trace.rank import traced_microbatches
from shardwise.testing.trace.recorder import UPDATE
from shardwise.testing.trace.roofline import Roofline
from shardwise.testing.trace.step_time import StepTime, step_time

FEW_STAGES = 8  # each is traced
DEPTHS = (2, 4)  # blocks of a stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace the drawn rows, and print both numbers of each."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 240)
    jobs = drawn_rows(options.tables, options.seed, options.rows)
    if not jobs:
        print(f"no row of these tables can be traced: calibrate, dense, of {FEW_STAGES} stages at most")
        return 2
    rows = []
    for row in in_processes(row_of, jobs, options.processes):
        rows.append(row)
        console.print(line(row))
    console.print(render(rows, options))
    if options.json:
        write_json(options.json, {**header(PACKAGES), "seed": options.seed, "rows": rows})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.trace_time", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tables", type=Path, nargs="+", help="CSV files of tests/data/perf-tables")
    parser.add_argument("--seed", type=int, default=1, help="of the draw; default %(default)s")
    parser.add_argument("--rows", type=int, default=12, help="how many; default %(default)s")
    parser.add_argument("--processes", type=int, default=available_cores(), help="that trace at once")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args(arguments)


def drawn_rows(tables: Sequence[Path], seed: int, count: int) -> list[RowJob]:
    """Return rows that are drawn, of one at most of a table's model."""
    draws, found = random.Random(seed), dict[tuple[str, str], list[RowJob]]()
    for table in tables:
        for row in (row for row in read_table(table) if row.text["fit_role"] == "calibrate"):
            job = job_of(table.stem, row)
            if job is not None:
                found.setdefault((table.stem, job.ran.model.name), []).append(job)
    chosen = [draws.choice(jobs) for jobs in found.values()]
    return draws.sample(chosen, min(count, len(chosen)))


class RowJob(NamedTuple):
    """A published row as a job: its name, and what it ran."""

    name: str
    ran: TrainingConfiguration

    @property
    def blocks(self) -> int:
        """Blocks of a stage."""
        return self.ran.model.layers // (self.ran.pipeline * self.ran.virtual)

    def cut(self, blocks: int) -> DrawnJob:
        """Return the job with as many blocks of a stage."""
        ran = self.ran
        shape = replace(ran.model, layers=blocks * ran.pipeline * ran.virtual, counted=None)
        config = preset_config(shape)
        longest = "n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"
        settings = {
            "model": {"config": config | {longest: max(ran.sequence, 2048)}},
            "adapter": {},
            "data": {"sequence_length": ran.sequence},
            "parallel": _parallel(ran),
            "memory": {"activation_checkpointing": "full" if ran.checkpointing != "none" else "none"},
            "training": {"microbatch_size": ran.microbatch, "sequences_per_step": ran.sequences},
        }
        return DrawnJob(0, shape.name, settings, ran.cluster)


def job_of(table: str, row: Row) -> RowJob | None:
    """Return what a row ran as a job; None where it has no such job."""
    try:
        ran = mapped(row).configuration
    except Unmapped:
        return None
    shape, stages = ran.model, ran.pipeline * ran.virtual
    has_job = not (
        shape.stacked
        or shape.latent
        or shape.attended(ran.sequence) < ran.sequence
        or ran.trained < 1
        or ran.cluster.domain
    )
    job = RowJob(f"{table} {row.id}", ran)
    return job if has_job and stages <= FEW_STAGES and job.blocks >= DEPTHS[-1] else None


def _parallel(ran: TrainingConfiguration) -> dict[str, Any]:
    parallel = {
        "tensor_parallel_degree": ran.tensor,
        "pipeline_parallel_degree": ran.pipeline,
        "virtual_pipeline_degree": ran.virtual,
        "context_parallel_degree": ran.context,
    }
    parallel = {key: degree for key, degree in parallel.items() if degree > 1}
    if ran.sequence_parallel:
        parallel["sequence_parallel"] = True
    if ran.zero in (1, 2) and ran.shard > 1:
        return parallel | {"shard_optimizer_state": True}
    # A job counts context ranks among those that shard the state.
    return parallel | {"sharded_data_parallel_degree": ran.shard * ran.context if ran.zero == 3 else 1}


def row_of(job: RowJob) -> dict[str, Any]:
    """Trace a row's job, and return both times with what they are made of; where it is no job of ours, the reason."""
    try:
        return _traced_row(job)
    except ShardwiseError as error:
        return {"job": job.name, "refused": str(error)}


def _traced_row(job: RowJob) -> dict[str, Any]:
    few, more = ({"traced": time, **of} for time, of in map(_traced_at, map(job.cut, DEPTHS)))
    further = (job.blocks - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    seconds = {part: more[part] + further * (more[part] - few.get(part, 0.0)) for part in more}
    known = predict(_configuration(job))
    traced = seconds.pop("traced")
    return {
        "job": f"{job.name}: {job.cut(job.blocks).described()}",
        "traced": traced,
        "closed_form": known.step_seconds,
        "error": known.step_seconds / traced - 1,
        "causes": {cause: value for cause, value in known.seconds.items() if value},
        "parts": seconds,
    }


def _configuration(job: RowJob) -> TrainingConfiguration:
    """Return the job's configuration at full depth, under shardwise's constants."""
    cut = job.cut(DEPTHS[-1])
    configuration = configuration_of(*cut.resolved(), cut.cluster)
    return replace(configuration, model=replace(configuration.model, layers=job.ran.model.layers))


def _traced_at(job: DrawnJob) -> tuple[float, dict[str, float]]:
    trace = trace_stages(job)
    _, facts = job.resolved()
    time = step_time(trace, facts, job.cluster)
    return time.seconds, parts(trace, time, job)


def parts(trace: JobTrace, time: StepTime, job: DrawnJob) -> dict[str, float]:
    """Return the seconds of the slowest rank's step by what they are; `once`: what it waits for behind microbatches."""
    roofline, whole = Roofline.of(job.cluster, trace.plan.dtypes.compute), trace.plan.accumulation
    more = whole / traced_microbatches(trace.plan)
    seconds: Counter[str] = Counter()
    (slowest,) = (rank for rank in trace.ranks if rank.rank == time.slowest)
    for entry in (entry for entry in slowest.program if isinstance(entry, Operators)):
        times = 1.0 if entry.once or entry.phase == UPDATE else more
        for kind, amount in entry.work.items():
            part = UPDATE if entry.phase == UPDATE else f"{kind[0]} {entry.phase}"
            seconds[part] += times * roofline.device_seconds(entry._replace(work={kind: amount}))
    clock = time.clocks[time.slowest]
    worked = clock.worked
    waits = {"collectives": worked.collectives, "launching": clock.launching}
    once = clock.collectives - worked.collectives + clock.apart - worked.apart
    return {
        **seconds,
        **{part: more * value for part, value in waits.items()},
        "messages": worked.messages,
        "once": once,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row in brief."""
    if "refused" in row:
        return f"{row['job']}: not a job of ours: {row['refused']}"
    return f"{row['job']}: {row['closed_form']:.3g} s, traced {row['traced']:.3g} s, {row['error']:+.1%}"


def render(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Both times of each row that has them, and what each is made of."""
    table = Table(title=f"Seed {options.seed}: seconds of a step")
    for column in ("job", "traced", "closed form", "error", "traced, of that", "closed form, of that"):
        table.add_column(column, justify="right" if column in ("traced", "closed form", "error") else "left")
    rows = [row for row in rows if "refused" not in row]
    for row in rows:
        shares = [
            ", ".join(f"{part} {seconds:.3g}" for part, seconds in row[key].items() if seconds > 0.02 * row["traced"])
            for key in ("parts", "causes")
        ]
        table.add_row(row["job"], f"{row['traced']:.3g}", f"{row['closed_form']:.3g}", f"{row['error']:+.1%}", *shares)
    errors = [abs(row["error"]) for row in rows] or [math.nan]
    table.caption = f"{statistics.median(errors):.1%} in the median, {max(errors):.1%} at most."
    return table


if __name__ == "__main__":
    sys.exit(main())
