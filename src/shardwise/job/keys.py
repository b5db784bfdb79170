"""The dotted keys of a Job: which there are, what they accept, and how a wrong one is explained.

Everything is read from the pydantic models of `shardwise.job.schema`, so a new field needs nothing here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardwise.errors import ConfigError
from shardwise.job.schema import Job, Section
from shardwise.job.smp_options import BY_NAME
from shardwise.words import one_of


@cache
def leaf_keys() -> dict[str, FieldInfo]:
    """Return every key that holds a value, dotted, in the order of the Job."""
    return dict(_walk(Job, ""))


@cache
def sections() -> dict[str, type[Section]]:
    """Return the sections by dotted name; the Job itself is ``."""
    return dict(_sections(Job, ""))


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        if _is_section(info.annotation):
            yield from _walk(info.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}", info


def _sections(section: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    yield name, section
    for child, info in section.model_fields.items():
        if _is_section(info.annotation):
            yield from _sections(info.annotation, f"{name}.{child}".lstrip("."))  # type: ignore[arg-type]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def kinds(annotation: Any) -> set[Any]:
    """Return the plain types and Literals that an annotation allows: `int | None` -> {int, NoneType}."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in kinds(part)}
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    return {get_origin(annotation) if get_origin(annotation) in (dict, list) else annotation}


def leaf_of(key: str) -> str:
    """The leaf that a dotted key belongs to: itself, or the dict above it (`optimizer.options.betas`).

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        leaf = ".".join(parts[:end])
        if leaf in leaf_keys() and (end == len(parts) or dict in kinds(leaf_keys()[leaf].annotation)):
            return leaf
    if key in sections():
        raise ConfigError(f"{key} is a section; set one of its keys: {_keys_in(key)}")
    raise ConfigError(f"unknown key {key}.{suggestion(key)}")


def is_switch(key: str) -> bool:
    return kinds(leaf_keys()[key].annotation) == {bool} if key in leaf_keys() else False


def _keys_in(section: str) -> str:
    return ", ".join(sections()[section].model_fields)


def suggestion(key: str) -> str:
    """Return what was probably meant by an unknown dotted key."""
    section, _, name = key.rpartition(".")
    namesakes = [leaf for leaf in leaf_keys() if leaf.rpartition(".")[2] == name]
    if namesakes:
        return f" Did you mean {one_of(repr(leaf) for leaf in namesakes)}?"
    if name in BY_NAME:
        return f" {name} is an SMP option: put it under `smp_options`."
    siblings = {f"{section}.{field}".lstrip("."): field for field in sections().get(section, Job).model_fields}
    last_names = {leaf: leaf.rpartition(".")[2] for leaf in leaf_keys()}
    for names, cutoff in ((siblings, 0.6), (last_names, 0.75)):
        close = difflib.get_close_matches(name, names.values(), n=1, cutoff=cutoff)
        if close:
            return f" Did you mean {next(full for full, last in names.items() if last == close[0])!r}?"
    return f" Known: {', '.join(siblings)}."


def explain(error: ValidationError) -> str:
    """pydantic's complaints, one line each: key, value, rule, nearest fix."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_key_at(item["loc"], item["type"]), []).append(dict(item))
    return "\n".join(_line(key, items) for key, items in found.items())


def _key_at(location: tuple[int | str, ...], kind: str) -> str:
    """The dotted key of pydantic's location, without the names of union members that it appends."""
    if kind == "extra_forbidden":
        return ".".join(str(part) for part in location)
    key = ""
    for part in location:
        longer = f"{key}.{part}".lstrip(".")
        if isinstance(part, int):
            return f"{key}[{part}]"
        if longer not in leaf_keys() and longer not in sections():
            return key
        key = longer
    return key


def _line(key: str, items: list[dict[str, Any]]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}={first['input']!r}.{suggestion(key)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key}={first['input']!r}: must be a section with keys of its own; known: {_keys_in(key)}"
    rules = dict.fromkeys(item["msg"].removeprefix("Input should be ").partition(", unable")[0] for item in items)
    return f"{key}={first['input']!r}: must be {one_of(rules)}{_fix(first)}"


def _fix(item: Mapping[str, Any]) -> str:
    """The nearest value that would have been taken."""
    context, value = item.get("ctx", {}), item["input"]
    for bound in ("ge", "le"):
        if bound in context:
            return f"; use {context[bound]}"
    if item["type"] == "literal_error":
        words = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        key = next((leaf for leaf in leaf_keys() if leaf.rpartition(".")[2] == value), None)
        if key is not None:
            return f"; or set {key}"
        close = difflib.get_close_matches(str(value), words, n=1, cutoff=0.5)
        return f"; use {close[0] if close else words[0]}"
    if item["type"] == "int_from_float":
        return f"; use {round(value)}"
    return ""


def refuse_stray_switches(data: Mapping[str, Any], section: str = "") -> None:
    """Refuse true and false where a number is wanted; pydantic would take them as 1 and 0."""
    for name, value in data.items():
        key = f"{section}.{name}".lstrip(".")
        if isinstance(value, Mapping) and key in sections():
            refuse_stray_switches(value, key)
        elif isinstance(value, bool) and key in leaf_keys() and kinds(leaf_keys()[key].annotation) & {int, float}:
            raise ConfigError(f"{key}={value}: must be a number, not true or false")
