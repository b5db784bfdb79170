"""Answers to what a script asks about its model's tensors: which are on this rank, and which are split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.job.axes import Axis
from shardwise.parallel.layout import Layout
from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.weights import ModelWeights

REDUCES_ITSELF = "smp.DistributedModel reduces gradients itself; leave DistributedDataParallel out, around and inside"


def refuse_data_parallel(module: nn.Module) -> None:
    """Raise SMPValidationError where the script has put torch's DistributedDataParallel into the model."""
    if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
        raise SMPValidationError(REDUCES_ITSELF)


class ModelInspection:
    """The part of `DistributedModel` that names what is here and what tensor ranks split.

    Args:
        session: the session of this process.
        weights: the model's weights.
    """

    def __init__(self, session: SmpSessionV1, weights: ModelWeights) -> None:
        self._session, self._weights = session, weights

    @property
    def splits_tensors(self) -> bool:
        """True where tensor ranks hold parts of the model; every parameter sees the batch of their group then."""
        return self._session.layout.size(Axis.TENSOR) > 1

    def local_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield this stage's modules by name: those that hold something, and those they are in."""
        parallel = self._weights.parallel
        boundary = parallel.parts[0].boundary if parallel is not None else None
        absent = boundary.absent if boundary is not None else frozenset()
        return ((name, module) for name, module in self._weights.module.named_modules() if name not in absent)

    def updated_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's elements of each parameter, which the optimizer updates, by its name."""
        optimizer = self._session.optimizer
        return ((entry.name, local) for entry, local in (optimizer.locals if optimizer is not None else []))

    def split_modules(self) -> Iterator[nn.Module]:
        """Yield the modules whose tensors are split over tensor ranks."""
        parallel = self._weights.parallel
        splits = parallel.facts.tensor_splits if parallel is not None and self.splits_tensors else {}
        return (self._weights.module.get_submodule(name) for name in splits)

    def split_dim(self, parameter: nn.Parameter) -> int | None:
        """Return the dim along which tensor ranks hold parts of `parameter`; None where each has it whole."""
        parallel = self._weights.parallel
        name = self._weights.names.get(id(parameter))
        if parallel is None or name is None or name not in parallel.tensor_map.names:
            return None
        cut = parallel.tensor_map[name].split
        return None if cut is None else cut.dim


def show_shards(module: nn.Module, layout: Layout) -> None:
    """Give parameters the attributes by which scripts count the elements of a shard: `ds_shape`, `ds_tensor` ..."""
    degree = layout.size(Axis.SHARD)
    for parameter in module.parameters():
        size = -(-parameter.numel() // degree)
        first = size * layout.index(Axis.SHARD)
        show_shard(parameter, tuple(parameter.shape), parameter.detach().flatten()[first : first + size], degree)


def show_shard(parameter: nn.Parameter, shape: tuple[int, ...], elements: Tensor, degree: int) -> None:
    """Give one parameter of the whole `shape` those attributes; `elements` of it are on this rank of `degree`."""
    shown: Any = parameter
    shown.ds_shape, shown.ds_numel = torch.Size(shape), math.prod(shape)
    shard: Any = elements.detach().flatten()
    shard.ds_numel = -(-shown.ds_numel // degree)
    shown.ds_tensor = shard
