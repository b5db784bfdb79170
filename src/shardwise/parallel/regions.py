"""The boundary of a tensor-parallel region: how activations enter and leave split modules.

Between regions every tensor rank holds the same [B, S, H] (Megatron-LM, arXiv 1909.08053, section 3), or with sequence
parallelism its own positions [B, S/t, H] (arXiv 2205.05198, section 4.2.2). A region then gathers its input and
reduce-scatters its output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.tensor import (
    RegatheredActivations,
    SequenceRows,
    copy_to_region,
    gather_rows,
    gather_to_region,
    gather_whole_sequence,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_sequence,
)
from shardwise.kernels.dropout import active_scope
from shardwise.kernels.linear import linear, linear_of_parts


class RegionBoundary:
    """The boundary of regions where every tensor rank holds all positions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def region_input(self, values: Tensor) -> Tensor:
        """Let activations [B, S, H] enter a region; backward sums their gradients over the ranks."""
        return copy_to_region(values, self.group)

    def region_output(self, values: Tensor) -> Tensor:
        """Sum the ranks' parts of a region's output [B, S, H]."""
        return reduce_from_region(values, self.group)

    def routes_input(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that each position goes to, and their weights: both [positions, experts of each]."""
        return index, copy_to_region(weights, self.group)

    def linear(self, module: Any, values: Tensor, transposed: bool) -> Tensor:
        """Return the product of a column module in the region."""
        return linear(module, values, transposed)


class SequenceRegionBoundary(RegionBoundary):
    """The boundary of regions where each rank holds a run of positions, as the forward that runs has scattered them.

    A compiled block is compiled up to the boundary and from there on: what is remembered here for backward would be
    fixed when the graph is made. Recomputation in backward finds the same runs, since all microbatches of a step have
    one shape.
    """

    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        super().__init__(group)
        self.index = index
        self.rows: SequenceRows | None = None
        # The region's input: whole, this rank's part, and how backward gathers it again. The whole is not kept alive: a
        # recomputed forward stops inside the region.
        self.entered: tuple[weakref.ref[Tensor], Tensor, RegatheredActivations] | None = None

    @torch.compiler.disable
    def region_input(self, values: Tensor) -> Tensor:
        assert self.rows is not None
        whole = gather_to_region(values, self.rows)
        self.entered = weakref.ref(whole, self._leave), values, RegatheredActivations(self.rows)
        return whole

    def _leave(self, whole: weakref.ref[Tensor]) -> None:
        """Let go of the part, and of the graph that made it, with the whole."""
        if self.entered is not None and self.entered[0] is whole:
            self.entered = None

    @torch.compiler.disable
    def routes_input(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        assert self.rows is not None
        return gather_rows(index, self.rows), gather_to_region(weights, self.rows)

    @torch.compiler.disable
    def linear(self, module: Any, values: Tensor, transposed: bool) -> Tensor:
        """Return a column module's product; of what has entered the region as it is, backward keeps a part."""
        if self.entered is None or self.entered[0]() is not values:
            return linear(module, values, transposed)
        _, part, source = self.entered
        return linear_of_parts(module, values, part, transposed, source)

    @torch.compiler.disable
    def region_output(self, values: Tensor) -> Tensor:
        assert self.rows is not None
        self.entered = None
        return reduce_scatter_from_region(values, self.rows)

    def scatter_sequence(self, values: Tensor) -> Tensor:
        """Keep this rank's positions of hidden states: [B, S, H] -> [B, S of this rank, H]."""
        self.rows = SequenceRows(self.group, self.index, values.shape[0], values.shape[1])
        scope = active_scope()
        if scope is not None:
            scope.positions = self.rows.bounds(self.index)
        return scatter_sequence(values, self.rows)

    def gather_sequence(self, values: Tensor) -> Tensor:
        """Gather hidden states over the ranks: [B, S of this rank, H] -> [B, S, H]."""
        assert self.rows is not None
        scope = active_scope()
        if scope is not None:
            scope.positions = None
        return gather_whole_sequence(values, self.rows)


def map_hidden_states(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Return (args, kwargs) with `change` made to the hidden states: the first argument, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
