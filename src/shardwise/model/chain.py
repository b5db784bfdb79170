"""What the blocks of one list take from one another in a watched forward, and what all of them are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from shardwise._torch_compat import tree_leaves

Key = int | str  # of an argument: its position, or its name
HandedOn = tuple[dict[int, Key], str]  # number of an output -> argument of the next block; why they are not alike


class BlockWatch:
    """The calls of one block: its arguments, and what it returned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: tuple[Any, ...] = (None,)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((args, dict(kwargs)))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs = tuple(output) if isinstance(output, (tuple, list)) and output else (output,)

    @property
    def arguments(self) -> dict[Key, Any]:
        """Of the one call, by position or name."""
        args, kwargs = self.calls[0]
        given: dict[Key, Any] = dict(enumerate(args))
        return given | dict(kwargs)


def is_chain(watches: Sequence[BlockWatch]) -> bool:
    """Whether each block ran once, on the output of the one before it as its first positional argument."""
    if any(len(watch.calls) != 1 or not watch.calls[0][0] for watch in watches):
        return False
    return all(watch.calls[0][0][0] is previous.outputs[0] for previous, watch in pairwise(watches))


def share_arguments(watches: Sequence[BlockWatch]) -> bool:
    """Whether the blocks of a chain got the same arguments beyond the hidden states."""
    (_, *first_args), first_kwargs = watches[0].calls[0]
    others = ((args[1:], kwargs) for args, kwargs in (watch.calls[0] for watch in watches[1:]))
    return all(_same([args, kwargs], [tuple(first_args), first_kwargs]) for args, kwargs in others)


def handed_on(lists: Sequence[Sequence[BlockWatch]], encoded: Tensor | None, all_trained: bool) -> HandedOn:
    """What each block of a chain hands to the next, of what is made from weights: number of its output -> argument.

    Args:
        lists: of watched blocks, each a chain.
        encoded: the states of an encoder, which blocks of the other list may be given.
        all_trained: whether every parameter has a gradient; only then can what is made from weights be told.

    Returns:
        (outputs and arguments, or why they are not the same between all blocks or not all that is made from weights).
    """
    found: dict[int, Key] | None = None
    for watches in lists:
        for previous, watch in pairwise(watches):
            given = watch.arguments
            mine = {
                number: key
                for number, value in enumerate(previous.outputs)
                for key, argument in given.items()
                if isinstance(value, Tensor) and argument is value
                if number == 0 or value.requires_grad or not all_trained
            }
            if found is not None and mine != found:
                return found, f"{previous.name} does not hand on what the blocks before it do"
            found = mine
            other = [argument for key, argument in given.items() if key not in mine.values()]
            if any(leaf.requires_grad and leaf is not encoded for leaf in tree_leaves(other) if _is_tensor(leaf)):
                return found, f"{watch.name} is given what was made from weights before the block in front of it"
    return found or {0: 0}, ""


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _same(left: Any, right: Any) -> bool:
    """The same object, or equal plain data; two tensors are the same only if they are one object."""
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, Tensor):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return isinstance(left, (bool, int, float, str)) and left == right
