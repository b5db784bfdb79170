"""Reading a Job: YAML file, dict, SMP options, environment and command line become one validated Job.

Precedence, weakest first: defaults, the source (file, dict or Job), `SM_HP_MP_PARAMETERS`, dotted overrides. A value
that cannot be read raises ConfigError with the dotted key, the value, the rule and the nearest fix.
"""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.errors import ConfigError
from shardwise.job.keys import is_switch, leaf_keys, leaf_of
from shardwise.job.schema import Job
from shardwise.job.section import choices, plain_types
from shardwise.job.smp_options import is_smp, translate
from shardwise.words import nearest_file

ENVIRONMENT = "SM_HP_MP_PARAMETERS"
SMP_KEY = "smp_options"
Source = str | os.PathLike[str] | Mapping[str, Any] | Job | None
Overrides = Sequence[str] | Mapping[str, Any]
JOB_SUFFIXES = (".yaml", ".yml", ".json")
SWITCH_WORDS = frozenset(["true", "false", "yes", "no", "on", "off", "1", "0"])


class SmpOptionWarning(UserWarning):
    """An SMP option has no effect here, or another one than its reader may expect."""


class LoadedJob(NamedTuple):
    """A job, and what its user should know about how it was read."""

    job: Job
    notes: tuple[str, ...] = ()


def load_job(source: Source = None, overrides: Overrides = (), environ: Mapping[str, str] | None = None) -> Job:
    """The Job of a source. Notes about SMP options are issued as warnings; `read_job` returns them instead.

    Args:
        source: path of a YAML file, a nested dict, SMP's options in any of their forms, a Job, or None for the default.
        overrides: words of a command line (`["--training.steps", "30"]`, `["training.steps=30"]`) or a mapping of
            dotted keys (`{"training.steps": 30}`).
        environ: where `SM_HP_MP_PARAMETERS` is looked up; None: `os.environ`.
    """
    loaded = read_job(source, overrides, environ)
    for note in loaded.notes:
        warnings.warn(note, SmpOptionWarning, stacklevel=2)
    return loaded.job


def read_job(source: Source = None, overrides: Overrides = (), environ: Mapping[str, str] | None = None) -> LoadedJob:
    """As `load_job`, with the notes."""
    data, options = _split(_data_of(source))
    notes = _apply_smp(data, options, _environment(environ))
    for key, value in _items(overrides):
        _set(data, key, value)
    return LoadedJob(validate(data), tuple(dict.fromkeys(notes)))


def job_to_yaml(job: Job) -> str:
    """The whole job, every default written out; `load_job` reads it back."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def validate(data: Mapping[str, Any]) -> Job:
    """Return the Job of nested plain data. Raises ConfigError that explains every wrong key."""
    return Job.model_validate(data)


def overlay(job: Job, path: str | os.PathLike[str]) -> LoadedJob:
    """`job` with the keys of another YAML file on top, e.g. another layout of the same job."""
    data, options = _split(_data_of(path))
    notes = _apply_smp(data, options, {})
    merged = _merged(job.model_dump(exclude_unset=True), data)
    return LoadedJob(validate(merged), tuple(notes))


# ---------------------------------------------------------------------------------------------------------- sources


def _data_of(source: Source) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Job):
        return source.model_dump(exclude_unset=True)
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a job cannot be read from {source!r}; give the path of a YAML file, a mapping of sections, SMP's options "
            "or a Job"
        )
    return _read_file(Path(source).expanduser())


def require_job(job: object, caller: str) -> Job:
    """Return `job`, which `caller` was given. Raises ConfigError where it is no Job."""
    if isinstance(job, Job):
        return job
    raise ConfigError(
        f"{caller} takes a Job, not {job!r}; shardwise.load_job makes one of a path, a mapping of sections or SMP's "
        "options"
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"job file {str(path)!r} does not exist.{nearest_file(path, *JOB_SUFFIXES)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job file {str(path)!r} cannot be read: {error}; give a YAML file in UTF-8") from None
    data = parse_yaml(text, f"job file {str(path)!r}")
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds {type(data).__name__} at its top"
        raise ConfigError(f"job file {str(path)!r} {what}; it must hold sections, e.g. `training: {{steps: 30}}`")
    return data


def _split(data: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Our own keys, and SMP's options: the whole of `data` or what stands under `smp_options`."""
    if not set(data) & {*Job.model_fields, SMP_KEY} and is_smp(data):
        return {}, data
    options = data.pop(SMP_KEY, {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"{SMP_KEY}={options!r}: must be a mapping of SMP's keys to values")
    return {key: {} if value is None and key in Job.model_fields else value for key, value in data.items()}, options


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, Any]:
    text = (os.environ if environ is None else environ).get(ENVIRONMENT)
    if not text:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{ENVIRONMENT}={text!r}: must be a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f'{ENVIRONMENT}={text!r}: must be a JSON object, e.g. {{"sharded_data_parallel_degree": 2}}')
    return options


def _apply_smp(data: dict[str, Any], options: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Put translated options into `data` and return the notes. Those of the source must agree with its other keys."""
    own, launcher = translate(options), translate(environment)
    for key, value in own.values.items():
        if _has(data, key) and _get(data, key) != value:
            raise ConfigError(f"{key}={_get(data, key)} and {SMP_KEY} {own.origins[key]} disagree; keep one")
    for key, value in {**own.values, **launcher.values}.items():
        _set(data, key, value)
    notes = [*own.notes, *launcher.notes]
    for key, (value, note) in {**own.defaults, **launcher.defaults}.items():
        if not _has(data, key):
            _set(data, key, value)
            notes.append(note)
    return notes


# ------------------------------------------------------------------------------------------------------------- YAML


class _OtherBase(yaml.constructor.ConstructorError):
    """A number that YAML 1.1 does not read as a decimal."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 wants 1.0e-3) and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            keys.add(key.value if isinstance(key.value, str) else repr(key.value))
        return super().construct_mapping(node, deep)

    def construct_plain_number(self, node: yaml.ScalarNode) -> Any:
        """Refuse numbers that YAML 1.1 reads to another base than their reader: 010 is 8, and 1:30 is 90."""
        number = self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        digits = node.value.lstrip("+-").replace("_", "")
        base = "sixty" if ":" in digits else "eight" if re.fullmatch("0[0-7]+", digits) else ""
        if base == "sixty" or (base and node.tag.endswith(":int")):
            raise _OtherBase(
                None, None,
                f"{node.value} is a number to the base {base}; write {number}, or {_meant(node.value)}",
                node.start_mark,
            )  # fmt: skip
        return number


def _meant(text: str) -> str:
    """Return what else may be meant by a number to another base."""
    return f"'{text}' where it is text" if ":" in text else f"{int(text)} where that is meant"


_EXPONENT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_plain_number)


def parse_yaml(text: str, what: str) -> Any:
    """The value of YAML (so also JSON) text; `what` names it in the error."""
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        verdict = "cannot be read" if isinstance(error, _OtherBase) else "is not YAML"
        raise ConfigError(f"{what} {verdict}{place}: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:  # a date that is none
        raise ConfigError(f"{what} cannot be read: {error}; quote what is text") from None
    except RecursionError:
        raise ConfigError(f"{what} cannot be read: its brackets stand in each other too deeply") from None


# -------------------------------------------------------------------------------------------------------- overrides


def take_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a command line into words without the dotted options (`--training.steps 30`), and those as key and text."""
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
        else:
            key = name[2:]
            leaf_of(key)
            pairs.append((key, text if equals else _next_value(key, queue)))
    _refuse_repeated(pairs)
    return rest, pairs


def _next_value(key: str, queue: list[str]) -> str:
    """Take the word after an option without `=`; a switch alone is true."""
    if is_switch(key) and (not queue or queue[0].startswith("--") or _is_job_file(queue[0])):
        return "true"
    if not queue or queue[0].startswith("--"):
        raise ConfigError(f"--{key} needs a value, e.g. --{key}={_example(key)}")
    return queue.pop(0)


def _is_job_file(word: str) -> bool:
    """Return whether the word after a switch is the command's job rather than the switch's value."""
    return word.lower() not in SWITCH_WORDS and (Path(word).suffix in JOB_SUFFIXES or Path(word).exists())


def _example(key: str) -> str:
    """Return a value that the key takes, other than its default, which nobody has to give."""
    field = leaf_keys()[leaf_of(key)]
    default = field.get_default(call_default_factory=True)
    words = [word for word in choices(field) if word != default]
    if words:
        return words[0]
    if isinstance(default, int | float):
        return str(default // 2 if isinstance(default, int) and default > 1 else default / 2 or 1)
    return "VALUE"


def _items(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    if isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides):
        yield from overrides.items()
        return
    if isinstance(overrides, Mapping | str) or not _are_words(overrides):
        raise ConfigError(f"overrides={overrides!r} must be words of a command line, or a mapping of dotted keys")
    rest, pairs = take_overrides(overrides)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"override {word!r} must be --section.key value or section.key=value")
        pairs.append((key, text))
    _refuse_repeated(pairs)
    for key, text in pairs:
        yield key, read_value(key, text)


def _are_words(overrides: object) -> bool:
    return isinstance(overrides, Sequence) and all(isinstance(word, str) for word in overrides)


def _refuse_repeated(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse a key that is given twice: which of the two is meant nobody can tell."""
    texts: dict[str, str] = {}
    for key, text in pairs:
        if key in texts:
            raise ConfigError(f"--{key} is given twice, as {texts[key]} and as {text}; keep one")
        texts[key] = text


def read_value(key: str, text: str) -> Any:
    """The text of an override as a value: itself for keys that hold text, YAML or JSON for all others."""
    leaf = leaf_of(key)
    allowed = plain_types(leaf_keys()[leaf].annotation) if leaf == key else set()
    if str not in allowed:
        return parse_yaml(text, f"{key}={text!r}")
    if text in ("", "null") and type(None) in allowed:
        return None
    if any(target in allowed and text.lstrip().startswith(mark) for target, mark in ((dict, "{"), (list, "["))):
        return parse_yaml(text, f"{key}={text!r}")
    return text


# ------------------------------------------------------------------------------------------------------ nested data


def _has(data: Mapping[str, Any], key: str) -> bool:
    inner: Any = data
    for name in key.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            return False
        inner = inner[name]
    return True


def _get(data: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        data = data[name]
    return data


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    leaf_of(key)
    *path, last = key.split(".")
    inner = data
    for index, name in enumerate(path):
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            above = ".".join(path[: index + 1])
            raise ConfigError(
                f"{key}={value!r} cannot be set: {above}={inner!r} has no keys; give {above} as a mapping"
            )
    inner[last] = value


def _merged(base: Mapping[str, Any], top: Mapping[str, Any], depth: Iterable[str] = ()) -> dict[str, Any]:
    """`base` with the sections of `top` merged key by key; a value that is no section is replaced whole."""
    result = dict(base)
    for name, value in top.items():
        old = base.get(name)
        key = ".".join([*depth, name])
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key not in leaf_keys():
            result[name] = _merged(old, value, [*depth, name])
        else:
            result[name] = value
    return result
