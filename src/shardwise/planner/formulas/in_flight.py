"""Counts what a pipeline rank holds of other microbatches beside a forward or a backward, by its schedule's order.

Stages of one rank need not be alike: the last has fewer blocks where it has the head. So each is counted by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from shardwise.planner.formulas.timeline import tasks_of_rank


class InFlight(NamedTuple):
    """Microbatches that are held beside one forward or backward, or behind weight gradients that were put off.

    Attributes:
        part: of the rank's stages, in order, the one that runs.
        in_backward: it runs backward, or computes weight gradients.
        forwards: of each part, those that await their backward, this one's aside.
        weights: of each part, backwards whose weight gradients wait, this one's aside.
        done: of each part, True where a microbatch has left its weight gradients.
        in_weights: it has computed those that were put off.
    """

    part: int
    in_backward: bool
    forwards: tuple[int, ...]
    weights: tuple[int, ...]
    done: tuple[bool, ...]
    in_weights: bool = False


def without_stages(accumulates: bool) -> tuple[InFlight, ...]:
    """Return a forward and a backward without a pipeline; where it `accumulates`, gradients are there before."""
    return tuple(InFlight(0, in_backward, (0,), (0,), (accumulates,)) for in_backward in (False, True))


@lru_cache(maxsize=256)
def in_flight_of(rank: int, ranks: int, virtual: int, microbatches: int, schedule: str) -> tuple[InFlight, ...]:
    """Return what rank `rank` of a pipeline holds in the tasks of a step, each such once."""
    return tuple(dict.fromkeys(_each(rank, ranks, virtual, microbatches, schedule)))


def _each(rank: int, ranks: int, virtual: int, microbatches: int, schedule: str) -> Iterator[InFlight]:
    tasks = tasks_of_rank(rank, ranks, virtual, microbatches, schedule)
    parts = {stage: part for part, stage in enumerate(sorted({stage for stage, _, _ in tasks}))}
    is_split = any(kind == "weights" for _, _, kind in tasks)
    forwards, weights, done = [0] * len(parts), [0] * len(parts), [False] * len(parts)
    for stage, _, kind in tasks:
        part = parts[stage]
        if kind == "weights":
            weights[part], done[part] = weights[part] - 1, True
            yield InFlight(part, True, tuple(forwards), tuple(weights), tuple(done), in_weights=True)
            continue
        forwards[part] -= kind != "forward"
        yield InFlight(part, kind != "forward", tuple(forwards), tuple(weights), tuple(done))
        forwards[part] += kind == "forward"
        waits = is_split and kind == "backward"
        weights[part] += waits
        done[part] = done[part] or not (waits or kind == "forward")
