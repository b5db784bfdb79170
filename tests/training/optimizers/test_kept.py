"""State that is kept: averages are evaluated and exported while training goes on at y; blocks move between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.export import export_checkpoint
from shardwise.job.schema import Job
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.session import Session
from tests.checkpoint.stored import stored
from tests.checkpoint.test_resume import cut, losses, resumed, train
from tests.parity.test_optimizers import LAYOUTS, OPTIMIZERS, job_of

BETA = 0.95
QUIET = {"tensorboard": False, "sample": False}


def kept_job(corpora: Path, output: Path, name: str, parallel: dict[str, Any], **checkpoint: Any) -> Job:
    """Four steps, a checkpoint after every second."""
    job = job_of(corpora, name, parallel, layers=2)
    sections = {"checkpoint": {"every": 2, **checkpoint}, "observe": QUIET, "output": str(output)}
    return Job.model_validate({**job.model_dump(), **sections})


def weights_after(job: Job, evaluates: bool) -> dict[str, dict[str, Tensor]]:
    """Train; return the weights as they are trained, as they are evaluated, and as they are trained again."""
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
            if evaluates:
                session.evaluate()

        def whole() -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in session.model.whole_tensors()}

        found = {"trained": whole()}
        with session.averaged():
            found["evaluated"] = whole()
        return found | {"after": whole()}


def test_evaluation_reads_the_average_and_leaves_training_where_it_is(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = kept_job(corpora, tmp_path / "run", "ScheduleFreeAdamW", {}, every=0)
    plain = world_pool.run(2, weights_after, job, False)[0]
    evaluated = world_pool.run(2, weights_after, job, True)[0]
    for name, tensor in plain["trained"].items():
        assert torch.equal(evaluated["trained"][name], tensor)
        assert torch.equal(evaluated["after"][name], tensor)
    assert any(not torch.equal(plain["evaluated"][name], tensor) for name, tensor in plain["trained"].items())


def test_what_is_exported_is_the_average(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = kept_job(corpora, tmp_path / "run", "ScheduleFreeAdamW", {})
    world_pool.run(2, train, job)
    state = stored(tmp_path / "run/checkpoints/step-00000004")
    of_run = load_file(tmp_path / "run/model/model.safetensors")
    of_checkpoint = load_file(export_checkpoint(job.output, tmp_path / "out") / "model.safetensors")
    trained = {key.removeprefix("model/"): value for key, value in state.items() if key.startswith("model/")}
    for name, y in trained.items():
        x = (y - (1 - BETA) * state[f"optimizer/z/{name}"]) / BETA
        for exported in (of_run, of_checkpoint):
            torch.testing.assert_close(exported[name], x.to(exported[name].dtype))
    assert not torch.allclose(of_run["transformer.wte.weight"].double(), trained["transformer.wte.weight"])


def test_blocks_of_another_size_are_refused_and_nothing_is_lost(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = kept_job(corpora, tmp_path / "run", "AdamW8bit", {})
    world_pool.run(1, train, job)
    before = sorted((tmp_path / "run").rglob("*.safetensors"))
    other = Job.model_validate(
        {**resumed(job).model_dump(), "optimizer": {"name": "AdamW8bit", "options": {"block_size": 49}}}
    )
    with pytest.raises(WorldError, match=r"block_size 48, the job has 49; set optimizer\.options"):
        world_pool.run(1, train, other)
    assert sorted((tmp_path / "run").rglob("*.safetensors")) == before


def settled(optimizer: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter without a key's bias under Lion: its gradient is rounding alone, and so is the sign."""
    if optimizer != "Lion" or not name.endswith("c_attn.bias"):
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "first, second",
    [
        ("shard 3, uneven", "tensor 2, shard 2"),
        ("tensor 2", "pipeline 2, shard 2"),
        ("tensor 2, pipeline 2", "shard 2, replica 2"),
        ("tensor 4, heads in copies", "zero-1"),
        ("expert 2", "expert 2, tensor 2"),
        ("expert 2, tensor 2", "expert 2"),
    ],
)
def test_resumed_on_another_layout(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, name: str, first: str, second: str
) -> None:
    (ranks, parallel), (others, other) = LAYOUTS[first], LAYOUTS[second]
    job = kept_job(corpora, tmp_path / "run", name, parallel, keep_last=3)
    whole = world_pool.run(ranks, train, job)[0]
    undisturbed = losses(job)
    weights = load_file(tmp_path / "run/model/model.safetensors")
    cut(job, 2)
    again = world_pool.run(others, train, resumed(kept_job(corpora, tmp_path / "run", name, other)))[0]
    assert losses(job) == pytest.approx(undisturbed, rel=1e-9)
    assert again.validation_loss == pytest.approx(whole.validation_loss, rel=1e-9)
    for key, tensor in load_file(tmp_path / "run/model/model.safetensors").items():
        own, expected = settled(name, key, tensor), settled(name, key, weights[key])
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)
