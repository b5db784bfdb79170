"""Attributes of configs whose layers differ: transformers gives those layer by layer alone, and raises otherwise."""

from __future__ import annotations

from typing import Any


def has_attribute(config: Any, name: str) -> bool:
    """Return whether the config, or its layers' configs, have an attribute."""
    try:
        return hasattr(config, name)
    except RuntimeError:  # transformers: it is a per-layer attribute
        return True


def largest_value(config: Any, name: str) -> Any:
    """Return what the config has by a name, None without; of what layers have for themselves, the largest."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers: it is a per-layer attribute
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
        return max((value for value in values if value is not None), default=None)
