"""Pipeline stages against one process: schedules, ties across the ends, uneven cuts, every other axis beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.job.schema import Job
from shardwise.plan.draft import Draft, World
from shardwise.testing.capture import gather
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.sample import generate
from shardwise.training.setup import set_up, study
from shardwise.training.step import evaluate, train_step
from tests.parity.jobs import check_agrees, tensor_job
from tests.parity.test_split_blocks import ANGLES_BY_LENGTH, split_job

TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
STAGES_ALONE = {**TWO, "context_parallel_degree": 1}
FOUR: dict[str, Any] = {"pipeline_parallel_degree": 4}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
ALL: dict[str, Any] = {**TWO, "tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
UNEVEN = {"sequences_per_step": 7, "microbatch_size": 2}
EIGHT = {"sequences_per_step": 15, "gradient_accumulation": 8}  # microbatches, the last one ragged
RAGGED = {"sequences_per_step": 7, "gradient_accumulation": 4}
SLOW: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 4, {"parallel": {**TWO, "pipeline": "zbv"}, "dropout": 0.1, "layers": 5, "training": RAGGED}),
    ("gpt2", 4, {"parallel": {**TWO, "context_parallel_degree": 2}, "dropout": 0.1, "layers": 3,
                 "data": {"isolate_documents": True}}),
    ("bloom", 4, {"parallel": TWO, "layers": 3, "dropout": 0.1, **FP32}),  # a norm before the blocks, sharded
    ("llama", 8, {"parallel": {**ALL, "placement_strategy": "spread"}, "tied": False}),
    ("gpt2", 8, {"parallel": {**TWO, **TENSOR, "context_parallel_degree": 2, "sequence_parallel": True},
                 "dropout": 0.1, "layers": 3, "data": {"isolate_documents": True}}),
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 1}, "tied": False}),
    ("gpt_neox", 4, {"parallel": {**TWO, "pipeline": "zero_bubble", "shard_optimizer_state": True}, "layers": 3}),
    ("gpt2", 4, {"parallel": {**FOUR, "pipeline": "zero_bubble"}, "layers": 5, "dropout": 0.1}),
    ("llama", 8, {"parallel": {**ALL, "pipeline": "zero_bubble", "sequence_parallel": True}, "layers": 3}),
    ("gpt_neox", 4, {"parallel": {**TWO, **TENSOR, "sequence_parallel": True, "pipeline": "zbv"}, "layers": 4}),
    ("bert", 4, {"parallel": {**TWO, "pipeline": "zero_bubble", "sharded_data_parallel_degree": 1}, "layers": 3,
                 "memory": {"activation_checkpointing": "selective"}, "dropout": 0.1}),
    ("gpt2", 4, {"parallel": {**FOUR, "pipeline": "dualpipev"}, "dropout": 0.1, "layers": 9, "training": EIGHT}),
    ("llama", 4, {"parallel": {**FOUR, "pipeline": "zbv"}, "tied": False, "layers": 9, "training": EIGHT}),
    ("gpt2", 4, {"parallel": {**TWO, "pipeline": "dualpipev", "sharded_data_parallel_degree": 1}, "layers": 4}),
    ("gpt_neox", 4, {"parallel": {**TWO, "pipeline": "zbv", "shard_optimizer_state": True}, "layers": 4}),
    ("llama", 8, {"parallel": {**ALL, "pipeline": "dualpipev", "sequence_parallel": True}, "layers": 5}),
    ("llama", 4, {"parallel": {**TWO, "pipeline": "dualpipev", "context_parallel_degree": 2}, "layers": 4}),
    ("llama", 4, {"parallel": {**TWO, "pipeline": "dualpipev"}, "layers": 5, "precision": {"compute": "bf16"},
                  "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    ("llama", 4, {"parallel": {**TWO, "pipeline": "zbv"}, "layers": 5, "precision": {"compute": "fp16"},
                  "memory": {"activation_checkpointing": "full", "offload_parameters": True}}),
    ("bert", 4, {"parallel": {**TWO, "pipeline": "zbv"}, "layers": 5, "dropout": 0.1,
                 "memory": {"activation_checkpointing": "selective"}}),
    ("bloom", 4, {"parallel": {**TWO, "pipeline": "dualpipev"}, "layers": 5, "dropout": 0.1, **FP32}),
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "simple"}, "training": {"gradient_accumulation": 1}}),
    ("gpt2", 4, {"parallel": {**TWO, "tensor_parallel_degree": 2}, "dropout": 0.1, "layers": 3}),
    ("llama", 4, {"parallel": TWO, "memory": {"offload_parameters": True}}),
    ("opt", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("falcon", 2, {"parallel": TWO, "layers": 3, **FP32}),
    ("llama", 4, {"parallel": {**TWO, "context_parallel_degree": 2}, "training": UNEVEN}),
    ("gpt_neox", 4, {"parallel": {**TWO, "virtual_pipeline_degree": 3}, "layers": 7, "training": UNEVEN}),
    ("llama", 8, {"parallel": {**TWO, "sharded_data_parallel_degree": 2, "placement_strategy": "PDT"}}),
    ("gpt2", 4, {"parallel": {**TWO, "reshard_after_forward": False}}),
    ("gpt2", 4, {"parallel": {**TWO, "virtual_pipeline_degree": 2, "prefetch_depth": 0}, "layers": 4}),
    ("qwen3", 8, {"parallel": ALL}),
    ("llama", 8, {"parallel": {**TWO, "tensor_parallel_degree": 4}, "layers": 3}),  # key-value heads in copies
    ("gpt2", 4, {"parallel": TWO, "memory": {"activation_checkpointing": "selective"}, "dropout": 0.1}),
    ("gpt_neox", 2, {"parallel": TWO, **FP32}),
    ("mistral", 2, {"parallel": TWO, "layers": 3}),
    ("gemma", 2, {"parallel": TWO, "layers": 3}),
    ("bert", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("llama", 4, {"parallel": {**FOUR, "virtual_pipeline_degree": 2}, "layers": 9}),
    ("llama", 2, {"parallel": TWO, "layers": 4,
                  "memory": {"activation_checkpointing": "full", "checkpoint_strategy": "group_2"}}),
    ("gpt_neox", 4, {"parallel": TWO, "precision": {"compute": "bf16"}}),
    ("llama", 4, {"parallel": TWO, "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    ("llama", 4, {"parallel": TWO, "precision": {"compute": "fp16"}}),
    ("roberta", 4, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("gpt_neo", 4, {"parallel": FOUR, "layers": 5, "dropout": 0.1, **FP32}),
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "dualpipev"}, "dropout": 0.1, "layers": 5, "training": EIGHT}),
    ("gpt2", 4, {"parallel": {**TWO, "pipeline": "zbv"}, "dropout": 0.1, "layers": 5, "training": EIGHT}),
    ("gpt2", 4, {"parallel": {**TWO, **TENSOR, "pipeline": "zero_bubble"}, "dropout": 0.1, "layers": 3}),
    ("llama", 4, {"parallel": {**TWO, "pipeline": "zero_bubble", "virtual_pipeline_degree": 2}, "layers": 5,
                  "memory": {"activation_checkpointing": "full"}, "precision": {"compute": "bf16"}}),
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "simple"}, "training": UNEVEN, "dropout": 0.1}),
    ("gpt2", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full"}, "dropout": 0.1}),
    ("roberta", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("llama", 2, {"parallel": TWO, "precision": {"compute": "fp16"}}),
]  # fmt: skip
CASES = [
    # 1F1B, blocks that stages do not divide, a ragged last microbatch, ties across the ends
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1, "layers": 3}),
    ("gpt2", 4, {"parallel": FOUR, "layers": 5, "training": UNEVEN, "dropout": 0.1}),
    # weight gradients put off
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "zero_bubble"}, "dropout": 0.1, "layers": 3}),
    ("llama", 4, {"parallel": {**TWO, **TENSOR, "sequence_parallel": True, "pipeline": "zero_bubble"}, "layers": 3,
                  "memory": {"activation_checkpointing": "full"}, "dropout": 0.1}),
    # stages in a V: the tie is one parameter of rank 0, alone and sharded
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "dualpipev"}, "dropout": 0.1, "layers": 5, "training": RAGGED}),
    # virtual stages
    ("gpt2", 2, {"parallel": {**TWO, "virtual_pipeline_degree": 2}, "layers": 5, "dropout": 0.1}),
    # sharding, replicas, ZeRO-1, and the placements
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, "dropout": 0.1, "training": UNEVEN}),
    ("gpt2", 4, {"parallel": {**TWO, "shard_optimizer_state": True}}),
    # tensors
    ("gpt2", 4, {"parallel": {**TWO, **TENSOR, "sequence_parallel": True}, "dropout": 0.1, "layers": 3}),
    # memory
    ("llama", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    # the other families
    ("gptj", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1, **FP32}),  # this one's attention and the next's
    ("gpt_neo", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1, **FP32}),  # compute in fp32
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family, ranks, settings", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, tensor_job(corpora, family, **settings))


def initial(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama"])
def test_initial_weights_are_bit_equal(world_pool: WorldPool, corpora: Path, family: str) -> None:
    alone = world_pool.run(1, initial, tensor_job(corpora, family, layers=5))[0]
    turns, in_v = {**TWO, "virtual_pipeline_degree": 2}, {**TWO, "pipeline": "zbv"}
    for ranks, parallel in ((4, FOUR), (2, turns), (2, in_v), (4, {**TWO, **TENSOR})):
        found = world_pool.run(ranks, initial, tensor_job(corpora, family, layers=5, parallel=parallel))[0]
        assert list(found) == list(alone)
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def kept(job: Job) -> tuple[list[str], int]:
    """Names of this rank's parameters, and how many elements."""
    run = set_up(job, torch.device("cpu"))
    return list(run.model.tensor_map.names), sum(entry.local.numel() for entry in run.model.tensor_map)


def test_a_rank_keeps_its_stage_and_nothing_else(world_pool: WorldPool, corpora: Path) -> None:
    """Tied embeddings, and nothing besides, are on both ends."""
    alone = world_pool.run(1, kept, tensor_job(corpora, "gpt2", layers=4))[0]
    stages = world_pool.run(4, kept, tensor_job(corpora, "gpt2", layers=4, parallel=FOUR))
    tied = {"transformer.wte.weight", "lm_head.weight"}
    blocks = [{name.split(".")[2] for name in names if ".h." in name} for names, _ in stages]
    assert blocks == [{"0"}, {"1"}, {"2"}, {"3"}]
    assert [tied <= set(names) for names, _ in stages] == [True, False, False, True]
    assert ["transformer.wpe.weight" in names for names, _ in stages] == [True, False, False, False]
    assert sum(elements for _, elements in stages) == alone[1] + 97 * 24
    in_v = world_pool.run(2, kept, tensor_job(corpora, "gpt2", layers=4, parallel={**TWO, "pipeline": "zbv"}))
    assert [{name.split(".")[2] for name in names if ".h." in name} for names, _ in in_v] == [{"0", "3"}, {"1", "2"}]
    assert [tied <= set(names) for names, _ in in_v] == [True, False]
    assert sum(elements for _, elements in in_v) == alone[1]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo"])
def test_a_directory_is_read_by_stages(world_pool: WorldPool, corpora: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = tensor_job(corpora, family, layers=3).model.config
    assert isinstance(settings, dict)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(tmp_path)
    job = tensor_job(corpora, family, parallel=TWO, layers=3)
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": None, "path": str(tmp_path)})})
    found = world_pool.run(2, initial, job)[0]
    expected = dict(model.named_parameters())
    assert all(torch.equal(value, expected[name].double()) for name, value in found.items())


def generated(job: Job) -> list[int]:
    run = set_up(job, torch.device("cpu"))
    return generate(run.model, [1, 2, 3], 8, seed=3)


def test_generation_runs_through_the_stages(world_pool: WorldPool, corpora: Path) -> None:
    alone = world_pool.run(1, generated, tensor_job(corpora, "gpt2", layers=4))[0]
    turns, in_v = {**TWO, "virtual_pipeline_degree": 2}, {**TWO, "pipeline": "zbv"}
    for ranks, parallel in ((4, {**TWO, **TENSOR}), (2, turns), (2, in_v)):
        job = tensor_job(corpora, "gpt2", layers=4, parallel=parallel)
        assert world_pool.run(ranks, generated, job) == [alone] * ranks


def validation(job: Job) -> tuple[float, float]:
    """Validation loss and the first step's, as every rank records them."""
    run = set_up(job, torch.device("cpu"))
    validation = list(run.stream.evaluation(run.data.validation, run.evaluation_batches))
    first = evaluate(run.model, run.objective, validation).loss
    return first, train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0).loss


@pytest.mark.slow
def test_every_rank_knows_the_losses(world_pool: WorldPool, corpora: Path) -> None:
    data = {"validation_fraction": 0.2}
    alone = world_pool.run(1, validation, tensor_job(corpora, "gpt2", layers=4, data=data))[0]
    turns, in_v = {**TWO, "virtual_pipeline_degree": 2}, {**TWO, "pipeline": "dualpipev"}
    for ranks, parallel in ((4, TWO), (2, turns), (2, in_v)):
        job = tensor_job(corpora, "gpt2", layers=4, data=data, parallel=parallel)
        for found in world_pool.run(ranks, validation, job):
            assert found == pytest.approx(alone, rel=1e-12)


def in_flight(job: Job) -> int:
    """Most forwards of this rank that await their backward."""
    run = set_up(job, torch.device("cpu"))
    pipeline = run.model.pipeline
    assert pipeline is not None
    assert all((part.weight_gradients is not None) == run.model.plan.splits_backward for part in run.model.parts)
    now = most = 0
    train = pipeline.train

    def counting(work: Any, begin: Any, count: int, later: Any) -> None:
        def more(*arguments: Any) -> Tensor:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            return work(*arguments)

        def fewer(*arguments: Any) -> None:
            nonlocal now
            now -= 1
            begin(*arguments)

        train(more, fewer, count, later)

    pipeline.train = counting  # type: ignore[method-assign]
    train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
    return most


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (FOUR, 4),
        ({**TWO, "pipeline": "simple"}, 2),
        ({**TWO, "virtual_pipeline_degree": 2}, 2),
        ({**TWO, "virtual_pipeline_degree": 2, "pipeline": "zero_bubble"}, 2),
        ({**TWO, "pipeline": "dualpipev"}, 2),
    ],
)
def test_forwards_in_flight_are_as_the_plan_says(
    world_pool: WorldPool, corpora: Path, parallel: dict[str, Any], ranks: int
) -> None:
    job = tensor_job(corpora, "gpt2", layers=4, parallel=parallel)
    draft = Draft(job, World(ranks, "cpu", ranks), study(job))
    assert world_pool.run(ranks, in_flight, job)[0] == draft.in_flight


@pytest.mark.slow
@pytest.mark.parametrize("model_type, config", ANGLES_BY_LENGTH)
def test_rotary_angles_by_length(
    world_pool: WorldPool, tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    model = {"config": toy_config(model_type, **config)}
    check_agrees(
        world_pool, 2, split_job(tmp_path, "causal_lm", model_type, {"model": model, "parallel": STAGES_ALONE})
    )
