"""The space of a search: which jobs differ from the given one only in keys that it left open.

What a job sets stays. The rest is enumerated: degrees, sharding, microbatch and checkpointing in all combinations
(`jobs`), the sharding degrees about a factor of two apart; those between, schedule, placement, offload and the like by
changing the best one key at a time (`neighbours`). Nothing here knows which of them are legal:
`shardwise.plan.plan.resolve` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import V_SCHEDULES, lookup
from shardwise.words import divisors

Changes = dict[str, Any]  # dotted key -> value
COARSE, FINE = 1.75, 1.3  # least ratio of neighbouring degrees: of sharding; of tensor and pipeline, 2, 3, 4, 6, 8 …
LARGEST_MICROBATCH = 64  # sequences; powers of two are tried

TENSOR, PIPELINE = "parallel.tensor_parallel_degree", "parallel.pipeline_parallel_degree"
CONTEXT, SHARDED = "parallel.context_parallel_degree", "parallel.sharded_data_parallel_degree"
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
class Space:
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
        for tensor, pipeline, context in self._degrees():
            data = self.ranks // (tensor * pipeline)
            for sharded in self._sharded(data, context):
                for size in self._microbatches(data // context):
                    for policy in self.open(CHECKPOINTING, ("none", "selective", "full")):
                        yield self._changes(tensor, pipeline, context, sharded, size, policy)

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        """Degrees whose product divides the ranks; more stages than blocks or ranks than heads are never legal."""
        whole = divisors(self.ranks)
        heads, blocks = max(1, self.facts.attention_heads), max(1, len(self.facts.blocks))
        for tensor in self.open(TENSOR, thinned((d for d in whole if d <= heads), FINE)):
            for pipeline in self.open(PIPELINE, thinned((d for d in whole if d <= blocks), FINE)):
                for context in self.open(CONTEXT, self._contexts()):
                    if self.ranks % (tensor * pipeline * context) == 0:
                        yield tensor, pipeline, context

    def _contexts(self) -> list[int]:
        """A rank keeps 1024 positions or more: shorter parts cost more traffic than they save."""
        most = max(1, self.job.data.sequence_length // 1024)
        return [d for d in divisors(self.ranks) if d <= most]

    def _sharded(self, data: int, context: int) -> list[int | None]:
        if self.job.parallel.shard_optimizer_state:
            return [None]
        return self.open(SHARDED, thinned(d for d in divisors(data) if d % context == 0))

    def _microbatches(self, data_ranks: int) -> list[int | None]:
        if COUNT in self.fixed and SIZE not in self.fixed:
            return [None]
        rows = max(1, self.sequences // max(1, data_ranks))
        powers = [1 << n for n in range(LARGEST_MICROBATCH.bit_length()) if rows % (1 << n) == 0]
        return self.open(SIZE, powers)

    def _changes(
        self, tensor: int, pipeline: int, context: int, sharded: int | None, size: int | None, policy: str
    ) -> Changes:
        changes = {
            TENSOR: tensor,
            PIPELINE: pipeline,
            CONTEXT: context,
            SHARDED: sharded,
            CHECKPOINTING: policy,
            "training.sequences_per_step": self.sequences,
            "training.tokens_per_step": None,
        }
        if size is not None:
            changes[SIZE] = size
        if tensor > 1:
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
        if changes[PIPELINE] > 1:
            if changes.get(SCHEDULE) not in V_SCHEDULES:
                yield VIRTUAL, [None, 2, 3, 4, 6, 8]
            yield SCHEDULE, ["interleaved", "simple", "zero_bubble", *V_SCHEDULES]
        if changes[TENSOR] > 1:
            yield SCATTERED, [False, True]
        if changes[TENSOR] > 1 or changes[PIPELINE] > 1:
            yield "parallel.placement_strategy", ["".join(order) for order in permutations("DPT")]
        if changes[CHECKPOINTING] != "none":
            yield "memory.checkpoint_every", [1, 2, 3, 4]
        if (changes[SHARDED] or 2) > 1:
            yield "parallel.reshard_after_forward", [True, False]

    def _offloads(self, changes: Changes) -> Iterator[tuple[str, list[Any]]]:
        if changes[CHECKPOINTING] == "full":
            yield "memory.offload_activations", [False, True]
        yield "memory.offload_parameters", [False, True]


def thinned(values: Iterable[int], ratio: float = COARSE) -> list[int]:
    """Of ascending values the first, the last, and between them those at least `ratio` apart."""
    kept: list[int] = []
    last = None
    for last in values:
        if not kept or last >= ratio * kept[-1]:
            kept.append(last)
    return kept if last is None or last == kept[-1] else [*kept, last]


def _around(values: list[int], value: int | None) -> list[int]:
    """The values within a factor of two of one of them."""
    return [] if value is None else [other for other in values if value / 2 <= other <= 2 * value]
