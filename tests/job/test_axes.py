"""The records of the axes, and what follows from them for a job."""

from __future__ import annotations

import json
import math

import pytest

from shardwise.job.axes import (
    AXES,
    Axis,
    axis_degrees,
    data_axes,
    one_copy_axes,
    placed_axes,
    replica_axes,
    row_axes,
    same_rows_ranks,
    second_views,
    state_axes,
)
from shardwise.job.keys import leaf_keys
from shardwise.job.schema import Job


def parallel_job(**parallel: object) -> Job:
    return Job.model_validate({"parallel": parallel})


def test_every_axis_has_one_record_with_a_key_of_the_job() -> None:
    assert [spec.axis for spec in AXES] == list(Axis)
    assert {spec.degree_key for spec in AXES} - {""} <= set(leaf_keys())


def test_the_sets_of_axes() -> None:
    assert placed_axes("TDP") == (Axis.TENSOR, Axis.REPLICA, Axis.SHARD, Axis.CONTEXT, Axis.PIPELINE)
    assert data_axes() == (*replica_axes(), *state_axes()) == (Axis.REPLICA, Axis.SHARD, Axis.CONTEXT)
    assert row_axes() == (Axis.REPLICA, Axis.SHARD)
    assert set(one_copy_axes()) == set(Axis) - {Axis.REPLICA, Axis.EXPERT}
    assert second_views() == (Axis.EXPERT,)


@pytest.mark.parametrize(
    "parallel, expected",
    [
        ({}, (1, 24, 1, 1, 1, 1)),
        ({"sharded_data_parallel_degree": 4}, (6, 4, 1, 1, 1, 1)),
        ({"sharded_data_parallel_degree": 4, "context_parallel_degree": 2}, (6, 2, 2, 1, 1, 1)),
        ({"context_parallel_degree": 2, "tensor_parallel_degree": 3}, (1, 4, 2, 3, 1, 1)),
        ({"expert_parallel_degree": 8, "tensor_parallel_degree": 3}, (1, 8, 1, 3, 1, 8)),
        ({"shard_optimizer_state": True, "pipeline_parallel_degree": 2}, (1, 12, 1, 1, 2, 1)),
    ],
)
def test_ranks_that_are_left_go_to_the_last_open_axis(parallel: dict[str, object], expected: tuple[int, ...]) -> None:
    job = parallel_job(**parallel)
    degrees = axis_degrees(job, 24)
    assert tuple(degrees[axis] for axis in Axis) == expected
    assert math.prod(degree for axis, degree in degrees.items() if axis not in second_views()) == 24
    assert same_rows_ranks(job) == 24 // math.prod(degrees[axis] for axis in row_axes())


def test_names_stay_the_same_in_json() -> None:
    assert json.dumps({Axis.TENSOR: 2}) == '{"tensor": 2}' and f"{Axis.SHARD}" == "shard"
