from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
from shardwise.testing.world import WorldPool
from tests.parity.bart import bart_job
from tests.parity.jobs import check_agrees
TWO = {"pipeline_parallel_degree": 2}
@pytest.mark.parametrize("family", ["bart","mbart","m2m_100","marian","pegasus","blenderbot","blenderbot-small","plbart","mvp"])
def test_one(world_pool: WorldPool, corpora: Path, family: str) -> None:
    check_agrees(world_pool, 1, bart_job(corpora, family))
@pytest.mark.parametrize("family", ["bart","mbart","m2m_100","marian","pegasus","blenderbot","blenderbot-small","plbart","mvp"])
def test_agrees(world_pool: WorldPool, corpora: Path, family: str) -> None:
    check_agrees(world_pool, 2, bart_job(corpora, family, parallel=TWO, blocks=(3,2)))
