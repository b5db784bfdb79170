"""The schedule of a pipeline as forwards and backwards on a time axis, from the seconds of a stage.

Each rank runs its forwards and backwards in the order of its schedule, each as soon as what it waits for is there:
fill-drain (arXiv 1811.06965), 1F1B (arXiv 2104.04473, section 2.2.1), its interleaved form (section 2.2.2) and that
with the gradients of weights put off (ZB1P, arXiv 2401.10241, section 2), and the two whose stages go down the ranks
and up again: ZB-V (section 6) and DualPipeV (after arXiv 2412.19437, section 3.2.1). The virtual ones are ordered as
torch's schedules are, which a test compares. Stages take equal times; messages take none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from shardwise.plan.draft import SPLIT_SCHEDULES, V_SCHEDULES

Kind = Literal["forward", "backward", "weights", "whole backward"]


class TimelineTask(NamedTuple):
    """One forward or backward of a microbatch on a stage. Times in seconds.

    Where a schedule splits backwards, `backward` is the part that the stage before waits for, `weights` the other, and
    `whole backward` one that is not split.
    """

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    seconds: float


Task = tuple[int, int, Kind]  # stage, microbatch


def timeline(
    ranks: int, virtual: int, microbatches: int, forward: float, backward: float, schedule: str = "interleaved"
) -> list[TimelineTask]:
    """Return all forwards and backwards of a step on `ranks` pipeline ranks with `virtual` stages each.

    Args:
        forward, backward: seconds of one microbatch on one stage.
        schedule: `parallel.pipeline`; where backward is split, the gradients of weights take as long as a forward.
    """
    split = schedule in SPLIT_SCHEDULES
    lasting = {
        "forward": forward,
        "backward": backward - forward * split,
        "weights": forward,
        "whole backward": backward,
    }
    waiting = [tasks_of_rank(rank, ranks, virtual, microbatches, schedule) for rank in range(ranks)]
    done: dict[Task, float] = {}
    free = [0.0] * ranks
    blocks: list[TimelineTask] = []
    while any(waiting):
        for rank, tasks in enumerate(waiting):
            while tasks and (ready := _ready(tasks[0], done, ranks * virtual)) is not None:
                stage, microbatch, kind = tasks.pop(0)
                start = max(free[rank], ready)
                free[rank] = done[stage, microbatch, _BROUGHT.get(kind, kind)] = start + lasting[kind]
                blocks.append(TimelineTask(rank, stage, microbatch, kind, start, lasting[kind]))
    return blocks


_BROUGHT: dict[Kind, Kind] = {"whole backward": "backward"}  # what others wait for


def _ready(task: Task, done: dict[Task, float], stages: int) -> float | None:
    """When what a task waits for is there; None while it is not."""
    stage, microbatch, kind = task
    needs: list[Task] = []
    if kind == "weights":
        needs.append((stage, microbatch, "backward"))
    elif kind != "forward":
        last = stage == stages - 1
        needs.append((stage, microbatch, "forward") if last else (stage + 1, microbatch, "backward"))
    elif stage > 0:
        needs.append((stage - 1, microbatch, "forward"))
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0.0)


def tasks_of_rank(rank: int, ranks: int, virtual: int, microbatches: int, schedule: str) -> list[Task]:
    """Return what a rank does, in its order: warm-up forwards, one forward and one backward in turn, the rest.

    Gradients of weights follow their backward, on rank r by r backwards later.
    """
    if schedule in V_SCHEDULES:
        phases = _zbv(rank, ranks, microbatches) if schedule == "zbv" else _dualpipev(rank, ranks, microbatches)
        return _in_v(phases, rank, 2 * ranks - 1 - rank)
    turns = list(_turns(ranks, virtual, microbatches))
    forwards: list[Task] = [(rank + turn * ranks, number, "forward") for turn, number in turns]
    backwards: list[Task] = [(rank + (virtual - 1 - turn) * ranks, number, "backward") for turn, number in turns]
    if schedule == "simple":
        return [*forwards, *backwards]
    split = schedule == "zero_bubble"
    in_turn = microbatches // max(1, microbatches // ranks)
    warm = ranks - 1 - rank if virtual == 1 else (virtual - 1) * in_turn + (1 if split else 2) * (ranks - 1 - rank)
    warm = min(warm, len(forwards))
    tasks, later = forwards[:warm], deque[Task]()
    for number, (stage, microbatch, _) in enumerate(backwards):
        tasks += [*forwards[warm + number : warm + number + 1], backwards[number]]
        later.append((stage, microbatch, "weights"))
        if split and number >= rank:
            tasks.append(later.popleft())
    return [*tasks, *later] if split else tasks


def _turns(ranks: int, virtual: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(which of a rank's stages, microbatch): rounds of microbatches through the first stage, then the second."""
    in_turn = microbatches if virtual == 1 else microbatches // max(1, microbatches // ranks)
    for first in range(0, microbatches, in_turn):
        for turn in range(virtual):
            yield from ((turn, number) for number in range(first, min(first + in_turn, microbatches)))


# What a rank of a V does: (how often, what). F, I, W and B are forward, backward for the input, for the weights, and
# both, of its stage on the way down; f, i, w and b of the one on the way up; `.` takes the weights that wait longest.
_Phases = list[tuple[int, str]]


def _zbv(rank: int, ranks: int, microbatches: int) -> _Phases:
    """Warm-up until the first microbatch is back, one of each in turn, and the weights of the last backwards."""
    behind = ranks - 1 - rank
    return [
        (2 * behind + 1, "F"),
        (rank, "fF"),
        (behind + 1, "fiw"),
        (microbatches - behind - ranks, "FIWfiw"),
        (behind, "IWfiw"),
        (rank, "Ii"),
        (behind + 1, "IW"),
        (rank, "w"),
        (rank, "W"),
    ]


def _dualpipev(rank: int, ranks: int, microbatches: int) -> _Phases:
    """Forwards and backwards in pairs, which could run at once; from the middle of the drain on, backward is split."""
    behind, last = ranks - 1 - rank, rank + 1
    return [
        (2 * behind, "F"),
        (last, "Ff"),
        (behind, "iwf"),
        (microbatches - 2 * ranks + last, "FbfB"),
        (behind, "bfB"),
        (last // 2, "bB"),
        (last % 2, "bI"),
        (last // 2, "iI"),
        (behind, ".I"),
        (last, "."),
    ]


_KINDS: dict[str, Kind] = {"F": "forward", "I": "backward", "W": "weights", "B": "whole backward"}


def _in_v(phases: _Phases, down: int, up: int) -> list[Task]:
    """The tasks of `phases` on a rank with these two stages; each stage takes the microbatches in order."""
    letters = "".join(times * what for times, what in phases)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    waiting: list[tuple[int, int]] = []  # stage and microbatch whose weights do
    tasks: list[Task] = []
    for letter in letters:
        stage = down if letter.isupper() else up
        kind: Kind = _KINDS.get(letter.upper(), "weights")
        if kind == "weights":
            number = next(n for n, (of, _) in enumerate(waiting) if letter == "." or of == stage)
            tasks.append((*waiting.pop(number), kind))
            continue
        counter = (stage, kind if kind == "forward" else "backward")
        tasks.append((stage, counts[counter], kind))
        if kind == "backward":
            waiting.append((stage, counts[counter]))
        counts[counter] += 1
    return tasks
