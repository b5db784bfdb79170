"""The benchmarks of a Mamba-2's mixers: both ways run, and one keeps less for backward."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import carried_state_cpu, mixers_cpu


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [carried_state_cpu, mixers_cpu], ids=lambda module: module.__name__)
def test_one_way_keeps_less(benchmark: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "result.json"
    options = ["--ranks", "2", "--rounds", "1", "--layers", "1", "--width", "64", "--json", str(record)]
    assert benchmark.main(options) == 0
    less, more = benchmark.WAYS
    for rank in json.loads(record.read_text())["ranks"]:
        assert 0 < rank["bytes"][less] < 0.8 * rank["bytes"][more]
        assert all(len(seconds) == 1 for seconds in rank["seconds"].values())
