"""200 random jobs that the legality table allows, one real step each at toy size: none fails, every loss is finite.

By default the first 48th is drawn and run, with `-m slow` the others.

Values are drawn blindly, legal or not; `resolve` says which combinations are jobs, so that a rule that is missing
shows as a failing step. SHARDWISE_TEST_SEED draws others, SHARDWISE_TEST_JOBS more.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import LegalityError
from shardwise.job.optimizers import classes
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import World, resolve
from shardwise.testing.world import WorldPool
from shardwise.training.setup import assemble, prepare_data, study
from shardwise.training.step import evaluate, train_step
from tests.parity.jobs import LENGTH, make_job, make_module_job

SEED = int(os.environ.get("SHARDWISE_TEST_SEED", "0"))
JOBS = int(os.environ.get("SHARDWISE_TEST_JOBS", "200"))
SIZES = {1: 30, 2: 50, 3: 15, 4: 50, 5: 10, 6: 15, 7: 10, 8: 20}  # ranks -> how often, of 200
Drawn = tuple[Job, ModelFacts]


def maybe(draw: random.Random, values: dict[str, list[Any]], chance: float = 0.3) -> dict[str, Any]:
    """Each key with probability `chance`, one of its values."""
    return {key: draw.choice(options) for key, options in values.items() if draw.random() < chance}


def draw_sections(draw: random.Random, size: int) -> dict[str, dict[str, Any]]:
    """Random values for every section but the model's."""
    degrees = [1, 2, 3, 4, 5, 6, 7, 8]
    return {
        "parallel": maybe(draw, {
            "sharded_data_parallel_degree": degrees, "shard_optimizer_state": [True],
            "placement_strategy": ["spread", "DPT", "PTD", "TDP"], "reshard_after_forward": [False],
            "prefetch_depth": [0, 2, 5], "tensor_parallel_degree": [2], "sequence_parallel": [True, False],
        }) | draw.choice([{}, {}, {
            "context_parallel_degree": draw.choice([2, 2, 3, 4]),
            "context_parallel_method": draw.choice(["auto", "all_gather", "ulysses", "ring"]),
        }]) | (draw_stages(draw) if draw.random() < 0.3 else {}),
        "memory": maybe(draw, {
            "activation_checkpointing": ["full", "selective"], "checkpoint_every": [2, 3],
            "checkpoint_strategy": ["contiguous", "group_2", "group_3"], "offload_activations": [True],
            "activation_loading_horizon": [1, 2], "offload_parameters": [True], "loss_chunk_tokens": [1, 7, 40],
        }) | ({"activation_checkpointing": "full"} if draw.random() < 0.3 else {}),
        "precision": maybe(draw, {
            "compute": ["fp64", "fp32", "bf16", "fp16"],
            "loss_scale": [{}, {"static": 8.0}, {"init_scale": 4.0, "delayed_shift": 2}],
        }, 0.7),
        "training": maybe(draw, {
            "microbatch_size": [1, 2, 3], "gradient_accumulation": [1, 2, 3, 4], "seed": [1, 7, 2**31],
            "deterministic": [True],
        }) | {"sequences_per_step": draw.choice([size, size + 1, 2 * size, 3 * size - 1, 1, 13])},
        "optimizer": maybe(draw, {
            "name": sorted(classes()), "weight_decay": [0.0, 0.5], "schedule": ["constant", "linear"],
            "warmup_steps": [1, 2], "final_learning_rate_ratio": [0.0, 1.0], "clip_norm": [None, 1e-3, 1e3],
            "options": [{"maximize": True}, {"foreach": True}, {"eps": 1e-6}, {"betas": [0.8, 0.9]}, {"momentum": 0.9}],
        }),
        "data": maybe(draw, {
            "isolate_documents": [True], "mask_probability": [0.5],
            "validation_fraction": [0.3],
        }, 0.2),
    }  # fmt: skip


def draw_stages(draw: random.Random) -> dict[str, Any]:
    return {"pipeline_parallel_degree": draw.choice([2, 2, 3])} | maybe(draw, {
        "pipeline": ["zero_bubble", "simple", "zbv", "dualpipev"], "virtual_pipeline_degree": [2],
        "active_microbatches": [2, 8], "memory_weight": [0.8],
        "partition": [{}, {"transformer.h.0": 0}],
    }) | (draw.choice([{}, {}, {"auto_partition": False, "default_partition": 1}]))  # fmt: skip


def draw_model(draw: random.Random, corpora: Path) -> Callable[..., Job]:
    """A random model: makes a job of it from the other sections."""
    family = draw.choice(["gpt2", "gpt2", "gpt_neox", "llama", "bert", "module"])
    length = {"sequence_length": draw.choice([1, 5, LENGTH, LENGTH, LENGTH, LENGTH])}
    if family == "module":
        return partial(make_module_job, corpora)
    tied, dropout = draw.random() < 0.5, draw.choice([0.0, 0.0, 0.2])
    attention = draw.choice(["auto", "sdpa", "eager"])

    def make(data: dict[str, Any], **sections: dict[str, Any]) -> Job:
        settings = {"tied": tied, "dropout": dropout, "attention": attention, "data": data | length}
        return make_job(corpora, family, **settings, **sections)

    return make


@cache
def facts_of(model: str, length: int, corpora: Path) -> ModelFacts:
    """The facts of a model section, as JSON: they hang on nothing else that is drawn."""
    base = make_module_job(corpora) if "Regression" in model else make_job(corpora)
    section = Job.model_validate_json(f'{{"model": {model}}}').model
    return study(base.model_copy(update={"model": section}))


def draw_legal(corpora: Path, count: int) -> list[tuple[int, Drawn]]:
    """The first `count` legal jobs, each with its number of ranks."""
    draw = random.Random(SEED)
    sizes = draw.choices(list(SIZES), list(SIZES.values()), k=JOBS)
    jobs: list[tuple[int, Drawn]] = []
    refused: Counter[str] = Counter()
    for size in sizes[:count]:
        make = draw_model(draw, corpora)  # whose study takes longer than all else that a draw does
        while True:
            job = make(**draw_sections(draw, size))
            facts = facts_of(job.model.model_dump_json(), job.data.sequence_length, corpora)
            try:
                resolve(job, World(size, "cpu", size), facts)
            except LegalityError as error:
                refused[error.rule] += 1
                continue
            jobs.append((size, (job, facts)))
            break
    print(f"seed {SEED}; legality refused {sum(refused.values())}: {dict(refused.most_common())}")
    return jobs


def run_all(jobs: list[Drawn]) -> list[tuple[float, float]]:
    """One step and one evaluation of each on every rank; (training loss, validation loss)."""
    return [run_one(job, facts) for job, facts in jobs]


def run_one(job: Job, facts: ModelFacts) -> tuple[float, float]:
    try:
        run = assemble(job, torch.device("cpu"), facts, prepare_data(job, facts))
        result = train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
        validation = list(run.stream.evaluation(run.data.validation, 1))
        return result.loss, evaluate(run.model, run.objective, validation).loss
    except Exception as error:
        raise RuntimeError(f"seed {SEED}, job {job.model_dump_json(exclude_defaults=True)}") from error


SOME = JOBS // 48


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, SOME), pytest.param(SOME, JOBS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["some", "others"],
)
def test_random_legal_jobs_run(world_pool: WorldPool, corpora: Path, first: int, end: int) -> None:
    drawn: dict[int, list[Drawn]] = defaultdict(list)
    for size, job_and_facts in draw_legal(corpora, end)[first:]:
        drawn[size].append(job_and_facts)
    assert sum(map(len, drawn.values())) == end - first
    for size, jobs in sorted(drawn.items()):
        print(f"seed {SEED}, {len(jobs)} jobs on {size} ranks")
        everyone = world_pool.run(size, run_all, jobs, timeout=280)
        assert all(losses == everyone[0] for losses in everyone)
        for (job, _), losses in zip(jobs, everyone[0], strict=True):
            assert all(math.isfinite(loss) for loss in losses), f"seed {SEED}: {losses} of {job.model_dump_json()}"
