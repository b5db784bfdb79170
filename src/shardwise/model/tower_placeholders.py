"""Placeholders for towers on stages that do not hold them: zeros in the form of what a tower would return.

How many hidden states a tower makes follows from values, such as the sizes of images. So its forward is rehearsed on
fake tensors, once for each form of its arguments; blocks that return what they are given in form run the first time
alone. What a tower would return reaches the language model by the hidden states alone, which arrive from the stage
before: nothing is computed with these zeros that anyone reads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.modules import clear_module_hooks
from shardwise._torch_compat.tracing import tree_leaves, tree_map
from shardwise.errors import ModelError
from shardwise.model.modules import empty_module
from shardwise.model.probe import copy_to_probe, output_on_fakes

MOST_FORMS = 256  # of arguments whose outputs are known; the oldest is dropped


class TowerPlaceholder:
    """The forward of a tower that a stage does not hold.

    Args:
        tower: whole; it stays as it is.
        blocks: names of its blocks, from the tower on.
        dtype: in which the stage that holds it computes with it.
        device: where this stage computes.
    """

    def __init__(
        self, name: str, tower: nn.Module, blocks: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name, self._tower, self._dtype, self._device = name, copy_to_probe(tower), dtype, device
        self._known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._keeps_form = dict.fromkeys(blocks, True)
        self._watches = [
            self._tower.get_submodule(block).register_forward_hook(partial(self._watch, block)) for block in blocks
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = tuple(map(_form, tree_leaves((args, kwargs))))
        if form not in self._known:
            self._known[form] = self._rehearsed(args, kwargs)
        while len(self._known) > MOST_FORMS:
            self._known.popitem(last=False)
        return tree_map(self._zeros, self._known[form])

    def _rehearsed(self, args: Any, kwargs: Any) -> Any:
        try:
            output = output_on_fakes(self._tower, (args, kwargs), self._dtype)
        except Exception as error:  # any code may run in a forward
            raise ModelError(
                f"what {self._name} would return for this batch cannot be told on a stage that does not hold it: "
                f"{type(error).__name__}: {error}; use pipeline_parallel_degree 1"
            ) from error
        self._skip_blocks()
        return output

    def _watch(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        forms = {(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in (*args[:1], output)}
        self._keeps_form[name] &= bool(args) and len(forms) == 1 and None not in forms

    def _skip_blocks(self) -> None:
        """Let blocks that keep the form of their input return it: rehearsing them all would take a second."""
        for watch in self._watches:
            watch.remove()
        for name in [name for name, keeps in self._keeps_form.items() if keeps]:
            empty_module(block := self._tower.get_submodule(name))  # its hooks stay, by which models keep hidden states
            block.forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign]
        self._watches, self._keeps_form = [], {}

    def _zeros(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)


def leave_out_towers(
    model: nn.Module,
    towers: Iterable[str],
    forward_of: Callable[[str], Callable[..., Any]],
    dtype: torch.dtype,
    device: torch.device,
) -> frozenset[str]:
    """Empty towers in place, and return the names of the modules that are gone; their parameters' dtype is still known.

    Args:
        forward_of: gives what calls of a tower run instead, by its name; asked while the tower is whole.
    """
    gone: set[str] = set()
    for name in towers:
        tower = model.get_submodule(name)
        forward = forward_of(name)
        gone.update(inner for inner, _ in tower.named_modules(prefix=name))
        empty_module(tower)
        clear_module_hooks(tower)
        tower.forward = forward  # type: ignore[method-assign]
        stands_for_all = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
        tower.parameters = lambda recurse=True, only=stands_for_all: iter((only,))  # type: ignore[method-assign,misc]
    return frozenset(gone)


def _form(leaf: Any) -> Any:
    """Return what counts of an argument: of integers and flags their values, of other tensors the shape."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    if leaf.is_floating_point() or leaf.is_meta:
        return leaf.shape, leaf.dtype
    content = leaf.detach().cpu().contiguous().numpy().tobytes()
    return leaf.shape, leaf.dtype, hashlib.sha256(content).digest()
