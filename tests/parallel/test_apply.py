"""The recited order of transforms: one file each, applied once, logged, and open to one more."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from shardwise import data, plan
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.parallel import apply, transforms
from shardwise.parallel.builder import BuildInputs, ModelBuilder
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan import rules
from shardwise.plan.plan import Plan, World, resolve
from tests.parity.jobs import make_job


class MarkedModel:
    """A toy transform: it marks the model of each stage."""

    name = "toy"

    def __init__(self, axis: Axis | None = None) -> None:
        self.axis = axis

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            stage.model.toy = inputs.plan.microbatch  # type: ignore[assignment]


@pytest.fixture
def job(corpora: Path) -> Job:
    return make_job(corpora)


def parallelized(job: Job) -> ParallelModel:
    model = build_model(job)
    facts = discover(model, job)
    plan = resolve(job, World(1, "cpu", 1), facts)
    return apply.parallelize(model, plan, Layout.from_plan(plan, 0), facts)


def names() -> list[str]:
    return [transform.name for transform in apply.TRANSFORMS]


def test_each_transform_has_a_file_of_its_name() -> None:
    folder = Path(transforms.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == set(names()) and len(files) == len(names())
    modules = [type(transform).__module__ for transform in apply.TRANSFORMS]
    assert modules == [f"{transforms.__name__}.{name}" for name in names()]


def test_the_order_is_the_recited_one() -> None:
    assert names() == [
        "dtypes", "boundary_shapes", "attention", "context", "fused_kernels", "tensor", "expert", "routers", "stages",
        "traced_stages", "adapters", "freeze", "packed_base", "dropout", "loss", "float8", "weight_gradients",
        "compile", "offload", "checkpointing", "sequence", "sharding", "materialize",
    ]  # fmt: skip


def test_rules_are_named_like_the_transform_whose_they_are() -> None:
    files = {path.stem for path in Path(rules.__file__).parent.glob("*.py")} - {"__init__", "rule"}
    sections = set(Job.model_fields)  # rules of a section of the job that no transform serves
    # Or of a part of the plan, or of what reads data.
    parts = {path.stem for package in (plan, data) for path in Path(package.__file__).parent.glob("*.py")}
    assert files - sections - parts <= set(names())
    assert len(files & set(names())) >= 14


def test_a_transform_is_one_line_of_the_log(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="shardwise.parallel"):
        parallelized(job)
    lines = [record.getMessage() for record in caplog.records if record.name == "shardwise.parallel"]
    applied = [line.removeprefix("transform ").partition(":")[0] for line in lines]
    assert applied == ["dtypes", "attention", "dropout", "loss", "materialize"]  # one process: no axis, nothing sharded


def test_a_toy_transform_runs_in_its_place(job: Job) -> None:
    with mock.patch.object(apply, "TRANSFORMS", (*apply.TRANSFORMS, MarkedModel())):
        model = parallelized(job)
    assert model.module.toy == model.plan.microbatch  # type: ignore[comparison-overlap]


def test_an_axis_of_degree_1_is_left_out(job: Job) -> None:
    with mock.patch.object(apply, "TRANSFORMS", (*apply.TRANSFORMS, MarkedModel(Axis.TENSOR))):
        model = parallelized(job)
    assert not hasattr(model.module, "toy") and isinstance(model.module, nn.Module)
