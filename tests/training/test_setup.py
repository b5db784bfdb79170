"""What is settled before a run is assembled."""

from __future__ import annotations

import os

import pytest
import torch

from shardwise.training.setup import choose_algorithms

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize("before, after", [(None, ":4096:8"), (":16:8", ":16:8")])
def test_a_deterministic_job_lets_cublas_know(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable torch refuses every matrix product on a GPU."""
    monkeypatch.setenv(VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(VARIABLE)
    was = torch.are_deterministic_algorithms_enabled()
    try:
        choose_algorithms(True)
        assert os.environ[VARIABLE] == after and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(was)


def test_a_job_that_asks_for_nothing_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    choose_algorithms(False)
    assert VARIABLE not in os.environ and not torch.are_deterministic_algorithms_enabled()
