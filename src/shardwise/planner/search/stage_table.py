"""The stages of a plan as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.schedule import bubble, stage_shares

BAR = 10  # characters of the longest bar


def stage_table(plan: Plan, facts: ModelFacts) -> Table:
    """Return shares of parameters and FLOPs of each stage as bars, its rank's peak memory, and the bubble."""
    rows = stage_shares(plan, facts)
    peaks = [estimate(plan, facts, pipeline=rank).total for rank in range(plan.degrees[Axis.PIPELINE])]
    table = Table(title="Stages", title_justify="left", title_style="bold", caption_justify="left")
    for column in ("stage", "rank", "blocks"):
        table.add_column(column, justify="right")
    table.add_column("parameters", no_wrap=True)
    table.add_column("FLOPs", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    for stage in rows:
        table.add_row(
            str(stage.number),
            str(stage.rank),
            str(stage.blocks),
            _bar(stage.parameters, [row.parameters for row in rows]),
            _bar(stage.flops, [row.flops for row in rows]),
            f"{peaks[stage.rank] / 2**20:,.0f} MiB",
        )
    ranks = plan.degrees[Axis.PIPELINE]
    table.caption = (
        f"schedule {plan.job.parallel.pipeline}, {plan.accumulation} microbatches on {ranks} ranks: "
        f"{bubble(plan):.1%} of a step is bubble where all stages take the same time"
    )
    return table


def _bar(value: float, of: list[float] | list[int]) -> str:
    return f"{'█' * max(1, round(BAR * value / max(of))):<{BAR}} {value / sum(of):6.1%}"
