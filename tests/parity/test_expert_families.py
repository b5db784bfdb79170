"""Every family of the installed transformers whose experts ranks can share, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.testing.toy_configs import language_model_types, toy_config
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, make_job
from tests.parity.test_experts import FP64


def published(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[model_type], "base_model_ep_plan", None))


FAMILIES = [name for name in language_model_types("causal_lm") if published(name)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_one_process(world_pool: WorldPool, corpora: Path, family: str) -> None:
    config = toy_config(family, experts_implementation="eager")
    job = make_job(
        corpora, model={"config": config, "attention": "eager"}, **FP64, parallel={"expert_parallel_degree": 2}
    )
    check_agrees(world_pool, 2, job)
