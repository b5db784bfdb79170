"""The model's config that a script's checkpoint keeps, found for `shardwise export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shardwise.errors import CheckpointError

CONFIG_KEY, CONFIG_FILE, MODEL_KEY = "model_config", "config.json", "model"  # by which public scripts keep theirs


def checkpoint_config(checkpoint: Path, kept: Any) -> PreTrainedConfig:
    """Return the model's config: `kept` in the checkpoint `place`, or `config.json` in its folder or the one above.

    Raises:
        CheckpointError: there is none.
    """
    if isinstance(kept, PreTrainedConfig):
        return type(kept).from_dict(kept.to_dict())  # without the attention that the run chose
    folders = [folder for folder in (checkpoint, checkpoint.parent) if (folder / CONFIG_FILE).is_file()]
    if not folders:
        raise CheckpointError(
            f"{checkpoint} keeps no {CONFIG_KEY!r}, as public scripts do; put the model's {CONFIG_FILE} into "
            f"{checkpoint if checkpoint.is_dir() else checkpoint.parent}"
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(folders[0])
    return config
