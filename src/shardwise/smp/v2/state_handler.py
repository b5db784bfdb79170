"""`tsm.state`: the parameters, this rank's place, its groups, and the ranks that hold the same shard."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives import engine
from shardwise.errors import ConfigError
from shardwise.job.axes import Axis, state_axes
from shardwise.kernels.sums import fp32_sums
from shardwise.launch.process_group import process_group
from shardwise.parallel.layout import Layout
from shardwise.smp.v1.exceptions import NotInitializedError
from shardwise.smp.v1.process import device_type, world_to_come
from shardwise.smp.v2.options import DEFAULTS, DEGREES, read_options
from shardwise.training.setup import current_world

NATIVE_SHARDS = 8  # of torch's own hybrid sharding on SMP's machines, where no degree is given
Group = dist.ProcessGroup | None


class Ranker:
    """`tsm.state.ranker`: which ranks hold the same shard of parameters."""

    def __init__(self, layout: Callable[[], Layout]) -> None:
        self._layout = layout

    def get_rep_rank(self, global_rank: int) -> int:
        """Number of this rank among the holders of its shard; 0 is the one that writes checkpoints."""
        return self._layout().coordinates(global_rank)[Axis.REPLICA]

    def get_rep_groups(self) -> list[list[int]]:
        """Global ranks that hold the same shard, for every shard; the same list on every rank."""
        layout = self._layout()
        return [list(part) for part in sorted({layout.ranks(Axis.REPLICA, of=r) for r in range(layout.world_size)})]


class State:
    """The one object behind `tsm`. Parameters can be set before `init`, and win over what `init` reads.

    Attributes:
        initialized: whether `init` was called.
        native: whether FSDP chooses its groups itself: no degree was given.
        native_hybrid: whether the script's FSDP then shards inside of hosts, as SMP's own does.
        transformed: whether `tsm.transform` was given a model, which degrees of tensors and sequences need.
    """

    def __init__(self) -> None:
        set_ = super().__setattr__
        set_("initialized", False)
        set_("native", False)
        set_("native_hybrid", True)
        set_("transformed", False)
        set_("_values", dict(DEFAULTS))
        set_("_assigned", {})
        set_("_layouts", {})
        set_("_device", None)
        set_("_exit", ExitStack())
        set_("ranker", Ranker(lambda: self.layout))

    _values: dict[str, Any]
    _assigned: dict[str, Any]
    _layouts: dict[bool, Layout]
    _device: torch.device | None
    _exit: ExitStack
    initialized: bool
    native: bool
    native_hybrid: bool
    transformed: bool
    ranker: Ranker

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
        from shardwise.smp.v2 import attention_choice, fully_sharded, offloading, removed_names

        values, notes = read_options(config, self._assigned)
        self.reset()
        kind = device_type()
        for_cuda = engine.BACKEND if world_to_come(kind).shares_gpus else "nccl"
        self._device = self._exit.enter_context(process_group(kind, for_cuda if kind == "cuda" else "gloo"))
        self._exit.enter_context(fp32_sums(kind))
        world = current_world(self._device)
        self._values = values
        self.native = values["hybrid_shard_degree"] == 0 and all(values[name] == 1 for name in DEGREES)
        inside = min(NATIVE_SHARDS, world.local_size)
        for hybrid in (False, True) if self.native and world.size % inside == 0 else (False,):
            degrees = (
                _degrees(values, world.size) if not hybrid else {Axis.SHARD: inside, Axis.REPLICA: world.size // inside}
            )
            self._layouts[hybrid] = Layout(degrees, "DPT", dist.get_rank(), world.local_size, kind)
        for layout in self._layouts.values():  # here, where every rank is: a group is made by all
            for axes in fully_sharded.GROUPS:
                layout.group(*axes)
        for changed in (fully_sharded, offloading, attention_choice, removed_names):
            changed.install()
        self.initialized = True
        if dist.get_rank() == 0:
            for note in notes:
                print(f"note: {note}", file=sys.stderr)

    def reset(self) -> None:
        """Forget everything, give torch and transformers back as they were, and leave the other ranks."""
        from shardwise.smp.v2 import attention_choice, fully_sharded, offloading, removed_names

        for changed in (fully_sharded, offloading, attention_choice, removed_names):
            changed.uninstall()
        self._exit.close()
        self.__init__()  # type: ignore[misc]

    # ---- place

    @property
    def layout(self) -> Layout:
        """Which rank stands where."""
        if not self.initialized:
            raise NotInitializedError("tsm is used before tsm.init(); call tsm.init() first")
        return self._layouts[self.native and self.native_hybrid and True in self._layouts]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self._device is None:
            raise NotInitializedError("tsm is used before tsm.init(); call tsm.init() first")
        return self._device

    @property
    def rank(self) -> int:
        """This rank among all."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.layout.world_size

    tp_size = property(lambda self: self.tensor_parallel_degree)
    cp_size = property(lambda self: self.context_parallel_degree)
    ep_size = property(lambda self: self.expert_parallel_degree)
    ep_rank = property(lambda self: 0)
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
        """What scripts hand to Transformer Engine's checkpoint: random numbers are torch's own here."""


def _degrees(values: dict[str, Any], world: int) -> dict[Axis, int]:
    """Return the degree of each axis. Raises ConfigError where the ranks do not fit."""
    tensor, context = values["tensor_parallel_degree"], values["context_parallel_degree"]
    if world % (tensor * context):
        raise ConfigError(
            f"tensor_parallel_degree={tensor} x context_parallel_degree={context} does not divide the {world} ranks"
        )
    shards = values["hybrid_shard_degree"] or world // tensor
    if (world // tensor) % shards:
        raise ConfigError(
            f"hybrid_shard_degree={shards} does not divide the {world // tensor} ranks that tensor_parallel_degree="
            f"{tensor} leaves of {world}; use {', '.join(map(str, _divisors(world // tensor)))} or 0"
        )
    if shards % context:
        raise ConfigError(
            f"context_parallel_degree={context} lies inside of the shard group, and does not divide "
            f"hybrid_shard_degree={shards}; use {', '.join(map(str, _divisors(shards)))}"
        )
    return {
        Axis.REPLICA: world // tensor // shards,
        Axis.SHARD: shards // context,
        Axis.CONTEXT: context,
        Axis.TENSOR: tensor,
    }


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


state = State()
atexit.register(state.reset)
