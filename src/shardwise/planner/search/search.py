"""Search: all legal layouts of a job on a cluster, predicted and ranked.

Every candidate passes `shardwise.plan.plan.resolve`, the same way that training goes, so the legality table is asked
and not copied. The exhaustive part covers degrees, sharding, microbatch and checkpointing; the best are then improved
one further key at a time until nothing gains. The memory of those that are shown is the closed form of
`shardwise.planner.formulas.memory`, allocation by allocation; the quick sums of `shardwise.planner.formulas.footprint`
sort the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis, same_rows_ranks
from shardwise.job.devices import CPU, CUDA
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import lookup
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import Cluster, ModelShape, Prediction, Stack, TrainingConfiguration
from shardwise.planner.search.space import SHARDED, SIZE, Changes, SearchSpace, changed_job, fixed_keys

LIMIT = 10_000  # candidates of the exhaustive part
IMPROVED = 12  # of the best, how many are improved key by key
SHOWN = 16  # of the best, how many get the exact closed form of memory; and of those that do not fit, half as many
ROUNDS = 6  # in which those that are shown are measured, until all are: some turn out to fit, or not to
QUICK = 1.25  # the quick sums of memory may be off by so much before a candidate is dropped unseen
GAIN = 1.001  # below that a change is not worth another key in the job
SEQUENCES_A_RANK = 2  # of a step, where the job does not say


class SearchQuestion(NamedTuple):
    """The question of a search: a job for a model on a cluster, with the constants of a stack."""

    job: Job
    facts: ModelFacts
    cluster: Cluster
    stack: Stack | None = None


@dataclass(frozen=True)
class Candidate:
    """One legal layout: what would run, and what is expected of it. `exact`: memory's closed form, once it is made."""

    changes: Changes
    plan: Plan
    configuration: TrainingConfiguration
    prediction: Prediction
    exact: tuple[MemoryEstimate, ...] = ()

    @property
    def job(self) -> Job:
        return self.plan.job

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by cause on the fullest rank; `slack` is what context, allocator and backend take besides."""
        if not self.exact:
            return self.prediction.memory
        fullest = max(self.exact, key=lambda rank: rank.total)
        return fullest.causes() | {"slack": self._slack}

    @cached_property
    def stage_memory(self) -> tuple[float, ...]:
        """Bytes of each pipeline rank."""
        if not self.exact:
            return self.prediction.stage_memory
        return tuple(rank.total + self._slack for rank in self.exact)

    @property
    def _slack(self) -> float:
        return 0.0 if self.plan.world.device_type == "cpu" else self.prediction.memory.get("slack", 0.0)

    @property
    def memory_bytes(self) -> float:
        return max(self.stage_memory)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.configuration.cluster.accelerator.memory_bytes and self.fits_host

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Bytes between which 80 % of measured peaks are expected: the prediction's interval, about `memory_bytes`."""
        low, high = self.prediction.memory_interval
        scale = self.memory_bytes / self.prediction.memory_bytes
        return low * scale, high * scale

    @property
    def fits_surely(self) -> bool:
        """True where all of that interval fits, so that nine in ten such runs do."""
        return self.fits and self.memory_interval[1] <= self.configuration.cluster.accelerator.memory_bytes

    @property
    def fits_host(self) -> bool:
        """True where what is offloaded fits into the rank's share of its host's memory, where that is known."""
        return self.prediction.host_bytes <= self.configuration.cluster.host_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the whole cluster."""
        return self.prediction.tokens / self.prediction.step_seconds


@dataclass(frozen=True)
class SearchResult:
    """The candidates of a search. `ranked`: those that fit, best first; `misfits`: the others, smallest first.

    `illegal` counts by rule of the legality table; `left_out` combinations that the limit kept from being looked at.
    """

    question: SearchQuestion
    ranked: tuple[Candidate, ...]
    misfits: tuple[Candidate, ...]
    illegal: Counter[str]
    looked_at: int
    left_out: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None

    @cached_property
    def unfit(self) -> list[Candidate]:
        """Those that by the closed form of memory do not fit, smallest first; of the others no more is known than that
        quick sums say so."""
        return [candidate for candidate in self.misfits if candidate.exact]

    @cached_property
    def surest(self) -> Candidate | None:
        """The fastest of those that fit surely. A search fills the memory, so `best` is often not among them."""
        likely = (
            with_exact_memory(candidate, self.question.facts) for candidate in self.ranked if candidate.fits_surely
        )
        return next((candidate for candidate in likely if candidate.fits_surely), None)


@dataclass
class _Search:
    question: SearchQuestion
    world: World
    space: SearchSpace
    shape: ModelShape
    illegal: Counter[str] = field(default_factory=Counter)
    candidates: dict[str, Candidate | None] = field(default_factory=dict)

    def candidate(self, changes: Changes) -> Candidate | None:
        """The candidate of `changes`, or None where the legality table refuses it."""
        key = repr(sorted(changes.items()))
        if key not in self.candidates:
            self.candidates[key] = self._make(changes)
        return self.candidates[key]

    def _make(self, changes: Changes) -> Candidate | None:
        job, facts, cluster, stack = self.question
        try:
            plan = resolve(changed_job(job, changes), self.world, facts)
            configuration = configuration_of(plan, facts, cluster, stack, self.shape)
        except LegalityError as error:
            self.illegal[error.rule] += 1
            return None
        return Candidate(changes, plan, configuration, predict(configuration))

    def all(self, several: Iterable[Changes]) -> list[Candidate]:
        return [candidate for changes in several if (candidate := self.candidate(changes)) is not None]

    def improved(self, candidate: Candidate) -> Candidate:
        """The end of a climb from `candidate`: one key at a time, the best neighbour that may fit."""
        while True:
            around = filter(_may_fit, self.all(self.space.neighbours(candidate.changes)))
            best = max(around, key=_speed, default=None)
            if best is None or (_may_fit(candidate) and _speed(best) <= GAIN * _speed(candidate)):
                return candidate
            candidate = best

    def everything(self) -> list[Candidate]:
        """All that was looked at and is legal."""
        return [candidate for candidate in self.candidates.values() if candidate is not None]


def search(
    question: SearchQuestion, limit: int = LIMIT, world: World | None = None, shown: int = SHOWN
) -> SearchResult:
    """Rank the layouts of a job that leave alone what the job sets.

    Args:
        limit: most combinations of the exhaustive part; those beyond are counted in `left_out`.
        world: what to run on; unset: all of the cluster.
        shown: layouts whose memory is to be exact.
    """
    started = time.perf_counter()
    job, notes = sized_job(question)
    question = question._replace(job=job)
    world = world or world_of(question.cluster)
    space = SearchSpace(job, question.facts, world.size, job.training.sequences_per_step or 1)
    made = _Search(question, world, space, ModelShape.of(question.facts))
    jobs = list(space.jobs())
    stride = max(1, -(-len(jobs) // limit))  # of too many, an even sample
    coarse = made.all(jobs[::stride])
    for start in sorted(filter(_may_fit, coarse), key=_speed, reverse=True)[:IMPROVED]:
        made.improved(start)
    ranked, misfits = _ranked(made.everything(), question.facts, shown)
    if not ranked:
        made.all(more for misfit in misfits[:SHOWN] for more in space.neighbours(misfit.changes, offload=True))
        ranked, misfits = _ranked(made.everything(), question.facts, shown)
    left_out, seconds = len(jobs) - len(jobs[::stride]), time.perf_counter() - started
    return SearchResult(question, ranked, misfits, made.illegal, len(made.candidates), left_out, seconds, tuple(notes))


def _speed(candidate: Candidate) -> float:
    return candidate.prediction.tokens / candidate.prediction.step_seconds


def _may_fit(candidate: Candidate) -> bool:
    return candidate.prediction.memory_bytes <= QUICK * candidate.configuration.cluster.accelerator.memory_bytes


def _ranked(
    candidates: list[Candidate], facts: ModelFacts, shown: int
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """(those that fit, by speed; those that do not, by memory). The fastest are measured exactly, until enough fit to
    be shown, and of each layout that is shown the first."""
    by_speed = sorted(filter(_may_fit, candidates), key=_speed, reverse=True)
    ranked: list[Candidate] = []
    misfits = [layout for layout in candidates if not _may_fit(layout)]
    rest = iter(by_speed)
    for candidate in rest:
        exact = with_exact_memory(candidate, facts)
        (ranked if exact.fits else misfits).append(exact)
        if len(ranked) == SHOWN:
            break
    for candidate in rest:
        (ranked if candidate.fits else misfits).append(candidate)
    if ranked:
        ranked, misfits = _measured_where_shown(ranked, misfits, facts, shown)
    smallest = sorted(misfits, key=_size)
    if not ranked:
        smallest[:SHOWN] = sorted((with_exact_memory(layout, facts) for layout in smallest[:SHOWN]), key=_size)
        ranked = [layout for layout in smallest if layout.fits]
        smallest = [layout for layout in smallest if not layout.fits]
    return tuple(sorted(ranked, key=_rank)), tuple(smallest)


def _measured_where_shown(
    ranked: list[Candidate], misfits: list[Candidate], facts: ModelFacts, shown: int
) -> tuple[list[Candidate], list[Candidate]]:
    """(those that fit, those that do not) with exact memory of the first of each layout, and of layouts that are said
    not to fit: the fastest and the smallest."""
    for _ in range(ROUNDS):
        fastest, smallest = sorted(misfits, key=_speed, reverse=True), sorted(misfits, key=_size)
        listed = [*distinct(sorted(ranked, key=_rank), shown), *distinct(fastest, shown // 2)]
        listed += distinct(smallest, shown // 2)
        asked = {id(layout): layout for layout in listed if not layout.exact}
        if not asked:
            break
        rest = [layout for layout in (*ranked, *misfits) if id(layout) not in asked]
        rest += [with_exact_memory(layout, facts) for layout in asked.values()]
        ranked, misfits = [layout for layout in rest if layout.fits], [layout for layout in rest if not layout.fits]
    return ranked, misfits


def _size(candidate: Candidate) -> float:
    return candidate.memory_bytes


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Faster first; of equally fast ones that with fewer keys."""
    return -float(f"{_speed(candidate):.4g}"), len(candidate.changes)


def with_exact_memory(candidate: Candidate, facts: ModelFacts) -> Candidate:
    """With the closed form of memory for every pipeline rank; of long pipelines for those that may be the fullest.

    These are the ends, the middle, and of the ranks with as many blocks the first, which has most forwards in flight,
    and the last. The others get the estimate of the nearest of their own size.
    """
    if candidate.exact:
        return candidate
    plan = candidate.plan
    ranks = range(plan.degrees[Axis.PIPELINE])
    sizes = [tuple(len(plan.stages[stage]) for stage in plan.stages_of(rank)) for rank in ranks]
    asked = {0, len(ranks) // 2, len(ranks) - 1} if len(ranks) > 4 else set(ranks)
    asked |= {sizes.index(size) for size in sizes} | {ranks[-1] - sizes[::-1].index(size) for size in sizes}
    estimates = {rank: estimate(plan, facts, pipeline=rank) for rank in sorted(asked)}

    def nearest(rank: int) -> int:
        return min((known for known in estimates if sizes[known] == sizes[rank]), key=lambda known: abs(known - rank))

    return replace(candidate, exact=tuple(estimates[nearest(rank)] for rank in ranks))


def world_of(cluster: Cluster) -> World:
    """The world that a launcher would make of all of a cluster."""
    if cluster.accelerator.name == "CPU":
        return World(cluster.size, CPU, cluster.per_node, hosts=cluster.nodes, is_described=True)
    device = cluster.accelerator
    return World(
        cluster.size,
        CUDA,
        cluster.per_node,
        device.name,
        hosts=cluster.nodes,
        float8=device.fp8 is not None,
        is_described=True,
    )


def sized_job(question: SearchQuestion) -> tuple[Job, list[str]]:
    """The job with what a plan cannot leave open: sequences of a step, and a dtype that the accelerator has."""
    job, ranks, notes = question.job, question.cluster.size, []
    changes: Changes = {}
    training, length = job.training, job.data.sequence_length
    positions = question.facts.positions(length)
    if training.sequences_per_step is None and training.tokens_per_step is None:
        changes["training.sequences_per_step"] = sequences = _assumed(job, ranks)
        notes.append(
            f"training.sequences_per_step is not set: {sequences:,} are assumed, {sequences * positions:,} tokens"
        )
    elif training.tokens_per_step is not None:
        changes["training.sequences_per_step"] = training.tokens_per_step // length
    if job.precision.compute == "auto" and question.cluster.accelerator.bf16 is None:
        changes["precision.compute"] = "fp16"
        notes.append(f"precision.compute: fp16, since a {question.cluster.accelerator.name} has no bf16")
    return changed_job(job, changes), notes


def _assumed(job: Job, ranks: int) -> int:
    size, count = job.training.microbatch_size, job.training.gradient_accumulation
    if size is not None and count is not None:
        return size * count * max(1, ranks // same_rows_ranks(job))
    return max(16, SEQUENCES_A_RANK * ranks)


def smallest_cluster(question: SearchQuestion, most: int = 4096) -> SearchResult | None:
    """The search on the fewest nodes on which some layout fits, by doubling and then halving the gap; None: none up to
    `most` times as many."""

    def on(nodes: int) -> SearchResult:
        cluster = replace(question.cluster, nodes=nodes)
        return search(question._replace(job=_frugal(question.job), cluster=cluster), limit=LIMIT // 10)

    few, many = question.cluster.nodes, 2 * question.cluster.nodes
    while not (result := on(many)).ranked:
        few, many = many, 2 * many
        if many > most * question.cluster.nodes:
            return None
    while many - few > max(1, few // 16):
        middle = (few + many) // 2
        tried = on(middle)
        if tried.ranked:
            many, result = middle, tried
        else:
            few = middle
    return result


def _frugal(job: Job) -> Job:
    """Return the job with full checkpointing and microbatches of one sequence, where it leaves these open."""
    frugal = {"memory.activation_checkpointing": "full", "training.microbatch_size": 1}
    opened = {key: value for key, value in frugal.items() if key not in fixed_keys(job)}
    if job.training.gradient_accumulation is not None:
        opened.pop("training.microbatch_size", None)
    return changed_job(job, opened)


def on_nodes(result: SearchResult, nodes: int) -> Candidate | None:
    """The best of the found layouts on another number of nodes, the same sequences a step; None where none fits."""
    question = result.question
    cluster = replace(question.cluster, nodes=nodes)
    tried: list[Candidate] = []
    for candidate in distinct(result.ranked, SHOWN):
        space = SearchSpace(question.job, question.facts, cluster.size, question.job.training.sequences_per_step or 1)
        made = _Search(question._replace(cluster=cluster), world_of(cluster), space, candidate.configuration.model)
        open_shards = candidate.changes | {SHARDED: None}
        open_batches = {key: value for key, value in open_shards.items() if key != SIZE}
        tried += made.all([candidate.changes, open_shards, open_batches])
    return max((layout for layout in tried if layout.fits), key=_speed, default=None)


def distinct(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """The best of each layout: candidates that differ in degrees, sharding or checkpointing."""
    kept: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        if len(kept) >= most:
            break
        memory = candidate.job.memory
        moved = (memory.offload_parameters, float(memory.offload_optimizer))
        layout = (*candidate.plan.degrees.items(), memory.activation_checkpointing, *moved)
        kept.setdefault(layout, candidate)
    return list(kept.values())


def matching(result: SearchResult, wanted: Changes) -> Candidate | None:
    """The best candidate whose job has these values at these dotted keys; of those that do not fit where none does."""
    of = _has(wanted)
    return next((candidate for candidate in (*result.ranked, *result.misfits) if of(candidate)), None)


def of_changes(result: SearchResult, wanted: Changes) -> Candidate:
    """The best layout with other values at some keys, whether or not it fits. Raises LegalityError."""
    question = result.question
    base = (result.best or result.misfits[0]).changes | _one_size(wanted, question.job.data.sequence_length)
    if not wanted.keys() & {"training.microbatch_size", "training.gradient_accumulation"}:
        base = {key: value for key, value in base.items() if key != "training.microbatch_size"}
    if SHARDED not in wanted.keys() | fixed_keys(question.job) and any(key.endswith("_degree") for key in wanted):
        base[SHARDED] = None  # of other degrees it is another
    plan = resolve(changed_job(question.job, base), world_of(question.cluster), question.facts)
    configuration = configuration_of(plan, question.facts, question.cluster, question.stack)
    return with_exact_memory(Candidate(base, plan, configuration, predict(configuration)), question.facts)


def _one_size(wanted: Changes, length: int) -> Changes:
    """Return `wanted` with the size of a step in both of its units, so that none of the job's own is left beside it."""
    tokens = wanted.get("training.tokens_per_step")
    if tokens is not None:
        return {"training.sequences_per_step": tokens // length} | wanted
    return ({"training.tokens_per_step": None} | wanted) if "training.sequences_per_step" in wanted else wanted


def _has(wanted: Changes) -> Callable[[Candidate], bool]:
    def has(candidate: Candidate) -> bool:
        return all(_value(candidate, key) == value for key, value in wanted.items())

    return has


def _value(candidate: Candidate, key: str) -> object:
    """Return what runs: the plan's own number where it derives one."""
    derived = {
        SHARDED: candidate.plan.state_ranks,
        "training.microbatch_size": candidate.plan.microbatch,
        "training.gradient_accumulation": candidate.plan.accumulation,
    }
    return derived[key] if key in derived else lookup(candidate.job, key)
