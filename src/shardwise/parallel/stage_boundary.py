"""Boundary inputs and outputs of a pipeline stage: what travels between stages, and its shapes.

What travels is what a block hands to the next: hidden states [B, S, H], and their gradients. An encoder-decoder has
more: a bias of positions that the first block of a stack made for all of it, and the encoder's states, which go on to
every stage of the decoder. Then one flat tensor travels, so that torch's stages see a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.model.copies import deep_copy
from shardwise.model.facts import ModelFacts
from shardwise.model.probe import Shapes, shapes_handed_on
from shardwise.plan.plan import Plan

ENCODED = -1  # the encoder's states, among the numbers of a block's outputs


@dataclass
class StageBoundary:
    """Boundary input and output of one stage, in the forward that runs now.

    Attributes:
        stage: number of the stage, of `stages`.
        absent: modules of which the stage holds nothing.
        input: [B, S, H] from the stage before; flat where `shapes` are known.
        is_input_read: the forward that runs has taken it.
        output: what a traced stage has made for the one behind.
        prepare: told the inputs of the next forward, where they say how large is what travels: sets `shapes`.
        shapes: of boundary input and output, where these are not hidden states [B, S, H].
        room: elements of both as they travel, where microbatches of a step have several sizes: those of the largest.
        input_numbers, output_numbers: which outputs of the block before arrive, and which of the stage's last leave.
        input_shapes: shapes of what the flat input holds.
        dtype: of the flat tensors.
        block_outputs: outputs of blocks of this stage that leave, by number.
        changed_buffers: buffers into which the forward writes, and the stage that does.
    """

    stage: int
    stages: int
    absent: frozenset[str] = frozenset()
    input: Tensor | None = None
    is_input_read: bool = False
    output: Tensor | None = None
    prepare: Callable[[Mapping[str, Any]], None] | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    room: tuple[int, ...] | None = None
    input_numbers: tuple[int, ...] = (0,)
    output_numbers: tuple[int, ...] = (0,)
    input_shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32
    block_outputs: dict[int, Any] = field(default_factory=dict)
    changed_buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def inputs_by_number(self) -> dict[int, Any]:
        """Return what arrived, by the number of the block's output that it was."""
        self.is_input_read = True
        if not self.input_shapes or self.input is None:
            return {0: self.input}
        return dict(zip(self.input_numbers, split_flat(self.input, self.input_shapes), strict=True))

    def take_output(self) -> Tensor:
        """Return the boundary output of the forward that ran, and forget it and its input."""
        output = self.output
        if output is None and self.shapes is None:
            output = self.block_outputs[0]
        elif output is None:
            flat = [self.block_outputs[number].reshape(-1) for number in self.output_numbers]
            output = torch.cat(flat).to(self.dtype)
        if self.room is not None:
            output = nn.functional.pad(output, (0, self.room[1] - output.numel()))
        self.input, self.output, self.block_outputs = None, None, {}
        return output.contiguous()


def split_flat(flat: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Return views of a flat tensor with the given shapes, one behind the other; it may have room behind them."""
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + torch.Size(shape).numel())
    return [flat[start:end].view(shape) for shape, (start, end) in zip(shapes, pairwise(ends), strict=True)]


class BoundaryShapes:
    """Shapes of what crosses the stage boundaries of one model, by the shapes of its inputs; one for a rank's stages.

    They are read off a forward of the uncut model that computes nothing.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, plan: Plan) -> None:
        self.model = deep_copy(model, model.buffers())
        self.facts, self.plan = facts, plan
        self._known: dict[Any, Shapes] = {}

    def crossing(self, stage: int) -> tuple[int, ...]:
        """Return which outputs of the block before it arrive at a stage, the encoder's states among them."""
        if stage in (0, len(self.plan.stages)):
            return ()
        first = [block.name for block in self.facts.blocks].index(self.plan.stages[stage][0])
        handed_on, end = tuple(self.facts.stages.handed_on), self.facts.stages.encoder_blocks
        if not self.facts.stages.encoder or first < end:
            return handed_on
        return (ENCODED,) if first == end else (*handed_on, ENCODED)

    def __call__(self, stage: int, inputs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what arrives at `stage`, as `crossing` names it, in forwards of these inputs.

        Raises:
            ModelError: they cannot be told.
        """
        inputs = {name: inputs[name] for name in inputs if not name.endswith("mask")}  # transformers may look into them
        forms = ((value.shape, value.dtype) if isinstance(value, Tensor) else repr(value) for value in inputs.values())
        key = *inputs, *forms
        if key not in self._known:
            self._known[key] = shapes_handed_on(self.model, self.facts, inputs)
        makers = dict.fromkeys(self.facts.stages.handed_on, self.plan.stages[stage - 1][-1])
        makers[ENCODED] = self.facts.stages.encoder
        whole = {number: self._known[key][makers[number], max(number, 0)] for number in self.crossing(stage)}
        return tuple(
            shape if number in (0, ENCODED) else self._on_tensor_rank(shape) for number, shape in whole.items()
        )

    def _on_tensor_rank(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a tensor rank's part of what blocks hand on beside hidden states: a bias of its heads' scores."""
        degree = self.plan.degrees[Axis.TENSOR]
        if degree == 1 or self.facts.heads_whole:
            return shape
        if len(shape) != 4 or shape[1] != self.facts.attention_heads:
            raise ModelError(
                f"blocks of {self.facts.family} hand on a tensor {list(shape)}, of which it is not known what a tensor "
                "rank has; use tensor_parallel_degree 1, or pipeline_parallel_degree 1"
            )
        return (shape[0], shape[1] // degree, *shape[2:])


def set_shapes(boundary: StageBoundary, shapes: BoundaryShapes, inputs: Mapping[str, Any]) -> None:
    """Tell a boundary how large is what travels in forwards of these inputs."""
    boundary.input_shapes, leaving = shapes(boundary.stage, inputs), shapes(boundary.stage + 1, inputs)
    input_size, output_size = (
        sum(torch.Size(shape).numel() for shape in group) for group in (boundary.input_shapes, leaving)
    )
    boundary.shapes = (input_size,), (output_size,)
