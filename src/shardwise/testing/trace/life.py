"""The life of one rank beside its steps, on a simulated accelerator: from drawn weights to a restored checkpoint.

What a step does is traced by `trace_rank`. Here the same rank draws its weights, takes three steps, evaluates, hands a
checkpoint to its writer, and fills its state again from one. No number is anybody's; how the device is used is real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch

from shardwise._torch_compat.tracing import FakeTensor
from shardwise.checkpoint.manifest import Slice, TensorRecord
from shardwise.checkpoint.staging import Staging
from shardwise.checkpoint.state import Snapshot, load_optimizer, model_chunks, optimizer_chunks, snapshot
from shardwise.checkpoint.storage_read import ChunkLoadPlanner, metadata_of, read_box
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.job.devices import copies_aside
from shardwise.model.facts import ModelFacts
from shardwise.model.stored_dtypes import STORED_DTYPES, TORCH_DTYPES
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan
from shardwise.testing.simulated.streams import SIMULATED
from shardwise.testing.trace.rank import (
    alone,
    device_of,
    one_document,
    recorder_of,
    step_of,
    threads_seen,
    traceable,
    traced_model,
    traced_modules,
)
from shardwise.testing.trace.recorder import RankRecorder
from shardwise.testing.trace.storages import Storages
from shardwise.testing.trace.traced_batch import TracedBatch, traced_batch
from shardwise.training.init import initialize
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.step import evaluate

STEPS = 3


@dataclass
class RankLife:
    """The life of a rank.

    Attributes:
        faults: of the use of the accelerator, each with its line, by what the rank did.
        alive: bytes on the device at the end of each.
    """

    faults: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alive: dict[str, int] = field(default_factory=dict)


class _Manifest(NamedTuple):
    tensors: dict[str, TensorRecord]


class _BlankFile:
    """A file of a checkpoint, of which any part can be read."""

    def read_into(self, target: memoryview, start: int) -> None:
        """Leave the memory as it is."""


def live(plan: Plan, facts: ModelFacts, rank: int) -> RankLife:
    """Let rank `rank` of a plan of accelerators live, and return what was seen.

    Raises:
        RuntimeError: torch's own, where host and device meet in an operator.
    """
    plan, storages, microbatch = traceable(plan), Storages(SIMULATED), traced_batch(plan)
    with device_of(plan.world) as (device, fake), alone(rank, plan.world.size, device):
        model = traced_model(plan, Layout.from_plan(plan, rank), facts, device, fake)
        recorder = recorder_of(model, traced_modules(model), storages)
        with (
            _no_bytes(),
            fake,
            microbatch.given(recorder),
            threads_seen(recorder),
            recorder.recording(),
            one_document(plan, recorder),
        ):
            recorder.begin()
            told = _Told(recorder, storages)
            _live(model, told, microbatch)
    return told.life


def _live(model: ParallelModel, told: _Told, microbatch: TracedBatch) -> None:
    recorder = told.recorder
    with told.chapter("drawing"), recorder.answering(0, anyone=True):  # nothing is left unset
        initialize(model, model.plan.job.training.seed)
    optimizer, objective = ShardedOptimizer.of(model), make_objective(model)
    averages = [] if model.ema is None else [model.ema.values]
    kept = [*traced_modules(model), optimizer.inner, *averages, *_sums(model, objective)]
    for step in range(STEPS):
        with told.chapter(f"step {step}"), recorder.discipline.step(*kept):
            step_of(model, objective, optimizer, recorder, microbatch)
    with told.chapter("evaluation"), recorder.answering(0), recorder.discipline.step(*kept):
        evaluate(model, objective, [[microbatch.fakes(recorder)], [microbatch.fakes(recorder)]])
    with told.chapter("staging"):
        written = snapshot(model, optimizer, copies=True)
        _stage([chunk.tensor for chunk in written.chunks], copies_aside(model.device.type))
    with told.chapter("restore"):
        _restore(model, optimizer, written)
        del written
    with told.chapter("a step after it"), recorder.discipline.step(*kept):
        step_of(model, objective, optimizer, recorder, microbatch)


@dataclass
class _Told:
    """A life as it is told."""

    recorder: RankRecorder
    storages: Storages
    life: RankLife = field(default_factory=RankLife)

    @contextmanager
    def chapter(self, name: str) -> Iterator[None]:
        """Note what is seen inside."""
        faults = self.recorder.discipline.faults
        known = len(faults)
        yield
        self.life.faults[name] = tuple(dict.fromkeys(map(str, faults[known:])))
        self.life.alive[name] = self.storages.live


def _sums(model: ParallelModel, objective: Objective) -> list[Any]:
    """Return what holds the sums of metrics."""
    return [vars(owner) for owner in (objective, model.routers) if owner is not None]


@contextmanager
def _no_bytes() -> Iterator[None]:
    """Let the host see zeros in the memory of fake tensors."""

    def numpy_of(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        return numpy.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    with mock.patch.object(FakeTensor, "numpy", numpy_of):
        yield


def _stage(parts: Sequence[torch.Tensor], pinned: bool) -> None:
    """Copy the state into a ring that has room for all of it, and take it from there."""
    staging = Staging(2 * sum(part.nbytes for part in parts), pinned=pinned)
    staging.begin(parts)
    staging.settle()
    for _ in staging.drain():
        pass


def _restore(model: ParallelModel, optimizer: ShardedOptimizer, written: Snapshot) -> None:
    """Fill parameters, buffers and the optimizer's state from a checkpoint of what was `written`."""
    manifest = _Manifest(dict(_records(written.chunks)))
    keys = sorted({name.split("/", 2)[1] for name in manifest.tensors if name.startswith("optimizer/")})
    state, states = optimizer_chunks(optimizer, manifest.tensors, keys)
    planner = ChunkLoadPlanner([*model_chunks(model), *state])
    planner.set_up_planner(None, metadata_of(manifest))  # type: ignore[arg-type]
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            record = manifest.tensors[item.storage_index.fqn]
            part = record.slices[item.storage_index.index or 0]
            target = planner.resolve_tensor(item)
            read_box(_BlankFile(), part, TORCH_DTYPES[record.dtype], item, target)  # type: ignore[arg-type]
    load_optimizer(optimizer, states, written.scalars)


def _records(chunks: Sequence[TensorChunk]) -> Iterator[tuple[str, TensorRecord]]:
    """Yield each tensor as if one file held it whole."""
    for chunk in chunks:
        whole = Slice(file="blank", start=0, offset=[0] * len(chunk.shape), shape=list(chunk.shape))
        yield chunk.name, TensorRecord(dtype=STORED_DTYPES[chunk.tensor.dtype], shape=list(chunk.shape), slices=[whole])
