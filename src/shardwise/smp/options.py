"""The variables by which a launcher tells a script its options, and the Job of dotted keys; for both versions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.sources import parse_yaml, validate

OPTIONS_VARIABLE = "SM_HP_MP_PARAMETERS"
ARGUMENT = "--mp_parameters"
DEVICE_VARIABLE = "SHARDWISE_DEVICE"  # set by `shardwise run --device`


def launched_options() -> dict[str, Any]:
    """Return the launcher's options, from `SM_HP_MP_PARAMETERS`. Raises ConfigError if it holds no JSON object."""
    text = os.environ.get(OPTIONS_VARIABLE) or "{}"
    try:
        launched = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{OPTIONS_VARIABLE}={text!r} is not JSON ({error}); give an object of SMP's parameters"
        ) from error
    if not isinstance(launched, dict):
        raise ConfigError(f"{OPTIONS_VARIABLE}={text!r} is not a JSON object; give SMP's parameters as keys and values")
    return launched


def options_of_arguments(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the options in a script's arguments, where SageMaker's launchers put them; None where there are none.

    Version 3 of the SDK writes `--mp_parameters` as JSON, the training toolkit as `key=value,key=value`.

    Raises:
        ConfigError: it is neither.
    """
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = word.partition("=")
        if name == ARGUMENT:
            return _read_argument(value if equals else following)
    return None


def _read_argument(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        pairs = [part.partition("=") for part in text.split(",") if part]
        value = {name: parse_yaml(word, f"{ARGUMENT} {name}") for name, equals, word in pairs if equals}
        value = value if len(value) == len(pairs) else None
    if not isinstance(value, dict):
        raise ConfigError(f"{ARGUMENT}={text!r} is neither a JSON object nor key=value,key=value of SMP's parameters")
    return value


def make_job(values: Mapping[str, Any]) -> Job:
    """Return the Job of dotted keys (`training.steps`). Raises ConfigError for a wrong value."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return validate(sections)
