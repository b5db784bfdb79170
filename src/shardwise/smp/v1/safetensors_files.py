"""Whole models that transformers has written as safetensors, read where SMP's `pytorch_model.bin` is asked for."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from shardwise.errors import CheckpointError

ASKED, FILE = "pytorch_model.bin", "model.safetensors"


def load_safetensors(directory: Path, tag: str) -> dict[str, Tensor]:
    """Return the whole weights beside a missing `pytorch_model.bin`, ties under one name; empty where there are none.

    Raises:
        CheckpointError: a file is not what its name says.
    """
    index = directory / f"{FILE}.index.json"
    if tag != ASKED or (directory / tag).exists() or not (index.exists() or (directory / FILE).exists()):
        return {}
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {FILE}
        tensors = {name: value for file in files for name, value in load_file(directory / Path(file).name).items()}
    except Exception as error:  # of the JSON, or of safetensors, whose error is a class of its own
        raise CheckpointError(f"{directory} holds no whole model that can be read: {error}") from error
    return tensors
