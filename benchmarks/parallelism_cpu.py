"""Step time of each axis on four CPU ranks: shardwise beside bare torch that does the same by hand, one GPT-NeoX.

    python -m benchmarks.parallelism_cpu --rounds 9 --steps 2 --json result.json

With the pipeline it also measures what share of a step each schedule idles (`benchmarks.pipeline_bubble`). All
contenders of an axis load the same weights, take the same batch, run in the same rounds and must show the same
losses. Ratios are the medians of the ratios within each round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import parallelism_peers as peers
from benchmarks import pipeline_bubble
from benchmarks.harness import Contender, Series, Summary, agree, paired_ratio, run_rounds, start_groups, summarize
from benchmarks.record import header, write_json
from benchmarks.workload import Workload

RANKS = 4
LOSS_TOLERANCE = 1e-4  # same weights and data: only the order of sums differs
BUBBLE_WAIT = 0.1  # seconds of a forward, and of either half of a backward, where a schedule's bubble is measured
PACKAGES = ("torch", "transformers", "shardwise")


@dataclass(frozen=True)
class Axis:
    """One axis: the keys of shardwise's job, its peers, what it needs of the workload, and what its ranks talk over."""

    name: str
    parallel: dict[str, Any]
    peers: tuple[Contender, ...]
    sequence: int | None = None
    batch: int | None = None
    backend: str = "gloo"
    reshard: bool = False  # gathered parameters are freed between forward and backward
    save_model: Callable[[Workload, Path], None] = peers.save_model

    @property
    def ours(self) -> Contender:
        return Contender(
            "shardwise",
            f"benchmarks.contenders.shardwise_contender:{self.name}_axis",
            "shardwise",
            ", ".join(f"{key} {value}" for key, value in self.parallel.items()),
            self.backend,
        )


AXES = {
    axis.name: axis
    for axis in (
        Axis("tensor", {"tensor_parallel_degree": RANKS}, (peers.TENSOR, peers.NATIVE)),
        Axis("pipeline", {"pipeline_parallel_degree": RANKS}, (peers.PIPELINE,)),
        Axis("context", {"context_parallel_degree": RANKS}, (peers.ULYSSES, peers.CONTEXT), sequence=2048, batch=1),
        Axis("shard", {"sharded_data_parallel_degree": RANKS}, (peers.SHARD,)),
    )
}


def main(arguments: Sequence[str] | None = None, axes: Mapping[str, Axis] = AXES) -> int:
    """Run the benchmark of `axes`; 1 when losses disagree or a contender did not run."""
    options = _parse(arguments, axes)
    console = Console(width=None if sys.stdout.isatty() else 130)
    shape, runs, problems = Workload(batch=8), [], []
    for name in options.axes:
        axis = axes[name]
        workload = Workload(
            options.layers, options.width, options.heads, options.vocabulary,
            options.sequence or axis.sequence or shape.sequence, options.batch or axis.batch or shape.batch,
            reshard=axis.reshard,
        )  # fmt: skip
        series = measure(axis, workload, options, console)
        run = summarize_axis(axis, series, workload, options.steps)
        console.print(render(run))
        runs.append(run)
        problems += check(run)
    bubbles: list[dict[str, Any]] = []
    if "pipeline" in options.axes and options.bubble_rounds:
        bubbles = pipeline_bubble.run(RANKS, 2 * RANKS, options.bubble_rounds, BUBBLE_WAIT, pipeline_bubble.SCHEDULES)
        console.print(pipeline_bubble.render(bubbles, RANKS, 2 * RANKS, BUBBLE_WAIT))
    if options.json:
        write_json(options.json, {**header(PACKAGES), "runs": runs, "bubbles": bubbles, "problems": problems})
        console.print(f"Written to {options.json}")
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None, axes: Mapping[str, Axis]) -> argparse.Namespace:
    shape = Workload()
    parser = argparse.ArgumentParser(prog="benchmarks.parallelism_cpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--axes", nargs="+", choices=axes, default=list(axes))
    parser.add_argument("--rounds", type=int, default=9, help="rounds; each gives every contender one turn")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of one turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each contender before the first round")
    parser.add_argument(
        "--bubble-rounds", type=int, default=3, help="steps of each schedule, of which the median is said"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    for name in ("layers", "width", "heads", "vocabulary"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(shape, name), help="of the model; default %(default)s"
        )
    parser.add_argument("--sequence", type=int, help=f"tokens; default {shape.sequence}, 2048 for context")
    parser.add_argument("--batch", type=int, help="sequences of all ranks; default 8, 1 for context")
    return parser.parse_args(arguments)


def measure(axis: Axis, workload: Workload, options: argparse.Namespace, console: Console) -> list[Series]:
    """All rounds of one axis."""
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-model-") as directory:
        axis.save_model(workload, Path(directory))
        arguments = (workload, Path(directory))
        groups, series = start_groups([axis.ours, *axis.peers], arguments, RANKS, threads, console.log)
        try:
            run_rounds(
                groups, series, options.warmup, options.rounds, options.steps,
                lambda number: console.log(f"{axis.name}: round {number + 1} of {options.rounds}"),
            )  # fmt: skip
        finally:
            for group in groups.values():
                group.close()
    return series


def summarize_axis(axis: Axis, series: list[Series], workload: Workload, steps: int) -> dict[str, Any]:
    """The numbers of one axis, ready for JSON."""
    ours = series[0]
    rows = []
    for entry in series:
        row: dict[str, Any] = {"contender": entry.contender.name, "settings": entry.contender.settings}
        if entry.skipped:
            rows.append({**row, "skipped": entry.skipped})
            continue
        row |= {
            "seconds_per_step": vars(summarize([seconds / steps for seconds in entry.seconds])),
            "core_seconds_per_step": summarize(entry.cpu_seconds).median / steps,
            "first_loss": entry.losses[0],
            "last_loss": entry.losses[-1],
        }
        if not ours.skipped:
            row["shardwise_ratio"] = vars(paired_ratio(ours.seconds, entry.seconds))
        rows.append(row)
    return {"axis": axis.name, "backend": axis.backend, "workload": workload.to_dict(), "rows": rows}


def check(run: dict[str, Any]) -> list[str]:
    """What makes the numbers unusable, in sentences."""
    problems = [
        f"{run['axis']}: {row['contender']} did not run: {row['skipped'].strip().splitlines()[-1]}"
        for row in run["rows"]
        if "skipped" in row
    ]
    for key in ("first_loss", "last_loss"):
        values = {row["contender"]: row[key] for row in run["rows"] if key in row}
        if not agree(values.values(), LOSS_TOLERANCE if key == "first_loss" else 100 * LOSS_TOLERANCE):
            problems.append(f"{run['axis']}: {key} disagrees: {values}")
    return problems


def render(run: dict[str, Any]) -> Table:
    """The table of one axis."""
    shape = run["workload"]
    table = Table(
        title=f"{run['axis']} {RANKS}: {shape['batch']} sequences of {shape['sequence']} tokens, fp32, "
        f"{run['backend']}, {len(os.sched_getaffinity(0))} cores"
    )
    for column in ("contender", "seconds a step", "shardwise ÷ it (speed)", "core s/step", "first loss", "last loss"):
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for row in run["rows"]:
        if "skipped" in row:
            table.add_row(row["contender"], "skipped")
            continue
        table.add_row(
            row["contender"],
            _spread(row["seconds_per_step"]),
            _spread(row["shardwise_ratio"]) if "shardwise_ratio" in row else "",
            f"{row['core_seconds_per_step']:.2f}",
            f"{row['first_loss']:.6f}",
            f"{row['last_loss']:.6f}",
        )
    return table


def _spread(values: dict[str, float]) -> str:
    summary = Summary(**values)
    return f"{summary.median:.3f} ({summary.low:.3f} {summary.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
