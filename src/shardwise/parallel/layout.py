"""Layout: which rank stands where on the named axes, and the process groups along them.

The letters of `placement_strategy` are nested loops, the right-most varying fastest with the global rank:
D (SMP's reduced data parallel) is replica x shard x context with context innermost, P is pipeline, T is tensor.
Coordinates are pure arithmetic and work for any rank without torch.distributed; groups are made on first use, by all
ranks together, and shared whenever two sets of axes span the same ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.plan.draft import placement_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.plan.plan import Plan

AXES_OF_LETTER = {"D": ("replica", "shard", "context"), "P": ("pipeline",), "T": ("tensor",)}
DATA_AXES = ("replica", "shard", "context")
# SMP's notions of a group: the axes that vary inside it (smp-api: RDP, TP, PP, DP = same stage, MP = same replica).
SMP_AXES = {
    "world": ("replica", "shard", "context", "pipeline", "tensor"),
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "rdp": DATA_AXES,
    "dp": (*DATA_AXES, "tensor"),
    "mp": ("pipeline", "tensor"),
}
ONE_COPY = ("shard", "context", "pipeline", "tensor")  # the axes of the ranks that hold one copy of the parameters


def normalise_placement(placement: str) -> str:
    """`cluster` -> DPT, `spread` -> TPD, a permutation of D, P and T -> itself in capitals.

    Raises:
        ConfigError: a letter is missing, doubled or unknown.
    """
    letters = placement_order(placement)
    if letters is None:
        raise ConfigError(
            f"parallel.placement_strategy={placement!r} must be `cluster`, `spread` or hold each of D, P and T once; "
            "use one of cluster, spread, DPT, DTP, PDT, PTD, TDP, TPD"
        )
    return letters


class Layout:
    """Coordinates and groups of one rank.

    Args:
        degrees: axis -> size; axes left out have size 1.
        placement: `placement_strategy`, see `normalise_placement`.
        rank: this rank; 0 <= rank < product of the degrees.
        local_size: ranks on one host, for SMP's local rank.
        device_type: `cpu` or `cuda`, for meshes.
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        placement: str = "DPT",
        rank: int = 0,
        local_size: int | None = None,
        device_type: str = "cpu",
    ) -> None:
        self.axes = tuple(axis for letter in normalise_placement(placement) for axis in AXES_OF_LETTER[letter])
        self.degrees = {axis: degrees.get(axis, 1) for axis in self.axes}
        self.world_size = math.prod(self.degrees.values())
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank} is outside of the layout's {self.world_size} ranks ({self.degrees})")
        self.rank = rank
        self.local_size = local_size or self.world_size
        self.device_type = device_type
        self._groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}  # by partition of the ranks
        self._asked: dict[tuple[object, ...], ProcessGroup] = {}

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> Layout:
        """The layout that `plan` asks for, seen from `rank`."""
        return cls(plan.degrees, plan.placement, rank, plan.world.local_size, plan.world.device_type)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Axis -> index of `rank` (this rank if unset)."""
        rest = self.rank if rank is None else rank
        indices: dict[str, int] = {}
        for axis in reversed(self.axes):
            rest, indices[axis] = divmod(rest, self.degrees[axis])
        return {axis: indices[axis] for axis in self.axes}

    def rank_at(self, **indices: int) -> int:
        """The rank at these coordinates; axes left out are this rank's own."""
        return self._rank({**self.coordinates(), **indices})

    def ranks(self, *axes: str, of: int | None = None) -> tuple[int, ...]:
        """Ranks that differ from `of` (this rank) along `axes` only, ascending."""
        here = self.coordinates(of)
        varying = [axis for axis in self.axes if axis in axes]
        indices = itertools.product(*(range(self.degrees[axis]) for axis in varying))
        return tuple(sorted(self._rank({**here, **dict(zip(varying, each, strict=True))}) for each in indices))

    def size(self, *axes: str) -> int:
        """Product of the degrees of `axes`."""
        return math.prod(self.degrees[axis] for axis in axes)

    def index(self, *axes: str) -> int:
        """Position of this rank among `ranks(*axes)`."""
        return self.ranks(*axes).index(self.rank)

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads: replica major, shard minor; context ranks read the same rows."""
        here = self.coordinates()
        return here["replica"] * self.degrees["shard"] + here["shard"]

    @property
    def data_ranks(self) -> int:
        """Into how many shares the batch is cut."""
        return self.size("replica", "shard")

    def _rank(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for axis in self.axes:
            rank = rank * self.degrees[axis] + coordinates[axis]
        return rank

    def smp(self, notion: str) -> tuple[int, int, tuple[int, ...]]:
        """SMP's (rank, size, member ranks) of `world`, `tp`, `pp`, `rdp`, `dp`, `mp`, or of `local`."""
        if notion == "local":
            first = self.rank - self.rank % self.local_size
            members = tuple(range(first, min(first + self.local_size, self.world_size)))
        else:
            members = self.ranks(*SMP_AXES[notion])
        return members.index(self.rank), len(members), members

    def group(self, *axes: str) -> ProcessGroup:
        """The process group along `axes`. Collective on first use: every rank must ask in the same order."""
        return self._group(("axes", *axes), lambda rank: self.ranks(*axes, of=rank))

    def holders_group(self, pipeline: Sequence[int]) -> ProcessGroup:
        """The ranks at these places of their pipeline; for the others, those. Collective, as `group`."""

        def held(rank: int) -> tuple[int, ...]:
            line = self.ranks("pipeline", of=rank)
            holders = tuple(line[place] for place in pipeline)
            return holders if rank in holders else tuple(other for other in line if other not in holders)

        return self._group(("holders", *pipeline), held)

    def tensor_neighbours(self, copies: int) -> ProcessGroup:
        """This rank and those in the same run of `copies` ranks of their tensor group. Collective, as `group`."""

        def run(rank: int) -> tuple[int, ...]:
            members = self.ranks("tensor", of=rank)
            first = members.index(rank) // copies * copies
            return members[first : first + copies]

        return self._group(("neighbours", copies), run)

    def _group(self, asked: tuple[object, ...], members_of: Callable[[int], tuple[int, ...]]) -> ProcessGroup:
        """The group of this rank in a partition of all ranks, made once for each partition, whoever `asked` for it.

        Kept by partition, which is the same on every rank: by members, one rank could find its group and another not.
        """
        import torch.distributed as dist

        if asked not in self._asked:
            partition = tuple(sorted({members_of(rank) for rank in range(self.world_size)}))
            if partition not in self._groups:
                if len(partition) == 1 and dist.group.WORLD is not None:
                    self._groups[partition] = dist.group.WORLD
                else:
                    self._groups[partition], _ = dist.new_subgroups_by_enumeration([list(part) for part in partition])
            self._asked[asked] = self._groups[partition]
        return self._asked[asked]

    def shard_mesh(self) -> DeviceMesh:
        """FSDP2's mesh: one-dimensional over shard x context, or (replica, shard x context) when there are replicas."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        shard_axes = ("shard", "context")
        if self.degrees["replica"] == 1:
            return DeviceMesh.from_group(self.group(*shard_axes), self.device_type, mesh_dim_names=("shard",))
        columns = [self.ranks("replica", of=rank) for rank in self.ranks(*shard_axes)]
        mesh = torch.tensor(columns).T.contiguous()
        groups = [self.group("replica"), self.group(*shard_axes)]
        return DeviceMesh.from_group(groups, self.device_type, mesh, mesh_dim_names=("replica", "shard"))
