"""The probe's arithmetic, and one process of it for real."""

from __future__ import annotations

import pytest
import torch

from shardwise import calibrate
from shardwise.calibrate import Growth, RankProbe, fitted, fitted_growth, predicted_seconds, slowest
from shardwise.planner.local import MachineConstants


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
    constants = calibrate.probe(lambda text: None)
    assert set(constants.tflops) == {1, 2} and all(rate > 0 for rate in constants.tflops.values())
    assert constants.link > 0 and constants.hop_seconds > 0 and torch.__version__ in constants.source
    for ranks, factor in constants.step_factor.items():
        assert 0 < factor < 1000, ranks
