"""Reads the calls of a list of blocks in a recorded forward: what they hand to one another, and what all are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.autograd import attributes_of_users, version_of
from shardwise._torch_compat.tracing import tree_leaves
from shardwise.job.capability import SUPPORTED, Capability, refused
from shardwise.model.containers import copied, is_changeable, is_unchanged, walk

ArgumentKey = int | str  # position or name of an argument
HandedOn = dict[int, ArgumentKey]  # number of a block's output -> argument of the next block


class BlockCalls:
    """The calls of one block.

    Attributes:
        calls: positional and keyword arguments of each.
        outputs: of the last call.
        without_gradient: whether a call ran where gradients are off.
        writes_tensor: a call has written a tensor that it was given.
        writes_activation: and that tensor was made from weights.
        changes_container: a call has changed a list, a dict or an object that it was given.
        marks_tensor: a call has returned a tensor with attributes of the user's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.without_gradient = False
        self.outputs: tuple[Any, ...] = (None,)
        self.writes_tensor = False
        self.writes_activation = False
        self.changes_container = False
        self.marks_tensor = False
        self._returned: list[tuple[Tensor, int]] = []
        self._given: list[tuple[Tensor, int, bool]] = []
        self._containers: tuple[Any, Any] = ((), ())  # as they are, and as they were

    def record_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call; a forward pre-hook with keyword arguments."""
        self.calls.append((args, dict(kwargs)))
        self.without_gradient |= not torch.is_grad_enabled()
        given = list(walk(*args, *kwargs.values()))
        tensors = [value for value in given if isinstance(value, Tensor)]
        self._given = [(tensor, version_of(tensor), tensor.requires_grad) for tensor in tensors]
        containers = tuple(value for value in given if is_changeable(value))
        self._containers = containers, copied(containers, {})

    def record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record what a call returned; a forward hook."""
        self.outputs = tuple(output) if isinstance(output, (tuple, list)) and output else (output,)
        written = [is_activation for tensor, version, is_activation in self._given if version_of(tensor) != version]
        self.writes_tensor |= bool(written)
        self.writes_activation |= any(written)
        self.changes_container |= not is_unchanged(*self._containers, {})
        returned = [value for value in walk(output) if isinstance(value, Tensor)]
        self.marks_tensor |= any(attributes_of_users(tensor) for tensor in returned)
        self._returned += [(tensor, version_of(tensor)) for tensor in returned]

    @property
    def is_written_into(self) -> bool:
        """True if what a call has returned was written since, by the module around the blocks."""
        return any(version_of(tensor) != version for tensor, version in self._returned)

    @property
    def arguments(self) -> dict[ArgumentKey, Any]:
        """Arguments of the one call, by position or name."""
        args, kwargs = self.calls[0]
        return dict(enumerate(args)) | dict(kwargs)


def is_chain(blocks: Sequence[BlockCalls]) -> bool:
    """Tell whether each block ran once, on the output of the one before as its first positional argument."""
    if any(len(block.calls) != 1 or not block.calls[0][0] for block in blocks):
        return False
    return all(block.calls[0][0][0] is previous.outputs[0] for previous, block in pairwise(blocks))


def share_arguments(blocks: Sequence[BlockCalls]) -> bool:
    """Tell whether the blocks of a chain got the same arguments beyond the hidden states."""
    (_, *first_args), first_kwargs = blocks[0].calls[0]
    later_calls = ((args[1:], kwargs) for args, kwargs in (block.calls[0] for block in blocks[1:]))
    return all(_equal([args, kwargs], [tuple(first_args), first_kwargs]) for args, kwargs in later_calls)


def activation_arguments(blocks: Sequence[BlockCalls]) -> tuple[ArgumentKey, ...]:
    """Return positions and names of the arguments, in any call of a block, that are tensors made from weights."""
    calls = (dict(enumerate(args)) | kwargs for block in blocks for args, kwargs in block.calls)
    keys = (key for call in calls for key, value in call.items() if isinstance(value, Tensor) and value.requires_grad)
    return tuple(dict.fromkeys(keys))


def handed_on(
    chains: Sequence[Sequence[BlockCalls]], encoded: Tensor | None, all_trained: bool
) -> tuple[HandedOn, Capability]:
    """Return what each block of a chain hands to the next, of what is made from weights.

    Args:
        chains: lists of blocks, each a chain.
        encoded: the states of an encoder, which blocks of the other list may be given.
        all_trained: whether every parameter has a gradient; only then can what is made from weights be told.

    Returns:
        (outputs and arguments, whether these are the same between all blocks and all that is made from weights).
    """
    common: HandedOn | None = None
    for blocks in chains:
        for previous, block in pairwise(blocks):
            arguments = block.arguments
            passed = _passed(previous.outputs, arguments, all_trained)
            if common is not None and passed != common:
                return common, refused(f"{previous.name} does not hand on what the blocks before it do")
            common = passed
            rest = [argument for key, argument in arguments.items() if key not in passed.values()]
            if any(leaf.requires_grad and leaf is not encoded for leaf in tree_leaves(rest) if _is_tensor(leaf)):
                reason = f"{block.name} is given what was made from weights before the block in front of it"
                return passed, refused(reason)
    return common or {0: 0}, SUPPORTED


def _passed(outputs: Sequence[Any], arguments: dict[ArgumentKey, Any], all_trained: bool) -> HandedOn:
    """Return the outputs of a block that are arguments of the next: the first one, and those with a gradient."""
    return {
        number: key
        for number, output in enumerate(outputs)
        for key, argument in arguments.items()
        if isinstance(output, Tensor) and argument is output
        if number == 0 or output.requires_grad or not all_trained
    }


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _equal(left: Any, right: Any) -> bool:
    """Tell whether these are one object, or equal plain data; two tensors are equal only if they are one object."""
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, Tensor):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return isinstance(left, (bool, int, float, str)) and left == right
