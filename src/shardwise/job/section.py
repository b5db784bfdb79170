"""A part of a Job as a pydantic model, its dotted keys, and how a wrong key or value is explained.

Everything is read from the fields of the models, so a new field needs nothing here. `shardwise.job.schema` holds the
models, `shardwise.job.keys` the keys of the whole Job.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from shardwise.errors import ConfigError
from shardwise.job.smp_options import BY_NAME
from shardwise.words import in_utf_8, nearest, one_of

LONGEST_NAME = 255  # bytes, of a file on every file system


def _user_path(path: str) -> str:
    """Return a path with `~` as the home directory, which no shell may have put in."""
    if not path:  # it would be the current directory, with whatever lies there
        raise PydanticCustomError("path", "a path that is not empty")
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.split("/")):
        raise PydanticCustomError("path", "a path whose parts have 255 bytes at most")
    if in_utf_8(path) != path:  # no checkpoint could hold it
        raise PydanticCustomError("path", "a path in UTF-8")
    if "\0" in path:
        raise PydanticCustomError("path", "a path without zero bytes")
    return os.path.expanduser(path)


UserPath = Annotated[str, AfterValidator(_user_path)]


class Section(BaseModel):
    """A part of the Job: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RootSection(Section):
    """A section that is in no other: what is wrong in it, wherever it comes from, is a ConfigError with dotted keys."""

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            _refuse_stray_switches(cls, data)
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(explain(cls, error)) from None


@cache
def leaves_of(root: type[Section]) -> dict[str, FieldInfo]:
    """Return every key below `root` that holds a value, dotted, in the order of the fields."""
    return dict(_walk(root, ""))


@cache
def sections_of(root: type[Section]) -> dict[str, type[Section]]:
    """Return the sections below `root` by dotted name; `root` itself is ``."""
    return dict(_sections(root, ""))


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


@cache
def item_sections_of(root: type[Section]) -> dict[str, type[Section]]:
    """Return the sections that stand in lists below `root`, by the dotted key of the list."""
    items = {key: (*get_args(info.annotation), None)[0] for key, info in leaves_of(root).items()}
    return {key: item for key, item in items.items() if _is_section(item)}


def plain_types(annotation: Any) -> set[Any]:
    """Return the plain types and Literals that an annotation allows: `int | None` -> {int, NoneType}."""
    if get_origin(annotation) in (Union, UnionType):
        return {plain for part in get_args(annotation) for plain in plain_types(part)}
    if get_origin(annotation) is Annotated:
        return plain_types(get_args(annotation)[0])
    return {get_origin(annotation) if get_origin(annotation) in (dict, list) else annotation}


def choices(field: FieldInfo) -> list[str]:
    """Return the words that a key takes, where it takes certain words alone or beside numbers."""
    alternatives = (
        get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
    )
    return [word for part in alternatives if get_origin(part) is Literal for word in get_args(part)]


def listed_fields(root: type[Section], section: str) -> str:
    """Return the names of the keys of a section, or of one in a list such as `data.sources[0]`, for messages."""
    known = item_sections_of(root).get(section.partition("[")[0]) or sections_of(root)[section]
    return ", ".join(known.model_fields)


def suggestion(root: type[Section], key: str) -> str:
    """Return what was probably meant by an unknown dotted key, for the end of a message."""
    section, _, name = key.rpartition(".")
    if item := item_sections_of(root).get(section.partition("[")[0]):
        return nearest(name, item.model_fields)
    namesakes = [leaf for leaf in leaves_of(root) if leaf.rpartition(".")[2] == name]
    if namesakes:
        return f" Did you mean {one_of(repr(leaf) for leaf in namesakes)}?"
    if name in BY_NAME:
        return f" {name} is an SMP option: put it under `smp_options`."
    siblings = {f"{section}.{field}".lstrip("."): field for field in sections_of(root).get(section, root).model_fields}
    last_names = {leaf: leaf.rpartition(".")[2] for leaf in leaves_of(root)}
    for names, cutoff in ((siblings, 0.6), (last_names, 0.75)):
        close = difflib.get_close_matches(name, names.values(), n=1, cutoff=cutoff)
        if close:
            return f" Did you mean {next(full for full, last in names.items() if last == close[0])!r}?"
    return f" Known: {', '.join(siblings)}."


def explain(root: type[Section], error: ValidationError) -> str:
    """Put pydantic's complaints in words, one line each: key, value, rule, nearest fix."""
    complaints: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        complaints.setdefault(_key_at(root, item["loc"], item["type"]), []).append(dict(item))
    return "\n".join(_line(root, key, items) for key, items in complaints.items())


def _key_at(root: type[Section], location: tuple[int | str, ...], complaint: str) -> str:
    """Return the dotted key of pydantic's location, without the names of union members that it appends."""
    if complaint == "extra_forbidden":
        return re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in location))
    key = ""
    for position, part in enumerate(location):
        longer = f"{key}.{part}".lstrip(".")
        if isinstance(part, int):
            of_item = location[position + 1 : position + 2] if key in item_sections_of(root) else ()
            return ".".join([f"{key}[{part}]", *map(str, of_item)])
        if longer not in leaves_of(root) and longer not in sections_of(root):
            return key
        key = longer
    return key


def _line(root: type[Section], key: str, items: list[dict[str, Any]]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}={first['input']!r}.{suggestion(root, key)}"
    if first["type"] == "missing":
        return f"{key} is missing beside {first['input']!r}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key}={first['input']!r}: must be a section with keys of its own; known: {listed_fields(root, key)}"
    rules = dict.fromkeys(item["msg"].removeprefix("Input should be ").partition(", unable")[0] for item in items)
    return f"{key}={first['input']!r}: must be {one_of(rules)}{_fix(root, first)}"


def _fix(root: type[Section], item: Mapping[str, Any]) -> str:
    """Return the nearest value that would have been taken."""
    context, value = item.get("ctx", {}), item["input"]
    for bound in ("ge", "le"):
        if bound in context:
            return f"; use {context[bound]}"
    if item["type"] == "bool_parsing":
        return "; use true or false"
    if item["type"] == "literal_error":
        words = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        key = next((leaf for leaf in leaves_of(root) if leaf.rpartition(".")[2] == value), None)
        if key is not None:
            return f"; or set {key}"
        close = difflib.get_close_matches(str(value), words, n=1, cutoff=0.5)
        return f"; use {close[0] if close else words[0]}"
    if item["type"] == "int_from_float":
        return f"; use {round(value)}"
    return ""


def _refuse_stray_switches(root: type[Section], data: Mapping[str, Any], section: str = "") -> None:
    """Refuse true and false where a number is wanted; pydantic would take them as 1 and 0."""
    for name, value in data.items():
        key = f"{section}.{name}".lstrip(".")
        if isinstance(value, Mapping) and key in sections_of(root):
            _refuse_stray_switches(root, value, key)
        elif isinstance(value, bool) and key in leaves_of(root) and _takes_numbers(leaves_of(root)[key]):
            raise ConfigError(f"{key}={value}: must be a number, not true or false")


def _takes_numbers(field: FieldInfo) -> bool:
    types = plain_types(field.annotation)
    return bool(types & {int, float}) and bool not in types
