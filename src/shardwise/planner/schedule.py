"""What a pipeline's stages hold and how long they idle, from plan and model alone."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from shardwise.families.facts import ModelFacts
from shardwise.plan import Plan

BAR = 16  # characters of the longest bar


@dataclass(frozen=True)
class Stage:
    """One stage: its number, its pipeline rank, its blocks, and its share of the model.

    `parameters` counts elements, those of tied embeddings on both ends; `flops` are model FLOPs of a token, forward
    and backward, as `ModelFacts.model_flops_per_token` counts them.
    """

    number: int
    rank: int
    blocks: int
    parameters: int
    flops: float


def stages(plan: Plan, facts: ModelFacts) -> list[Stage]:
    """The stages of `plan`, in order; none without a pipeline."""
    sizes = {block.name: block.parameters for block in facts.blocks}
    attention = 12.0 * plan.sequence_length * facts.hidden_size
    last = len(plan.stages) - 1
    found = []
    for number, names in enumerate(plan.stages):
        blocks = sum(sizes[name] for name in names)
        before = sum(facts.stages.before.values()) if number == 0 else 0
        after = sum(facts.stages.after.values()) if number == last else 0
        flops = 6.0 * (blocks + after) + attention * len(names)
        found.append(Stage(number, number % plan.degrees["pipeline"], len(names), blocks + before + after, flops))
    return found


def bubble(plan: Plan) -> float:
    """Share of a step in which a pipeline rank idles, if all stages take the same time and messages take none.

    (p - 1) / (v·m + p - 1) for p ranks, m microbatches and v stages a rank (arXiv 2104.04473, sections 2.2.1 and 2.2.2,
    there over the ideal time instead of the whole).
    """
    ranks = plan.degrees["pipeline"]
    virtual = len(plan.stages) // ranks if plan.stages else 1
    return (ranks - 1) / (virtual * plan.accumulation + ranks - 1)


def stage_table(plan: Plan, facts: ModelFacts) -> Table:
    """The stages as bars: their shares of parameters and FLOPs, and the schedule's bubble."""
    rows = stages(plan, facts)
    table = Table(title="Stages", title_justify="left", title_style="bold", caption_justify="left")
    for column in ("stage", "rank", "blocks"):
        table.add_column(column, justify="right")
    table.add_column("parameters", no_wrap=True)
    table.add_column("FLOPs", no_wrap=True)
    for stage in rows:
        table.add_row(
            str(stage.number),
            str(stage.rank),
            str(stage.blocks),
            _bar(stage.parameters, [row.parameters for row in rows]),
            _bar(stage.flops, [row.flops for row in rows]),
        )
    table.caption = (
        f"schedule {plan.job.parallel.pipeline}, {plan.accumulation} microbatches on {plan.degrees['pipeline']} ranks: "
        f"{bubble(plan):.1%} of a step is bubble where all stages take the same time"
    )
    return table


def _bar(value: float, of: list[float] | list[int]) -> str:
    return f"{'█' * max(1, round(BAR * value / max(of))):<{BAR}} {value / sum(of):6.1%}"
