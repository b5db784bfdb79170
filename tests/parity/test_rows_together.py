"""Rows that change each other's numbers: with a microbatch size all layouts compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.oracle import Oracle
from shardwise.testing.world import WorldPool
from tests.parity.jobs import LENGTH, VOCABULARY, make_job, verify_one


class Coupled(nn.Module):
    """A model of tokens, each of whose blocks takes the mean over the rows away, or norms them together."""

    def __init__(self, norms: bool, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 13), nn.Tanh(), nn.Linear(13, width)) for _ in "ab")
        self.norm = nn.BatchNorm1d(width) if norms else None
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            hidden = hidden + block(hidden - hidden.mean(0, keepdim=True) if self.norm is None else hidden)
            hidden = hidden if self.norm is None else self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.head(hidden)
        return output


def of_means() -> nn.Module:
    return Coupled(norms=False)


def of_norms() -> nn.Module:
    return Coupled(norms=True)


def summed(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert batch.labels is not None
    loss = nn.functional.cross_entropy(output.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return loss, batch.count()


def coupled_job(corpora: Path, factory: str, **training: Any) -> Job:
    keys = make_job(corpora, training={"microbatch_size": 2, **training}).model_dump(exclude_unset=True)
    keys["model"] = {"factory": f"{__name__}:{factory}", "loss": f"{__name__}:summed"}
    return Job.model_validate(keys)


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["of_means", "of_norms"])
@pytest.mark.parametrize(("ranks", "sequences"), [(1, 8), (2, 8), (2, 7)])
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, factory: str, ranks: int, sequences: int
) -> None:
    """Padding, which counts nowhere, changes rows too."""
    report = world_pool.run(ranks, verify_one, coupled_job(corpora, factory, sequences_per_step=sequences))[0]
    assert report is not None and report.agrees, report and report.render()
    assert not any("moves gradients by its rounding" in note for note in report.notes)


@pytest.mark.slow
def test_other_rows_together_are_no_rounding(world_pool: WorldPool, corpora: Path) -> None:
    report = world_pool.run(2, verify_apart, coupled_job(corpora, "of_means"))[0]
    assert report is not None and not report.agrees
    assert "rows of the model change each other's numbers" in report.notes[0]


def verify_apart(job: Job) -> VerifyReport | None:
    """Verify with an oracle that does not know which rows are together."""
    right = Oracle.__init__

    def init(self: Oracle, *args: Any, **keys: Any) -> None:
        right(self, *args, **{**keys, "rows_together": None})

    with mock.patch.object(Oracle, "__init__", init):
        return verify_one(job)
