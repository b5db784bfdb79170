"""A whole job traced: one rank of every kind, in turn or in processes of their own, and the check of them all."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.launch.process_group import available_cores
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.trace.agreement import Program, check_agreement
from shardwise.testing.trace.kinds import RankKind, kind_of_rank, ranks_of_kinds
from shardwise.testing.trace.program import Call
from shardwise.testing.trace.rank import RankTrace, trace_rank
from shardwise.testing.trace.refusals import refuse_untraceable

MOST = 8  # processes, of half a GiB each
FEW = 2  # kinds that are traced one after the other, since a process takes seconds to start


@dataclass(frozen=True)
class JobTrace:
    """The traced ranks of a job.

    Attributes:
        ranks: one of every kind, or the one that was asked for.
        planned: the closed form of the plan's memory, of the pipeline rank of each.
        met: calls of all ranks that were seen to meet; None where one rank was traced alone.
    """

    plan: Plan
    ranks: tuple[RankTrace, ...]
    planned: tuple[MemoryEstimate, ...]
    met: int | None

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
        "operators": rank.operators,
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
    traces = dict(zip(kinds, _traces(job, plan, facts, [*kinds.values()], processes), strict=True))
    met = None if rank is not None else _check(layout, traces)
    planned = tuple(estimate(plan, facts, pipeline=trace.coordinates["pipeline"]) for trace in traces.values())
    return JobTrace(plan, tuple(traces.values()), planned, met)


def _check(layout: Layout, traces: dict[RankKind, RankTrace]) -> int:
    programs = {kind: Program(trace.program, trace.partitions) for kind, trace in traces.items()}

    def describe(rank: int) -> str:
        return where(layout.coordinates(rank))

    return check_agreement(lambda rank: programs[kind_of_rank(layout, rank)], layout.world_size, describe)


def where(coordinates: Mapping[Any, int]) -> str:
    """Return coordinates as text, those that are 0 left out; `first of all` where all are."""
    return ", ".join(f"{axis} {index}" for axis, index in coordinates.items() if index) or "first of all"


def _traces(job: Job, plan: Plan, facts: ModelFacts, ranks: list[int], processes: int | None) -> Iterator[RankTrace]:
    count = min(len(ranks), processes or min(MOST, available_cores()))
    if count == 1 or len(ranks) <= FEW:
        yield from (trace_rank(plan, facts, rank) for rank in ranks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=_prepare, initargs=(job, plan.world, facts)
    ) as pool:
        yield from pool.map(_traced, ranks)


_worker: list[tuple[Plan, ModelFacts]] = []  # of a process that traces


def _prepare(job: Job, world: World, facts: ModelFacts) -> None:
    gc.freeze()  # what is imported is no garbage, and takes a seventh of a trace to look through again and again
    _worker.append((resolve(job, world, facts), facts))


def _traced(rank: int) -> RankTrace:
    plan, facts = _worker[0]
    return trace_rank(plan, facts, rank)
