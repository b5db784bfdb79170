"""What files of SMP's scripts may hold, and how they are read: nothing that they name is called.

Beside tensors and plain values scripts keep their arguments, numpy's numbers and a model's config. Those classes are
let in by name; anything else in a file is an error. The rest is torch's `weights_only=True`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.errors import CheckpointError

_SCALAR: Any = numpy.int64(0).__reduce__()[0]  # how numpy pickles a number, wherever its version keeps it
_DTYPES = {type(numpy.dtype(code)) for code in "?bhilqBHILQefd"}
_NUMPY = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_CONFIGS = ("transformers.models.", "transformers.configuration_utils")


def read(path: Path, map_location: Any = None) -> Any:
    """A file of `torch.save`, of what the head of this module says. Raises CheckpointError for any other."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    try:
        with allowing(path):
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # of pickle's class, of zipfile's, or torch's own
        refused = ", ".join(_unknown(path))
        why = f"it names {refused}" if refused else str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {why}; it has to hold tensors, plain values, numpy's numbers and configs of "
            "transformers only"
        ) from error


def allowing(path: str | os.PathLike[str]) -> AbstractContextManager[Any]:
    """While it lasts, torch lets in those classes among the ones that the file names which are known to be harmless."""
    known = [item for name in _names(path) if (item := _known(name)) is not None]
    manager: AbstractContextManager[Any] = torch.serialization.safe_globals([argparse.Namespace, *_DTYPES, *known])
    return manager


def for_scripts(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` for scripts older than its caution: files that SMP's functions read, it reads too."""

    @functools.wraps(load)
    def call(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is False or not isinstance(f, (str, os.PathLike)) or not os.path.isfile(f):
            return load(f, *args, **kwargs)
        with allowing(f):
            return load(f, *args, **kwargs)

    return call


def _names(path: str | os.PathLike[str]) -> list[str]:
    """Of classes and functions in the file that torch does not know by itself; nothing is loaded."""
    try:
        found: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no zip file, or a broken one: reading it says why
        return []
    return found


def _unknown(path: Path) -> list[str]:
    return [name for name in _names(path) if name != "argparse.Namespace" and _known(name) is None]


def _known(name: str) -> tuple[Any, str] | None:
    """(what the name stands for, the name), if it is a number of numpy's or a config of transformers."""
    module, _, leaf = name.rpartition(".")
    if name in _NUMPY:
        return _SCALAR, name
    if name == "numpy.dtype":
        return numpy.dtype, name
    if not module.startswith(_CONFIGS):
        return None
    from transformers import PreTrainedConfig

    try:
        kind = getattr(importlib.import_module(module), leaf, None)
    except ImportError:  # of a model that the installed version does not have
        return None
    return (kind, name) if isinstance(kind, type) and issubclass(kind, PreTrainedConfig) else None
