"""`shardwise plan evaluate` and `shardwise plan calibrate`: options and work, for the command line to register."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.errors import ConfigError, OutputError
from shardwise.words import output_console

SHOWN = 40  # rows printed of a table without --all


def evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE.csv", help="tables of measurements; see docs/explanations/planner.md"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help=f"print every row, not the {SHOWN} with the largest errors")
    parser.add_argument(
        "--probe-rows",
        type=_whole,
        default=0,
        metavar="N",
        help="fit what tells stacks apart on N rows of each and score the rest",
    )
    parser.add_argument("--probe-seed", type=_whole, default=0, metavar="S", help="seed with which they are drawn")
    parser.add_argument(
        "--leave-one-stack-out",
        action="store_true",
        help="score each stack with constants refitted without any of its rows",
    )
    parser.add_argument(
        "--leave-one-table-out",
        action="store_true",
        help="score each table with constants refitted without it, its software and its models",
    )
    parser.add_argument("--constants", metavar="FILE", help="constants of `shardwise plan calibrate`; unset: shipped")


def calibrate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE.csv", help="tables whose `calibrate` rows are fitted on; none: this machine"
    )
    parser.add_argument("--output", metavar="FILE", help="write the constants, for --constants; unset: print them")


def run_evaluate(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.planner.constants.inventory import read_constants
    from shardwise.planner.published.evaluate import error_summary, evaluate_rows, summary_over_tables
    from shardwise.planner.published.tables import read_table

    refits = (
        ("--leave-one-stack-out", options.leave_one_stack_out),
        ("--leave-one-table-out", options.leave_one_table_out),
    )
    refitting = [name for name, given in refits if given]
    if refitting and options.constants:
        raise ConfigError(f"--constants would do nothing beside {refitting[0]}, which refits them; leave one out")
    if len(refitting) > 1:
        raise ConfigError(f"{' and '.join(refitting)} leave out different rows; give one")
    if options.probe_seed and not options.probe_rows:
        raise ConfigError(f"--probe-seed={options.probe_seed} does nothing without --probe-rows; give both")
    constants = read_constants(Path(options.constants)) if options.constants else None
    by_table, paths = {}, list(dict.fromkeys(map(Path, options.tables)))
    stems = Counter(path.stem for path in paths)
    for path in paths:
        rows = read_table(path)
        by_table[path.stem if stems[path.stem] == 1 else str(path)] = evaluate_rows(
            rows,
            constants,
            options.probe_rows,
            options.probe_seed,
            options.leave_one_stack_out,
            options.leave_one_table_out,
        )
    summaries = {name: error_summary(results) for name, results in by_table.items()}
    if options.json:
        only = next(iter(summaries.values())) if len(summaries) == 1 else summary_over_tables(summaries)
        listed = [{**result.to_dict(), "table": name} for name, results in by_table.items() for result in results]
        print(json.dumps({"rows": listed, "summary": only}, indent=1))
        return 0
    _print(by_table, summaries, options.all)
    return 0


def _print(predictions: dict[str, Any], summaries: dict[str, Any], everything: bool) -> None:
    for name, results in predictions.items():
        worst = sorted(results, key=lambda result: -(result.error_percent or 0.0))
        kept = results if everything else [result for result in worst if result.unmapped or result.measured][:SHOWN]
        print(f"{name}\n{_line(HEADER)}")
        for result in kept:
            print(_line(_cells(result)))
        if len(kept) < len(results):
            print(f"  the {len(kept)} largest errors of {len(results)} rows; --all shows every row")
    output_console().print(summary_table(summaries))


HEADER = ("row", "model", "unit", "predicted", "measured", "error", "80 % interval", "memory GiB (measured)", "taken")


def _line(cells: Sequence[str]) -> str:
    row, model, unit, *rest = cells
    columns = " ".join(f"{cell:>{width}}" for cell, width in zip(rest, (10, 10, 10, 22, 22)))
    return f"{row:>6}  {model:<16} {unit:<10} {columns}  {rest[-1] if len(rest) == len(HEADER) - 3 else ''}".rstrip()


def _cells(result: Any) -> list[str]:
    row, error = result.row, result.error_percent
    said = "not scored" if not result.scored else "" if error is None else f"{error:.1f} %"
    if result.unmapped:
        return [row.id, row.text["model"], f"unmapped: {result.unmapped}; {said}"]
    interval = f"{result.interval[0]:,.4g} to {result.interval[1]:,.4g}" if result.interval else ""
    memory = f"{result.memory:.1f}" + (f" ({result.measured_memory:g})" if result.measured_memory else "")
    numbers = ["" if value is None else f"{value:,.4g}" for value in (result.predicted, result.measured)]
    return [row.id, row.text["model"], result.unit, *numbers, said, interval, memory, ", ".join(result.taken)]


def summary_table(summaries: dict[str, Any]) -> Table:
    """Accuracy, a line a table."""
    table = Table(title="errors in per cent", title_justify="left")
    for column in ("table", "scored", "median", "p90", "max", "in interval", "mapped", "memory median", "p90"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary["scored"]),
            *(_number(summary[key]) for key in ("median_percent", "p90_percent", "max_percent")),
            *(_number(summary[key]) for key in ("inside_interval_percent", "mapped_percent")),
            *(_number(summary["memory"][key]) for key in ("median_percent", "p90_percent")),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def run_calibrate(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    if not options.tables:
        return _measure_machine(options)
    from shardwise.planner.published.calibrate import fit, samples
    from shardwise.planner.published.tables import read_table

    given = [sample for path in options.tables for sample in samples(read_table(Path(path)))]
    if not given:
        raise ConfigError(f"{', '.join(options.tables)}: no mapped row with fit_role calibrate and a measured time")
    constants = fit(given)
    text = json.dumps(constants.to_dict(), indent=1)
    if options.output is None:
        print(text)
    else:
        try:
            Path(options.output).write_text(text + "\n")
        except OSError as error:
            raise OutputError(f"--output={options.output}: {error.strerror}") from error
    table = Table(title="fitted stacks", title_justify="left")
    for column in ("stack", "source"):
        table.add_column(column)
    for name, stack in constants.stacks.items():
        table.add_row(name, stack.source)
    Console(stderr=True).print(table)
    return 0


def _measure_machine(options: argparse.Namespace) -> int:
    """The machine's own probe, kept in the cache, where predictions about this machine look."""
    from shardwise.commands.machine_probe import probe
    from shardwise.planner.formulas.local import keep_constants

    if options.output is not None:
        raise ConfigError(f"--output={options.output} is for tables; what is measured here is kept in the cache")
    console = Console(stderr=True)
    constants = probe(console.print)
    table = Table(title="this machine's CPU", title_justify="left")
    for column in ("processes", "TFLOP/s of each", "GB/s of each", "step, measured / modelled"):
        table.add_column(column, justify="right")
    for ranks, tflops in constants.tflops.items():
        factor, bandwidth = constants.step_factor[ranks], constants.bandwidth[ranks]
        table.add_row(str(ranks), f"{tflops:.4f}", f"{bandwidth:.2f}", f"{factor:.2f}")
    console.print(table)
    console.print(f"between processes {constants.link:.2f} GB/s and {constants.hop_seconds * 1e6:.0f} us a hop")
    print(keep_constants(constants))
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)
