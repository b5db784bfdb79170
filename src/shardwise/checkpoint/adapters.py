"""Adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`, and the base that they belong to.

peft's names are those of the model behind a prefix; a magnitude is stored without `.weight`. Modules that are trained
whole lie beside the adapters under their own names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.weight_files import SafetensorsFile
from shardwise.checkpoint.writing import make_sibling, put_in_place
from shardwise.errors import ModelError, OutputError
from shardwise.model.adapter_config import CONFIG, adapter_config, adapter_settings
from shardwise.model.adapters import MAGNITUDE
from shardwise.model.facts import ModelFacts
from shardwise.parallel.model import ParallelModel
from shardwise.words import listed

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_HASH = "base_hash"  # key of the file's metadata


def file_name(name: str) -> str:
    """Return the name in peft's file of a parameter."""
    return PREFIX + (name.removesuffix(".weight") if name.endswith(f".{MAGNITUDE}.weight") else name)


def export_adapter(model: ParallelModel, path: Path) -> None:
    """Write the adapters of a run to the directory `path`, which is replaced if it is there. Collective.

    Raises:
        OutputError: rank 0 cannot write; nothing is left behind.
    """
    job, facts = model.plan.job, model.facts
    base_hash = hash_of_base(job.model.path) if job.model.path is not None else ""
    wholes = model.whole_tensors(names=facts.trained_shapes)
    if dist.get_rank() == 0:
        config = adapter_config(job, adapter_settings(job.adapter), facts.adapters)
        write_adapter(path, config, {name: whole.cpu() for name, whole in wholes}, base_hash)
    else:
        for _ in wholes:  # each is gathered by all
            pass
    dist.barrier()


def write_adapter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], base_hash: str) -> None:
    """Write a directory that peft opens.

    Args:
        path: appears when all of it is there.
        config: content of `adapter_config.json`.
        tensors: adapters and modules trained whole, by the model's names.
        base_hash: hash of the model under them, "" where that is in no directory.

    Raises:
        OutputError: it cannot be written; nothing is left behind.
    """
    temporary = make_sibling(path)
    stored = {file_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | ({BASE_HASH: base_hash} if base_hash else {})
    try:
        save_file(stored, temporary / WEIGHTS, metadata)
        (temporary / WEIGHTS).chmod((temporary / WEIGHTS).stat().st_mode | 0o444)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        put_in_place(temporary, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutputError(f"{path} cannot be written: {error}") from error


def open_adapter(facts: ModelFacts, path: str) -> SafetensorsFile:
    """Return the tensors of an adapter in peft's format, which fit the model and the job's adapters.

    Raises:
        ModelError: the file is missing or damaged, or its tensors are those of another base, rank or set of layers.
    """
    file = Path(path) / WEIGHTS
    opened = SafetensorsFile(file)
    expected = {file_name(name): shape for name, shape in facts.trained_shapes.items()}
    missing, unknown = expected.keys() - set(opened.names), set(opened.names) - expected.keys()
    if missing:
        raise ModelError(
            f"{file} lacks {listed(sorted(missing))}, which its layers have in this model; it is an adapter of another "
            "base or of other layers"
        )
    if unknown:
        raise ModelError(
            f"{file} holds {listed(sorted(unknown))}, which this model has no place for; it is an adapter of another "
            "base or of other layers"
        )
    for name, shape in expected.items():
        if opened.shape(name) != shape:
            raise ModelError(
                f"{file}: {name} has shape {list(opened.shape(name))}, the model's layer needs {list(shape)}; it is an "
                "adapter of another base or rank"
            )
    return opened


def read_adapter(model: ParallelModel, path: str) -> None:
    """Read this rank's slices of an adapter in peft's format. Collective.

    Raises:
        ModelError: it does not fit, or belongs to another base.
    """
    opened = open_adapter(model.facts, path)
    _check_base(model, Path(path) / WEIGHTS)
    for entry in [entry for entry in model.tensor_map if entry.name in model.facts.trained_shapes]:
        for region in entry.regions:
            if entry.local[region.local].numel():
                entry.local[region.local].copy_(opened.read(file_name(entry.name), region.logical))


def _check_base(model: ParallelModel, file: Path) -> None:
    """Refuse an adapter whose file names another base than the job's by its hash; peft's own name none."""
    with safe_open(str(file), framework="pt") as opened:
        wanted = (opened.metadata() or {}).get(BASE_HASH)
    base = model.plan.job.model.path
    if wanted is not None and base is not None and hash_of_base(base) != wanted:
        raise ModelError(
            f"{file} is an adapter of another base: its model has hash {wanted}, model.path={base!r} has "
            f"{hash_of_base(base)}; set model.path to the model that it was trained on"
        )


def hash_of_base(path: str) -> str:
    """Return the hash of a model directory's weights, which rank 0 reads. Collective."""
    answer = [hash_weights(path) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(answer)
    return answer[0]


@cache
def hash_weights(path: str) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of a directory's tensors, however its files hold them."""
    weights = HuggingFaceWeights(path)
    return hash_tensors((name, weights.read(name)) for name in sorted(weights.names))


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the XXH3-128 of tensors in their order, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
