"""SMP version 2 scripts against plain transformers: losses, norms and weights under every degree."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shardwise.smp.v2.moe.moe_config import MoEConfig
from shardwise.testing.world import WorldPool
from tests.smp.sharded_scripts import train

# transformers computes its losses in fp32 whatever the model computes in: an fp32 rounding of the seed is the floor.
LOSS, WEIGHTS, SINGLE = 1e-6, 1e-7, 1e-5
CASES = [
    (4, "llama", {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, "checkpointed"),
    (2, "gpt_neox", {"hybrid_shard_degree": 2, "context_parallel_degree": 2}, "checkpointed"),
    (4, "mixtral_balanced", {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, ""),
]
SLOW = [
    (2, "llama", {"hybrid_shard_degree": 1}, ""),
    (2, "gpt_neox", {"hybrid_shard_degree": 2}, "checkpointed"),
    (4, "llama", {"hybrid_shard_degree": 2}, "rank0"),
    (4, "mistral", {"hybrid_shard_degree": 4}, "flat"),
    (4, "mixtral", {"hybrid_shard_degree": 2}, ""),
    (2, "mixtral", {"tensor_parallel_degree": 2}, "checkpointed"),
    (4, "mixtral", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, "rank0 checkpointed"),
    (8, "mixtral_balanced", {"tensor_parallel_degree": 4, "hybrid_shard_degree": 2}, ""),
    (4, "mixtral", {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, "checkpointed"),
    (2, "gpt_neox", {"tensor_parallel_degree": 2}, ""),
    (4, "llama_1", {"tensor_parallel_degree": 2}, "checkpointed"),
    (4, "llama_tied", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, "rank0"),
    (8, "mistral", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, "rank0 checkpointed"),
    (4, "llama", {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, ""),
    (8, "llama", {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, "checkpointed"),
    (2, "llama", {}, "checkpointed"),
    (2, "gpt_neox", {"hybrid_shard_degree": 1}, ""),
    (4, "gpt_neox", {"hybrid_shard_degree": 4}, "checkpointed"),
    (2, "mixtral_experts", {"expert_parallel_degree": 2}, ""),
    (4, "mixtral_experts", {"expert_parallel_degree": 2}, "rank0 checkpointed"),
    (4, "mixtral_experts", {"expert_parallel_degree": 2, "hybrid_shard_degree": 1}, "checkpointed"),
    (4, "mixtral_experts", {"expert_parallel_degree": 2, "context_parallel_degree": 2}, ""),
    (4, "mixtral_experts", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, "rank0 checkpointed"),
    (8, "mixtral_experts", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, ""),
    (8, "mixtral_experts", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, ""),
    (2, "gpt2", {"hybrid_shard_degree": 1}, ""),
    (2, "gpt2", {"hybrid_shard_degree": 2}, "checkpointed"),
    (4, "gpt2", {"hybrid_shard_degree": 4}, ""),
    (2, "gpt2", {"tensor_parallel_degree": 2}, ""),
    (2, "gpt2", {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, ""),
]


def _check(pool: WorldPool, ranks: int, family: str, config: dict[str, Any], how: str) -> None:
    for loss, norm, weights in pool.run(ranks, train, config, family, how):
        limits = (SINGLE, SINGLE) if family == "mixtral" else (LOSS, WEIGHTS)
        assert max(loss, norm) <= limits[0] and weights <= limits[1], (loss, norm, weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, family, config, how", CASES)
def test_numbers_are_those_of_plain_transformers(
    world_pool: WorldPool, ranks: int, family: str, config: dict[str, Any], how: str
) -> None:
    _check(world_pool, ranks, family, config, how)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, family, config, how", SLOW)
def test_numbers_at_every_degree(
    world_pool: WorldPool, ranks: int, family: str, config: dict[str, Any], how: str
) -> None:
    _check(world_pool, ranks, family, config, how)


BALANCED = MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1)


@pytest.mark.parametrize(
    "ranks, config",
    [
        (2, {"expert_parallel_degree": 2}),
        pytest.param(4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, marks=pytest.mark.slow),
    ],
)
def test_losses_of_routers_are_those_of_the_whole_batch(
    world_pool: WorldPool, ranks: int, config: dict[str, Any]
) -> None:
    balanced = functools.partial(train, config=BALANCED)
    for loss, norm, weights in world_pool.run(ranks, balanced, config, "mixtral_experts", "checkpointed"):
        assert max(loss, norm) <= LOSS and weights <= WEIGHTS, (loss, norm, weights)
