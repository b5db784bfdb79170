"""Which modules of a script's model are replaced by distributed ones when it is wrapped, and their weights' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def replace_modules(module: nn.Module) -> nn.Module:
    """The model with what was created under tensor parallelism replaced."""
    return module


def translate_in(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights in the names of the module, where they are in those of a Hugging Face model."""
    return weights


def translate_out(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights in the names of the Hugging Face model that the module took the place of."""
    return weights
