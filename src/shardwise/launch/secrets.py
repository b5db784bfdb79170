"""Secrets do not belong in a job: they are told by name or by form, refused, and never repeated in a message.

What a launch writes can be read by everybody who may list a cluster's objects. So a secret is named by where it is
kept (`launch.secrets`), and the target looks it up on the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.secret_forms import SECRET_VALUE, is_secret

REFERENCES = ("launch.secrets.", "launch.pull_secret")  # keys that say where a secret is kept
_ASSIGNED = re.compile(r"\b([A-Za-z0-9_]+)=([^\s$][^\s]*)")  # in lines of a shell
_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")  # user and password


def refuse_job_secrets(data: Mapping[str, Any]) -> None:
    """Refuse a job that holds a secret in clear text.

    Args:
        data: sections and keys, as plain data.

    Raises:
        ConfigError: with the key; the value is not shown.
    """
    for key, name, text in _texts(data, ""):
        if key.startswith(REFERENCES):
            continue
        assigned = key.startswith("launch.setup") and any(is_secret(*pair) for pair in _ASSIGNED.findall(text))
        if assigned or is_secret(name, text) or _IN_URL.search(text):
            raise ConfigError(
                f"{key} holds a secret in clear text (not shown here), which everybody who sees the job could read; "
                "name the place where it is kept under launch.secrets"
            )


def hide_secrets(text: str) -> str:
    """Return `text` with everything that has the form of a secret left out."""
    return _IN_URL.sub("(secret)", SECRET_VALUE.sub("(secret)", text))


def check_reference(variable: str, reference: str, form: re.Pattern[str], example: str) -> None:
    """Refuse a value of `launch.secrets` that does not say where a secret is kept.

    Raises:
        ConfigError: with the variable and what a reference looks like, without the value.
    """
    if not form.fullmatch(reference) or SECRET_VALUE.search(reference):
        raise ConfigError(
            f"launch.secrets.{variable}: must be a reference such as {example}, not the secret itself; what is given "
            "is not shown here"
        )


def _texts(data: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, last name and value of every text."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _texts(value, f"{key}.{name}".lstrip("."))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _texts(value, f"{key}[{index}]")
    elif isinstance(data, str):
        yield key, key.rpartition(".")[2], data
