"""What the message about the batch names."""

from __future__ import annotations

import pytest

from shardwise.errors import LegalityError
from tests.plan.rules.jobs import resolve_case


def test_gradient_accumulation_names_the_counts_around() -> None:
    job = {"training": {"gradient_accumulation": 4, "sequences_per_step": 20}}  # 5 sequences a rank
    with pytest.raises(LegalityError, match="use gradient_accumulation 3 or 5"):
        resolve_case(job)
