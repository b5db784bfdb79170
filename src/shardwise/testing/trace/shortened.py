"""Ranks of one stage that do the same: shown in the same job of fewer blocks, so that one is traced at full depth.

All blocks have to be alike. The short job has the layout, widths, microbatches and kinds of ranks of the whole one.
There each kind is traced. Those whose program is, entry by entry and byte by byte, that of the first of their stage
have its program at full depth too: what else could differ would need code that asks for its rank in some blocks alone.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.model.build import build_model, load_config
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan, resolve
from shardwise.testing.depth import cut_depth
from shardwise.testing.trace.rank import RankTrace

BLOCKS_OF_STAGE = 3  # a first, a last and one between
FEWEST = 2  # that a stage may have, where others have more
WORTHWHILE = 2  # times as many blocks has the whole job at least
EQUAL = ("degrees", "dtypes", "microbatch", "accumulation", "sequence_length", "collectives", "placement")


def short_job(job: Job, plan: Plan, facts: ModelFacts) -> tuple[Job, ModelFacts] | None:
    """Return a job with fewer of a model's equal blocks, and its model's facts; None where there is none."""
    stages = max(1, len(plan.stages))
    blocks = BLOCKS_OF_STAGE * stages
    if blocks * WORTHWHILE > len(facts.blocks) or not (facts.has_config and blocks_are_alike(facts)):
        return None
    try:
        if _differs_by_layer(job, len(facts.blocks)):
            return None
        short = cut_depth(job, blocks)
        short_facts = discover(build_model(short), short)
        short_plan = resolve(short, plan.world, short_facts)
    except ShardwiseError:  # what keys say of blocks by number holds for the whole job alone
        return None
    fits = all(getattr(short_plan, name) == getattr(plan, name) for name in EQUAL)
    shares = [len(stage) for stage in short_plan.stages]
    fits = fits and len(shares) == len(plan.stages) and min(shares, default=FEWEST) >= FEWEST
    return (short, short_facts) if fits else None


def blocks_are_alike(facts: ModelFacts) -> bool:
    """Return whether all blocks have parameters of the same names and shapes, and attention of the same kind."""
    traits = []
    for start in (f"{block.name}." for block in facts.blocks):
        shapes = [(name, shape) for name, shape in facts.parameter_shapes.items() if name.startswith(start)]
        calls = [call for call in facts.attention if call.name.startswith(start)]
        traits.append(
            (
                [(name.removeprefix(start), shape) for name, shape in shapes],
                [replace(call, name=call.name.removeprefix(start)) for call in calls],
            )
        )
    return all(trait == traits[0] for trait in traits)


def _differs_by_layer(job: Job, depth: int) -> bool:
    """Return whether the config has a list with items of several kinds, one a layer."""
    lists = [value for value in load_config(job).to_dict().values() if isinstance(value, list) and len(value) == depth]
    return any(item != values[0] for values in lists for item in values)


def does_the_same(one: RankTrace, other: RankTrace) -> bool:
    """Return whether two ranks issue the same, with the same bytes alive."""
    return (one.program, one.partitions, one.owners, one.peak, one.operators) == (
        other.program, other.partitions, other.owners, other.peak, other.operators
    )  # fmt: skip


def as_rank(trace: RankTrace, short: RankTrace) -> RankTrace:
    """Return the trace of a rank, known from the short job, that does what `trace` does."""
    return replace(trace, rank=short.rank, coordinates=short.coordinates, traced_as=trace.rank)
