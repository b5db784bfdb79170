"""Running statistics: buffers that a forward changes, as batch norms and averages do, equal on all ranks.

The forwards of a rank see its own rows. After each step the buffers are those of the first rank, or the mean over the
ranks that read different rows (`model.running_statistics`). So evaluation, checkpoints and export have one value, and a
run that is resumed goes on as the undisturbed one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.autograd import version_of
from shardwise.collectives.names import CollectiveName
from shardwise.errors import ModelError
from shardwise.job.axes import Axis, data_axes
from shardwise.parallel.layout import Layout

CHANGED_BUFFERS = CollectiveName("changed buffers", "world", "all_reduce")
STATISTICS = CollectiveName("running statistics", "data ranks and stages", "broadcast")

BufferState = tuple[int, int]  # identity, and writes so far


class RunningStatistics:
    """The buffers of this rank's stages that the forwards of a step change.

    Args:
        modules: one a stage on this rank.
        names: of all buffers of the model, the same on every rank.
        layout: where this rank stands.
        synchronised: whether floating buffers become the mean over the data ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], layout: Layout, synchronised: bool) -> None:
        self.modules, self.names, self.layout, self.synchronised = modules, names, layout, synchronised
        self._before: list[dict[str, BufferState]] | None = None
        self._holders: list[int] | None = None  # stages that hold each buffer, known once the ranks have met

    def begin(self) -> None:
        """Note the buffers before the first forward of a step."""
        if self._before is None and self.names:
            self._before = [_states(module) for module in self.modules]

    def changed(self) -> dict[str, nn.Module]:
        """Return the buffers that forwards have changed since `begin`, each with the stage that has."""
        modules: dict[str, nn.Module] = {}
        for module, before in zip(self.modules, self._before or (), strict=False):
            written = {name for name, state in _states(module).items() if state != before.get(name)}
            # torch's batch norms write their mean and variance in a kernel that counts no write; their counter tells.
            owners = {name.rpartition(".")[0] for name in written}
            modules |= {name: module for name in before if name.rpartition(".")[0] in owners and name not in modules}
        return modules

    def settle(self, device: torch.device) -> None:
        """Make the changed buffers equal on all ranks. Collective over all ranks.

        Args:
            device: on which this rank computes.

        Raises:
            ModelError: several stages hold a changed buffer, and others lack it.
        """
        changed, stages, place = self.changed(), self.layout.size(Axis.PIPELINE), self.layout.index(Axis.PIPELINE)
        flags = torch.tensor([(stages - place) * (name in changed) for name in self.names], device=device)
        with CHANGED_BUFFERS:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        for name, flag, holder_count in zip(self.names, flags.tolist(), self._held_by(device), strict=True):
            if flag and 1 < holder_count < stages:
                raise ModelError(
                    f"some of the stages hold the buffer {name} and change it, and others lack it; use "
                    "pipeline_parallel_degree 1 or 2"
                )
            if flag:
                self._share(name, changed.get(name), stages - flag, holder_count)
        self._before = None

    def forget(self) -> None:
        """Forget the step: no rank's forwards have changed a buffer."""
        self._before = None

    def _held_by(self, device: torch.device) -> list[int]:
        """Return how many stages hold each buffer: all, or those with the blocks that it is in."""
        if self._holders is None:
            stages = self.layout.size(Axis.PIPELINE)
            buffers = {name for module in self.modules for name, _ in module.named_buffers()}
            holders = torch.tensor([name in buffers for name in self.names], dtype=torch.long, device=device)
            with CHANGED_BUFFERS:
                dist.all_reduce(holders)
            self._holders = (holders * stages // dist.get_world_size()).tolist()
        return self._holders

    def _share(self, name: str, module: nn.Module | None, owner: int, holder_count: int) -> None:
        """Share a buffer that pipeline rank `owner` has changed, with all stages or among its own ranks."""
        holders = [part for part in self.modules if name in _states(part)]
        if holder_count == 1 and not holders:
            return
        value = (module or holders[0]).get_buffer(name).detach().clone(memory_format=torch.contiguous_format)
        group = self.layout.group(*data_axes()) if holder_count == 1 else self.layout.group(*data_axes(), Axis.PIPELINE)
        with STATISTICS:
            if self.synchronised and value.is_floating_point():
                value *= self.layout.index(Axis.PIPELINE) == owner
                dist.all_reduce(value, group=group)
                value /= self.layout.size(*data_axes())
            else:
                first = {str(axis): 0 for axis in data_axes()}
                dist.broadcast(value, self.layout.rank_at(**first, pipeline=owner), group=group)
        for part in holders:
            part.get_buffer(name).copy_(value)


def _states(module: nn.Module) -> dict[str, BufferState]:
    return {name: _state(buffer) for name, buffer in module.named_buffers()}


def _state(buffer: Tensor) -> BufferState:
    return id(buffer), version_of(buffer)
