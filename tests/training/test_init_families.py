"""Weights and buffers at start against those of transformers itself, for toys of its model types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.build import build_model, load_config
from shardwise.model.discover import discover
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import World, resolve
from shardwise.testing.start_check import compare_start_buffers, compare_start_values, distributions
from shardwise.testing.toy_configs import language_model_types, toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.init import initialize

TEXT = [task.name for task in TASKS.values() if not task.reads_files]
LARGEST = 30_000_000  # parameters of a toy that is drawn
DEVICE = torch.device("cpu")


def toy_job(model_type: str, task: str) -> Job | None:
    """Return the job of a toy; None of a type whose config class refuses its own defaults."""
    try:
        config = toy_config(model_type)
    except Exception:  # each config class has its own way to refuse values
        return None
    data: dict[str, Any] = {"format": "tokens", "path": "tokens.jsonl"}
    if TASKS[task].samples == "factory":
        data = {"factory": "tests.parity.jobs:Pairs"}
    model = {"config": config, "task": task, "attention": "eager"}
    training = {"steps": 1, "sequences_per_step": 2}
    return Job.model_validate({"model": model, "data": data | {"sequence_length": 16}, "training": training})


def plain_model(job: Job) -> nn.Module | None:
    """Return transformers' own; None where it cannot build this toy, or where that is large."""
    try:
        model: nn.Module = TASKS[job.model.task].model_class().from_config(load_config(job), dtype=torch.float32)
    except Exception:  # each config class has its own way to refuse values
        return None
    return model if sum(parameter.numel() for parameter in model.parameters()) < LARGEST else None


def unlike_starts(model_type: str, task: str) -> list[str]:
    """Return the tensors whose values are not such as transformers draws."""
    job = toy_job(model_type, task)
    plain = None if job is None else plain_model(job)
    if job is None or plain is None:
        return []
    try:
        module = build_model(job)
        facts = discover(module, job)
        plan = resolve(job, World(1, "cpu", 1), facts, 100)
    except ShardwiseError:  # refused by name
        return []
    model = parallelize(module, plan, Layout.from_plan(plan, 0), facts, DEVICE)
    initialize(model, 0)
    ours = {entry.name: entry.local.detach() for entry in model.tensor_map}
    expected = dict(plain.named_parameters())
    differences = compare_start_values(distributions(ours), distributions(expected))
    differences += compare_start_buffers(
        dict(model.module.named_buffers()), dict(plain.named_buffers()), lambda: dict(rebuilt(job).named_buffers())
    )
    absent = [f"{name} is absent" for name in expected if name not in ours]
    return absent + [difference.name for difference in differences if difference.error]


def rebuilt(job: Job) -> nn.Module:
    model = plain_model(job)
    assert model is not None
    return model


def all_unlike_starts(cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    unlike = {case: unlike_starts(*case) for case in cases}
    return {case: names for case, names in unlike.items() if names}


KINDS = [
    ("openai-gpt", "causal_lm"),  # its Conv1D is drawn by the constructor alone
    ("camembert", "masked_lm"),  # the head is registered ahead of the embedding that it is tied to
    ("modernbert", "masked_lm"),  # torch's truncated normal draw leaves meta tensors alone
]


def test_each_kind_starts_as_transformers_draws_it(world_pool: WorldPool) -> None:
    assert world_pool.run(1, all_unlike_starts, KINDS)[0] == {}


@pytest.mark.slow
@pytest.mark.parametrize("task", TEXT)
def test_every_type_starts_as_transformers_draws_it(world_pool: WorldPool, task: str) -> None:
    cases = [(model_type, task) for model_type in language_model_types(task)]
    assert world_pool.run(1, all_unlike_starts, cases, timeout=1200)[0] == {}
