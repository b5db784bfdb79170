"""The state in a host's memory: whole after every step, read on another layout, gone with its launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.host_memory import HostMemory, MemoryPlace, MemoryStore, StateKeeper
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.stores import LocalStore
from shardwise.errors import CheckpointError, DamagedError
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.checkpoints import data_facts
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.checkpoint.test_layouts import a_job, assert_same, save

MODEL = "llama, tied, fp16"
Places = tuple[tuple[MemoryPlace, ...], ...]


def keep_steps(job: Job, places: Places, path: Path) -> None:
    """Keep the state after each of three steps; the last but one is saved too."""
    run = set_up(job, torch.device("cpu"))
    keeper = StateKeeper(run.model, run.optimizer, data_facts(run), places[int(os.environ["LOCAL_RANK"])], 0)
    for step in range(3):
        train_step(run.model, run.objective, run.stream.batches(step), run.optimizer, run.scaler, step)
        progress = Progress(step=step + 1, samples=8 * (step + 1))
        keeper.keep(progress, run.scaler)
        if step == 1:
            save(run, path, progress)


def restore_and_save(job: Job, places: Places, step: int, path: Path) -> list[str]:
    """Go on from memory, from the checkpoints in `path` where it is damaged; what is said of it."""
    run, notes = set_up(job, torch.device("cpu")), list[str]()
    facts, store = data_facts(run), MemoryStore(places, step)
    restored = restore(run.model, run.optimizer, run.scaler, LocalStore(str(path)), facts, notes.append, store)
    if restored is not None:
        assert restored.progress.step == step
        save(run, path, restored.progress)
    return notes


@pytest.mark.parametrize(
    "parallel",
    [
        {"sharded_data_parallel_degree": 1},  # both ranks hold everything
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
    ],
)
def test_memory_holds_the_state_of_a_checkpoint(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    with HostMemory(2) as memory:
        assert memory.steps() == ()
        world_pool.run(2, keep_steps, a_job(corpora, MODEL, parallel), memory.places, tmp_path / "disk")
        assert memory.steps() == (2, 3)
        world_pool.run(1, restore_and_save, a_job(corpora, MODEL, {}), memory.places, 2, tmp_path / "memory")
        assert_same(tmp_path / "disk" / "step-00000002", tmp_path / "memory" / "step-00000002")
        newest = max(memory.places[0], key=lambda place: place.step)
        content = Path(newest.content)
        content.write_bytes(content.read_bytes()[:-1] + b"?")
        assert memory.steps() == (2, 3)  # bytes are judged as they are read
        [notes] = world_pool.run(1, restore_and_save, a_job(corpora, MODEL, {}), memory.places, 3, tmp_path / "none")
        assert not (tmp_path / "none").exists()
        assert "memory of this host is passed over" in notes[-1] and "rank-00000.safetensors" in notes[-1]
        newest.discard()
        assert memory.steps() == (2,)
        paths = [place.content for copies in memory.places for place in copies]
    assert not any(Path(path).exists() for path in paths)


def test_a_write_that_breaks_off_leaves_nothing_that_counts() -> None:
    with HostMemory(1) as memory:
        place = memory.places[0][0]
        place.write(4, [], {"scalars": {}, "about": {}})
        assert place.step == 4 and memory.steps() == ()  # it holds no tensors
        text = Path(place.record).read_bytes()
        for broken in (b"", text[:-3], text.replace(b'"step": 4', b'"step": 5')):
            Path(place.record).write_bytes(broken)
            assert place.read_record() == {} and place.step == -1
        with pytest.raises((DamagedError, CheckpointError, StopIteration)):
            _ = MemoryStore(memory.places, 9).manifest
