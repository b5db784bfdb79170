"""Every name in the list of SMP's API exists, with the signature that the list says."""

from __future__ import annotations

import enum
import importlib.util
import inspect
from typing import Any

import pytest

from shardwise.smp.api import ApiName, api_names, missing_names


def _owner(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, leaf = name.rpartition(".")
        return getattr(importlib.import_module(module), leaf)


def _signature(function: Any) -> str:
    """Without annotations; of an enum's members the short name."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        text = str(parameter.replace(annotation=inspect.Parameter.empty))
        if isinstance(parameter.default, enum.Enum):
            text = f"{parameter.name}=<{parameter.default}>"
        parameters.append((parameter, text))
    found, starred = [], False
    for parameter, text in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            found.append("*")
            starred = True
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        found.append(text)
    return f"({', '.join(found)})"


@pytest.mark.parametrize("entry", api_names(), ids=lambda entry: f"{entry.owner}.{entry.name}")
def test_entry_is_there(entry: ApiName) -> None:
    found = inspect.getattr_static(_owner(entry.owner), entry.name, None) or getattr(_owner(entry.owner), entry.name)
    assert found is not None
    assert entry.status in ("acts", "accepted", "refused")
    assert entry.reason or entry.status == "acts"
    if entry.signature:
        assert _signature(getattr(_owner(entry.owner), entry.name)) == entry.signature


def test_what_is_missing_is_not_there() -> None:
    assert missing_names()
    assert importlib.util.find_spec("shardwise.smp.test") is None
