"""A whole job traced: one rank of every kind, in turn or in processes of their own, and the check of them all."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise._torch_compat import accelerator
from shardwise.errors import ConfigError
from shardwise.job.devices import CPU
from shardwise.job.schema import Job
from shardwise.launch.process_group import available_cores
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.trace.agreement import Program, check_agreement
from shardwise.testing.trace.kinds import RankKind, first_of_stage, kind_of_rank, ranks_of_kinds
from shardwise.testing.trace.program import Call
from shardwise.testing.trace.rank import RankTrace, trace_rank
from shardwise.testing.trace.refusals import refuse_untraceable
from shardwise.testing.trace.shortened import as_rank, does_the_same, short_job
from shardwise.testing.trace.traced_batch import TracedBatch, traced_batch

MOST = 8  # processes, of half a GiB each
FEW = 2  # kinds that are traced one after the other, since a process takes seconds to start


@dataclass(frozen=True)
class JobTrace:
    """The traced ranks of a job.

    Attributes:
        ranks: one of every kind, or the one that was asked for.
        planned: the closed form of the plan's memory, of the pipeline rank of each.
        met: calls of all ranks that were seen to meet; None where one rank was traced alone.
        short_blocks: of the job in which ranks were seen to do what the first of their stage does; 0 without one.
    """

    plan: Plan
    ranks: tuple[RankTrace, ...]
    planned: tuple[MemoryEstimate, ...]
    met: int | None
    short_blocks: int = 0

    @property
    def fullest(self) -> RankTrace:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "world": self.plan.world.size,
            "calls_that_meet": self.met,
            "ranks": [_as_data(rank, planned) for rank, planned in zip(self.ranks, self.planned, strict=True)],
        }


def _as_data(rank: RankTrace, planned: MemoryEstimate) -> dict[str, Any]:
    calls = [entry for entry in rank.program if isinstance(entry, Call)]
    return {
        "rank": rank.rank,
        "coordinates": rank.coordinates,
        "traced_as": rank.rank if rank.traced_as is None else rank.traced_as,
        "operators": rank.operators,
        "faults": [*rank.faults],
        "traced_peak_bytes": rank.peak,
        "owners": rank.owners,
        "closed_form_bytes": rank.closed_form.total,
        "error_percent": 100 * rank.error,
        "moment": rank.closed_form.moment,
        "causes": rank.closed_form.causes(),
        "planned": {"bytes": planned.total, "moment": planned.moment, "causes": planned.causes()},
        "collectives": [
            {
                "operation": call.operation,
                "group": call.group,
                "bytes": call.bytes,
                "unit": call.unit,
                "block": call.block,
                "line": call.line,
                **({"peer": call.peer} if call.is_message else {}),
            }
            for call in calls
        ],
    }


def trace_job(
    job: Job, world: World, facts: ModelFacts, rank: int | None = None, processes: int | None = None
) -> JobTrace:
    """Trace `job` on `world`.

    Args:
        rank: to trace alone; unset: one of every kind, whose collectives are checked to meet.
        processes: that trace at once; unset: as many as there are cores, up to `MOST`.

    Raises:
        LegalityError: the job cannot run on that world.
        ConfigError: the rank is not there, or the trace cannot follow the job; the message says which key.
        ModelError: collectives or messages of the ranks do not meet; the message says where.
        MachineError: this process is in a process group already.
    """
    plan = resolve(job, world, facts)
    if rank is not None and not 0 <= rank < world.size:
        raise ConfigError(f"--rank={rank} is not among the {world.size} ranks; use 0 to {world.size - 1}")
    refuse_untraceable(plan, facts)
    layout = Layout.from_plan(plan, 0)
    kinds = ranks_of_kinds(layout) if rank is None else {kind_of_rank(layout, rank): rank}
    short = short_job(job, plan, facts) if len(kinds) > len({kind.stage for kind in kinds}) else None
    microbatch = traced_batch(plan)
    with _tracing([(job, facts), *filter(None, [short])], plan.world, microbatch, len(kinds), processes) as traced:
        traces = _of_kinds(kinds, traced, short is not None)
    met = None if rank is not None else _check(layout, traces)
    planned = tuple(estimate(plan, facts, pipeline=trace.coordinates["pipeline"]) for trace in traces.values())
    return JobTrace(plan, tuple(traces.values()), planned, met, len(short[1].blocks) if short else 0)


def _check(layout: Layout, traces: dict[RankKind, RankTrace]) -> int:
    programs = {kind: Program(trace.program, trace.partitions) for kind, trace in traces.items()}

    def describe(rank: int) -> str:
        return where(layout.coordinates(rank))

    return check_agreement(lambda rank: programs[kind_of_rank(layout, rank)], layout.world_size, describe)


def where(coordinates: Mapping[Any, int]) -> str:
    """Return coordinates as text, those that are 0 left out; `first of all` where all are."""
    return ", ".join(f"{axis} {index}" for axis, index in coordinates.items() if index) or "first of all"


WHOLE, SHORT = 0, 1  # which of the jobs
Traced = Callable[[Sequence[tuple[int, int]]], Iterable[RankTrace]]  # of (which job, rank)


def _of_kinds(kinds: Mapping[RankKind, int], traced: Traced, has_short: bool) -> dict[RankKind, RankTrace]:
    """Trace a rank of every kind, at full depth those that do not show in the short job what they do."""
    if not has_short:
        return dict(zip(kinds, traced([(WHOLE, rank) for rank in kinds.values()]), strict=True))
    firsts = [kind for kind in kinds if kind == first_of_stage(kind)]
    tasks = [(WHOLE, kinds[kind]) for kind in firsts] + [(SHORT, rank) for rank in kinds.values()]
    done = [*traced(tasks)]
    traces = dict(zip(firsts, done, strict=False))
    short = dict(zip(kinds, done[len(firsts) :], strict=True))
    alike = [kind for kind in kinds if does_the_same(short[kind], short[first_of_stage(kind)])]
    others = [kind for kind in kinds if kind not in alike]
    traces |= {kind: as_rank(traces[first_of_stage(kind)], short[kind]) for kind in alike if kind not in traces}
    traces |= dict(zip(others, traced([(WHOLE, kinds[kind]) for kind in others]), strict=True))
    return {kind: traces[kind] for kind in kinds}


@contextmanager
def _tracing(
    jobs: list[tuple[Job, ModelFacts]], world: World, microbatch: TracedBatch, kinds: int, processes: int | None
) -> Iterator[Traced]:
    """Give what traces ranks of jobs: this process, or several where there are many kinds."""
    count = min(kinds, processes or min(MOST, available_cores()))
    # torch has one accelerator in a process: where it is in use, another is simulated elsewhere.
    is_taken = world.device_type != CPU and accelerator.is_accelerator(accelerator.entered())
    if (count == 1 or kinds <= FEW) and not is_taken:
        plans = [(resolve(job, world, facts), facts) for job, facts in jobs]
        yield lambda tasks: [trace_rank(*plans[number], rank, microbatch) for number, rank in tasks]
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=_prepare, initargs=(jobs, world, microbatch)
    ) as pool:
        yield lambda tasks: pool.map(_traced, tasks)


_worker: list[tuple[Plan, ModelFacts, TracedBatch]] = []  # of a process that traces, by number


def _prepare(jobs: list[tuple[Job, ModelFacts]], world: World, microbatch: TracedBatch) -> None:
    gc.freeze()  # what is imported is no garbage, and takes a seventh of a trace to look through again and again
    _worker.extend((resolve(job, world, facts), facts, microbatch) for job, facts in jobs)


def _traced(task: tuple[int, int]) -> RankTrace:
    number, rank = task
    plan, facts, microbatch = _worker[number]
    return trace_rank(plan, facts, rank, microbatch)
