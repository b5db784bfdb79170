"""The watcher of a launcher: a thread that says where the ranks are when a step takes far longer than others.

It only reads, and ends nothing: a collective that hangs is ended by `parallel.timeout_seconds`. What is done in about
equal times is judged by its own median: a step, a batch of an evaluation, a save. What has not been done three times
yet gets a longer time, since the first step compiles and connects. Outside of steps a rank may take as long as it
wants, but not wait so long for the others.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch.distributed as dist

from shardwise.collectives.rank_record import RecordedPlace, WorkUnit
from shardwise.collectives.topology import host_name
from shardwise.launch.watch.announced import AnnouncedRank, announced_ranks
from shardwise.launch.watch.hosts import HostExchange
from shardwise.launch.watch.live import live_launcher
from shardwise.launch.watch.position import RankPosition, gather_positions
from shardwise.launch.watch.sentence import describe_positions

LOOK_SECONDS = 0.5
STOPPED_SECONDS = 5.0  # between two looks, after which this process itself was stopped, as a suspended job is
ENOUGH = 3  # units of a kind whose median is taken
UNKNOWN_FACTOR = 5.0  # of `seconds`, for what has no median
SAME_HANG_SECONDS = 10.0  # in which several hosts ask because of one
UNTIMED = (WorkUnit.START, WorkUnit.OUTSIDE)
STACKS_FILE = "stacks.txt"


@dataclass(frozen=True)
class WatchSettings:
    """When a run is taken as hung.

    Attributes:
        medians: how many medians of its kind a step may take; None: nothing is ever said.
        seconds: that it may take in any case.
        output: directory of the run; None where it has none.
    """

    medians: float | None = 10.0
    seconds: float = 60.0
    output: Path | None = None

    def threshold(self, place: RecordedPlace) -> float:
        """Return the seconds after which what a rank is at takes too long."""
        known = place.seconds[place.unit]
        if self.medians is None:
            return math.inf
        unknown = UNKNOWN_FACTOR * self.seconds
        if place.unit in UNTIMED or len(known) < ENOUGH:
            return unknown
        # Most saves only begin to write; one that is waited for takes far longer.
        least = unknown if place.unit is WorkUnit.SAVE else self.seconds
        return max(least, self.medians * median(known))


DEFAULTS = WatchSettings()


class Watcher:
    """Watches the ranks of this host while it is entered.

    Args:
        settings: when to say something.
        reports: the directory in which the ranks of the present attempt have announced themselves.
        exchange: with the other hosts of the job, where there are any; host 0 says where all ranks are.
        say: prints a sentence.
    """

    def __init__(
        self,
        settings: WatchSettings,
        reports: Callable[[], Path],
        exchange: HostExchange | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.reports, self.exchange, self.say = settings, reports, exchange, say or _print
        self._ended = threading.Event()
        self._woken = 0  # when this process was last found to have been stopped, monotonic ns
        self._said: float = 0.0  # seconds that what was said last had taken
        self._reported = -SAME_HANG_SECONDS
        self._thread = threading.Thread(target=self._watch, name="shardwise-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2.0)  # it may be asking for stacks

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > STOPPED_SECONDS:
                self._woken = time.monotonic_ns()
            looked = now
            with suppress(OSError, ValueError, dist.DistError):  # a directory or a host goes away
                self.look()

    def look(self) -> None:
        """Look at every rank once, and say where they are if one takes too long."""
        ranks = announced_ranks(self.reports())
        overdue = self._overdue(ranks)
        if self.exchange is not None and (request := self.exchange.pending()):
            self._answer(request, ranks, overdue)
        if overdue is None:
            self._say_end(ranks)
            return
        seconds = self._seconds(overdue)
        if self._said and seconds < 2 * self._said:
            return
        self._said = seconds
        if self.exchange is not None:
            self.exchange.request()
            return
        positions = gather_positions(ranks, "")
        now = next((rank.place() for rank in ranks if rank.rank == overdue.rank), None)
        if now is None or now.began != overdue.began:
            self._said = 0.0  # it has gone on meanwhile, or it ended
            return
        self._report(overdue, positions)

    def _answer(self, request: int, ranks: Sequence[AnnouncedRank], overdue: RecordedPlace | None) -> None:
        """Tell the other hosts where the ranks of this one are; on host 0 say where all are."""
        assert self.exchange is not None
        self.exchange.answer(request, gather_positions(ranks, host_name()))
        place = overdue or next((place for rank in ranks if (place := rank.place()) is not None), None)
        if self.exchange.index or place is None or time.monotonic() - self._reported < SAME_HANG_SECONDS:
            return
        positions, missing = self.exchange.collect(request)
        silent = f"; host {', '.join(map(str, missing))} does not answer" if missing else ""
        self._report(place, positions, silent)

    def _report(self, place: RecordedPlace, positions: Sequence[RankPosition], more: str = "") -> None:
        self._reported = time.monotonic()
        self.say(f"{what_is_slow(place, self._seconds(place))}: {describe_positions(positions)}{more}")
        self._keep(positions)

    def _overdue(self, ranks: Sequence[AnnouncedRank]) -> RecordedPlace | None:
        """Return the place of the rank that is furthest over its time; None where none is."""
        places = [place for rank in ranks if (place := rank.place()) is not None]
        late = {self._seconds(place) / self.settings.threshold(place): place for place in places}
        return late[max(late)] if late and max(late) > 1 else None

    def _seconds(self, place: RecordedPlace) -> float:
        """Return for how long a rank has been at its step, or outside of one in a collective."""
        if place.unit not in UNTIMED:
            began = place.began
        elif place.collectives:
            began = min(collective.began for collective in place.collectives)
        else:
            return 0.0
        return (time.monotonic_ns() - max(began, self._woken)) / 1e9

    def _say_end(self, ranks: Sequence[AnnouncedRank]) -> None:
        if self._said and ranks and all(place is not None for place in (rank.place() for rank in ranks)):
            self._said = 0.0
            if self.exchange is None or self.exchange.index == 0:
                self.say("the run goes on")

    def _keep(self, positions: Sequence[RankPosition]) -> None:
        """Write the stacks into the run's output directory; beside, since its disk may be what hangs."""
        if self.settings.output is not None:
            path, text = self.settings.output / STACKS_FILE, stacks_text(positions)
            threading.Thread(target=_write, args=(path, text), daemon=True).start()


@contextmanager
def watched(
    settings: WatchSettings, directory: Path, reports: Callable[[], Path], exchange: HostExchange | None
) -> Iterator[None]:
    """Watch the ranks that a launcher has started below `directory`; meanwhile `shardwise inspect` finds them."""
    with live_launcher(settings.output, host_name(), directory), Watcher(settings, reports, exchange):
        yield


def what_is_slow(place: RecordedPlace, seconds: float) -> str:
    """Return `step 12 has taken 94 s, the median is 1.2 s`."""
    known = place.seconds[place.unit]
    usual = f", the median is {median(known):.3g} s" if len(known) >= ENOUGH else ""
    what = f"step {place.step + 1}" if place.unit is WorkUnit.STEP else f"{place.unit} after step {place.step}"
    return f"{what} has taken {seconds:.0f} s{usual}"


def stacks_text(positions: Sequence[RankPosition]) -> str:
    """Return the stacks of all ranks, the innermost line first."""
    parts = [time.strftime("%Y-%m-%d %H:%M:%S\n")]
    for position in positions:
        host = f" on {position.host}" if position.host else ""
        parts.append(f"rank {position.rank}{host}, step {position.step + 1}: {describe_positions([position])}\n")
        parts += [f"  {line}\n" for line in position.stack or ("no stack: it did not answer",)]
    return "".join(parts) + "\n"


def _write(path: Path, text: str) -> None:
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(text)


def _print(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
