"""Cuts the forward of a model that is no chain of blocks into pieces of its graph, by `torch.export`.

The traced pieces call operators, not modules; they read parameters by the names of the unmodified model. What crosses a
cut may come from any piece before it (skip connections). Values that follow from the batch alone, such as masks, need
not travel: whoever wants them makes them again, by the part of a piece that leads to them.

Torch's own `pipeline()` marks cuts in the same way, and takes as long again to make modules of the pieces.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import StringIO
from itertools import chain, repeat
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import pipe_split
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from transformers.utils import ModelOutput

from shardwise._torch_compat.modules import copy_module
from shardwise._torch_compat.pipelining import CUT_MARK
from shardwise._torch_compat.tracing import (
    FakeTensorMode,
    is_fake,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    without_stack_traces,
)
from shardwise.job.objects import in_parentheses, is_users_file
from shardwise.model.call_names import call_names, called_module
from shardwise.model.copies import deep_copy
from shardwise.model.experts import BATCHED, GROUPED, LOOPED, set_expert_implementation
from shardwise.model.forward_failures import UntraceableError
from shardwise.model.own_gradients import own_gradients_found
from shardwise.model.process_numbers import process_numbers_kept
from shardwise.model.user_state import changed_number, numbers_kept, user_state_kept

Value = tuple[int, int]  # (piece, number of its output); piece -1: a tensor of the batch
DropoutFunction = Callable[..., Tensor]  # (values, probability, name, use, inplace), in the place of torch's
_WITH_STATISTICS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
DROPOUT_IN_PLACE = torch.ops.aten.dropout_.default
DROPOUTS = (torch.ops.aten.dropout.default, DROPOUT_IN_PLACE)
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class TracedPiece:
    """Operators between two cuts.

    Attributes:
        state: names of the parameters, buffers and constants it reads.
        takes: values that it computes from.
        graph: (state ..., takes ...) -> list of the tensors it gives.
        changes: buffers among `state` into which it writes, such as running statistics.
        bound: names of its operators that work on more than the batch.
    """

    state: tuple[str, ...]
    takes: tuple[Value, ...]
    graph: fx.Graph
    changes: frozenset[str] = frozenset()
    bound: set[str] = field(default_factory=set)

    @cached_property
    def run(self) -> fx.GraphModule:
        """Return the graph as a module that runs."""
        return fx.GraphModule(nn.Module(), self.graph)

    @property
    def gives(self) -> list[fx.Node]:
        """Nodes of the tensors it gives."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]


@dataclass
class ForwardTrace:
    """A forward in pieces.

    Attributes:
        inputs: names of the batch's tensors, in order.
        constants: tensors that the forward made from numbers.
        outputs: the tensors of the model's output.
        rebuild: those tensors -> the output.
        shapes: of every value that leaves a piece.
        free: values that follow from the batch alone.
        dtype: of parameters.
    """

    inputs: tuple[str, ...]
    pieces: list[TracedPiece]
    constants: dict[str, Tensor]
    outputs: list[Value]
    rebuild: Callable[[list[Tensor]], Any]
    shapes: dict[Value, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    free: set[Value] = field(default_factory=set)
    dtype: torch.dtype = torch.float32
    _remade: dict[int, list[TracedPiece]] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, int]:
        """Buffers into which the forward writes, each with the piece that does."""
        return {name: number for number, piece in enumerate(self.pieces) for name in sorted(piece.changes)}

    def needed(self, piece: int) -> list[Value]:
        """Return what piece `piece`, a later one or the output needs of the pieces before."""
        later = [value for part in self.pieces[piece:] for value in part.takes] + self.outputs
        return sorted({value for value in later if 0 <= value[0] < piece})

    def crossing(self, piece: int) -> list[Value]:
        """Return the values that have to cross the boundary before `piece`."""
        return [value for value in self.needed(piece) if value not in self.free]

    def remade(self, piece: int) -> list[TracedPiece]:
        """Return the part of each piece before `piece` that makes what that needs from the batch alone, in order."""
        if piece not in self._remade:
            wanted = {value for value in (*self.pieces[piece].takes, *self.outputs) if value in self.free}
            parts: list[TracedPiece] = []
            for number in reversed(range(piece)):
                part = _pruned(self.pieces[number], [out for maker, out in sorted(wanted) if maker == number])
                wanted |= {value for value in part.takes if value[0] >= 0}
                parts.insert(0, part)
            self._remade[piece] = parts
        return self._remade[piece]


def trace(
    model: nn.Module,
    starts: Sequence[str],
    inputs: Mapping[str, Any],
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    blocks: Collection[str],
    dropout: DropoutFunction | None = None,
) -> ForwardTrace:
    """Return the forward of `model` (on meta; it stays as it is) in pieces that begin with the calls `starts`.

    Args:
        inputs: the forward's keyword arguments; of tensors shapes and dtypes count, and stay those of the pieces, as
            other values do.
        device: where the pieces run.
        dtypes: of parameters when they are used, and of buffers; None leaves these as they are.
        blocks: names of blocks and of their later calls; functional dropout is counted by block.
        dropout: what the pieces call to drop; unset: torch's own.

    Raises:
        Exception: whatever torch raises where it cannot trace; `failure_reason` says it in a clause.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    traced, spec = _fake_copy(model, mode, device, dtypes), SimpleNamespace()
    set_expert_implementation(traced, BATCHED if dtypes[0] == torch.float64 else GROUPED, instead_of=(LOOPED,))
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in inputs.items() if name not in tensors}
    earlier = numbers_kept(traced)
    counted = lambda: changed_number(earlier, numbers_kept(traced))  # noqa: E731  # torch puts numbers back
    traced.forward = MethodType(_flat_forward(partial(traced.forward, **plain), tuple(tensors), spec, counted), traced)
    reached = list[str]()
    for name in {called_module(start): None for start in starts}:
        traced.get_submodule(name).register_forward_pre_hook(_Cuts(name, starts, reached))
    classes = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    values = tuple(_fake(mode, tensor, device, tensor.dtype) for tensor in tensors.values())
    program = _exported(model, traced, values, spec)
    if reached != list(starts[: len(reached)]):
        raise UntraceableError("it makes the calls before which it is cut in another order")
    if dropout is not None:
        _number_dropouts(program.graph, classes, blocks, dropout)
    forward = _read(program, ForwardTrace(tuple(tensors), [], {}, [], spec.rebuild, dtype=dtypes[0]), model, blocks)
    forward.pieces += [_piece([], [], {}, {}) for _ in starts[len(reached) :]]  # such arguments end the forward earlier
    return forward


def _exported(
    model: nn.Module, traced: nn.Module, values: tuple[Tensor, ...], spec: SimpleNamespace
) -> ExportedProgram:
    """Return torch's graph of the copy `traced` of `model`.

    Raises:
        UntraceableError: the graph would not be what the forward does.
    """
    with (
        _quiet(),
        user_state_kept(model),
        process_numbers_kept() as were_drawn,
        own_gradients_found() as own_gradient,
    ):
        with without_stack_traces():
            program = torch.export.export(traced, values)
        if inner := next((str(node.target) for node in program.graph.nodes if node.op == "get_attr"), ""):
            if not isinstance(attrgetter(inner)(program.graph_module), fx.GraphModule):
                raise UntraceableError(f"torch's graph of it holds a module, {inner}")
            line = _line_of(torch.export.export(traced, values), inner)
            raise UntraceableError(f"its forward switches gradients or autocast for a part of it{in_parentheses(line)}")
        if were_drawn():
            raise UntraceableError(
                "its forward draws numbers from Python's or NumPy's generator, which a trace would keep"
            )
        if own_gradient():
            raise UntraceableError(f"its forward has {own_gradient()}, of which a trace keeps nothing")
        if spec.counted:
            raise UntraceableError(f"its forward changes the number {spec.counted}, of which a trace keeps one value")
    return program


class _Cuts:
    """A hook ahead of a module's forward that cuts the trace there, if the call is one of `starts`."""

    def __init__(self, name: str, starts: Sequence[str], reached: list[str]) -> None:
        self.starts, self.reached, self.calls = starts, reached, call_names(repeat(name))

    def __call__(self, module: nn.Module, args: Any) -> None:
        if (call := next(self.calls)) in self.starts:
            self.reached.append(call)
            pipe_split()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch prints and logs where it cannot trace; the error alone says enough."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _fake(mode: Any, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def _fake_copy(
    model: nn.Module, mode: Any, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> Any:
    """Return a copy on fake tensors in which nothing is tied: each use of a weight is read by its own name."""
    traced: Any = deep_copy(model, model.buffers())
    visited: set[int] = set()
    for name, module in list(traced.named_modules(remove_duplicate=False)):
        if id(module) in visited:
            owner, _, leaf = name.rpartition(".")
            module = copy_module(module)
            traced.get_submodule(owner).add_module(leaf, module)
        visited.add(id(module))
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            fake = _fake(mode, parameter, device, _dtype(parameter, dtypes[0]))
            module.register_parameter(leaf, nn.Parameter(fake, parameter.requires_grad))
        for leaf, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, leaf, _fake(mode, buffer, device, _dtype(buffer, dtypes[1])))
    return traced


def _dtype(tensor: Tensor, floating: torch.dtype | None) -> torch.dtype:
    return floating if floating and tensor.is_floating_point() else tensor.dtype


def _flat_forward(
    forward: Callable[..., Any], names: Sequence[str], spec: SimpleNamespace, counted: Callable[[], str]
) -> Callable[..., Any]:
    """Return `forward` as a function of tensors to a tuple of tensors; `spec.rebuild` puts the output together.

    `spec.counted` is what `counted` says at its end.
    """

    def run(self: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
        output = forward(**dict(zip(names, values, strict=True)))
        spec.counted = counted()
        if isinstance(output, ModelOutput):
            output = _without_caches(output)
        leaves, form = tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        without_tensors = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def rebuild(tensors: list[Tensor]) -> Any:
            whole = list(without_tensors)
            for place, tensor in zip(places, tensors, strict=True):
                whole[place] = tensor
            return tree_unflatten(whole, form)

        spec.rebuild = rebuild
        return tuple(leaves[place] for place in places)

    return run


def _without_caches(output: ModelOutput) -> ModelOutput:
    """Return what is read of a model's output; caches and hidden states would cross the cuts."""
    names = [name for name, value in output.items() if isinstance(value, Tensor)]
    if "logits" in names:
        names = [name for name in names if name in ("loss", "logits")]
    return type(output)(**{name: output[name] for name in names})


def _number_dropouts(
    graph: fx.Graph, classes: Mapping[str, type], blocks: Collection[str], dropout: DropoutFunction
) -> None:
    """Let operators of dropout call `dropout`, with the name of their module and the number of their use."""
    uses: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target not in DROPOUTS:
            continue
        stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
        values, probability, training = node.args
        inner = stack[-1] if stack else ""
        block = next((name for name in stack if name in blocks), "")
        name = inner if issubclass(classes.get(inner, nn.Module), nn.Dropout) else f"{block}/functional"
        uses[name] += bool(training and probability)  # what drops nothing is not counted where modules run
        inplace = node.target is DROPOUT_IN_PLACE
        node.target = dropout
        node.args = (values, probability if training else 0.0, name, uses[name], inplace)


def _line_of(program: ExportedProgram, name: str) -> str:
    """Return `file:line` of the first operator of a graph inside the graph; empty where torch has not noted it."""
    inner: Any = program.graph_module.get_submodule(name)
    traces = (operator.meta.get("stack_trace") or "" for operator in inner.graph.nodes)
    frames = FRAME.findall(next(filter(None, traces), ""))
    return next((f"{file}:{line}" for file, line in reversed(frames) if is_users_file(file)), "")


# --- torch's graph, cut ----------------------------------------------------------------------------------------------


def _read(program: ExportedProgram, forward: ForwardTrace, model: nn.Module, blocks: Collection[str]) -> ForwardTrace:
    """Read torch's graph into `forward`."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    owners = (*(name.rpartition(".")[0] for name in weights if "." in name), *blocks)
    # A buffer that stands beside weights, or in a block, has values only on the stage of those.
    bound = weights | {name for name in buffers if name.startswith(tuple(f"{owner}." for owner in owners))}
    state, values = _arguments(program, forward)
    parts, end = _cut(program.graph), program.graph.output_node()
    for number, nodes in enumerate(parts):
        within = set(nodes)
        leaving = [node for node in nodes if not within.issuperset(node.users)]
        values |= {node: (number, place) for place, node in enumerate(leaving)}
        forward.pieces.append(_piece(nodes, leaving, state, values))
        changes = _changes(forward.pieces[-1], buffers)
        forward.pieces[-1] = replace(forward.pieces[-1], changes=changes)
        _follow(forward, bound | changes)
    forward.outputs = [values[leaf] for leaf in tree_leaves(end.args) if isinstance(leaf, fx.Node)]
    _check_changes(forward)
    return forward


def _arguments(program: ExportedProgram, forward: ForwardTrace) -> tuple[dict[fx.Node, str], dict[fx.Node, Value]]:
    """Return the arguments of torch's graph: names of what it reads of the model, and values of the batch."""
    state, values = dict[fx.Node, str](), dict[fx.Node, Value]()
    arguments = (node for node in program.graph.nodes if node.op == "placeholder")
    for node, given in zip(arguments, program.graph_signature.input_specs, strict=True):
        if given.kind is InputKind.USER_INPUT:
            values[node] = (-1, len(forward.free))
            forward.free.add(values[node])
        else:
            assert given.target is not None
            state[node] = given.target
        if given.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ) and node.users:
            forward.constants[state[node]] = _constant(program, state[node])
    return state, values


def _constant(program: ExportedProgram, name: str) -> Tensor:
    constant = program.constants[name]
    if not isinstance(constant, Tensor):
        raise UntraceableError(f"its forward reads {name}, which is no tensor")
    if is_fake(constant):
        raise UntraceableError("its forward makes a tensor while it is traced of which torch keeps no value")
    return constant


def _cut(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the operators between two marks, and before the first and behind the last."""
    parts: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.target is CUT_MARK:
            parts.append([])
        elif node.op not in ("placeholder", "output"):
            parts[-1].append(node)
    return parts


def _piece(
    nodes: Sequence[fx.Node], leaving: Sequence[fx.Node], state: Mapping[fx.Node, str], values: Mapping[fx.Node, Value]
) -> TracedPiece:
    """Return a piece of operators of torch's graph.

    Args:
        nodes: its operators, in order.
        leaving: those among them whose values others need.
        state: names of parameters, buffers and constants by their arguments of the graph.
        values: by operators of earlier pieces, and arguments of the batch.
    """
    graph, within, copies = fx.Graph(), set(nodes), dict[fx.Node, fx.Node]()
    given = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in within)
    read, taken = [node for node in given if node in state], [node for node in given if node not in state]
    for node in (*read, *taken):
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in leaving])
    return TracedPiece(tuple(state[node] for node in read), tuple(values[node] for node in taken), graph)


def _follow(forward: ForwardTrace, names: set[str]) -> None:
    """Note the shapes of what the last piece gives, and what of it follows from the batch alone, not from `names`."""
    piece, number = forward.pieces[-1], len(forward.pieces) - 1
    sources = (name in names for name in piece.state), (value not in forward.free for value in piece.takes)
    bound: set[fx.Node] = set()
    nodes: list[Any] = list(piece.graph.nodes)
    for node, is_bound in zip(nodes, chain(*sources, repeat(False)), strict=False):
        if is_bound or any(source in bound for source in node.all_input_nodes):
            bound.add(node)
            for written in _written(node):  # and what it is a view of
                while isinstance(written, fx.Node) and written.op != "placeholder":
                    bound.add(written)
                    written = written.args[0] if written.args else None
        if node.op == "output":
            for output, value in enumerate(node.args[0]):
                forward.shapes[number, output] = value.meta["val"].shape, value.meta["val"].dtype
                if value not in bound:
                    forward.free.add((number, output))
    piece.bound.update(node.name for node in bound)


def _written(node: fx.Node) -> list[Any]:
    """Return the arguments that an operator writes into."""
    if node.target in _WITH_STATISTICS:  # their schema does not say so
        return list(node.args[3:5]) if node.args[5] else []
    schema = getattr(node.target, "_schema", None)
    pairs = zip(node.args, schema.arguments, strict=False) if schema is not None else ()
    return [value for value, argument in pairs if argument.alias_info and argument.alias_info.is_write]


def _changes(piece: TracedPiece, buffers: set[str]) -> frozenset[str]:
    """Return the buffers into which a piece writes.

    Raises:
        UntraceableError: it writes into a parameter, a constant, or a tensor that came over a cut.
    """
    arguments = [node for node in piece.graph.nodes if node.op == "placeholder"]
    names = dict(zip(arguments, piece.state, strict=False))
    changed = set()
    for node in piece.graph.nodes:
        for value in _written(node):
            if value in arguments and names.get(value) not in buffers:
                raise UntraceableError(f"its forward changes a parameter or an input in place, by {node.target}")
            changed.add(names.get(_viewed(value), ""))
    return frozenset(changed & buffers)


def _viewed(value: Any) -> Any:
    """Return the value of which this one is a view, or itself."""
    while isinstance(value, fx.Node) and (schema := getattr(value.target, "_schema", None)) is not None:
        if not (value.args and schema.returns and schema.returns[0].alias_info):
            break
        value = value.args[0]
    return value


def _check_changes(forward: ForwardTrace) -> None:
    """Refuse buffers that one piece changes and another reads."""
    for name, number in forward.changed.items():
        readers = [reader for reader, piece in enumerate(forward.pieces) if name in piece.state and reader != number]
        if readers:
            raise UntraceableError(f"its forward changes the buffer {name} in one stage and reads it in another")


def _pruned(piece: TracedPiece, outputs: Iterable[int]) -> TracedPiece:
    """Return the part of a piece that leads to `outputs`; it gives None for the others."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(piece.graph, copies)
    wanted = set(outputs)
    graph.output([copies[node] if number in wanted else None for number, node in enumerate(piece.gives)])
    writing = {copies[node] for node in copies if _written(node) and node.name not in piece.bound}
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in writing)
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    sources: list[Any] = [*piece.state, *piece.takes]
    kept = [source for node, source in zip(arguments, sources, strict=True) if node.users]
    for node in arguments:
        if not node.users:
            graph.erase_node(node)
    state = tuple(source for source in kept if isinstance(source, str))
    takes = tuple(source for source in kept if not isinstance(source, str))
    return TracedPiece(state, takes, graph)
