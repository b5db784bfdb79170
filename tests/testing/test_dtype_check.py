"""Losses whose numbers are all of 16 bits are suspect, but for those that the loss's formula makes so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.dtype_check import _coarse_loss

PAIRS = {"training": {"objective": "dpo", "dpo": {"loss": "ipo"}}, "data": {"format": "preference"}}


@pytest.mark.parametrize(
    ("sections", "is_first", "losses", "is_suspect"),
    [
        ({}, True, [25.0, 50.0], True),
        ({}, True, [25.0, 50.00001], False),
        (PAIRS, True, [25.0, 50.0], False),  # (1 / (2 beta))^2 a pair, while the model is its reference
        (PAIRS, False, [25.0, 50.0], True),
    ],
)
def test_losses_in_16_bits_are_found(
    sections: dict[str, Any], is_first: bool, losses: list[float], is_suspect: bool
) -> None:
    plan: Any = SimpleNamespace(job=Job.model_validate(sections), dtypes=SimpleNamespace(loss="fp32"))
    ours: Any = SimpleNamespace(precision=[SimpleNamespace(loss={"loss": 1}, losses=losses)])
    assert bool(_coarse_loss(plan, ours, is_first)) is is_suspect
