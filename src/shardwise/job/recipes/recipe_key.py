"""A key of a recipe: what values it takes, and what it becomes in a job.

Each kind of recipe is one table of `RecipeKey` (`smp_keys`, `llmft_keys`), each key once. `translation` reads recipes
through them, and the reference page is generated from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.errors import ConfigError
from shardwise.job.sources import parse_yaml
from shardwise.words import one_of

ANY = object
MAPPED = "means the same here"
NODES = "nodes."  # what `launch.cluster` is made of: count, devices of each, instance_types
SHARDS = "parallel.sharded_data_parallel_degree"
NODE = 8  # ranks of a node, over which hybrid sharding shards where trainer.devices does not say it
CONFIG = "model.config."  # fields of the model's Hugging Face config


class NoEffect(NamedTuple):
    """A value that changes nothing, and why."""

    reason: str


class Refusal(NamedTuple):
    """A value that a job cannot hold: why, and the nearest way out."""

    reason: str


Values = Mapping[str, Any]  # of a whole recipe by dotted key, defaults of keys that are left out among them
Mapped = Mapping[str, Any] | NoEffect | Refusal


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe.

    Attributes:
        name: dotted; with `.*` at its end all keys below, and with `.*.` any one part.
        accepts: a type, ANY, or the allowed words.
        says: how it maps where that is not plain, or why it has no effect.
        maps: called with its value and all values; returns keys of the job, or why there are none.
        becomes: what it becomes, for the reference page.
        default: what the recipe's own program takes where the key is left out; None where that changes nothing.
        takes_null: whether null means something other than a key that is left out.
        never_acts: whether no value has an effect, and none is refused.
    """

    name: str
    accepts: Any
    says: str
    maps: Callable[[Any, Values], Mapped]
    becomes: str = ""
    default: Any = None
    takes_null: bool = False
    never_acts: bool = False

    def read(self, value: Any) -> Any:
        """Return a value of a recipe by this key's type; numbers may be text, and empty text is null.

        Raises:
            ValueError: it is of another type; the message says what it must be.
        """
        if value in (None, ""):
            return None
        if self.accepts is ANY or self.never_acts:
            return value
        if isinstance(self.accepts, tuple):
            if value not in self.accepts:
                raise ValueError(f"must be {one_of(self.accepts)}")
            return value
        if self.accepts in (int, float):
            return _number(value, self.accepts)
        if not isinstance(value, self.accepts):
            raise ValueError(f"must be of type {self.accepts.__name__}")
        return value


def _number(value: Any, kind: type) -> int | float:
    """Return a number, which YAML 1.1 reads as text where it is written 1e-5."""
    try:
        number = parse_yaml(value, f"{value!r}") if isinstance(value, str) else value
    except ConfigError as error:
        raise ValueError(f"must be a number: {error}") from None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError("must be a number")
    if kind is int and number != int(number):
        raise ValueError(f"must be a whole number; use {round(number)}")
    return int(number) if kind is int else number


def find_row(rows: Mapping[str, RecipeKey], name: str) -> RecipeKey | None:
    """Return the row of a key: its own, or the longest wildcard above it; None for a key that nobody knows."""
    parts = name.split(".")
    within = (".".join([*parts[:place], "*", *parts[place + 1 :]]) for place in range(1, len(parts) - 1))
    above = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts) - 1, 0, -1))
    return next((rows[candidate] for candidate in (name, *within, *above) if candidate in rows), None)


def renamed(name: str, accepts: Any, key: str, says: str = MAPPED, default: Any = None) -> RecipeKey:
    """Return a row whose value another key takes as it is."""
    return RecipeKey(name, accepts, says, lambda value, values: {key: value}, key, default)


def launch_name(value: str, values: Values) -> Mapped:
    """Return the name of a launch: lower-case letters, digits and `-`, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")
    return {"launch.name": name if name[:1].isalpha() else f"recipe-{name}".rstrip("-")}


def without_effect(name: str, accepts: Any, says: str, default: Any = None) -> RecipeKey:
    """Return a row that never has an effect."""
    return RecipeKey(name, accepts, says, lambda value, values: NoEffect(says), "", default, never_acts=True)


def only(name: str, allowed: Any, says: str, way_out: str) -> RecipeKey:
    """Return a row of which one value is taken, which changes nothing, and all others are refused."""

    def judge(value: Any, values: Values) -> Mapped:
        return NoEffect(says) if value == allowed else Refusal(f"{says}; {way_out}")

    return RecipeKey(name, ANY, says, judge)
