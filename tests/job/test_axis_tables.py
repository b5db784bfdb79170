"""Every table keyed by axis has every axis, and a new axis is one record and a row in each of them."""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from typing import Any

import pytest

from shardwise.job import axes
from shardwise.job.axes import Axis, AxisSpec
from shardwise.job.schema import Job
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import resolve
from shardwise.planner.constants.inventory import cluster, presets, stack_of
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from tests.job.axis_tables import axis_tables
from tests.plan.rules.jobs import FACTS, World

TOY: Any = "toy"
RECORD = AxisSpec(TOY, "D", "parallel.toy_degree", lambda job: 2, shards_state=True, reads_own_rows=False)


def test_every_table_has_every_axis() -> None:
    tables = axis_tables()
    assert {name.partition(":")[2] for name in tables} >= {
        "DEGREE_RULES",
        "AXIS_RULES",
        "AXIS_TRAFFIC",
        "CANDIDATE_DEGREES",
    }
    incomplete = {name: sorted(set(Axis) - set(table)) for name, table in tables.items() if set(table) != set(Axis)}
    assert not incomplete


@pytest.fixture
def toy_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an axis behind `context`: its record, and the row of `context` in every table."""
    records = list(axes.AXES)
    records.insert(records.index(axes.spec_of(Axis.CONTEXT)) + 1, RECORD)
    monkeypatch.setattr(axes, "AXES", tuple(records))
    for table in axis_tables().values():
        monkeypatch.setitem(table, TOY, table[Axis.CONTEXT])


@pytest.mark.usefixtures("toy_axis")
def test_a_toy_axis_is_laid_out() -> None:
    ranks = [Layout({Axis.SHARD: 2, TOY: 2, Axis.TENSOR: 2}, "DPT", rank) for rank in range(8)]
    assert [rank.coordinates()[TOY] for rank in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert ranks[0].ranks(TOY) == (0, 2) and ranks[0].smp("rdp")[2] == (0, 2, 4, 6)
    assert ranks[5].ranks(*axes.state_axes()) == (1, 3, 5, 7)
    assert {rank.data_rank for rank in ranks} == {0, 1} and ranks[0].data_ranks == 2
    assert ranks[0].data_rank == ranks[2].data_rank  # they work on the same rows
    assert (ranks[0].is_first_of_rows, ranks[2].is_first_of_rows) == (True, False)


@pytest.mark.usefixtures("toy_axis")
def test_a_toy_axis_is_planned() -> None:
    plan = resolve(Job.model_validate({"parallel": {"tensor_parallel_degree": 2}}), World(8, "cpu", 8), FACTS)
    assert plan.degrees[TOY] == 2 and math.prod(plan.degrees.values()) == 8
    assert (plan.data_ranks, plan.state_ranks) == (2, 4)
    assert plan.rules["toy"] and plan.to_dict()["degrees"]["toy"] == 2
    assert [Layout.from_plan(plan, rank).data_rank for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.usefixtures("toy_axis")
def test_a_toy_axis_is_predicted() -> None:
    given = TrainingConfiguration(
        presets()["llama3-8b"], cluster("p5.48xlarge:1"), stack_of("default"), 4096, 1, context=2
    )
    toy_configuration = make_dataclass(
        "ToyConfiguration", [("toy", int, 2)], bases=(TrainingConfiguration,), frozen=True
    )
    prediction = predict(toy_configuration(**vars(given)))
    assert prediction.ranks == 4
    assert prediction.seconds["toy"] == prediction.seconds["context"] > 0
