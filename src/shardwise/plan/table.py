"""A Plan as people read it: key, value and rule, then its notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.plan.plan import Plan

NARROW = 70  # columns of a terminal below which rules stand under their values


def plan_table(plan: Plan) -> Group:
    """Return the plan as a table of key, value and rule, then its notes."""
    rows = [_world(plan), *((key, str(value), plan.rules.get(key, "")) for key, value in _rows(plan))]
    table = RuleTable(f"Plan {plan.fingerprint}", rows)
    return Group(table, *(Text(f"note: {note}", style="yellow") for note in plan.notes))


class RuleTable:
    """Keys, values and the rules behind them: three columns, or on a narrow terminal the rule under the value."""

    def __init__(self, title: str, rows: Iterable[tuple[str, str, str]]) -> None:
        self.title, self.rows = title, list(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_narrow = options.max_width < NARROW
        yield _list(self.title, self.rows) if is_narrow else _table(self.title, self.rows)


def _world(plan: Plan) -> tuple[str, str, str]:
    world = plan.world
    machine = f", {world.accelerator}" if world.accelerator else ""
    return (
        "world",
        f"{world.size} x {world.device_type}",
        f"{world.local_size} on each of {world.hosts} host(s){machine}",
    )


def _table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("rule", style="dim", overflow="fold")
    for key, value, rule in rows:
        table.add_row(key, value, Text(rule))
    return table


def _list(title: str, rows: list[tuple[str, str, str]]) -> Group:
    lines: list[RenderableType] = [Text(title, style="bold")]
    for key, value, rule in rows:
        lines.append(Text.assemble((key, "cyan"), f"  {value}"))
        lines.append(Padding(Text(rule, style="dim"), (0, 0, 0, 2)))
    return Group(*lines)


def _sizes(plan: Plan) -> str:
    return _stages((stage.sequences, stage.first_sample) for stage in plan.step_sizes.stages)


def _lengths(plan: Plan) -> str:
    return _stages((stage.length, stage.first_sample) for stage in plan.sequence_lengths.stages)


def _stages(values: Iterable[tuple[int, int]]) -> str:
    """Return what holds from some samples on: "4 up to sample 32, then 8"."""
    of_run = [*values]
    stages = [f"{value} up to sample {end:,}" for (value, _), (_, end) in pairwise(of_run)]
    last, _ = of_run[-1]
    return f"{', '.join(stages)}, then {last}"


def _rows(plan: Plan) -> Iterator[tuple[str, object]]:
    yield from plan.degrees.items()
    if plan.context_method:
        yield "context_method", plan.context_method
    if plan.stages:
        yield "stages", " + ".join(str(len(blocks)) for blocks in plan.stages) + " blocks"
    yield "attention", plan.attention or "transformers' own"
    yield "placement", plan.placement
    yield "backend", plan.backend
    if plan.world.hosts > 1:
        yield "collectives", plan.collectives
    for key in ("steps", "sequence_length", "sequences_per_step", "microbatch", "accumulation", "warmup_steps"):
        yield key, getattr(plan, key)
    if plan.step_sizes.grow:
        yield "batch_size_schedule", _sizes(plan)
    if plan.sequence_lengths.grow:
        yield "sequence_length_schedule", _lengths(plan)
    yield from asdict(plan.dtypes).items()
    if plan.sources:
        yield "sources", plan.sources
    if plan.balancing_coefficient:
        asked = plan.job.router.balancing_loss
        yield "balancing_loss", f"{'global' if asked == 'auto' else asked}, times {plan.balancing_coefficient:g}"
    if plan.float8:
        gathered = ", gathered too" if plan.gathers_float8 else ""
        yield "float8", f"{plan.job.precision.fp8}, {plan.job.precision.fp8_scaling}{gathered}"
    if plan.optimizers:
        yield "optimizers", plan.optimizers
    if plan.offloaded_optimizer:
        yield "offloaded_optimizer", plan.offloaded_optimizer
    if plan.reference:
        yield "reference", plan.reference
    yield "hang_report", plan.job.observe.hang_report
    for key in ("objective", "normalisation", "sequence_parallel", "zero1", "chunked_loss"):
        yield key, getattr(plan, key)
