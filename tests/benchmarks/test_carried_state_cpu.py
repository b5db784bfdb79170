"""The benchmark of mixers that hand on their state: both ways run, and handing on keeps less for backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import carried_state_cpu


@pytest.mark.slow
def test_handing_on_keeps_less(tmp_path: Path) -> None:
    record = tmp_path / "result.json"
    options = ["--ranks", "2", "--rounds", "1", "--layers", "1", "--width", "64", "--json", str(record)]
    assert carried_state_cpu.main(options) == 0
    for rank in json.loads(record.read_text())["ranks"]:
        assert 0 < rank["bytes"]["handed on"] < 0.8 * rank["bytes"]["whole"]
        assert all(len(seconds) == 1 for seconds in rank["seconds"].values())
