"""A pipeline's stages: what they hold and how long they idle, from plan and model alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan


@dataclass(frozen=True)
class StageShare:
    """One stage: its number, its pipeline rank, its blocks, and its share of the model.

    `parameters` counts elements, those that several stages use on each; `flops` are model FLOPs of a token, forward
    and backward, as `ModelFacts.model_flops_per_token` counts them.
    """

    number: int
    rank: int
    blocks: int
    parameters: int
    flops: float


def stage_shares(plan: Plan, facts: ModelFacts) -> list[StageShare]:
    """Return the stages of `plan`, in order; none without a pipeline."""
    if not plan.stages:
        return []
    between = facts.stages.between
    sizes = {block.name: block.parameters + between.get(n, 0) for n, block in enumerate(facts.blocks)}
    used = 1 - facts.idle_parameters / max(1, sum(block.parameters for block in facts.blocks))
    attention = 12.0 * facts.attended(facts.positions(plan.sequence_length)) * facts.attention_width
    last = len(plan.stages) - 1
    elements: Counter[int] = Counter()
    for name, stages in holders(plan, facts).items():
        elements.update(dict.fromkeys(stages, math.prod(facts.parameter_shapes[name])))
    shares = []
    for number, names in enumerate(plan.stages):
        after = sum(facts.stages.after.values()) if number == last else 0
        flops = 6.0 * (used * sum(sizes[name] for name in names) + after) + attention * len(names)
        shares.append(StageShare(number, plan.stage_ranks[number], len(names), elements[number], flops))
    return shares


def holders(plan: Plan, facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Return parameter name -> the stages that hold it: one, or of those with several uses all where they are used."""
    stage_of = {block: stage for stage, blocks in enumerate(plan.stages) for block in blocks}
    stages: dict[str, tuple[int, ...]] = {}
    for name in facts.parameter_shapes:
        uses = facts.stages.uses.get(name)
        blocks = [facts.block_of[name]] if uses is None else [facts.blocks[number].name for number in uses]
        stages[name] = tuple(sorted({stage_of[block] for block in blocks}))
    return stages


def tied_across(plan: Plan, facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Return parameter name -> the pipeline ranks that hold it, of those that several do."""
    if not plan.stages:
        return {}
    ranks = {
        name: tuple(sorted({plan.stage_ranks[stage] for stage in stages}))
        for name, stages in holders(plan, facts).items()
    }
    return {name: holding for name, holding in ranks.items() if len(holding) > 1}


def bubble(plan: Plan) -> float:
    """Return the share of a step in which a pipeline rank idles, if stages take equal times and messages none.

    (p - 1) / (v·m + p - 1) for p ranks, m microbatches and v stages a rank (arXiv 2104.04473, sections 2.2.1 and 2.2.2,
    there over the ideal time instead of the whole). Where the gradients of weights fill in, a third of that idle time
    is left, if forward and the two halves of backward take the same (arXiv 2401.10241, section 2.2, T_F = T_B = T_W).
    Stages in a V (v = 2) idle as long: rank r begins r forwards late and ends together with the others. (Section 6
    counts a rank's time from its own start and so finds none.)
    """
    ranks = plan.degrees[Axis.PIPELINE]
    virtual = len(plan.stages) // ranks if plan.stages else 1
    turns = virtual * plan.accumulation * (3 if plan.splits_backward else 1)
    return (ranks - 1) / (turns + ranks - 1)
