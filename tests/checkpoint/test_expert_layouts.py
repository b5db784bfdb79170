"""Checkpoints of shared experts hold whole stacks: any layout reads them, bit for bit, and writes them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.testing.world import WorldPool
from tests.checkpoint.test_layouts import check_reading, write
from tests.parity.test_experts import experts_job

EXPERT: dict[str, Any] = {"expert_parallel_degree": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "expert 2, shard 4": (4, EXPERT),
    "expert 2, replica 2": (4, {**EXPERT, "sharded_data_parallel_degree": 2}),
    "expert 4 over replicas": (4, {"expert_parallel_degree": 4, "sharded_data_parallel_degree": 1}),
    "expert 2, tensor 2": (4, {**EXPERT, "tensor_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
}
SLOW = [name for name in LAYOUTS if name not in ("one rank", "expert 2, shard 4")]


def a_job(corpora: Path, parallel: dict[str, Any]) -> Any:
    return experts_job(corpora, "mixtral", parallel=parallel, optimizer={"name": "AdamW"})


@pytest.fixture(scope="module")
def written(world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of one process and of shared experts."""
    paths = {}
    for name in ("one rank", "expert 2, shard 4"):
        ranks, parallel = LAYOUTS[name]
        path = tmp_path_factory.mktemp("written")
        world_pool.run(ranks, write, a_job(corpora, parallel), path)
        paths[name] = path / "step-00000002"
    return paths


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_a_layout_reads_experts_of_others(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, written: dict[str, Path], layout: str
) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_reading(world_pool, a_job(corpora, parallel), ranks, list(written.values()), tmp_path)
