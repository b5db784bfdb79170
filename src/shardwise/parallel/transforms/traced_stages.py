"""Pipeline stages that are pieces of the model's traced forward, for models that are no chain of blocks.

The model stays, less the parameters of other stages; its forward is the traced piece, which reads parameters where the
model holds them, so that names, sharding, initialization and checkpoints are those of every other model. What travels
between stages is one flat tensor of everything that crosses the cut, skip connections over several stages among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.tracing import dispatch_modes_off
from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.kernels.dropout import active_scope, dropout
from shardwise.kernels.precision import torch_dtype
from shardwise.model.call_names import called_module
from shardwise.model.copies import deep_copy
from shardwise.model.facts import ModelFacts
from shardwise.model.forward_failures import failure_reason
from shardwise.model.trace import ForwardTrace, Value, trace
from shardwise.model.traced_cut import boundary_elements
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.stage_boundary import StageBoundary, split_flat
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import holders


class TracedStages(Transform):
    """Stages of operators, where the facts say that blocks alone cannot be cut apart."""

    name = "traced_stages"
    axis = Axis.PIPELINE

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return facts.stages.traced

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        tracer = StageTracer(build.stages[0].model, inputs.facts, inputs.plan, inputs.device)
        for stage in build.stages:
            assert stage.number is not None
            stage.boundary = cut_traced(stage.model, tracer, stage.number)
        build.share_parameters()


class StageTracer:
    """Traces of one model, one for each shape of its inputs; shared by the stages of a rank."""

    def __init__(self, model: nn.Module, facts: ModelFacts, plan: Plan, device: torch.device) -> None:
        self.model = deep_copy(model, model.buffers())
        self.facts, self.plan, self.device = facts, plan, device
        self._known: dict[Any, ForwardTrace] = {}

    def __call__(self, inputs: Mapping[str, Any], training: bool) -> ForwardTrace:
        """Return the trace for these inputs, in pieces that are the plan's stages.

        Raises:
            ModelError: the forward cannot be traced, or cut, with them.
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        forms = ((value.shape, value.dtype) if isinstance(value, Tensor) else repr(value) for value in given.values())
        key = training, *zip(given, forms)
        if key not in self._known:
            self.model.train(training)
            dtypes = torch_dtype(self.plan.dtypes.compute), None
            starts, blocks = [names[0] for names in self.plan.stages[1:]], self.facts.stages.order
            drop = numbered_dropout if training else None
            try:
                with dispatch_modes_off():  # of checkpoints, of a rank that is traced itself
                    traced = trace(self.model, starts, given, self.device, dtypes, blocks, drop)
                for piece in range(1, len(traced.pieces)):
                    boundary_elements(traced, piece)
            except Exception as error:  # torch raises anything where it cannot trace
                raise ModelError(
                    f"the forward of {self.facts.family} cannot be cut into stages in {self.plan.dtypes.compute}: "
                    f"{failure_reason(error)}; use pipeline_parallel_degree 1"
                ) from error
            self._known[key] = traced
        return self._known[key]


def cut_traced(model: nn.Module, tracer: StageTracer, stage: int) -> StageBoundary:
    """Leave of `model` (on the meta device) the parameters of `stage`; its forward is the traced piece."""
    plan, facts = tracer.plan, tracer.facts
    names = {name for name, stages in holders(plan, facts).items() if stage in stages}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(parameters[name]) for name in names}
    owners = {f"{name.rpartition('.')[0]}." for name, parameter in parameters.items() if id(parameter) in kept}
    others = {block.name for block in facts.blocks} - set(map(called_module, plan.stages[stage]))
    absent = {name for name in others if not any(owner.startswith(f"{name}.") for owner in owners)}
    for name, module in model.named_modules():
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        removed = [leaf for leaf, parameter in own if id(parameter) not in kept]
        for leaf in removed:
            module.register_parameter(leaf, None)
        if removed and len(removed) == len(own):
            absent.add(name)
    boundary = StageBoundary(stage, len(plan.stages), frozenset(absent))
    forward = TracedForward(model, tracer, boundary)
    model.forward = forward  # type: ignore[assignment]
    boundary.prepare = forward.prepare
    return boundary


class TracedForward:
    """The forward of one stage."""

    def __init__(self, model: nn.Module, tracer: StageTracer, boundary: StageBoundary) -> None:
        self.model, self.tracer, self.boundary = model, tracer, boundary

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Trace for such inputs, and tell the boundary what arrives and leaves, and which buffers change."""
        traced, stage = self.tracer(inputs, self.model.training), self.boundary.stage
        sizes = [0 if cut in (0, len(traced.pieces)) else boundary_elements(traced, cut) for cut in (stage, stage + 1)]
        self.boundary.shapes, self.boundary.changed_buffers = ((sizes[0],), (sizes[1],)), traced.changed

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's output on the last stage, else [n] the boundary output."""
        traced, stage = self.tracer(inputs, self.model.training), self.boundary.stage
        values: dict[Value, Tensor] = {(-1, number): inputs[name] for number, name in enumerate(traced.inputs)}
        for number, part in enumerate(traced.remade(stage)):
            self._run(traced, number, part, values)
        if stage:
            assert self.boundary.input is not None
            values |= _unpack(self.boundary.input, traced, traced.crossing(stage))
        self._run(traced, stage, traced.pieces[stage], values)
        if self.boundary.is_last:
            return traced.rebuild([values[value] for value in traced.outputs])
        leaving = torch.cat([values[value].reshape(-1) for value in traced.crossing(stage + 1)])
        self.boundary.output = leaving.to(traced.dtype)  # under a script's autocast they may be of another
        return self.boundary.output

    def _run(self, traced: ForwardTrace, number: int, piece: Any, values: dict[Value, Tensor]) -> None:
        state = [self._state(traced, name) for name in piece.state]
        outputs = piece.run(*state, *(values[value] for value in piece.takes))
        values |= {(number, output): tensor for output, tensor in enumerate(outputs) if tensor is not None}

    def _state(self, traced: ForwardTrace, name: str) -> Tensor:
        if name in traced.constants:
            # Once: the copy is waited for.
            constant = traced.constants[name] = traced.constants[name].to(self.tracer.device)
            return constant
        owner, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.model.get_submodule(owner), leaf)
        return tensor


def _unpack(flat: Tensor, traced: ForwardTrace, crossing: list[Value]) -> dict[Value, Tensor]:
    shapes = tuple(tuple(traced.shapes[value][0]) for value in crossing)
    return dict(zip(crossing, split_flat(flat, shapes), strict=True))


def numbered_dropout(values: Tensor, probability: float, name: str, use: int, inplace: bool) -> Tensor:
    """Apply dropout number `use` of `name` in a forward: other stages may have made those before."""
    scope = active_scope()
    if probability == 0 or values.numel() == 0:
        return values
    if scope is not None:
        scope.calls[name] = use - 1
    return dropout(values, probability, name, inplace=inplace)
