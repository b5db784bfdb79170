"""TensorMap: which slice of which logical tensor lives on this rank. The single truth of what lives where.

Logical tensors carry the unmodified model's names and global shapes. Initialization, loading, export, the gradient
norm, memory figures and verify read placements here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise._torch_compat.groups import all_gather_single
from shardwise.job.axes import Axis, data_axes, replica_axes, state_axes
from shardwise.kernels.packed_weights import packed_form, unpacked_weight
from shardwise.model.packed_weights import BLOCK
from shardwise.model.tensor_split import chunk, chunks
from shardwise.parallel.layout import ExpertView

Slices = tuple[slice, ...]


class Coordinates(Protocol):
    """The part of a Layout that the map reads."""

    def size(self, *axes: Axis) -> int: ...

    def index(self, *axes: Axis) -> int: ...

    def group(self, *axes: Axis) -> dist.ProcessGroup: ...

    @property
    def experts(self) -> ExpertView: ...

    @property
    def expert_degree(self) -> int: ...


@dataclass(frozen=True)
class ParameterSplit:
    """A parameter as an axis splits it: sections along `dim`, each in chunks (torch.chunk's rule).

    Attributes:
        shape: of the whole parameter.
        sections: their sizes.
        degree, index: parts there are, and which of them this rank holds.
        copies, copy: neighbouring ranks that hold the same part, and which of them this is; several where a model has
            fewer key-value heads than there are ranks.
        groups: of parts; each has as many of the sections, for it alone.
        axis: `tensor`, or `expert` of stacked experts.
    """

    shape: tuple[int, ...]
    dim: int
    sections: tuple[int, ...]
    degree: int
    index: int
    copies: int = 1
    copy: int = 0
    groups: int = 1
    axis: Axis = Axis.TENSOR

    def local_shape(self, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of part `index`; this rank's if unset."""
        size = sum(part.stop - part.start for part in self._chunks(index))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def regions(self, index: int | None = None) -> tuple[Region, ...]:
        """Return where part `index` belongs in the whole parameter, section by section."""
        boxes = []
        logical_first = local_first = 0  # of the section, in the whole parameter and in the part
        for section, part in zip(self.sections, self._chunks(index), strict=True):
            logical, local = _everything(self.shape), _everything(self.local_shape(index))
            size = part.stop - part.start
            logical[self.dim] = slice(logical_first + part.start, logical_first + part.stop)
            local[self.dim] = slice(local_first, local_first + size)
            boxes.append(Region(tuple(logical), tuple(local)))
            logical_first, local_first = logical_first + section, local_first + size
        return tuple(boxes)

    def at(self, layout: Coordinates) -> ParameterSplit:
        """Return the split as the rank at these coordinates has it."""
        if self.axis is Axis.EXPERT:
            return replace(self, index=layout.experts.expert)
        index, copy = divmod(layout.index(Axis.TENSOR), self.copies)
        return replace(self, index=index, copy=copy)

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter, as a tensor of its own."""
        part = whole.new_empty(self.local_shape())
        for region in self.regions():
            part[region.local] = whole[region.logical]
        return part

    @property
    def columns(self) -> tuple[int, int]:
        """First of this rank's features along `dim`, and how many there are in all."""
        return self._chunks(None)[0].start, self.shape[self.dim]

    def _chunks(self, index: int | None) -> list[slice]:
        return chunks(self.sections, self.degree, self.index if index is None else index, self.groups)


def narrow_parameters(module: nn.Module, splits: Mapping[str, ParameterSplit]) -> None:
    """Narrow parameters of a module, or of modules in it, (on the meta device) to this rank's part."""
    for leaf, split in splits.items():
        parameter = module.get_parameter(leaf)
        local = parameter.new_empty(split.local_shape())
        owner, _, name = leaf.rpartition(".")
        module.get_submodule(owner).register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))


def gather_split(part: Tensor, split: ParameterSplit, group: dist.ProcessGroup) -> Tensor:
    """Gather the parts of a split tensor; they may differ in size, so each is broadcast by itself. Collective."""
    whole = part.new_empty(split.shape)
    for index, rank in enumerate(dist.get_process_group_ranks(group)[:: split.copies]):
        is_own = index == split.index and split.copy == 0
        other = part.contiguous() if is_own else part.new_empty(split.local_shape(index))
        dist.broadcast(other, rank, group=group)
        for region in split.regions(index):
            whole[region.logical] = other[region.local]
    return whole


def gather_shards(value: DTensor) -> Tensor:
    """Gather the rows that a shard group holds together. Collective.

    `full_tensor` does it too, in ten times the time for small tensors.
    """
    group, local = value.device_mesh.get_group(-1), value.to_local()
    rows = -(-value.shape[0] // group.size())  # of every rank but the last ones, which are filled up
    part = local.new_zeros(rows, *local.shape[1:])
    part[: len(local)] = local
    whole = local.new_empty(rows * group.size(), *local.shape[1:])
    all_gather_single(whole, part, group=group)
    return whole[: value.shape[0]]


@dataclass(frozen=True)
class Region:
    """A box of a logical tensor that lives here, and the box of the local tensor that holds it."""

    logical: Slices
    local: Slices


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter of this rank.

    Attributes:
        name: logical name; for tied parameters the first in module order.
        aliases: the other names of a tied parameter.
        shape: global shape.
        parameter: the object the module holds (a DTensor once sharded).
        regions: what of the logical tensor lives here; together they make up `local`.
        replication: how many ranks hold the same elements.
        replica: number of this rank among those, from 0.
        split: how tensor or expert parallelism split it; None where the ranks of both hold it whole.
        split_group: the ranks that hold the parts of `split`.
        packing: form of a weight in 4 or 8 bits (`adapter.base`): shapes and regions are then those of its packed form.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    parameter: nn.Parameter
    regions: tuple[Region, ...]
    replication: int
    replica: int
    split: ParameterSplit | None = None
    split_group: dist.ProcessGroup | None = None
    packing: str = ""

    @property
    def local(self) -> Tensor:
        """This rank's elements as a plain tensor that shares the parameter's storage."""
        with torch.no_grad():  # which spares a DTensor's dispatch, a tenth of a millisecond for each of thousands
            return _plain(self.parameter).detach()

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's gradient elements, or None before the first backward."""
        gradient = self.parameter.grad
        return None if gradient is None else _plain(gradient)

    def regions_at(self, layout: Coordinates) -> tuple[Region, ...]:
        """Return what of the logical tensor the rank of this stage at other coordinates holds."""
        split = None if self.split is None else self.split.at(layout)
        return _regions(self.shape, layout, split, isinstance(self.parameter, DTensor))

    def store_part(self, part: Tensor) -> None:
        """Keep this rank's rows of `part`, which is what the shard group holds together."""
        rows = slice(None)
        if isinstance(self.parameter, DTensor) and part.dim():
            mesh = self.parameter.device_mesh
            rows = chunk(part.shape[0], mesh.size(-1), mesh.get_local_rank(-1))
        with torch.no_grad():
            self.local.copy_(part[rows] if part.dim() else part)

    def whole(self, gradient: bool = False, part: Tensor | None = None) -> Tensor:
        """Return the logical tensor, or its gradient, on every rank; a packed one unpacked to fp32.

        Collective over the groups that hold its parts.

        Args:
            gradient: that of the gradient.
            part: what the shard group holds together, where it is known; collective then over `split_group` alone.
        """
        value = self.parameter.grad if gradient else self.parameter.detach()
        if value is None and self.packing:
            return torch.zeros((*self.shape[:-2], self.shape[-2] * BLOCK))
        if value is None:
            return torch.zeros(self.shape, dtype=self.parameter.dtype)
        if part is None:
            part = gather_shards(value) if isinstance(value, DTensor) else value
        if self.split is not None:
            assert self.split_group is not None
            part = gather_split(part, self.split, self.split_group)
        return unpacked_weight(part, self.packing, torch.float32) if self.packing else part

    def store(self, whole: Tensor) -> None:
        """Keep this rank's slices of the logical tensor `whole`."""
        self.fill(lambda slices: whole[slices])

    def fill(self, read: Callable[[Slices], Tensor]) -> None:
        """Keep what `read` returns for each slice of the logical tensor that lives here; pack it where it is packed."""
        with torch.no_grad():
            for region in self.regions:
                local = self.local[region.local]
                if local.numel():
                    part = read(_elements(region.logical) if self.packing else region.logical)
                    local.copy_(packed_form(part, self.packing) if self.packing else part)


class TensorMap:
    """All entries of a model, in module order, ties once."""

    def __init__(self, entries: list[ParameterEntry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.names = {name: entry.name for entry in entries for name in (entry.name, *entry.aliases)}

    def __iter__(self) -> Iterator[ParameterEntry]:
        return iter(self.entries.values())

    def __getitem__(self, name: str) -> ParameterEntry:
        """Return the entry of a logical name or of an alias of it."""
        return self.entries[self.names[name]]

    def gradients(self, names: Sequence[str]) -> list[Tensor]:
        """Return this rank's gradient elements of those of `names` that have some."""
        gradients = (self[name].local_gradient for name in names)
        return [gradient for gradient in gradients if gradient is not None]

    @classmethod
    def of(
        cls,
        parts: Sequence[nn.Module],
        layout: Coordinates,
        splits: Mapping[str, ParameterSplit] | None = None,
        tied: Mapping[str, Sequence[int]] | None = None,
        packed: Mapping[str, str] | None = None,
    ) -> TensorMap:
        """Read the map off this rank's parts of a model, whose parameters are plain or sharded by FSDP2 on dim 0.

        Args:
            splits: parameters that tensor parallelism has split before, by name.
            tied: parameters that several pipeline ranks hold, by name, and which.
            packed: weights in 4 or 8 bits, by name, and their form.
        """
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for part in parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                own = names.setdefault(id(parameter), [])
                own += [name] if name not in own else []  # two parts of a rank may hold it, under the same names
                parameters[id(parameter)] = parameter
        splits, tied = splits or {}, tied or {}
        entries = [
            _entry(own, parameters[key], layout, splits.get(own[0]), tied.get(own[0], ())) for key, own in names.items()
        ]
        return cls([replace(entry, packing=(packed or {}).get(entry.name, "")) for entry in entries])


def _entry(
    names: list[str], parameter: nn.Parameter, layout: Coordinates, split: ParameterSplit | None, tied: Sequence[int]
) -> ParameterEntry:
    shape = tuple(parameter.shape) if split is None else split.shape
    if sharded := isinstance(parameter, DTensor):
        assert parameter.placements[-1] == Shard(0)
    name, *aliases = names
    replication, replica = _copies(layout, split, sharded)
    if tied:
        replication, replica = len(tied) * replication, len(tied) * replica + tied.index(layout.index(Axis.PIPELINE))
    return ParameterEntry(
        name,
        tuple(aliases),
        shape,
        parameter,
        _regions(shape, layout, split, sharded),
        replication,
        replica,
        split,
        _split_group(layout, split),
    )


def _regions(
    shape: tuple[int, ...], layout: Coordinates, split: ParameterSplit | None, sharded: bool
) -> tuple[Region, ...]:
    """Return what a rank holds of a parameter of this logical shape."""
    everything = tuple(_everything(shape))
    regions = (Region(everything, everything),) if split is None else split.regions()
    if not shape:
        return regions
    rows = shape[0] if split is None else split.local_shape()[0]
    own = chunk(rows, *_shards(layout, split)) if sharded else slice(0, rows)
    return tuple(_within(region, own) for region in regions)


def _shards(layout: Coordinates, split: ParameterSplit | None) -> tuple[int, int]:
    """Return how many ranks FSDP2 shards a parameter over, and which of them this is."""
    if split is not None and split.axis is Axis.EXPERT:
        return layout.experts.shards, layout.experts.shard
    return layout.size(*state_axes()), layout.index(*state_axes())


def _copies(layout: Coordinates, split: ParameterSplit | None, sharded: bool) -> tuple[int, int]:
    """Return how many ranks of a stage hold the same elements, and which of them this is."""
    axes = replica_axes() if sharded else data_axes()
    copies, copy = layout.size(*axes), layout.index(*axes)
    if split is None:
        return layout.size(*axes, Axis.TENSOR), layout.index(*axes, Axis.TENSOR)
    if split.axis is Axis.TENSOR:
        return copies * split.copies, copy * split.copies + split.copy
    view = layout.experts
    copies, copy = view.replicas, view.replica
    if not sharded:
        copies, copy = copies * view.shards, copy * view.shards + view.shard
    tensor = layout.size(Axis.TENSOR)
    return copies * tensor, copy * tensor + layout.index(Axis.TENSOR)


def _split_group(layout: Coordinates, split: ParameterSplit | None) -> dist.ProcessGroup | None:
    if split is None:
        return None
    return layout.experts.group() if split.axis is Axis.EXPERT else layout.group(Axis.TENSOR)


def _within(region: Region, rows: slice) -> Region:
    """Narrow `region` to `rows` of the local tensor's dim 0; it may become empty."""
    start = min(max(region.local[0].start, rows.start), rows.stop)
    stop = max(min(region.local[0].stop, rows.stop), start)
    shift = region.logical[0].start - region.local[0].start
    logical, local = slice(start + shift, stop + shift), slice(start - rows.start, stop - rows.start)
    return Region((logical, *region.logical[1:]), (local, *region.local[1:]))


def _elements(blocks: Slices) -> Slices:
    """Return the slices of a weight that slices [..., blocks, bytes] of its packed form stand for."""
    *others, along, _ = blocks
    return (*others, slice(along.start * BLOCK, along.stop * BLOCK))


def _everything(shape: Sequence[int]) -> list[slice]:
    return [slice(0, size) for size in shape]


def _plain(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
