"""The topology of a group: which ranks share a host. The engine and the two-level algorithms are chosen by it.

Every rank writes its host's identity to the store at start and reads the others'. Two ranks share a host where host
name, boot id and network namespace are equal, so several network namespaces on one machine count as several hosts.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HOST_VARIABLE = "SHARDWISE_HOST"


def host_name() -> str:
    """Return the name of this host for people: `$SHARDWISE_HOST` where it is set, else its own without the domain."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname().partition(".")[0]


@dataclass(frozen=True)
class Topology:
    """`hosts[node]` are the ranks of a host in ascending order; hosts stand in the order of their first ranks.

    `identities` are the hosts' own, in that order; `devices` what each rank computes on, where it was asked for.
    """

    hosts: tuple[tuple[int, ...], ...]
    identities: tuple[str, ...] = field(default=(), compare=False)
    devices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_uniform(self) -> bool:
        """True if all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    def node_index(self, rank: int) -> int:
        """Return the index of the host that `rank` is on.

        Raises:
            ValueError: there is no such rank.
        """
        for node, ranks in enumerate(self.hosts):
            if rank in ranks:
                return node
        raise ValueError(f"rank {rank} is on none of the {len(self.hosts)} hosts")

    def local_index(self, rank: int) -> int:
        """Return the index of `rank` among its host's ranks."""
        return self.hosts[self.node_index(rank)].index(rank)

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute on the device of `rank`, itself included; on a CPU all ranks of the host."""
        beside = self.hosts[self.node_index(rank)]
        return tuple(other for other in beside if self.devices[other] == self.devices[rank])


def host_identity() -> str:
    """Return a text that is equal on all ranks of a host and on no other: `$SHARDWISE_HOST` where it is set."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return json.dumps([given])
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return json.dumps([
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        network.stat().st_ino if network.exists() else 0,
    ])  # fmt: skip


def of_identities(identities: Sequence[str]) -> Topology:
    """Return the topology of ranks with these hosts' identities, in the order of the ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in hosts.values()), tuple(hosts))


def discover_topology(store: Any, rank: int, world: int, device: str | None = None) -> Topology:
    """The topology of `world` ranks that all call this with the same `store` (a `torch.distributed.Store`).

    Waits for all of them, as long as the store's own timeout. `device` names what this rank computes on, uniquely in
    its host; all ranks give it or none.

    Raises:
        torch.distributed.DistStoreError: a rank did not come in that time.
    """
    store.set(f"host/{rank}", host_identity())
    topology = of_identities(_of_all(store, "host", world))
    if device is None:
        return topology
    store.set(f"device/{rank}", device)
    return replace(topology, devices=tuple(_of_all(store, "device", world)))


def gpu_identity(device_type: str, index: int) -> str:
    """Return the name, unique in its host, of the GPU that this rank sees as `device_type:index`."""
    from shardwise._torch_compat import accelerator

    device = accelerator.module_of(device_type).get_device_properties(index)
    return f"{device_type}:{index} {device.name} {device.uuid}"


def tell_device(store: Any, local_rank: int, device: str) -> None:
    """Tell the ranks of this host what this one computes on."""
    store.set(f"device/{host_identity()}/{local_rank}", device)


def count_devices(store: Any, local_ranks: int) -> int:
    """Return the number of devices of this host's ranks; wait until all of them have called `tell_device`."""
    keys = [f"device/{host_identity()}/{local_rank}" for local_rank in range(local_ranks)]
    return len({store.get(key) for key in keys})


def _of_all(store: Any, what: str, world: int) -> list[str]:
    return [store.get(f"{what}/{rank}").decode() for rank in range(world)]
