"""Sequence parallelism with tensor parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Between the regions of tensor parallelism every rank would do the same work on the same [B, S, H]: norms, dropout,
residuals. Here each does it on its own run of positions, [B, S/t, H]. Hidden states are scattered at the input of the
first block of this rank and gathered at the output of its last; what happens at regions in between is in
parallel/regions.py. What surrounds the blocks, and what they are given besides hidden states, stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.regions import SequenceRegionBoundary, map_hidden_states
from shardwise.plan.plan import Plan


class SequenceParallelism(Transform):
    """Hidden states between regions in parts; after checkpointing, so that what a checkpoint keeps is a part."""

    name = "sequence"
    axis = Axis.TENSOR

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.sequence_parallel

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            assert isinstance(stage.region_boundary, SequenceRegionBoundary)
            scatter_between_blocks(stage.blocks(inputs.facts), stage.region_boundary)


def scatter_between_blocks(blocks: Sequence[nn.Module], boundary: SequenceRegionBoundary) -> None:
    """Scatter the hidden states before the first of `blocks` and gather them behind the last."""
    blocks[0].forward = _with_scattered_input(blocks[0].forward, boundary)  # type: ignore[method-assign]
    blocks[-1].forward = _with_gathered_output(blocks[-1].forward, boundary)  # type: ignore[method-assign]


def _with_scattered_input(forward: Callable[..., Any], boundary: SequenceRegionBoundary) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_hidden_states(boundary.scatter_sequence, args, kwargs)
        return forward(*args, **kwargs)

    return run


def _with_gathered_output(forward: Callable[..., Any], boundary: SequenceRegionBoundary) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (
            (boundary.gather_sequence(output[0]), *output[1:])
            if isinstance(output, tuple)
            else boundary.gather_sequence(output)
        )

    return run
