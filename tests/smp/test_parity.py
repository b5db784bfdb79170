"""SMP scripts against plain transformers: losses and weights on every layout that the options can ask for."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.testing.world import WorldPool
from tests.smp.scripts import train

# transformers computes its losses in fp32 whatever the model computes in: an fp32 rounding of the seed is the floor.
LOSS, WEIGHTS = 1e-6, 1e-8
HALF = 2e-2
DDP: dict[str, Any] = {"ddp": True}
TWO: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed"}
CASES = [
    (1, "gpt2", {"microbatches": 2}),
    (2, "gpt2", {**DDP, "microbatches": 2, "sharded_data_parallel_degree": 2}),
    (2, "gpt2", {**TENSOR, "microbatches": 2}),
    (2, "gpt_neox", {**TENSOR, "prescaled_batch": False}),
    (2, "gpt2", TWO),
    (2, "gpt2", {**DDP, "shard_optimizer_state": True}),
    (3, "bart", {**TWO, "pipeline_parallel_degree": 3}),
]
SLOW = [
    (2, "t5", TWO),
    (4, "t5_tied", {**TWO, "pipeline_parallel_degree": 4}),
    *((ranks, family, {**config, **more}) for family in ("gpt2", "gpt_neox") for ranks, config, more in (
        (1, {}, {}),
        (2, DDP, {}), (4, DDP, {"sharded_data_parallel_degree": 4}), (4, DDP, {"sharded_data_parallel_degree": 2}),
        (2, TWO, {}), (2, TWO, {"pipeline": "simple"}), (2, TWO, {"microbatches": 1}),
        (8, TWO, {**TENSOR, "microbatches": 2}),
        (8, TWO, {**TENSOR, "placement_strategy": "spread", "microbatches": 2}),
        (4, TENSOR, {"optimize": "memory", "prescaled_batch": False}), (4, DDP, {"shard_optimizer_state": True}),
    )),
    *((2, family, {**TWO, "pipeline": "simple"}) for family in ("t5", "t5_tied")),
    (4, "t5", {**TWO, "pipeline_parallel_degree": 4, "pipeline": "simple"}),
    (4, "t5_tied", {**TWO, "sharded_data_parallel_degree": 2}), (4, "t5_tied", {**TWO, "shard_optimizer_state": True}),
    (4, "t5", {**TWO, **TENSOR, "microbatches": 2}),
    (8, "t5_tied", {**TWO, **TENSOR, "microbatches": 2, "prescaled_batch": False}),
    (2, "t5", TENSOR), (2, "t5", {**TENSOR, "prescaled_batch": False}), (4, "t5", {**TENSOR, "microbatches": 2}),
    *((2, family, {**TWO, "pipeline": "simple"}) for family in ("bart", "marian", "m2m_100")),
    (4, "bart", {**TWO, "pipeline_parallel_degree": 4}), (4, "marian", {**TWO, "pipeline_parallel_degree": 4}),
    (4, "m2m_100", {**TWO, "sharded_data_parallel_degree": 2}), (4, "marian", {**TWO, "shard_optimizer_state": True}),
    (2, "falcon", TENSOR), (2, "falcon", TWO), (2, "falcon", {**DDP, "sharded_data_parallel_degree": 2}),
]  # fmt: skip


def _check(pool: WorldPool, ranks: int, family: str, config: dict[str, Any]) -> None:
    for loss, weights in pool.run(ranks, train, config, family):
        assert loss <= LOSS and weights <= WEIGHTS, (loss, weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, family, config", CASES)
def test_numbers_are_those_of_plain_transformers(
    world_pool: WorldPool, ranks: int, family: str, config: dict[str, Any]
) -> None:
    _check(world_pool, ranks, family, config)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, family, config", SLOW)
def test_numbers_on_every_layout(world_pool: WorldPool, ranks: int, family: str, config: dict[str, Any]) -> None:
    _check(world_pool, ranks, family, config)


HALVES: list[Any] = [
    ("gpt2", {"fp16": True}),
    ("gpt2", {"bf16": True, "sharded_data_parallel_degree": 2}),
    *(
        pytest.param("gpt_neox", config, marks=pytest.mark.slow)
        for config in ({"fp16": True}, {"bf16": True}, {"bf16": True, "sharded_data_parallel_degree": 2})
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, config", HALVES)
def test_half_precision_keeps_close(world_pool: WorldPool, family: str, config: dict[str, Any]) -> None:
    for loss, weights in world_pool.run(2, train, {**DDP, **config}, family):
        assert loss <= HALF and weights <= HALF, (loss, weights)


CHECKPOINTED: list[Any] = [
    ("gpt2", {**TWO, "offload_activations": True}),
    ("t5", TWO),
    pytest.param("bart", TWO, marks=pytest.mark.slow),
    *(
        pytest.param(family, config, marks=pytest.mark.slow)
        for family in ("gpt2", "gpt_neox")
        for config in (TWO, DDP, {**DDP, "offload_activations": True}, {**TENSOR, "offload_activations": True})
    ),
    pytest.param("gpt_neox", {**TWO, "offload_activations": True}, marks=pytest.mark.slow),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, config", CHECKPOINTED)
def test_checkpointed_and_offloaded_blocks_give_the_same_numbers(
    world_pool: WorldPool, family: str, config: dict[str, Any]
) -> None:
    for loss, weights in world_pool.run(2, train, config, family, True):
        assert loss <= LOSS and weights <= WEIGHTS, (loss, weights)
