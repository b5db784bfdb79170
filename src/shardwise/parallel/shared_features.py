"""Features that serve all heads of a group, of which each of the ranks that share it makes a part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.tensor import SequenceRows, gather_to_region


def with_shared_features(part: Tensor, features: int, group: dist.ProcessGroup, behind: int = 0) -> Tensor:
    """Return this rank's `part` [..., features] with both of what its group shares whole: key and value of queries.

    The gradients of these, one from every rank's own heads, are summed.

    Args:
        features: of each of the two when it is whole.
        group: the ranks that share them.
        behind: further features of this rank alone behind the two.
    """
    width, end = features // group.size(), part.shape[-1] - behind
    shared = part[..., end - 2 * width : end]
    heads = SequenceRows(group, dist.get_rank(group), 2 * shared[..., 0].numel(), features)
    whole = gather_to_region(shared.reshape(-1, width, 1), heads).view(*part.shape[:-1], 2 * features)
    return torch.cat([part[..., : end - 2 * width], whole, part[..., end:]], -1)
