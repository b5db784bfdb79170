"""Seconds of what a traced rank does, on an accelerator and between accelerators.

Matrix products and attention take what the planner's efficiency curves say of their sizes, all other operators the time
in which their bytes are read and written, one kernel each. Collectives and messages follow the planner's formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.planner.constants.inventory import own_stack
from shardwise.planner.formulas.communication import (
    RankGroup,
    all_reduce_seconds,
    exchange_seconds,
    gather_seconds,
    message_seconds,
    overlapped_seconds,
    spaced_group,
)
from shardwise.planner.formulas.compute import (
    ATTENTION_HEAD,
    ATTENTION_LENGTH,
    BACKWARD_LAUNCH,
    LAUNCH,
    Rates,
    matmul_seconds,
    rates,
)
from shardwise.planner.formulas.layer import host_bandwidth
from shardwise.planner.formulas.predict import HOST_MEMORY
from shardwise.planner.formulas.prediction import Cluster, Stack
from shardwise.testing.trace.program import Call, Operators


@dataclass(frozen=True)
class Roofline:
    """The rates of a cluster under a software stack, for one dtype of products."""

    cluster: Cluster
    stack: Stack
    rates: Rates

    @classmethod
    def of(cls, cluster: Cluster, precision: str) -> Roofline:
        """Return the rates of a cluster under torch as it is used here."""
        stack = own_stack()
        return cls(cluster, stack, rates(cluster.accelerator, stack, precision))

    def device_seconds(self, operators: Operators) -> float:
        """Return the seconds of operators on the accelerator."""
        return sum(self._seconds(kind, amount) for kind, amount in operators.work.items())

    def host_seconds(self, operators: Operators) -> float:
        """Return the seconds in which a host launches operators."""
        share = BACKWARD_LAUNCH if operators.phase == "backward" else 1.0
        return operators.launches * LAUNCH * self.stack.launch * share

    def beside_seconds(self, computation: float, traffic: float) -> float:
        """Return the seconds of both at once."""
        return overlapped_seconds(computation, traffic, self.stack.overlap)

    def copy_seconds(self, size: int) -> float:
        """Return the seconds of a copy between the accelerator and its host."""
        return size / host_bandwidth(self.cluster.accelerator)

    def host_memory_seconds(self, size: int) -> float:
        """Return the seconds in which the host reads and writes as many bytes for one of its accelerators."""
        return size / HOST_MEMORY

    def _seconds(self, kind: tuple[str | int, ...], amount: int) -> float:
        name, *sizes = kind
        if name == "product":
            m, n, k = (int(size) for size in sizes)
            return amount * matmul_seconds(m, n, k, self.rates)
        if name == "attention":
            thousands, length, size = (int(size) for size in sizes)
            slower = (1 + ATTENTION_LENGTH / length) * (1 + ATTENTION_HEAD / size)
            return amount * 1000.0 * thousands / self.rates.attention * slower
        return amount / self.rates.bandwidth

    def call_seconds(self, call: Call, members: Sequence[int]) -> float:
        """Return the seconds of a collective or message once its ranks are there."""
        over = self._over(members)
        if call.is_message:
            return message_seconds(call.bytes, over)
        if call.operation == "all_reduce":
            return all_reduce_seconds(call.bytes, over)
        if call.operation == "all_to_all":
            return exchange_seconds(float(call.bytes), over)
        return gather_seconds(call.bytes, over)

    def _over(self, members: Sequence[int]) -> RankGroup:
        stride = min((later - earlier for earlier, later in pairwise(members)), default=1)
        return spaced_group(len(members), max(1, stride), self.cluster, self.stack)
