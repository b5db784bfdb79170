"""resolve(): what is derived, from what, and what the plan tells the user."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from rich.console import Console

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import even_cut
from shardwise.plan.plan import Plan, World, precheck, resolve
from shardwise.plan.table import plan_table
from tests.plan.rules.jobs import CPU4, CUDA4, FACTS, FLAT, FULL


def plan(job: dict[str, Any] | None = None, world: World = CPU4, facts: ModelFacts = FACTS) -> Plan:
    return resolve(Job.model_validate(job or {}), world, facts)


@pytest.mark.parametrize(
    ("job", "rule"),
    [
        ({"model": {"path": "m", "config": "c"}}, "one-model"),
        ({"parallel": {"sharded_data_parallel_degree": 3}}, "shard-degree"),
        ({"training": {"sequences_per_step": 3}}, "idle-ranks"),
        ({"optimizer": {"name": "tests.training.user_code:WholeTensors"}}, "optimizer-elementwise"),
        ({"data": {"sequence_length": 513}}, None),  # needs the model
        ({"memory": {"loss_chunk_tokens": 8}}, None),
        ({}, None),
    ],
)
def test_precheck_judges_what_needs_no_model(job: dict[str, Any], rule: str | None) -> None:
    if rule is None:
        precheck(Job.model_validate(job), CPU4)
        return
    with pytest.raises(LegalityError) as raised:
        precheck(Job.model_validate(job), CPU4)
    assert raised.value.rule == rule


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_rules_are_shown_whatever_the_width(width: int) -> None:
    derived, file = plan(), io.StringIO()
    Console(file=file, width=width).print(plan_table(derived))
    shown = " ".join(file.getvalue().replace("│", " ").split())
    assert derived.rules["warmup_steps"] in shown or width == 100
    assert "warmup_steps" in shown and "a sixth of 64 steps" in shown
    assert max(map(len, file.getvalue().splitlines())) <= width


def test_what_only_some_plans_have_is_a_row_of_theirs() -> None:
    sections = {
        "parallel": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
        "training": {
            "batch_size_schedule": [{"sequences_per_step": 4, "until_samples": 32}],
            "sequences_per_step": 8,
            "steps": 64,
        },
    }
    derived = plan(sections, World(8, "cpu", 4, hosts=2))
    file = io.StringIO()
    Console(file=file, width=200).print(plan_table(derived))
    cells = [[cell.strip() for cell in line.split("│")] for line in file.getvalue().splitlines()]
    rows = {line[1]: line[2] for line in cells if len(line) > 3}
    assert rows["stages"].endswith(" blocks") and " + " in rows["stages"]
    assert rows["batch_size_schedule"] == "4 up to sample 32, then 8"
    assert rows["context_method"] == derived.context_method and rows["collectives"] == derived.collectives


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (6, 1), (64, 10), (12_006, 2000), (1_000_000, 2000)])
def test_warmup_is_a_share_of_the_steps(steps: int, warmup: int) -> None:
    derived = plan({"training": {"steps": steps}})
    assert derived.warmup_steps == warmup
    assert derived.rules["warmup_steps"] == f"warmup_steps auto: a sixth of {steps:,} steps, at most 2,000"
    given = plan({"training": {"steps": steps}, "optimizer": {"warmup_steps": 3}})
    assert (given.warmup_steps, given.rules["warmup_steps"]) == (3, "given")
    share = plan({"training": {"steps": steps}, "optimizer": {"warmup_ratio": 0.1}})
    assert share.warmup_steps == -(-steps // 10), "rounded up, as in transformers"
    assert share.rules["warmup_steps"] == f"warmup_ratio 0.1 of {steps:,} steps"


@pytest.mark.parametrize(
    ("parallel", "replica", "shard", "zero1"),
    [
        ({}, 1, 4, False),
        ({"sharded_data_parallel_degree": 1}, 4, 1, False),
        ({"sharded_data_parallel_degree": 2}, 2, 2, False),
        ({"shard_optimizer_state": True}, 1, 4, True),
        ({"shard_optimizer_state": True, "sharded_data_parallel_degree": 1}, 1, 4, True),
    ],
)
def test_degrees(parallel: dict[str, Any], replica: int, shard: int, zero1: bool) -> None:
    result = plan({"parallel": parallel})
    assert result.degrees == {"replica": replica, "shard": shard, "context": 1, "tensor": 1, "pipeline": 1, "expert": 1}
    assert prod(result.degrees.values()) == CPU4.size
    assert result.data_ranks == 4
    assert result.zero1 is zero1


@pytest.mark.parametrize(
    ("strategy", "order"), [("cluster", "DPT"), ("spread", "TPD"), ("Spread", "TPD"), ("PTD", "PTD"), ("dtp", "DTP")]
)
def test_placement(strategy: str, order: str) -> None:
    assert plan({"parallel": {"placement_strategy": strategy}}).placement == order


@pytest.mark.parametrize(
    ("asked", "world", "compute", "wide"),
    [
        ("auto", CPU4, "fp32", "fp32"),
        ("auto", CUDA4, "bf16", "fp32"),
        ("fp64", CUDA4, "fp64", "fp64"),
        ("fp16", CUDA4, "fp16", "fp32"),
        ("bf16", CPU4, "bf16", "fp32"),
    ],
)
def test_dtypes_and_backend(asked: str, world: World, compute: str, wide: str) -> None:
    result = plan({"precision": {"compute": asked}}, world)
    assert result.dtypes.compute == compute
    assert {result.dtypes.parameters, result.dtypes.reduction, result.dtypes.optimizer, result.dtypes.loss} == {wide}
    assert result.backend == {"cpu": "gloo", "cuda": "nccl"}[world.device_type]


@pytest.mark.parametrize(
    ("training", "sequences", "microbatch", "accumulation"),
    [
        ({}, 16, 4, 1),
        ({"tokens_per_step": 256 * 32}, 32, 8, 1),
        ({"sequences_per_step": 128}, 128, 16, 2),  # 32 a rank, 4096 / 256 = 16 at once
        ({"microbatch_size": 2}, 16, 2, 2),
        ({"gradient_accumulation": 4}, 16, 1, 4),
        ({"microbatch_size": 3, "gradient_accumulation": 5}, 60, 3, 5),
        ({"sequences_per_step": 13}, 13, 4, 1),
        ({"sequences_per_step": 17 * 4}, 68, 9, 2),  # 17 is prime: two parts of 9, not 17 of 1
    ],
)
def test_batch(training: dict[str, Any], sequences: int, microbatch: int, accumulation: int) -> None:
    result = plan({"training": training})
    assert (result.sequences_per_step, result.microbatch, result.accumulation) == (sequences, microbatch, accumulation)


def test_a_cuda_device_takes_larger_microbatches() -> None:
    job = {"training": {"sequences_per_step": 1024}}
    assert (plan(job).microbatch, plan(job, CUDA4).microbatch) == (16, 64)


def test_a_sequence_longer_than_the_limit_runs_alone() -> None:
    result = plan({"data": {"sequence_length": 8192}}, facts=replace(FACTS, max_positions=None))
    assert (result.microbatch, result.accumulation) == (1, 4)


def test_every_plan_holds_all_sequences_and_no_empty_microbatch() -> None:
    chance = random.Random(7)
    made = 0
    for _ in range(500):
        ranks, sequences = chance.choice([1, 2, 3, 4, 8]), chance.randint(1, 100)
        training = {"sequences_per_step": sequences}
        for key in ("microbatch_size", "gradient_accumulation"):
            if chance.random() < 0.4:
                training[key] = chance.randint(1, 12)
        try:
            result = plan({"training": training}, World(ranks, "cpu", ranks))
        except LegalityError as error:
            assert error.rule in ("idle-ranks", "microbatch", "accumulation")
            continue
        made += 1
        rows = result.microbatch * ranks
        assert rows * (result.accumulation - 1) < sequences <= rows * result.accumulation
    assert made > 150


@pytest.mark.parametrize(
    ("rows", "limit", "cut"), [(8, 16, 8), (32, 16, 16), (17, 16, 9), (24, 16, 12), (9, 4, 3), (7, 1, 1)]
)
def test_even_cut(rows: int, limit: int, cut: int) -> None:
    assert even_cut(rows, limit) == cut


@pytest.mark.parametrize(
    ("job", "facts", "says"),
    [
        ({"memory": {"offload_parameters": True}}, FACTS, "memory.offload_parameters saves nothing on a CPU"),
        ({"memory": {"offload_activations": True, **FULL}}, FACTS, "memory.offload_activations saves nothing on a CPU"),
        ({"memory": {"activation_loading_horizon": 2}}, FACTS, "activation_loading_horizon=2 does nothing"),
        (
            {"parallel": {"sharded_data_parallel_degree": 1, "prefetch_depth": 2}},
            FACTS,
            "prefetch_depth=2 does nothing",
        ),
        (
            {"parallel": {"pipeline_parallel_degree": 4, "reshard_after_forward": False}},
            FACTS,
            "reshard_after_forward=False does nothing",
        ),
        ({"parallel": {"workers": 2}}, FACTS, "parallel.workers=2 is not used"),
        (
            {"parallel": {"collective_algorithm": "direct"}},
            FACTS,
            "collective_algorithm=direct does nothing: all ranks are on one host",
        ),
        ({"training": {"sequences_per_step": 13}}, FACTS, "3 of 16 rows of a step are padding"),
        ({}, replace(FACTS, has_attention_dropout=True), "model.attention=eager"),
        ({"precision": {"compute": "fp64"}}, replace(FACTS, experts_looped=True), "one after the other (eager)"),
        ({}, replace(FACTS, head=None), "Logits exist whole"),
        ({"model": {"factory": "a:b"}}, FLAT, "Logits exist whole: a module of model.factory"),
    ],
)
def test_notes(job: dict[str, Any], facts: ModelFacts, says: str) -> None:
    assert any(says in note for note in plan(job, facts=facts).notes)


@pytest.mark.parametrize(
    ("asked", "world", "runs", "rule"),
    [
        ("auto", World(4, "cpu", 4), "flat", "all ranks are on one host"),
        ("auto", World(4, "cpu", 2, hosts=2), "measured", "auto on gloo: timed at start, 2 hosts of 2"),
        ("auto", World(4, "cuda", 2, hosts=2), "flat", "nccl chooses for itself"),
        ("direct", World(4, "cuda", 2, hosts=2), "direct", "given"),
        ("flat", World(4, "cpu", 2, hosts=2), "flat", "given"),
        ("measured", World(2, "cpu", 1, hosts=2), "flat", "each host has one rank"),
    ],
)
def test_how_collectives_cross_hosts(asked: str, world: World, runs: str, rule: str) -> None:
    result = plan({"parallel": {"collective_algorithm": asked}}, world)
    assert result.collectives == runs and rule in result.rules["collectives"]
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(plan_table(result))
    assert ("collectives" in shown.export_text()) == (world.hosts > 1)


def test_the_default_needs_no_note() -> None:
    assert plan().notes == ()
    assert plan({"memory": {"offload_parameters": True}}, CUDA4).notes == ()
    assert plan({"model": {"attention": "eager"}}, facts=replace(FACTS, has_attention_dropout=True)).notes == ()


def test_one_data_rank_has_nothing_to_shard() -> None:
    result = plan({"parallel": {"shard_optimizer_state": True}}, World(1, "cpu", 1))
    assert not result.zero1
    assert "saves nothing: there is one data rank" in result.notes[0]


def test_chunked_loss() -> None:
    assert plan().chunked_loss
    assert not plan(facts=replace(FACTS, head=None)).chunked_loss
    assert not plan({"model": {"factory": "a:b"}}, facts=replace(FLAT, head="out")).chunked_loss


def test_every_derived_value_has_its_rule_and_is_shown() -> None:
    result = plan({"memory": {"offload_parameters": True}})
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(result))
    shown = console.export_text()
    derived = ["placement", "backend", "sequences_per_step", "microbatch", "accumulation", "zero1", "chunked_loss"]
    for key in (*result.degrees, *derived, "compute", "parameters"):
        assert result.rules[key]
        assert result.rules[key][:40] in shown
    assert f"note: {result.notes[0]}"[:60] in shown


def test_to_dict_is_plain_and_the_fingerprint_ignores_what_is_only_shown() -> None:
    base = plan()
    assert json.loads(json.dumps(base.to_dict()))["job"]["training"]["steps"] == 64
    assert plan({"output": "elsewhere", "observe": {"log_every": 5}}).fingerprint == base.fingerprint
    assert plan({"training": {"seed": 1}}).fingerprint != base.fingerprint
    assert plan(world=World(2, "cpu", 2)).fingerprint != base.fingerprint
