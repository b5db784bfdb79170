"""Adapters that are trained on conversations: on every layout the numbers of transformers with peft in one process.

Rows and their unequal targets are those of test_rows.py, packed or one a sequence; the oracle masks, packs and reduces
by itself. What it adapts with is peft's own; adapters of experts are the oracle's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.testing import oracle
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from tests.parity.jobs import facts_of
from tests.parity.test_adapters import STACKS, PeftModel
from tests.parity.test_matrix import verify_many
from tests.parity.test_rows import EPOCH, PADDED, check, row_job
from tests.parity.test_rows import EVERY_LAYOUT as ROW_LAYOUTS
from tests.parity.test_rows import rows as rows

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: layout for name, layout in ROW_LAYOUTS.items() if name != "expert 2"},
    "replica 2": (2, {"sharded_data_parallel_degree": 1}),
    "zero-1": (2, {"sharded_data_parallel_degree": 1, "shard_optimizer_state": True}),
    "sequence 2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
}
DATA: dict[str, dict[str, Any]] = {
    "packed": {"template": "blocks", "training": EPOCH},
    "packed by sample": {"reduction": "sample"},
    "padded": {"name": "prompt_completion", **PADDED},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank_pattern": {"0.*": 2}},
    "lora dropout": {"kind": "lora", "dropout": 0.3},
    "lora saved": {"kind": "lora", "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"kind": "dora"},
    "dora dropout": {"kind": "dora", "dropout": 0.3},
}
FOUR_EXPERTS = {"num_local_experts": 4, "experts_implementation": "eager"}
OPTIMIZER = {"learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}}  # as test_adapters.py says


def adapted(job: Job, parallel: dict[str, Any], **adapter: Any) -> Job:
    """Return the job with adapters and a layout."""
    sections = {
        "adapter": {"rank": 3, "alpha": 5.0, **adapter},
        "optimizer": OPTIMIZER,
        "parallel": {"device": "cpu", **parallel},
    }
    return Job.model_validate({**job.model_dump(exclude_unset=True), **sections})


def against_peft(jobs: list[tuple[Job, ModelFacts]]) -> list[VerifyReport] | None:
    with mock.patch.object(oracle, "adapt", PeftModel):
        return verify_many(jobs)


def check_against_peft(world_pool: WorldPool, size: int, jobs: list[Job]) -> None:
    reports = world_pool.run(size, against_peft, [(job, facts_of(job)) for job in jobs], timeout=1800)[0]
    assert reports is not None
    for job, report in zip(jobs, reports, strict=True):
        assert report.agrees, f"{job.parallel} {job.adapter} {job.data}\n{report.first}\n{report.diagnosis}"


def jobs_of(rows: Path, family: str, layout: str, data: str) -> list[Job]:
    """Return a job for each kind of adapter."""
    plain = row_job(rows, family, "shard 2", **DATA[data])
    return [adapted(plain, LAYOUTS[layout][1], **keys) for keys in ADAPTERS.values()]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_adapters(world_pool: WorldPool, rows: Path, layout: str, data: str) -> None:
    check_against_peft(world_pool, LAYOUTS[layout][0], jobs_of(rows, "llama", layout, data))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", ["gpt2", "gemma", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_adapters_of_other_families(world_pool: WorldPool, rows: Path, layout: str, family: str) -> None:
    plain = row_job(rows, family, "shard 2", reduction="sample")
    jobs = [adapted(plain, LAYOUTS[layout][1], kind=kind, dropout=0.3) for kind in ("lora", "dora")]
    check_against_peft(world_pool, LAYOUTS[layout][0], jobs)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_with_adapters_of_experts(world_pool: WorldPool, rows: Path, layout: str) -> None:
    size, parallel = ROW_LAYOUTS[layout]
    adapter = {"kind": "lora", "target_modules": ["q_proj", "o_proj"], "target_parameters": STACKS}
    plain = [row_job(rows, "mixtral", "shard 2", config=FOUR_EXPERTS, **keys) for keys in DATA.values()]
    check(world_pool, size, [adapted(job, parallel, **adapter) for job in plain])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_with_adapters_beside_frozen_experts(world_pool: WorldPool, rows: Path, layout: str) -> None:
    size, parallel = ROW_LAYOUTS[layout]
    plain = row_job(rows, "mixtral", "shard 2", reduction="sample", config=FOUR_EXPERTS)
    adapter = {"dropout": 0.3, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    check_against_peft(world_pool, size, [adapted(plain, parallel, kind=kind, **adapter) for kind in ("lora", "dora")])
