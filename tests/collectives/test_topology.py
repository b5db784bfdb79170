"""Which ranks share a host."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from shardwise.collectives import topology
from shardwise.collectives.topology import Topology


def test_hosts_are_grouped_by_identity_in_the_order_of_their_first_ranks() -> None:
    found = topology.of_identities(["b", "a", "b", "a", "c"])
    assert found == Topology(((0, 2), (1, 3), (4,)))
    assert [found.node_index(rank) for rank in range(5)] == [0, 1, 0, 1, 2]
    assert [found.local_index(rank) for rank in range(5)] == [0, 0, 1, 1, 0]
    assert not found.is_uniform and topology.of_identities(["a", "b"]).is_uniform
    with pytest.raises(ValueError, match="rank 5"):
        found.node_index(5)


def test_ranks_of_one_process_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.HOST_VARIABLE, raising=False)
    store = dist.HashStore()
    other = threading.Thread(target=topology.discover_topology, args=(store, 1, 2))
    other.start()
    assert topology.discover_topology(store, 0, 2) == Topology(((0, 1),))
    other.join()


def test_the_variable_makes_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology.host_identity()
    monkeypatch.setenv(topology.HOST_VARIABLE, "elsewhere")
    assert topology.host_identity() == '["elsewhere"]' != here
