"""The autograd collectives of tensor parallelism (Megatron-LM, arXiv 1909.08053, figure 3: f and g).

A region of split modules is entered with whole activations and left with a sum of partial ones; what is the identity in
one direction is an all-reduce in the other. With sequence parallelism (arXiv 2205.05198, section 4.2.2, g and g-bar) a
rank holds a part of the sequence between regions: then one direction gathers the parts and the other sums and keeps
one, which moves as many bytes as the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives.names import collective_name

ACTIVATIONS = "activations, or their gradients,"
TOGETHER = 2**26  # bytes that are copied side by side for one call: all gradients of a rank would be there twice
Move = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class SequenceRows:
    """The `length` positions of `batch` samples over the ranks of `group`: in runs that differ by one at most.

    Values are [B, S, ...], or [B*S, ...] where a model has flattened them.
    """

    group: dist.ProcessGroup
    index: int  # this rank's number in the group
    batch: int
    length: int

    def bounds(self, index: int) -> tuple[int, int]:
        """First position of a rank, and the one behind its last."""
        degree = self.group.size()
        return index * self.length // degree, (index + 1) * self.length // degree

    @property
    def sizes(self) -> list[int]:
        """Positions of each rank."""
        return [end - start for start, end in map(self.bounds, range(self.group.size()))]

    def by_sample(self, values: Tensor, positions: int) -> Tensor:
        """`values` as [B, positions, H]."""
        if values.numel() != self.batch * positions * values.shape[-1]:
            raise RuntimeError(f"activations {list(values.shape)} are not {self.batch} x {positions} positions")
        return values.reshape(self.batch, positions, values.shape[-1])


class _Pair(torch.autograd.Function):
    """Run `there` in forward and `back` in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Move, back: Move, where: Any) -> Tensor:
        ctx.back, ctx.where = back, where
        return there(values, where)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0], ctx.where), None, None, None


def _apply(values: Tensor, there: Move, back: Move, where: Any) -> Tensor:
    moved: Tensor = _Pair.apply(values, there, back, where)
    return moved


class RegatheredActivations:
    """Whole activations, gathered again in backward for the linears that read them; kept is this rank's part alone.

    The paper's way to keep nothing whole (section 4.2.2): one more all-gather in backward. Readers run their backward
    one after the other, so that one gathering serves all. The part itself is among autograd's saved tensors only, where
    checkpointing and offload find it.
    """

    def __init__(self, rows: SequenceRows) -> None:
        self.rows = rows
        self.readers = 0
        self._whole: Tensor | None = None
        self._coming: Callable[[], Tensor] | None = None

    def ask(self, part: Tensor) -> None:
        """Begin to gather the whole of `part`, beside what is computed until it is needed."""
        if self._whole is None and self._coming is None:
            self._coming = gathering_rows(part, self.rows, beside=True)

    def again(self) -> Tensor:
        """Return the whole of what was asked for, to one of the readers."""
        if self._coming is not None:
            self._whole, self._coming = self._coming(), None
        assert self._whole is not None
        whole = self._whole
        self.readers -= 1
        self._whole = whole if self.readers else None
        return whole


def copy_to_region(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `values`, equal on all ranks of `group`; their gradient is the sum of the ranks' gradients.

    Megatron's copy_to_tensor_model_parallel_region.
    """
    return _apply(values, _same, summed, group)


def reduce_from_region(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' `values`; the gradient of each is that of the sum.

    Megatron's reduce_from_tensor_model_parallel_region.
    """
    return _apply(values, summed, _same, group)


@dataclass(frozen=True)
class FeatureParts:
    """The features of activations over the ranks of `group`, the last dim of which is in parts of these `sizes`."""

    group: dist.ProcessGroup
    index: int  # this rank's number in the group
    sizes: tuple[int, ...]


def gather_features(values: Tensor, parts: FeatureParts) -> Tensor:
    """Return all features, of which each rank brings its own, on ranks that then do the same with them.

    Megatron's gather_from_tensor_model_parallel_region: the gradients that come back are equal, each keeps its own.
    """
    return _apply(values, _gathered_features, _own_features, parts)


def _gathered_features(values: Tensor, parts: FeatureParts) -> Tensor:
    most = max(parts.sizes)
    own = values if values.shape[-1] == most else F.pad(values, (0, most - values.shape[-1]))
    everyone = own.new_empty(len(parts.sizes), *own.shape)
    with collective_name(ACTIVATIONS, parts.group, "all_gather"):
        all_gather_single(everyone.view(-1, most), own.reshape(-1, most).contiguous(), group=parts.group)
    return torch.cat([part[..., :size] for part, size in zip(everyone, parts.sizes, strict=True)], -1)


def _own_features(values: Tensor, parts: FeatureParts) -> Tensor:
    before = sum(parts.sizes[: parts.index])
    return values[..., before : before + parts.sizes[parts.index]].contiguous()


def gather_to_region(values: Tensor, rows: SequenceRows) -> Tensor:
    """Return all positions, of which each rank brings its own; their gradients are summed, and each keeps its own.

    Megatron's gather_from_sequence_parallel_region.
    """
    return _apply(values, gather_rows, _reduce_scatter_rows, rows)


def reduce_scatter_from_region(values: Tensor, rows: SequenceRows) -> Tensor:
    """Return this rank's positions of the sum of the ranks' `values`.

    Megatron's reduce_scatter_to_sequence_parallel_region.
    """
    return _apply(values, _reduce_scatter_rows, gather_rows, rows)


def scatter_sequence(values: Tensor, rows: SequenceRows) -> Tensor:
    """Return this rank's positions of `values`, which are equal on all ranks."""
    return _apply(values, _local_rows, gather_rows, rows)


def gather_whole_sequence(values: Tensor, rows: SequenceRows) -> Tensor:
    """Return all positions, on ranks that then do the same with them: the gradients that come back are equal."""
    return _apply(values, gather_rows, _local_rows, rows)


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a new tensor: the sum over `group`. Without autograd."""
    total = values.clone(memory_format=torch.contiguous_format)
    with collective_name(ACTIVATIONS, group, "all_reduce"):
        dist.all_reduce(total, group=group)
    return total


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, unit: str) -> None:
    """Sum each of `tensors` over `group`, in place, on `device`; those of one dtype together, `TOGETHER` bytes a call.

    `unit` says what they are, for errors.
    """
    _reduce_together(tensors, group, device, unit, dist.ReduceOp.SUM)


def largest_together(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, unit: str) -> None:
    """Make each element of `tensors` the largest of its kind in `group`; as `sum_together` otherwise."""
    _reduce_together(tensors, group, device, unit, dist.ReduceOp.MAX)


def _reduce_together(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, unit: str, reduction: Any
) -> None:
    name = collective_name(unit, group, "all_reduce")
    for alike in _parts(tensors):
        if len(alike) == 1 and alike[0].is_contiguous() and alike[0].device.type == device.type:
            with name:
                dist.all_reduce(alike[0], reduction, group=group)
            continue
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in alike])
        with name:
            dist.all_reduce(flat, reduction, group=group)
        for tensor, total in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(total.view(tensor.shape))
        del flat, total  # before the next


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype, as many as `TOGETHER` bytes hold, or one that is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        part, size = list[Tensor](), 0
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if part and size + tensor.nbytes > TOGETHER:
                yield part
                part, size = [], 0
            part.append(tensor)
            size += tensor.nbytes
        yield part


def gather_rows(values: Tensor, rows: SequenceRows) -> Tensor:
    """Gather [B, S of this rank, H] of each rank to [B, S, H]. Without autograd."""
    return gathering_rows(values, rows)()


def gathering_rows(values: Tensor, rows: SequenceRows, beside: bool = False) -> Callable[[], Tensor]:
    """Begin to gather as `gather_rows`, and return what gives the whole; `beside` what is computed meanwhile."""
    most = max(rows.sizes)
    own = rows.by_sample(values, rows.sizes[rows.index])
    own = own if own.shape[1] == most else F.pad(own, (0, 0, 0, most - own.shape[1]))
    everyone = own.new_empty(len(rows.sizes), *own.shape)
    name = collective_name(ACTIVATIONS, rows.group, "all_gather")
    with name:
        work = all_gather_single(everyone.flatten(0, 1), own.contiguous(), group=rows.group, async_op=beside)

    def whole() -> Tensor:
        if work is not None:
            with name:
                work.wait()
        return _side_by_side(everyone, rows, is_flat=values.dim() == 2)

    return whole


def _side_by_side(everyone: Tensor, rows: SequenceRows, is_flat: bool) -> Tensor:
    """The positions of all ranks in order; of one sample in even runs no copy."""
    if min(rows.sizes) == max(rows.sizes):
        whole = everyone.transpose(0, 1).reshape(rows.batch, rows.length, -1)
    else:
        whole = torch.cat([part[:, :size] for part, size in zip(everyone, rows.sizes, strict=True)], 1)
    return whole.flatten(0, 1) if is_flat else whole


def _reduce_scatter_rows(values: Tensor, rows: SequenceRows) -> Tensor:
    """[B, S, H] of each rank -> [B, S of this rank, H] of their sum."""
    sizes = rows.sizes
    stacked = _by_rank(rows.by_sample(values, rows.length), sizes)
    total = torch.empty_like(stacked[0])
    with collective_name(ACTIVATIONS, rows.group, "reduce_scatter"):
        reduce_scatter_single(total, stacked.flatten(0, 1), group=rows.group)
    # Models add to it in place, which autograd allows where it is no view.
    own = total if total.shape[1] == sizes[rows.index] else total[:, : sizes[rows.index]].clone()
    return own.flatten(0, 1) if values.dim() == 2 else own


def _by_rank(values: Tensor, sizes: list[int]) -> Tensor:
    """[B, S, H] -> the positions of each rank, [ranks, B, most of a rank, H]; of one sample in even runs no copy."""
    most = max(sizes)
    if min(sizes) == most:
        return values.unflatten(1, (len(sizes), most)).transpose(0, 1).contiguous()
    return torch.stack([F.pad(part, (0, 0, 0, most - part.shape[1])) for part in values.split(sizes, 1)])


def _local_rows(values: Tensor, rows: SequenceRows) -> Tensor:
    start, end = rows.bounds(rows.index)
    return values[:, start:end].clone(memory_format=torch.contiguous_format)  # a view would keep the whole alive


def _same(values: Tensor, _: Any) -> Tensor:
    return values.view_as(values)
