"""Stragglers: ranks whose own part of a step takes longer than that of ranks with the same work, by host and device.

The others wait for them in collectives. So what is compared is the time without those: the wait for data, and the
rest, which is computation. Ranks of one pipeline stage have the same work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from shardwise.collectives.names import CollectiveName
from shardwise.collectives.topology import host_name
from shardwise.job.axes import Axis
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record

STEPS = 20  # whose median counts
RATIO = 1.5  # to the median of ranks with the same work, from which a rank is an outlier
SHARE = 0.1  # of a step, which its excess takes at least
KINDS = {"compute_seconds": "computation", "data_seconds": "the wait for data"}
PLACES = CollectiveName("hosts and devices", "world", "all_gather_object")


@dataclass(frozen=True)
class RankPlace:
    """The host and the device of a rank, and the pipeline stage that it computes."""

    rank: int
    host: str
    device: str
    stage: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True)
class Straggler:
    """An outlier: whose, in what of `KINDS`, and by how much."""

    place: RankPlace
    kind: str
    seconds: float
    usual: float

    def __str__(self) -> str:
        return (
            f"{self.place} is slow: {KINDS[self.kind]} takes it {self.seconds:.3g} s a step, {self.usual:.3g} s the "
            f"ranks with the same work (medians of the last {STEPS} steps)"
        )


def find_stragglers(records: Sequence[Record], places: Sequence[RankPlace]) -> list[Straggler]:
    """Return the outliers among ranks, by the records of some steps."""
    stragglers, step_seconds = [], median(record["seconds"] for record in records)
    for kind in KINDS:
        known = [record[kind] for record in records if kind in record]
        if not known:
            continue
        seconds = [median(step[place.rank] for step in known) for place in places]
        for place in places:
            peers = [seconds[other.rank] for other in places if other.stage == place.stage and other != place]
            own, usual = seconds[place.rank], median(peers) if peers else seconds[place.rank]
            if own > RATIO * usual and own - usual > SHARE * step_seconds:
                stragglers.append(Straggler(place, kind, own, usual))
    return stragglers


class StragglerReport(Callback):
    """Says which ranks are slow, each once for each kind of time, and keeps it in metrics.jsonl."""

    def __init__(self) -> None:
        self._places: list[RankPlace] = []
        self._records: deque[Record] = deque(maxlen=STEPS)
        self._said: set[tuple[int, str]] = set()

    def on_start(self, session: ObservedSession) -> None:
        """Learn where the ranks are."""
        stage = session.layout.index(Axis.PIPELINE)
        own = RankPlace(session.rank, host_name(), str(session.model.device), stage)
        places: list[RankPlace | None] = [None] * session.plan.world.size
        with PLACES:
            dist.all_gather_object(places, own)
        self._places = [place for place in places if place is not None]

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Compare the ranks."""
        self._records.append({key: record[key] for key in (*KINDS, "seconds") if key in record})
        if len(self._records) < STEPS or record["step"] % STEPS:
            return
        for straggler in find_stragglers(self._records, self._places):
            if (straggler.place.rank, straggler.kind) in self._said:
                continue
            self._said.add((straggler.place.rank, straggler.kind))
            self._tell(session, straggler, record["step"])

    def _tell(self, session: ObservedSession, straggler: Straggler, step: int) -> None:
        place = straggler.place
        kept = {
            "step": step,
            "straggler": f"{place.rank} {place.host} {place.device}",
            straggler.kind: straggler.seconds,
            f"usual_{straggler.kind}": straggler.usual,
        }
        session.note(f"note: {straggler}", kept)
