"""FSDP2's communication objects: named ones, overlapped ones for CPUs, two-level ones for groups of torch.distributed.

    name_collectives(modules)                         # after fully_shard: errors and traces say which unit's they are
    overlap(modules)                                  # after fully_shard: compute while the network works

    hierarchies = use_two_levels(model, "direct")     # after fully_shard, on every rank
    ...
    hierarchies.close()                               # before destroy_process_group

Two-level ones serve the gathering of parameters and the reduce-scatter of gradients; a replica group's all-reduce is
torch.distributed's own, which takes two levels where the group's backend is that of `hierarchical.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.autograd import at_end_of_backward
from shardwise._torch_compat.fsdp2 import gather_asynchronously, keeps_reduced_gradients_as_they_are
from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives.hierarchical import Choice, Hierarchy, around
from shardwise.collectives.names import CollectiveName, NamedWork, named_work, unit_names

SHARD_GROUP = "shard"


class Hierarchies:
    """The two levels of each group that is met, made at its first collective, when all its ranks are there."""

    def __init__(self, algorithm: Choice) -> None:
        self.algorithm = algorithm
        self._made: dict[dist.ProcessGroup, Hierarchy | None] = {}

    def of(self, group: dist.ProcessGroup) -> Hierarchy | None:
        """None where the group's shape has no two levels."""
        if group not in self._made:
            self._made[group] = around(group, self.algorithm)
        return self._made[group]

    def close(self) -> None:
        """End the groups and threads; the model cannot communicate afterwards."""
        for hierarchy in self._made.values():
            if hierarchy is not None:
                hierarchy.close()


class Memory:
    """Memory that FSDP2 asks all these objects for. It is freed after use, since several gathers may be in flight."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class NamedAllGather(Memory):
    """FSDP2's own all-gather of a unit, under its name."""

    def __init__(self, unit: str) -> None:
        self.name = CollectiveName(unit, SHARD_GROUP, "all_gather")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.name:
            return named_work(self.name, all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op))


class NamedReduceScatter(Memory):
    """FSDP2's own reduce-scatter of a unit, under its name."""

    def __init__(self, unit: str) -> None:
        self.name = CollectiveName(unit, SHARD_GROUP, "reduce_scatter")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self.name:
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _Communication(Memory):
    """A unit's collective in two levels."""

    operation = ""

    def __init__(self, hierarchies: Hierarchies, unit: str) -> None:
        self.hierarchies = hierarchies
        self.name = CollectiveName(unit, SHARD_GROUP, self.operation)


class TwoLevelAllGather(_Communication):
    """For `FSDPModule.set_custom_all_gather`."""

    operation = "all_gather"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.name:
            hierarchy = self.hierarchies.of(group)
            work = hierarchy.all_gather([output_tensor], [input_tensor], not async_op) if hierarchy else None
            if work is None:
                work = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return named_work(self.name, work) if async_op else None


class TwoLevelReduceScatter(_Communication):
    """For `FSDPModule.set_custom_reduce_scatter`."""

    operation = "reduce_scatter"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self.name:
            hierarchy = self.hierarchies.of(group)
            work = hierarchy.reduce_scatter([output_tensor], [input_tensor], op, not async_op) if hierarchy else None
            if work is None:
                return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work if async_op else None


class OverlappedReduceScatter(Memory):
    """For `FSDPModule.set_custom_reduce_scatter`: gradients arrive while backward goes on, all before it returns.

    FSDP2 waits for each reduce-scatter where there are no streams. Where it only keeps the result, as `.grad`, the call
    goes out asynchronously and is waited for at the end of backward. Where it adds, converts or moves the result at
    once (a second microbatch, replicas, another dtype, offload) the call is waited for here.
    """

    def __init__(self, module: FSDPModule, unit: str) -> None:
        self.module = module
        self.name = CollectiveName(unit, SHARD_GROUP, "reduce_scatter")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        late = not async_op and keeps_reduced_gradients_as_they_are(self.module, output_tensor.dtype)
        with self.name:
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op or late
            )
        if late and work is not None:
            at_end_of_backward(NamedWork(self.name, work).wait)
            return None
        return work


def name_collectives(modules: Sequence[FSDPModule]) -> None:
    """Let the units of a model gather and reduce under their names; `modules` are all of a model, root first."""
    units = unit_names(modules[0])
    for module in modules:
        module.set_custom_all_gather(NamedAllGather(units[module]))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(NamedReduceScatter(units[module]))  # type: ignore[arg-type]


def overlap(modules: Sequence[FSDPModule]) -> None:
    """Let ranks on CPUs compute while their parameters and gradients travel; `modules` are all of a model, root first.

    Parameters are gathered ahead only as far as prefetching is set. Sums are those without overlap, bit for bit.
    """
    gather_asynchronously(modules[0])
    units = unit_names(modules[0])
    for module in modules:
        module.set_custom_reduce_scatter(OverlappedReduceScatter(module, units[module]))  # type: ignore[arg-type]


def use_two_levels(model: nn.Module, algorithm: Choice = "measured") -> Hierarchies:
    """Let every FSDP module in `model` communicate in two levels; the setters do not recurse."""
    hierarchies = Hierarchies(algorithm)
    for module, unit in unit_names(model).items():
        module.set_custom_all_gather(TwoLevelAllGather(hierarchies, unit))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(TwoLevelReduceScatter(hierarchies, unit))  # type: ignore[arg-type]
    return hierarchies
