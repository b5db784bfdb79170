"""The loops of docs/how-to/own-loop.md, run from the page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.job.sources import job_to_yaml
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.trainer import train_rank
from tests.fork_server import run_python
from tests.pages import load_block, python_blocks
from tests.parity.jobs import make_job

PAGE = "how-to/own-loop.md"


def losses_of_page(job_file: str) -> list[float]:
    losses: list[float] = load_block(PAGE, "train").train(job_file)
    return losses


def losses_of_trainer(job: Job) -> list[float]:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    result = train_rank(job, torch.device("cpu"))
    torch.distributed.barrier()  # rank 0 has written its records
    records = [json.loads(line) for line in (Path(job.output) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record] + [result.validation_loss or 0.0]


def test_the_loop_is_complete_in_35_lines() -> None:
    [loop] = [block for block in python_blocks(PAGE) if "def train" in block]
    assert len(loop.splitlines()) <= 35


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_pages_loop_gives_the_trainers_losses(
    ranks: int, world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = make_job(corpora, layers=1, observe={"tensorboard": False, "sample": False})
    trained = job.model_copy(update={"output": str(tmp_path / "trained")})
    looped = job.model_copy(update={"output": str(tmp_path / "looped")})
    (tmp_path / "job.yaml").write_text(job_to_yaml(looped))
    expected = world_pool.run(ranks, losses_of_trainer, trained)
    for losses in world_pool.run(ranks, losses_of_page, str(tmp_path / "job.yaml")):
        assert losses == pytest.approx(expected[0], rel=1e-14)  # with AVX2 alone, two runs of the trainer differ so too
    assert len(expected[0]) == job.training.steps + 1
    assert (tmp_path / "looped" / "checkpoints" / "step-00000004").is_dir()


LAUNCH = """
import json
import os
import sys

import shardwise
from loop import train

if __name__ == "__main__":
    if "RANK" in os.environ:  # a launcher's
        losses = [train(sys.argv[1])]
    else:
        losses = shardwise.run_local(train, (sys.argv[1],), workers=2)
    sys.stdout.write(json.dumps(losses) + "\\n")  # in one piece: ranks share the stream
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["run_local", "torchrun"]
)
def test_launched_ranks_give_the_trainers_losses(
    launcher: tuple[str, ...], world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    [loop] = [block for block in python_blocks(PAGE) if "def train" in block]
    (tmp_path / "loop.py").write_text(loop)
    (tmp_path / "launch.py").write_text(LAUNCH)
    job = make_job(corpora, layers=1, training={"steps": 2}, observe={"tensorboard": False, "sample": False})
    looped = job.model_copy(update={"output": str(tmp_path / "looped")})
    (tmp_path / "job.yaml").write_text(job_to_yaml(looped))
    done = run_python(*launcher, "launch.py", "job.yaml", cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    losses = [line for text in done.stdout.splitlines() if text.startswith("[[") for line in json.loads(text)]
    trained = job.model_copy(update={"output": str(tmp_path / "trained")})
    assert losses == [pytest.approx(expected, rel=1e-12) for expected in world_pool.run(2, losses_of_trainer, trained)]


def own_losses(job: Job, *layouts: dict[str, int]) -> list[list[float]]:
    """Losses of the job's own loss on one layout, and of the same loss written by hand on each of several."""

    def cross_entropy(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", ignore_index=-100
        )
        return losses, batch.count()

    found = []
    for number, layout in enumerate([{}, *layouts]):
        with Session(job, parallel=layout) as session:
            function = cross_entropy if number else None
            steps = [session.step(batches, loss_function=function).loss for batches in session.batches()]
            found.append([*steps, session.evaluate(loss_function=function)])
    return found


def test_a_loss_of_ones_own_sees_whole_outputs_on_every_axis(world_pool: WorldPool, corpora: Path) -> None:
    from tests.parity.jobs import tensor_job

    job = tensor_job(corpora, "llama", training={"steps": 2}, parallel={"ddp_dist_backend": "gloo"})
    axes = ("sharded_data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    expected, *found = world_pool.run(2, own_losses, job, *({f"{axis}_degree": 2} for axis in axes))[0]
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-12)


def losses_of_own_model() -> list[float]:
    losses: list[float] = load_block(PAGE, "fit").fit()
    return losses


def test_a_model_and_data_of_ones_own_train_alike_on_any_ranks(world_pool: WorldPool) -> None:
    [alone] = world_pool.run(1, losses_of_own_model)
    assert sum(alone[-5:]) < 0.8 * sum(alone[:5])
    for losses in world_pool.run(2, losses_of_own_model):
        assert losses == pytest.approx(alone, rel=1e-5)
