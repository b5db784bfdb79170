"""Values that a user's code keeps beside parameters and buffers, as they were before its forward was tried.

A forward may count its calls, fill caches and collect losses: on modules, on classes, in globals of its file. It is
tried before training, on fake tensors. What it has changed is put back, so that training starts as if it had not been.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwise.model.containers import (
    COLLECTIONS,
    LIBRARIES,
    attributes_of,
    filled_cells,
    is_changeable,
    is_object,
    module_attributes,
    walk,
)

INITIALIZER = re.compile(r"_*(init|reset|build|make|load)")
MOST_ITEMS = 4096  # of a container that is looked into; a larger one is kept as it is, and what lies in it is not


@contextmanager
def user_state_kept(model: nn.Module, functions: Iterable[Callable[..., Any]] = ()) -> Iterator[None]:
    """Put back what runs inside of the user's code change, beside tensors.

    Args:
        model: whose classes' files and attributes are kept; those of libraries keep nothing.
        functions: hooks of the user's, whose variables are kept too.
    """
    modules = [module for module in model.modules() if _is_users(type(module))]
    holders = [*user_namespaces(modules), *modules]
    names = [(holder, _names_of(holder)) for holder in holders]
    cells = [(cell, cell.cell_contents) for function in functions for cell in filled_cells(function)]
    roots = [value for _, values in names for value in values.values()] + [value for _, value in cells]
    containers = [(value, _content_of(value)) for value in _changeable(roots)]
    try:
        yield
    finally:
        for cell, content in cells:
            cell.cell_contents = content
        for holder, values in names:
            _restore_names(holder, values)
        for container, content in containers:
            _restore_content(container, content)


def user_namespaces(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the Python modules in which classes of `modules` are defined, and the classes defined there."""
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__ if _is_users(base))
    files = dict.fromkeys(sys.modules[base.__module__] for base in classes if base.__module__ in sys.modules)
    of_files = (value for file in files for value in vars(file).values() if isinstance(value, type))
    classes |= dict.fromkeys(value for value in of_files if _is_users(value))
    return [*files, *classes]


def tensors_in(namespaces: Iterable[Any]) -> dict[int, str]:
    """Return the tensors with gradients that lie in globals and class attributes: identity -> where."""
    tensors: dict[int, str] = {}
    for holder in namespaces:
        for name, value in _names_of(holder).items():
            for inner in _walk_small([value]):
                if isinstance(inner, Tensor) and inner.grad_fn is not None:
                    tensors[id(inner)] = f"{name} of {holder.__name__}"
    return tensors


def mentions(model: nn.Module, attribute: str) -> bool:
    """Tell whether a user's code reads or writes an attribute of this name, outside of what fills parameters."""
    return is_mentioned(user_namespaces(model.modules()), attribute)


def is_mentioned(namespaces: Iterable[Any], attribute: str) -> bool:
    """Tell whether functions of Python modules and classes mention an attribute, but those that fill parameters."""
    functions = (value for holder in namespaces for value in vars(holder).values() if isinstance(value, FunctionType))
    codes = deque(function.__code__ for function in functions if not INITIALIZER.match(function.__name__))
    while codes:
        code = codes.popleft()
        if attribute in code.co_names:
            return True
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return False


def numbers_kept(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return the numbers that a user's modules, classes and files keep, in containers too, by where they are."""
    modules = [
        (f"{name}.".lstrip("."), type(model).__name__, module)
        for name, module in model.named_modules()
        if _is_users(type(module))
    ]
    holders = [("", holder.__name__, holder) for holder in user_namespaces(model.modules())]
    kept = {
        f"{prefix}{name} of {owner}": tuple(inner for inner in _walk_small([value]) if isinstance(inner, int | float))
        for prefix, owner, holder in (*modules, *holders)
        for name, value in _names_of(holder).items()
    }
    return {where: numbers for where, numbers in kept.items() if numbers}


def changed_number(earlier: Mapping[str, tuple[float, ...]], now: Mapping[str, tuple[float, ...]]) -> str:
    """Return where a number lies that is another now, or was not kept earlier; empty where there is none."""
    return next((where for where, numbers in now.items() if numbers != earlier.get(where)), "")


def _is_users(definition: type) -> bool:
    return not _is_of_library(definition)


def _is_of_library(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in LIBRARIES


def _names_of(holder: Any) -> dict[str, Any]:
    """Return what names of a Python module, class or nn.Module stand for, but functions, classes and modules."""
    values = module_attributes(holder) if isinstance(holder, nn.Module) else vars(holder)
    return {name: value for name, value in values.items() if not name.startswith("__") and _is_value(value)}


def _is_value(value: Any) -> bool:
    return not isinstance(value, ModuleType | type | nn.Module) and not hasattr(type(value), "__get__")


def _restore_names(holder: Any, values: dict[str, Any]) -> None:
    now = _names_of(holder)
    for name in now.keys() - values.keys():
        delattr(holder, name)
    for name, value in values.items():
        if now.get(name, holder) is not value:
            setattr(holder, name, value)
    for value in vars(holder).values():
        if isinstance(value, functools._lru_cache_wrapper) and not _is_of_library(value):
            value.cache_clear()


def _walk_small(values: Iterable[Any]) -> Iterator[Any]:
    return walk(*values, into_functions=True, most_items=MOST_ITEMS)


def _changeable(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in _walk_small(values) if is_changeable(value))


def _content_of(container: Any) -> tuple[dict[str, Any], Any]:
    """Return copies of the attributes of an object and of the items of a container; a user's may be both."""
    attributes = dict(attributes_of(container)) if is_object(container) else {}
    if isinstance(container, dict):
        return attributes, dict.copy(container)  # a subclass may not copy itself
    return attributes, list(container) if isinstance(container, COLLECTIONS) else []


def _restore_content(container: Any, content: tuple[dict[str, Any], Any]) -> None:
    """Let a container hold what it held, if it does not."""
    attributes, items = content
    if is_object(container):
        _restore_attributes(container, attributes)
    if not isinstance(container, COLLECTIONS):
        return
    now, before = _items(container), _items(items)
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    container.clear()
    container.extend(items) if isinstance(container, list | deque) else container.update(items)


def _restore_attributes(holder: Any, attributes: dict[str, Any]) -> None:
    now = attributes_of(holder)
    for name in [name for name in now if name not in attributes]:
        object.__delattr__(holder, name)
    for name, value in attributes.items():
        if now.get(name, holder) is not value:
            object.__setattr__(holder, name, value)


def _items(container: Any) -> list[Any]:
    """Return keys and values of a dict, or the items of another container."""
    return [*dict.keys(container), *dict.values(container)] if isinstance(container, dict) else list(container)
