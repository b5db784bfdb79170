"""The probe's arithmetic, and one process of it for real."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.slow
def test_the_probe_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "PROCESSES", (1, 2))
    monkeypatch.setattr(calibrate, "ROUNDS", 1)  # each takes half a minute where nothing else runs
    constants = calibrate.probe(lambda text: None)
    assert set(constants.tflops) == {1, 2} and all(rate > 0 for rate in constants.tflops.values())
    assert constants.link > 0 and constants.hop_seconds > 0 and torch.__version__ in constants.source
    for ranks, factor in constants.step_factor.items():
        assert 0 < factor < 1000, ranks
