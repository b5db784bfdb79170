"""The schedule of a pipeline as forwards and backwards on a time axis, from the seconds of a stage.

Each rank runs its forwards and backwards in the order of its schedule, each as soon as what it waits for is there:
fill-drain (arXiv 1811.06965), 1F1B (arXiv 2104.04473, section 2.2.1) and its interleaved form (section 2.2.2, with as
many warm-up forwards as torch's schedule). Stages take equal times; messages take none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Block(NamedTuple):
    """One forward or backward of a microbatch on a stage. Times in seconds."""

    rank: int
    stage: int
    microbatch: int
    backward: bool
    start: float
    seconds: float


Task = tuple[int, int, bool]  # stage, microbatch, backward


def timeline(
    ranks: int, virtual: int, microbatches: int, forward: float, backward: float, simple: bool = False
) -> list[Block]:
    """All forwards and backwards of a step on `ranks` pipeline ranks with `virtual` stages each.

    `forward`, `backward`: seconds of one microbatch on one stage.
    """
    waiting = [_order(rank, ranks, virtual, microbatches, simple) for rank in range(ranks)]
    done: dict[Task, float] = {}
    free = [0.0] * ranks
    blocks: list[Block] = []
    while any(waiting):
        for rank, tasks in enumerate(waiting):
            while tasks and (ready := _ready(tasks[0], done, ranks * virtual)) is not None:
                stage, microbatch, back = tasks.pop(0)
                start, seconds = max(free[rank], ready), backward if back else forward
                free[rank] = done[stage, microbatch, back] = start + seconds
                blocks.append(Block(rank, stage, microbatch, back, start, seconds))
    return blocks


def _ready(task: Task, done: dict[Task, float], stages: int) -> float | None:
    """When what a task waits for is there; None while it is not."""
    stage, microbatch, back = task
    needs: list[Task] = []
    if back:
        needs.append((stage, microbatch, False) if stage == stages - 1 else (stage + 1, microbatch, True))
    elif stage > 0:
        needs.append((stage - 1, microbatch, False))
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0.0)


def _order(rank: int, ranks: int, virtual: int, microbatches: int, simple: bool) -> list[Task]:
    """What a rank does, in its order: warm-up forwards, one forward and one backward in turn, the rest."""
    forwards = [(rank + turn * ranks, number, False) for turn, number in _turns(ranks, virtual, microbatches)]
    backwards = [
        (rank + (virtual - 1 - turn) * ranks, number, True) for turn, number in _turns(ranks, virtual, microbatches)
    ]
    if simple:
        return [*forwards, *backwards]
    each = microbatches // max(1, microbatches // ranks)
    warm = ranks - 1 - rank if virtual == 1 else (virtual - 1) * each + 2 * (ranks - 1 - rank)
    warm = min(warm, len(forwards))
    paired = [task for pair in zip(forwards[warm:], backwards, strict=False) for task in pair]
    return [*forwards[:warm], *paired, *backwards[len(forwards) - warm :]]


def _turns(ranks: int, virtual: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(which of a rank's stages, microbatch): rounds of microbatches through the first stage, then the second."""
    each = microbatches if virtual == 1 else microbatches // max(1, microbatches // ranks)
    for first in range(0, microbatches, each):
        for turn in range(virtual):
            yield from ((turn, number) for number in range(first, min(first + each, microbatches)))
