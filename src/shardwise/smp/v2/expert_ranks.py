"""The ranks among which scripts share experts: a second view of the replicas.

SMP shards parameters inside of ranks that hold the same experts, and scripts save one directory for each expert rank.
So a shard group has one place among the experts, and the experts of a layer lie in as many shard groups as the degree
says. All other parameters are equal in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from shardwise.job.axes import Axis, replica_axes, state_axes
from shardwise.parallel.layout import Layout

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
        return self.layout.group_of(("experts shared",), lambda rank: self._near(rank, same_experts=False))

    def copies(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same shard of the same experts. Collective on first use."""
        return self.layout.group_of(("experts copied",), lambda rank: self._near(rank, same_experts=True))

    def holders(self) -> dist.ProcessGroup:
        """Return all ranks that hold shards of the same experts. Collective on first use."""
        return self.layout.group_of(("experts held",), self._holders)

    def make_groups(self) -> None:
        """Make all groups, while every rank is here."""
        for group in (self.sharing, self.copies, self.holders):
            group()

    def _near(self, rank: int, same_experts: bool) -> tuple[int, ...]:
        members = self.layout.ranks(*replica_axes(), of=rank)
        place = members.index(rank)
        if same_experts:
            return members[place % self.degree :: self.degree]
        first = place - place % self.degree
        return members[first : first + self.degree]

    def _holders(self, rank: int) -> tuple[int, ...]:
        copies = self._near(rank, same_experts=True)
        return tuple(sorted(holder for copy in copies for holder in self.layout.ranks(*state_axes(), of=copy)))
