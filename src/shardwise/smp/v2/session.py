"""The session of version 2: `tsm.state`, with the parameters, this rank's place and its groups."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.job.axes import Axis, data_axes, replica_axes, state_axes
from shardwise.parallel.layout import Layout
from shardwise.smp.backend import fsdp_backend
from shardwise.smp.session import SmpSession, device_type, launched_world, print_notes
from shardwise.smp.v2.expert_ranks import ExpertRanks
from shardwise.smp.v2.options import DEFAULTS, DEGREES, read_parameters
from shardwise.words import divisors

NATIVE_SHARDS = 8  # of torch's own hybrid sharding on SMP's machines, where no degree is given
Group = dist.ProcessGroup | None
# The axes of the groups that FSDP and checkpoints ask for: of a shard, of the holders of a shard, of all data ranks.
SHARD, REPLICA, DATA = state_axes(), replica_axes(), data_axes()
GROUPS = (
    SHARD,
    REPLICA,
    DATA,
    (Axis.TENSOR,),
    (Axis.CONTEXT,),
    (*SHARD, Axis.TENSOR),
    (*DATA, Axis.PIPELINE, Axis.TENSOR),
)


class Ranker:
    """`tsm.state.ranker`: the ranks that hold the same shard of parameters."""

    def __init__(self, layout: Callable[[], Layout], expert_degree: Callable[[], int]) -> None:
        self._layout, self._expert_degree = layout, expert_degree

    def get_rep_rank(self, global_rank: int) -> int:
        """Return the number of a rank among the holders of its shard; 0 is the one that writes checkpoints."""
        return self._layout().coordinates(global_rank)[Axis.REPLICA] // self._expert_degree()

    def get_rep_groups(self) -> list[list[int]]:
        """List the global ranks that hold the same shard, for every shard; the same list on every rank."""
        layout, degree = self._layout(), self._expert_degree()
        replicas = {layout.ranks(Axis.REPLICA, of=rank) for rank in range(layout.world_size)}
        return sorted(list(ranks[first::degree]) for ranks in replicas for first in range(degree))


class SmpSessionV2(SmpSession):
    """The one object behind `tsm`. Parameters can be set before `init`, and win over what `init` reads.

    Attributes:
        native: FSDP chooses its groups itself, since no degree was given.
        native_hybrid: the script's FSDP then shards inside of hosts, as SMP's own does.
        transformed: `tsm.transform` was given a model, which degrees of tensors and sequences need.
        ranker: which ranks hold the same shard.
    """

    api = "tsm"
    native: bool
    native_hybrid: bool
    transformed: bool

    def __init__(self) -> None:
        super().__init__()
        self.native = False
        self.native_hybrid = True
        self.transformed = False
        self.ranker = Ranker(lambda: self.layout, lambda: self.expert_parallel_degree)
        self._values = dict(DEFAULTS)
        self._assigned: dict[str, Any] = {}
        self._layouts: dict[bool, Layout] = {}  # by `native_hybrid`

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"tsm.state has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS:
            super().__setattr__(name, value)
            return
        if self.initialized and name in ("hybrid_shard_degree", *DEGREES) and value != self._values[name]:
            raise ConfigError(
                f"tsm.state.{name}={value!r} is set after tsm.init(), which has laid out the ranks for "
                f"{self._values[name]!r}; set it before"
            )
        self._values[name] = self._assigned[name] = value

    def init(self, config: Any) -> None:
        """Read the parameters and take a place; see `tsm.init`."""
        values, notes = read_parameters(config, self._assigned)
        self.reset()
        device = device_type()
        world = self.join(device, fsdp_backend(launched_world(device)))
        self._values = values
        self.native = values["hybrid_shard_degree"] == 0 and all(values[name] == 1 for name in DEGREES)
        host_shards = min(NATIVE_SHARDS, world.local_size)
        for hybrid in (False, True) if self.native and world.size % host_shards == 0 else (False,):
            on_hosts = {Axis.SHARD: host_shards, Axis.REPLICA: world.size // host_shards}
            degrees = on_hosts if hybrid else _degrees(values, world.size)
            self._layouts[hybrid] = Layout(degrees, "DPT", dist.get_rank(), world.local_size, device)
        for layout in self._layouts.values():  # now, while every rank is here: a group is made by all
            for axes in GROUPS:
                layout.group(*axes)
        if self.experts is not None:
            self.experts.make_groups()
        self.initialized = True
        print_notes(notes)

    # ---- place

    @property
    def layout(self) -> Layout:
        """The named axes of the ranks, and this rank's position on each."""
        hybrid = self.native and self.native_hybrid and True in self._layouts
        return self.after_init(self._layouts.get(hybrid))

    @property
    def rank(self) -> int:
        """This rank among all."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def experts(self) -> ExpertRanks | None:
        """The ranks that share experts; None where each rank has all of them."""
        degree = self.expert_parallel_degree
        return ExpertRanks(self._layouts[False], degree) if degree > 1 else None

    def groups_of_parts(self) -> dict[Axis, dist.ProcessGroup]:
        """Return the ranks that together hold a parameter in parts, by the axis that it is split along."""
        groups = {Axis.TENSOR: self.layout.group(Axis.TENSOR)}
        return groups if self.experts is None else groups | {Axis.EXPERT: self.experts.sharing()}

    tp_size = property(lambda self: self.tensor_parallel_degree)
    cp_size = property(lambda self: self.context_parallel_degree)
    ep_size = property(lambda self: self.expert_parallel_degree)
    ep_rank = property(lambda self: 0 if self.experts is None else self.experts.index())
    tp_rank = property(lambda self: self.layout.index(Axis.TENSOR))
    cp_rank = property(lambda self: self.layout.index(Axis.CONTEXT))

    @property
    def world_process_group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self.layout.group(*self.layout.axes)

    @property
    def tp_process_group(self) -> Group:
        """The ranks that split the same tensors; None where FSDP is left alone."""
        return None if self.native else self.layout.group(Axis.TENSOR)

    @property
    def cp_process_group(self) -> Group:
        """The ranks that split the same sequences; None where FSDP is left alone."""
        return None if self.native else self.layout.group(Axis.CONTEXT)

    @property
    def rep_rank_process_group(self) -> Group:
        """The ranks of one whole copy of the model; None where FSDP is left alone."""
        return None if self.native else self.layout.group(*state_axes(), Axis.TENSOR)

    def get_rng_state_tracker(self) -> None:
        """Return None, which scripts hand to Transformer Engine's checkpoint: random numbers are torch's own here."""


def _degrees(values: dict[str, Any], world: int) -> dict[Axis, int]:
    """Return the degree of each axis. Raises ConfigError where the ranks do not fit."""
    tensor, context = values["tensor_parallel_degree"], values["context_parallel_degree"]
    if world % (tensor * context):
        raise ConfigError(
            f"tensor_parallel_degree={tensor} x context_parallel_degree={context} does not divide the {world} ranks"
        )
    experts = values["expert_parallel_degree"]
    if (world // tensor) % experts:
        raise ConfigError(
            f"expert_parallel_degree={experts} does not divide the {world // tensor} ranks that "
            f"tensor_parallel_degree={tensor} leaves of {world}; use {', '.join(map(str, divisors(world // tensor)))}"
        )
    shards = values["hybrid_shard_degree"] or world // tensor // experts
    if (world // tensor) % shards:
        raise ConfigError(
            f"hybrid_shard_degree={shards} does not divide the {world // tensor} ranks that tensor_parallel_degree="
            f"{tensor} leaves of {world}; use {', '.join(map(str, divisors(world // tensor)))} or 0"
        )
    if (world // tensor // shards) % experts:
        raise ConfigError(
            f"expert_parallel_degree={experts} times hybrid_shard_degree={shards} does not divide the "
            f"{world // tensor} data ranks: parameters are sharded inside of ranks that hold the same experts; use a "
            f"hybrid_shard_degree of {', '.join(map(str, divisors(world // tensor // experts)))}"
        )
    if shards % context:
        raise ConfigError(
            f"context_parallel_degree={context} lies inside of the shard group, and does not divide "
            f"hybrid_shard_degree={shards}; use {', '.join(map(str, divisors(shards)))}"
        )
    return {
        Axis.REPLICA: world // tensor // shards,
        Axis.SHARD: shards // context,
        Axis.CONTEXT: context,
        Axis.TENSOR: tensor,
    }


state = SmpSessionV2()
atexit.register(state.reset)
