"""Jobs cut to fewer blocks at full width, so that what does not depend on depth is seen at a fraction of the cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.tokenizer import VOCABULARY_FILES
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.model.build import load_config


def cut_depth(job: Job, blocks: int) -> Job:
    """The same job with only `blocks` blocks, at full width; weights are drawn anew.

    Raises:
        ConfigError: the model is not one of transformers', or has fewer blocks.
    """
    if job.model.factory is not None:
        raise ConfigError(f"--blocks {blocks} cuts a Hugging Face config; give model.factory_arguments a smaller depth")
    config = load_config(job)
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or type(config).__module__.startswith("transformers_modules"):
        raise ConfigError(f"--blocks {blocks}: the config of {config.model_type!r} has no num_hidden_layers to cut")
    if blocks > depth:
        raise ConfigError(f"--blocks {blocks} is more than the model's {depth}; use at most {depth}")
    values = {key: _cut(value, depth, blocks) for key, value in config.to_diff_dict().items()}
    values |= {
        "model_type": config.model_type,
        config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): blocks,
    }
    for key in ("transformers_version", "architectures", "dtype"):
        values.pop(key, None)
    tokenizer = job.data.tokenizer
    if (
        tokenizer is None
        and job.model.path
        and any((Path(job.model.path) / name).is_file() for name in VOCABULARY_FILES)
    ):
        tokenizer = job.model.path
    model = job.model.model_copy(update={"path": None, "config": values})
    return job.model_copy(update={"model": model, "data": job.data.model_copy(update={"tokenizer": tokenizer})})


def _cut(value: Any, depth: int, blocks: int) -> Any:
    """A list with one item a layer (layer_types, say) loses those of the layers that go."""
    return value[:blocks] if isinstance(value, list) and len(value) == depth else value
