"""What carries a group's tensors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.collectives.carriers import carries_host_memory
from shardwise.testing.world import WorldPool


@pytest.mark.parametrize(
    ("backends", "carried"),
    [("cuda:nccl", False), ("xpu:xccl", False), ("cpu:gloo,cuda:nccl", True), ("cpu:shardwise,cuda:shardwise", True)],
)
def test_host_memory_is_carried_where_a_backend_of_the_cpu_is_there(backends: str, carried: bool) -> None:
    with mock.patch.object(dist, "get_backend_config", lambda: backends):
        assert carries_host_memory() is carried


def test_a_world_on_a_cpu_carries_host_memory(world_pool: WorldPool) -> None:
    assert world_pool.run(2, carries_host_memory) == [True, True]
