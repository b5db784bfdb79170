"""The space of a search: which jobs differ from the given one only in keys that it left open.

What a job sets stays. The rest is enumerated: degrees, sharding, microbatch and checkpointing in all combinations
(`jobs`), the sharding degrees about a factor of two apart; those between, schedule, placement, offload and the like by
changing the best one key at a time (`neighbours`). Nothing here knows which of them are legal:
`shardwise.plan.plan.resolve` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import Any

from shardwise.job.axes import PLACEMENT_LETTERS, Axis, second_views, spec_of, state_axes
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import V_SCHEDULES, lookup
from shardwise.words import divisors

Changes = dict[str, Any]  # dotted key -> value
COARSE, FINE = 1.75, 1.3  # least ratio of neighbouring degrees: of sharding; of tensor and pipeline, 2, 3, 4, 6, 8 …
LARGEST_MICROBATCH = 64  # sequences; powers of two are tried

TENSOR, PIPELINE, SHARDED, EXPERT = (
    spec_of(axis).degree_key for axis in (Axis.TENSOR, Axis.PIPELINE, Axis.SHARD, Axis.EXPERT)
)
SCATTERED, VIRTUAL = "parallel.sequence_parallel", "parallel.virtual_pipeline_degree"
SCHEDULE = "parallel.pipeline"
SIZE, COUNT = "training.microbatch_size", "training.gradient_accumulation"
CHECKPOINTING = "memory.activation_checkpointing"


def fixed_keys(job: Job) -> frozenset[str]:
    """Dotted keys of the sections that a search may change and that the job sets itself."""
    sections = {"parallel": job.parallel, "memory": job.memory, "training": job.training, "model": job.model}
    return frozenset(f"{name}.{key}" for name, section in sections.items() for key in section.model_fields_set)


def changed_job(job: Job, changes: Changes) -> Job:
    """`job` with other values at dotted keys; they are not validated again."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return job.model_copy(
        update={name: getattr(job, name).model_copy(update=values) for name, values in sections.items()}
    )


@dataclass(frozen=True)
class SearchSpace:
    """The open keys of `job` for a model of `facts` on `ranks` ranks, `sequences` a step."""

    job: Job
    facts: ModelFacts
    ranks: int
    sequences: int

    @cached_property
    def fixed(self) -> frozenset[str]:
        return fixed_keys(self.job)

    def open(self, key: str, values: Iterable[Any]) -> list[Any]:
        """`values`, or where the job sets `key` its own value alone."""
        section, _, name = key.partition(".")
        return [getattr(getattr(self.job, section), name)] if key in self.fixed else list(values)

    def jobs(self) -> Iterator[Changes]:
        """Every combination of degrees, sharding, microbatch and checkpointing; the coarse part of the search."""
        for degrees in self._degrees():
            data_ranks = self.ranks // _placed(degrees)
            for sharded in self._sharded(data_ranks, degrees):
                for size in self._microbatches(data_ranks):
                    for policy in self.open(CHECKPOINTING, ("none", "selective", "full")):
                        yield self._changes(degrees, sharded, size, policy)

    def _degrees(self) -> Iterator[dict[Axis, int]]:
        """Yield the degrees of `CANDIDATE_DEGREES` whose product divides the ranks."""
        listed = {axis: candidates(self) for axis, candidates in CANDIDATE_DEGREES.items() if candidates}
        opened = [self.open(spec_of(axis).degree_key, values) for axis, values in listed.items()]
        for values in product(*opened):
            degrees = dict(zip(listed, values, strict=True))
            if self.ranks % _placed(degrees) == 0:
                yield degrees

    def _sharded(self, data_ranks: int, degrees: dict[Axis, int]) -> list[int | None]:
        """Return degrees of sharding, which count the ranks of the other data axes that shard state."""
        if self.job.parallel.shard_optimizer_state:
            return [None]
        inner = math.prod(degrees.get(axis, 1) for axis in state_axes())
        return self.open(SHARDED, thinned(d for d in divisors(data_ranks * inner) if d % inner == 0))

    def _microbatches(self, data_ranks: int) -> list[int | None]:
        if COUNT in self.fixed and SIZE not in self.fixed:
            return [None]
        rows = max(1, self.sequences // max(1, data_ranks))
        powers = [1 << n for n in range(LARGEST_MICROBATCH.bit_length()) if rows % (1 << n) == 0]
        return self.open(SIZE, powers)

    def _changes(self, degrees: dict[Axis, int], sharded: int | None, size: int | None, policy: str) -> Changes:
        changes: Changes = {
            **{spec_of(axis).degree_key: degree for axis, degree in degrees.items()},
            SHARDED: sharded,
            CHECKPOINTING: policy,
            "training.sequences_per_step": self.sequences,
        }
        if size is not None:
            changes[SIZE] = size
        if degrees[Axis.TENSOR] > 1:
            changes[SCATTERED] = self.open(SCATTERED, [self.facts.sequence_parallel.ok])[0]
        return changes

    def neighbours(self, changes: Changes, offload: bool = False) -> Iterator[Changes]:
        """`changes` with one more key changed; offloading, which is slow, only where it is asked for."""
        job = changed_job(self.job, changes)
        for key, values in [*self._finer(changes), *(self._offloads(changes) if offload else ())]:
            for value in self.open(key, values):
                if value != lookup(job, key):
                    yield changes | {key: value}

    def _finer(self, changes: Changes) -> Iterator[tuple[str, list[Any]]]:
        for key in (TENSOR, PIPELINE, SHARDED):
            yield key, _around(divisors(self.ranks), changes[key])
        yield EXPERT, _around(_of_experts(self), changes[EXPERT])
        if changes[PIPELINE] > 1:
            if changes.get(SCHEDULE) not in V_SCHEDULES:
                yield VIRTUAL, [None, 2, 3, 4, 6, 8]
            yield SCHEDULE, ["interleaved", "simple", "zero_bubble", *V_SCHEDULES]
        if changes[TENSOR] > 1:
            yield SCATTERED, [False, True]
        if changes[TENSOR] > 1 or changes[PIPELINE] > 1:
            yield "parallel.placement_strategy", ["".join(order) for order in permutations(PLACEMENT_LETTERS)]
        if changes[CHECKPOINTING] != "none":
            yield "memory.checkpoint_every", [1, 2, 3, 4]
        yield "parallel.reshard_after_forward", [True, False]

    def _offloads(self, changes: Changes) -> Iterator[tuple[str, list[Any]]]:
        if changes[CHECKPOINTING] == "full":
            yield "memory.offload_activations", [False, True]
        yield "memory.offload_parameters", [False, True]
        yield "memory.offload_optimizer", [False, 0.5, True]


def _at_most_heads(space: SearchSpace) -> list[int]:
    heads = max(1, space.facts.attention_heads)
    return thinned((d for d in divisors(space.ranks) if d <= heads), FINE)


def _at_most_blocks(space: SearchSpace) -> list[int]:
    blocks = max(1, len(space.facts.blocks))
    return thinned((d for d in divisors(space.ranks) if d <= blocks), FINE)


def _of_1024_positions(space: SearchSpace) -> list[int]:
    """Return the degrees that leave 1024 positions on a rank: shorter parts cost more traffic than they save."""
    most = max(1, space.job.data.sequence_length // 1024)
    return [d for d in divisors(space.ranks) if d <= most]


def _of_experts(space: SearchSpace) -> list[int]:
    """Return the degrees that divide the experts of every layer; 1 alone where a model has none that can be shared."""
    if not space.facts.supports(Axis.EXPERT).ok:
        return [1]
    return thinned(divisors(math.gcd(space.ranks, *space.facts.expert_stacks.values())), FINE)


# The degrees of each axis that a search tries, the last axis varying fastest. None: the sharding degree decides.
CANDIDATE_DEGREES: dict[Axis, Callable[[SearchSpace], list[int]] | None] = {
    Axis.TENSOR: _at_most_heads,
    Axis.PIPELINE: _at_most_blocks,
    Axis.CONTEXT: _of_1024_positions,
    Axis.SHARD: None,
    Axis.REPLICA: None,
    Axis.EXPERT: _of_experts,
}


def _placed(degrees: Mapping[Axis, int]) -> int:
    """Return the ranks that these degrees take; second views take none."""
    return math.prod(degree for axis, degree in degrees.items() if axis not in second_views())


def thinned(values: Iterable[int], ratio: float = COARSE) -> list[int]:
    """Return of ascending values the first, the last, and between them those at least `ratio` apart."""
    kept: list[int] = []
    last = None
    for last in values:
        if not kept or last >= ratio * kept[-1]:
            kept.append(last)
    return kept if last is None or last == kept[-1] else [*kept, last]


def _around(values: list[int], value: int | None) -> list[int]:
    """The values within a factor of two of one of them."""
    return [] if value is None else [other for other in values if value / 2 <= other <= 2 * value]
