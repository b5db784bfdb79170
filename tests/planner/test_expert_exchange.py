"""The exchange of rows to experts: rates from the published table, what a degree costs, and where both ways meet."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean

import pytest

from shardwise.planner.constants.inventory import cluster, fabrics
from shardwise.planner.formulas.axis_traffic import block_elements, block_traffic
from shardwise.planner.formulas.prediction import ModelShape, Stack, TrainingConfiguration
from shardwise.planner.search.expert_remarks import break_even_tokens

TABLE = Path(__file__).parents[1] / "data" / "perf-tables" / "expert_exchange.csv"
EFA, NVLINK = 50.0, 450.0  # GB/s of one p5en accelerator over the network, and over its links, one direction
# Qwen3-30B-A3B: 48 blocks of 128 experts of width 768, of which a token takes 8.
STACKED = 3 * 2048 * 768 * 128
QWEN = ModelShape(
    "qwen3-30b-a3b", 48, 2048, 32, 4, 8 * 768, 151936, gated=True, head_size=128, idle=STACKED * 120 // 128,
    experts=128, experts_of_token=8, expert_width=768, stacked=STACKED,
)  # fmt: skip


def configured(**changes: int) -> TrainingConfiguration:
    return replace(TrainingConfiguration(QWEN, cluster("p5.48xlarge:2"), Stack("test"), 4096, 1, shard=16), **changes)


def test_rates_are_those_of_the_published_table() -> None:
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["GBps"]]
    network = [float(row["GBps"]) for row in rows if row["fabric"] == "UCCL-EP EFA RDMA"]
    links = [float(row["GBps"]) for row in rows if "NVLink" in row["fabric"]]
    assert fabrics()["efa"].exchange == pytest.approx(harmonic_mean(network) / EFA, abs=0.01)
    assert fabrics()["nvlink4"].exchange == pytest.approx(harmonic_mean(links) / NVLINK, abs=0.01)


def test_rows_and_weights_meet_where_the_formula_says() -> None:
    assert break_even_tokens(configured()) == 3 * 768 * 128 / 8 == 36864


def test_an_exchange_costs_more_between_nodes_and_with_uneven_loads() -> None:
    seconds = [block_traffic(configured(expert=degree))["expert"] for degree in (1, 8, 16)]
    assert seconds[0] == 0 and 2 * seconds[1] < seconds[2]
    even = block_traffic(replace(configured(expert=16), imbalance=1.0))["expert"]
    assert even < seconds[2] < 1.21 * even


def test_a_rank_holds_its_experts_alone() -> None:
    whole, shared = block_elements(configured()), block_elements(configured(expert=8))
    assert whole.own == 0 and shared.own == STACKED / 8
    assert shared.shared == whole.shared - STACKED
    assert shared.sharded(configured(expert=8)) == whole.sharded(configured())  # 16 ranks hold all of it either way
