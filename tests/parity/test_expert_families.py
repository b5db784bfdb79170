"""Every family of the installed transformers whose experts ranks can share, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import language_model_types, toy_config
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, facts_of, make_job
from tests.parity.test_experts import FP32, FP64


def published(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[model_type], "base_model_ep_plan", None))


FAMILIES = [name for name in language_model_types("causal_lm") if published(name)]


def family_job(corpora: Path, family: str, precision: dict[str, Any]) -> Job:
    model = {"config": toy_config(family, experts_implementation="eager"), "attention": "eager"}
    return make_job(corpora, model=model, **precision, parallel={"expert_parallel_degree": 2})


def check_refused(job: Job, reason: str) -> None:
    with pytest.raises(LegalityError, match=re.escape(reason)):
        resolve(job, World(2, "cpu", 2), facts_of(job))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_one_process_or_is_refused(world_pool: WorldPool, corpora: Path, family: str) -> None:
    """In fp64; a family whose forward needs weights in fp32 is refused there, and agrees in fp32."""
    job = family_job(corpora, family, FP64)
    capability = facts_of(job).supports(Axis.EXPERT)
    if not capability.ok:
        check_refused(job, capability.reason)
        return
    if "fp64" in facts_of(job).unfit_dtypes:
        check_refused(job, f"transformers keeps some weights of {facts_of(job).family} in fp32")
        job = family_job(corpora, family, FP32)
    check_agrees(world_pool, 2, job)
