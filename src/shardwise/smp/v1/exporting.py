"""Checkpoints of version 1's scripts as Hugging Face directories, in one process: for `shardwise export`.

What is read: a directory of `smp.save_checkpoint` (its `newest`), a `<tag>_partial` folder of it, a whole file, and
what `smp.save` wrote of stages. Folders of this library are put together whatever the degrees; of Amazon's those of
shards and of stages, by the documented layout. The config is the `model_config` that public scripts keep, else
`config.json` beside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)

from shardwise.checkpoint.export import converted
from shardwise.checkpoint.writing import HuggingFaceWriter
from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis
from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.smp.model_config import CONFIG_KEY, MODEL_KEY, checkpoint_config
from shardwise.smp.safe_reading import read_safely
from shardwise.smp.v1.nn.huggingface.translation import FAMILIES, to_hf
from shardwise.smp.v1.saving import CUTS, NEWEST, PARTITION, SUFFIX, USER
from shardwise.smp.v1.sharded_data_parallel_checkpoint import PREFIX, whole_of_parts
from shardwise.smp.v1.weights import PARTIAL
from shardwise.words import listed

REPLACED = ".seq_layers."  # in the names of smp.nn's transformers
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)
_RANKS = re.compile(r"(?:_\d+){1,3}")


def is_v1_checkpoint(path: str | Path) -> bool:
    """Tell if a checkpoint of version 1's scripts is there."""
    checkpoint = Path(path)
    if "://" in str(path):
        return False
    folder = checkpoint.is_dir() and ((checkpoint / NEWEST).is_file() or bool(_parts(checkpoint)))
    return folder or checkpoint.is_file() or bool(_saved_parts(checkpoint))


def export_v1_checkpoint(
    source: str | Path, path: str | Path, dtype: str | None = None, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Write the model of a checkpoint of version 1's scripts to the new directory `path`.

    Args:
        source: a directory of checkpoints (then its newest), a folder of one, or a file.
        dtype: of the parameters in the files, as of `shardwise export`.
        say: told which checkpoint is taken.

    Raises:
        CheckpointError: it is incomplete, of split tensors of another library, or has no config.
        OutputError: `path` is there already or cannot be written.
    """
    checkpoint = Path(source)
    if checkpoint.is_dir() and (checkpoint / NEWEST).is_file():
        checkpoint = checkpoint / (checkpoint / NEWEST).read_text().strip()
        say(f"the newest checkpoint of {source} is {checkpoint.name}")
    weights, content = _opened(checkpoint)
    config = checkpoint_config(checkpoint, content.get(CONFIG_KEY))
    weights = _in_hf_names(weights, config)
    model = _model_of(checkpoint, config, weights)
    with HuggingFaceWriter(path, config) as writer:
        for name in _once(model):
            if name in weights:
                writer.add(name, converted(f"{MODEL_KEY}/{name}", weights[name], dtype))
        return writer.finish()


# ---- what there is


def _opened(checkpoint: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return (weights, what the script has kept beside them)."""
    if checkpoint.is_dir():
        file = checkpoint / f"{USER}.pt"
        return _of_folder(checkpoint), _mapping(read_safely(file) if file.is_file() else {})
    if not checkpoint.is_file():
        saved = [_mapping(read_safely(file)) for file in _of_stages(checkpoint)]
        return {name: value for part in saved for name, value in _weights(part).items()}, saved[0]
    whole = _mapping(read_safely(checkpoint))
    beside = checkpoint.parent / f"{USER}_{checkpoint.name}"
    return _weights(whole), {**_mapping(read_safely(beside) if beside.is_file() else {}), **whole}


def _mapping(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, Mapping) else {}


def _weights(content: Mapping[str, Any]) -> dict[str, Tensor]:
    weights = content.get(MODEL_KEY, content)
    return {name.removeprefix(PREFIX): value for name, value in weights.items() if isinstance(value, Tensor)}


def _of_folder(folder: Path) -> dict[str, Tensor]:
    if not (folder / PARTITION).is_file():  # which Amazon's library does not write
        return whole_of_parts(folder)
    degrees = read_safely(folder / PARTITION)
    if degrees[Axis.SHARD] > 1:
        whole: dict[str, Tensor] = read_safely(_parts(folder)[0])["module"]
        return whole
    wholes: dict[str, Tensor] = {}
    for stage in range(degrees[Axis.PIPELINE]):
        for index in range(degrees[Axis.TENSOR]):
            cuts = read_safely(folder / f"{CUTS}_{stage}_{index}.pt") if degrees[Axis.TENSOR] > 1 else {}
            _put_together(wholes, read_safely(folder / f"model_{stage}_{index}.pt"), cuts)
    return wholes


def _put_together(wholes: dict[str, Tensor], part: Mapping[str, Any], cuts: Mapping[str, Any]) -> None:
    for name, value in part.items():
        if name in cuts:
            cut = ParameterSplit(**cuts[name])
            whole = wholes.setdefault(name, value.new_empty(cut.shape))
            for region in cut.regions():
                whole[region.logical] = value[region.local]
        elif name != PARTIAL:
            wholes[name] = value


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("model_*.pt")) if folder.name.endswith(SUFFIX) else []


def _saved_parts(checkpoint: Path) -> list[Path]:
    """List the files that `smp.save` has made of this name, by the ranks behind it."""
    files = checkpoint.parent.glob(f"{checkpoint.name}_*") if checkpoint.parent.is_dir() and checkpoint.name else ()
    return sorted(
        file for file in files if file.is_file() and _RANKS.fullmatch(file.name.removeprefix(checkpoint.name))
    )


def _of_stages(checkpoint: Path) -> list[Path]:
    by_ranks = {file: file.name.removeprefix(checkpoint.name).split("_")[1:] for file in _saved_parts(checkpoint)}
    split = [file for file, ranks in by_ranks.items() if ranks[1:2] not in ([], ["0"])]
    if split:
        raise CheckpointError(
            f"{split[0]} is of tensor ranks, whose parts a file of smp.save does not name; load it with the script and "
            "use smp.save_checkpoint, or save whole weights"
        )
    return [file for file, ranks in by_ranks.items() if ranks[2:] in ([], ["0"])]


# ---- whose it is


def _in_hf_names(weights: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return weights in the Hugging Face model's names, where smp.nn's modules have taken the place of its own."""
    if config.model_type not in FAMILIES or not any(REPLACED in name for name in weights):
        return weights
    return to_hf(weights, config.model_type, getattr(config, "num_attention_heads", None))


def _model_of(checkpoint: Path, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the kind of model whose parameters are there, without values."""
    lacking: list[str] = []
    for auto_class in AUTO_CLASSES:
        if type(config) in auto_class._model_mapping:
            with torch.device("meta"):
                model: nn.Module = auto_class.from_config(config)
            missing = [name for name, _ in model.named_parameters() if name not in weights]
            if not missing:
                return model
            lacking = lacking or missing
    raise CheckpointError(
        f"{checkpoint} lacks {listed(lacking) or 'a model that transformers knows'} of {config.model_type}, and holds "
        f"{listed(sorted(weights)) or 'no tensors'}"
    )


def _once(model: nn.Module) -> Iterable[str]:
    """Names of the model's state, a tied one's first alone."""
    parameters = dict(model.named_parameters())
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    return [name for name in model.state_dict() if name not in again]
