"""Whole models that transformers has written as safetensors, read where SMP's `pytorch_model.bin` is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from shardwise.errors import CheckpointError

ASKED, FILE = "pytorch_model.bin", "model.safetensors"


def in_safetensors(model: Any, directory: Path, tag: str) -> dict[str, Tensor]:
    """The whole weights beside a missing `pytorch_model.bin`, ties under all their names; empty where there are none.

    Raises:
        CheckpointError: a file is not what its name says.
    """
    index = directory / f"{FILE}.index.json"
    if tag != ASKED or (directory / tag).exists() or not (index.exists() or (directory / FILE).exists()):
        return {}
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {FILE}
        found = {name: value for file in files for name, value in load_file(directory / Path(file).name).items()}
    except Exception as error:  # of the JSON, or of safetensors, whose error is a class of its own
        raise CheckpointError(f"{directory} holds no whole model that can be read: {error}") from error
    for group in _ties(model):
        held = next((found[name] for name in group if name in found), None)
        found |= {} if held is None else {name: held for name in group if name not in found}
    return found


def _ties(model: Any) -> Iterable[Iterable[str]]:
    if model.parallel is not None:
        return list(model.parallel.facts.ties)
    groups: dict[int, list[str]] = {}
    for name, parameter in model.get_module().named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return groups.values()
