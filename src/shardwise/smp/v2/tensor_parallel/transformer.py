"""The classes that scripts name to FSDP's wrapping policy and to activation checkpointing.

Those of a transformed model's blocks, and of the attention in them.

Modules stay what they were, so the class of each becomes one that is both its own and the one that scripts name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn


class TransformerLayer(nn.Module):
    """Base of the blocks of a transformed model, for `isinstance`."""


TETransformerLayer = TransformerLayer  # its name in SMP 2.0


class MultiheadAttention(nn.Module):
    """Base of the attention in those blocks; scripts find it in Transformer Engine, which has a stand-in."""


def mark(model: nn.Module, names: Iterable[str], script_class: Any) -> None:
    """Let the named modules of `model` be of class `kind` too."""
    for name in names:
        module = model.get_submodule(name)
        cls: Any = type(module)
        module.__class__ = _marked(cls, script_class)


@functools.cache
def _marked(cls: Any, script_class: Any) -> type[nn.Module]:
    if issubclass(cls, script_class):
        return cls
    return type(cls.__name__, (cls, script_class), {"__module__": cls.__module__})
