"""Log-probabilities by a preference loss's reference, computed once ahead of training and kept in the cache.

Before its first step, with its adapters off, the model is its own reference, so no copy of it is made. One forward of
all pairs gives a number a completion. They are kept under a hash of what they depend on: the model's weights, buffers
and config, the dtypes, and tokens and masks of the rows that stand in sequences. Layout, packing and the settings of
the loss are no part of it: another run, or the same one resumed on other ranks, reads what the first has written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise._torch_compat.modules import persistent_buffers
from shardwise.cache import cache_root
from shardwise.checkpoint.adapters import hash_tensors
from shardwise.collectives.names import CollectiveName
from shardwise.data.batch import moved
from shardwise.data.loader import EVALUATION, Stream
from shardwise.data.packed_rows import PackedRows
from shardwise.data.store import COMPLETE, Column, build_once, digest
from shardwise.data.token_data import TokenData
from shardwise.errors import DataError
from shardwise.parallel.model import ParallelModel
from shardwise.training.objectives.preference import DirectPreference

VERSION = 1  # of the file; part of its key
FILE, TENSOR = "log_probabilities.safetensors", "log_probabilities"
BLOCK = 1 << 22  # numbers of a column that are hashed at once
NOT_OF_NUMBERS = ("_name_or_path", "transformers_version")  # keys of a config that say where it is from

SUMS = CollectiveName("log-probabilities by the reference", "world", "all_reduce")
STORED = CollectiveName("log-probabilities by the reference", "world", "broadcast")


def with_reference(objective: DirectPreference, stream: Stream, data: TokenData) -> TokenData:
    """Return the data with the reference's log-probabilities of all completions. Collective over the world.

    Args:
        objective: of the model as training starts.
        stream: this rank's batches.
        data: pairs of preferences.

    Raises:
        DataError: the cache cannot be read or written.
    """
    assert isinstance(data.train, PackedRows) and isinstance(data.validation, PackedRows)
    job = objective.model.plan.job
    root = cache_root(job.data.cache_directory) / "references"
    model_hash = hash_of_reference(objective.model)
    values, note = _of_corpus(objective, stream, [data.train, data.validation], root, model_hash)
    sets = {}
    for name, split in data.sets.items():
        assert isinstance(split, PackedRows)
        sets[name] = replace(split, reference=_of_corpus(objective, stream, [split], root, model_hash)[0])
    train, validation = (replace(split, reference=values) for split in (data.train, data.validation))
    return replace(data, train=train, validation=validation, sets=sets, reference_note=note)


def _of_corpus(
    objective: DirectPreference, stream: Stream, splits: Sequence[PackedRows], root: Path, model_hash: str
) -> tuple[np.ndarray, str]:
    """Return the log-probabilities [rows of the cache] of the splits' rows, and on rank 0 a sentence on them.

    Rank 0 alone reads and writes, so that all ranks have the same numbers. Collective.
    """
    device, is_first = objective.model.device, dist.get_rank() == 0
    directory = root / digest(VERSION, model_hash, hash_of_rows(splits)) if is_first else root
    is_stored = torch.tensor(int(is_first and (directory / COMPLETE).is_file()), device=device)
    with STORED:
        dist.broadcast(is_stored, 0)
    if not int(is_stored):
        values = _computed(objective, stream, splits)
        if is_first:
            build_once(directory, partial(write_values, values=values), lambda text: None)
        return values.numpy(), f"log-probabilities by the reference are computed, and kept in {directory}."
    count = len(splits[0].corpus.starts)
    stored = read_values(directory, count) if is_first else torch.empty(count, dtype=torch.float64)
    values = moved(stored, device)
    with STORED:
        dist.broadcast(values, 0)
    return values.cpu().double().numpy(), f"log-probabilities by the reference are read from {directory}."


def _computed(objective: DirectPreference, stream: Stream, splits: Sequence[PackedRows]) -> Tensor:
    """Return the log-probabilities [rows of the cache] in fp64, on every rank; 0 of rows in no sequence. Collective."""
    model = objective.model
    values = torch.zeros(len(splits[0].corpus.starts), dtype=torch.float64)
    for split in splits:
        for microbatches in stream.evaluation(split):
            on_device = [microbatch.to(model.device) for microbatch in microbatches]
            for microbatch in objective.with_reference(on_device, step=0):
                if microbatch.reference is None or not model.contributes:
                    continue
                sums, counters = microbatch.reference.cpu().double(), microbatch.rows.tolist()
                for place in microbatch.counted.nonzero().flatten().tolist():
                    rows = split.sequences[counters[place] - EVALUATION]
                    values[rows] += sums[place, : len(rows)]
    model.meet()
    total = moved(values, model.device)
    with SUMS:
        dist.all_reduce(total)
    return total.cpu().double()


def write_values(directory: Path, values: Tensor) -> None:
    """Write log-probabilities into a directory of the cache."""
    save_file({TENSOR: values}, directory / FILE)
    (directory / COMPLETE).write_text(json.dumps({"completions": len(values)}))


def read_values(directory: Path, count: int) -> Tensor:
    """Return the log-probabilities [count] that a directory of the cache holds.

    Raises:
        DataError: they are damaged.
    """
    try:
        values = load_file(directory / FILE)[TENSOR]
    except (OSError, KeyError, SafetensorError) as error:
        raise DataError(f"cached log-probabilities {directory} cannot be read ({error}); delete it") from error
    if values.shape != (count,) or values.dtype != torch.float64:
        raise DataError(
            f"cached log-probabilities {directory} are {values.dtype} of shape {list(values.shape)}, and the data have "
            f"{count} completions; delete it"
        )
    return values


def hash_of_reference(model: ParallelModel) -> str:
    """Return a hash, on rank 0, of what decides a model's outputs without adapters; it is equal on every layout.

    Every parameter is gathered whole, one at a time. Collective.
    """
    hashes = {}
    for name, whole in model.whole_tensors(names=model.facts.base_shapes):
        if dist.get_rank() == 0:
            hashes[name] = hash_tensors([(name, whole.detach().cpu())])
    if dist.get_rank() != 0:
        return ""
    buffers = sorted((name, hash_tensors([(name, value.cpu())])) for name, value in persistent_buffers(model.module))
    config: Any = model.module.config
    fields = {key: value for key, value in config.to_dict().items() if key not in NOT_OF_NUMBERS}
    plan = model.plan
    settings = [asdict(plan.dtypes), plan.float8, plan.job.precision.fp8_scaling]
    return digest(sorted(hashes.items()), buffers, json.dumps(fields, sort_keys=True, default=str), settings)


def hash_of_rows(splits: Sequence[PackedRows]) -> str:
    """Return a hash of the tokens and masks of a corpus, and of which rows the splits hold, and how much of each."""
    corpus = splits[0].corpus
    kept = np.sort(np.concatenate([split.rows for split in splits]))
    content = xxhash.xxh3_128()
    for column in (corpus.tokens, corpus.trained, corpus.starts):
        _add_column(content, column)
    for numbers in (kept, splits[0].kept_lengths):
        content.update(np.ascontiguousarray(numbers).tobytes())
    return content.hexdigest()


def _add_column(content: xxhash.xxh3_128, column: Column) -> None:
    for start in range(0, len(column), BLOCK):
        content.update(np.ascontiguousarray(column.read(start, min(start + BLOCK, len(column)))).tobytes())
