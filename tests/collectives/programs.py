"""Programs of collectives drawn from a seed: over random subgroups, of every dtype and form, that wait, drop or fail.

    python -m tests.collectives.programs FIRST [END]     # run the programs of these seeds; a fault names its seed

A program makes groups of some of the ranks, starts operations on them, waits for them in another order, and ends in one
of several ways. What comes out is compared with a plain computation of all ranks' inputs. Every rank draws the same
program; ranks that have no part in an operation skip it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import registration
from shardwise.testing.world import WorldPool
from tests.collectives.test_engine import FLOATS, INTEGERS, REDUCTIONS, check_reduced

RANKS = 4
CHUNK = 50  # programs of one run of the pool
COMPLEX = (torch.complex64, torch.complex128)
LARGE = 64 << 20  # bytes, at most
PERIOD = 4099  # elements after which a large input repeats: they are cheap to draw
LONG = 60  # seconds that an operation may take
SHORT = 0.3  # the same where one rank does not come
ENDS = {"waits": 80, "drops": 12, "is late": 4, "differs": 4}


@dataclass
class Member:
    """One rank's part in a program: its groups and what is under way."""

    seed: int
    backend: str
    draw: random.Random
    groups: list[tuple[list[int], Any]] = field(default_factory=list)
    under_way: list[tuple[Callable[[], Any], Callable[[], None]]] = field(default_factory=list)  # waits; checks
    drawn: int = 0


@dataclass(frozen=True)
class Step:
    """One operation, as every member of its group draws it."""

    members: list[int]
    group: Any
    seed: int
    count: int
    dtype: torch.dtype
    draw: random.Random

    @property
    def me(self) -> int:
        return self.members.index(dist.get_rank())

    def input_of(self, index: int, count: int | None = None) -> Tensor:
        """What the member of that index brings."""
        count = self.count if count is None else count
        generator = torch.Generator().manual_seed(self.seed * 64 + index)
        some = min(count, PERIOD)
        if self.dtype.is_floating_point:
            values = torch.rand(some, generator=generator) * 2 - 1
        elif self.dtype.is_complex:
            values = torch.randn(some, generator=generator, dtype=self.dtype)
        else:
            values = torch.randint(0, 2 if self.dtype == torch.bool else 3, (some,), generator=generator)
        return values.to(self.dtype).repeat(-(-count // some) if some else 1)[:count]

    def inputs(self, count: int | None = None) -> list[Tensor]:
        return [self.input_of(index, count) for index in range(len(self.members))]

    def formed(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in memory of another form: as it is, behind another element, or with gaps."""
        form = self.draw.randrange(3)
        if form == 0 or tensor.numel() > PERIOD:
            return tensor.clone()
        if form == 1:
            return torch.cat([tensor[:1], tensor])[1:] if tensor.numel() else tensor.clone()
        return torch.stack([tensor, tensor], 1)[:, 0]

    def empty(self, count: int | None = None) -> Tensor:
        return self.formed(torch.zeros(self.count if count is None else count, dtype=self.dtype))

    def reduction(self) -> str:
        if self.dtype == torch.bool:
            return self.draw.choice(("sum", "min", "max", "product"))
        return self.draw.choice(("sum", "avg") if self.dtype.is_complex else [*REDUCTIONS])


def check(name: str, found: Tensor, inputs: list[Tensor]) -> None:
    """Compare a reduction with the plain one."""
    if found.is_complex():
        check_reduced(name, torch.view_as_real(found.contiguous()), [torch.view_as_real(each) for each in inputs])
    elif found.dtype == torch.bool:
        whole = torch.stack(inputs)
        assert torch.equal(found, whole.any(0) if name in ("sum", "max") else whole.all(0)), name
    else:
        check_reduced(name, found, inputs)


def equal(found: Tensor, right: Tensor) -> None:
    assert torch.equal(found, right), f"{(found != right).sum()} of {right.numel()} elements differ"


Operation = tuple[Callable[[bool], Any], Callable[[], None]]  # starts it, asynchronous or not; checks what came out


def all_reduce(step: Step) -> Operation:
    name, inputs = step.reduction(), step.inputs()
    data = step.formed(inputs[step.me])
    return lambda later: dist.all_reduce(data, REDUCTIONS[name], step.group, later), lambda: check(name, data, inputs)


def all_gather(step: Step) -> Operation:
    inputs, whole = step.inputs(), torch.zeros(step.count * len(step.members), dtype=step.dtype)
    own = step.formed(inputs[step.me])
    if step.draw.random() < 0.5:
        return lambda later: all_gather_single(whole, own, step.group, later), lambda: equal(whole, torch.cat(inputs))
    outs = [step.empty() for _ in inputs]
    return (
        lambda later: dist.all_gather(outs, own, step.group, later),
        lambda: equal(torch.cat(outs), torch.cat(inputs)),
    )


def reduce_scatter(step: Step) -> Operation:
    name, ranks, out = step.reduction(), len(step.members), step.empty()
    inputs = step.inputs(step.count * ranks)
    own = [each[step.me * step.count : (step.me + 1) * step.count] for each in inputs]
    given = inputs[step.me]
    if step.draw.random() < 0.5:
        start = lambda later: reduce_scatter_single(out, given, REDUCTIONS[name], step.group, later)  # noqa: E731
    else:
        parts = [step.formed(given[index * step.count : (index + 1) * step.count]) for index in range(ranks)]
        start = lambda later: dist.reduce_scatter(out, parts, REDUCTIONS[name], step.group, later)  # noqa: E731
    return start, lambda: check(name, out, own)


def uneven_reduce_scatter(step: Step) -> Operation:
    name = step.reduction()
    sizes = [step.draw.choice((0, step.count // 3, step.count)) for _ in step.members]
    inputs, out, begin = step.inputs(sum(sizes)), step.empty(sizes[step.me]), sum(sizes[: step.me])
    parts = [step.formed(part) for part in inputs[step.me].split(sizes)]
    own = [each[begin : begin + sizes[step.me]] for each in inputs]
    return (
        lambda later: dist.reduce_scatter(out, parts, REDUCTIONS[name], step.group, later),
        lambda: check(name, out, own),
    )


def reduce(step: Step) -> Operation:
    name, inputs, root = step.reduction(), step.inputs(), step.draw.randrange(len(step.members))
    data = step.formed(inputs[step.me])
    return (
        lambda later: dist.reduce(data, step.members[root], REDUCTIONS[name], step.group, later),
        lambda: check(name, data, inputs) if step.me == root else equal(data, inputs[step.me]),
    )


def broadcast(step: Step) -> Operation:
    root = step.draw.randrange(len(step.members))
    data = step.formed(step.input_of(step.me))
    return (
        lambda later: dist.broadcast(data, step.members[root], step.group, later),
        lambda: equal(data, step.input_of(root)),
    )


def gather(step: Step) -> Operation:
    root, inputs = step.draw.randrange(len(step.members)), step.inputs()
    outs = [step.empty() for _ in inputs] if step.me == root else None
    own = step.formed(inputs[step.me])
    return (
        lambda later: dist.gather(own, outs, step.members[root], step.group, later),
        lambda: equal(torch.cat(outs), torch.cat(inputs)) if outs else None,
    )


def scatter(step: Step) -> Operation:
    root, inputs, out = step.draw.randrange(len(step.members)), step.inputs(), step.empty()
    given = [step.formed(each) for each in inputs] if step.me == root else None
    return (
        lambda later: dist.scatter(out, given, step.members[root], step.group, later),
        lambda: equal(out, inputs[step.me]),
    )


def all_to_all(step: Step) -> Operation:
    splits = [[step.draw.choice((0, step.count // 3, step.count)) for _ in step.members] for _ in step.members]
    inputs = [step.input_of(index, sum(row)) for index, row in enumerate(splits)]
    expected = [row[step.me] for row in splits]
    right = torch.cat([whole.split(row)[step.me] for whole, row in zip(inputs, splits)])
    if step.draw.random() < 0.5:
        out, given = step.empty(sum(expected)), step.formed(inputs[step.me])
        return (
            lambda later: dist.all_to_all_single(out, given, expected, splits[step.me], step.group, later),
            lambda: equal(out, right),
        )
    outs = [step.empty(size) for size in expected]
    parts = [step.formed(part) for part in inputs[step.me].split(splits[step.me])]
    return lambda later: dist.all_to_all(outs, parts, step.group, later), lambda: equal(torch.cat(outs), right)


def coalesced(step: Step) -> Operation:
    inputs, data = step.inputs(), [step.empty() for _ in range(3)]
    for each in data:
        each.copy_(inputs[step.me])
    name = step.reduction()

    def start(later: bool) -> Any:
        with _coalescing_manager(step.group, async_ops=later) as manager:
            for each in data:
                dist.all_reduce(each, REDUCTIONS[name], step.group)
        return manager if later else None

    return start, lambda: [check(name, each, inputs) for each in data]  # type: ignore[return-value]


def messages(step: Step) -> Operation:
    """Each member sends to the next one, with tags that are received in the other order."""
    ranks, tags = len(step.members), (1, 0)
    after, before = step.members[(step.me + 1) % ranks], (step.me - 1) % ranks
    own = step.formed(step.input_of(step.me))
    outs = [torch.zeros(step.count, dtype=step.dtype) for _ in tags]

    def start(later: bool) -> Any:
        works = [dist.isend(own, after, step.group, tag) for tag in (0, 1)]
        works += [dist.irecv(out, step.members[before], step.group, tag) for out, tag in zip(outs, tags)]
        return Several(works)

    return start, lambda: [equal(out, step.input_of(before)) for out in outs]  # type: ignore[return-value]


def sparse_all_reduce(step: Step) -> Operation:
    count = min(step.count, PERIOD)
    dense = [each * (torch.arange(count) % 3 == index % 3) for index, each in enumerate(step.inputs(count))]
    data = dense[step.me].to_sparse()
    return lambda later: dist.all_reduce(data, group=step.group, async_op=later), lambda: check(
        "sum", data.to_dense(), dense
    )


def callback(step: Step) -> Operation:
    """An operation that a callback of another starts and waits for, while later ones of the group wait their turn."""
    inputs = step.inputs()
    data, then = inputs[step.me].clone(), inputs[step.me].clone()

    def start(later: bool) -> Any:
        future = dist.all_reduce(data, group=step.group, async_op=True).get_future()
        over = Several([future.then(lambda _: dist.all_reduce(then, group=step.group, async_op=True).wait())])
        return over if later else over.wait()

    return start, lambda: [check("sum", each, inputs) for each in (data, then)]  # type: ignore[return-value]


def objects(step: Step) -> Operation:
    found: list[Any] = [None] * len(step.members)
    own = {"index": step.me, "text": "a" * (step.count % 1000)}
    right = [own | {"index": index} for index in range(len(found))]

    def compare() -> None:
        assert found == right

    return lambda later: dist.all_gather_object(found, own, step.group), compare


class Several:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


COLLECTIVES = (all_reduce, all_gather, reduce_scatter, uneven_reduce_scatter, reduce, broadcast, gather, scatter)
COLLECTIVES += (all_to_all, coalesced, sparse_all_reduce)
OPERATIONS = (*COLLECTIVES, messages, callback, objects)
BLOCKS_ALL = (all_reduce, all_gather, reduce_scatter)  # none of whose members returns before all have come
WHOLE = (all_reduce, reduce, broadcast, coalesced, messages)  # whose size is that of the whole tensor


def drawn_count(draw: random.Random, operation: Any, ranks: int, dtype: torch.dtype) -> int:
    """Elements: mostly few, at times none, seldom 64 MiB in all."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice((0, 1))
    most = 4096 if kind < 0.85 else 200_000 if kind < 0.998 else LARGE // dtype.itemsize
    share = 1 if operation in WHOLE else ranks
    return int(2 ** draw.uniform(0, torch.tensor(float(max(2, most // share))).log2().item()))


def next_step(member: Member, operations: Any) -> tuple[Any, Step] | None:
    """Draw an operation; None on a rank that is not in its group."""
    draw = member.draw
    members, group = draw.choice(member.groups)
    operation, dtype = draw.choice(operations), draw.choice((*FLOATS, *INTEGERS, *COMPLEX, torch.bool))
    if operation is sparse_all_reduce or (operation is callback and dtype == torch.bool):
        dtype = torch.float32
    if len(members) == 1 and operation is messages:
        operation = all_reduce
    count, of_step = drawn_count(draw, operation, len(members), dtype), draw.random()
    member.drawn += 1
    if dist.get_rank() not in members:
        return None
    return operation, Step(members, group, member.seed * 100 + member.drawn, count, dtype, random.Random(of_step))


def run_steps(member: Member, operations: Any) -> None:
    """Start some operations, several at once, and wait for them in a drawn order."""
    draw = member.draw
    for number in range(draw.randint(1, 8)):
        later, finish = draw.random() < 0.6, draw.random()
        if (step := next_step(member, operations)) is not None:
            start(member, *step, later)
        while member.under_way and (len(member.under_way) > 3 or finish < 0.4):
            settle(member, int(finish * 97 + number) % len(member.under_way))
            finish = 1.0 if len(member.under_way) <= 3 else finish


def start(member: Member, operation: Any, step: Step, later: bool) -> None:
    # torch keeps what is being coalesced by group, not by thread: it would take a callback's call for a part of it.
    while operation is coalesced and member.under_way:
        settle(member, 0)
    run, compare = operation(step)
    work = run(later)
    if work is None:
        compare()
    elif isinstance(work, Several) or operation is coalesced:
        member.under_way.append((work.wait, compare))
    else:
        wait = work.get_future().wait if step.draw.random() < 0.5 else work.wait
        member.under_way.append((wait, compare))


def settle(member: Member, index: int) -> None:
    wait, compare = member.under_way.pop(index)
    wait()
    compare()


def make_groups(member: Member) -> None:
    world = list(range(dist.get_world_size()))
    for _ in range(member.draw.randint(1, 2)):
        members = sorted(member.draw.sample(world, member.draw.randint(1, len(world))))
        group = dist.new_group(members, backend=member.backend, timeout=timedelta(seconds=LONG))
        member.groups.append((members, group))


def end_by_waiting(member: Member) -> None:
    while member.under_way:
        settle(member, member.draw.randrange(len(member.under_way)))
    close(member)


def close(member: Member, keep: int = 0) -> None:
    """Destroy groups, the smallest first, until `keep` are left."""
    member.groups.sort(key=lambda each: -len(each[0]))
    while len(member.groups) > keep:
        members, group = member.groups.pop()
        if dist.get_rank() in members:
            dist.destroy_process_group(group)


def end_by_dropping(member: Member) -> None:
    """Let go of the groups, and then wait for what was started on them; messages would end with an error."""
    for _ in range(3):
        if (step := next_step(member, COLLECTIVES)) is not None:
            start(member, *step, later=True)
    close(member)
    while member.under_way:
        settle(member, 0)


def end_late(member: Member) -> None:
    """One member does not come: the others learn of it by the timeout, in words."""
    operation, step = blocking_step(member)
    if step is None or step.me == 0:
        return
    step.group.set_timeout(timedelta(seconds=SHORT))
    assert "Timed out" in (told := failure(operation, step)), told


def end_differing(member: Member) -> None:
    """One member's call is of another size: all members have the error, and later calls too."""
    operation, step = blocking_step(member)
    if step is None:
        return
    if step.me == 0:
        step = replace(step, count=step.count + 1)
    for _ in range(2):
        assert "the ranks called different collectives" in (told := failure(operation, step)), told


def blocking_step(member: Member) -> tuple[Any, Step | None]:
    """Draw an operation of several ranks that none leaves before all have come; None where there is none here."""
    close(member, keep=1)
    drawn = next_step(member, BLOCKS_ALL)
    return drawn if drawn is not None and len(drawn[1].members) > 1 else (None, None)


def failure(operation: Any, step: Step) -> str:
    """Return the text of an operation's error."""
    run, _ = operation(step)
    try:
        work = run(step.draw.random() < 0.5)
        if work is not None:
            work.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def run_program(seed: int, backend: str) -> str:
    """Run the program of a seed; return how it has ended."""
    draw = random.Random(seed)
    member, end = Member(seed, backend, draw), draw.choices([*ENDS], [*ENDS.values()])[0]
    make_groups(member)
    if end in ("waits", "drops"):
        run_steps(member, OPERATIONS if end == "waits" else COLLECTIVES)
    {"waits": end_by_waiting, "drops": end_by_dropping, "is late": end_late, "differs": end_differing}[end](member)
    if end in ("is late", "differs"):
        dist.barrier()  # until all have seen it
        close(member)
    return end


def run_programs(first: int, end: int, backend: str = "shardwise") -> dict[str, int]:
    """Run the programs of these seeds on this rank; count their ends.

    Raises:
        AssertionError: a program has come to something else than the plain computation; the text has its seed.
    """
    registration.register()
    ends: Counter[str] = Counter()
    for seed in range(first, end):
        try:
            ends[run_program(seed, backend)] += 1
        except Exception as error:
            raise AssertionError(f"program {seed} on rank {dist.get_rank()}: {error}") from error
    return dict(ends)


def main(first: int, end: int) -> None:
    """Run the programs of these seeds, some at a time, and print how they end."""
    ends: Counter[str] = Counter()
    with WorldPool(preload=("torch", "torch.distributed")) as pool:
        for begin in range(first, end, CHUNK):
            ends.update(pool.run(RANKS, run_programs, begin, min(begin + CHUNK, end), timeout=600)[0])
            print(f"{sum(ends.values())} programs: {dict(ends)}", flush=True)


if __name__ == "__main__":
    seeds = [int(word) for word in sys.argv[1:3]]
    main(seeds[0], seeds[-1] if len(seeds) > 1 else seeds[0] + 1)
