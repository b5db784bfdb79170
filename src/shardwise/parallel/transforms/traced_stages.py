"""A stage that is a piece of the model's traced forward, for models that are no chain of blocks.

The model stays, less the parameters of other stages; its forward is the traced piece, which reads parameters where the
model holds them, so that names, sharding, initialization and checkpoints are those of every other model. What travels
between stages is one flat tensor of everything that crosses the cut, skip connections over several stages among it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.kernels.dropout import active_scope, dropout
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.model.trace import Trace, Value, reason, trace
from shardwise.model.traced_cut import elements
from shardwise.parallel.transforms.stages import Passage
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import holders


class Tracer:
    """Traces of one model, one for each shape of its inputs; shared by the stages of a rank."""

    def __init__(self, model: nn.Module, facts: ModelFacts, plan: Plan, device: torch.device) -> None:
        self.model = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})
        self.facts, self.plan, self.device = facts, plan, device
        self.known: dict[Any, Trace] = {}

    def __call__(self, inputs: Mapping[str, Any], training: bool) -> Trace:
        """The trace for these inputs, in pieces that are the plan's stages.

        Raises:
            ModelError: the forward cannot be traced, or cut, with them.
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        facts = ((value.shape, value.dtype) if isinstance(value, Tensor) else repr(value) for value in given.values())
        key = training, *zip(given, facts)
        if key not in self.known:
            self.model.train(training)
            dtypes = torch_dtype(self.plan.dtypes.compute), None
            starts, blocks = [names[0] for names in self.plan.stages[1:]], self.facts.stages.order
            drop = numbered_dropout if training else None
            try:
                found = trace(self.model, starts, given, self.device, dtypes, blocks, drop)
                [elements(found, piece) for piece in range(1, len(found.pieces))]
            except Exception as error:  # torch raises anything where it cannot trace
                raise ModelError(
                    f"the forward of {self.facts.family} cannot be cut into stages in {self.plan.dtypes.compute}: "
                    f"{reason(error)}; use pipeline_parallel_degree 1"
                ) from error
            self.known[key] = found
        return self.known[key]


def cut_traced(model: nn.Module, tracer: Tracer, stage: int) -> Passage:
    """Leave of `model` (on the meta device) the parameters of `stage`; its forward is the traced piece."""
    plan, facts = tracer.plan, tracer.facts
    held = {name for name, stages in holders(plan, facts).items() if stage in stages}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(parameters[name]) for name in held}
    absent = {block.name for block in facts.blocks if block.name not in plan.stages[stage]}
    for name, module in model.named_modules():
        own = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
        gone = [leaf for leaf in own if id(module._parameters[leaf]) not in kept]
        for leaf in gone:
            module._parameters[leaf] = None
        if gone and len(gone) == len(own):
            absent.add(name)
    passage = Passage(stage, len(plan.stages), frozenset(absent))
    piece = TracedPiece(model, tracer, passage)
    model.forward = piece  # type: ignore[assignment]
    passage.prepare = piece.prepare
    return passage


class TracedPiece:
    """The forward of one stage."""

    def __init__(self, model: nn.Module, tracer: Tracer, passage: Passage) -> None:
        self.model, self.tracer, self.passage = model, tracer, passage

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Trace for such inputs, and say what arrives and leaves, and which buffers change."""
        found, stage = self.tracer(inputs, self.model.training), self.passage.stage
        ends = [0 if cut in (0, len(found.pieces)) else elements(found, cut) for cut in (stage, stage + 1)]
        self.passage.shapes, self.passage.changed = ((ends[0],), (ends[1],)), found.changed

    def __call__(self, **inputs: Any) -> Any:
        """The model's output on the last stage, else [n] what leaves."""
        found, stage = self.tracer(inputs, self.model.training), self.passage.stage
        values: dict[Value, Tensor] = {(-1, number): inputs[name] for number, name in enumerate(found.inputs)}
        for number, part in enumerate(found.remade(stage)):
            self._run(found, number, part, values)
        if stage:
            assert self.passage.arrived is not None
            values |= _unpack(self.passage.arrived, found, found.crossing(stage))
        self._run(found, stage, found.pieces[stage], values)
        if self.passage.is_last:
            return found.rebuild([values[value] for value in found.outputs])
        leaving = torch.cat([values[value].reshape(-1) for value in found.crossing(stage + 1)])
        self.passage.leaving = leaving.to(found.dtype)  # under a script's autocast they may be of another
        return self.passage.leaving

    def _run(self, found: Trace, number: int, piece: Any, values: dict[Value, Tensor]) -> None:
        state = [self._state(found, name) for name in piece.state]
        given = piece.run(*state, *(values[value] for value in piece.takes))
        values |= {(number, output): tensor for output, tensor in enumerate(given) if tensor is not None}

    def _state(self, found: Trace, name: str) -> Tensor:
        if name in found.constants:
            return found.constants[name].to(self.tracer.device)
        owner, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.model.get_submodule(owner), leaf)
        return tensor


def _unpack(flat: Tensor, found: Trace, crossing: list[Value]) -> dict[Value, Tensor]:
    shapes = [found.shapes[value][0] for value in crossing]
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + shape.numel())
    runs = pairwise(ends)
    return {value: flat[start:end].view(shape) for value, shape, (start, end) in zip(crossing, shapes, runs)}


def numbered_dropout(values: Tensor, probability: float, name: str, use: int) -> Tensor:
    """Dropout number `use` of `name` in a forward: other stages may have made those before."""
    scope = active_scope()
    if probability == 0 or values.numel() == 0:
        return values
    if scope is not None:
        scope.calls[name] = use - 1
    return dropout(values, probability, name)
