"""The ranks among which scripts share experts: a second view of the replicas.

SMP shards parameters inside of ranks that hold the same experts, and scripts save one directory for each expert rank.
So a shard group has one place among the experts, and the experts of a layer lie in as many shard groups as the degree
says. All other parameters are equal in them. Tensor ranks hold the same experts, whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from shardwise.job.axes import Axis, data_axes, replica_axes
from shardwise.parallel.layout import ExpertLevels, Layout

SEED = "_expert_seed"  # where a model keeps the seed of its experts
SHARED = "_experts_shared_among"  # where a stack of experts keeps its `ExpertRanks`


@dataclass(frozen=True)
class ExpertRanks:
    """Places and groups of the ranks that share experts; `degree` divides the replicas of `layout`."""

    layout: Layout
    degree: int

    def index(self, rank: int | None = None) -> int:
        """Return which experts a rank holds, from 0; this rank's if unset."""
        return self.layout.coordinates(rank)[Axis.REPLICA] % self.degree

    def sharing(self) -> dist.ProcessGroup:
        """Return the ranks that together hold all experts, in the order of the experts. Collective on first use."""
        return self.layout.group_of(("experts shared",), self._near)

    def levels(self) -> ExpertLevels:
        """Return the ranks of `sharing` with their two levels. Collective on first use."""
        return ExpertLevels.of(self.layout, self.sharing(), self._near)

    def copies(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same shard of the same experts. Collective on first use."""
        return self.layout.group_of(("experts copied",), lambda rank: self._like(rank, *replica_axes()))

    def holders(self) -> dist.ProcessGroup:
        """Return all ranks that hold shards of the same experts. Collective on first use."""
        return self.layout.group_of(("experts held",), lambda rank: self._like(rank, *data_axes()))

    def parts(self) -> dist.ProcessGroup:
        """Return the ranks that together hold all tensor parts and experts of a shard. Collective on first use."""
        return self.layout.group_of(("experts and tensors",), self._parts)

    def make_groups(self) -> None:
        """Make all groups, while every rank is here."""
        for group in (self.levels, self.copies, self.holders, self.parts):
            group()

    def _near(self, rank: int) -> tuple[int, ...]:
        members = self.layout.ranks(*replica_axes(), of=rank)
        place = members.index(rank)
        first = place - place % self.degree
        return members[first : first + self.degree]

    def _like(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks along `axes`, and their tensor ranks, that hold the experts of `rank`."""
        members = self.layout.ranks(*axes, Axis.TENSOR, of=rank)
        return tuple(member for member in members if self.index(member) == self.index(rank))

    def _parts(self, rank: int) -> tuple[int, ...]:
        near = self._near(rank)
        return tuple(sorted(part for place in near for part in self.layout.ranks(Axis.TENSOR, of=place)))
