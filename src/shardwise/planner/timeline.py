"""The schedule of a pipeline as forwards and backwards on a time axis, from the seconds of a stage.

Each rank runs its forwards and backwards in the order of its schedule, each as soon as what it waits for is there:
fill-drain (arXiv 1811.06965), 1F1B (arXiv 2104.04473, section 2.2.1), its interleaved form (section 2.2.2) and that
with the gradients of weights put off (ZB1P, arXiv 2401.10241, section 2), the last two as torch's schedules order them.
Stages take equal times; messages take none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weights"]


class Block(NamedTuple):
    """One forward, backward, or put-off part of a backward, of a microbatch on a stage. Times in seconds."""

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    seconds: float


Task = tuple[int, int, Kind]  # stage, microbatch


def timeline(
    ranks: int, virtual: int, microbatches: int, forward: float, backward: float, schedule: str = "interleaved"
) -> list[Block]:
    """All forwards and backwards of a step on `ranks` pipeline ranks with `virtual` stages each.

    Args:
        forward, backward: seconds of one microbatch on one stage.
        schedule: `simple`, `interleaved`, or `zero_bubble`, where the gradients of weights take as long as a forward.
    """
    split = schedule == "zero_bubble"
    lasting = {"forward": forward, "backward": backward - forward * split, "weights": forward}
    waiting = [_order(rank, ranks, virtual, microbatches, schedule) for rank in range(ranks)]
    done: dict[Task, float] = {}
    free = [0.0] * ranks
    blocks: list[Block] = []
    while any(waiting):
        for rank, tasks in enumerate(waiting):
            while tasks and (ready := _ready(tasks[0], done, ranks * virtual)) is not None:
                stage, microbatch, kind = tasks.pop(0)
                start = max(free[rank], ready)
                free[rank] = done[stage, microbatch, kind] = start + lasting[kind]
                blocks.append(Block(rank, stage, microbatch, kind, start, lasting[kind]))
    return blocks


def _ready(task: Task, done: dict[Task, float], stages: int) -> float | None:
    """When what a task waits for is there; None while it is not."""
    stage, microbatch, kind = task
    needs: list[Task] = []
    if kind == "weights":
        needs.append((stage, microbatch, "backward"))
    elif kind == "backward":
        last = stage == stages - 1
        needs.append((stage, microbatch, "forward") if last else (stage + 1, microbatch, "backward"))
    elif stage > 0:
        needs.append((stage - 1, microbatch, "forward"))
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0.0)


def _order(rank: int, ranks: int, virtual: int, microbatches: int, schedule: str) -> list[Task]:
    """What a rank does, in its order: warm-up forwards, one forward and one backward in turn, the rest.

    Gradients of weights follow their backward, on rank r by r backwards later.
    """
    turns = list(_turns(ranks, virtual, microbatches))
    forwards: list[Task] = [(rank + turn * ranks, number, "forward") for turn, number in turns]
    backwards: list[Task] = [(rank + (virtual - 1 - turn) * ranks, number, "backward") for turn, number in turns]
    if schedule == "simple":
        return [*forwards, *backwards]
    split = schedule == "zero_bubble"
    each = microbatches // max(1, microbatches // ranks)
    warm = ranks - 1 - rank if virtual == 1 else (virtual - 1) * each + (1 if split else 2) * (ranks - 1 - rank)
    warm = min(warm, len(forwards))
    order, later = forwards[:warm], deque[Task]()
    for number, (stage, microbatch, _) in enumerate(backwards):
        order += [*forwards[warm + number : warm + number + 1], backwards[number]]
        later.append((stage, microbatch, "weights"))
        if split and number >= rank:
            order.append(later.popleft())
    return [*order, *later] if split else order


def _turns(ranks: int, virtual: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(which of a rank's stages, microbatch): rounds of microbatches through the first stage, then the second."""
    each = microbatches if virtual == 1 else microbatches // max(1, microbatches // ranks)
    for first in range(0, microbatches, each):
        for turn in range(virtual):
            yield from ((turn, number) for number in range(first, min(first + each, microbatches)))
