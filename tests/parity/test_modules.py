"""Parity of a user's own module: buffers, functional dropout, a tie, uneven rows, its own loss, and building habits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, facts_of, make_module_job, verify_one


@pytest.mark.parametrize(
    "ranks, sections",
    [
        (1, {}),
        (4, {"parallel": {"sharded_data_parallel_degree": 2}, "training": {"sequences_per_step": 11}}),
        (8, {"memory": {"activation_checkpointing": "full"}}),
        (2, {"precision": {"compute": "bf16"}}),
        (2, {"parallel": {"pipeline_parallel_degree": 2}, "training": {"sequences_per_step": 7, "microbatch_size": 2}}),
        (4, {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "simple"}, "precision": {"compute": "bf16"}}),
    ],
)
def test_a_users_module_agrees(world_pool: WorldPool, corpora: Path, ranks: int, sections: dict[str, Any]) -> None:
    report = world_pool.run(ranks, verify_one, make_module_job(corpora, **sections))[0]
    assert report.agrees, (report.first, report.diagnosis)


PIPELINE = {"pipeline_parallel_degree": 2}
HABITS: list[tuple[str, int, dict[str, Any]]] = [
    ("KeywordBlocks", 2, {"memory": {"activation_checkpointing": "full"}}),
    ("Attending", 1, {}),
    ("Attending", 2, {}),
    ("ScalingHooks", 1, {}),
    ("ScalingHooks", 2, {"training": {"gradient_accumulation": 2}}),
    ("ScalingHooks", 2, {"parallel": PIPELINE, "training": {"gradient_accumulation": 2}}),
    ("ClippingHook", 2, {}),
    ("BlockHooks", 2, {"parallel": PIPELINE, "training": {"gradient_accumulation": 2}}),
    ("Parametrized", 1, {}),
    ("Parametrized", 2, {}),
    ("Positions", 1, {"precision": {"compute": "bf16"}}),
]


@pytest.mark.parametrize(("name", "ranks", "sections"), HABITS)
def test_a_habit_agrees(world_pool: WorldPool, corpora: Path, name: str, ranks: int, sections: dict[str, Any]) -> None:
    check_agrees(world_pool, ranks, _job_of(corpora, name, sections))


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("ClippingHook", 2, {"training": {"gradient_accumulation": 2}}, r"last.weight of ClippingHook \(.*modules.py:\d+"),
    ("AccumulateHook", 2, {}, r"last.weight of AccumulateHook \(.*modules.py:\d+"),
    ("SingleLayer", 2, {"parallel": PIPELINE}, "it has 0 lists of blocks"),
    ("Penalized", 2, {"parallel": PIPELINE}, r"Penalized \(.*modules.py:\d+\) reads blocks.0"),
]


@pytest.mark.parametrize(("name", "ranks", "sections", "says"), REFUSED)
def test_a_habit_is_refused_before_workers_start(
    corpora: Path, name: str, ranks: int, sections: dict[str, Any], says: str
) -> None:
    job = _job_of(corpora, name, sections)
    with pytest.raises(LegalityError, match=says):
        resolve(job, World(ranks, "cpu", ranks), facts_of(job))


def test_a_hook_on_an_accumulated_gradient_is_called_on_one_rank(world_pool: WorldPool, corpora: Path) -> None:
    check_agrees(world_pool, 1, _job_of(corpora, "AccumulateHook", {}))


def _job_of(corpora: Path, name: str, sections: dict[str, Any]) -> Job:
    model = {"factory": f"tests.parity.modules:{name}", "loss": "tests.parity.jobs:squared_error"}
    return make_module_job(corpora, model=model, **sections)
