"""The predicted time of a traced job's step, beside the closed form, and what its hosts have to do."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shardwise.errors import LegalityError
from shardwise.model.facts import ModelFacts
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.predict import STRAGGLERS, predict
from shardwise.planner.formulas.prediction import Cluster
from shardwise.testing.trace.agreement import Program
from shardwise.testing.trace.job import JobTrace
from shardwise.testing.trace.program import Operators, Read
from shardwise.testing.trace.rank import RankTrace, traced_microbatches
from shardwise.testing.trace.recorder import UPDATE
from shardwise.testing.trace.replay import Clock, Replay, TimelineSlice
from shardwise.testing.trace.roofline import Roofline


@dataclass(frozen=True)
class HostLoad:
    """The work of one rank's host in a step.

    Attributes:
        launches: kernels of the whole step.
        reads: line -> how often the host waits there for a value, in the traced step.
        share: seconds of launching over those of the accelerator.
        smallest_microbatch: sequences from which the accelerator takes longer, if its time grows with their number.
    """

    launches: int
    reads: Counter[str]
    share: float
    smallest_microbatch: int


@dataclass(frozen=True)
class StepTime:
    """The replayed step of one rank of each stage.

    Attributes:
        seconds: of a whole step; the slowest of many nodes takes longer.
        traced: of the traced microbatches.
        closed_form: seconds of a step as the planner says; None of a plan whose time it does not know.
        clocks, hosts: by rank.
        slices: what each stream did.
    """

    seconds: float
    traced: float
    closed_form: float | None
    clocks: dict[int, Clock]
    hosts: dict[int, HostLoad]
    slices: list[TimelineSlice]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "step_seconds": self.seconds,
            "traced_seconds": self.traced,
            "closed_form_seconds": self.closed_form,
            "ranks": [
                {
                    "rank": rank,
                    "computing_seconds": clock.busy,
                    "collectives_seconds": clock.collectives,
                    "messages_seconds": clock.messages,
                    "launching_seconds": clock.launching,
                    "launches": self.hosts[rank].launches,
                    "synchronisations": dict(self.hosts[rank].reads),
                    "smallest_microbatch": self.hosts[rank].smallest_microbatch,
                }
                for rank, clock in self.clocks.items()
            ],
        }

    @property
    def slowest(self) -> int:
        """The rank whose own work takes longest."""
        return max(self.clocks, key=lambda rank: self.clocks[rank].worked.own)


def step_time(trace: JobTrace, facts: ModelFacts, cluster: Cluster) -> StepTime:
    """Replay a traced job on a cluster. A microbatch that was not traced takes as long as one of the slowest stage."""
    ranks = {rank.rank: rank for rank in trace.ranks if not _beside(rank)}
    programs = {number: Program(rank.program, rank.partitions) for number, rank in ranks.items()}
    replay = Replay(programs, Roofline.of(cluster, trace.plan.dtypes.compute))
    replay.run()
    count, whole = traced_microbatches(trace.plan), trace.plan.accumulation
    once = trace.plan.holds_whole  # a step gathers, and reduces
    again = max(clock.worked.again - once * clock.worked.apart for clock in replay.clocks.values())
    more = (whole - count) / count * again
    hosts = {number: _host(rank, replay.clocks[number], trace) for number, rank in ranks.items()}
    closed_form = _closed_form(trace, facts, cluster)
    slowed = 1 + STRAGGLERS * math.log2(cluster.nodes)
    seconds = (replay.seconds + more) * slowed
    return StepTime(seconds, replay.seconds, closed_form, replay.clocks, hosts, replay.slices)


def _beside(rank: RankTrace) -> bool:
    """Return whether a rank does what the first of its stage does."""
    return any(index for axis, index in rank.coordinates.items() if axis != "pipeline")


def _closed_form(trace: JobTrace, facts: ModelFacts, cluster: Cluster) -> float | None:
    try:
        return predict(configuration_of(trace.plan, facts, cluster)).step_seconds
    except LegalityError:
        return None


def _host(rank: RankTrace, clock: Clock, trace: JobTrace) -> HostLoad:
    plan, launches = trace.plan, Counter[bool]()  # once a step, or not
    for entry in rank.program:
        if isinstance(entry, Operators):
            launches[entry.once or entry.phase == UPDATE] += entry.launches
    reads = Counter(entry.line for entry in rank.program if isinstance(entry, Read))
    share = clock.launching / max(1e-9, clock.busy + clock.collectives)
    return HostLoad(
        launches[True] + launches[False] * plan.accumulation // traced_microbatches(plan),
        reads,
        share,
        max(1, math.ceil(plan.microbatch * share)),
    )
