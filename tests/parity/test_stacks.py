"""Stages of encoder-decoders against one process: two stacks, biases that blocks hand on, three-way ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from shardwise.checkpoint.manifest import Progress
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.discover import discover
from shardwise.parallel.layout import Layout
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.planner.formulas.schedule import holders, tied_across
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.checkpoint.test_layouts import assert_same, read_and_write, write
from tests.parity.jobs import check_agrees, span_job, t5_job
from tests.parity.test_traced import start
from tests.planner.test_memory import states

TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
FOUR: dict[str, Any] = {"pipeline_parallel_degree": 4}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
SHARD: dict[str, Any] = {"sharded_data_parallel_degree": 2}
FLAN: dict[str, Any] = {"tied": False, "gated": True}
UNEVEN = {"sequences_per_step": 7, "microbatch_size": 2}
SINGLE = {"sequences_per_step": 8, "microbatch_size": 1}
LENGTHS = {"data": {"factory": "tests.parity.jobs:Pairs", "factory_arguments": {"uneven": True}}, "training": SINGLE}
TALL, LONG = {"blocks": (3, 2)}, {"blocks": (2, 3)}  # encoder and decoder


def at(*stages: int, encoder: int, names: str = "{}.block.{}") -> dict[str, Any]:
    """Stages of the blocks as they are given, those of the encoder first; `names` of stack and number."""
    blocks = [names.format("encoder", n) for n in range(encoder)]
    blocks += [names.format("decoder", n) for n in range(len(stages) - encoder)]
    return {"auto_partition": False, "partition": dict(zip(blocks, stages, strict=True))}


# Where the cut lies: in the encoder, between the stacks, in the decoder; dropout is on in all of them.
CASES = [
    (4, {"parallel": FOUR, **TALL, "training": UNEVEN}),
]
SLOW: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {**TWO, **at(0, 1, 1, 1, 1, encoder=3)}, **TALL}),
    (4, {"parallel": {**TWO, **TENSOR}, **TALL}),
    (4, {"parallel": {**TWO, **TENSOR}, **TALL, **LENGTHS}),  # each microbatch sends what is of another size
    (4, {"parallel": FOUR, **TALL, **LENGTHS}),
    (4, {"parallel": {**FOUR, "pipeline": "simple"}, **TALL, **FLAN}),
    (4, {"parallel": {**TWO, **SHARD}, **TALL}),
    (4, {"parallel": {**TWO, "shard_optimizer_state": True}, **LONG}),
    (8, {"parallel": {**TWO, **TENSOR, **SHARD}, "blocks": (1, 2), **FLAN}),
    (2, {"parallel": {**TWO, "virtual_pipeline_degree": 2}, **TALL}),  # one rank with two users of the embedding
    (2, {"parallel": {**TWO, "pipeline": "zero_bubble"}, **TALL}),
    (2, {"parallel": {**TWO, "pipeline": "zbv"}, **LONG}),
    (4, {"parallel": FOUR, **TALL, "memory": {"activation_checkpointing": "full"}}),
    (2, {"parallel": TWO, **TALL, "memory": {"activation_checkpointing": "selective"}}),
    (4, {"parallel": {**TWO, **SHARD}, "precision": {"compute": "bf16"}, **FLAN}),
    (4, {"parallel": {**TWO, **SHARD}, **TALL, "memory": {"offload_parameters": True}}),
    (2, {"parallel": {**TWO, "pipeline": "simple", **at(0, 0, 0, 1, 1, encoder=3)}, **TALL, **FLAN}),
    (2, {"parallel": {**TWO, **at(0, 0, 0, 1, 1, encoder=2)}, **LONG, "training": UNEVEN}),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, settings", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_agrees_with_one_process(world_pool: WorldPool, corpora: Path, ranks: int, settings: dict[str, Any]) -> None:
    check_agrees(world_pool, ranks, t5_job(corpora, **settings))


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {"parallel": TWO, **TALL}),
        pytest.param(4, {"parallel": FOUR, **TALL, **FLAN}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": {**TWO, **TENSOR}, "training": UNEVEN}, marks=pytest.mark.slow),
    ],
)
def test_spans_agree_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, settings: dict[str, Any]
) -> None:
    """Inputs and labels are of other lengths."""
    check_agrees(world_pool, ranks, span_job(corpora, **settings))


def test_dropout_of_layers_that_different_kernels_compute_is_switched_off_in_all(
    world_pool: WorldPool, corpora: Path
) -> None:
    """Attention within a stack of T5 has a trained bias and goes to the fused kernel, that across has none."""
    check_agrees(world_pool, 1, span_job(corpora, model={"attention": "auto"}))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["umt5", "longt5"])  # a bias in every block; attention of its own
def test_relatives_of_t5_agree_with_one_process(world_pool: WorldPool, corpora: Path, family: str) -> None:
    config = span_job(corpora, **TALL).model.config
    assert isinstance(config, dict)
    check_agrees(world_pool, 2, span_job(corpora, parallel=TWO, model={"config": {**config, "model_type": family}}))


@pytest.mark.slow
def test_states_of_a_stage_are_exact(world_pool: WorldPool, corpora: Path) -> None:
    """Parameters, gradients and momentum that the planner counts, with one parameter on three stages."""
    momentum = {"name": "SGD", "options": {"momentum": 0.9}}
    for rank in world_pool.run(4, states, [t5_job(corpora, parallel=FOUR, optimizer=momentum, **TALL)]):
        for measured, expected in rank:
            assert measured == expected


@pytest.mark.slow
def test_names_and_weights_are_those_of_the_model(world_pool: WorldPool, corpora: Path) -> None:
    """The embedding is on the stages that use it, a middle one has none, and evaluation agrees."""
    parallel = {**FOUR, **at(0, 1, 2, 3, 3, encoder=3)}
    data = {"data": {"factory": "tests.parity.jobs:Pairs", "validation_fraction": 0.2}}
    alone = world_pool.run(1, start, t5_job(corpora, **TALL, **data))[0]
    stages = world_pool.run(4, start, t5_job(corpora, **TALL, **data, parallel=parallel))
    weights = stages[0][0]
    assert list(weights) == list(alone[0])
    assert all(torch.equal(weights[name], alone[0][name]) for name in weights)
    assert all(losses == pytest.approx(alone[2], rel=1e-12) for _, _, losses in stages)
    assert ["shared.weight" in names for _, names, _ in stages] == [True, False, False, True]
    assert "encoder.final_layer_norm.weight" in stages[2][1]


def test_what_is_tied_is_held_where_it_is_used(corpora: Path) -> None:
    job = t5_job(corpora, **TALL, parallel={**FOUR, **at(0, 1, 2, 2, 3, encoder=3)})
    facts = study(job)
    plan = resolve(job, World(4, "cpu", 4), facts)
    assert holders(plan, facts)["shared.weight"] == (0, 2, 3)
    assert tied_across(plan, facts) == {"shared.weight": (0, 2, 3)}
    groups = {Layout.from_plan(plan, rank).ranks("pipeline") for rank in range(4)}
    assert groups == {(0, 1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TALL, {**TALL, **FLAN}])
def test_a_checkpoint_changes_layout(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """From stages to one rank and back, nothing changes."""
    staged, alone = (span_job(corpora, parallel=parallel, **settings) for parallel in (TWO, {}))
    world_pool.run(2, write, staged, tmp_path / "staged")
    source, middle, back = (tmp_path / name for name in ("staged", "alone", "again"))
    step = "step-00000002"
    found = world_pool.run(1, read_and_write, alone, [source / step], [middle])[0]
    assert found == [Progress(step=2, samples=16)]  # as `write` says
    world_pool.run(2, read_and_write, staged, [middle / step], [back])
    assert_same(source / step, middle / step)
    assert_same(middle / step, back / step)


def test_biases_of_positions_are_handed_on_in_one_stack_too() -> None:
    with torch.device("meta"):
        model = T5EncoderModel(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=3, num_heads=2, vocab_size=16))
    facts = discover(model, Job())
    assert facts.supports(Axis.PIPELINE).ok
    assert (facts.stages.encoder, facts.stages.handed_on) == ("", {0: 0, 1: 2})
