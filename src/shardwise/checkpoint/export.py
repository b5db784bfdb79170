"""Export of a model as a Hugging Face directory, one logical tensor at a time: from a run, or from a checkpoint.

From a run every rank takes part in gathering a tensor and rank 0 streams it to disk. From a checkpoint one process
assembles it from its slices and needs no process group. The whole model never exists in memory, and what is written
is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from shardwise._torch_compat.modules import persistent_buffers
from shardwise.checkpoint.adapters import by_every_name, hash_weights, write_adapter
from shardwise.checkpoint.bar import byte_bar
from shardwise.checkpoint.catalog import find, read_manifest
from shardwise.checkpoint.manifest import AVERAGE, AdapterRecord, Manifest
from shardwise.checkpoint.merging import merged
from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.whole import WholeTensors
from shardwise.checkpoint.writing import (
    DEFAULT_SHARD_BYTES,
    HuggingFaceWriter,
    copy_chat_template,
    copy_processor,
    remove_unfinished,
)
from shardwise.errors import CheckpointError, OutputError
from shardwise.job.schema import Job
from shardwise.kernels.packed_weights import rounded
from shardwise.model.adapters import is_adapter, is_saved
from shardwise.model.build import build_model, load_config
from shardwise.model.routers import config_as_given
from shardwise.parallel.model import ParallelModel

EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Say = Callable[[str], None]


# --- from a run ------------------------------------------------------------------------------------------------------


def export_hugging_face(
    model: ParallelModel, path: Path, tokenizer_directory: str | None, say: Say = lambda text: None
) -> None:
    """Write `path` so that `from_pretrained` opens it; a user's own module as safetensors alone. Collective.

    Ties are stored once, under their first name. `path` lies in the run's own directory: what was left beside it by an
    attempt of the run that was killed here goes. `say` is told on rank 0 what the directory lacks.

    Raises:
        OutputError: rank 0 cannot write; nothing is left behind.
    """
    with _writer(model, path, tokenizer_directory) as writer:
        dtypes = {name: getattr(torch, dtype) for name, dtype in model.facts.weight_dtypes.items()}
        for name, tensor in _gathered(model):
            if writer is not None:
                writer.add(name, _written(tensor, dtypes.get(name)))
        if writer is not None:
            writer.finish()
            for problem in writer.problems:
                say(problem)
    dist.barrier()


def _gathered(model: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    wholes = ((name, whole.cpu()) for name, whole in model.whole_tensors())
    yield from merged(wholes, model.facts.adapters)
    yield from persistent_buffers(model.module)  # from_pretrained and load_state_dict ask for them


def _written(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor in the dtype in which it is written; as it is where that cannot hold it, as fp16 may."""
    if dtype is None:
        return tensor
    result = tensor.to(dtype)
    return tensor if bool((result.isinf() & tensor.isfinite()).any()) else result


def _writer(
    model: ParallelModel, path: Path, tokenizer_directory: str | None
) -> AbstractContextManager[HuggingFaceWriter | None]:
    """The writer on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        return nullcontext()
    remove_unfinished(path)
    module: Any = model.module
    config = config_as_given(module, model.facts.adds_balancing_loss) if model.facts.has_config else None
    generation = getattr(module, "generation_config", None)
    return HuggingFaceWriter(path, config, tokenizer_directory, generation_config=generation)


# --- from a checkpoint -----------------------------------------------------------------------------------------------


def export_checkpoint(
    source: str,
    path: str | Path,
    dtype: str | None = None,
    say: Say = lambda text: None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    merge: bool = False,
    ema: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model of the checkpoint at `source` (see `find`) to the new directory `path`, in one process.

    Of a model with adapters these alone are written, in peft's format, or with `merge` the whole model.

    Args:
        dtype: of the parameters in the files, a key of EXPORT_DTYPES; None: as the job's `model.dtype` has it, else as
            they are stored.
        say: told which checkpoint is taken, and what the directory lacks.
        merge: adapters become part of the weights of their layers.
        ema: averaged weights in the place of the weights; what was not trained has none and is as it was.
        trust_remote_code: whether the directory of the model that was trained, where it is read, may run its own code.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged, or the model under its adapters has changed
            or would run code; nothing is left of `path`.
        OutputError: `path` is there already or cannot be written, or there are no adapters to merge or no averages.
    """
    if "://" in str(path):
        raise OutputError(f"{path} is not a local directory; export to one and copy it")
    store, name = find(source, say)
    manifest = read_manifest(store, name)
    _check_asked(f"{store.root}/{name}", manifest, merge, ema)
    stored_as = partial(_stored_as, manifest) if ema else str
    if manifest.adapter is not None and not merge:
        with WholeTensors(store, name, manifest) as tensors:
            return _export_adapters(tensors, manifest, manifest.adapter, Path(path), dtype, say, stored_as)
    keys = [*_of_kind("model/", manifest), *_of_kind("buffer/", manifest)]
    dtype_of = _file_dtypes(manifest, dtype, say, trust_remote_code)
    with (
        _writer_of(manifest, path, max_shard_bytes, say) as writer,
        WholeTensors(store, name, manifest) as tensors,
        byte_bar(f"exporting {name}", sum(manifest.tensor_bytes(key) for key in keys)) as advance,
    ):

        def stored() -> Iterator[tuple[str, Tensor]]:
            for key in keys:
                yield key.partition("/")[2], tensors.read_evaluated(stored_as(key))
                advance(manifest.tensor_bytes(key))

        asked = dtype or manifest.job.get("model", {}).get("dtype")
        whole = _with_base(stored(), manifest, trust_remote_code, wide=asked in EXPORT_DTYPES)
        buffers = {key.partition("/")[2] for key in _of_kind("buffer/", manifest)}
        for tensor_name, tensor in whole:
            kind = "buffer" if tensor_name in buffers else "model"
            as_asked = converted(f"{kind}/{tensor_name}", tensor, dtype)
            writer.add(tensor_name, as_asked if kind == "buffer" else _written(as_asked, dtype_of(tensor_name)))
        writer.finish()
        _copy_beside(manifest, writer, say)
        return writer.path


def _copy_beside(manifest: Manifest, writer: HuggingFaceWriter, say: Say) -> None:
    """Copy what else the job's model is asked with; `say` is told what the directory lacks."""
    data = manifest.job.get("data", {})
    copy_processor(data.get("processor"), manifest.job.get("model", {}).get("path"), writer.path)
    copy_chat_template(data.get("chat_template"), writer.path, say)
    for problem in writer.problems:
        say(problem)


def _writer_of(manifest: Manifest, path: str | Path, max_shard_bytes: int, say: Say) -> HuggingFaceWriter:
    """Return what writes a model's directory, with its config and its tokenizer as far as there are some."""
    config = None if manifest.config is None else restore_config(manifest)
    generation = None if manifest.generation is None else GenerationConfig.from_dict(manifest.generation)
    tokenizer = _tokenizer(manifest, say)
    return HuggingFaceWriter(path, config, tokenizer, generation_config=generation, max_shard_bytes=max_shard_bytes)


def _check_asked(checkpoint: str, manifest: Manifest, merge: bool, ema: bool) -> None:
    """Refuse to write what a checkpoint does not hold.

    Raises:
        OutputError: it has no adapters to merge, or no averages.
    """
    if merge and manifest.adapter is None:
        raise OutputError(f"--merge: the checkpoint {checkpoint} has no adapters; leave it out")
    if ema and not any(_of_kind(AVERAGE, manifest)):
        raise OutputError(
            f"--ema: the checkpoint {checkpoint} has no averaged weights; they are kept where training.ema_decay is "
            "set; leave it out"
        )


def _stored_as(manifest: Manifest, key: str) -> str:
    """Return the name under which the average of a parameter is stored, or `key` itself where it has none."""
    average = AVERAGE + key.removeprefix("model/")
    return average if key.startswith("model/") and average in manifest.tensors else key


def _file_dtypes(
    manifest: Manifest, dtype: str | None, say: Say, trust_remote_code: bool
) -> Callable[[str], torch.dtype | None]:
    """Return what tells the dtype of the job's `model.dtype` in which a parameter is written; None: as it is.

    A `dtype` that the caller asks for takes its place.
    """
    asked = manifest.job.get("model", {}).get("dtype")
    if dtype is not None:
        return lambda name: None
    if asked != "file":
        return lambda name: EXPORT_DTYPES.get(asked or "")
    if not Path(str(manifest.job["model"]["path"])).is_dir():
        say(f"model.dtype=file: {manifest.job['model']['path']} is not there any more; weights are written as stored")
        return lambda name: None
    weights, names = open_base(manifest, trust_remote_code)
    return lambda name: getattr(torch, weights.dtype(names[name])) if name in names else None


def _export_adapters(
    tensors: WholeTensors,
    manifest: Manifest,
    adapter: AdapterRecord,
    path: Path,
    dtype: str | None,
    say: Say,
    stored_as: Callable[[str], str],
) -> Path:
    """Write a checkpoint's adapters, and the modules that are trained whole beside them, as peft opens them.

    A tokenizer to which the job has added tokens lies beside them: peft lets the base grow to it. `stored_as` gives the
    name of the tensor that is written for one of the model's.
    """
    if path.exists():
        raise OutputError(f"{path} exists already; choose another directory")
    saved = adapter.config.get("modules_to_save") or []
    names = [key.partition("/")[2] for key in _of_kind("model/", manifest)]
    trained = [name for name in names if is_saved(name, saved) or is_adapter(name, adapter.layers)]
    keys = {name: f"model/{name}" for name in trained}
    wholes = {name: converted(key, tensors.read_evaluated(stored_as(key)), dtype) for name, key in keys.items()}
    tokenizer = _tokenizer(manifest, say) if manifest.job.get("data", {}).get("added_tokens") else None
    ties = [(first, *others) for first, others in manifest.ties.items()]
    write_adapter(path, adapter.config, by_every_name(wholes, ties), adapter.layers, adapter.base_hash, tokenizer)
    return path


def _with_base(
    stored: Iterator[tuple[str, Tensor]], manifest: Manifest, trust_remote_code: bool, wide: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole model, with its adapters merged; what a checkpoint leaves out is read from the base's directory.

    Weights that were packed in training are those that their packed form stands for: adapters were fitted to them.
    `wide` leaves what is computed here in fp32, for a caller who rounds it: once, and not to the base's dtype before.

    Raises:
        CheckpointError: the directory is gone, or its weights have changed.
    """
    adapter = manifest.adapter
    if adapter is None:
        yield from stored
        return
    if not adapter.base:
        yield from merged(stored, adapter.layers, wide)
        return
    own = dict(stored)  # of adapters and a few modules: small
    if not Path(adapter.base).is_dir() or hash_weights(adapter.base) != adapter.base_hash:
        raise CheckpointError(
            f"the model under these adapters, {adapter.base!r} with hash {adapter.base_hash}, is not there any more or "
            "has changed; put it back, or export the adapters alone without --merge"
        )
    weights, names = open_base(manifest, trust_remote_code)
    read = ((name, weights.read(source)) for name, source in names.items() if name not in own)
    forms = adapter.packed
    base = (
        (name, rounded(tensor.float() if wide else tensor, forms[name]) if name in forms else tensor)
        for name, tensor in read
    )
    yield from merged(chain(base, own.items()), adapter.layers, wide)


def open_base(manifest: Manifest, trust_remote_code: bool) -> tuple[HuggingFaceWeights, dict[str, str]]:
    """Return the directory of the model that a checkpoint's job trains, and the names in it of all parameters.

    Raises:
        CheckpointError: code would run that nobody but the checkpoint names.
    """
    job = Job.model_validate(manifest.job)
    if job.model.factory is not None:
        raise CheckpointError(f"the checkpoint names both {job.model.factory} and a directory as its model")
    if job.model.trust_remote_code and not trust_remote_code:
        raise CheckpointError(
            f"the model in {job.model.path} brings code of its own, which the checkpoint says to run; read it, then "
            "use --trust-remote-code"
        )
    model, weights = build_model(job), HuggingFaceWeights(str(job.model.path))
    ties = [(first, *others) for first, others in manifest.ties.items()]
    kept = {key.partition("/")[2] for key in _of_kind("model/", manifest)}  # a head that was drawn is nowhere else
    names = [name for name, _ in model.named_parameters()]
    prefix = getattr(model, "base_model_prefix", "")
    resolved = weights.resolve(
        [name for name in names if name not in kept],
        optional=[name for name in names if name in kept],
        base_model_prefix=prefix,
        ties=ties,
        model=model,
    )
    if job.data.added_tokens:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        weights.grow(resolved, shapes, load_config(job).get_text_config().vocab_size, job.training.seed)
    return weights, resolved


def restore_config(manifest: Manifest) -> PreTrainedConfig:
    """The Hugging Face config that a manifest holds. A model's own code is not run for it.

    Raises:
        CheckpointError: transformers cannot make it.
    """
    content = dict(manifest.config or {})
    model_type = str(content.get("model_type", ""))
    if model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
    else:  # of a model with code of its own: the content is enough to write it
        config_class = type("OwnConfig", (PreTrainedConfig,), {"model_type": model_type})
    try:
        config: PreTrainedConfig = config_class.from_dict(content)
    except Exception as error:
        raise CheckpointError(
            f"the config of the checkpoint (model_type={model_type!r}, written with transformers "
            f"{manifest.versions.get('transformers')}) cannot be read: {type(error).__name__}: {error}; export with "
            "that version"
        ) from error
    return config


def _of_kind(prefix: str, manifest: Manifest) -> Iterable[str]:
    return (key for key in manifest.tensors if key.startswith(prefix))


def _tokenizer(manifest: Manifest, say: Say) -> str | None:
    """The tokenizer's directory, if it is still there."""
    directory = manifest.data.get("tokenizer")
    if directory is None:
        return None
    if not Path(directory).is_dir():
        say(f"the tokenizer is not exported: its directory {directory} is not there any more")
        return None
    return str(directory)


def converted(key: str, tensor: Tensor, dtype: str | None) -> Tensor:
    """The tensor of a checkpoint's `key` in `dtype` (of EXPORT_DTYPES) if it is a parameter's.

    Raises:
        OutputError: fp16 cannot hold it.
    """
    if dtype is None or not tensor.is_floating_point() or not key.startswith("model/"):
        return tensor
    result = tensor.to(EXPORT_DTYPES[dtype])
    if dtype == "fp16" and bool((result.isinf() & tensor.isfinite()).any()):
        name, most = key.partition("/")[2], tensor.abs().max()
        raise OutputError(f"--dtype fp16 cannot hold {name}, which reaches {most:.3g}; use bf16 or fp32")
    return result
