"""Copies of one tensor on several ranks, compared with one another: every one is read and none is written.

Replicas hold the same elements, and so do tensor ranks of a norm's weight, key-value heads that several ranks share,
and stages of a tied embedding. Digests are gathered first; elements only of what differs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.training.setup import AssembledJob


@dataclass(frozen=True)
class CopyError:
    """The distance between the copies of a tensor.

    Attributes:
        error: largest difference of two copies, relative to the largest element of any.
        ranks: those whose copy differs from the lowest rank's; empty where all agree.
        totals: of copies that differ, (slices of the logical tensor, ranks that hold them, their sum in fp64).
    """

    error: float = 0.0
    ranks: tuple[int, ...] = ()
    totals: tuple[tuple[tuple[slice, ...], tuple[int, ...], Tensor], ...] = ()


def compare_copies(run: AssembledJob, gradients: bool = False) -> dict[str, CopyError]:
    """Return the errors, by logical name, of parameters or gradients that several ranks hold. Collective."""
    tensors = _local_tensors(run, gradients)
    digests = gathered({key: digest_of(tensor) for key, tensor in tensors.items()})
    holders: dict[LocalKey, list[int]] = {}
    for rank, own in enumerate(digests):
        for key in own:
            holders.setdefault(key, []).append(rank)
    errors: dict[str, CopyError] = {}
    for key, ranks in holders.items():
        if len(ranks) == 1:
            continue
        is_equal = len({digests[rank][key] for rank in ranks}) == 1
        error = CopyError() if is_equal else _measured(gathered(tensors.get(key)), key.boxes)
        before = errors.get(key.name, CopyError())
        worse = max(before, error, key=lambda copy_error: copy_error.error)
        errors[key.name] = replace(worse, totals=before.totals + error.totals)
    return errors


class LocalKey(NamedTuple):
    """A logical tensor, and the boxes of it that a rank holds as (first, end) along each dim."""

    name: str
    boxes: tuple[tuple[tuple[int, int], ...], ...]


def _local_tensors(run: AssembledJob, gradients: bool) -> dict[LocalKey, Tensor]:
    """Return this rank's elements; whole names as the unmodified model has them."""
    tensors = {}
    for name in run.facts.parameter_shapes:
        if name not in run.model.tensor_map.names:
            continue
        entry = run.model.tensor_map[name]
        value = entry.local_gradient if gradients else entry.local
        if not entry.local.numel():
            continue
        boxes = tuple(tuple((box.start, box.stop) for box in region.logical) for region in entry.regions)
        tensors[LocalKey(name, boxes)] = torch.zeros_like(entry.local) if value is None else value.detach()
    return tensors


def buffer_digests(run: AssembledJob) -> dict[tuple[str, int], bytes]:
    """Return a digest of each of this rank's buffers, by name and the rank's place among tensor ranks."""
    place = run.layout.index(Axis.TENSOR)
    buffers = (named for part in run.model.parts for named in part.module.named_buffers())
    return {(name, place): digest_of(buffer) for name, buffer in buffers if not buffer.is_meta}


def digest_of(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's bytes."""
    value = tensor.detach().cpu().contiguous()
    elements = (torch.view_as_real(value) if value.is_complex() else value).view(-1).view(torch.uint8)
    return hashlib.blake2b(elements.numpy().tobytes(), digest_size=16).digest()


def _measured(copies: list[Tensor | None], boxes: tuple[tuple[tuple[int, int], ...], ...]) -> CopyError:
    """Return the error of the copies that ranks have brought, by rank."""
    holders = {rank: copy.double() for rank, copy in enumerate(copies) if copy is not None}
    first = holders[min(holders)]
    high, low = torch.stack([*holders.values()]).amax(0), torch.stack([*holders.values()]).amin(0)
    largest = torch.maximum(high.abs(), low.abs()).max()
    error = 0.0 if largest == 0 else float((high - low).max() / largest)
    ranks = tuple(rank for rank, copy in holders.items() if not torch.equal(copy, first))
    box = tuple(slice(*bounds) for bounds in boxes[0])
    totals = ((box, tuple(holders), torch.stack([*holders.values()]).sum(0)),) if len(boxes) == 1 else ()
    return CopyError(math.inf if math.isnan(error) else error, ranks, totals)  # a NaN would lose every comparison


def gathered(own: Any) -> list[Any]:
    """Return every rank's object, by rank; tensors come as copies on the CPU. Collective."""
    value = own.cpu() if isinstance(own, Tensor) else own
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def gathered_on_first(own: Any) -> list[Any]:
    """Return every rank's object, by rank, on rank 0; nothing on the others. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(own, everyone or None)
    return everyone
