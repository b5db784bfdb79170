"""The state in a host's memory: whole after every step, read on another layout, gone with its launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.host_memory import HostMemory, MemoryPlace, MemoryStore, StateKeeper
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.replica_memory import completed_memory
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


def keep_steps(job: Job, places: Sequence[Sequence[MemoryPlace]], path: Path) -> None:
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
        (tmp_path / "memory" / "step-00000009").mkdir()  # of a host that died while it wrote
        [notes] = world_pool.run(1, restore_and_save, a_job(corpora, MODEL, {}), memory.places, 3, tmp_path / "memory")
        assert not any("memory" in note for note in notes)
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


def test_memory_is_newer_than_what_follows_a_damaged_checkpoint(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    """Of the store's steps 2 and 3 the newest is damaged, and memory holds step 2."""
    job = a_job(corpora, MODEL, {"sharded_data_parallel_degree": 1})
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})
    with HostMemory(2) as memory:
        world_pool.run(2, keep_steps, job, memory.places, tmp_path / "disk")
        world_pool.run(1, restore_and_save, job, memory.places, 3, tmp_path / "store")
        file = next((tmp_path / "store" / "step-00000003").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        [notes] = world_pool.run(1, restore_and_save, job, memory.places, 2, tmp_path / "store")
        assert any("step-00000003 is passed over" in note for note in notes)
    assert_same(tmp_path / "disk" / "step-00000002", tmp_path / "store" / "step-00000002")


def keep_on_two_hosts(job: Job, hosts: Sequence[Places], path: Path) -> None:
    """Keep three steps, each rank on a host of its own."""
    keep_steps(job, [hosts[rank][0] for rank in range(2)], path)


def restore_on_two_hosts(job: Job, hosts: Sequence[Places], step: int, path: Path) -> list[str]:
    """Go on from memory of which each rank's host has its own; what is said of it."""
    places = hosts[dist.get_rank()]
    memory, notes = completed_memory(places, step, torch.device("cpu"))
    if memory is not None:
        assert MemoryStore(places, step).is_whole and all(place.is_sound() for place in places[0] if place.step == step)
        notes += restore_and_save(job, places, step, path)
    return notes


def test_a_host_takes_what_it_lacks_from_another(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """One copy is damaged, then a host is new; where no host has one, it is said."""
    job = a_job(corpora, MODEL, {"sharded_data_parallel_degree": 1})
    with HostMemory(1) as damaged, HostMemory(1) as whole, HostMemory(1) as new:
        world_pool.run(2, keep_on_two_hosts, job, (damaged.places, whole.places), tmp_path / "disk")
        of_step = next(place for place in damaged.places[0] if place.step == 2)
        content = Path(of_step.content)
        content.write_bytes(content.read_bytes()[:-1] + b"?")
        for first, said in ((damaged, "of rank 1 to that of rank 0"), (new, "of rank 1 to that of rank 0")):
            assert (2 in first.steps()) == (first is damaged)
            path, hosts = tmp_path / f"memory-{first is new}", (first.places, whole.places)
            notes, _ = world_pool.run(2, restore_on_two_hosts, job, hosts, 2, path)
            assert said in notes[0] and "passed over" not in " ".join(notes)
            assert_same(tmp_path / "disk" / "step-00000002", path / "step-00000002")
            assert first.steps() == ((2, 3) if first is damaged else (2,))
        hosts = (new.places, new.places)
        notes, _ = world_pool.run(2, restore_on_two_hosts, job, hosts, 7, tmp_path)
        assert notes == ["no host has the state after step 7 whole in its memory"]


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
