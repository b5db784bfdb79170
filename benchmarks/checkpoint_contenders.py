"""What `checkpoint` measures: shardwise, torch.distributed.checkpoint and torch.save on one and the same sharded state.

The state is that of a GPT-NeoX sharded by FSDP2 with AdamW: its parameters as DTensors, and DTensors made around the
optimizer's own tensors. All contenders live in the same processes and write the same bytes.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import BLOCK_BYTES, Progress
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import LocalStore, NewFile
from shardwise.job.schema import Job
from shardwise.kernels.precision import LossScaler
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import resolve
from shardwise.training.init import initialize
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.setup import current_world

Wait = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """Shape of the model."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 8192

    def job(self) -> Job:
        config = {"model_type": "gpt_neox", "hidden_size": self.width, "num_hidden_layers": self.layers,
                  "num_attention_heads": 4, "intermediate_size": 4 * self.width, "vocab_size": self.vocabulary,
                  "max_position_embeddings": 128}  # fmt: skip
        return Job.model_validate(
            {"model": {"config": config}, "data": {"sequence_length": 128}, "parallel": {"device": "cpu"},
             "training": {"sequences_per_step": 8}}
        )  # fmt: skip


@dataclass
class State:
    """One rank's state: the run's parts, and its tensors by name as DCP sees them and as local memory."""

    model: ParallelModel
    optimizer: ShardedOptimizer
    tensors: dict[str, Tensor]  # DTensors where there is more than one rank

    def refresh(self) -> None:
        """After a load that gave the optimizer new tensors."""
        self.tensors = dtensors(self.optimizer)

    @property
    def locals(self) -> dict[str, Tensor]:
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in self.tensors.items()}

    @property
    def bytes(self) -> int:
        """Of this rank."""
        return sum(local.numel() * local.element_size() for local in self.locals.values())


def make_state(size: Size) -> State:
    """The state after one update by random gradients. Collective."""
    job, device = size.job(), torch.device("cpu")
    facts = discover(build_model(job), job)
    plan = resolve(job, current_world(device), facts)
    model = parallelize(build_model(job), plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, seed=0)
    optimizer = ShardedOptimizer.of(model)
    torch.manual_seed(dist.get_rank())
    for _, local in optimizer.locals:
        local.grad = torch.randn_like(local)
    optimizer.inner.step()
    optimizer.zero_grad()
    return State(model, optimizer, dtensors(optimizer))


def dtensors(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Parameters and moments by name, all on the optimizer's present memory."""
    tensors: dict[str, Tensor] = {}
    for entry, local in optimizer.locals:
        like: Any = entry.parameter
        parts = {"model": local.detach(), **optimizer.inner.state[local]}
        for key, value in parts.items():
            if value.dim():
                tensors[f"{key}.{entry.name}"] = (
                    value
                    if not isinstance(like, DTensor)
                    else DTensor.from_local(
                        value,
                        like.device_mesh,
                        like.placements,
                        run_check=False,
                        shape=like.shape,
                        stride=like.stride(),
                    )
                )
    return tensors


class Contender(Protocol):
    """Writes the state to a directory that is not there yet, and reads it back."""

    def save(self, path: Path) -> None:
        """Durable when it returns, on every rank."""
        ...

    def begin(self, path: Path) -> Wait:
        """An asynchronous save: returns when training may go on; call the result to wait for the end."""
        ...

    def load(self, path: Path) -> None:
        """Into `state.tensors`."""
        ...


class Shardwise:
    """`Checkpointer` and `restore`. `share` of the state is what the staging ring may hold."""

    share = 1.0

    def __init__(self, state: State) -> None:
        self.state, self.scaler = state, LossScaler.of("fp32", state.model.plan.job.precision.loss_scale)
        self.data = {"content": "benchmark", "order": "none"}
        self._writers: dict[bool, Checkpointer] = {}
        self.processor = 0.0  # seconds of it that the last asynchronous save's thread took

    @property
    def budget(self) -> int:
        """Staging of one rank in bytes."""
        return int(self.share * (self.state.bytes + 2 * BLOCK_BYTES))

    @property
    def staged(self) -> int:
        """What the asynchronous writer's ring holds."""
        staging = self._writers[True]._staging if True in self._writers else None
        return staging.bytes if staging is not None else 0

    def save(self, path: Path) -> None:
        self._writer(path, asynchronous=False).save(Progress(step=1), self.scaler, wait=True)

    def begin(self, path: Path) -> Wait:
        writer = self._writer(path, asynchronous=True)
        writer.save(Progress(step=1), self.scaler)
        return writer.wait

    def _counted(self, write: Callable[..., None]) -> Callable[..., None]:
        """`write`, which runs on a thread of its own, with that thread's processor time noted."""

        def run(*args: Any) -> None:
            write(*args)
            self.processor = time.thread_time()

        return run

    def load(self, path: Path) -> None:
        model = self.state.model
        checkpoint = model.plan.job.checkpoint.model_copy(update={"resume": "auto"})
        model.plan = replace(model.plan, job=model.plan.job.model_copy(update={"checkpoint": checkpoint}))
        found = restore(model, self.state.optimizer, self.scaler, LocalStore(str(path)), self.data)
        assert found is not None and found.progress.step == 1

    def _writer(self, path: Path, asynchronous: bool) -> Checkpointer:
        """The one of the whole run, on another directory: a run has one, and its staging ring lives as long."""
        store = LocalStore(str(path))
        if asynchronous not in self._writers:
            writer = Checkpointer(self.state.model, self.state.optimizer, store, self.data)
            writer._write = self._counted(writer._write)  # type: ignore[method-assign]
            self._writers[asynchronous] = writer
        writer = self._writers[asynchronous]
        settings = {"asynchronous": asynchronous, "staging_bytes": self.budget}
        writer.settings = writer.settings.model_copy(update=settings)
        writer.store = store
        if dist.get_rank() == 0:
            store.claim(writer._run)
        return writer


class HalfBudget(Shardwise):
    """With staging for half of the state."""

    share = 0.5


class Dcp:
    """torch.distributed.checkpoint with its file system storage, as it comes."""

    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, state: State) -> None:
        self.state = state
        self.group = dist.new_group(backend="gloo")  # of the writing thread, which would else meet the steps' messages

    def save(self, path: Path) -> None:
        dcp.save(self.state.tensors, storage_writer=self._writer(path))

    def begin(self, path: Path) -> Wait:
        future: Any = dcp.async_save(self.state.tensors, storage_writer=self._writer(path), process_group=self.group)
        return lambda: future.result() and None

    def load(self, path: Path) -> None:
        dcp.load(self.state.tensors, storage_reader=dcp.FileSystemReader(path))

    def _writer(self, path: Path) -> Any:
        return dcp.FileSystemWriter(path, **self.settings)


class DcpThreads(Dcp):
    """With as many writing threads as cores."""

    settings = {"thread_count": os.cpu_count() or 1}  # noqa: RUF012


class TorchSave:
    """torch.save and torch.load of each rank's own tensors: no names that another layout could read, no commit."""

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"{dist.get_rank()}.pt").open("wb") as file:
            torch.save(self.state.locals, file)
            file.flush()
            os.fsync(file.fileno())

    def begin(self, path: Path) -> Wait:
        self.save(path)
        return lambda: None

    def load(self, path: Path) -> None:
        found = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
        for name, local in self.state.locals.items():
            local.copy_(found[name])


class Raw:
    """The physical limit: the tensors' bytes written to one file a rank, synced, and read back to their places."""

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"{dist.get_rank()}.raw").open("wb", buffering=0) as file:
            for content in self._contents():
                done = 0
                while done < len(content):
                    done += file.write(content[done:])
            os.fsync(file.fileno())

    def begin(self, path: Path) -> Wait:
        self.save(path)
        return lambda: None

    def load(self, path: Path) -> None:
        with (path / f"{dist.get_rank()}.raw").open("rb", buffering=0) as file:
            for content in self._contents():
                done = 0
                while done < len(content):
                    done += file.readinto(content[done:])

    def _contents(self) -> list[memoryview]:
        return [memoryview(local.view(-1).view(torch.uint8).numpy()) for local in self.state.locals.values()]


class RawBeside(Raw):
    """The floor of a stall: a thread writes as many bytes as the state has, one block over and over, and syncs them.

    Around the page cache like shardwise's own, but without a copy, a hash, a plan or a manifest.
    """

    def begin(self, path: Path) -> Wait:
        path.mkdir(exist_ok=True)
        thread = ThreadPoolExecutor(1)
        writing = thread.submit(self._write, path / f"{dist.get_rank()}.raw")
        thread.shutdown(wait=False)
        return writing.result

    def _write(self, path: Path) -> None:
        with NewFile(path) as file, mmap.mmap(-1, BLOCK_BYTES) as block:
            for _ in range(-(-self.state.bytes // BLOCK_BYTES)):
                file.write(block)
            os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Rank 0 removes what was written; all wait for it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
