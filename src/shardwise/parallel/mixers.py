"""Mixers of states by heads or channels, as tensor ranks run them (model/mixers.py).

A mixer's own forward runs with the sizes of a rank's part. What writes and reads the states of a group of heads is
gathered where ranks share the group, behind the fused projection, and so are the weights of the convolution that it
goes through; a norm over the features of the group takes the mean of the ranks' means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.collectives.tensor import copy_to_region, reduce_from_region
from shardwise.job.axes import Axis
from shardwise.model.mixer_parts import FeatureMeans, part_sizes, running_in_part
from shardwise.model.tensor_split import TensorSplit
from shardwise.parallel.layout import Layout
from shardwise.parallel.regions import RegionBoundary, map_hidden_states
from shardwise.parallel.shared_features import with_shared_features


def enter_mixer(mixer: Any, split: TensorSplit, fused: TensorSplit, layout: Layout, boundary: RegionBoundary) -> None:
    """Let activations enter a mixer by its boundary, and the mixer run on this rank's part.

    A mixer is not compiled: a graph would hold the sizes of the whole.

    Args:
        mixer: whose parameters are a part already.
        split, fused: its own, and that of its fused projection.
    """
    degree, index = layout.size(Axis.TENSOR), layout.index(Axis.TENSOR)
    sharing = layout.tensor_neighbours(degree // split.groups) if split.shares_groups(degree) else None
    if sharing is not None and hasattr(mixer, "norm"):
        mixer.norm.forward = _with_means_of_all(mixer.norm.forward, sharing)
    sizes, inner = part_sizes(mixer, split, degree), mixer.forward
    width = sum(fused.sizes)
    slices = fused.own_slices(width, degree, index)

    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_hidden_states(boundary.region_input, args, kwargs)
        convolution = {} if sharing is None else _with_whole_groups(mixer.conv1d, split, sharing)
        with running_in_part(mixer, sizes, convolution, width, slices):
            return inner(*args, **kwargs)

    mixer.forward = forward


def _with_whole_groups(convolution: nn.Module, split: TensorSplit, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the parameters [channels, ...] of a convolution with all channels of what its group shares."""
    return {
        leaf: with_shared_features(parameter.movedim(0, -1), split.shared, group).movedim(-1, 0)
        for leaf, parameter in convolution.named_parameters(recurse=False)
    }


def _with_means_of_all(forward: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Return a norm whose means are of the features of all ranks of `group`, each of which has as many."""

    def mean_of_all(mean: Tensor) -> Tensor:
        return copy_to_region(reduce_from_region(mean / group.size(), group), group)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with FeatureMeans(mean_of_all):
            return forward(*args, **kwargs)

    return run
