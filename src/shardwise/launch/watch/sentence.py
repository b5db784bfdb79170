"""One sentence about where all ranks are: those that hold the others up first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.launch.watch.position import RankPosition
from shardwise.launch.watch.process import DISK, GONE, STOPPED, SWAPPED

MOST_GROUPS = 4  # of ranks at one place that a sentence names
MOST_RANKS = 8  # of such a group that are named one by one
STATES = {
    STOPPED: "stopped (SIGSTOP or a debugger)",
    SWAPPED: "swapped out",
    DISK: "waiting for the disk",
}


def describe_positions(positions: Sequence[RankPosition]) -> str:
    """Return which ranks are where: `ranks 5 and 13 are in checkpoint.save, the others wait in all_gather of …`."""
    groups = sorted(_groups(positions), key=lambda group: (group[0].waits, len(group), group[0].rank))
    if len(groups) == 1 and groups[0][0].waits:
        behind = _behind(positions) if len(positions) > 1 else ""
        return f"{_subject(groups[0], positions, 'wait')} {_place(groups[0])}{behind}"
    named, more = groups[:MOST_GROUPS], groups[MOST_GROUPS:]
    parts = []
    for index, group in enumerate(named):
        is_rest = index == len(groups) - 1 and index > 0 and len(group) > 1
        parts.append(f"{'the others' if is_rest else _ranks(group)} {_verb(group, is_rest)} {_place(group)}")
    if more:
        parts.append(f"{sum(map(len, more))} more ranks are elsewhere")
    if len(groups) > 1 and all(group[0].waits for group in groups):
        parts[-1] += ": they are in different collectives, or the network between them is slow"
    return ", ".join(parts)


def _behind(positions: Sequence[RankPosition]) -> str:
    """Return who has entered fewer collectives of a group, of ranks that wait in one of the same name."""
    most = max(position.sequence for position in positions)
    # In other groups a rank may skip units, so numbers differ where nobody is behind.
    is_counted = positions[0].collective.endswith(" over world")
    late = [position for position in positions if is_counted and position.sequence < most]
    if not late:
        return ", and none of them is behind: look at the network between them"
    calls = most - min(position.sequence for position in late)
    return f", and {_ranks(late)} {'is' if len(late) == 1 else 'are'} {calls} calls behind"


def _groups(positions: Iterable[RankPosition]) -> list[list[RankPosition]]:
    """Put the ranks that are at one place together."""
    places: dict[tuple[str, ...], list[RankPosition]] = {}
    for position in positions:
        # Not by the line: ranks that compute alike are at different lines of it.
        place = position.collective if position.waits else f"{position.phase} {_function(position)}"
        places.setdefault((position.state, place), []).append(position)
    return list(places.values())


def _subject(group: Sequence[RankPosition], positions: Sequence[RankPosition], verb: str) -> str:
    return f"all {len(group)} ranks {verb}" if len(positions) > 1 else f"rank {group[0].rank} {verb}s"


def _ranks(group: Sequence[RankPosition]) -> str:
    """Return `rank 3` or `ranks 5 and 13`, with the host where a rank alone is meant and there are several."""
    numbers = [str(position.rank) for position in group]
    if len(numbers) == 1:
        return f"rank {numbers[0]}{_at_host(group[0])}"
    if len(numbers) > MOST_RANKS:
        return f"ranks {', '.join(numbers[:MOST_RANKS])} and {len(numbers) - MOST_RANKS} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _at_host(position: RankPosition) -> str:
    return f" ({position.host})" if position.host else ""


def _verb(group: Sequence[RankPosition], is_rest: bool) -> str:
    is_plural = is_rest or len(group) > 1
    if group[0].waits:
        return "wait" if is_plural else "waits"
    return "are" if is_plural else "is"


def _place(group: Sequence[RankPosition]) -> str:
    """Return where the ranks of a group are, and for how long."""
    first, seconds = group[0], max(position.seconds for position in group)
    if first.state == GONE:
        return "gone"
    since = f"since {seconds:.0f} s"
    if first.waits:
        return f"in {first.collective} {since}"
    where = first.phase + (f" ({first.frame})" if first.frame else "")
    state = f"{STATES[first.state]} " if first.state else ""
    inside = f", inside of {first.collective}," if first.collective else ""
    return f"{state}in {where}{inside} {since}"


def _function(position: RankPosition) -> str:
    file, _, rest = position.frame.partition(":")
    return f"{file} {rest.partition(' in ')[2]}"
