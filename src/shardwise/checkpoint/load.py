"""Going on from a checkpoint: which one, whether it fits this run, and its values into their places on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardwise._torch_compat.modules import persistent_buffers
from shardwise.checkpoint.adapters import hash_of_base
from shardwise.checkpoint.catalog import complete, named_checkpoint, none_left, read_manifest
from shardwise.checkpoint.host_memory import MemoryStore
from shardwise.checkpoint.manifest import Manifest, Progress
from shardwise.checkpoint.save import named
from shardwise.checkpoint.source_changes import source_changes
from shardwise.checkpoint.state import (
    Optimizer,
    average_chunks,
    ema_chunks,
    kept_shapes,
    leaves_out_base,
    load_optimizer,
    model_chunks,
    optimizer_chunks,
    random_chunks,
    set_random,
    state_keys,
)
from shardwise.checkpoint.storage_read import ChunkLoadPlanner, SafetensorsReader
from shardwise.checkpoint.stores import ReadableStore, Store, open_store, split
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.checkpoint.whole import average_in
from shardwise.errors import CheckpointError, DamagedError
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.schedules import STABLE
from shardwise.job.warmup_stages import SCHEDULES
from shardwise.kernels.precision import LossScaler
from shardwise.model.parameter_optimizers import optimizers_of_parameters
from shardwise.parallel.logical_state import averaged_weight
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import Plan
from shardwise.words import listed

Say = Callable[[str], None]
Answer = TypeVar("Answer")
FORMER_SPLIT = "place"  # of checkpoints that do not say it, from before documents were held out
FILE_ROWS = "data.path="  # begins the corpus of rows that name files
BATCH = ("sequences_per_step", "tokens_per_step", "microbatch_size", "gradient_accumulation")  # of training
OF_SAMPLES = ("isolate_documents", "mask_probability", "mean_span_length")  # of data: what becomes of the tokens read
NO_NUMBERS = ("parallel.timeout_seconds", "parallel.max_restarts")  # keys that no number depends on


@dataclass
class Restored:
    """The checkpoint that a run goes on from, and how far it had come."""

    path: str
    progress: Progress


def restore(
    model: ParallelModel,
    optimizer: Optimizer,
    scaler: LossScaler,
    store: Store,
    data: Mapping[str, Any],
    say: Say = lambda text: None,
    memory: MemoryStore | None = None,
) -> Restored | None:
    """Bring a run to where the checkpoint that its job asks for had come; None where there is none. Collective.

    `memory` is the state in the hosts' memory, taken where no checkpoint in the store is newer.

    With `checkpoint.resume: auto` a checkpoint that turns out damaged while it is read is passed over for an older one,
    as are those whose files are missing or cut short; `say` is told which and why. Rank 0 chooses for all: another
    host's listing may be older.

    Raises:
        DamagedError: the named checkpoint is damaged, or damage has left none that `auto` could take.
        CheckpointError: the named checkpoint is not complete, or the newest is of another model or data.
    """
    read = partial(_read, model, optimizer, scaler, data=data, say=say)
    in_memory = _InMemory(memory, read, say)
    if memory is not None and (restored := in_memory.restored(_on_rank_0(lambda: _newest_complete(store)))):
        return restored
    wanted = model.plan.job.checkpoint.resume
    if wanted == "none":
        return None
    if wanted != "auto":
        name, manifest = _on_rank_0(lambda: named_checkpoint(wanted)[1:])
        return read(open_store(split(wanted)[0]), name, manifest)
    return _newest(store, in_memory, read, say)


class _InMemory:
    """The state in the hosts' memory, which is read once."""

    def __init__(self, memory: MemoryStore | None, read: Callable[..., Restored], say: Say) -> None:
        self._memory, self._read, self._say = memory, read, say

    def restored(self, newest: str) -> Restored | None:
        """Read it, if it is as new as a checkpoint `newest` of the store; None where it is not, or is damaged."""
        memory = self._memory
        if memory is None or memory.name < newest:
            return None
        self._memory = None
        try:
            return self._read(memory, memory.name, memory.manifest)
        except DamagedError as error:
            self._say(f"the {memory.root} is passed over: {error}")
            return None


def _newest(store: Store, in_memory: _InMemory, read: Callable[..., Restored], say: Say) -> Restored | None:
    """Read the newest checkpoint that is whole; where one turns out damaged, memory may be newer than the next."""
    passed: list[str] = []

    def pass_over(note: str) -> None:
        passed.append(note)
        say(note)

    damaged = False
    for name, manifest in _complete_on_rank_0(store, pass_over):
        if restored := in_memory.restored(name):
            return restored
        try:
            return read(store, name, manifest)
        except DamagedError as error:
            pass_over(f"checkpoint {name} is passed over: {error}")
            damaged = True
    if not damaged:
        return None
    if restored := in_memory.restored(""):
        return restored
    raise none_left(store, passed)


def _newest_complete(store: Store) -> str:
    """Return the name of the newest complete checkpoint; nothing where there is none, whatever else is there."""
    try:
        return next((name for name, _ in complete(store)), "")
    except CheckpointError:
        return ""


def _complete_on_rank_0(store: Store, say: Say) -> Iterator[tuple[str, Manifest]]:
    """Yield the complete checkpoints that rank 0 sees, newest first, with what it says of others. Collective."""
    notes: list[str] = []
    whole = complete(store, notes.append)
    while True:
        newest, noted = _on_rank_0(lambda: (next(whole, None), notes.copy()))
        notes.clear()
        for note in noted:
            say(note)
        if newest is None:
            return
        yield newest


def _on_rank_0(function: Callable[[], Answer]) -> Answer:
    """Return on every rank what rank 0 finds in the store, or raise what it raises. Collective."""
    outcome: list[Any] = [None, None]  # what it returns, or its error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except CheckpointError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    value, failure = outcome
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def _read(
    model: ParallelModel,
    optimizer: Optimizer,
    scaler: LossScaler,
    store: ReadableStore,
    name: str,
    manifest: Manifest,
    data: Mapping[str, Any],
    say: Say,
) -> Restored:
    path = f"{store.root}/{name}"
    check_fits(model, manifest, data, path)
    check_fixed_options(model, manifest, path)
    check_options(model, optimizer, manifest, path)
    may_change = model.plan.job.checkpoint.change_sources
    changed = source_changes(manifest.data, data, path, may_change)
    for note in (*differences(model, manifest), *changed):
        say(f"note: {note}")
    state, states = optimizer_chunks(optimizer, manifest.tensors, optimizer_keys(manifest))
    averages, values = ema_chunks(model, manifest.tensors)
    generators = random_chunks(model.device, dist.get_rank()) if _same_world(model, manifest) else []
    _fill([*model_chunks(model), *state, *averages, *generators], store, name, manifest)
    load_optimizer(optimizer, states, manifest.optimizer_scalars)
    if model.ema is not None:
        model.ema.values = values
        if not values and model.ema.entries:
            say(f"note: {path} has no averaged weights; the average begins with the weights of the next step")
    set_random(model.device, generators)
    if scaler.settings.static is None and _moves_scale(manifest):
        for field in fields(scaler):
            if field.name != "settings":
                setattr(scaler, field.name, getattr(manifest.scaler, field.name))
    return Restored(path, manifest.progress)


def _moves_scale(manifest: Manifest) -> bool:
    """Return whether the run of a checkpoint moved its loss scale; others have a scale that says nothing of fp16."""
    settings = manifest.job.get("precision", {}).get("loss_scale", {})
    return manifest.plan.get("dtypes", {}).get("compute") == "fp16" and settings.get("static") is None


def _fill(chunks: Sequence[TensorChunk], store: ReadableStore, name: str, manifest: Manifest) -> None:
    """Read a checkpoint's values into chunks. Collective."""
    try:
        with torch.no_grad():
            reader = SafetensorsReader(store, name, manifest)
            dcp.load({}, storage_reader=reader, planner=ChunkLoadPlanner(chunks))
    except CheckpointException as error:
        raise named(error, store.root) from error


def read_model(model: ParallelModel, store: Store, name: str) -> None:
    """Read the parameters and buffers of a checkpoint into their places, as they are evaluated. Collective.

    Raises:
        CheckpointError: it is of another model, or damaged.
    """
    manifest = read_manifest(store, name)
    check_model(model, manifest, f"{store.root}/{name}")
    _fill(model_chunks(model), store, name, manifest)
    average = average_in(manifest)
    if average is not None:
        chunks, states = average_chunks(model, manifest.tensors, average.key)
        _fill(chunks, store, name, manifest)
        with torch.no_grad():
            for key, state in states.items():
                local = model.tensor_map[key].local
                local.copy_(averaged_weight(local, state, average.factor))


def optimizer_keys(manifest: Manifest) -> list[str]:
    """Names of the optimizer's state tensors, such as `exp_avg`."""
    return sorted({name.split("/", 2)[1] for name in manifest.tensors if name.startswith("optimizer/")})


def check_fits(model: ParallelModel, manifest: Manifest, data: Mapping[str, Any], path: str) -> None:
    """Refuse a checkpoint of another model, optimizer or data.

    Raises:
        CheckpointError: with what differs.
    """
    check_model(model, manifest, path)
    name = model.plan.job.optimizer.name
    if manifest.optimizer != name:
        raise CheckpointError(
            f"{path} holds the state of {manifest.optimizer}, the job has optimizer.name={name!r}; set it to "
            f"{manifest.optimizer}, or start from exported weights with model.path"
        )
    job = model.plan.job.model_dump(mode="json")
    changes = [*_changes(job, manifest, "data"), *_changes(job, manifest, "training", ("seed",))]
    check_data(manifest, data, path, changes)
    check_sample_length(manifest, job["data"]["sequence_length"], data, path)
    _check_batch(model.plan, manifest, path)
    _check_schedules(job, manifest, path)
    _check_epochs(model.plan, manifest.progress, path)
    _check_warmup(model.plan, manifest, path)


def check_model(model: ParallelModel, manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint of another model, or of adapters of another base. Collective.

    Raises:
        CheckpointError: with what differs.
    """
    _check_added_tokens(model, manifest, path)
    wrong = sorted(_misfits(model, manifest))
    if wrong:
        what = listed(wrong, separator="; ")
        raise CheckpointError(f"{path} is a checkpoint of another model: {what}; use the job that wrote it")
    _check_base(model, manifest, path)


def _check_added_tokens(model: ParallelModel, manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint whose embeddings stand for other tokens."""
    own, before = model.plan.job.data.added_tokens, manifest.job.get("data", {}).get("added_tokens", [])
    if own != before:
        raise CheckpointError(
            f"{path} was trained with data.added_tokens={before}, the job has {own}; restore them, or start from "
            "exported weights with model.path"
        )


def _check_base(model: ParallelModel, manifest: Manifest, path: str) -> None:
    """Refuse adapters that were trained on another model than the job's. Collective."""
    base = model.plan.job.model.path
    if not leaves_out_base(model) or base is None or manifest.adapter is None:
        return
    own = hash_of_base(base)
    if own != manifest.adapter.base_hash:
        raise CheckpointError(
            f"{path} holds adapters of {manifest.adapter.base!r} with hash {manifest.adapter.base_hash}, and "
            f"model.path={base!r} has {own}; set model.path to the model that they were trained on"
        )


def check_data(manifest: Manifest, data: Mapping[str, Any], path: str, changes: Sequence[str] = ()) -> None:
    """Refuse a checkpoint of other tokens, of another order of samples, or of other held-out sequences.

    `changes` are the keys of the job that may be why.

    Raises:
        CheckpointError: with what differs.
    """
    _check_shards(manifest.data.get("shards"), data.get("shards"), path)
    compared = ("order",) if _is_of_unknown_rows(manifest.data) else ("content", "order")
    for key in compared:
        if manifest.data.get(key) != data.get(key):
            keys = f": {listed(changes, separator='; ')}" if changes else ""
            raise CheckpointError(
                f"{path} was trained on other data{keys} ({manifest.data.get('corpus')}: {manifest.data.get(key)}; now "
                f"{data.get('corpus')}: {data.get(key)}); restore the corpus and these keys, or train another model "
                "from its exported weights with model.path"
            )
    wrote, reads = manifest.data.get("split", FORMER_SPLIT), data.get("split", FORMER_SPLIT)
    if wrote != reads:
        raise CheckpointError(
            f"{path} was trained with validation sequences held out by {wrote}, this job holds them out by {reads} and "
            f"would train on some of them; set data.validation_split to {wrote}"
        )


def check_sample_length(manifest: Manifest, reads: int, data: Mapping[str, Any], path: str) -> None:
    """Refuse another length of the samples of a stream: how many were read tells which token comes next.

    Raises:
        CheckpointError: with both lengths.
    """
    wrote = manifest.job.get("data", {}).get("sequence_length", reads)
    if wrote != reads and _streams(manifest.data) & _streams(data):
        raise CheckpointError(
            f"{path} was trained on a stream with data.sequence_length={wrote}, the job has {reads} and would leave "
            f"tokens out, or read some again; set data.sequence_length to {wrote}, or start from exported weights with "
            "model.path"
        )


def _streams(data: Mapping[str, Any]) -> set[str]:
    """Return the names of the sources that are streams; "" of the only one."""
    sources = data.get("sources") or {"": data}
    return {name for name, source in sources.items() if source.get("shards")}


def _is_of_unknown_rows(data: Mapping[str, Any]) -> bool:
    """Return whether rows of files were trained on by a version that did not write down which."""
    return data.get("content") is None and str(data.get("corpus")).startswith(FILE_ROWS)


def _check_batch(plan: Plan, manifest: Manifest, path: str) -> None:
    """Refuse another global batch where the job says the same and only the number of ranks has changed.

    Raises:
        CheckpointError: with both, and the key that keeps it.
    """
    wrote, reads = manifest.plan.get("sequences_per_step"), plan.sequences_per_step
    own, before = plan.job.training.model_dump(mode="json"), manifest.job.get("training", {})
    if wrote is None or wrote == reads or any(own[key] != before.get(key) for key in BATCH):
        return
    raise CheckpointError(
        f"{path} was trained with {wrote} sequences a step, and training.microbatch_size={own['microbatch_size']} x "
        f"gradient_accumulation={own['gradient_accumulation']} are {reads} on {plan.data_ranks} data ranks; set "
        f"training.sequences_per_step {wrote} and leave gradient_accumulation out, which then follows"
    )


def _check_schedules(job: Mapping[str, Any], manifest: Manifest, path: str) -> None:
    """Refuse another warm-up of steps or sequences: what was trained would be something else.

    Raises:
        CheckpointError: with both schedules.
    """
    sections = manifest.job.get("training", {}), job["training"]
    for key in SCHEDULES:
        wrote, reads = ([_given(stage) for stage in section.get(key, [])] for section in sections)
        if wrote != reads:
            raise CheckpointError(
                f"{path} was trained with training.{key}={wrote}, the job has {reads}; restore it, or start from "
                "exported weights with model.path"
            )


def _check_epochs(plan: Plan, progress: Progress, path: str) -> None:
    """Refuse other steps in a run of epochs, which would end before its samples, or behind them.

    Raises:
        CheckpointError: with what the job's steps would have read by then.
    """
    total = plan.total_sequences
    if total is None or progress.step + plan.step_sizes.steps_between(progress.samples, total) == plan.steps:
        return
    raise CheckpointError(
        f"{path} has read {progress.samples:,} samples in {progress.step} steps, and this job, with "
        f"training.sequences_per_step={plan.sequences_per_step}, reads {total:,} in {plan.steps}, which steps of that "
        "size from there on do not; restore training.sequences_per_step, or give training.steps in the place of epochs"
    )


def _check_warmup(plan: Plan, manifest: Manifest, path: str) -> None:
    """Refuse another warm-up that is not over yet, in a run whose peak may go on from any checkpoint.

    Raises:
        CheckpointError: with the warm-up of the checkpoint.
    """
    before, now = manifest.plan.get("warmup_steps", plan.warmup_steps), plan.warmup_steps
    if plan.job.optimizer.schedule == STABLE and before != now and manifest.progress.step < max(before, now):
        raise CheckpointError(
            f"{path} was trained with {before} steps of warm-up, and of training.steps={plan.steps} it would be {now}, "
            f"which are not over at step {manifest.progress.step}; set optimizer.warmup_steps={before}"
        )


def _given(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stage.items() if value is not None}


def check_fixed_options(model: ParallelModel, manifest: Manifest, path: str) -> None:
    """Refuse another optimizer of a parameter, and options with which its stored state would stand for other numbers.

    Raises:
        CheckpointError: with both values.
    """
    section = OptimizerSection.model_validate(manifest.job.get("optimizer", {}))
    written = optimizers_of_parameters(model.facts, section)
    for name, own in optimizers_of_parameters(model.facts, model.plan.job.optimizer).items():
        before, record = written[name], RECORDS.get(own.name)
        if before.name != own.name:
            raise CheckpointError(
                f"{path} holds the state of {before.name} for {name}, which is {own.name}'s in the job; restore "
                "optimizer.groups, or start from exported weights with model.path"
            )
        for option, default in ({} if record is None else record.fixed).items():
            was, now = before.options.get(option, default), own.options.get(option, default)
            if was != now:
                raise CheckpointError(
                    f"{path} holds state of {own.name} with {option} {was}, the job has {now}; set "
                    f"optimizer.options.{option} to {was}, or start from exported weights with model.path"
                )


def _check_shards(wrote: Mapping[str, str] | None, reads: Mapping[str, str] | None, path: str) -> None:
    """Refuse a stream whose shards are others than they were, and name the first."""
    if not wrote or not reads or wrote == reads:
        return
    name = next(name for name in sorted(wrote.keys() | reads.keys()) if wrote.get(name) != reads.get(name))
    before, now = wrote.get(name, "not there"), reads.get(name, "gone")
    raise CheckpointError(
        f"{path} was trained on other shards: {name} is {now}, and was {before} (bytes, and time or version); restore "
        "it (`cp -p` keeps times), or train another model from the exported weights with model.path"
    )


def check_options(model: ParallelModel, optimizer: Optimizer, manifest: Manifest, path: str) -> None:
    """Refuse options for which the optimizer needs state that the checkpoint lacks; its step would end in a KeyError.

    Raises:
        CheckpointError: with what is missing and both options.
    """
    wanted, written = model.plan.job.optimizer.options, manifest.job.get("optimizer", {}).get("options", {})
    stored = {key for numbers in manifest.optimizer_scalars.values() for key in numbers} | {*optimizer_keys(manifest)}
    missing = state_keys(optimizer.inner) - stored if stored and wanted != written else set()
    if missing:
        raise CheckpointError(
            f"{path} lacks {listed(sorted(missing))} of the optimizer: it was written with optimizer.options={written} "
            f"and the job has {wanted}; restore them, or start from exported weights with model.path"
        )


def _misfits(model: ParallelModel, manifest: Manifest) -> Iterator[str]:
    own = {f"model/{name}": list(shape) for name, shape in kept_shapes(model).items() if math.prod(shape)}
    own |= {f"buffer/{name}": list(buffer.shape) for name, buffer in persistent_buffers(model.module)}
    stored = {name: t.shape for name, t in manifest.tensors.items() if name.startswith(("model/", "buffer/"))}
    for name in own.keys() | stored.keys():
        plain = name.partition("/")[2]
        if name not in stored:
            yield f"{plain} is missing"
        elif name not in own:
            yield f"{plain} is not in the model"
        elif stored[name] != own[name]:
            yield f"{plain} has shape {stored[name]}, not {own[name]}"


def _changes(job: Mapping[str, Any], manifest: Manifest, section: str, keys: Sequence[str] = ()) -> Iterator[str]:
    """Yield what has changed in a section of the job since the checkpoint was written; `keys`: in these alone."""
    for key, value in job[section].items():
        before = manifest.job.get(section, {}).get(key, value)
        if before != value and (not keys or key in keys):
            yield f"{section}.{key} was {before!r} in the checkpoint, is {value!r} now"


def differences(model: ParallelModel, manifest: Manifest) -> list[str]:
    """List what has changed since the checkpoint was written and may change the numbers that follow."""
    job = model.plan.job.model_dump(mode="json")
    notes = []
    for section in ("model", "adapter", "parallel", "memory", "precision", "optimizer", "training"):
        notes += [note for note in _changes(job, manifest, section) if not note.startswith(NO_NUMBERS)]
    notes += _changes(job, manifest, "data", OF_SAMPLES)
    wrote, reads = manifest.plan.get("world", {}).get("size"), model.plan.world.size
    if wrote != reads:
        notes.append(f"the checkpoint was written by {wrote} rank{'s' * (wrote != 1)} and is read by {reads}")
    return notes


def _same_world(model: ParallelModel, manifest: Manifest) -> bool:
    """Return whether every rank finds its own generator state."""
    names = [chunk.name for chunk in random_chunks(model.device, dist.get_rank())]
    same = manifest.plan.get("world", {}).get("size") == model.plan.world.size
    return same and all(name in manifest.tensors for name in names)
