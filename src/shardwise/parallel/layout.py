"""Layout: which rank stands where on the named axes, and the process groups along them.

The letters of `placement_strategy` are nested loops, the right-most varying fastest with the global rank. Which axes a
letter stands for is in `shardwise.job.axes`: D (SMP's reduced data parallel) is replica x shard x context with context
innermost, P is pipeline, T is tensor.
Coordinates are pure arithmetic and work for any rank without torch.distributed; groups are made on first use, by all
ranks together, and shared whenever two sets of axes span the same ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import ConfigError, require_type
from shardwise.job.axes import (
    PLACEMENT_LETTERS,
    Axis,
    data_axes,
    placed_axes,
    replica_axes,
    row_axes,
    second_views,
    state_axes,
)
from shardwise.plan.draft import placement_order
from shardwise.words import nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.plan.plan import Plan

# SMP's notions of a group: the letters of the placement whose axes vary inside it (smp-api: RDP, TP, PP,
# DP = same stage, MP = same replica).
SMP_LETTERS = {"world": "DPT", "tp": "T", "pp": "P", "rdp": "D", "dp": "DT", "mp": "PT"}


def smp_axes(notion: str) -> tuple[Axis, ...]:
    """Return the axes that vary inside a group of SMP's: `world`, `tp`, `pp`, `rdp`, `dp` or `mp`."""
    return placed_axes(SMP_LETTERS[notion])


def normalise_placement(placement: str) -> str:
    """Return DPT for `cluster`, TPD for `spread`, and a permutation of D, P and T itself in capitals.

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
        degrees: axis -> degree; axes left out have degree 1.
        placement: `placement_strategy`, see `normalise_placement`.
        rank: this rank; 0 <= rank < product of the degrees.
        local_size: ranks on one host, for SMP's local rank.
        device_type: torch's word for what the ranks compute on, for meshes.

    Raises:
        ConfigError: an axis or placement is unknown, or the rank is outside of the layout.
    """

    def __init__(
        self,
        degrees: Mapping[Axis, int],
        placement: str = "DPT",
        rank: int = 0,
        local_size: int | None = None,
        device_type: str = "cpu",
    ) -> None:
        refuse_unknown_axes(degrees)
        self.placement = normalise_placement(placement)
        self.axes = placed_axes(self.placement)
        self.degrees = {axis: degrees.get(axis, 1) for axis in self.axes}
        self.world_size = math.prod(self.degrees.values())
        self.expert_degree = degrees.get(Axis.EXPERT, 1)
        if not 0 <= rank < self.world_size:
            sizes = ", ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())
            raise ConfigError(f"rank={rank} is outside of the layout's {self.world_size} ranks ({sizes})")
        self.rank = rank
        self.local_size = local_size or self.world_size
        self.device_type = device_type
        self._groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}  # by partition of the ranks
        self._asked: dict[tuple[object, ...], ProcessGroup] = {}

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> Layout:
        """Return the layout that `plan` asks for, seen from `rank`."""
        return cls(plan.degrees, plan.placement, rank, plan.world.local_size, plan.world.device_type)

    def coordinates(self, rank: int | None = None) -> dict[Axis, int]:
        """Return axis -> index of `rank` (this rank if unset)."""
        rest = self.rank if rank is None else rank
        indices: dict[Axis, int] = {}
        for axis in reversed(self.axes):
            rest, indices[axis] = divmod(rest, self.degrees[axis])
        return {axis: indices[axis] for axis in self.axes}

    def rank_at(self, **indices: int) -> int:
        """Return the rank at these coordinates, by the names of the axes; axes left out are this rank's own."""
        return self._rank(self.coordinates() | {Axis(axis): index for axis, index in indices.items()})

    def ranks(self, *axes: Axis, of: int | None = None) -> tuple[int, ...]:
        """Return the ranks that differ from `of` (this rank) along `axes` only, ascending."""
        fixed = self.coordinates(of)
        varying = [axis for axis in self.axes if axis in axes]
        places = itertools.product(*(range(self.degrees[axis]) for axis in varying))
        return tuple(sorted(self._rank({**fixed, **dict(zip(varying, indices, strict=True))}) for indices in places))

    def size(self, *axes: Axis) -> int:
        """Return the product of the degrees of `axes`."""
        return math.prod(self.degrees[axis] for axis in axes)

    def index(self, *axes: Axis) -> int:
        """Return the position of this rank among `ranks(*axes)`."""
        coordinates, position = self.coordinates(), 0
        for axis in self.axes:  # the outer ones first
            if axis in axes:
                position = position * self.degrees[axis] + coordinates[axis]
        return position

    def seen_from(self, rank: int) -> Layout:
        """Return the same layout as another rank sees it."""
        degrees = self.degrees | {Axis.EXPERT: self.expert_degree}
        return Layout(degrees, self.placement, rank, self.local_size, self.device_type)

    @property
    def data_rank(self) -> int:
        """The share of the batch that this rank reads, 0 to `data_ranks` - 1; replica major, shard minor."""
        coordinates, share = self.coordinates(), 0
        for axis in row_axes():
            share = share * self.degrees[axis] + coordinates[axis]
        return share

    @property
    def is_first_of_rows(self) -> bool:
        """True on the first of the ranks that read the same rows."""
        return not any(index for axis, index in self.coordinates().items() if axis not in row_axes())

    @property
    def data_ranks(self) -> int:
        """The number of shares into which the batch is cut."""
        return self.size(*row_axes())

    def _rank(self, coordinates: Mapping[Axis, int]) -> int:
        rank = 0
        for axis in self.axes:
            rank = rank * self.degrees[axis] + coordinates[axis]
        return rank

    def smp(self, notion: str) -> tuple[int, int, tuple[int, ...]]:
        """Return SMP's (rank, size, member ranks) of `world`, `tp`, `pp`, `rdp`, `dp`, `mp`, or of `local`."""
        if notion == "local":
            first = self.rank - self.rank % self.local_size
            members = tuple(range(first, min(first + self.local_size, self.world_size)))
        else:
            members = self.ranks(*smp_axes(notion))
        return members.index(self.rank), len(members), members

    def group(self, *axes: Axis) -> ProcessGroup:
        """Return the process group along `axes`. Collective on first use: every rank must ask in the same order."""
        return self.group_of(axes, lambda rank: self.ranks(*axes, of=rank))

    def holders_group(self, pipeline: Sequence[int]) -> ProcessGroup:
        """Return the group of the ranks at these places of their pipeline. Collective, as `group`.

        The other ranks of the pipeline get a group of their own.
        """

        def members_of(rank: int) -> tuple[int, ...]:
            stages = self.ranks(Axis.PIPELINE, of=rank)
            holders = tuple(stages[place] for place in pipeline)
            return holders if rank in holders else tuple(other for other in stages if other not in holders)

        return self.group_of(("holders", *pipeline), members_of)

    def tensor_neighbours(self, copies: int) -> ProcessGroup:
        """Return the group of each `copies` ranks in a row of a tensor group. Collective, as `group`."""

        def members_of(rank: int) -> tuple[int, ...]:
            members = self.ranks(Axis.TENSOR, of=rank)
            first = members.index(rank) // copies * copies
            return members[first : first + copies]

        return self.group_of(("neighbours", copies), members_of)

    def group_of(self, asked: tuple[object, ...], members_of: Callable[[int], tuple[int, ...]]) -> ProcessGroup:
        """Return this rank's group in a partition of all ranks, made once for each partition, whoever `asked` for it.

        Collective: every rank must ask in the same order.

        Kept by partition, which is the same on every rank: by members, one rank could find its group and another not.
        """
        import torch.distributed as dist

        if asked not in self._asked:
            partition = tuple(sorted({members_of(rank) for rank in range(self.world_size)}))
            if partition not in self._groups:
                if len(partition) == 1 and dist.group.WORLD is not None:
                    self._groups[partition] = dist.group.WORLD
                else:
                    ranks = [list(part) for part in partition]
                    description = " x ".join(str(word) for word in asked)
                    group, _ = dist.new_subgroups_by_enumeration(ranks, group_desc=description)
                    assert isinstance(group, dist.ProcessGroup)  # every rank is in one part
                    self._groups[partition] = group
            self._asked[asked] = self._groups[partition]
        return self._asked[asked]

    def partition_of(self, group: ProcessGroup) -> tuple[tuple[int, ...], ...] | None:
        """Return all ranks, group by group, as the partition that has `group` has them; None where none was asked."""
        import torch.distributed as dist

        if group is dist.group.WORLD:
            return (tuple(range(self.world_size)),)
        return next((partition for partition, known in self._groups.items() if known is group), None)

    @cached_property
    def experts(self) -> ExpertView:
        """This rank's place in the second view of the data ranks."""
        return ExpertView.of(self)

    def shard_mesh(self) -> DeviceMesh:
        """Return FSDP2's mesh: over shard x context, or (replica, shard x context) when there are replicas."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if self.size(*replica_axes()) == 1:
            return DeviceMesh.from_group(self.group(*state_axes()), self.device_type, mesh_dim_names=("shard",))
        columns = [self.ranks(*replica_axes(), of=rank) for rank in self.ranks(*state_axes())]
        mesh = torch.tensor(columns).T.contiguous()
        groups = [self.group(*replica_axes()), self.group(*state_axes())]
        return DeviceMesh.from_group(groups, self.device_type, mesh, mesh_dim_names=("replica", "shard"))


class ExpertLevels(NamedTuple):
    """The ranks that share experts, in the order of their experts.

    Attributes:
        all: every one of them.
        local, cross: those on this host, and those of this local index on all hosts; None where `all` share at once.
    """

    all: ProcessGroup
    local: ProcessGroup | None = None
    cross: ProcessGroup | None = None

    @classmethod
    def of(cls, layout: Layout, sharing: ProcessGroup, members_of: Callable[[int], tuple[int, ...]]) -> ExpertLevels:
        """Return `sharing` with its two levels where it is on several hosts, with equally many ranks on each.

        Collective, as `Layout.group`.

        Args:
            members_of: the ranks that share experts with a rank, in the order of the experts.
        """
        hosts = [_by_host(members_of(rank), layout.local_size) for rank in range(layout.world_size)]
        if any(len(members) == 1 or len(set(map(len, members))) > 1 for members in hosts):
            return cls(sharing)

        def local(rank: int) -> tuple[int, ...]:
            return next(host for host in hosts[rank] if rank in host)

        def cross(rank: int) -> tuple[int, ...]:
            index = local(rank).index(rank)
            return tuple(host[index] for host in hosts[rank])

        of = layout.group_of
        return cls(sharing, of(("expert local",), local), of(("expert cross",), cross))


def _by_host(members: tuple[int, ...], local_size: int) -> list[tuple[int, ...]]:
    by_host = itertools.groupby(members, lambda member: member // local_size)
    return [tuple(host) for _, host in by_host]


@dataclass(frozen=True)
class ExpertView:
    """The data ranks of one tensor rank and stage as expert-replica x expert-shard x expert, the last varying fastest.

    Ranks that differ in `expert` alone hold different experts; those that differ in `shard` alone hold different rows
    of the same ones; those that differ in `replica` alone hold copies. State that is sharded over s ranks stays so as
    far as the degree allows: s / gcd(s, degree) ranks shard an expert.

    Attributes:
        degree: ranks that share the experts.
        shards: ranks that share each expert's parameters.
        replicas: ranks that hold the same.
        expert, shard, replica: this rank's place among each of them.
    """

    layout: Layout
    degree: int
    shards: int
    replicas: int
    expert: int
    shard: int
    replica: int

    @classmethod
    def of(cls, layout: Layout) -> ExpertView:
        """Return the place of the layout's own rank."""
        members = layout.ranks(*data_axes())
        degree, state = layout.expert_degree, layout.size(*state_axes())
        shards = state // math.gcd(state, degree)
        rest, expert = divmod(members.index(layout.rank), degree)
        replica, shard = divmod(rest, shards)
        return cls(layout, degree, shards, len(members) // (degree * shards), expert, shard, replica)

    def group(self) -> ProcessGroup:
        """Return the ranks that share the experts, in the order of the experts. Collective, as `Layout.group`."""
        return self._group("expert", 1, self.degree)

    def levels(self) -> ExpertLevels:
        """Return the same ranks with their two levels. Collective, as `Layout.group`."""
        return ExpertLevels.of(self.layout, self.group(), lambda rank: self._members(rank, 1, self.degree))

    def mesh(self) -> DeviceMesh:
        """Return FSDP2's mesh of the ranks that hold the same experts: over shards, or (replica, shard)."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        shards = self._group("expert shard", self.degree, self.shards)
        if self.replicas == 1:
            return DeviceMesh.from_group(shards, self.layout.device_type, mesh_dim_names=("shard",))
        replicas = self._group("expert replica", self.degree * self.shards, self.replicas)
        same_experts = self.layout.ranks(*data_axes())[self.expert :: self.degree]
        mesh = torch.tensor(same_experts).view(self.replicas, self.shards)
        return DeviceMesh.from_group(
            [replicas, shards], self.layout.device_type, mesh, mesh_dim_names=("replica", "shard")
        )

    def _group(self, name: str, stride: int, size: int) -> ProcessGroup:
        """Return the group of `size` data ranks that lie `stride` apart."""

        return self.layout.group_of((name,), lambda rank: self._members(rank, stride, size))

    def _members(self, rank: int, stride: int, size: int) -> tuple[int, ...]:
        members = self.layout.ranks(*data_axes(), of=rank)
        place = members.index(rank)
        first = place - place // stride % size * stride
        return members[first : first + stride * size : stride]


def refuse_unknown_axes(degrees: Mapping[Axis, int]) -> None:
    """Raise ConfigError for a key of `degrees` that is no axis, or a degree that is no whole number of at least 1."""
    require_type(degrees, Mapping, "degrees", 'give one of axis to degree, such as {"tensor": 2}')
    known = [str(axis) for axis in (*placed_axes(PLACEMENT_LETTERS), *second_views())]
    for axis, degree in degrees.items():
        if axis not in known:
            raise ConfigError(f"degrees[{str(axis)!r}]={degree!r}: no such axis.{nearest(str(axis), known)}")
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ConfigError(f"degrees[{str(axis)!r}]={degree!r} must be a whole number of at least 1; use 1 or more")
