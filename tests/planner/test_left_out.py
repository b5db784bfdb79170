"""What a table's constants may not know: its software in any release, its models; of experts one release."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.planner.constants.inventory import OF_RELEASE, Constants, shipped, software_of
from shardwise.planner.published import left_out
from shardwise.planner.published.calibrate import Sample
from shardwise.planner.published.row_model import model_key
from shardwise.planner.published.tables import read_table

TABLES = Path("tests/data/perf-tables")


def fitted_on(table: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Sample]]:
    """The rows on which the constants of each stack of a table are fitted."""
    asked: list[list[Sample]] = []

    def fit(given: Sequence[Sample], known: object, settled: float) -> Constants:
        asked.append(list(given))
        return shipped()

    monkeypatch.setattr(left_out, "fit", fit)
    rows = read_table(TABLES / f"{table}.csv")
    left_out._refitted.cache_clear()
    stacks = list(left_out.constants_without(rows))
    left_out._refitted.cache_clear()
    return dict(zip(stacks, asked * (len(stacks) // len(asked)), strict=True))


@pytest.mark.parametrize("table", ["nemo_bridge_h100", "llm_foundry_a100", "torchtitan_bf16"])
def test_no_release_of_its_software_and_no_model_of_a_table_is_fitted(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_table(TABLES / f"{table}.csv")
    software = {software_of(row.text["stack"]) for row in rows}
    models = {model_key(row.text["model"]) for row in rows}
    for given in fitted_on(table, monkeypatch).values():
        assert 50 < len(given) < 270
        assert not software & {software_of(sample.row.text["stack"]) for sample in given}
        assert not models & {model_key(sample.row.text["model"]) for sample in given}


def test_of_experts_one_release_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted_on("bridge_moe_2025", monkeypatch)
    assert len(found) == 2
    for stack, given in found.items():
        stacks = {sample.row.text["stack"] for sample in given}
        assert stack not in stacks and software_of(stack) in map(software_of, stacks)


def test_an_unmeasured_release_has_its_softwares_dense_kernels_and_the_defaults_launches() -> None:
    known = shipped()
    last, default = known.stacks["Megatron-Bridge 25.11"], known.stacks["default"]
    found = known.stack("Megatron-Bridge 99.01")
    kept = ("matmul", "attention", "memory_bound", "recompute", "network", "overlap", "stall", "cuts_by_cost")
    assert [getattr(found, key) for key in kept] == [getattr(last, key) for key in kept]
    assert [getattr(found, key) for key in OF_RELEASE] == [getattr(default, key) for key in OF_RELEASE]
    assert found.matmul != default.matmul and found.grouped != last.grouped
    assert last.spread < found.spread < default.spread
