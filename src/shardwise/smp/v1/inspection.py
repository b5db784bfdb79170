"""What a script asks a DistributedModel about its parameters, buffers and modules: which are here, which are split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.job.axes import Axis
from shardwise.parallel.model import ParallelModel
from shardwise.smp.v1.exceptions import SMPValidationError
from shardwise.smp.v1.process import state

BY_ITSELF = "smp.DistributedModel reduces gradients itself; leave DistributedDataParallel out, around and inside"


def refuse_data_parallel(module: nn.Module) -> None:
    """Raises SMPValidationError where the script has put torch's DistributedDataParallel into the model."""
    if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
        raise SMPValidationError(BY_ITSELF)


class Inspection:
    """A part of DistributedModel, which has the attributes."""

    parallel: ParallelModel | None
    names: dict[int, str]

    def get_module(self) -> nn.Module:
        """The script's module (or what took its place), unwrapped."""
        raise NotImplementedError

    @property
    def partitioned(self) -> bool:
        """Whether the model has been distributed."""
        return self.parallel is not None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the module's own names: all of them before the first step, then those that live here."""
        return self.get_module().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """By the module's own names."""
        return self.get_module().named_buffers(*args, **kwargs)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this pipeline rank."""
        return self.get_module().named_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this pipeline rank."""
        return self.get_module().parameters()

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this pipeline rank."""
        return self.get_module().named_buffers()

    def local_buffers(self) -> Iterator[Tensor]:
        """Buffers of this pipeline rank."""
        return self.get_module().buffers()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this pipeline rank: those that hold something, and those they are in."""
        parallel = self.parallel
        boundary = parallel.parts[0].boundary if parallel is not None else None
        absent = boundary.absent if boundary is not None else frozenset()
        return ((name, module) for name, module in self.get_module().named_modules() if name not in absent)

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules of this pipeline rank."""
        return (module for _, module in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates: this rank's elements of each parameter, by its name."""
        locals_ = state.optimizer.locals if state.optimizer is not None else []
        return ((entry.name, local) for entry, local in locals_)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """What torch's DistributedDataParallel asks the module that it is put around. Raises SMPValidationError."""
        raise SMPValidationError(BY_ITSELF)

    # ---- tensor parallelism

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules whose tensors are split over tensor ranks."""
        splits = self.parallel.facts.tensor_splits if self.parallel is not None else {}
        return (self.get_module().get_submodule(name) for name in splits if state.layout.size(Axis.TENSOR) > 1)

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether tensor ranks hold parts of it."""
        name = self.names.get(id(parameter))
        parallel = self.parallel
        return bool(parallel and name in parallel.tensor_map.names and parallel.tensor_map[name].cut is not None)

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether tensor ranks hold parts of it; buffers are always whole."""
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether it sees the batch of the whole tensor group: all do, where tensors are split."""
        return state.layout.size(Axis.TENSOR) > 1

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether it sees the batch of the whole tensor group."""
        return state.layout.size(Axis.TENSOR) > 1

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters reduced over the reduced data group."""
        return (item for item in self.named_parameters() if self.is_scaled_batch_parameter(item[1]))

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters reduced over the data group."""
        return (item for item in self.named_parameters() if not self.is_scaled_batch_parameter(item[1]))


def show_shards(module: nn.Module) -> None:
    """Give parameters the attributes by which scripts count the elements of a shard: `ds_shape`, `ds_tensor` ..."""
    for parameter in module.parameters():
        size = -(-parameter.numel() // state.layout.size(Axis.SHARD))
        first = size * state.layout.index(Axis.SHARD)
        show_shard(parameter, tuple(parameter.shape), parameter.detach().flatten()[first : first + size])


def show_shard(parameter: nn.Parameter, shape: tuple[int, ...], elements: Tensor) -> None:
    """The attributes of one parameter of the whole `shape`, of which `elements` are here."""
    held: Any = parameter
    held.ds_shape, held.ds_numel = torch.Size(shape), math.prod(shape)
    shard: Any = elements.detach().flatten()
    shard.ds_numel = -(-held.ds_numel // state.layout.size(Axis.SHARD))
    held.ds_tensor = shard
