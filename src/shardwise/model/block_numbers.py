"""Notices numbers that a block's forward changes and code outside of the block may read: counters, flags, scales.

On a pipeline stage the blocks of other stages do not run, and what they would have changed is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from shardwise.model.user_state import is_mentioned, numbers_kept


class BlockNumbers:
    """Hooks on the blocks of a user's model.

    Attributes:
        changed: the block and where its number lies, of the first that was noticed.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self.model = model
        self.changed = ""
        self._earlier: dict[str, tuple[float, ...]] = {}
        for name in blocks:
            model.get_submodule(name).register_forward_pre_hook(self._start)
            model.get_submodule(name).register_forward_hook(partial(self._end, name))

    def _start(self, block: nn.Module, args: Any) -> None:
        self._earlier = numbers_kept(self.model)

    def _end(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        for where, numbers in numbers_kept(self.model).items():
            if self.changed or numbers == self._earlier.get(where):
                continue
            is_own = where.startswith(f"{name}.")
            attribute = where.partition(" of ")[0].rpartition(".")[2]
            if not is_own or is_mentioned(_classes_outside(self.model, block), attribute):
                self.changed = f"{name} changes the number {where}"


def _classes_outside(model: nn.Module, block: nn.Module) -> set[type]:
    """Return the classes of a model's modules that are none of the block's."""
    inside = {base for module in block.modules() for base in type(module).__mro__}
    return {base for module in model.modules() for base in type(module).__mro__} - inside
