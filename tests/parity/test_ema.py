"""Averaged weights are torch's `AveragedModel` on every layout: trained, evaluated, saved, resumed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise.checkpoint.export import export_checkpoint
from shardwise.errors import LegalityError, OutputError
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.parallel.averaged_weights import AveragedWeights
from shardwise.parallel.layout import Layout
from shardwise.parallel.tensor_map import TensorMap
from shardwise.plan.plan import World, resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import study
from shardwise.training.state_table import state_bytes
from tests.parity.jobs import check_agrees, tensor_job, verify_one

DECAY = 0.75
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "shard 4": ("gpt2", 4, {}),
    "shard 2, replica 2": ("gpt2", 4, {"sharded_data_parallel_degree": 2}),
    "zero-1": ("gpt2", 2, {"shard_optimizer_state": True}),
    "tensor 2": ("llama", 2, {"tensor_parallel_degree": 2}),
    "pipeline 2": ("gpt2", 2, {"pipeline_parallel_degree": 2}),
    "tensor 2, pipeline 2": ("llama", 4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "expert 2": ("mixtral", 2, {"expert_parallel_degree": 2}),
}


EXPERTS = {"num_local_experts": 4}


def ema_job(corpora: Path, family: str = "gpt2", **sections: dict[str, Any]) -> Job:
    training = {"ema_decay": DECAY, "steps": 4, "sequences_per_step": 8, **sections.pop("training", {})}
    return tensor_job(corpora, family, layers=2, training=training, **sections)


def test_it_is_torchs_average_bit_for_bit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[1].bias.requires_grad_(False)
    ours, theirs = (
        AveragedWeights(TensorMap.of([net], Layout({})), DECAY),
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    )
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += parameter.requires_grad * torch.randn_like(parameter)
        ours.update()
        theirs.update_parameters(net)
    right = dict(theirs.module.named_parameters())
    assert ours.values.keys() == {"0.weight", "0.bias", "1.weight"}  # what is frozen has none
    assert all(torch.equal(value, right[name]) for name, value in ours.values.items())
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    ours.swap()
    assert all(torch.equal(parameter, right[name]) for name, parameter in net.named_parameters())
    ours.swap()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in net.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_process(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    family, ranks, parallel = LAYOUTS[layout]
    job = ema_job(corpora, family, config=EXPERTS if family == "mixtral" else {}, parallel=parallel)
    report = world_pool.run(ranks, verify_one, job)[0]
    assert report is not None and report.agrees, (report.first, report.diagnosis)
    assert {d.quantity for d in report.differences} >= {"average", "evaluation loss"}


class Outcome(NamedTuple):
    """What a run has come to: the evaluation's record, whole averages, and their bytes, measured and predicted."""

    evaluated: dict[str, Any]
    averages: dict[str, Tensor]
    measured: int
    predicted: float
    notes: list[str]


def train(job: Job) -> Outcome:
    """Train from the newest checkpoint, where there is one; a checkpoint is written after two steps and at the end."""
    with Session(job, device=torch.device("cpu")) as session:
        session.restore()
        for batches in session.batches():
            session.step(batches)
            if session.steps_done in (2, 4):
                session.save()  # which is still written while the averages are evaluated
                session.evaluate()
        with session.model.ema_in_place():
            averages = {name: whole.clone() for name, whole in session.model.whole_tensors()}
        assembled = session.assembled
        predicted = estimate(session.plan, session.facts).ema
        return Outcome(session.evaluated, averages, state_bytes(assembled)["ema"], predicted, session.notes)


def without_last(job: Job) -> None:
    for path in Path(str(job.checkpoint.directory)).glob("step-00000004/*"):
        path.unlink()


def test_it_goes_on_on_another_layout_and_is_exported(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    kept = {"resume": "auto", "directory": str(tmp_path / "kept")}
    job = ema_job(corpora, tied=True, checkpoint=kept, model={"freeze": ["transformer.wpe"]})
    whole = world_pool.run(2, train, job)[0]
    assert whole.measured == pytest.approx(whole.predicted, rel=0.01)
    assert whole.evaluated["validation_loss/ema"] != whole.evaluated["validation_loss"]
    exported = export_checkpoint(str(tmp_path / "kept"), tmp_path / "exported", ema=True)
    written = load_file(exported / "model.safetensors")
    assert all(torch.equal(written[name], average) for name, average in whole.averages.items())
    without_last(job)
    split = ema_job(corpora, tied=True, checkpoint=kept, model={"freeze": ["transformer.wpe"]},
                    parallel={"tensor_parallel_degree": 2})  # fmt: skip
    resumed = world_pool.run(2, train, split)[0]
    for name, average in whole.averages.items():
        torch.testing.assert_close(resumed.averages[name], average, rtol=1e-9, atol=1e-12)
    assert resumed.evaluated["validation_loss/ema"] == pytest.approx(whole.evaluated["validation_loss/ema"], rel=1e-9)


@pytest.mark.slow
def test_a_checkpoint_without_averages(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    kept = {"resume": "auto", "directory": str(tmp_path / "kept")}
    plain = ema_job(corpora, checkpoint=kept, training={"ema_decay": None, "steps": 3})
    world_pool.run(1, save_after_two, plain)
    with pytest.raises(OutputError, match=r"--ema: the checkpoint .* has no averaged weights"):
        export_checkpoint(str(tmp_path / "kept"), tmp_path / "exported", ema=True)
    found = world_pool.run(1, train, ema_job(corpora, checkpoint=kept, training={"steps": 3}))[0]
    assert any(
        "has no averaged weights; the average begins with the weights of the next step" in n for n in found.notes
    )


def averaged_while_saving(job: Job) -> bool:
    """Return whether averages come into the model's place only once what is being saved is held."""
    with Session(job, device=torch.device("cpu")) as session, pytest.MonkeyPatch.context() as patch:
        settled: list[bool] = []
        patch.setattr(session.checkpoints, "settle", lambda: settled.append(True))
        with session.ema_in_place():
            return settled == [True]


def test_averages_wait_for_what_is_being_saved(world_pool: WorldPool, corpora: Path) -> None:
    assert world_pool.run(1, averaged_while_saving, ema_job(corpora)) == [True]


def save_after_two(job: Job) -> None:
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
            if session.steps_done == 2:
                session.save(wait=True)
                break


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_of_adapters_alone_averages_are_kept(world_pool: WorldPool, corpora: Path, tmp_path: Path, kind: str) -> None:
    job = ema_job(corpora, "llama", adapter={"kind": kind, "rank": 4}, parallel={"tensor_parallel_degree": 2})
    check_agrees(world_pool, 2, job)


@pytest.mark.slow
def test_a_stale_average_is_noticed(world_pool: WorldPool, corpora: Path) -> None:
    report = world_pool.run(2, verify_with, ema_job(corpora), "stale_average")[0]
    assert not report.agrees and report.fault == "wrong_average"


def verify_with(job: Job, fault: str) -> Any:
    with FAULTS[fault]():
        return verify_one(job)


def test_a_source_cannot_have_the_metrics_name(corpora: Path) -> None:
    sources = [{"name": name, "path": str(corpora / "tokens.jsonl"), "weight": 1} for name in ("ema", "other")]
    job = ema_job(corpora)
    mixed = job.model_copy(update={"data": job.data.model_validate({"sources": sources, "sequence_length": 16})})
    with pytest.raises(LegalityError, match="name the set or the source otherwise"):
        resolve(mixed, World(1, "cpu", 1), study(job))


def test_a_set_cannot_have_the_metrics_name(corpora: Path) -> None:
    job = ema_job(corpora, evaluation={"sets": {"ema": str(corpora / "tokens.jsonl")}})
    facts: ModelFacts = study(job)
    with pytest.raises(LegalityError, match="name the set or the source otherwise"):
        resolve(job, World(1, "cpu", 1), facts)
