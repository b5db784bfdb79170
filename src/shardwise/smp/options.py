"""The variables by which a launcher tells a script its options, and the Job of dotted keys; for both versions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.sources import validate

OPTIONS_VARIABLE = "SM_HP_MP_PARAMETERS"
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


def make_job(values: Mapping[str, Any]) -> Job:
    """Return the Job of dotted keys (`training.steps`). Raises ConfigError for a wrong value."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return validate(sections)
