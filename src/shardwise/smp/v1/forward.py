"""The forward of a distributed model on one microbatch: its arguments by name, and this rank's part of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.job.axes import Axis
from shardwise.parallel.model import ModelPart
from shardwise.parallel.own_collectives import own_collectives_refused
from shardwise.parallel.sharded_access import class_writes_refused
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.v1.building import microbatch_size
from shardwise.smp.v1.rows import merge_rows, narrow_rows
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.weights import ModelWeights
from shardwise.smp.v1.wrappers import CastingWrapper


class MicrobatchForward:
    """Runs parts of the model.

    Args:
        session: the session of this process.
        weights: the model's weights.
        wrapper: a module of the script's around its model, if there is one.
    """

    def __init__(self, session: SmpSessionV1, weights: ModelWeights, wrapper: CastingWrapper | None) -> None:
        self._session, self._weights, self._wrapper = session, weights, wrapper
        self._parameters = inspect.signature(weights.module.forward)

    def run(
        self,
        part: ModelPart,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        index: int,
        count: int,
        arrived: Tensor | None = None,
    ) -> Any:
        """Run microbatch `index` of `count` through `part`; return hidden states where it is not the last one."""
        session, parallel = self._session, self._weights.require_parallel()
        own_rows = session.cfg.prescaled_batch or session.layout.size(Axis.TENSOR) == 1
        inputs = self.bind(args, kwargs)
        merged = inputs if own_rows else merge_rows(inputs, session.layout)
        rows = microbatch_size(merged).rows
        first = (parallel.layout.data_rank * count + index) * rows
        microbatch = Batch({}, None, torch.arange(first, first + rows, device=session.device))
        with (
            parallel.scope(microbatch, session.step_count),
            self._collectives_of_one_stage(),
            class_writes_refused(parallel.facts.definition, parallel.sharded_classes),
        ):
            output = part.forward(merged, arrived)
        if not (torch.is_grad_enabled() or self._weights.gathered):
            parallel.reshard()  # as a backward does: scripts look at gradients, and change what they look at
        if not part.is_last:
            return part.boundary_output()
        output = output if own_rows else narrow_rows(output, microbatch_size(inputs).rows, session.layout)
        return output if self._wrapper is None else self._wrapper.output(args, kwargs, output)

    def _collectives_of_one_stage(self) -> AbstractContextManager[None]:
        """Refuse collectives of the script's own module that ranks of other stages would have to join."""
        layout = self._session.layout
        if layout.size(Axis.PIPELINE) == 1:
            return nullcontext()
        return own_collectives_refused(layout.ranks(*(axis for axis in layout.axes if axis is not Axis.PIPELINE)))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the module's forward by name. Raises StepUsageError for some that have none."""
        if self._wrapper is not None:
            args, kwargs = self._wrapper.arguments(args, kwargs)
        bound = self._parameters.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            parameter = self._parameters.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                raise StepUsageError("the model's forward takes *args; give it names, or pass them by keyword")
            else:
                named[name] = value
        return named
