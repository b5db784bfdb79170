"""Values that are known before a run: of files and of constructors; a start that has others is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.oracle_start import known_start
from shardwise.testing.start_check import compare_known_start
from shardwise.testing.world import WorldPool
from shardwise.training import given_model
from tests.habits.trial import make_job
from tests.parity.jobs import make_job as make_language_job
from tests.parity.jobs import verify_one


class SeededByItself(nn.Module):
    """Its constructor sets a seed, its offset is a number, and its slope is drawn from a generator of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.drawn = nn.Linear(3, 3)
        self.offset = nn.Parameter(torch.linspace(0, 1, 3))
        self.slope = nn.Parameter(torch.randn(32, generator=torch.Generator().manual_seed(1)))


def test_drawn_values_are_not_known_and_computed_ones_are() -> None:
    job = Job.model_validate({"model": {"factory": f"{__name__}:SeededByItself"}})
    known = known_start(job)
    assert set(known) == {"offset"}
    assert torch.equal(known["offset"], torch.linspace(0, 1, 3))


def test_a_file_of_weights_says_more(tmp_path: Path) -> None:
    torch.save({"drawn.bias": torch.ones(3)}, tmp_path / "some.pt")
    model = {"factory": f"{__name__}:SeededByItself", "weights": str(tmp_path / "some.pt")}
    assert set(known_start(Job.model_validate({"model": model}))) == {"offset", "drawn.bias"}


def test_a_directory_says_all_that_its_files_hold(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_head=1, n_layer=1, vocab_size=7, n_positions=8))
    model.save_pretrained(tmp_path)
    known = known_start(Job.model_validate({"model": {"path": str(tmp_path)}}))
    expected = dict(model.named_parameters())
    assert expected.keys() <= known.keys()
    assert all(torch.equal(known[name], value.double()) for name, value in expected.items())


def test_other_values_than_known_ones_are_named() -> None:
    known = {"a": torch.ones(2), "b": torch.ones(2), "rounded": torch.full((2,), 0.1)}
    ours = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.001]), "rounded": known["rounded"].bfloat16()}
    found = compare_known_start(ours, known, {"rounded": "bfloat16"})
    assert [difference.agrees for difference in found] == [True, False, True]
    assert found[1].name == "b: other values than it has"


def _verified(job: Job, doubles: bool) -> VerifyReport | None:
    given = given_model._of_rank_0

    def doubled(value: Tensor, device: Any) -> Tensor:
        return given(value, device) * (2 if doubles else 1)

    with mock.patch.object(given_model, "_of_rank_0", doubled):
        return verify_one(job, 1)


@pytest.mark.slow
@pytest.mark.parametrize("doubles", [False, True])
def test_values_that_are_doubled_when_they_are_placed_are_named(
    world_pool: WorldPool, corpora: Path, doubles: bool
) -> None:
    report = world_pool.run(1, _verified, make_job(str(corpora), "Loaded", {}), doubles)[0]
    assert report is not None and report.agrees is not doubles
    if doubles:
        assert report.first is not None and "first.weight: other values" in report.first.name


@pytest.mark.slow
def test_the_start_of_a_directory_is_compared(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = make_language_job(corpora, layers=1)
    assert isinstance(job.model.config, dict)
    config = {name: value for name, value in job.model.config.items() if name != "model_type"}
    GPT2LMHeadModel(GPT2Config(**config)).save_pretrained(tmp_path)
    model = job.model.model_copy(update={"config": None, "path": str(tmp_path)})
    report = world_pool.run(2, verify_one, job.model_copy(update={"model": model}), 1)[0]
    assert report is not None and report.agrees
    assert any(difference.quantity == "plain start" for difference in report.differences)
