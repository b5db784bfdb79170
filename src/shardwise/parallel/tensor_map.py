"""TensorMap: which slice of which logical tensor lives on this rank. The single truth of what lives where.

Logical tensors carry the unmodified model's names and global shapes. Initialization, loading, export, the gradient
norm, memory figures and verify read placements here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

Slices = tuple[slice, ...]


class Coordinates(Protocol):
    """What the map asks of a Layout."""

    def size(self, *axes: str) -> int: ...

    def index(self, *axes: str) -> int: ...


@dataclass(frozen=True)
class Entry:
    """One parameter of this rank.

    Attributes:
        name: logical name; for tied parameters the first in module order.
        aliases: the other names of a tied parameter.
        shape: global shape.
        parameter: the object the module holds (a DTensor once sharded).
        global_slice: region of the logical tensor that lives here; one slice a dim, steps of 1.
        replication: how many ranks hold the same elements.
        replica: number of this rank among those, from 0.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    parameter: nn.Parameter
    global_slice: Slices
    replication: int
    replica: int

    @property
    def local(self) -> Tensor:
        """This rank's elements as a plain tensor that shares the parameter's storage."""
        return _plain(self.parameter.detach())

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's gradient elements, or None before the first backward."""
        gradient = self.parameter.grad
        return None if gradient is None else _plain(gradient)

    def whole(self, gradient: bool = False) -> Tensor:
        """The logical tensor, or its gradient, on every rank. Collective over the shard group."""
        value = self.parameter.grad if gradient else self.parameter.detach()
        if value is None:
            return torch.zeros(self.shape, dtype=self.parameter.dtype)
        return value.full_tensor() if isinstance(value, DTensor) else value

    def store(self, whole: Tensor) -> None:
        """Keep this rank's slice of the logical tensor `whole`."""
        with torch.no_grad():
            self.local.copy_(whole[self.global_slice])


class TensorMap:
    """All entries of a model, in module order, ties once."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.names = {name: entry.name for entry in entries for name in (entry.name, *entry.aliases)}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __getitem__(self, name: str) -> Entry:
        """The entry of a logical name or of an alias of it."""
        return self.entries[self.names[name]]

    @classmethod
    def of(cls, model: nn.Module, layout: Coordinates) -> TensorMap:
        """Read the map off a model whose parameters are plain or sharded by FSDP2 on dim 0."""
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        return cls([_entry(own, parameters[key], layout) for key, own in names.items()])


def _entry(names: list[str], parameter: nn.Parameter, layout: Coordinates) -> Entry:
    shape = tuple(parameter.shape)
    region = tuple(slice(0, size) for size in shape)
    copies: tuple[str, ...] = ("replica", "shard", "context")
    if isinstance(parameter, DTensor):
        region = (_rows(shape[0], layout), *region[1:])
        copies = ("replica",)
        assert parameter.placements[-1] == Shard(0)
    name, *aliases = names
    return Entry(name, tuple(aliases), shape, parameter, region, layout.size(*copies), layout.index(*copies))


def _rows(size: int, layout: Coordinates) -> slice:
    """Rows of dim 0 on this rank: chunks of ceil(size / degree), the last ones short or empty (torch.chunk's rule)."""
    degree, index = layout.size("shard", "context"), layout.index("shard", "context")
    chunk = -(-size // degree)
    return slice(min(index * chunk, size), min((index + 1) * chunk, size))


def _plain(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
