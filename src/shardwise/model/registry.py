"""Finds the record of a model family by its model type, among the files of `shardwise.model.families`.

There is no list to edit: a file in that package that holds `FAMILY` is a family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from shardwise.model import families
from shardwise.model.family import Family


@cache
def known_families() -> Mapping[str, Family]:
    """Return the record of every family by model type, in the order of the files' names.

    Raises:
        TypeError: a file holds no `FAMILY`, or names a model type that another file names too.
    """
    records: dict[str, Family] = {}
    for file in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{file.name}")
        family = getattr(module, "FAMILY", None)
        if not isinstance(family, Family):
            raise TypeError(f"{module.__file__} holds no FAMILY, a record of shardwise.model.family.Family")
        if taken := sorted(set(family.model_types) & records.keys()):
            raise TypeError(f"{module.__file__} names the model type {taken[0]!r}, which another family has")
        records |= dict.fromkeys(family.model_types, family)
    return records


def family_of(model_type: str) -> Family:
    """Return the record of `model_type`; an empty one where no file has it."""
    return known_families().get(model_type) or Family((model_type,))
