"""A recipe as a job: every key acts, is noted with the reason why it has no effect, or is refused by name.

`translate_recipe` looks each key up in the table of the recipe's kind and collects what it becomes. What a recipe
leaves open and a run needs (the weights, the corpus) gets a path by name, and a note says what has to lie there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwise.errors import ConfigError
from shardwise.job.recipes.llmft_keys import LLMFT_KEYS
from shardwise.job.recipes.model_source import name_model
from shardwise.job.recipes.outcome import KeyOutcome
from shardwise.job.recipes.recipe_file import HyperPodRecipe, RecipeKind
from shardwise.job.recipes.recipe_key import CONFIG, NODES, NoEffect, RecipeKey, Refusal, find_row
from shardwise.job.recipes.smp_keys import SMP_KEYS
from shardwise.job.schema import Job
from shardwise.job.sources import validate
from shardwise.words import nearest

TABLES: dict[RecipeKind, tuple[RecipeKey, ...]] = {"smp": SMP_KEYS, "llmft": LLMFT_KEYS}
ROWS = {kind: {row.name: row for row in table} for kind, table in TABLES.items()}
OPEN_DATA = "data/train"  # where the corpus is looked for while the recipe leaves it open
OPEN = "null: as if it were left out"


@dataclass
class RecipeTranslation:
    """A recipe as keys of a job.

    Attributes:
        keys: dotted keys of the job with their values.
        nodes: what `launch.cluster` is made of: count, devices of each, instance_types.
        outcomes: one for each key of the recipe, then defaults of its own program that act.
        notes: what the user has to bring.
    """

    recipe: HyperPodRecipe
    keys: dict[str, Any]
    nodes: dict[str, Any]
    outcomes: list[KeyOutcome]
    notes: list[str]

    @property
    def refusals(self) -> list[KeyOutcome]:
        """The outcomes of refused keys."""
        return [outcome for outcome in self.outcomes if outcome.effect == "refused"]

    def require(self) -> None:
        """Raise ConfigError that names every refused key."""
        lines = [f"{refused.name}={refused.shown}: {refused.says}" for refused in self.refusals]
        if lines:
            raise ConfigError("\n".join([f"recipe {self.recipe.name!r} has keys that a job cannot hold:", *lines]))

    def job(self) -> Job:
        """Return the job. Raises ConfigError for refused keys and wrong values."""
        self.require()
        return validate(nested(self.keys))

    def job_text(self) -> str:
        """Return the job as a YAML file: what the recipe sets, then in comments what of it has no effect, and why."""
        data = self.job().model_dump(mode="json", exclude_unset=True)
        lines = [f"# The recipe {self.recipe.name} as a job."]
        lines += [f"# Note: {note}" for note in self.notes]
        return "\n".join([*lines, yaml.safe_dump(data, sort_keys=False, allow_unicode=True), *self._unused(), ""])

    def _unused(self) -> Iterator[str]:
        yield "# Keys of the recipe that have no effect here:"
        for outcome in self.outcomes:
            if outcome.effect == "no effect":
                yield f"# {outcome.name}={outcome.shown}: {outcome.says}"


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested plain data."""
    data: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return data


def translate_recipe(recipe: HyperPodRecipe, changes: Mapping[str, Any] | None = None) -> RecipeTranslation:
    """Return a recipe as keys of a job; what cannot be translated is among its outcomes as refused.

    Args:
        recipe: as `read_recipe` returns it.
        changes: dotted keys of the job, which stand above what the recipe says.
    """
    collected = _Collected(recipe)
    outcomes = [*map(collected.given, recipe.values), *map(collected.left_out, collected.defaults())]
    keys, nodes, config = collected.parted()
    keys |= changes or {}
    notes = [*name_model(recipe, keys, nested(config)), *_name_data(recipe, keys)]
    return RecipeTranslation(recipe, keys, nodes, [outcome for outcome in outcomes if outcome], notes)


@dataclass
class _Collected:
    """Keys of the job, while those of a recipe are gone through.

    Attributes:
        mapped: key of the job, of its nodes or of the model's config -> value and the key of the recipe that gave it.
    """

    recipe: HyperPodRecipe
    values: dict[str, Any] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read all values first: what a key becomes may depend on others."""
        self.values = {row.name: row.default for row in self.rows.values() if row.default is not None}
        for name, value in self.recipe.values.items():
            row = find_row(self.rows, name)
            try:
                read = row.read(value) if row else None
            except ValueError as error:
                self.mistakes[name] = str(error)
                continue
            if read is not None or (row and row.takes_null):
                self.values[name] = read

    @property
    def rows(self) -> Mapping[str, RecipeKey]:
        return ROWS[self.recipe.kind]

    def defaults(self) -> list[str]:
        """Return the keys that the recipe leaves out, and its own program has a default for."""
        return [name for name in self.values if name not in self.recipe.values]

    def given(self, name: str) -> KeyOutcome:
        """Return what becomes of a key of the recipe."""
        value, row = self.recipe.values[name], find_row(self.rows, name)
        if row is None:
            return self._unknown(name, value)
        if name in self.mistakes:
            return KeyOutcome(name, value, "refused", self.mistakes[name])
        if row.read(value) is None and not row.takes_null and name not in self.values:
            return KeyOutcome(name, None, "no effect", OPEN)
        return self._map(row, name, is_default=row.read(value) is None and not row.takes_null)

    def left_out(self, name: str) -> KeyOutcome | None:
        """Return what becomes of a default, where it acts."""
        outcome = self._map(self.rows[name], name, is_default=True)
        return None if outcome.effect == "no effect" else outcome

    def parted(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the keys of the job, what is said of its nodes, and the fields of the model's config."""
        parts: dict[str, dict[str, Any]] = {"": {}, NODES: {}, CONFIG: {}}
        for key, (value, _) in self.mapped.items():
            prefix = next(prefix for prefix in (NODES, CONFIG, "") if key.startswith(prefix))
            parts[prefix][key.removeprefix(prefix)] = value
        return parts[""], parts[NODES], parts[CONFIG]

    def _unknown(self, name: str, value: Any) -> KeyOutcome:
        if value in (None, {}) and any(known.startswith(f"{name}.") for known in self.rows):
            return KeyOutcome(name, None, "no effect", OPEN)
        section = name.rpartition(".")[0]
        known = [row.removesuffix(".*") for row in self.rows]
        siblings = [row for row in known if row.rpartition(".")[0] == section]
        return KeyOutcome(name, value, "refused", f"unknown key.{nearest(name, siblings or known)}")

    def _map(self, row: RecipeKey, name: str, is_default: bool) -> KeyOutcome:
        value = self.values[name]
        keys = row.maps(value, self.values)
        if isinstance(keys, NoEffect):
            return KeyOutcome(name, value, "no effect", keys.reason, is_default)
        if isinstance(keys, Refusal):
            return KeyOutcome(name, value, "refused", keys.reason, is_default)
        for key, mapped in keys.items():
            other, origin = self.mapped.setdefault(key, (mapped, name))
            if other != mapped:
                reason = f"disagrees with {origin}={self.values[origin]!r} about {key}; keep one"
                return KeyOutcome(name, value, "refused", reason, is_default)
        return KeyOutcome(name, value, "acts", ", ".join(f"{key}={mapped}" for key, mapped in keys.items()), is_default)


def _name_data(recipe: HyperPodRecipe, keys: dict[str, Any]) -> Iterator[str]:
    """Put where the corpus lies into `keys`, where the recipe leaves it open; yields what the user has to bring."""
    if "data.path" in keys or keys.get("data.format") == "stdlib":
        return
    keys["data.path"] = OPEN_DATA
    keys.setdefault("data.format", "tokens" if recipe.kind == "smp" else "text")
    yield f"data.path={OPEN_DATA}: the recipe leaves the corpus open; set --data.path"
