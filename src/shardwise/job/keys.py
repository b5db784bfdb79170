"""The dotted keys of a Job, as its YAML, its overrides and the command line name them."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.section import Section, leaves_of, listed_fields, plain_types, sections_of, suggestion


def leaf_keys() -> dict[str, FieldInfo]:
    """Return every key that holds a value, dotted, in the order of the Job."""
    return leaves_of(Job)


def sections() -> dict[str, type[Section]]:
    """Return the sections by dotted name; the Job itself is ``."""
    return sections_of(Job)


def leaf_of(key: str) -> str:
    """Return the leaf that a dotted key belongs to: itself, or the dict above it (`optimizer.options.betas`).

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        leaf = ".".join(parts[:end])
        if leaf in leaf_keys() and (end == len(parts) or dict in plain_types(leaf_keys()[leaf].annotation)):
            return leaf
    if key in sections():
        raise ConfigError(f"{key} is a section; set one of its keys: {listed_fields(Job, key)}")
    raise ConfigError(f"unknown key {key}.{suggestion(Job, key)}")


def is_switch(key: str) -> bool:
    """Return whether a key is true or false and nothing else."""
    return plain_types(leaf_keys()[key].annotation) == {bool} if key in leaf_keys() else False
