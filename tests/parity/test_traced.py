"""Stages cut from the traced forward of models that are no chain of blocks, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.manifest import Progress
from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.testing.capture import gather
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up, study
from shardwise.training.step import evaluate
from tests.checkpoint.test_layouts import assert_same, read_and_write, write
from tests.parity.jobs import LENGTH, VOCABULARY, check_agrees, make_job, make_module_job
from tests.planner.test_memory import states

TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
FOUR: dict[str, Any] = {"pipeline_parallel_degree": 4}
SHARDED: dict[str, Any] = {"sharded_data_parallel_degree": 2}
UNEVEN = {"sequences_per_step": 15, "microbatch_size": 2}
XLNET = {
    "model_type": "xlnet", "d_model": 24, "n_layer": 3, "n_head": 4, "d_inner": 13, "vocab_size": VOCABULARY,
    "dropout": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


# XLNet's positions and segments are weights beside the blocks; Zamba 2 has one layer of attention for several of Mamba.
# ALBERT's two blocks run three times and twice: each stage that runs one holds it.
DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ALBERT = {**toy_config("albert"), "num_hidden_layers": 5, "num_hidden_groups": 2, "vocab_size": 262, **DROPPED}
CONFIGS = {"XLNet": XLNET, "Zamba2": {**toy_config("zamba2"), "vocab_size": VOCABULARY}, "ALBERT": ALBERT}


def traced_job(directory: Path, name: str, **sections: Any) -> Job:
    """Of a module of tests.parity.jobs, or of CONFIGS."""
    sections = {"training": UNEVEN, **sections}
    if name in CONFIGS:
        family, task = ("bert", "masked_lm") if name == "ALBERT" else ("gpt2", "causal_lm")
        model = {"config": CONFIGS[name], "task": task, "attention": "eager"}
        return make_job(directory, family, model=model, data={"sequence_length": LENGTH}, **sections)
    return make_module_job(directory, model={"factory": f"tests.parity.jobs:{name}"}, **sections)


SLOW = [
    ("SkipNet", 4, {"parallel": FOUR}),
    ("Interleaved", 4, {"parallel": {**TWO, **SHARDED}}),
    ("XLNet", 2, {"parallel": TWO}),
    ("ALBERT", 4, {"parallel": {**TWO, **SHARDED}}),
    ("ALBERT", 2, {"parallel": {**TWO, "virtual_pipeline_degree": 2}, "training": {"sequences_per_step": 8,
                   "gradient_accumulation": 4}}),
    ("Everywhere", 4, {"parallel": {**TWO, **SHARDED}}),
    ("Everywhere", 3, {"parallel": {"pipeline_parallel_degree": 3}, "precision": {"compute": "bf16"}}),
    ("Everywhere", 4, {"parallel": {**TWO, "shard_optimizer_state": True}}),
    ("Zamba2", 4, {"parallel": {**TWO, **SHARDED}}),
    ("SkipNet", 2, {"parallel": {**TWO, "virtual_pipeline_degree": 2}, "training": {"sequences_per_step": 8,
                    "gradient_accumulation": 4}}),
    ("SkipNet", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 1, "pipeline": "simple"}}),
    ("SkipNet", 4, {"parallel": {**TWO, "shard_optimizer_state": True}}),
    ("Interleaved", 2, {"parallel": TWO, "precision": {"compute": "bf16"}}),
    ("Interleaved", 4, {"parallel": {**TWO, **SHARDED}, "memory": {"offload_parameters": True}}),
]  # fmt: skip
CASES = [
    ("SkipNet", 3, {"parallel": {"pipeline_parallel_degree": 3}}),  # a skip over a stage, one dropout on all of them
    ("Interleaved", 2, {"parallel": TWO}),  # two tensors cross, ends are tied
    ("Everywhere", 2, {"parallel": TWO}),  # both stages share a layer
    ("ALBERT", 2, {"parallel": TWO}),  # and here a block
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, ranks, settings", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, name: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, traced_job(corpora, name, **settings))


LENGTHS: dict[str, Any] = {
    "data": {"factory_arguments": {"lengths": [2, 5, 1]}},
    "training": {"sequences_per_step": 8, "microbatch_size": 1},
}


@pytest.mark.parametrize(
    "ranks, name, parallel",
    [
        (3, "SkipNet", {"pipeline_parallel_degree": 3}),
        pytest.param(4, "Interleaved", {**TWO, **SHARDED}, marks=pytest.mark.slow),
        pytest.param(2, "Everywhere", {**TWO, "pipeline": "simple"}, marks=pytest.mark.slow),
        pytest.param(2, "SkipNet", {**TWO, "virtual_pipeline_degree": 2}, marks=pytest.mark.slow),
    ],
)
def test_microbatches_of_several_sizes_agree(
    world_pool: WorldPool, corpora: Path, ranks: int, name: str, parallel: dict[str, Any]
) -> None:
    """What crosses a cut is of another size in each microbatch; all of it travels in the room of the largest."""
    check_agrees(world_pool, ranks, traced_job(corpora, name, parallel=parallel, **LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, name, parallel",
    [
        (3, "SkipNet", {"pipeline_parallel_degree": 3}),
        (4, "Interleaved", TWO),
        (2, "Everywhere", TWO),
        (4, "Everywhere", {**TWO, **SHARDED}),
        (4, "ALBERT", {**TWO, **SHARDED}),
    ],
)
def test_states_of_a_traced_stage_are_exact(
    world_pool: WorldPool, corpora: Path, ranks: int, name: str, parallel: dict[str, Any]
) -> None:
    """Parameters, gradients and momentum, with a tie over both ends and shards inside of a stage."""
    momentum = {"name": "SGD", "options": {"momentum": 0.9}}
    for rank in world_pool.run(ranks, states, [traced_job(corpora, name, parallel=parallel, optimizer=momentum)]):
        for measured, expected in rank:
            assert measured == expected


def start(job: Job) -> tuple[dict[str, Tensor], set[str], list[float]]:
    """All weights at the start (on rank 0), this rank's names, and the validation loss."""
    run = set_up(job, torch.device("cpu"))
    batches = list(run.stream.evaluation(run.data.validation, run.evaluation_batches))
    losses = [evaluate(run.model, run.objective, batches).loss]
    return gather(run), set(run.model.tensor_map.names), losses


def test_names_and_weights_are_those_of_the_model(world_pool: WorldPool, corpora: Path) -> None:
    """Each stage has its own, what is tied is on both ends, and evaluation, which drops nothing, agrees."""
    data = {"validation_fraction": 0.2}
    alone = world_pool.run(1, start, traced_job(corpora, "Interleaved", data=data))[0]
    stages = world_pool.run(2, start, traced_job(corpora, "Interleaved", data=data, parallel=TWO))
    weights = stages[0][0]
    assert list(weights) == list(alone[0])
    assert all(torch.equal(weights[name], alone[0][name]) for name in weights)
    assert all(losses == pytest.approx(alone[2], rel=1e-12) for _, _, losses in stages)
    first, last = (names for _, names, _ in stages)
    assert first | last == alone[1]
    assert first & last == {"first.weight", "last.weight"}
    assert "left.0.up.weight" in first and "right.2.up.weight" in last


@pytest.mark.slow
def test_a_checkpoint_changes_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """From traced stages to one rank and back, nothing changes."""
    staged, alone = (traced_job(corpora, "SkipNet", parallel=parallel) for parallel in (TWO, {}))
    world_pool.run(2, write, staged, tmp_path / "staged")
    source, middle, back = (tmp_path / name for name in ("staged", "alone", "again"))
    step = "step-00000002"
    found = world_pool.run(1, read_and_write, alone, [source / step], [middle])[0]
    assert found == [Progress(step=2, samples=16)]  # as `write` says
    world_pool.run(2, read_and_write, staged, [middle / step], [back])
    assert_same(source / step, middle / step)
    assert_same(middle / step, back / step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name, says",
    [
        (
            "Branching",
            r"the forward of Branching \(.*jobs.py:\d+\) cannot run on fake tensors: it reads values of tensors \(",
        ),
        ("Counting", "2 lists of blocks, and its trace cannot be cut either: .*changes the buffer calls in one stage"),
        (
            "InPlace",
            "2 lists of blocks, and its trace cannot be cut either: .*changes a parameter or an input in place",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(corpora: Path, name: str, says: str) -> None:
    job = traced_job(corpora, name, parallel=TWO)
    with pytest.raises(LegalityError, match=f"pipeline_parallel_degree=2: .*{says}"):
        resolve(job, World(2, "cpu", 2), study(job))


def test_modules_of_a_traced_model_are_not_split(corpora: Path) -> None:
    job = traced_job(corpora, "SkipNet", parallel={**TWO, "tensor_parallel_degree": 2})
    with pytest.raises(LegalityError, match=r"tensor_parallel_degree=2: .*traced forward"):
        resolve(job, World(4, "cpu", 4), study(job))
