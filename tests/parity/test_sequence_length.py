"""Sequences that grow: each stage of `training.sequence_length_schedule` computes what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.data.batch import Batch
from shardwise.data.loader import Stream
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.observe.metrics import read_metrics
from shardwise.plan.sequence_lengths import LengthStage, SequenceLengths
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.session import Session
from tests.checkpoint.test_resume import a_job, cut, data_hashes, losses, resumed, train
from tests.parity.jobs import LENGTH, VOCABULARY, facts_of, tensor_job, verify_one

# Steps of 8 samples of 16 tokens: one of sequences of 4 tokens, one of 8, and whole samples.
SCHEDULE = [{"sequence_length": 4, "until_samples": 7}, {"sequence_length": 8, "until_tokens": 200}]
SIZES = [{"sequences_per_step": 4, "until_samples": 4}]
UNEVEN = {"sequences_per_step": 7}  # with padding
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "one rank": ("gpt2", 1, {}, {}),
    "shard 4": ("gpt2", 4, {}, {"training": UNEVEN}),
    "shard 2, replica 2": ("gpt2", 4, {"sharded_data_parallel_degree": 2}, {}),
    "tensor 2": ("llama", 2, {"tensor_parallel_degree": 2}, {}),
    "sequence parallel": ("llama", 2, {"tensor_parallel_degree": 2, "sequence_parallel": True}, {}),
    "context 2": ("llama", 2, {"context_parallel_degree": 2}, {}),
    "context 2, gathered": ("gpt2", 2, {"context_parallel_degree": 2, "context_parallel_method": "all_gather"}, {}),
    "context 2, ring": ("llama", 2, {"context_parallel_degree": 2, "context_parallel_method": "ring"}, {}),
    "pipeline 2": ("gpt2", 2, {"pipeline_parallel_degree": 2}, {"training": {"sequences_per_step": 4}}),
    "zero bubble": ("gpt2", 2, {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}, {}),
    "pipeline 2, context 2": ("llama", 4, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}, {}),
    "tensor 2, pipeline 2": ("llama", 4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, {}),
    "isolated": ("llama", 2, {}, {"data": {"isolate_documents": True}}),
    "isolated, context 2": ("llama", 2, {"context_parallel_degree": 2}, {"data": {"isolate_documents": True}}),
    "samples": ("gpt2", 2, {}, {"training": {**UNEVEN, "loss_reduction": "sample"}}),
    "masked": ("bert", 2, {"tensor_parallel_degree": 2}, {}),
    "window": ("mistral", 2, {}, {"model": {"attention": "auto"}}),
    "expert 2": ("mixtral", 2, {"expert_parallel_degree": 2}, {"router": {"balancing_loss": "sequence"}}),
    "both schedules": ("gpt2", 2, {"pipeline_parallel_degree": 2}, {"training": {"batch_size_schedule": SIZES}}),
    "checkpointed": ("gpt2", 2, {}, {"memory": {"activation_checkpointing": "full", "offload_activations": True}}),
}
CONFIGS = {"mixtral": {"num_local_experts": 4}, "mistral": {"sliding_window": 6}}


def growing(corpora: Path, family: str, parallel: dict[str, Any], **sections: Any) -> Job:
    keys = {"steps": 5, "sequences_per_step": 8, "sequence_length_schedule": SCHEDULE, **sections.pop("training", {})}
    dropout = 0.0 if family == "mistral" else 0.1
    return tensor_job(
        corpora, family, layers=2, config=CONFIGS.get(family), dropout=dropout, parallel=parallel, training=keys,
        **sections,
    )  # fmt: skip


@pytest.mark.parametrize(
    "layout", [name if name == "pipeline 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_each_stage_is_what_one_process_computes(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    """Three steps, one of each length; dropout tells whether each sequence has masks of its own."""
    family, ranks, parallel, sections = LAYOUTS[layout]
    job = growing(corpora, family, parallel, **sections)
    report = world_pool.run(ranks, verify_one, job, 3, facts_of(job))[0]
    assert report is not None and report.agrees, report and report.render()
    assert "sequence_length_schedule lasts one step" in report.notes[-1]


def test_a_session_without_data_has_no_schedule() -> None:
    training = {"sequence_length_schedule": [{"sequence_length": 1, "until_samples": 4}]}
    with pytest.raises(ConfigError, match="this session has none; leave it out"):
        Session(model=nn.Linear(2, 2), example={"input": torch.ones(2, 2)}, training=training)


class OwnModel(nn.Module):
    """A language model whose blocks look at the mean of what came before."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 13), nn.Tanh(), Looking(13, width)) for _ in "ab")
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden)
        return output


class Looking(nn.Linear):
    """A product of the mean of a position and those before it."""

    def forward(self, input: Tensor) -> Tensor:
        count = torch.arange(1, input.shape[1] + 1, dtype=input.dtype, device=input.device)
        return super().forward(input.cumsum(1) / count[:, None])


def own_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert batch.labels is not None
    loss = nn.functional.cross_entropy(output.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return loss, batch.count()


@pytest.mark.slow
def test_a_module_of_ones_own(world_pool: WorldPool, corpora: Path) -> None:
    keys = growing(corpora, "gpt2", {"pipeline_parallel_degree": 2}).model_dump(exclude_unset=True)
    model = {"factory": f"{__name__}:OwnModel", "loss": f"{__name__}:own_loss"}
    report = world_pool.run(2, verify_one, Job.model_validate({**keys, "model": model}), 3)[0]
    assert report is not None and report.agrees, report and report.render()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "fault"),
    [("held", "wrong_length"), ("whole", "wrong_length"), ("labels", "wrong_data"), ("numbers", "wrong_rows")],
)
def test_a_wrong_cut_is_named(world_pool: WorldPool, corpora: Path, mistake: str, fault: str) -> None:
    report = world_pool.run(2, verify_with, growing(corpora, "gpt2", {}), mistake)[0]
    assert report is not None and report.fault == fault, report and report.diagnosis


def verify_with(job: Job, mistake: str) -> VerifyReport | None:
    """Verify with a loader that keeps the first length, or begins with the last, or cuts samples in a wrong way."""
    right = Stream.__init__
    lengths = {"held": (4, 4, 16), "whole": (16, 16, 16)}.get(mistake)
    stages = None if lengths is None else SequenceLengths(tuple(map(LengthStage, lengths, (0, 8, 16))))

    def init(self: Stream, *args: Any, **keys: Any) -> None:
        right(self, *args, **{**keys, "lengths": stages})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*((Stream, "__init__", init) if stages else (Batch, "cut", WRONG_CUTS[mistake])))
        return verify_one(job)


def without_last_labels(self: Batch, number: int) -> Batch:
    """Leave out what a sequence's last token predicts, the first one of the next sequence."""
    batch = right_cut(self, number)
    assert batch.labels is not None
    batch.labels[:, -1] = IGNORED
    return batch


def with_numbers_of_samples(self: Batch, number: int) -> Batch:
    """Give all sequences of a sample its number."""
    batch = right_cut(self, number)
    batch.rows = self.rows.repeat_interleave(number)
    return batch


right_cut = Batch.cut
WRONG_CUTS = {"labels": without_last_labels, "numbers": with_numbers_of_samples}
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks": (3, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
}


@pytest.mark.slow
def test_resumed_within_a_stage_and_at_its_end(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """Steps of 4, 4, 4, 8, 16 and 16 tokens; checkpoints behind the second and the fourth."""
    schedule = [{"sequence_length": 4, "until_samples": 17}, {"sequence_length": 8, "until_samples": 32}]
    keys: dict[str, Any] = {"dropout": 0.1, "training": {"sequence_length_schedule": schedule, "evaluate_every": 1}}
    job = resumed(a_job(corpora, tmp_path / "run", **keys), resume="none", keep_last=3)
    world_pool.run(1, train, job)
    undisturbed, hashes = losses(job), data_hashes(job)
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert [record["sequence_length"] for record in records] == [4, 4, 4, 8, 16, 16]
    assert [record["tokens"] for record in records] == [128 * (step + 1) for step in range(6)]
    for step in (2, 4):
        for ranks, parallel in RESUMED.values():
            other = a_job(corpora, tmp_path / "run", **keys, parallel=parallel)
            cut(job, step)
            world_pool.run(ranks, train, resumed(other, keep_last=3))
            assert losses(job) == pytest.approx(undisturbed, rel=1e-9)
            assert data_hashes(job) == hashes
    with pytest.raises(WorldError, match=r"sequence_length_schedule=\[\{.*'sequence_length': 4.* the job has \[\]"):
        world_pool.run(2, train, resumed(a_job(corpora, tmp_path / "run", dropout=0.1)))
    whole = a_job(corpora, tmp_path / "whole", dropout=0.1)
    world_pool.run(2, train, whole)
    assert data_hashes(whole) == hashes  # the same samples
