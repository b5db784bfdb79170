"""Written on any layout, read on any other: values, optimizer state and scaler bit-equal, each element stored once.

A new axis joins the matrix by its line in LAYOUTS. By default two of four read those of all four, of one model,
with `-m slow` all read all, for every model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import LocalStore
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.checkpoints import data_facts
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import train_step
from tests.checkpoint.stored import scalars, stored
from tests.parity.jobs import make_module_job, tensor_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "shard 2": (2, {}),
    "replica 2": (2, {"sharded_data_parallel_degree": 1}),
    "zero-1": (2, {"shard_optimizer_state": True}),
    "shard 3, uneven": (3, {}),
    "shard 2, replica 2, spread": (4, {"sharded_data_parallel_degree": 2, "placement_strategy": "spread"}),
    "shard 5, empty ranks": (5, {}),
    "shard 4, replica 2": (8, {"sharded_data_parallel_degree": 4}),
    "tensor 2, shard 3, uneven": (6, {"tensor_parallel_degree": 2}),
    "context 2, replica 2": (4, {"context_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "pipeline 2, tensor 2, shard 2": (8, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pipeline 2 in a V, shard 2": (4, {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}),
    "tensor 4, heads in copies": (4, {"tensor_parallel_degree": 4}),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama, tied, fp16": {"tied": True, "layers": 4, "precision": {"compute": "fp16"}},
    "gpt2, untied, NAdam": {
        "tied": False, "layers": 4, "optimizer": {"name": "NAdam"}, "precision": {"compute": "fp64"},
    },
    "falcon, heads in groups": {"layers": 4},
    "mixtral, stacks of experts": {"layers": 4},
    "module with buffers": {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}}},
}  # fmt: skip


def a_job(corpora: Path, model: str, parallel: dict[str, Any]) -> Job:
    settings = {**MODELS[model], "parallel": parallel}
    if model.startswith("module"):  # nothing says how its tensors and sequences are split, nor where stages are
        split = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "pipeline")
        settings["parallel"] = {key: value for key, value in parallel.items() if key not in split}
        return make_module_job(corpora, **settings)
    return tensor_job(corpora, model.split(",")[0], **settings)


def save(run: AssembledJob, path: Path, progress: Progress) -> None:
    Checkpointer(run.model, run.optimizer, LocalStore(str(path)), data_facts(run)).save(progress, run.scaler, wait=True)


def write(job: Job, path: Path) -> None:
    """Two steps, then a checkpoint."""
    run = set_up(job, torch.device("cpu"))
    for step in range(2):
        train_step(run.model, run.objective, run.stream.batches(step), run.optimizer, run.scaler, step)
    save(run, path, Progress(step=2, samples=16))


def read_and_write(job: Job, sources: list[Path], targets: list[Path]) -> list[Progress]:
    """Restore each of `sources` in turn and write it again from this layout."""
    run = set_up(job, torch.device("cpu"))
    found = []
    for source, target in zip(sources, targets, strict=True):
        wanted = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": str(source)})})
        run.model.plan = replace(run.model.plan, job=wanted)
        restored = restore(run.model, run.optimizer, run.scaler, LocalStore("unused"), data_facts(run))
        assert restored is not None
        found.append(restored.progress)
        save(run, target, restored.progress)
    return found


def assert_same(one: Path, other: Path) -> None:
    first, second = stored(one), stored(other)
    names = {name for name in first if not name.startswith("random/")}
    assert names == {name for name in second if not name.startswith("random/")}
    assert any(name.startswith("optimizer/") for name in names)
    for name in names:
        assert torch.equal(first[name], second[name]), name
    assert scalars(one) == scalars(other)


QUICK = "llama, tied, fp16"
FOUR = ("zero-1", "shard 5, empty ranks", "tensor 2, shard 3, uneven", "pipeline 2 in a V, shard 2")
SOME = pytest.param((QUICK, FOUR), id=QUICK)
ALL = [pytest.param((model, tuple(LAYOUTS)), id=f"all, {model}", marks=pytest.mark.slow) for model in MODELS]


@pytest.fixture(scope="module")
def written(
    request: pytest.FixtureRequest, world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """Checkpoints of a model, one of each layout that the parameter names."""
    model, layouts = request.param
    paths = []
    for number, layout in enumerate(layouts):
        ranks, parallel = LAYOUTS[layout]
        path = tmp_path_factory.mktemp("written") / str(number)
        world_pool.run(ranks, write, a_job(corpora, model, parallel), path)
        paths.append(path / "step-00000002")
    return model, paths


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("written", [SOME], indirect=True)
def test_layouts_read_some_others(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, written: tuple[str, list[Path]], layout: str
) -> None:
    (model, sources), (ranks, parallel) = written, LAYOUTS[layout]
    check_reading(world_pool, a_job(corpora, model, parallel), ranks, sources, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("written", ALL, indirect=True)
def test_any_layout_reads_every_other(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, written: tuple[str, list[Path]], layout: str
) -> None:
    (model, sources), (ranks, parallel) = written, LAYOUTS[layout]
    check_reading(world_pool, a_job(corpora, model, parallel), ranks, sources, tmp_path)


def check_reading(world_pool: WorldPool, job: Job, ranks: int, sources: list[Path], tmp_path: Path) -> None:
    targets = [tmp_path / str(number) for number in range(len(sources))]
    found = world_pool.run(ranks, read_and_write, job, sources, targets)
    assert found == [[Progress(step=2, samples=16)] * len(sources)] * ranks
    for source, target in zip(sources, targets, strict=True):
        assert_same(source, target / "step-00000002")


@pytest.mark.parametrize("written", [SOME, *ALL], indirect=True)
def test_ties_and_copies_are_stored_once(written: tuple[str, list[Path]]) -> None:
    model, paths = written
    sizes = [sum(t.numel() * t.element_size() for n, t in stored(path).items() if n[:6] != "random") for path in paths]
    assert len(set(sizes)) == 1
    assert ("model/lm_head.weight" in stored(paths[0])) == ("untied" in model)


def scale_after(before: Job, after: Job, path: Path) -> float:
    """Return the loss scale with which the job `after` goes on from a checkpoint of `before`."""
    save(set_up(before, torch.device("cpu")), path, Progress(step=2, samples=16))
    run = set_up(after, torch.device("cpu"))
    restore(run.model, run.optimizer, run.scaler, LocalStore("unused"), data_facts(run))
    return run.scaler.scale


@pytest.mark.parametrize("before", [{"compute": "fp32"}, {"compute": "fp16", "loss_scale": {"static": 8.0}}])
def test_a_run_that_begins_to_move_its_loss_scale_begins_with_its_own(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, before: dict[str, Any]
) -> None:
    """That of a run in fp32 is 1: gradients of fp16 would be lost under it, and nobody would see it."""
    own = {"compute": "fp16", "loss_scale": {"init_scale": 512.0}}
    jobs = [make_module_job(corpora, precision=precision) for precision in (before, own)]
    jobs[1] = jobs[1].model_copy(
        update={"checkpoint": jobs[1].checkpoint.model_copy(update={"resume": str(tmp_path / "step-00000002")})}
    )
    assert world_pool.run(1, scale_after, *jobs, tmp_path) == [512.0]
