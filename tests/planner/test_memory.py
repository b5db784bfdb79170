"""The memory formulas: their arithmetic, and that they agree with what training really holds."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce

from benchmarks.memory_cpu import measure
from shardwise._torch_compat.groups import all_gather_single
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.kernels import float8_gather
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.activations import BlockKind, waiting_features
from shardwise.planner.formulas.in_flight import InFlight, in_flight_of
from shardwise.planner.formulas.memory import estimate, moments, worst_imbalance
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.shapes import local_elements
from shardwise.testing.world import WorldPool
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import train_step
from tests.parity.jobs import tensor_job

NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "vocab_size": 1024,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "intermediate_size": 176, "num_local_experts": 4}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "n_positions": 128}


def settings(ranks: int, config: dict[str, Any] = NEOX, **sections: dict[str, Any]) -> dict[str, Any]:
    """A job of one microbatch of two sequences of 128 tokens a rank."""
    job: dict[str, Any] = {
        "model": {"config": config},
        "data": {"sequence_length": 128},
        "training": {"microbatch_size": 2, "gradient_accumulation": 1, "sequences_per_step": 2 * ranks},
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    return job


def planned(ranks: int, config: dict[str, Any] = NEOX, device: str = "cpu", **sections: Any) -> tuple[Plan, ModelFacts]:
    job = Job.model_validate(settings(ranks, config, **sections))
    facts = discover(build_model(job), job)
    return resolve(job, World(ranks, device, ranks), facts), facts


def total(ranks: int, **sections: Any) -> float:
    return estimate(*planned(ranks, **sections)).total


# --- arithmetic


def test_total_is_the_sum_of_the_causes_and_the_largest_moment() -> None:
    plan, facts = planned(4)
    found = moments(plan, facts)
    best = estimate(plan, facts)
    assert best.total == max(moment.total for moment in found)
    assert best.total == sum(best.causes().values())
    assert "host" not in best.causes() and len(best.causes()) == 11


def test_states_are_counted_by_hand() -> None:
    plan, facts = planned(1)
    step = moments(plan, facts)[-1]
    assert step.moment == "optimizer step"
    assert step.causes() == {
        "parameters": 4 * facts.parameters,
        "gradients": 4 * facts.parameters,
        "optimizer": 8 * facts.parameters,
        **dict.fromkeys(("gathered", "communication", "unsharded_gradients", "activations", "working", "logits"), 0.0),
        "reference": 0.0,
        "ema": 0.0,
    }


def test_a_reference_that_has_run_ahead_of_training_takes_nothing() -> None:
    rows = {"format": "preference", "path": "pairs.jsonl"}
    copied, precomputed = (
        moments(*planned(2, data=rows, training={"dpo": {"precompute_reference": is_ahead}}))[-1].causes()
        for is_ahead in (False, True)
    )
    assert copied["reference"] == copied["parameters"] > 0
    assert precomputed == {**copied, "reference": 0.0}


def test_uneven_rows_are_padded_like_fsdp2() -> None:
    """13 rows over 4 ranks are 4 rows a rank; a vector of 5 is 2."""
    config = {**NEOX, "hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 26, "vocab_size": 13}
    plan, facts = planned(4, config)
    shapes = facts.parameter_shapes.values()
    expected = 4 * sum(math.ceil(shape[0] / 4) * math.prod(shape[1:]) for shape in shapes)
    assert moments(plan, facts)[-1].parameters == expected > 4 * facts.parameters / 4


def test_sharding_divides_the_states() -> None:
    one, eight = (moments(*planned(ranks))[-1] for ranks in (1, 8))
    for cause in ("parameters", "gradients", "optimizer"):
        assert one.causes()[cause] == 8 * eight.causes()[cause]


def test_replicas_do_not_divide_the_states() -> None:
    half = moments(*planned(4, parallel={"sharded_data_parallel_degree": 2}))[-1]
    assert half.parameters == moments(*planned(2))[-1].parameters


SIXTEEN = {"gradient_accumulation": 8, "sequences_per_step": 16}


@pytest.mark.parametrize(("pipeline", "waiting"), [("zbv", 4), ("zero_bubble", 2), ("interleaved", 0)])
def test_weight_gradients_of_backwards_are_put_off(pipeline: str, waiting: int) -> None:
    """On pipeline rank 2 of four those of one backward of each rank before it; in a V of two."""
    assert max(sum(held.weights) for held in in_flight_of(2, 4, 2, 8, pipeline)) == waiting


def test_a_ring_keeps_no_scores_whatever_attention_is_asked_for() -> None:
    parallel = {"context_parallel_degree": 2, "context_parallel_method": "ring"}
    one = {"sequences_per_step": 2}
    eager, fused = (
        estimate(*planned(2, LLAMA, "cuda", parallel=parallel, model={"attention": asked}, training=one)).activations
        for asked in ("eager", "auto")
    )
    assert eager == fused


def test_stages_of_a_rank_that_are_not_alike_are_counted_apart() -> None:
    """In a V of two ranks the first holds four microbatches of its first stage at the second loss of its last one."""
    held = InFlight(part=1, in_backward=False, forwards=(4, 0), weights=(0, 0), done=(False, True))
    assert held in in_flight_of(0, 2, 2, 4, "dualpipev")
    parallel = {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}
    eight = {"gradient_accumulation": 4, "sequences_per_step": 8}
    config = {**NEOX, "num_hidden_layers": 12, "vocab_size": 8192}  # whose head is as costly as some of its blocks
    plan, facts = planned(2, config, parallel=parallel, training=eight)
    first, last = len(plan.stages[0]), len(plan.stages[3])
    assert first > last
    found: dict[str, float] = {}
    for moment in moments(plan, facts, pipeline=0):
        found[moment.moment] = max(moment.activations, found.get(moment.moment, 0.0))
    block = found[f"forward of unit {first - 1}"] - found[f"forward of unit {first - 2}"]
    assert found["loss"] == pytest.approx((4 * first + last) * block, rel=0.03)


def test_the_first_stage_lets_no_weight_gradient_wait() -> None:
    """Its backward holds no more with zero bubble than with 1F1B; that of a later stage does, and more and more."""
    split, whole = (held_in_backward(pipeline) for pipeline in ("zero_bubble", "interleaved"))
    assert split[0, 0] <= whole[0, 0]
    assert 0 < split[1, 3] - whole[1, 3] < split[1, 0] - whole[1, 0]


def test_gradients_of_a_split_backward_are_there_once_weights_had_theirs() -> None:
    """Until then the first backward of the last stage has its head's alone; that of the first stage has all."""
    parallel = {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}
    plan, facts = planned(2, {**NEOX, "num_hidden_layers": 8}, parallel=parallel, training=SIXTEEN)
    first, last = (
        min(m.unsharded_gradients for m in moments(plan, facts, pipeline=rank) if m.moment == "backward of unit 0")
        for rank in range(2)
    )
    assert last == 4 * facts.vocabulary_size * facts.hidden_size < first


def test_weight_gradients_are_there_while_others_wait() -> None:
    """The last stage has no bubble: its first weight gradients come behind all of its backwards."""
    parallel = {"pipeline_parallel_degree": 4, "pipeline": "zero_bubble", "sharded_data_parallel_degree": 1}
    plan, facts = planned(4, {**NEOX, "num_hidden_layers": 8}, parallel=parallel, training=SIXTEEN)
    last = [held for held in in_flight_of(3, 4, 1, plan.accumulation, "zero_bubble") if held.in_weights]
    fullest = max(last, key=lambda held: held.weights)
    assert fullest.weights[0] > 0 and fullest.done == (True,)
    behind = max(m.activations for m in moments(plan, facts, pipeline=3) if m.moment == "weight gradients")
    block = {name: facts.parameter_shapes[name] for name in facts.parameter_shapes if ".layers.7." in name}
    waiting = waiting_features(facts, BlockKind.of(facts), block) * plan.microbatch * plan.sequence_length * 4
    assert behind == pytest.approx(len(plan.stages[3]) * fullest.weights[0] * waiting, rel=0.05)


def test_each_virtual_stage_counts_its_own_checkpoints() -> None:
    """Of three blocks the first and the third, on every stage."""
    parallel = {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}
    memory = {"activation_checkpointing": "full", "checkpoint_every": 2}
    plan, facts = planned(2, {**NEOX, "num_hidden_layers": 12}, parallel=parallel, training=SIXTEEN, memory=memory)
    assert [len(stage) for stage in plan.stages] == [3] * 4
    found = {moment.moment: moment.activations for moment in moments(plan, facts, pipeline=0)}
    third, sixth = (found[f"forward of unit {last}"] - found[f"forward of unit {last - 1}"] for last in (2, 5))
    assert third == sixth


def held_in_backward(pipeline: str) -> dict[tuple[int, int], float]:
    """Return (pipeline rank, unit) -> what is kept and works in its backward."""
    parallel = {"pipeline_parallel_degree": 2, "pipeline": pipeline}
    plan, facts = planned(2, {**NEOX, "num_hidden_layers": 8}, parallel=parallel, training=SIXTEEN)
    return {
        (rank, int(moment.moment.rpartition(" ")[2])): moment.activations + moment.working
        for rank in range(2)
        for moment in moments(plan, facts, pipeline=rank)
        if moment.moment.startswith("backward of unit")
    }


def test_linear_layers_that_read_one_tensor_wait_with_it_once() -> None:
    """One projection of GPT-NeoX makes query, key and value; Llama's three have one input, as gate and up have."""
    of_neox = (256 + 768) + (256 + 256) + 2 * (256 + 1024)
    of_llama = (128 + 128 + 32 + 32) + (128 + 128) + (128 + 352 + 352) + (352 + 128)
    for config, features in ((NEOX, of_neox), (LLAMA, of_llama)):
        _, facts = planned(1, config)
        first = facts.blocks[0].name
        block = {name: shape for name, shape in facts.parameter_shapes.items() if facts.block_of.get(name) == first}
        assert waiting_features(facts, BlockKind.of(facts), block) == features


def test_tensor_ranks_that_share_the_sequence_wait_with_a_part_of_what_regions_read() -> None:
    """Query, key and value read one of [T/t, H], gate and up another; other inputs and all outputs are whole."""
    _, facts = planned(1, LLAMA)
    block = {name: facts.parameter_shapes[name] for name in facts.parameter_shapes if ".layers.0." in name}
    whole, shared = (waiting_features(facts, BlockKind.of(facts), block, ranks) for ranks in (1, 2))
    assert whole - shared == 2 * 128 / 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "less, more",
    [
        ({"memory": {"activation_checkpointing": "full"}}, {"memory": {"activation_checkpointing": "selective"}}),
        ({"memory": {"activation_checkpointing": "selective"}}, {}),
        ({"memory": {"activation_checkpointing": "full"}},
         {"memory": {"activation_checkpointing": "full", "checkpoint_every": 2}}),
        ({}, {"parallel": {"reshard_after_forward": False}}),
        ({}, {"parallel": {"shard_optimizer_state": True}}),
        ({"optimizer": {"name": "SGD"}}, {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}}}),
        ({"parallel": {"prefetch_depth": 1}}, {"parallel": {"prefetch_depth": 3}}),
        ({}, {"model": {"attention": "eager"}}),
        ({"data": {"isolate_documents": True}}, {"data": {"isolate_documents": True}, "model": {"attention": "sdpa"}}),
    ],
)  # fmt: skip
def test_settings_that_save_memory_save_it(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert total(4, **less) < total(4, **more)


def test_chunks_bound_the_logits() -> None:
    """256 tokens, vocabulary 2048, fp32 (the compute dtype's copy besides in bf16)."""
    loss = {chunk: at_loss(memory={"loss_chunk_tokens": chunk}) for chunk in (64, 256, 1024)}
    assert [loss[chunk].logits for chunk in (64, 256, 1024)] == [64 * 2048 * 4, 256 * 2048 * 4, 256 * 2048 * 4]
    assert at_loss(precision={"compute": "bf16"}).logits == 256 * 2048 * 6


def at_loss(device: str = "cpu", **sections: Any) -> MemoryEstimate:
    return next(moment for moment in moments(*planned(2, device=device, **sections)) if moment.moment == "loss")


def test_the_heads_gradient_is_added_up_without_a_copy_on_cuda_alone() -> None:
    """2048 * 256 elements in fp32, and in bf16 what is added to them."""
    bf16 = {"precision": {"compute": "bf16"}}
    assert at_loss("cuda", **bf16).unsharded_gradients == 2048 * 256 * 4
    assert at_loss("cpu", **bf16).unsharded_gradients == 2048 * 256 * 6


def test_in_forward_a_unit_is_there_twice_beside_the_next() -> None:
    """Its gathered parameters, its own flat buffer, and that of the next."""
    forward = {moment.moment: moment for moment in moments(*planned(2))}
    one, last = forward["forward of unit 2"], forward["forward of unit 3"]
    root = forward["loss"].gathered - last.communication  # the last unit stays gathered
    assert one.communication == 2 * last.communication == 2 * (one.gathered - root) > 0


def test_earlier_microbatches_leave_sums_on_the_device_where_replicas_wait_for_the_last() -> None:
    twice = {"gradient_accumulation": 2, "sequences_per_step": 16}
    shards = {
        "parallel": {"sharded_data_parallel_degree": 2},
        "training": twice,
        "memory": {"offload_parameters": True},
    }
    found = {moment.moment: moment for moment in moments(*planned(4, device="cuda", **shards))}
    step = found["optimizer step"]
    assert step.gradients == 0.0  # all of them are in the host's memory by then
    assert found["loss"].gradients == moments(*planned(2))[-1].gradients


def test_one_shard_rank_reduces_in_a_stages_last_backward_alone() -> None:
    """Ahead of it the first stage has another microbatch's activations, and no buffers of a reduction."""
    run = {"training": {"gradient_accumulation": 4, "sequences_per_step": 8}, "precision": {"compute": "bf16"}}
    pipeline = {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 1}
    found = moments(*planned(2, parallel=pipeline, **run))
    backwards = [moment for moment in found if moment.moment == "backward of unit 0"]
    reductions = [moment for moment in found if moment.moment == "reduction of unit 0"]
    assert min(moment.communication for moment in backwards) == 0.0
    assert len(reductions) == 1 < len(backwards)
    kept = moments(*planned(2, parallel=pipeline | {"reshard_after_forward": False}, **run))
    forward, freed = (
        [each.gathered for each in steps if "forward of unit 0" in each.moment] for steps in (kept, found)
    )
    assert max(forward) > max(freed)  # the next unit's are there from the microbatch before


def test_offload_on_cuda_moves_the_states_to_the_host() -> None:
    held = moments(*planned(2, device="cuda"))[-1]
    away = moments(*planned(2, device="cuda", memory={"offload_parameters": True}))[-1]
    assert away.host == held.total
    assert away.parameters == away.gradients == away.optimizer == 0.0


@pytest.mark.parametrize("share", [0.5, True])
def test_updates_in_host_memory_move_the_optimizers_state(share: float) -> None:
    held = moments(*planned(2, device="cuda"))[-1]
    clipped, free = (
        moments(*planned(2, device="cuda", memory={"offload_optimizer": share}, optimizer={"clip_norm": clip}))[-1]
        for clip in (1.0, None)
    )
    moved = held.optimizer - clipped.optimizer
    assert held.optimizer * float(share) <= moved <= held.optimizer and clipped.optimizer == free.optimizer
    assert (clipped.host, free.host) == (2 * moved, 3 * moved)  # copies of weight and gradient; and the state before
    assert clipped.total == held.total - moved


def test_one_rank_with_one_dtype_needs_no_fsdp() -> None:
    assert not planned(1)[0].needs_fsdp
    assert planned(2)[0].needs_fsdp
    assert planned(1, precision={"compute": "bf16"})[0].needs_fsdp
    assert planned(1, memory={"offload_parameters": True})[0].needs_fsdp


def test_a_model_without_known_blocks_has_its_states() -> None:
    facts = ModelFacts("Toy", 30, 0, (), dict.fromkeys(Axis, SUPPORTED), parameter_shapes={"weight": (5, 6)})
    plan, _ = planned(2)
    found = estimate(plan, facts)
    assert found.parameters == 4 * 3 * 6
    assert found.activations == 0.0


# --- against the real thing

Bytes = tuple[int, int, int]


def states(jobs: list[Job]) -> list[tuple[Bytes, Bytes]]:
    """On one rank, for each job: bytes of parameters, gradients and momentum, measured in a step and predicted."""
    return [(held(run := set_up(job, torch.device("cpu"))), predicted(run)) for job in jobs]


def held(run: AssembledJob) -> Bytes:
    train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
    parameters = sum(entry.local.numel() * entry.local.element_size() for entry in run.model.tensor_map)
    return parameters, run.optimizer.gradient_bytes, run.optimizer.state_bytes()


def predicted(run: AssembledJob) -> Bytes:
    tensor, shard, pipeline = (run.layout.index(*axes) for axes in (("tensor",), ("shard", "context"), ("pipeline",)))
    elements = local_elements(run.facts, run.plan, tensor, shard, pipeline)
    return (8 * elements,) * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks, degree", [(2, 2), (4, 4), (6, 2)])
def test_states_of_each_tensor_rank_are_exact(world_pool: WorldPool, corpora: Path, ranks: int, degree: int) -> None:
    """Uneven MLP and vocabulary, row biases and norms everywhere, key-value heads in copies, uneven rows of shards."""
    families = ["gpt2", "gpt_neox", "llama", "qwen3", "opt", "bloom", "falcon", "mixtral"]
    momentum = {"name": "SGD", "options": {"momentum": 0.9}}
    parallel = {"tensor_parallel_degree": degree}
    jobs = [tensor_job(corpora, family, parallel=parallel, optimizer=momentum) for family in families]
    one_head = {"new_decoder_architecture": False, "multi_query": True, "hidden_size": 32}
    jobs.append(tensor_job(corpora, "falcon", parallel=parallel, optimizer=momentum, config=one_head))
    families.append("falcon of one key-value head")
    for rank in world_pool.run(ranks, states, jobs):
        for family, (measured, expected) in zip(families, rank, strict=True):
            assert measured == expected, family


STAGED = [
    pytest.param(2, {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}, marks=pytest.mark.slow),
    (2, {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}),
    pytest.param(4, {"pipeline_parallel_degree": 4}, marks=pytest.mark.slow),
    pytest.param(8, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, parallel", STAGED)
def test_states_of_each_stage_are_exact(
    world_pool: WorldPool, corpora: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    """Uneven stages, tied embeddings on both ends."""
    families = ["gpt2", "llama", "roberta"]
    momentum = {"name": "SGD", "options": {"momentum": 0.9}}
    jobs = [tensor_job(corpora, each, layers=5, parallel=parallel, optimizer=momentum) for each in families]
    for rank in world_pool.run(ranks, states, jobs):
        for family, (measured, expected) in zip(families, rank, strict=True):
            assert measured == expected, family


def check(pool: WorldPool, ranks: int, tolerance: float = 0.10, **sections: Any) -> None:
    for rank, (measured, predicted) in enumerate(pool.run(ranks, measure, settings(ranks, **sections))):
        message = (
            f"rank {rank}: measured {measured / 1e6:.2f} MB, predicted {predicted.total / 1e6:.2f} MB: {predicted}"
        )
        assert abs(predicted.total / measured - 1) <= tolerance, message


PIPES = [
    (2, {"pipeline": "simple"}, "none"),
    (2, {"virtual_pipeline_degree": 2}, "none"),
    (4, {}, "full"),
    (4, {"pipeline_parallel_degree": 4}, "none"),
    (4, {"tensor_parallel_degree": 2}, "none"),
    (2, {"pipeline": "zero_bubble"}, "none"),
    (2, {"pipeline": "zero_bubble"}, "full"),
    (4, {"pipeline": "zero_bubble", "pipeline_parallel_degree": 4}, "none"),
    (4, {"pipeline": "zero_bubble"}, "none"),
    (2, {"pipeline": "zbv"}, "none"),
    (2, {"pipeline": "zbv"}, "full"),
    (2, {"pipeline": "dualpipev"}, "none"),
    (4, {"pipeline": "dualpipev"}, "full"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, parallel, policy", [PIPES[0], *(pytest.param(*pipe, marks=pytest.mark.slow) for pipe in PIPES[1:])]
)
def test_agrees_with_measured_peaks_of_stages(
    world_pool: WorldPool, ranks: int, parallel: dict[str, Any], policy: str
) -> None:
    """Four microbatches, of which each rank keeps as many as the schedule has in flight."""
    parallel = {"pipeline_parallel_degree": 2, **parallel}
    data = ranks // math.prod(parallel.get(f"{axis}_parallel_degree", 1) for axis in ("pipeline", "tensor"))
    check(
        world_pool,
        ranks,
        parallel=parallel,
        memory={"activation_checkpointing": policy},
        training={"gradient_accumulation": 4, "sequences_per_step": 8 * data},
    )


@pytest.mark.slow
def test_further_microbatches_take_no_more_memory_on_stages(world_pool: WorldPool) -> None:
    """Hidden states and gradients have room from when they are on their way to when they have been read."""
    peaks = []
    config = {**NEOX, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 512}
    for count in (4, 12):
        training = {"gradient_accumulation": count, "sequences_per_step": 2 * count}
        job = settings(2, config, parallel={"pipeline_parallel_degree": 2}, training=training)
        peaks.append([peak for peak, _ in world_pool.run(2, measure, job)])
    for few, many in zip(*peaks, strict=True):
        assert many < 1.02 * few


RUNS = [(2, "none")]
SLOW_RUNS = [(1, "none"), (2, "full"), (1, "full"), (4, "none"), (4, "full"), (8, "none"), (8, "full")]


@pytest.mark.parametrize("ranks, policy", [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)])
def test_peak_is_predicted_within_a_tenth(world_pool: WorldPool, ranks: int, policy: str) -> None:
    check(world_pool, ranks, memory={"activation_checkpointing": policy})


TENSOR_RUNS = [(2, LLAMA, "full", True)]
SLOW_TENSOR_RUNS = [
    (ranks, config, policy, scattered)
    for ranks in (2, 4)
    for config in (NEOX, LLAMA, GPT2)
    for policy in ("none", "full", "selective")
    for scattered in (True, False)
    if (ranks, config, policy, scattered) not in TENSOR_RUNS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, config, policy, scattered",
    [*TENSOR_RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_TENSOR_RUNS)],
)
def test_peak_with_tensor_parallelism(
    world_pool: WorldPool, ranks: int, config: dict[str, Any], policy: str, scattered: bool
) -> None:
    check(
        world_pool,
        ranks,
        config=config,
        parallel={"tensor_parallel_degree": 2, "sequence_parallel": scattered},
        training={"sequences_per_step": ranks},
        memory={"activation_checkpointing": policy},
        model={"dropout": 0.0} if config is GPT2 else {},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, policy",
    [
        pytest.param(MIXTRAL, "none", marks=pytest.mark.slow),
        pytest.param(MIXTRAL, "selective", marks=pytest.mark.slow),
        (QWEN3, "none"),
    ],
)
def test_peak_of_experts_and_of_heads_with_a_size_of_their_own(
    world_pool: WorldPool, config: dict[str, Any], policy: str
) -> None:
    check(world_pool, 2, 0.03, config=config, memory={"activation_checkpointing": policy})


SHARED_MIXTRAL = {**MIXTRAL, "num_local_experts": 8}
SHARED_QWEN = {
    **LLAMA, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 160,
}  # fmt: skip
OVER_RANKS = [
    (2, SHARED_MIXTRAL, {"expert_parallel_degree": 2}, "none"),
    (2, SHARED_MIXTRAL, {"expert_parallel_degree": 2}, "full"),
    (2, SHARED_MIXTRAL, {"expert_parallel_degree": 2}, "full and rows"),
    (2, SHARED_QWEN, {"expert_parallel_degree": 2}, "none"),
    (4, SHARED_MIXTRAL, {"expert_parallel_degree": 2}, "none"),
    (4, SHARED_MIXTRAL, {"expert_parallel_degree": 4}, "none"),
    (4, SHARED_MIXTRAL, {"expert_parallel_degree": 2, "sharded_data_parallel_degree": 2}, "none"),
    (4, SHARED_MIXTRAL, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, "none"),
    (4, SHARED_MIXTRAL, {"expert_parallel_degree": 2, "pipeline_parallel_degree": 2}, "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, config, parallel, policy",
    [OVER_RANKS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in OVER_RANKS[1:])],
)
def test_peak_of_experts_that_ranks_share(
    world_pool: WorldPool, ranks: int, config: dict[str, Any], parallel: dict[str, Any], policy: str
) -> None:
    data = ranks // math.prod(parallel.get(f"{axis}_parallel_degree", 1) for axis in ("pipeline", "tensor"))
    count = 2 if "pipeline_parallel_degree" in parallel else 1
    training = {"microbatch_size": 4, "gradient_accumulation": count, "sequences_per_step": 4 * count * data}
    memory = {"activation_checkpointing": policy.split()[0], "keep_expert_rows": policy.endswith("rows")}
    check(world_pool, ranks, config=config, parallel=parallel, memory=memory, training=training)


def test_a_worst_load_is_shown_beside_the_expected() -> None:
    """Top 2 of 8 over 4 ranks: all tokens may go to the two experts of one rank, which then has four times the rows."""
    plan, facts = planned(4, SHARED_MIXTRAL, parallel={"expert_parallel_degree": 4})
    assert worst_imbalance(plan, facts) == 4.0
    even, worst = (estimate(plan, facts, imbalance=load) for load in (1.0, 4.0))
    rows = 2 * 2 * 128 * 4  # numbers in bytes of one feature of the rows that a rank gets, evenly
    kept = rows * (SHARED_MIXTRAL["hidden_size"] + 4 * SHARED_MIXTRAL["intermediate_size"])
    assert worst.total - even.total > 3 * 2 * kept  # of the blocks before the last, at least


CASES: dict[str, dict[str, Any]] = {
    "experts, full": {"config": MIXTRAL, "memory": {"activation_checkpointing": "full"}},
    "experts, batched": {"config": {**MIXTRAL, "intermediate_size": 64, "experts_implementation": "batched_mm"}},
    "experts over tensor ranks": {
        "config": MIXTRAL,
        "parallel": {"tensor_parallel_degree": 2},
        "training": {"sequences_per_step": 2},
    },
    "experts and a shared one": {
        "config": {
            **LLAMA,
            "model_type": "qwen2_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 160,
        }
    },
    "llama": {"config": LLAMA},
    "gpt2 full": {"config": GPT2, "model": {"dropout": 0.0}, "memory": {"activation_checkpointing": "full"}},
    "selective": {"memory": {"activation_checkpointing": "selective"}},
    "group_2": {"memory": {"activation_checkpointing": "full", "checkpoint_strategy": "group_2"}},
    "every second": {"memory": {"activation_checkpointing": "full", "checkpoint_every": 2}},
    "kept gathered": {"parallel": {"reshard_after_forward": False}},
    "ZeRO-1": {"parallel": {"shard_optimizer_state": True}},
    "accumulation": {"training": {"gradient_accumulation": 2, "sequences_per_step": 8}},
    "bf16": {"precision": {"compute": "bf16"}},
    "long": {"training": {"microbatch_size": 8, "sequences_per_step": 16}},
}


def messages_left(job: dict[str, Any]) -> list[int]:
    """Bytes of float8's messages that exist at each reduction of a unit; last, how many were gathered."""
    messages, left = list[weakref.ref[torch.Tensor]](), []

    def gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.dtype == torch.uint8:
            messages.append(weakref.ref(output))
        return all_gather_single(output, *args, **kwargs)

    def reduce(*args: Any, **kwargs: Any) -> Any:
        left.append(sum(message.numel() for each in messages if (message := each()) is not None))
        return foreach_reduce(*args, **kwargs)

    patch = mock.patch.object
    with patch(float8_gather, "all_gather_single", gather), patch(_fsdp_param_group, "foreach_reduce", reduce):
        measure(job)
    return [*left, len(messages)]


@pytest.mark.slow
def test_no_message_of_float8_is_left_where_a_unit_is_reduced(world_pool: WorldPool) -> None:
    """So the formula leaves them out."""
    precision = {"compute": "bf16", "fp8": "emulate", "fp8_layers": "all", "fp8_all_gather": True}
    config = {**NEOX, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    for found in world_pool.run(2, messages_left, settings(2, config, precision=precision)):
        assert len(found) > 4 and not any(found[:-1]) and found[-1] >= 8


ADAPTED: dict[str, dict[str, Any]] = {
    "lora": {"config": LLAMA, "adapter": {"kind": "lora", "rank": 4}},
    "attention": {"config": LLAMA, "adapter": {"kind": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    "checkpointed": {"adapter": {"kind": "lora", "rank": 4}, "memory": {"activation_checkpointing": "full"}},
    "tensor": {
        "adapter": {"kind": "lora", "rank": 4}, "parallel": {"tensor_parallel_degree": 2},
        "training": {"sequences_per_step": 2},
    },
    "dora": {"adapter": {"kind": "dora", "rank": 4}},
    "frozen": {"model": {"config": NEOX, "freeze": ["gpt_neox.embed_in", "gpt_neox.layers.[01]"]}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", *(pytest.param(n, marks=pytest.mark.slow) for n in [*ADAPTED][1:])])
def test_peak_is_predicted_where_a_part_is_trained(world_pool: WorldPool, name: str) -> None:
    check(world_pool, 2, **ADAPTED[name])


def test_frozen_parameters_have_no_states() -> None:
    plan, facts = planned(2, LLAMA, adapter={"kind": "lora", "rank": 4})
    step = moments(plan, facts)[-1]
    trained = facts.trained_parameters
    assert trained == 4 * sum(into + out for into, out in facts.linears.values())
    assert (step.gradients, step.optimizer) == (4 * trained / 2, 8 * trained / 2)
    assert step.parameters == 4 * facts.parameters / 2


LONG: dict[str, Any] = {"data": {"sequence_length": 500}, "training": {"sequences_per_step": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_peak_is_predicted_for_split_sequences(world_pool: WorldPool, method: str) -> None:
    parallel = {"context_parallel_degree": 2, "context_parallel_method": method}
    check(world_pool, 2, config={**NEOX, "max_position_embeddings": 512}, parallel=parallel, **LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peak_is_predicted_for_other_jobs(world_pool: WorldPool, name: str) -> None:
    check(world_pool, 2, **CASES[name])
