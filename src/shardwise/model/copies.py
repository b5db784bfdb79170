"""Copies of a module tree on which a forward is tried, also where modules keep what Python cannot copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from io import IOBase
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from shardwise._torch_compat.modules import hook_tables
from shardwise.errors import ModelError
from shardwise.model.containers import captured, filled_cells, module_attributes, walk

CopiedModule = TypeVar("CopiedModule", bound=nn.Module)


def deep_copy(model: CopiedModule, shared: Iterable[Any] = ()) -> CopiedModule:
    """Return a copy of a module tree.

    Functions on modules, such as a forward that is wrapped, are of the copy too. What Python cannot copy, such as a
    lock, an open file or a writer of logs, the copies have in common.

    Args:
        shared: objects that the copies have in common besides.

    Raises:
        ModelError: a module keeps a generator, of which no two can have the same place.
    """
    same = {id(value): value for value in shared}
    memo = dict(same)
    try:
        copied = copy.deepcopy(model, memo)
    except TypeError:  # of an object that cannot be pickled
        memo = same | {id(value): value for value in _uncopyable(model)}
        copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        tables: list[dict[Any, Any]] = [vars(module), *hook_tables(module)]
        for table in tables:
            for key, value in table.items():
                if isinstance(value, FunctionType):
                    table[key] = _of_copy(value, memo)
    return copied


def _of_copy(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function that has captured the copies of the modules that `function` has."""
    if not isinstance(function, FunctionType) or not any(_is_bound(value, memo) for value in captured(function)):
        return function
    if id(function) not in memo:
        cells = [CellType(_captured_copy(cell.cell_contents, memo)) for cell in filled_cells(function)]
        if len(cells) != len(function.__closure__ or ()):
            return function
        twin = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        memo[id(function)] = twin
    return memo[id(function)]


def _is_bound(value: Any, memo: dict[int, Any]) -> bool:
    """Tell whether `value` is a module that was copied, a method of one, or a function that has captured one."""
    if isinstance(value, FunctionType):
        return any(_is_bound(inner, memo) for inner in captured(value) if inner is not value)
    return id(value.__self__ if isinstance(value, MethodType) else value) in memo and not isinstance(value, Tensor)


def _captured_copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, MethodType):
        return MethodType(value.__func__, memo.get(id(value.__self__), value.__self__))
    return _of_copy(value, memo) if isinstance(value, FunctionType) else memo.get(id(value), value)


def _uncopyable(model: nn.Module) -> Iterator[Any]:
    modules = {id(module): module for module in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in module_attributes(module).items():
            for inner in walk(value):
                if isinstance(inner, Tensor | nn.Module) or _can_be_copied(inner, modules):
                    continue
                if hasattr(inner, "__next__") and not isinstance(inner, IOBase):
                    where = f"{name}.{attribute}".lstrip(".")
                    raise ModelError(
                        f"{where} of {type(model).__name__} keeps a {type(inner).__name__}, which cannot be copied, "
                        "nor its place saved; keep a list and a number"
                    )
                yield inner


def _can_be_copied(value: Any, modules: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(modules))
    except Exception:  # any code may run in a copy
        return False
    return True
