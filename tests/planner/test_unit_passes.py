"""What FSDP2 does to a unit that one rank has all of, byte by byte as its operators move them, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.constants.inventory import cluster, presets
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.formulas.unit_passes import block_passes, step_passes
from shardwise.testing.trace.job import JobTrace, trace_job
from shardwise.testing.trace.program import Operators

BLOCKS, RANKS = 2, 8
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


def job_of(microbatches: int, **parallel: Any) -> Job:
    training = {"microbatch_size": 1, "sequences_per_step": RANKS * microbatches}
    return Job.model_validate(
        {
            "model": {"config": LLAMA},
            "data": {"sequence_length": 16},
            "precision": {"compute": "bf16"},
            "parallel": {"sharded_data_parallel_degree": 1} | parallel,
            "training": training,
        }
    )


def configured(microbatches: int, **parallel: Any) -> TrainingConfiguration:
    job = job_of(microbatches, **parallel)
    facts, where = discover(build_model(job), job), cluster("p5.48xlarge:1")
    return configuration_of(resolve(job, World(RANKS, "cuda", RANKS), facts), facts, where)


def traced(microbatches: int, **parallel: Any) -> JobTrace:
    job = job_of(microbatches, **parallel)
    return trace_job(job, World(RANKS, "cpu", RANKS), discover(build_model(job), job), 0, processes=1)


def bytes_of(trace: JobTrace) -> Counter[tuple[str, bool]]:
    """Return (phase, whether once a step) -> bytes."""
    found = Counter[tuple[str, bool]]()
    for entry in trace.ranks[0].program:
        if isinstance(entry, Operators):
            found[entry.phase, entry.once] += entry.work.get(("bytes",), 0)
    return found


def elements(plan: Plan) -> tuple[int, int]:
    """Return the parameters of all blocks, and of the root."""
    model = build_model(plan.job)
    whole, blocks = (sum(p.numel() for p in module.parameters()) for module in (model, model.model.layers))
    return blocks, whole - blocks


@pytest.mark.parametrize("reshards", [True, False], ids=["freed", "kept"])
def test_gathering_and_reduction_move_what_the_formula_says(reshards: bool) -> None:
    """Of two microbatches: 6 + 4 bytes for each gathering, 8 + 16 for the reduction, as the code's operators do it."""
    trace = traced(2, reshard_after_forward=reshards)
    blocks, root = elements(trace.plan)
    moved = bytes_of(trace)
    assert moved["reduction", True] == 24 * (blocks + root) and not moved["reduction", False]
    of_blocks = moved["gathering", True] + moved["gathering", False] - 10 * root
    last = blocks // BLOCKS  # waits gathered for its backward
    assert of_blocks == 10 * (2 * (2 * blocks - last) if reshards else blocks)
    assert (moved["gathering", False] > 0) is reshards


def test_gradients_are_added_up_as_the_formula_says() -> None:
    """One microbatch leaves its gradients to the reduction; of two the first is cast and the second added."""
    alone = traced(1)
    one, two, whole = bytes_of(alone), bytes_of(traced(2)), sum(elements(alone.plan))
    assert two["backward", False] - 2 * one["backward", False] == (6 + 10) * whole
    assert one["reduction", True] == (6 + 16) * whole


def test_the_closed_form_has_the_bytes_of_the_trace() -> None:
    made = configured(4)
    bandwidth = _bandwidth(made)
    block = made.model.layer_parameters
    kept = 1 / BLOCKS  # of the blocks, the last
    assert block_passes(made) * bandwidth == pytest.approx(block * (10 * (2 - kept) + (6 + 3 * 10) / 4))
    root = 2 * made.model.embedding_parameters
    once = root * (10 + 24 + 6 + 3 * 10) + BLOCKS * block * 24
    assert step_passes(made, BLOCKS) * bandwidth == pytest.approx(once)
    keeps = replace(made, reshard_after_forward=False)
    assert block_passes(keeps) * bandwidth == pytest.approx(block * (6 + 3 * 10) / 4)
    assert step_passes(keeps, BLOCKS) * bandwidth == pytest.approx(once + BLOCKS * block * 10)


def test_several_shard_ranks_have_these_passes_in_their_constants() -> None:
    made = configured(4, sharded_data_parallel_degree=8)
    assert block_passes(made) == step_passes(made, BLOCKS) == 0
    assert block_passes(replace(configured(4), zero=0)) == 0


def test_offloaded_parameters_are_reduced_in_every_microbatch() -> None:
    made = replace(configured(4), offload_parameters=True)
    block, root = made.model.layer_parameters, 2 * made.model.embedding_parameters
    assert block_passes(made) * _bandwidth(made) == pytest.approx(block * (10 * 1.5 + 22))
    assert step_passes(made, BLOCKS) * _bandwidth(made) == pytest.approx(4 * root * (10 + 22))


def test_kept_weights_and_a_split_backward_save_gatherings() -> None:
    model = presets()["llama2-7b"]  # a toy's accelerator waits for its host
    freed, kept = (replace(configured(8, reshard_after_forward=flag), model=model) for flag in (True, False))
    assert predict(kept).step_seconds < predict(freed).step_seconds
    split = configured(8, pipeline_parallel_degree=2, pipeline="zero_bubble")
    assert split.whole_in_step
    assert block_passes(split) < block_passes(replace(split, whole_in_step=False))


def _bandwidth(made: TrainingConfiguration) -> float:
    part = made.cluster.accelerator
    return part.bandwidth * 1e9 * part.memory_bound / made.stack.memory_bound
