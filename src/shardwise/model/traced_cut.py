"""Answers whether tracing can cut a model that is no chain of blocks, and says which stage then holds what.

The trace is cut before every call of a block; where nothing repeats, before every module that holds parameters and runs
once. The facts that come out of it are those of the traced forward, whose blocks are the calls: of a block that runs
several times (ALBERT's) each stage that runs it holds the weights. It has operators on weights and no modules that
could be split, checkpointed or replaced: what does that is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED, refused
from shardwise.model.facts import BlockFacts, ModelFacts, StageFacts
from shardwise.model.forward_failures import UntraceableError, failure_reason
from shardwise.model.probe import as_trained, parameters_without_gradient, token_inputs, units_in_order
from shardwise.model.trace import ForwardTrace, trace

TRACED = refused("stages of this model are cut from its traced forward, in which there are no modules any more")
DTYPE = torch.float32  # of the trial; a cut of another compute dtype is tried again before it runs


def cut_by_trace(
    model: nn.Module, facts: ModelFacts, sequence_length: int, example: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Return `facts` with stages from a trace, where the model cannot be cut between blocks; else as they are.

    Args:
        model: on the meta device; it stays as it is.
        sequence_length: tokens of a sequence; counts where there is no `example`, the forward's keyword arguments.
    """
    untraced = facts.supports(Axis.PIPELINE)
    untraceable = facts.blocks_without_gradient or facts.takes_outer_gradient or facts.changes_numbers
    if untraced.ok or facts.stages.traced or untraceable:
        return facts  # a trace would keep no gradient, could not be cut, or would keep the numbers of one forward
    given = as_trained(model, example) or token_inputs(model, sequence_length)
    inputs = {name: _as_tried(value) for name, value in given.items()}
    if not facts.blocks:
        facts = _with_units(model, facts, inputs)
    order = facts.stages.order
    if len(order) < 2:
        return facts  # there is nothing to cut apart
    try:
        traced = trace(model, order[1:], inputs, torch.device("cpu"), (DTYPE, DTYPE), order)
        _check_gradients(traced, parameters_without_gradient(model, inputs))
        stages = _stages(facts, traced)
        widest = max(boundary_elements(traced, piece) for piece in range(1, len(traced.pieces)))
    except Exception as error:  # torch raises anything where it cannot trace
        refusal = refused(f"{untraced.reason}, and its trace cannot be cut either: {failure_reason(error)}")
        return facts.with_capabilities({Axis.PIPELINE: refusal})
    sizes = {block.name: block.parameters for block in facts.blocks}
    rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
    return replace(
        facts.with_capabilities(
            {Axis.PIPELINE: SUPPORTED, Axis.TENSOR: TRACED, Axis.CONTEXT: TRACED, Axis.EXPERT: TRACED}
        ),
        blocks=tuple(BlockFacts(name, sizes.get(name, 0)) for name in order),  # a later call has no weights of its own
        stages=replace(stages, hidden=(widest // rows,), order=order),
        head=None,
        head_has_bias=False,
        tensor_splits={},
        expert_stacks={},
        routers={},
        vocabulary_parameters=(),
        attention_kernels=TRACED,
        fusible={},
    )


def _check_gradients(traced: ForwardTrace, without: Collection[str]) -> None:
    """Refuse weights to which no gradient comes and whose values cross a cut: zeros would come back, not nothing.

    Raises:
        UntraceableError: there are such, which the optimizer would decay.
    """
    for number in range(len(traced.pieces) - 1):
        if lost := sorted(_sent(traced, number).intersection(without)):
            raise UntraceableError(f"no gradient comes to {lost[0]}, and behind a cut it would be one of zeros")


def _sent(traced: ForwardTrace, number: int) -> set[str]:
    """Return the weights and buffers of a piece on which what it sends over the cut behind it depends."""
    piece, crossing = traced.pieces[number], traced.crossing(number + 1)
    sources: dict[Any, set[str]] = {}
    for node, name in zip_longest(piece.graph.nodes, piece.state):
        sources[node] = set().union({name} if name else (), *(sources[given] for given in node.all_input_nodes))
    return set().union(*(sources[node] for place, node in enumerate(piece.gives) if (number, place) in crossing))


def _as_tried(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to("meta", DTYPE) if is_number else value


def _with_units(model: nn.Module, facts: ModelFacts, inputs: Mapping[str, Any]) -> ModelFacts:
    order = units_in_order(model, inputs)
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in order]
    blocks = tuple(BlockFacts(name, size) for name, size in zip(order, sizes, strict=True))
    return replace(facts, blocks=blocks, stages=replace(facts.stages, order=order))


def boundary_elements(traced: ForwardTrace, piece: int) -> int:
    """Return the elements that cross the boundary before `piece`.

    Raises:
        UntraceableError: they are not all of one floating dtype.
    """
    crossing = [traced.shapes[value] for value in traced.crossing(piece)]
    unsendable = [dtype for _, dtype in crossing if dtype != traced.dtype]
    if unsendable:
        raise UntraceableError(f"{unsendable[0]} would have to travel between stages, which send {traced.dtype}")
    return sum(shape.numel() for shape, _ in crossing)


def _stages(facts: ModelFacts, traced: ForwardTrace) -> StageFacts:
    """Return which stages hold each parameter: all that use it; one of a block that is not used, that block's."""
    first_name = {name: group[0] for group in facts.ties for name in group}
    used: dict[str, set[int]] = defaultdict(set)
    for number, piece in enumerate(traced.pieces):
        for name in piece.state:
            used[first_name.get(name, name)].add(number)
    order = facts.stages.order
    uses: dict[str, tuple[int, ...]] = {}
    for name in facts.parameter_shapes:
        block = facts.block_of.get(name)
        of_block = {order.index(block)} if block else set()
        numbers = used[name] or of_block or {0}
        if numbers != of_block:
            uses[name] = tuple(sorted(numbers))
    return StageFacts(uses=uses, traced=True, **_shares(facts, uses, len(order) - 1))


def _shares(facts: ModelFacts, uses: Mapping[str, Sequence[int]], last: int) -> dict[str, Any]:
    """Return the fields `before`, `after` and `between` of StageFacts; a block counts its own parameters."""
    order = facts.stages.order
    before: dict[str, int] = defaultdict(int)
    after: dict[str, int] = defaultdict(int)
    between: dict[int, int] = defaultdict(int)
    for name, numbers in uses.items():
        owner, size = name.rpartition(".")[0], torch.Size(facts.parameter_shapes[name]).numel()
        for number in numbers:
            if order[number] == facts.block_of.get(name):
                continue
            if number in (0, last):
                (after if number else before)[owner] += size
            else:
                between[number] += size
    return {"before": dict(before), "after": dict(after), "between": dict(between)}
