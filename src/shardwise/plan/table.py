"""A Plan as people read it: key, value and rule, then its notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwise.plan.plan import Plan


def plan_table(plan: Plan) -> Group:
    """Return the plan as a table of key, value and rule, then its notes."""
    table = Table(title=f"Plan {plan.fingerprint}", title_justify="left", title_style="bold")
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("rule", style="dim", overflow="fold")
    world = plan.world
    machine = f", {world.accelerator}" if world.accelerator else ""
    table.add_row(
        "world", f"{world.size} x {world.device_type}", f"{world.local_size} on each of {world.hosts} host(s){machine}"
    )
    for key, value in _rows(plan):
        table.add_row(key, str(value), Text(plan.rules.get(key, "")))
    return Group(table, *(Text(f"note: {note}", style="yellow") for note in plan.notes))


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
    for key in ("sequence_length", "sequences_per_step", "microbatch", "accumulation", "warmup_steps"):
        yield key, getattr(plan, key)
    yield from asdict(plan.dtypes).items()
    if plan.float8:
        gathered = ", gathered too" if plan.gathers_float8 else ""
        yield "float8", f"{plan.job.precision.fp8}, {plan.job.precision.fp8_scaling}{gathered}"
    for key in ("normalisation", "sequence_parallel", "zero1", "chunked_loss"):
        yield key, getattr(plan, key)
