"""Adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`, and the base that they belong to.

peft's names are those of the model behind a prefix; a magnitude is stored without `.weight`. Modules that are trained
whole lie beside the adapters under their own names. Adapters of a stack of experts are two matrices, A [experts * rank,
inputs] and B [outputs, rank * experts]; those of further stacks of the same module wrap it, `base_layer` within
`base_layer`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
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
from shardwise.checkpoint.writing import copy_tokenizer, make_sibling, put_in_place
from shardwise.errors import ModelError, OutputError
from shardwise.model.adapter_config import CONFIG, adapter_config, adapter_settings
from shardwise.model.adapters import LORA_A, MAGNITUDE, STACK_ADAPTERS
from shardwise.model.facts import LayerAdapter, ModelFacts
from shardwise.parallel.model import ParallelModel
from shardwise.words import listed

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_HASH = "base_hash"  # key of the file's metadata


def file_name(name: str, adapters: Mapping[str, LayerAdapter]) -> str:
    """Return the name in peft's file of a parameter."""
    if name.endswith(f".{MAGNITUDE}.weight"):
        return PREFIX + name.removesuffix(".weight")
    if not (layer := _stack_of(name, adapters)):
        return PREFIX + name
    module, _, _ = layer.partition(f".{STACK_ADAPTERS}.")
    stacks = [other for other in adapters if other.startswith(f"{module}.{STACK_ADAPTERS}.")]
    wrapped = ".base_layer" * (len(stacks) - 1 - stacks.index(layer))
    return f"{PREFIX}{module}{wrapped}{name.removeprefix(layer)}"


def file_tensor(name: str, tensor: Tensor, adapters: Mapping[str, LayerAdapter]) -> Tensor:
    """Return a parameter in the form of peft's file."""
    if not _stack_of(name, adapters):
        return tensor.contiguous()
    if name.endswith(f".{LORA_A}.weight"):
        return tensor.flatten(0, 1).contiguous()
    return tensor.permute(1, 2, 0).flatten(1).contiguous()


def own_tensor(name: str, stored: Tensor, adapters: Mapping[str, LayerAdapter]) -> Tensor:
    """Return a parameter as the model has it, of its form in peft's file."""
    layer = _stack_of(name, adapters)
    if not layer:
        return stored
    experts = adapters[layer].experts
    if name.endswith(f".{LORA_A}.weight"):
        return stored.unflatten(0, (experts, -1))
    return stored.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _stack_of(name: str, adapters: Mapping[str, LayerAdapter]) -> str:
    """Return the stack of experts whose adapter has the parameter; empty where there is none."""
    layer = name.rpartition(".")[0].rpartition(".")[0]
    return layer if layer in adapters and adapters[layer].experts else ""


def export_adapter(model: ParallelModel, path: Path, tokenizer_directory: str | None = None) -> None:
    """Write the adapters of a run to the directory `path`, which is replaced if it is there. Collective.

    A tokenizer to which the job has added tokens lies beside them: peft lets the base grow to it.

    Raises:
        OutputError: rank 0 cannot write; nothing is left behind.
    """
    job, facts = model.plan.job, model.facts
    base_hash = hash_of_base(job.model.path) if job.model.path is not None else ""
    wholes = model.whole_tensors(names=facts.trained_shapes)
    if dist.get_rank() == 0:
        config = adapter_config(job, adapter_settings(job.adapter), facts.adapters)
        tensors = {name: whole.cpu() for name, whole in wholes}
        tokenizer = tokenizer_directory if job.data.added_tokens else None
        write_adapter(path, config, by_every_name(tensors, facts.ties), facts.adapters, base_hash, tokenizer)
    else:
        for _ in wholes:  # each is gathered by all
            pass
    dist.barrier()


def write_adapter(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, LayerAdapter],
    base_hash: str,
    tokenizer_directory: str | None = None,
) -> None:
    """Write a directory that peft opens.

    Args:
        path: appears when all of it is there.
        config: content of `adapter_config.json`.
        tensors: parameters of `adapters` and of modules trained whole, by the model's names; ties by all of them.
        adapters: by the names of their layers.
        base_hash: hash of the model under them, "" where that is in no directory.
        tokenizer_directory: of a tokenizer that is written beside them.

    Raises:
        OutputError: it cannot be written; nothing is left behind.
    """
    temporary = make_sibling(path)
    stored = {file_name(name, adapters): file_tensor(name, tensor, adapters) for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | ({BASE_HASH: base_hash} if base_hash else {})
    try:
        save_file(stored, temporary / WEIGHTS, metadata)
        (temporary / WEIGHTS).chmod((temporary / WEIGHTS).stat().st_mode | 0o444)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer_directory is not None:
            copy_tokenizer(Path(tokenizer_directory), temporary)
        put_in_place(temporary, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutputError(f"{path} cannot be written: {error}") from error


def by_every_name(tensors: Mapping[str, Tensor], ties: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Return `tensors` with a copy under each further name of a tied one: peft has a module of its own for each."""
    others = {group[0]: group[1:] for group in ties if group[0] in tensors}
    return {**tensors, **{name: tensors[first].clone() for first, names in others.items() for name in names}}


def open_adapter(facts: ModelFacts, path: str) -> SafetensorsFile:
    """Return the tensors of an adapter in peft's format, which fit the model and the job's adapters.

    Raises:
        ModelError: the file is missing or damaged, or its tensors are those of another base, rank or set of layers.
    """
    file = Path(path) / WEIGHTS
    opened = SafetensorsFile(file)
    empty = {name: torch.empty(shape, device="meta") for name, shape in facts.trained_shapes.items()}
    empty = by_every_name(empty, facts.ties)
    expected = {
        file_name(name, facts.adapters): tuple(file_tensor(name, tensor, facts.adapters).shape)
        for name, tensor in empty.items()
    }
    missing, unknown = expected.keys() - set(opened.names), set(opened.names) - expected.keys()
    if missing:
        raise ModelError(
            f"{file} lacks {listed(sorted(missing))}, which its layers have in this model; it is an adapter of another "
            "base or of other layers; set adapter.path to one of this model"
        )
    if unknown:
        raise ModelError(
            f"{file} holds {listed(sorted(unknown))}, which this model has no place for; it is an adapter of another "
            "base or of other layers; set adapter.path to one of this model"
        )
    for name, shape in expected.items():
        if opened.shape(name) != shape:
            raise ModelError(
                f"{file}: {name} has shape {list(opened.shape(name))}, the model's layer needs {list(shape)}; it is an "
                "adapter of another base or rank; set adapter.path to one of this model, and leave adapter.rank out"
            )
    _check_ties(opened, facts, file)
    return opened


def _check_ties(opened: SafetensorsFile, facts: ModelFacts, file: Path) -> None:
    """Refuse an adapter whose saved modules have two values of a parameter that the model has once."""
    for first in facts.trained_shapes:
        name, *others = [file_name(name, facts.adapters) for name in facts.names_of(first)]
        for other in others:
            if not torch.equal(opened.read(name), opened.read(other)):
                raise ModelError(
                    f"{file}: {name} and {other} differ, and the model has one parameter for both; merge the adapter "
                    "with peft, which unties them, and start from the merged model"
                )


def read_adapter(model: ParallelModel, path: str) -> None:
    """Read this rank's slices of an adapter in peft's format. Collective.

    Raises:
        ModelError: it does not fit, or belongs to another base.
    """
    opened = open_adapter(model.facts, path)
    _check_base(model, Path(path) / WEIGHTS)
    adapters = model.facts.adapters
    for entry in [entry for entry in model.tensor_map if entry.name in model.facts.trained_shapes]:
        stored = file_name(entry.name, adapters)
        if _stack_of(entry.name, adapters):
            entry.store(own_tensor(entry.name, opened.read(stored), adapters))
        else:
            entry.fill(partial(opened.read, stored))


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
