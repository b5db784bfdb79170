"""Every family of the installed transformers whose experts ranks can share, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import language_model_types, toy_config
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, facts_of, make_job
from tests.parity.test_experts import FP32, FP64


def published(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[model_type], "base_model_ep_plan", None))


FAMILIES = [name for name in language_model_types("causal_lm") if published(name)]
FAMILIES += ["dbrx", "jetmoe", "llama4_text"]  # transformers has no plan for these, whose experts are stacks as well


TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {}),
    "expert 4": (4, {"expert_parallel_degree": 4}),
    "sharded experts": (4, {}),
    "whole experts": (4, {"sharded_data_parallel_degree": 2}),
    "replicas": (4, {"sharded_data_parallel_degree": 1}),
    "tensor 2": (4, TENSOR),
    "expert 4 x tensor 2": (8, {"expert_parallel_degree": 4, **TENSOR}),
    "pipeline 2": (4, PIPELINE),
    "context 2": (4, {"context_parallel_degree": 2}),
    "tensor 2 x pipeline 2": (8, {**TENSOR, **PIPELINE}),
}
AXES = {
    "tensor_parallel_degree": Axis.TENSOR,
    "pipeline_parallel_degree": Axis.PIPELINE,
    "context_parallel_degree": Axis.CONTEXT,
}
LOSSES = [{"balancing_loss": "global"}, {"balancing_loss": "layer", "z_loss": 0.1}, {"balancing_loss": "sequence"}]
CASES = [
    pytest.param(
        family, layout, number + place, id=f"{family}-{layout}{' cover' * ((number + place) % len(LAYOUTS) == 0)}"
    )
    for number, family in enumerate(FAMILIES)
    for place, layout in enumerate(LAYOUTS)
]


def family_job(corpora: Path, family: str, precision: dict[str, Any], **sections: Any) -> Job:
    """Return the job; where a forward draws numbers for rows together (PhiMoE), their number is given."""
    model = {"config": toy_config(family, experts_implementation="eager"), "attention": "eager"}
    parallel = {"expert_parallel_degree": 2, **sections.pop("parallel", {})}
    sections |= {"model": model, "parallel": parallel, **precision}
    job = make_job(corpora, **sections)
    return make_job(corpora, **sections, training={"microbatch_size": 2}) if facts_of(job).rows_together else job


def precision_of(job: Job) -> dict[str, Any]:
    """Return fp64, or fp32 for a family whose forward needs weights in it."""
    return FP32 if "fp64" in facts_of(job).unfit_dtypes else FP64


def router_section(facts: ModelFacts, number: int) -> dict[str, Any]:
    """Return losses and bias updates of those that the model has routers for; `number` chooses the loss."""
    section: dict[str, Any] = {}
    if facts.routers:
        section |= LOSSES[number % len(LOSSES)] | {"balancing_coefficient": 0.5}
    if facts.router_biases:
        section["bias_update_rate"] = 0.1
    return section


def check_refused(job: Job, *reasons: str, ranks: int = 2) -> None:
    """Check that it is refused by one of these reasons, of which any may come first."""
    with pytest.raises(LegalityError, match="|".join(map(re.escape, reasons))):
        resolve(job, World(ranks, "cpu", ranks), facts_of(job))


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
    check_agrees(world_pool, 2, family_job(corpora, family, precision_of(job)))


@pytest.mark.slow
@pytest.mark.parametrize("family, layout, number", CASES)
def test_agrees_on_every_layout_with_losses_and_biases(
    world_pool: WorldPool, corpora: Path, family: str, layout: str, number: int
) -> None:
    """Each family on each layout; `-k cover` runs a family once, and each layout with several families."""
    ranks, parallel = LAYOUTS[layout]
    plain = family_job(corpora, family, FP64)
    facts = facts_of(plain)
    router = router_section(facts, number if "context_parallel_degree" not in parallel else 0)
    job = family_job(corpora, family, precision_of(plain), parallel=parallel, router=router)
    asked = [Axis.EXPERT, *(axis for key, axis in AXES.items() if key in parallel)]
    missing = [capability.reason for axis in asked if not (capability := facts_of(job).supports(axis)).ok]
    if missing:
        check_refused(job, *missing, ranks=ranks)
    else:
        check_agrees(world_pool, ranks, job)
