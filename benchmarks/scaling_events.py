"""A step of sharded training as events: what `scaling` holds the planner's closed form against.

Nothing here is of the closed form but what kernels and links take. A host (node) has a compute stream, whose kernels
run in order once what they need is there, and streams of collectives, one a process group. Blocks are gathered ahead of
their forward and of their backward, at most two at a time, and scattered behind it, as FSDP does
(`BackwardPrefetch.BACKWARD_PRE`, `limit_all_gathers`). Replicas reduce each block's shard behind that.

- A ring's host sends a part of the tensor to the next one, and passes on what comes while it is still coming, once the
  first slices are there. Parts of all collectives wait in line for the host's port. A part goes through all ranks of a
  host, a hop each, from one to the next at the rate of their links. On p5's measured all-gathers
  (fabric_bandwidth.csv) such rings are 14 % off (root mean square), the closed form's 21 %.
- Direct gathering (SMDDP) sends a host's part to all its peers, which wait in line at the receiver too.
- A collective holds multiprocessors of its accelerators, also while it waits, and kernels are slower by as many. SMDDP
  says under 9 for its own and up to 24 for NCCL ("SMDDP AllGather" in SageMaker's guide). Parts of rings that the port
  begins with while a kernel runs take longer than alone. NCCL's 16 and 1.8 times fit 30 measured steps as well as any
  tried (`benchmarks.scaling --rows`; fms_fsdp and ZeRO-3 of megatron_sc21, `test` rows too, since no constant of the
  planner comes of it): 6.1 % root mean square, as with 12; the closed form 5.2. With 24, with 1.6 or with 2.0 times it
  is 7.9, 6.4 and 6.4 %.
- Accelerators of one kind differ by 8 % between slowest and fastest, outliers left out (arXiv 2208.11035). Taken as the
  5.4 standard deviations between the whiskers of a normal distribution, one is 1.5 %. A host is as slow as its slowest
  accelerator.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

NCCL_UNITS, DIRECT_UNITS = 16, 9  # multiprocessors that a collective holds
BESIDE = 1.8  # of a ring's time alone, what it takes beside kernels
DEVIATION = 0.08 / 5.4
SLICE = 512 * 1024  # bytes that are passed on at once (NCCL_BUFFSIZE over NCCL_STEPS)

Action = Callable[[], None]


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._order = count()

    def at(self, time: float, action: Callable[..., None], *given: int) -> None:
        heapq.heappush(self._waiting, (time, next(self._order), action, given))

    def run(self) -> None:
        """Run until nothing waits."""
        waiting, pop = self._waiting, heapq.heappop
        while waiting:
            self.now, _, action, given = pop(waiting)
            action(*given)


@dataclass
class Signal:
    """Something that happens once, and who waits for it."""

    fired: bool = False
    waiting: list[Action] = field(default_factory=list)

    def fire(self) -> None:
        self.fired = True
        for action in self.waiting:
            action()


class Operation(NamedTuple):
    """What a stream runs: `begin(finish)` once all of `needs` have fired; `done` fires when it calls `finish`."""

    needs: Sequence[Signal]
    begin: Callable[[Action], None]
    done: Signal


class Stream:
    """Operations one behind the other."""

    def __init__(self) -> None:
        self._queue: deque[Operation] = deque()
        self._busy = False

    def add(self, begin: Callable[[Action], None], *needs: Signal) -> Signal:
        """Return what fires when the operation is done."""
        done = Signal()
        self._queue.append(Operation(needs, begin, done))
        return done

    def advance(self) -> None:
        """Begin the first operation if the stream is free and what it needs is there."""
        if self._busy or not self._queue:
            return
        missing = next((need for need in self._queue[0].needs if not need.fired), None)
        if missing:
            missing.waiting.append(self.advance)
            return
        self._busy = True
        operation = self._queue.popleft()
        operation.begin(lambda: self._finish(operation.done))

    def _finish(self, done: Signal) -> None:
        self._busy = False
        done.fire()
        self.advance()


class Port:
    """A link that carries one thing at a time, in the order in which they come."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._busy = clock, False
        self._waiting: deque[Callable[[], float]] = deque()

    def carry(self, begin: Callable[[], float]) -> None:
        """Call `begin` once the link is free; it returns the seconds for which the link is taken."""
        self._waiting.append(begin)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            self._clock.at(self._clock.now + self._waiting.popleft()(), self._next)


class Processor:
    """The accelerators of a host as one: kernels take longer on a slow host, and while collectives hold units."""

    def __init__(self, clock: Clock, slowness: float, units: int) -> None:
        self._clock, self._slowness, self._units = clock, slowness, units
        self._left, self._since, self._speed, self._held, self._version = 0.0, 0.0, 1.0, 0, 0
        self._finish: Action | None = None
        self.busy = False

    def kernel(self, seconds: float) -> Callable[[Action], None]:
        """Return how to begin a kernel that takes so long alone on a host like the mean."""
        return lambda finish: self._begin(seconds * self._slowness, finish)

    def hold(self, units: int) -> None:
        """Take units from kernels, or give them back where negative."""
        self._left -= (self._clock.now - self._since) * self._speed
        self._held += units
        self._speed = max(0.1, 1 - self._held / self._units)
        self._schedule()

    def _begin(self, seconds: float, finish: Action) -> None:
        self._left, self._finish, self.busy = seconds, finish, True
        self._schedule()

    def _schedule(self) -> None:
        self._since = self._clock.now
        self._version += 1
        if self._finish:
            self._clock.at(self._clock.now + max(0.0, self._left) / self._speed, self._end, self._version)

    def _end(self, version: int) -> None:
        if version == self._version and self._finish:
            finish, self._finish, self.busy = self._finish, None, False
            finish()


class Host:
    """A node: its processor, its links and its streams by name."""

    def __init__(self, clock: Clock, slowness: float, units: int) -> None:
        self.processor = Processor(clock, slowness, units)
        self.out, self.link = Port(clock), Port(clock)
        self.compute, self.gathers, self.shards, self.replicas = Stream(), Stream(), Stream(), Stream()

    def start(self) -> None:
        for stream in (self.compute, self.gathers, self.shards, self.replicas):
            stream.advance()


class Ring:
    """A collective in which each host sends `steps` parts to the next one: its own, then what has come.

    Args:
        seconds: of a part on the port. first: of what has to be there before it is passed on. hop: of one step's way.
    """

    def __init__(
        self, clock: Clock, hosts: Sequence[Host], steps: int, seconds: float, first: float, hop: float
    ) -> None:
        self._clock, self._hosts, self._steps = clock, hosts, steps
        self._seconds, self._passed, self._rest = seconds, min(first, seconds) + hop, seconds - min(first, seconds)
        self._finish: list[Action | None] = [None] * len(hosts)
        self._come, self._sent, self._whole = ([0] * len(hosts) for _ in range(3))

    def join(self, place: int) -> Callable[[Action], None]:
        """Return how the host at `place` begins."""
        return lambda finish: self._join(place, finish)

    def _join(self, place: int, finish: Action) -> None:
        self._finish[place] = finish
        self._hosts[place].processor.hold(NCCL_UNITS)
        self._send(place)

    def _send(self, place: int) -> None:
        """Send what is there and not sent yet."""
        port = self._hosts[place].out if len(self._hosts) > 1 else self._hosts[place].link
        while self._sent[place] < self._steps and self._sent[place] <= self._come[place]:
            self._sent[place] += 1
            port.carry(partial(self._carry, place, self._sent[place] == self._steps))

    def _carry(self, place: int, last: bool) -> float:
        """Begin with a part, and return how long it takes the port."""
        slower = BESIDE if self._hosts[place].processor.busy else 1.0
        self._clock.at(self._clock.now + slower * self._passed, self._arrive, (place + 1) % len(self._hosts))
        if last:
            self._clock.at(self._clock.now + slower * self._seconds, self._count, place)
        return slower * self._seconds

    def _arrive(self, place: int) -> None:
        self._come[place] += 1
        if self._finish[place]:
            self._send(place)
        if self._come[place] == self._steps:
            self._clock.at(self._clock.now + self._rest, self._count, place)

    def _count(self, place: int) -> None:
        """Leave once all has come and all is sent."""
        self._whole[place] += 1
        finish = self._finish[place]
        if self._whole[place] == 2 and finish:
            self._hosts[place].processor.hold(-NCCL_UNITS)
            finish()


class Direct:
    """A gathering in which each host sends its part to all others in turn, and copies inside meanwhile."""

    def __init__(self, clock: Clock, hosts: Sequence[Host], seconds: float, copies: float, hop: float) -> None:
        self._clock, self._hosts = clock, hosts
        self._seconds, self._copies, self._hop = seconds, copies, hop
        self._come, self._first = [0] * len(hosts), [math.inf] * len(hosts)
        self._finish: list[Action | None] = [None] * len(hosts)

    def join(self, place: int) -> Callable[[Action], None]:
        """Return how the host at `place` begins."""
        return lambda finish: self._join(place, finish)

    def _join(self, place: int, finish: Action) -> None:
        host, number = self._hosts[place], len(self._hosts)
        self._finish[place] = finish
        host.processor.hold(DIRECT_UNITS)
        host.link.carry(partial(self._carry, self._copies, 0.0, self._add, place))
        for far in range(1, number):
            host.out.carry(partial(self._carry, self._seconds, self._hop, self._arrive, (place + far) % number))

    def _carry(self, seconds: float, hop: float, there: Callable[[int], None], place: int) -> float:
        self._clock.at(self._clock.now + seconds + hop, there, place)
        return seconds

    def _arrive(self, place: int) -> None:
        self._first[place] = min(self._first[place], self._clock.now)
        self._add(place)

    def _add(self, place: int) -> None:
        number = len(self._hosts)
        self._come[place] += 1
        if self._come[place] == number:  # the host's own copies among them, so that it has joined
            received = self._first[place] + (number - 2) * self._seconds  # one behind the other
            self._clock.at(max(self._clock.now, received), self._leave, place)

    def _leave(self, place: int) -> None:
        finish = self._finish[place]
        assert finish is not None
        self._hosts[place].processor.hold(-DIRECT_UNITS)
        finish()


def slowness(hosts: int, per_host: int, seed: int) -> list[float]:
    """Return how much slower than the mean host each of them is, drawn with `seed`."""
    draw = random.Random(seed)
    slowest = [max(draw.gauss(0.0, DEVIATION) for _ in range(per_host)) for _ in range(hosts)]
    many = random.Random(0)
    usual = sum(max(many.gauss(0.0, DEVIATION) for _ in range(per_host)) for _ in range(2000)) / 2000
    return [1 + one - usual for one in slowest]


class StepWork(NamedTuple):
    """One step of one microbatch on a rank: seconds of kernels, and bytes of a whole block and of what stands at the
    ends, gathered and reduced."""

    blocks: int
    forward: float
    backward: float
    head: float
    optimizer: float
    block_gathered: float
    block_reduced: float
    ends_gathered: float
    ends_reduced: float


class Machines(NamedTuple):
    """Hosts and their links: bytes a second of a host's port by rings and by direct sending, and of a rank's own link;
    seconds of a hop between hosts and inside. `shard` ranks share a block; `direct`: they gather it directly."""

    hosts: int
    per_host: int
    units: int
    out: float
    direct_out: float
    link: float
    hop: float
    link_hop: float
    channels: int
    shard: int
    direct: bool = False


Begins = list[Callable[[Action], None]]  # by host: how it begins its part of a collective


class Reduction(NamedTuple):
    """How each host scatters gradients, and reduces them with replicas, if there are any."""

    scatter: Begins
    replicas: Begins


class Step:
    """The operations of a step on all hosts."""

    def __init__(self, work: StepWork, machines: Machines, seed: int) -> None:
        self.work, self.machines, self.clock = work, machines, Clock()
        slow = slowness(machines.hosts, machines.per_host, seed)
        self.hosts = [Host(self.clock, each, machines.units) for each in slow]
        self.near = max(1, machines.shard // machines.per_host)  # hosts of a shard group

    def seconds(self) -> float:
        """Return when the last host has updated its parameters."""
        work = self.work
        gathered = [self._gather(work.ends_gathered), *(self._gather(work.block_gathered) for _ in range(work.blocks))]
        again = [self._gather(work.block_gathered) for _ in range(work.blocks)]
        reduced = [self._reduce(work.ends_reduced), *(self._reduce(work.block_reduced) for _ in range(work.blocks))]
        ends = [self._host(number, gathered, again, reduced) for number in range(len(self.hosts))]
        updated: list[float] = []
        for end, host in zip(ends, self.hosts, strict=True):
            end.waiting.append(lambda: updated.append(self.clock.now))
            host.start()
        self.clock.run()
        if len(updated) < len(self.hosts):
            raise RuntimeError("a step of the simulation waits for what never comes")
        return updated[-1]

    def _host(self, number: int, gathered: list[Begins], again: list[Begins], reduced: list[Reduction]) -> Signal:
        """Put a step into the streams of a host; what stands at the ends comes first in the lists."""
        host, work, last = self.hosts[number], self.work, self.work.blocks - 1
        gathers, kernel = host.gathers if self.machines.direct else host.shards, host.processor.kernel
        ends = gathers.add(gathered[0][number])
        forwards: list[Signal] = []
        for block in range(work.blocks):
            there = gathers.add(gathered[1 + block][number], *forwards[-2:-1])
            forwards.append(host.compute.add(kernel(work.forward), there))
        host.compute.add(kernel(work.head), ends)
        there_again = {block: gathers.add(again[block][number], forwards[-1]) for block in range(last, last - 2, -1)}
        finished: list[Signal] = []
        for block in range(last, -1, -1):
            backward = host.compute.add(kernel(work.backward), there_again[block])
            finished.append(self._reduced(host, number, reduced[1 + block], backward))
            if block > 1:
                there_again[block - 2] = gathers.add(again[block - 2][number], backward)
        finished.append(self._reduced(host, number, reduced[0], backward))
        return host.compute.add(kernel(work.optimizer), *finished)

    def _reduced(self, host: Host, number: int, reduction: Reduction, after: Signal) -> Signal:
        scattered = host.shards.add(reduction.scatter[number], after)
        return host.replicas.add(reduction.replicas[number], scattered) if reduction.replicas else scattered

    def _gather(self, size: float) -> Begins:
        """Return how each host begins to gather `size` bytes."""
        machines = self.machines
        if not machines.direct or self.near == 1:
            return self.ring(size)
        part, inside = size / self.near / machines.direct_out, (machines.shard - 1) / machines.shard * size
        hop = machines.hop + machines.per_host * machines.link_hop
        groups = [Direct(self.clock, hosts, part, inside / machines.link, hop) for hosts in self._shard_groups()]
        return [groups[number // self.near].join(number % self.near) for number in range(len(self.hosts))]

    def ring(self, size: float) -> Begins:
        """Return how each host begins to gather or scatter `size` bytes by a ring."""
        machines = self.machines
        parts, rate, hop = machines.shard, machines.link, machines.link_hop
        first = min(size / machines.shard, SLICE * machines.channels)
        if self.near > 1:
            parts, rate = self.near, min(machines.out, machines.link)
            hop = machines.per_host * machines.hop + (machines.per_host - 1) * first / machines.link  # rank after rank
        part = size / parts / rate
        groups = [Ring(self.clock, hosts, parts - 1, part, first / rate, hop) for hosts in self._shard_groups()]
        return [groups[number // self.near].join(number % self.near) for number in range(len(self.hosts))]

    def _reduce(self, size: float) -> Reduction:
        """Return how each host begins to scatter gradients of `size` bytes, and to reduce its shards with replicas."""
        machines, copies = self.machines, len(self.hosts) // self.near
        if copies == 1:
            return Reduction(self.ring(size), [])
        part = size / self.near / copies / machines.out
        rings = [
            Ring(self.clock, self.hosts[first :: self.near], 2 * (copies - 1), part, part, machines.hop)
            for first in range(self.near)
        ]
        joins = [rings[number % self.near].join(number // self.near) for number in range(len(self.hosts))]
        return Reduction(self.ring(size), joins)

    def _shard_groups(self) -> list[list[Host]]:
        return [self.hosts[first : first + self.near] for first in range(0, len(self.hosts), self.near)]


def simulated_seconds(work: StepWork, machines: Machines, seed: int) -> float:
    """Return the seconds of a step, with hosts drawn by `seed`."""
    return Step(work, machines, seed).seconds()
