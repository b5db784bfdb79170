"""Walks through what a module is given and returns: containers, tuples and objects, with the tensors in them."""

from __future__ import annotations

import copy
import functools
import math
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

COLLECTIONS = (list, dict, set, deque)
PLAIN = (bool, int, float, complex, str, bytes, set)
NAMESPACES = (SimpleNamespace, Namespace)
LIBRARIES = sys.stdlib_module_names | {"torch", "transformers", "shardwise", "numpy"}
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def is_record(value: Any) -> bool:
    """Return True for an object of a dataclass, not for the class."""
    return is_dataclass(value) and not isinstance(value, type)


def is_object(value: Any) -> bool:
    """Return True for an object of a user's class with attributes, such as one that collects losses.

    Modules, functions, and objects of libraries, which lead far, are none.
    """
    if is_record(value) or type(value) in NAMESPACES:
        return True
    if isinstance(value, Tensor | nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in LIBRARIES


def is_changeable(value: Any) -> bool:
    """Return True if a block can change `value` in place, other than a tensor."""
    return isinstance(value, COLLECTIONS) or is_object(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name."""
    if is_record(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return vars(value)


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's own code has set: no parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def walk(*values: Any, into_functions: bool = False, most_items: float = math.inf) -> Iterator[Any]:
    """Yield `values` and what lies in them at any depth, each object once.

    Args:
        into_functions: whether what functions have captured lies in them.
        most_items: of a container that is looked into; a larger one is yielded alone.
    """
    visited: set[int] = set()
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        yield value
        items = [*items_of(value), *(captured(value) if into_functions else ())]
        if len(items) <= most_items:
            waiting.extend(items)


def items_of(value: Any) -> list[Any]:
    """Return what lies in a container, a tuple or an object, one level deep."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, dict):
        return list(dict.values(value))  # a subclass may make them when asked, as transformers' tables of classes do
    if isinstance(value, (tuple, list, set, deque)):
        return list(value)
    return list(attributes_of(value).values()) if is_object(value) else []


def captured(function: Any) -> list[Any]:
    """Return the values that a function has from where it was made: variables around it, defaults, bound arguments."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in LIBRARIES:
        return []
    variables = [cell.cell_contents for cell in filled_cells(function)]
    return [*variables, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def filled_cells(function: Any) -> Iterator[Any]:
    """Yield the cells of the variables around a function, where these have values."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it has none yet
            _ = cell.cell_contents
            yield cell


Pairs = dict[int, tuple[Any, Any]]  # `id` of an object -> (the object, what takes its place)


def pairs_of(objects: Iterable[Any], others: Iterable[Any]) -> Pairs:
    """Return the pairs by which `replace_objects` puts each of `others` in the place of one of `objects`."""
    return {id(value): (value, other) for value, other in zip(objects, others, strict=True)}


def replace_objects(value: Any, pairs: Pairs) -> Any:
    """Return `value` with other objects in it: in place in lists, dicts and dataclasses, a new tuple for a tuple.

    Args:
        pairs: what is replaced; each container that is met is added with what becomes of it.
    """
    if id(value) in pairs:
        return pairs[id(value)][1]
    pairs[id(value)] = (value, value)
    if isinstance(value, tuple):
        return _new_tuple(value, [replace_objects(item, pairs) for item in value], pairs)
    if isinstance(value, list | dict) or is_record(value):
        for key, item in list(_slots(value)):
            other = replace_objects(item, pairs)
            if other is not item:
                _put(value, key, other)
    return value


def copied(value: Any, pairs: Pairs) -> Any:
    """Return a copy of containers and objects, at any depth, that holds the same tensors.

    Args:
        pairs: objects with their copies; filled here.
    """
    if id(value) in pairs:
        return pairs[id(value)][1]
    pairs[id(value)] = (value, value)
    if isinstance(value, tuple):
        return _new_tuple(value, [copied(item, pairs) for item in value], pairs)
    if not is_changeable(value):
        return value
    try:
        twin = copy.copy(value)
    except Exception:  # an object of a user's class that cannot be copied is not looked into
        return value
    pairs[id(value)] = (value, twin)
    for key, item in list(_slots(twin)):
        _put(twin, key, copied(item, pairs))
    return twin


def is_unchanged(value: Any, earlier: Any, originals: Mapping[int, Any]) -> bool:
    """Return True if `value` holds what its copy `earlier` holds, at any depth.

    Args:
        originals: `id` of an object in `earlier` -> the object of which it is a copy.
    """
    if isinstance(value, tuple | list | deque | dict) or is_object(value):
        pairs = zip(items_of(value), items_of(earlier)) if type(value) is type(earlier) else ()
        return len(items_of(value)) == len(items_of(earlier)) and all(is_unchanged(*pair, originals) for pair in pairs)
    if isinstance(value, Tensor):
        return value is earlier or value is originals.get(id(earlier))
    return value is earlier or (type(value) is type(earlier) and isinstance(value, PLAIN) and value == earlier)


def _new_tuple(value: tuple[Any, ...], items: list[Any], pairs: Pairs) -> tuple[Any, ...]:
    if all(other is item for other, item in zip(items, value, strict=True)):
        return value
    new: tuple[Any, ...] = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    pairs[id(value)] = (value, new)
    return new


def _slots(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return (key, item) of what lies in a changeable object; the items of a set have no place of their own."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | deque):
        return enumerate(value)
    return attributes_of(value).items() if is_object(value) else ()


def _put(value: Any, key: Any, item: Any) -> None:
    if isinstance(value, dict | list | deque):
        value[key] = item
    else:
        object.__setattr__(value, key, item)  # a frozen dataclass too
