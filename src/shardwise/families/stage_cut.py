"""Whether and where a model can be cut into pipeline stages: between its blocks, if they are a chain.

What stands outside of the blocks belongs to the first stage where it runs before them and to the last where it runs
after. On the other stages the model's own forward runs all the same, so that masks and positions are the model's own;
modules that are not there have stand-ins, and of those before the blocks the stand-in has to know the output's shape.
Transformers' models do so in one manner; of a module of model.factory it is rehearsed on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.families.facts import StageFacts, StandIn

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class OrderWatch:
    """Hooks on a model that say when its modules outside of the blocks run, and in which form blocks return."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.started, self.ended, self.blocks = 0, 0, len(blocks)
        self.phases: dict[str, set[str]] = {}
        self.stand_ins: dict[str, StandIn | None] = {}
        self.outputs = 0
        self.hidden: set[tuple[int, ...]] = set()
        self.calls: list[str] = []
        for name in blocks:
            model.get_submodule(name).register_forward_pre_hook(partial(self._start, name))
            model.get_submodule(name).register_forward_hook(self._end)
        for name in outside(model, blocks):
            self.phases[name] = set()
            module = model.get_submodule(name)
            module.register_forward_hook(partial(self._see, name), with_kwargs=True)

    def _start(self, name: str, module: nn.Module, args: Any) -> None:
        self.started += 1
        self.calls.append(name)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ended += 1
        self.outputs = len(output) if isinstance(output, tuple | list) else 0
        first = output[0] if self.outputs else output
        self.hidden.add(tuple(first.shape) if isinstance(first, Tensor) else ())

    def _see(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        phase = "before" if not self.started else "after" if self.ended == self.blocks else "between"
        self.phases[name].add(phase)
        first = args[0] if args else next(iter(kwargs.values()), None)
        self.stand_ins[name] = _stand_in(first, output)


def outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Names of the modules outside of `blocks` that own parameters or drop out."""
    inside = tuple(f"{name}." for name in blocks)
    for name, module in model.named_modules():
        if name in blocks or name.startswith(inside):
            continue
        if any(parameter is not None for parameter in module._parameters.values()) or isinstance(module, DROPOUT):
            yield name


def stage_facts(
    model: nn.Module,
    lists: Sequence[Sequence[str]],
    ties: Sequence[Sequence[str]],
    watch: OrderWatch,
    is_chain: bool,
) -> StageFacts:
    """The facts of `model` from one watched forward."""
    order = tuple(watch.calls) if sorted(watch.calls) == sorted(name for names in lists for name in names) else ()
    if len(lists) != 1:
        return StageFacts(refusal=f"it has {len(lists)} lists of blocks", order=order)
    first = [name for name, phases in watch.phases.items() if phases == {"before"}]
    refusal = next(_refusals(model, lists[0], ties, watch, is_chain), "")
    if refusal:
        return StageFacts(refusal=refusal, order=order)
    return StageFacts(
        before={name: _own_parameters(model, name) for name in first},
        after={name: _own_parameters(model, name) for name in watch.phases if name not in first},
        stand_ins={name: stand_in for name in first if (stand_in := watch.stand_ins[name]) is not None},
        outputs=watch.outputs,
        hidden=() if isinstance(model, PreTrainedModel) else next(iter(watch.hidden))[1:],
    )


def _refusals(
    model: nn.Module, blocks: Sequence[str], ties: Sequence[Sequence[str]], watch: OrderWatch, is_chain: bool
) -> Iterator[str]:
    if not is_chain:
        yield "its blocks do not each take the hidden states from the one before"
    for name, phases in watch.phases.items():
        if not name or blocks[0].startswith(f"{name}."):
            yield f"{name or 'the model'!s} itself owns parameters and holds the blocks"
        if "between" in phases or len(phases) > 1:
            yield f"{name} runs between blocks, or both before and after them"
        if phases == {"before"} and watch.stand_ins[name] is None:
            yield f"the shape of what {name} returns does not follow from its input's"
    if not isinstance(model, PreTrainedModel):
        yield from _module_refusals(model, blocks, watch)
    inside = {name: f"{name}." for name in blocks}
    for group in ties:
        owners = {next((b for b, prefix in inside.items() if name.startswith(prefix)), "") for name in group}
        if len(owners) > 1:
            yield f"{group[0]} is tied from one block to another, or out of the blocks"


def _module_refusals(model: nn.Module, blocks: Sequence[str], watch: OrderWatch) -> Iterator[str]:
    """Of a user's own module, whose hidden states may be anything."""
    if len(watch.hidden) != 1 or () in watch.hidden:
        yield "its blocks return hidden states of several shapes, or none"
    for name in blocks:
        if any(True for _ in model.get_submodule(name).buffers()):
            yield f"the block {name} holds buffers, and a stage keeps those of its own blocks alone"
            return


def _own_parameters(model: nn.Module, name: str) -> int:
    parameters: Mapping[str, nn.Parameter | None] = model.get_submodule(name)._parameters
    return sum(parameter.numel() for parameter in parameters.values() if parameter is not None)


def _stand_in(first: Any, output: Any) -> StandIn | None:
    """How the output's shape follows from the first argument's."""
    if not isinstance(first, Tensor) or not isinstance(output, Tensor):
        return None
    if output.shape == first.shape:
        return StandIn("same")
    if output.shape[:-1] == first.shape:
        return StandIn("appended", output.shape[-1])
    if output.shape[:-1] == first.shape[:-1]:
        return StandIn("replaced", output.shape[-1])
    return None
