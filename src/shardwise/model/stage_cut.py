"""Whether and where a model can be cut into pipeline stages: between its blocks, if they are a chain.

What stands outside of the blocks belongs to the first stage where it runs before them and to the last where it runs
after. Transformers' encoder-decoders are two chains, one after the other: what stands at an end of a stack belongs to
the stage of the block there. On the other stages the model's own forward runs all the same, so that masks and positions
are the model's own; modules that are not there have stand-ins, and of those before the blocks the stand-in has to know
the output's shape. Transformers' models do so in one manner; of a module of model.factory it is rehearsed on fake
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.model.capability import SUPPORTED, Capability, refused
from shardwise.model.chain import HandedOn
from shardwise.model.facts import StageFacts, StandIn

MIDST = -1
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class OrderWatch:
    """Hooks on a model that say with which blocks its modules outside of them run, and in which form blocks return.

    Attributes:
        encoder: name of the stack of the first list, where there are two; its states are `encoded`.
        phases: of a module outside of the blocks: `before` them, `after`, or `between` the two stacks.
        places: numbers of the blocks with which it runs; MIDST where that is between blocks of one stack.
    """

    def __init__(self, model: nn.Module, lists: Sequence[Sequence[str]]) -> None:
        blocks = [name for names in lists for name in names]
        self.started, self.ended, self.blocks = 0, 0, len(blocks)
        self.encoder, self.first = encoder_of(model, lists), len(lists[0]) if lists else 0
        self.encoding, self.encoded = 0, None
        self.phases: dict[str, set[str]] = {}
        self.places: dict[str, set[int]] = {}
        self.stand_ins: dict[str, StandIn | None] = {}
        self.outputs = 0
        self.hidden: set[tuple[int, ...]] = set()
        self.calls: list[str] = []
        for name in blocks:
            model.get_submodule(name).register_forward_pre_hook(partial(self._start, name))
            model.get_submodule(name).register_forward_hook(self._end)
        for name in outside(model, blocks):
            self.phases[name], self.places[name] = set(), set()
            module = model.get_submodule(name)
            module.register_forward_hook(partial(self._see, name), with_kwargs=True)
        if self.encoder:
            model.get_submodule(self.encoder).register_forward_pre_hook(self._encode)
            model.get_submodule(self.encoder).register_forward_hook(self._encoded)

    def _start(self, name: str, module: nn.Module, args: Any) -> None:
        self.started += 1
        self.calls.append(name)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ended += 1
        self.outputs = len(output) if isinstance(output, tuple | list) else 0
        first = output[0] if self.outputs else output
        self.hidden.add(tuple(first.shape) if isinstance(first, Tensor) else ())

    def _encode(self, module: nn.Module, args: Any) -> None:
        self.encoding = 1

    def _encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        self.encoding, self.encoded = 2, output[0]

    def _see(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        phase = "before" if not self.started else "after" if self.ended == self.blocks else "between"
        self.phases[name].add(phase)
        self.places[name].add(self._place())
        found = next(_stand_ins(dict(enumerate(args)) | kwargs, output), None)
        self.stand_ins[name] = found if self.stand_ins.get(name, found) == found else None

    def _place(self) -> int:
        """The block with which a module runs now: ahead of the first of its stack, or behind the last."""
        first, end = (0, self.blocks) if not self.encoder else (0, self.first)
        if self.encoding == 2:
            first, end = self.first, self.blocks
        elif self.encoder and not self.encoding:
            return MIDST  # a part of neither stack
        here = self.started if self.started == self.ended else MIDST
        return {end: end - 1, first: first}.get(here, MIDST)


def encoder_of(model: nn.Module, lists: Sequence[Sequence[str]]) -> str:
    """Name of the stack that holds the first of two lists of blocks, in transformers' encoder-decoders; else empty."""
    two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not isinstance(model, PreTrainedModel) or not two_sided or len(lists) != 2:
        return ""
    stack: Any = model.get_encoder()
    name = next((name for name, module in model.named_modules() if module is stack), "")
    inside = [{block.startswith(f"{name}.") for block in names} for names in lists]
    return name if inside == [{True}, {False}] else ""


def outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Names of the modules outside of `blocks` that own parameters or drop out."""
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
    watch: OrderWatch,
    is_chain: bool,
    handed_on: HandedOn,
) -> tuple[StageFacts, Capability]:
    """Return how `model` is cut, from one recorded forward, and whether it can be."""
    blocks = [name for names in lists for name in names]
    order = tuple(watch.calls) if sorted(watch.calls) == sorted(blocks) else ()
    if len(lists) != (2 if watch.encoder else 1):
        return StageFacts(order=order), refused(f"it has {len(lists)} lists of blocks")
    obstacle = next(_obstacles(model, lists, ties, watch, is_chain), handed_on[1])
    if obstacle:
        return StageFacts(order=order), refused(obstacle)
    last = len(blocks) - 1
    runs = {name: tuple(sorted(places)) or (last,) for name, places in watch.places.items()}
    behind = {name for name, phases in watch.phases.items() if phases <= {"after"}}
    first = [name for name in runs if "before" in watch.phases[name]]
    stages = StageFacts(
        before={name: _own_parameters(model, name) for name in first},
        after={name: _own_parameters(model, name) for name in runs if name in behind},
        between=_between(model, ties, {name: runs[name] for name in runs if name not in behind and name not in first}),
        stand_ins={name: stand_in for name, stand_in in watch.stand_ins.items() if stand_in and name not in behind},
        outputs=watch.outputs,
        handed_on=handed_on[0],
        encoder=watch.encoder,
        encoder_blocks=watch.first if watch.encoder else 0,
        runs=runs,
        uses=_uses(model, ties, watch, runs),
        hidden=() if isinstance(model, PreTrainedModel) else next(iter(watch.hidden))[1:],
    )
    return stages, SUPPORTED


def _uses(
    model: nn.Module, ties: Sequence[Sequence[str]], watch: OrderWatch, runs: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Parameter outside of the blocks -> numbers of the blocks with which one of the modules runs that own it."""
    groups = {group[0]: group for group in ties}
    found = {}
    for name, _ in model.named_parameters():
        owners = {each.rpartition(".")[0] for each in groups.get(name, (name,))} & runs.keys()
        called = {each for each in owners if watch.places[each]} or owners
        if owners:
            found[name] = tuple(sorted({number for each in called for number in runs[each]}))
    return found


def _between(model: nn.Module, ties: Sequence[Sequence[str]], runs: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """Elements by block, but those of tables that are tied to others: these are counted where they are used first."""
    tied = {name.rpartition(".")[0] for group in ties for name in group}
    found: dict[int, int] = {}
    for name, numbers in runs.items():
        if name not in tied:
            found[numbers[0]] = found.get(numbers[0], 0) + _own_parameters(model, name)
    return found


def _obstacles(
    model: nn.Module, lists: Sequence[Sequence[str]], ties: Sequence[Sequence[str]], watch: OrderWatch, is_chain: bool
) -> Iterator[str]:
    blocks = [name for names in lists for name in names]
    if not is_chain:
        yield "its blocks do not each take the hidden states from the one before"
    if watch.encoder and watch.calls != blocks:
        yield "its encoder does not run once, before its decoder"
    for name, phases in watch.phases.items():
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            yield f"{name or 'the model'!s} itself owns parameters and holds the blocks"
        at_both_ends = len(phases) > 1 and "after" in phases and _own_parameters(model, name)
        if MIDST in watch.places[name] or at_both_ends:
            yield f"{name} runs between blocks, or both before and after them"
        if phases - {"after"} and watch.stand_ins[name] is None:
            yield f"the shape of what {name} returns does not follow from its input's"
    if not isinstance(model, PreTrainedModel):
        yield from _module_obstacles(model, blocks, watch)
    inside = {name: f"{name}." for name in blocks}
    for group in ties:
        owners = {next((b for b, prefix in inside.items() if name.startswith(prefix)), "") for name in group}
        if len(owners) > 1:
            yield f"{group[0]} is tied from one block to another, or out of the blocks"


def _module_obstacles(model: nn.Module, blocks: Sequence[str], watch: OrderWatch) -> Iterator[str]:
    """Of a user's own module, whose hidden states may be anything."""
    if len(watch.hidden) != 1 or () in watch.hidden:
        yield "its blocks return hidden states of several shapes, or none"
    for name in blocks:
        if any(True for _ in model.get_submodule(name).buffers()):
            yield f"the block {name} holds buffers, and a stage keeps those of its own blocks alone"
            return


def _own_parameters(model: nn.Module, name: str) -> int:
    own = model.get_submodule(name).named_parameters(recurse=False, remove_duplicate=False)
    return sum(parameter.numel() for _, parameter in own)


def _stand_ins(given: Mapping[int | str, Any], output: Any) -> Iterator[StandIn]:
    """How the output's shape may follow from an argument's; tables of positions are asked for those of a shape, or have
    one row for all of a batch."""
    if not isinstance(output, Tensor):
        return
    shapes = {key: shape for key, value in given.items() if (shape := _shape(value))}
    for key, shape in shapes.items():
        if output.shape == shape:
            yield StandIn(key)
        for kept in (shape, shape[:-1]):
            if output.shape[:-1] == kept:
                yield StandIn(key, end=len(kept), width=output.shape[-1])
    ones = next((dim for dim, size in enumerate(output.shape) if size != 1), 0)
    for key, shape in shapes.items():
        for first in range(len(shape)):
            if output.shape[ones:-1] == shape[first:]:
                yield StandIn(key, first, ones=ones, width=output.shape[-1])


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor, or what is one; empty where it is neither."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    is_shape = isinstance(value, tuple) and all(isinstance(size, int) for size in value)
    return tuple(value) if is_shape else ()
