"""Remedies for a job that ran out of memory: the changes that cost least time, by prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis, data_axes
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan, resolve
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.search.space import CHECKPOINTING, COUNT, SHARDED, SIZE, TENSOR, Changes, changed_job
from shardwise.words import divisors


@dataclass(frozen=True)
class Remedy:
    """Keys to change, the bytes that the job would then need, and its time against now (1.1: a tenth more)."""

    changes: Changes
    memory_bytes: float
    relative_time: float

    def __str__(self) -> str:
        keys = ", ".join(f"{key}={value}" for key, value in self.changes.items() if value is not None)
        return f"{keys}: {self.memory_bytes / 2**30:.2f} GiB, step time {self.relative_time - 1:+.0%}"


def remedies(plan: Plan, facts: ModelFacts, cluster: Cluster, room: float, most: int = 3) -> list[Remedy]:
    """The cheapest `most` legal changes, of one key or two, with which `plan` needs at most `room` bytes.

    None where the time of `plan` is not known.
    """
    try:
        before = predict(configuration_of(plan, facts, cluster)).step_seconds
    except LegalityError:
        return []
    singles = list(_single_changes(plan))
    pairs = [one | two for one, two in combinations(singles, 2) if not one.keys() & two.keys()]
    remedies = [remedy for changes in singles if (remedy := _tried(plan, facts, cluster, changes, before))]
    fitting = [remedy for remedy in remedies if remedy.memory_bytes <= room]
    if len(fitting) < most:  # pairs that hold a change that is enough by itself say nothing new
        enough = [remedy.changes.items() for remedy in fitting]
        pairs = [pair for pair in pairs if not any(items <= pair.items() for items in enough)]
        more = (remedy for changes in pairs if (remedy := _tried(plan, facts, cluster, changes, before)))
        fitting += [remedy for remedy in more if remedy.memory_bytes <= room]
    return sorted(fitting, key=lambda remedy: (round(remedy.relative_time, 3), len(remedy.changes)))[:most]


def _tried(plan: Plan, facts: ModelFacts, cluster: Cluster, changes: Changes, before: float) -> Remedy | None:
    try:
        other = resolve(changed_job(plan.job, changes), plan.world, facts)
        seconds = predict(configuration_of(other, facts, cluster)).step_seconds
    except LegalityError:
        return None
    return Remedy(changes, estimate(other, facts).total, seconds / before)


def _single_changes(plan: Plan) -> Iterator[Changes]:
    job, sequences = plan.job, {"training.sequences_per_step": plan.sequences_per_step}
    for policy in ("selective", "full"):
        if policy != job.memory.activation_checkpointing != "full":
            yield {CHECKPOINTING: policy}
    for size in (d for d in divisors(plan.microbatch) if d < plan.microbatch):
        yield {SIZE: size, COUNT: None, **sequences}
    data = math.prod(plan.degrees[axis] for axis in data_axes())
    for degree in (d for d in divisors(data) if d > plan.state_ranks):
        yield {SHARDED: degree}
    for degree in (d for d in divisors(plan.world.local_size) if d > plan.degrees[Axis.TENSOR]):
        yield {TENSOR: degree, SHARDED: None, **sequences}
    if not job.parallel.reshard_after_forward:
        yield {"parallel.reshard_after_forward": True}
    if plan.world.device_type != "cpu" and float(job.memory.offload_optimizer) < 1:
        yield {"memory.offload_optimizer": True}
    if job.memory.loss_chunk_tokens > 256:
        yield {"memory.loss_chunk_tokens": 256}
