"""The class that scripts name to FSDP's wrapping policy and to activation checkpointing: a transformed model's blocks.

Blocks stay what they were, so the class of each becomes one that is both its own and `TransformerLayer`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn


class TransformerLayer(nn.Module):
    """Base of the blocks of a transformed model, for `isinstance`."""


TETransformerLayer = TransformerLayer  # its name in SMP 2.0


def mark_blocks(model: nn.Module, names: Iterable[str]) -> None:
    """Let the blocks of `model` be `TransformerLayer`s."""
    for name in names:
        block = model.get_submodule(name)
        cls: Any = type(block)
        block.__class__ = _marked(cls)


@functools.cache
def _marked(cls: Any) -> type[nn.Module]:
    if issubclass(cls, TransformerLayer):
        return cls
    return type(cls.__name__, (cls, TransformerLayer), {"__module__": cls.__module__})
