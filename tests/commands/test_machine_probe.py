"""The probe's arithmetic, and one process of it for real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import engine
from shardwise.commands import machine_probe as calibrate
from shardwise.commands.machine_probe import (
    Growth,
    RankProbe,
    fitted,
    fitted_growth,
    middle,
    predicted_seconds,
    slowest,
)
from shardwise.errors import MachineError
from shardwise.job.schema import Job
from shardwise.planner.formulas.local import MachineConstants


def test_a_ring_is_found_again() -> None:
    hop, link = 2e-4, 3.0
    gathers = {n: [(size, (n - 1) * (hop + size / link / 1e9)) for size in calibrate.GATHERED] for n in (2, 4)}
    found = fitted(gathers)
    assert found == (pytest.approx(hop), pytest.approx(link))


def test_the_slowest_rank_sets_the_pace() -> None:
    ranks = [
        RankProbe(0.1, 5.0, [(8, 0.1), (16, 0.4)], 2.0),
        RankProbe(0.2, 4.0, [(8, 0.3), (16, 0.2)], 1.0),
    ]
    assert slowest(ranks) == RankProbe(0.1, 4.0, [(8, 0.3), (16, 0.4)], 2.0)


def test_one_disturbed_round_does_not_count() -> None:
    quiet = [RankProbe(0.10, 5.0, [(8, 0.1)], 2.0), RankProbe(0.12, 5.2, [(8, 0.3)], 2.2)]
    disturbed = RankProbe(0.01, 0.5, [(8, 9.0)], 30.0)
    assert middle([quiet[0], disturbed, quiet[1]]) == RankProbe(0.10, 5.0, [(8, 0.3)], 2.2)


def test_ranks_that_were_not_measured_share_what_the_nearest_do_together() -> None:
    constants = MachineConstants(
        {1: 0.1, 2: 0.06, 4: 0.03}, {1: 8.0, 2: 5.0, 4: 2.5}, 1.0, 1e-4, {1: 1.0, 4: 1.3}, 0.0, ""
    )
    assert constants.rate(constants.tflops, 2) == 0.06
    assert constants.rate(constants.tflops, 8) == pytest.approx(0.015)
    assert constants.rate(constants.bandwidth, 16) == pytest.approx(0.625)
    assert (constants.factor(1), constants.factor(8)) == (1.0, 1.3)


def test_growth_is_a_constant_and_a_share_of_the_activations() -> None:
    little, much = (Growth(kept, 80e6 + 0.25 * kept) for kept in (100e6, 400e6))
    assert fitted_growth(little, much) == (pytest.approx(80e6), pytest.approx(0.25))
    assert fitted_growth(much, much) == (pytest.approx(much.size), 0.0)


def test_a_faster_machine_is_predicted_to_be_faster() -> None:
    slow = MachineConstants({1: 0.02}, {1: 5.0}, 1.0, 1e-4, {1: 1.0}, 0.0, "a test")
    fast = MachineConstants({1: 0.08}, {1: 20.0}, 1.0, 1e-4, {1: 1.0}, 0.0, "a test")
    assert predicted_seconds(fast, 1) < predicted_seconds(slow, 1) / 2


def test_the_probe_puts_together_what_its_processes_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    hop, link = 2e-4, 3.0
    seconds = {1: iter((2.0, 4.0)), 2: iter((3.0, 3.0))}  # of a step, in each round

    def run(function: Any, arguments: tuple[Any, ...], ranks: int) -> list[Any]:
        if function is calibrate._grown:
            rows = arguments[0]["training"]["microbatch_size"]
            return [Growth(rows * 1e6, 5e6 + 0.25 * rows * 1e6)]
        assert arguments[0]["parallel"]["workers"] == ranks
        gathers = [(size, (ranks - 1) * (hop + size / link / 1e9)) for size in calibrate.GATHERED]
        slowest_step = next(seconds[ranks])
        return [RankProbe(0.1 / ranks, 8.0 / ranks, gathers, slowest_step - rank) for rank in range(ranks)]

    monkeypatch.setattr(calibrate, "PROCESSES", (1, 2))
    monkeypatch.setattr(calibrate, "run_local", run)
    monkeypatch.setattr(calibrate, "predicted_seconds", lambda constants, ranks: 1.5)
    said: list[str] = []
    constants = calibrate.probe(said.append)
    assert constants.tflops == {1: 0.1, 2: 0.05} and constants.bandwidth == {1: 8.0, 2: 4.0}
    assert (constants.hop_seconds, constants.link) == (pytest.approx(hop), pytest.approx(link))
    assert (constants.growth, constants.growth_share) == (pytest.approx(5e6), pytest.approx(0.25))
    assert constants.step_factor == {1: 2.0, 2: 2.0}
    assert f"torch {torch.__version__}" in constants.source
    assert "round 2 of 2: measuring with 2 processes" in said


def test_gloo_is_measured_where_the_engine_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(say: Any) -> None:
        raise MachineError("no compiler")

    monkeypatch.setattr(engine, "build", refuse)
    said: list[str] = []
    assert calibrate._backend(said.append) == "gloo" and said == ["note: measuring Gloo. no compiler"]


TINY = {
    "model": {"config": {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}},
    "training": {"sequences_per_step": 4, "microbatch_size": 2},
    "data": {"sequence_length": 8, "vocabulary_size": 64},
    "parallel": {"device": "cpu"},
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_measures_what_it_does(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, copies, and a training with so little in it that they take no time."""
    small = {"PRODUCTS": ((4, 4, 4),), "COPIED": 1024, "REPEATS": 2, "STEPS": 2}
    monkeypatch.setattr(calibrate, "train_step", Mock(wraps=calibrate.train_step))
    for name, value in small.items():
        monkeypatch.setattr(calibrate, name, value)
    assert calibrate._products() > 0 and calibrate._copies() > 0
    assert calibrate._gathers() == []  # there is nobody to gather from
    seconds, growth = calibrate._training(Job.model_validate(TINY), torch.device("cpu"))
    assert seconds > 0 and growth.activations > 0
    assert calibrate.train_step.call_count == 2
    _, _, batches, *_ = calibrate.train_step.call_args.args
    assert [batch.labels.shape for batch in batches] == [(2, 8), (2, 8)]  # sequences_per_step by microbatches


@pytest.mark.slow
def test_the_probe_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "PROCESSES", (1, 2))
    monkeypatch.setattr(calibrate, "ROUNDS", 1)  # each takes half a minute where nothing else runs
    constants = calibrate.probe(lambda text: None)
    assert set(constants.tflops) == {1, 2} and all(rate > 0 for rate in constants.tflops.values())
    assert constants.link > 0 and constants.hop_seconds > 0 and torch.__version__ in constants.source
    for ranks, factor in constants.step_factor.items():
        assert 0 < factor < 1000, ranks
