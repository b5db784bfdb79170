"""The sweep over transformers' types: its cells, its record, its table, and a sample of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from benchmarks import coverage
from benchmarks.coverage import AGREES, HANG, NO_TOY, RAW, REFUSED, CoverageCell
from shardwise.testing.world import RankOutcome, WorldError, WorldPool

SEED = 20261126


def a_cell(layout: str, outcome: str, reason: str = "", version: str = transformers.__version__) -> CoverageCell:
    return CoverageCell("causal_lm", "llama", layout, outcome, reason, version)


def test_a_table_counts_outcomes_and_names_faults() -> None:
    text = coverage.table(
        [a_cell("tensor 2", AGREES), a_cell("tensor 2", REFUSED, "no plan"), a_cell("context 2", HANG)]
    )
    assert "| tensor 2 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "- causal_lm llama, context 2: hang" in text and "no plan" not in text


def test_a_record_is_gone_on_with_for_one_version_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        coverage, "cells_of", lambda pool, directory, task, kind, layouts: [a_cell("sharded 2", AGREES)]
    )
    record = tmp_path / "record.jsonl"
    for _ in range(2):
        cells = coverage.sweep([("causal_lm", "llama")], ["sharded 2"], record, 1)
    assert cells == [a_cell("sharded 2", AGREES)] and len(record.read_text().splitlines()) == 1
    monkeypatch.setattr(transformers, "__version__", "0")
    assert coverage.read_record(record) == []


def test_samples_are_drawn_by_a_seed() -> None:
    assert coverage.drawn_types(5, SEED) == coverage.drawn_types(5, SEED) != coverage.drawn_types(5, SEED + 1)
    assert len(coverage.drawn_types(None, 0)) > 200


@pytest.mark.parametrize("what, outcome", [("raised KeyError", RAW), ("hangs", HANG)])
def test_worlds_that_fail_are_faults(what: str, outcome: str) -> None:
    error = WorldError("verify_toy", 2, {1: RankOutcome(what, "Traceback\nKeyError: 'x'\n", 1.0)})
    assert coverage.fault_of(error) == (outcome, f"{what}: KeyError: 'x'")


def test_cells_of_a_type(world_pool: WorldPool, tmp_path: Path) -> None:
    coverage.write_corpora(tmp_path)
    cells = coverage.cells_of(world_pool, tmp_path, "causal_lm", "llama", ["sharded 2", "expert 2"])
    assert [cell.outcome for cell in cells] == [AGREES, REFUSED], cells
    assert "expert" in cells[1].reason
    (unable,) = coverage.cells_of(world_pool, tmp_path, "causal_lm", "gemma4_assistant", ["sharded 2"])
    assert unable.outcome == NO_TOY and unable.reason
