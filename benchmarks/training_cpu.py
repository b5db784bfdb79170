"""Tokens/s of shardwise, bare FSDP2, DeepSpeed ZeRO-3 and Accelerate FSDP2: the same GPT-2 on CPU ranks.

    python -m benchmarks.training_cpu --ranks 2 4 --rounds 9 --steps 2 --json result.json

All talk over Gloo; shardwise runs a second time over its own backend, the engine, which its `auto` takes. All load the
same weights, see the same token ids, run in the same rounds, and must show the same losses. Ratios are the medians of
the ratios within each round. The physical limit is the rate of `torch.mm` over the model's own shapes on all cores,
measured before every round (the fastest counts).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contenders.shardwise_contender import ON_ENGINE, SHARDWISE
from benchmarks.harness import Contender, Series, Summary, agree, paired_ratio, run_rounds, start_groups, summarize
from benchmarks.peers import ACCELERATE, DEEPSPEED, FSDP2
from benchmarks.record import header, write_json
from benchmarks.workload import Workload, product_rate, save_model

CONTENDERS = {
    "shardwise": SHARDWISE,
    "engine": ON_ENGINE,
    "fsdp2": FSDP2,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}
OURS = {"shardwise_ratio": SHARDWISE, "engine_ratio": ON_ENGINE}
FIRST_LOSS_TOLERANCE = 1e-4  # same weights and data: only the order of sums differs
LATER_LOSS_TOLERANCE = 1e-2  # after the warm-up steps: another optimizer or another gradient scale is seen here
IDLE_SHARE, IDLE_SECONDS = 0.05, 1.0  # more of a core than this, for this long, is not waiting
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "shardwise")


def main(
    arguments: Sequence[str] | None = None,
    contenders_by_name: Mapping[str, Contender] = CONTENDERS,
    frozen: bool = False,
) -> int:
    """Run the benchmark; 1 when losses disagree or a contender that must run did not.

    Args:
        frozen: whether the contenders train adapters of frozen weights.
    """
    options = _parse(arguments, contenders_by_name)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports deepspeed where it is installed
    console = Console(width=None if sys.stdout.isatty() else 130)
    workload = Workload(
        options.layers, options.width, options.heads, options.vocabulary, options.sequence, options.batch,
        reshard=options.reshard, frozen=frozen,
    )  # fmt: skip
    contenders = [contenders_by_name[name] for name in options.contenders]
    runs, problems = [], []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-model-") as directory:
        save_model(workload, Path(directory))
        for ranks in options.ranks:
            series, limit = _measure(contenders, workload, Path(directory), ranks, options, console)
            run = summarize_run(series, workload, ranks, options.steps, options.warmup, limit)
            console.print(render(run))
            runs.append(run)
            problems += check(run)
    if options.json:
        write_json(
            options.json, {**header(PACKAGES), "workload": workload.to_dict(), "runs": runs, "problems": problems}
        )
        console.print(f"Written to {options.json}")
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None, contenders: Mapping[str, Contender]) -> argparse.Namespace:
    shape = Workload()
    parser = argparse.ArgumentParser(prog="benchmarks.training_cpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="worker counts, one table each")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; each gives every contender one turn")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of one turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each contender before the first round")
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=list(contenders))
    parser.add_argument(
        "--reshard",
        action="store_true",
        help="all free gathered parameters between forward and backward; default: none",
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    for name in ("layers", "width", "heads", "vocabulary", "sequence", "batch"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(shape, name), help="of the model; default %(default)s"
        )
    return parser.parse_args(arguments)


def _measure(
    contenders: list[Contender],
    workload: Workload,
    directory: Path,
    ranks: int,
    options: argparse.Namespace,
    console: Console,
) -> tuple[list[Series], float]:
    """All rounds at one number of ranks; also the physical limit in FLOP/s."""
    cores = len(os.sched_getaffinity(0))
    limits: list[float] = []

    def between(number: int) -> None:
        console.log(f"{ranks} ranks: round {number + 1} of {options.rounds}")
        limits.append(product_rate(workload, workload.tokens * ranks, cores))

    groups, series = start_groups(
        contenders, (workload, directory), ranks, max(1, cores // ranks), lambda text: console.log(text)
    )
    try:
        run_rounds(groups, series, options.warmup, options.rounds, options.steps, between)
    finally:
        for group in groups.values():
            group.close()
    return series, max(limits)


def summarize_run(
    series: list[Series], workload: Workload, ranks: int, steps: int, warmup: int, limit: float
) -> dict[str, Any]:
    """The numbers of one table, ready for JSON."""
    tokens = workload.tokens * ranks * steps
    ran = {entry.contender.name: entry for entry in series if not entry.skipped}
    rows = []
    for entry in series:
        row: dict[str, Any] = {"contender": entry.contender.name, "settings": entry.contender.settings}
        if entry.skipped:
            rows.append({**row, "skipped": entry.skipped})
            continue
        speed = summarize([tokens / seconds for seconds in entry.seconds])
        row |= {
            "tokens_per_second": vars(speed),
            "share_of_limit": speed.median * workload.flops_per_token / limit,
            "core_seconds_per_step": summarize(entry.cpu_seconds).median / steps,
            "first_loss": entry.losses[0],
            "loss_after_warmup": entry.losses[warmup - 1],
            "last_loss": entry.losses[-1],
            "seconds_per_turn": entry.seconds,
            "idle_share": entry.idle_share,
            "idle_cpu_seconds": entry.idle_cpu_seconds,
        }
        for key, ours in OURS.items():
            if ours.name in ran:
                row[key] = vars(paired_ratio(ran[ours.name].seconds, entry.seconds))
        rows.append(row)
    return {"ranks": ranks, "steps": steps, "warmup": warmup, "limit_flops_per_second": limit, "rows": rows}


def check(run: dict[str, Any]) -> list[str]:
    """What makes the run's numbers unusable, in sentences."""
    problems = []
    ran = [row for row in run["rows"] if "skipped" not in row]
    for key, tolerance in (("first_loss", FIRST_LOSS_TOLERANCE), ("loss_after_warmup", LATER_LOSS_TOLERANCE)):
        values = {row["contender"]: row[key] for row in ran}
        if not agree(values.values(), tolerance):
            problems.append(f"{run['ranks']} ranks: {key} disagrees by more than {tolerance}: {values}")
    for row in ran:
        if row["idle_share"] > IDLE_SHARE and row["idle_cpu_seconds"] > IDLE_SECONDS:
            problems.append(
                f"{run['ranks']} ranks: {row['contender']} used {row['idle_share']:.2f} cores while waiting"
            )
    for row in run["rows"]:
        if "skipped" in row and row["contender"] in (SHARDWISE.name, ON_ENGINE.name, FSDP2.name):
            problems.append(f"{run['ranks']} ranks: {row['contender']} did not run: {row['skipped']}")
    return problems


def render(run: dict[str, Any]) -> Table:
    """The table of one number of ranks."""
    limit = run["limit_flops_per_second"] / 1e9
    caption = (
        "Median (lower, upper quartile) of the rounds. Limit: torch.mm of the same shapes on all cores, "
        f"{limit:.0f} GFLOP/s."
    )
    skipped: list[str] = []
    table = Table(title=f"{run['ranks']} ranks on {len(os.sched_getaffinity(0))} cores, fp32")
    for column in (
        "contender",
        "tokens/s",
        "shardwise ÷ it",
        "engine ÷ it",
        "of limit",
        "core s/step",
        "first loss",
        "last loss",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for row in run["rows"]:
        if "skipped" in row:
            table.add_row(row["contender"], "skipped")
            reason = row["skipped"].strip().splitlines()
            skipped.append(f"{row['contender']} skipped: {reason[0]}" + (f" … {reason[-1]}" if reason[1:] else ""))
            continue
        table.add_row(
            row["contender"],
            _spread(row["tokens_per_second"], "{:.0f}"),
            *(_spread(row[key], "{:.3f}") if key in row else "" for key in OURS),
            f"{row['share_of_limit']:.1%}",
            f"{row['core_seconds_per_step']:.2f}",
            f"{row['first_loss']:.6f}",
            f"{row['last_loss']:.6f}",
        )
    if skipped:
        skipped.append("A table proves nothing about a contender that was skipped.")
    table.caption = Text("\n".join([caption, *skipped]))
    return table


def _spread(values: dict[str, float], form: str) -> str:
    summary = Summary(**values)
    return f"{form.format(summary.median)} ({form.format(summary.low)} {form.format(summary.high)})"


if __name__ == "__main__":
    sys.exit(main())
