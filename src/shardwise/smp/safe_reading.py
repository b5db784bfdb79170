"""Files of SMP's scripts, read so that nothing that they name is called.

Beside tensors and plain values scripts keep their arguments, dicts with defaults, numpy's numbers, a model's config and
the shards of FSDP's local state; those of 2021 and 2022 also keep their loss scaler, an object of a class of their own.
Those classes are let in by name, a script's own where it has loaded them from files beside it, configs of remote code
where it has let transformers load that; anything else in a file is an error. The rest is torch's `weights_only=True`.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise._torch_compat.fsdp1 import ShardedTensor
from shardwise.errors import CheckpointError

_SCALAR: Any = numpy.int64(0).__reduce__()[0]  # how numpy pickles a number, wherever its version keeps it
_DTYPES = {type(numpy.dtype(code)) for code in "?bhilqBHILQefd"}
_NUMPY = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
# What a ShardedTensor is made of: plain records, and a device's name.
_SHARDS = {
    f"torch.distributed.{name}"
    for name in (
        "_shard.sharded_tensor.api.ShardedTensor", "_shard.sharded_tensor.shard.Shard", "_shard.metadata.ShardMetadata",
        "_shard.sharded_tensor.metadata.ShardedTensorMetadata", "_shard.sharded_tensor.metadata.TensorProperties",
        "_shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "_shard.sharding_spec.api.EnumerableShardingSpec", "_shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "remote_device._remote_device",
    )
}  # fmt: skip
# Of what kind a defaultdict's defaults are.
_FACTORIES: dict[str, Any] = {f"builtins.{factory.__name__}": factory for factory in (dict, list, int, float)}
_NOTHING: Mapping[str, Any] = {}
_CONFIGS = ("transformers.models.", "transformers.configuration_utils")
_REMOTE = "transformers_modules."  # what transformers loads for `trust_remote_code=True`


def read_safely(path: Path, map_location: Any = None, instead: Mapping[str, Any] = _NOTHING) -> Any:
    """Read a file of `torch.save`, of what the head of this module says. Raises CheckpointError for any other.

    Args:
        instead: classes by the names that are to stand for them.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    try:
        with allowing(path, instead):
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # of pickle's class, of zipfile's, or torch's own
        refused = ", ".join(_unknown(path))
        why = f"it names {refused}" if refused else str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {why}; it has to hold tensors, plain values, numpy's numbers, configs of "
            "transformers and objects of the script's own classes only"
        ) from error


def allowing(
    path: str | os.PathLike[str] | io.BytesIO, instead: Mapping[str, Any] = _NOTHING
) -> AbstractContextManager[Any]:
    """Let torch read, while it lasts, the classes that the file names and that are known to be harmless."""
    candidates = [(instead[name], name) if name in instead else _known(name) for name in names_in(path)]
    known = [item for item in candidates if item is not None]
    plain = (argparse.Namespace, ShardedTensor.ProcessGroupState, *_DTYPES)
    manager: AbstractContextManager[Any] = torch.serialization.safe_globals([*plain, *known])
    return manager


def load_for_scripts(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` for scripts older than its caution: files that SMP's functions read, it reads too."""

    @functools.wraps(load)
    def call(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is False or not isinstance(f, (str, os.PathLike)) or not os.path.isfile(f):
            return load(f, *args, **kwargs)
        with allowing(f):
            return load(f, *args, **kwargs)

    return call


def names_in(path: str | os.PathLike[str] | io.BytesIO) -> list[str]:
    """List the classes and functions in the file that torch does not know by itself; nothing is loaded."""
    try:
        names: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no zip file, or a broken one: reading it says why
        return []
    return names


def _unknown(path: Path) -> list[str]:
    return [name for name in names_in(path) if name != "argparse.Namespace" and _known(name) is None]


def _member(owner: Any, name: str) -> Any:
    """Stand in for `getattr`, which pickles members of enums (until Python 3.11) and a class inside of ShardedTensor.

    Nothing else can be asked for.
    """
    if isinstance(owner, type) and issubclass(owner, ShardedTensor) and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise CheckpointError(f"a file asks for {name!r} of {owner!r}, which is neither an enum nor of a ShardedTensor")
    return owner[name]


def _without_default(factory: Any = None) -> dict[Any, Any]:
    """Stand in for `collections.defaultdict`, which torch does not fill, with a plain dict."""
    return {}


def _of_script(module: str, leaf: str) -> Any:
    """Return what stands for a class of the script's own, from files below its directory.

    A config of a model whose code it has let transformers load is let in too.
    """
    main, loaded = getattr(sys.modules.get("__main__"), "__file__", None), sys.modules.get(module)
    script_class, file = getattr(loaded, leaf, None), getattr(loaded, "__file__", None)
    if not (main and file and isinstance(script_class, type) and script_class.__module__ == module):
        return None
    beside = Path(file).resolve().is_relative_to(Path(main).resolve().parent)
    return _blank(script_class) if beside or (module.startswith(_REMOTE) and _is_config(script_class)) else None


def _blank(script_class: type) -> Any:
    """Return a stand-in for a script's class, whose objects get a file's attributes; nothing of the class is called.

    That of an enum finds its members by value. None stands for a class that no other may follow.
    """
    if issubclass(script_class, enum.Enum):
        return script_class._value2member_map_.__getitem__
    try:

        class Blank(script_class):  # type: ignore[valid-type,misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return object.__new__(cls)

            def __init__(self, *args: Any, **kwargs: Any) -> None: ...

            def __setstate__(self, values: dict[str, Any]) -> None:
                self.__class__ = script_class
                self.__dict__ |= values

    except TypeError:
        return None
    return Blank


def _known(name: str) -> tuple[Any, str] | None:
    """Return (what the name stands for, the name), if it is of plain dicts, numpy's numbers, shards, or a config."""
    module, _, leaf = name.rpartition(".")
    if name in _NUMPY:
        return _SCALAR, name
    if name == "collections.defaultdict":
        return _without_default, name
    if name in _FACTORIES:
        return _FACTORIES[name], name
    if name == "numpy.dtype":
        return numpy.dtype, name
    if name == "builtins.getattr":
        return _member, name
    if name in _SHARDS:
        return getattr(importlib.import_module(module), leaf), name
    if (stand_in := _of_script(module, leaf)) is not None:
        return stand_in, name
    if not module.startswith(_CONFIGS):
        return None
    try:
        config_class = getattr(importlib.import_module(module), leaf, None)
    except ImportError:  # of a model that the installed version does not have
        return None
    return (config_class, name) if _is_config(config_class) else None


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, type) and issubclass(value, PreTrainedConfig)
