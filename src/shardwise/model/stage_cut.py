"""Answers whether a model can be cut into pipeline stages between its blocks, and says what belongs to which stage.

A model can if its blocks are a chain. What stands outside of the blocks belongs to the first stage where it runs before
them and to the last where it runs after. Transformers' encoder-decoders are two chains, one after the other: what
stands at an end of a stack belongs to the stage of the block there. A tower, of images say, whose blocks all run before
those of the language model, stands on the first stage as a whole.

On the other stages the model's own forward runs all the same, so that masks and positions are the model's own. Modules
that are not there have placeholders, and of those before the blocks the placeholder has to know the output's shape.
Transformers' models do so in one manner; of a module of model.factory it is rehearsed on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.job.capability import SUPPORTED, Capability, refused
from shardwise.model.call_names import call_names
from shardwise.model.chain import HandedOn
from shardwise.model.containers import PLAIN, walk
from shardwise.model.facts import PlaceholderShape, StageFacts

BETWEEN_BLOCKS = -1  # instead of the number of a block
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class ExecutionOrder:
    """Hooks on a model that record with which blocks its other modules run, and in which form blocks return.

    Attributes:
        calls: names of the blocks as they ran.
        outputs: how many things a block returns in a tuple; 0 where it returns a tensor.
        hidden: shapes of the hidden states that blocks returned.
        encoder: name of the stack of the first list, where there are two; it returned `encoded`.
        phases: for each module outside of the blocks: `before` them, `after`, or `between` the two stacks.
        places: numbers of the blocks with which it runs; BETWEEN_BLOCKS where that is between blocks of one stack.
        placeholders: how the shape of its output follows from its arguments, where it does.
        shortcut: name of a module whose output reaches the model's past the last block; "" for none.
        fed: name of a module from whose output blocks are given more than hidden states, and without a gradient: of
            a user's model any, of transformers' one whose weights are not trained.
        keeps_values: a block returns values that are no tensors, such as a flag.
        towers: of the modules that it was told to be towers, those that ran before the blocks.
        tower_blocks: how many blocks the lists ahead of the last have, where there are towers; the others are a chain.
    """

    def __init__(self, model: nn.Module, lists: Sequence[Sequence[str]], towers: Sequence[str] = ()) -> None:
        blocks = list(lists[-1]) if towers else [name for names in lists for name in names]
        self.towers = tuple(towers)
        self.tower_blocks = sum(map(len, lists[:-1])) if towers else 0
        self.block_count = len(blocks)
        self.started = 0
        self.ended = 0
        self.encoder = encoder_of(model, lists)
        self.encoder_blocks = len(lists[0]) if lists else 0
        self.encoder_started = False
        self.encoder_ended = False
        self.encoded: Tensor | None = None
        self.phases: dict[str, set[str]] = {}
        self.places: dict[str, set[int]] = {}
        self.placeholders: dict[str, PlaceholderShape | None] = {}
        self.outputs = 0
        self.hidden: set[tuple[int, ...]] = set()
        self.calls: list[str] = []
        self.shortcut = ""
        self.fed = ""
        self.keeps_values = False
        self._is_users = not isinstance(model, PreTrainedModel)
        self._untrained: set[str] = set()
        self._makers: dict[Any, str] = {}  # node of autograd's graph -> the module ahead of the last block's end
        self._last_made: list[Any] = []  # nodes of what the last block returned
        self._made: dict[int, tuple[Tensor, str]] = {}  # by id: what was made from what such a module returned
        for name in blocks:
            model.get_submodule(name).register_forward_pre_hook(partial(self._start_block, name), with_kwargs=True)
            model.get_submodule(name).register_forward_hook(partial(self._end_block, name))
        for name in (name for names in lists[:-1] for name in names) if towers else ():
            model.get_submodule(name).register_forward_pre_hook(partial(self._start_tower_block, name))
        for name in modules_outside(model, [name for names in lists for name in names]):
            self.phases[name], self.places[name] = set(), set()
            module = model.get_submodule(name)
            module.register_forward_hook(partial(self._record_module, name), with_kwargs=True)
        if self.encoder:
            model.get_submodule(self.encoder).register_forward_pre_hook(self._start_encoder)
            model.get_submodule(self.encoder).register_forward_hook(self._end_encoder)

    @property
    def call_names(self) -> tuple[str, ...]:
        """The calls of blocks by name; of a block that ran before with their number, as `name#2`."""
        return tuple(call_names(self.calls))

    def _start_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.started += 1
        self.calls.append(name)
        for value in walk(*args[1:], *kwargs.values()):
            maker = self._made[id(value)][1] if id(value) in self._made else ""
            if maker in self._untrained or (self._is_users and not getattr(value, "requires_grad", True)):
                self.fed = self.fed or maker

    def _start_tower_block(self, name: str, module: nn.Module, args: Any) -> None:
        self.calls.append(name)

    def _end_block(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.ended += 1
        self._last_made = _nodes(output)
        self._makers |= dict.fromkeys(self._last_made, name)
        self._mark(output, name if self.ended < self.block_count else "")
        self.outputs = len(output) if isinstance(output, tuple | list) else 0
        self.keeps_values |= any(isinstance(value, PLAIN) for value in walk(output))
        first = output[0] if self.outputs else output
        self.hidden.add(tuple(first.shape) if isinstance(first, Tensor) else ())

    def _start_encoder(self, module: nn.Module, args: Any) -> None:
        self.encoder_started = True

    def _end_encoder(self, module: nn.Module, args: Any, output: Any) -> None:
        self.encoder_ended, self.encoded = True, output[0]

    def _record_module(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        phase = "before" if not self.started else "after" if self.ended == self.block_count else "between"
        self.phases[name].add(phase)
        self.places[name].add(self._place())
        if phase == "before":
            self._makers |= dict.fromkeys(_nodes(output), name)
            self._mark(output, name)
            if torch.is_grad_enabled() and not _nodes(output) and any(True for _ in module.parameters(recurse=False)):
                self._untrained.add(name)
        shape = placeholder_shape(dict(enumerate(args)) | kwargs, output)
        self.placeholders[name] = shape if self.placeholders.get(name, shape) == shape else None

    def follow(self, arguments: Sequence[Any], result: Any) -> None:
        """Note that one of torch's functions made or changed `result` from `arguments`."""
        name = next((self._made[id(value)][1] for value in arguments if id(value) in self._made), "")
        if name:
            self._mark(result, name)

    def _mark(self, output: Any, name: str) -> None:
        """Note from which module ahead of the last block's end tensors come; "" for the last block."""
        for value in walk(output):
            if isinstance(value, Tensor):
                self._made.pop(id(value), None)
                if name:
                    self._made[id(value)] = value, name

    def end_forward(self, output: Any) -> None:
        """Look for a shortcut past the last block to the model's `output`; of transformers' to what the loss reads.

        What torch's functions made was followed, detached and frozen too; autograd's graph also knows what others made.
        """
        self._settle_towers()
        output = getattr(output, "logits", output)
        self.shortcut = next((self._made[id(value)][1] for value in walk(output) if id(value) in self._made), "")
        if not self.shortcut:
            makers = (self._makers.get(node, "") for node in graph_behind(output, self._last_made))
            self.shortcut = next(filter(None, makers), "")
        for kept in (self._made, self._makers, self._last_made):
            kept.clear()  # tensors and graphs of the forward

    def _settle_towers(self) -> None:
        """Keep the towers that ran before the blocks, or not at all; what is in one belongs to it.

        Parameters of what holds the blocks, as a mark for the end of an image's line, are then had by every stage.
        """
        phases = {
            tower: set().union(*(self.phases[name] for name in self.phases if is_inside(name, [tower])))
            for tower in self.towers
        }
        towers = tuple(tower for tower in self.towers if phases[tower] <= {"before"})
        self.towers = towers if any(phases[tower] for tower in towers) else ()
        if not self.towers:
            return
        # How many rows a table or a layer behind a tower gives follows from images too.
        shapeless = (
            name for name, phases in self.phases.items() if phases == {"before"} and not self.placeholders[name]
        )
        self.towers += tuple(
            name for name in shapeless if not is_inside(name, self.towers) and not holds_any(name, self.calls)
        )
        for name in self.phases:
            if is_inside(name, self.towers):
                self.phases[name], self.places[name] = {"before"}, {self.tower_blocks}
            elif holds_any(name, self.calls):
                everywhere = range(self.tower_blocks, self.tower_blocks + self.block_count)
                self.phases[name], self.places[name] = {"before"}, set(everywhere)

    def _place(self) -> int:
        """Return the block with which a module runs now: the first of its stack ahead of it, or the last behind it."""
        if self.encoder and not self.encoder_started:
            return BETWEEN_BLOCKS  # a part of neither stack
        first, end = 0, self.block_count
        if self.encoder:
            first, end = (self.encoder_blocks, self.block_count) if self.encoder_ended else (0, self.encoder_blocks)
        number = self.started if self.started == self.ended else BETWEEN_BLOCKS
        place = {end: end - 1, first: first}.get(number, BETWEEN_BLOCKS)
        return place if place == BETWEEN_BLOCKS else place + self.tower_blocks


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Tell whether a name is one of `modules`, or of what is in one."""
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def holds_any(name: str, blocks: Iterable[str]) -> bool:
    """Tell whether a module, by its name, holds one of `blocks`, as the model itself (\"\") does."""
    return any(not name or block.startswith(f"{name}.") for block in blocks)


def _nodes(output: Any) -> list[Any]:
    """Return the nodes of autograd's graph that made the tensors of an output."""
    tensors = [value for value in walk(output) if isinstance(value, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def graph_behind(output: Any, end: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of autograd's graph that lead to an output, each once, and none from `end` on."""
    nodes, visited = _nodes(output), {None, *end}
    while nodes:
        if (node := nodes.pop()) not in visited:
            visited.add(node)
            yield node
            nodes.extend(earlier for earlier, _ in node.next_functions)


def leaves_of_graph(output: Any) -> set[int]:
    """Return the tensors, by identity, to which autograd would bring a gradient of the output."""
    return {id(node.variable) for node in graph_behind(output) if hasattr(node, "variable")}


def encoder_of(model: nn.Module, lists: Sequence[Sequence[str]]) -> str:
    """Return the name of the stack of the first of two lists of blocks, in transformers' encoder-decoders; else ""."""
    two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not isinstance(model, PreTrainedModel) or not two_sided or len(lists) != 2:
        return ""
    stack: Any = model.get_encoder()
    name = next((name for name, module in model.named_modules() if module is stack), "")
    inside = [{block.startswith(f"{name}.") for block in names} for names in lists]
    return name if inside == [{True}, {False}] else ""


def towers_of(model: nn.Module, lists: Sequence[Sequence[str]], calls: Sequence[str]) -> tuple[str, ...]:
    """Return the modules of several layers that stand beside the last list of blocks, in a model with such ahead of it.

    In transformers' models of one stack of tokens; empty where blocks of the other lists do not all run before, or the
    last list is of one block, and could not be cut.

    Args:
        calls: the blocks as they ran.
    """
    is_apart = isinstance(model, PreTrainedModel) and not getattr(model.config, "is_encoder_decoder", False)
    if not is_apart or len(lists) < 2 or len(lists[-1]) < 2:
        return ()
    runs_main = [name in lists[-1] for name in calls]
    if runs_main != sorted(runs_main) or len(set(runs_main)) < 2:
        return ()
    return tuple(_composites_beside(model, "", lists[-1]))


def _composites_beside(module: nn.Module, name: str, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the outermost modules below `module` that hold none of `blocks` and have parameters in their children."""
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if holds_any(inner, blocks):
            yield from _composites_beside(child, inner, blocks)
        elif inner not in blocks and any(True for part in child.children() for _ in part.parameters()):
            yield inner


def modules_outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the names of the modules outside of `blocks` that own parameters or drop out."""
    inside = tuple(f"{name}." for name in blocks)
    for name, module in model.named_modules():
        if name in blocks or name.startswith(inside):
            continue
        if any(True for _ in module.parameters(recurse=False)) or isinstance(module, DROPOUT):
            yield name


def stage_facts(
    model: nn.Module,
    lists: Sequence[Sequence[str]],
    ties: Sequence[Sequence[str]],
    execution: ExecutionOrder,
    is_chain: bool,
    handed_on: tuple[HandedOn, Capability],
    joined: int = 0,
) -> tuple[StageFacts, Capability]:
    """Return how `model` is cut, from one recorded forward, and whether it can be.

    Args:
        joined: blocks behind towers that are no part of the chain yet.
    """
    blocks = [name for names in lists for name in names]
    order = execution.call_names if set(execution.calls) == set(blocks) else ()
    has_towers = execution.towers and all(
        is_inside(name, execution.towers) for name in blocks[: execution.tower_blocks]
    )
    if len(lists) != (2 if execution.encoder else 1) and not has_towers:
        return StageFacts(order=order), refused(f"it has {len(lists)} lists of blocks")
    passed, alike = handed_on
    obstacle = next(_obstacles(model, blocks, ties, execution, is_chain), alike.reason)
    if obstacle:
        return StageFacts(order=order), refused(obstacle)
    last = len(blocks) - 1
    called = _called_owners(model, ties, execution)
    runs = {name: tuple(sorted(execution.places[owner])) or (last,) for name, owner in called.items()}
    behind = {name for name, owner in called.items() if execution.phases[owner] <= {"after"}}
    first = [name for name, owner in called.items() if "before" in execution.phases[owner]]
    between = {name: runs[name] for name in runs if name not in behind and name not in first}
    stages = StageFacts(
        before={name: _own_parameters(model, name) if called[name] == name else 0 for name in first},
        after={name: _own_parameters(model, name) for name in runs if name in behind},
        between=_between(model, ties, between),
        placeholders={name: shape for name, shape in execution.placeholders.items() if shape and name not in behind},
        outputs=execution.outputs,
        handed_on=passed,
        encoder=execution.encoder,
        encoder_blocks=execution.encoder_blocks if execution.encoder else 0,
        runs=runs,
        uses=_uses(model, ties, execution, runs),
        hidden=() if isinstance(model, PreTrainedModel) else next(iter(execution.hidden))[1:],
        towers=execution.towers,
        tower_blocks=execution.tower_blocks,
        first_blocks=execution.tower_blocks + joined + 1 if execution.towers else 0,
    )
    return stages, SUPPORTED


def _called_owners(model: nn.Module, ties: Sequence[Sequence[str]], execution: ExecutionOrder) -> dict[str, str]:
    """Return module -> itself, or the first that was called of those that own the same parameters, where it was not."""
    owners = {name: [alias.rpartition(".")[0] for alias in group] for group in ties for name in group}
    called = {name: name for name in execution.places}
    for name, places in execution.places.items():
        own = [leaf for leaf, _ in model.get_submodule(name).named_parameters(recurse=False)]
        if places or not own or not all(f"{name}.{leaf}" in owners for leaf in own):
            continue
        others = owners[f"{name}.{own[0]}"]
        called[name] = next((other for other in others if execution.places.get(other)), name)
    return called


def _uses(
    model: nn.Module, ties: Sequence[Sequence[str]], execution: ExecutionOrder, runs: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return parameter outside of the blocks -> numbers of the blocks with which a module that owns it runs."""
    groups = {group[0]: group for group in ties}
    uses = {}
    for name, _ in model.named_parameters():
        owners = {alias.rpartition(".")[0] for alias in groups.get(name, (name,))} & runs.keys()
        called = {owner for owner in owners if execution.places[owner]} or owners
        if owners:
            uses[name] = tuple(sorted({number for owner in called for number in runs[owner]}))
    return uses


def _between(model: nn.Module, ties: Sequence[Sequence[str]], runs: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """Return elements by block, but those of tables that are tied to others: these count where they are used first."""
    tied = {name.rpartition(".")[0] for group in ties for name in group}
    elements: dict[int, int] = {}
    for name, numbers in runs.items():
        if name not in tied:
            elements[numbers[0]] = elements.get(numbers[0], 0) + _own_parameters(model, name)
    return elements


def _obstacles(
    model: nn.Module,
    all_blocks: Sequence[str],
    ties: Sequence[Sequence[str]],
    execution: ExecutionOrder,
    is_chain: bool,
) -> Iterator[str]:
    blocks = all_blocks[execution.tower_blocks :]
    if repeated := next((name for name in blocks if execution.calls.count(name) > 1), ""):
        yield f"{repeated} runs {execution.calls.count(repeated)} times in a forward, and each stage would hold it"
    if not is_chain:
        yield "its blocks do not each take the hidden states from the one before"
    if execution.shortcut:
        yield f"what {execution.shortcut} returns is used behind the last block too"
    if execution.fed:
        yield f"blocks are given what comes from {execution.fed} without a gradient"
    if execution.encoder and execution.calls != blocks:
        yield "its encoder does not run once, before its decoder"
    for name, phases in execution.phases.items():
        holds_blocks = holds_any(name, blocks)
        if execution.towers and (holds_blocks or is_inside(name, execution.towers)):
            continue
        if holds_blocks:
            yield f"{name or 'the model'!s} itself owns parameters and holds the blocks"
        at_both_ends = len(phases) > 1 and "after" in phases and _own_parameters(model, name)
        if BETWEEN_BLOCKS in execution.places[name] or at_both_ends:
            yield f"{name} runs between blocks, or both before and after them"
        if phases - {"after"} and execution.placeholders[name] is None:
            yield f"the shape of what {name} returns does not follow from its input's"
    if not isinstance(model, PreTrainedModel):
        yield from _module_obstacles(model, blocks, execution)
    inside = {name: f"{name}." for name in (*execution.towers, *blocks)}
    for group in ties:
        owners = {next((b for b, prefix in inside.items() if name.startswith(prefix)), "") for name in group}
        if len(owners) > 1:
            yield f"{group[0]} is tied from one block or tower to another, or out of it"


def _module_obstacles(model: nn.Module, blocks: Sequence[str], execution: ExecutionOrder) -> Iterator[str]:
    """Yield obstacles of a user's own module, whose hidden states may be anything."""
    if execution.keeps_values:
        yield "its blocks return values that are no tensors, which do not travel between stages"
    if len(execution.hidden) != 1 or () in execution.hidden:
        yield "its blocks return hidden states of several shapes, or none"
    for name in blocks:
        if any(True for _ in model.get_submodule(name).buffers()):
            yield f"the block {name} holds buffers, and a stage keeps those of its own blocks alone"
            return


def _own_parameters(model: nn.Module, name: str) -> int:
    own = model.get_submodule(name).named_parameters(recurse=False, remove_duplicate=False)
    return sum(parameter.numel() for _, parameter in own)


def placeholder_shape(arguments: Mapping[int | str, Any], output: Any) -> PlaceholderShape | None:
    """Return how the output's shape follows from an argument's; None where it does not."""
    return next(_placeholder_shapes(arguments, output), None)


def _placeholder_shapes(arguments: Mapping[int | str, Any], output: Any) -> Iterator[PlaceholderShape]:
    """Yield ways in which the output's shape may follow from an argument's.

    Tables of positions are asked for those of a shape, or have one row for all of a batch.
    """
    if not isinstance(output, Tensor):
        return
    shapes = {key: shape for key, value in arguments.items() if (shape := _shape(value))}
    yield from (PlaceholderShape(key) for key, shape in shapes.items() if output.shape == shape)
    for left_out in (0, 1):  # all of a shape says more than a part of it, which may be as long by chance
        for key, shape in shapes.items():
            if output.shape[:-1] == (kept := shape[: len(shape) - left_out]):
                yield PlaceholderShape(key, end=len(kept), width=output.shape[-1])
    ones = next((dim for dim, size in enumerate(output.shape) if size != 1), 0)
    for key, shape in shapes.items():
        for first in range(len(shape)):
            if output.shape[ones:-1] == shape[first:]:
                yield PlaceholderShape(key, first, ones=ones, width=output.shape[-1])


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or a value that is a shape; empty where it is neither."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    is_shape = isinstance(value, tuple) and all(isinstance(size, int) for size in value)
    return tuple(value) if is_shape else ()
