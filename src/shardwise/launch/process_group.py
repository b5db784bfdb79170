"""The process group's life: `with process_group(...) as device:` is the body of every worker.

One rank by itself needs no network. Ranks of one host talk over the loopback interface only. A group that exists
already (a user's own, or a test's) is used and left alone.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import accelerator
from shardwise.collectives import hierarchical, registration, topology
from shardwise.collectives.alone import register_alone
from shardwise.errors import MachineError
from shardwise.job.devices import ALONE_BACKEND, device_kind
from shardwise.launch import failure, loopback
from shardwise.launch.environment import RankEnvironment, detect
from shardwise.launch.heap import keep_freed_memory
from shardwise.launch.hosts import detect_host
from shardwise.launch.peer_failure import failures_shared, settle_failure
from shardwise.launch.reach import reach

ALONE = RankEnvironment(0, 1, 0, 1, loopback.ADDRESS, 1, "")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = timedelta(minutes=10)  # for the ranks to come
NO_ENGINE = "Gloo: rank {} cannot use the native engine; `shardwise build` on its host says why."
SHARED = "the native engine: rank {} shares a GPU with another, which NCCL refuses."
# The job's store, which torch makes of the launcher's variables. It stays: without a launcher's, rank 0 itself serves
# it, and others, quicker with the next group, would meet at a server that is about to end.
_stores: dict[RankEnvironment, dist.Store] = {}
_groups: Counter[RankEnvironment] = Counter()  # that this process has begun


@contextmanager
def process_group(device_type: str, backend: str, timeout_seconds: float = 600) -> Iterator[torch.device]:
    """Joins this process's group and yields its device; leaves the group at the end.

    Also after an error, but for NCCL's group of several ranks, which only the end of the process leaves then. The other
    ranks are told of the error.

    Raises:
        ShardwiseError: a collective has failed because another rank had; it says which rank and why.
    """
    place = detect() or _alone()
    device = _device(device_type, place)
    if dist.is_initialized():
        settle_failure()
        with failures_shared():
            yield device
        return
    changed = _keep_on_host(place)
    failure.forget()
    try:
        _join(place, device, backend, timedelta(seconds=timeout_seconds))
        with failures_shared():
            yield device
    except (Exception, SystemExit) as error:
        failure.report(error)  # before other ranks see this one leave and fail themselves
        raise
    finally:
        if dist.is_initialized() and not waits_for_peers():
            dist.destroy_process_group()
        for key in changed:
            os.environ.pop(key, None)


def _alone() -> RankEnvironment:
    """Return the place of a process that no launcher has made a rank.

    Raises:
        MachineError: it is one of several hosts, which would each train by itself.
    """
    host = detect_host()
    if host is not None and host.hosts > 1:
        raise MachineError(
            f"this process is host {host.index} of {host.hosts} (from {host.launcher}) and no rank; start the script "
            "with `shardwise run`, which starts the ranks of each host, or with torchrun"
        )
    return ALONE


def waits_for_peers() -> bool:
    """Return whether to leave the group would be to wait for ranks that do not come.

    NCCL lets what was begun come to its end on all of them, and after an error on one the others wait for it in their
    next collective.
    """
    if not failure.is_reported() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return "nccl" in dist.get_backend()


def _device(device_type: str, place: RankEnvironment) -> torch.device:
    if device_type == "cpu":
        _share_cores(place.local_world_size)
        keep_freed_memory()
        return torch.device("cpu")
    if accelerator.count(device_type) == 0:
        raise MachineError(
            f"local rank {place.local_rank} finds no GPU: this host shows none; set parallel.device to cpu"
        )
    device = torch.device(device_type, _gpu(device_type, place))
    accelerator.enter(device)
    return device


def _gpu(device_type: str, place: RankEnvironment) -> int:
    """The GPU of this rank, among those that it sees. They are dealt out in turns where there are fewer than ranks."""
    return place.local_rank % accelerator.count(device_type)


def gpus_of_host(device_type: str, place: RankEnvironment | None) -> int:
    """Return the number of GPUs that the ranks of this host compute on, or may; 0 on a CPU.

    Where a rank of a launcher sees fewer than there are ranks, all tell one another which: it may have its own.

    Raises:
        MachineError: the ranks cannot meet for that.
    """
    visible = accelerator.count(device_type)
    if place is None or not 0 < visible < place.local_world_size:
        return visible
    store = _job_store(place, TIMEOUT)
    _tell_gpu(store, device_type, place)
    with _meeting(place):
        return topology.count_devices(store, place.local_world_size)


def _tell_gpu(store: dist.Store, device_type: str, place: RankEnvironment) -> None:
    identity = topology.gpu_identity(device_type, _gpu(device_type, place))
    topology.tell_device(store, place.local_rank, identity)


def _share_cores(local_world_size: int) -> None:
    """Each worker computes on its share of the cores; OMP_NUM_THREADS, where set, is the user's word on that."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, available_cores() // local_world_size))


def available_cores() -> int:
    """Cores this process may run on, which a container or `taskset` may have cut down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_on_host(place: RankEnvironment) -> list[str]:
    """Gloo resolves the host's name for its address, which may be public or may not resolve at all."""
    name = loopback.interface()
    if not place.one_host or name is None or os.environ.get(GLOO_INTERFACE):
        return []
    os.environ[GLOO_INTERFACE] = name
    return [GLOO_INTERFACE]


def _join(place: RankEnvironment, device: torch.device, backend: str, timeout: timedelta) -> None:
    options: dict[str, Any] = {"timeout": timeout, "rank": place.rank, "world_size": place.world_size}
    if place.world_size == 1:
        options["store"] = dist.HashStore()
    else:
        store = _meet(place, timeout)
        if accelerator.is_accelerator(device):
            _tell_gpu(_job_store(place, timeout), device.type, place)  # hosts with fewer GPUs than ranks ask
        if not place.one_host:
            backend = agree(dist.PrefixStore("shardwise", store), place, backend, device.type)
        _check_shared(backend, device, place)
        options["store"] = dist.PrefixStore("default_pg", store)
    parts = hierarchical.parts_of(backend)
    if registration.BACKEND in parts:
        registration.register()
    if parts[0] != "flat":
        hierarchical.register_two_levels(*parts)
    if backend == ALONE_BACKEND:
        register_alone()
    elif accelerator.is_accelerator(device) and backend == device_kind(device.type).backend:
        # Offloaded parameters and counters live on the CPU. No `device_id`: with it every new group is split from the
        # default one by all ranks together, and a layout makes its groups on their members alone.
        backend = f"cpu:gloo,{device.type}:{backend}"
    with _meeting(place):
        dist.init_process_group(backend, **options)


def _meet(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """A part of the job's store for the group that begins: the keys of one that has ended would lead ranks astray.

    Plain torchrun keeps its store when it starts ranks again. On one host they know alike how often it has; agents of
    several hosts that come and go need not, and are given a new store each time.
    """
    store = _job_store(place, timeout)
    _groups[place] += 1
    attempt = (os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0") if place.one_host else "0"
    return dist.PrefixStore(f"attempt{attempt}/group{_groups[place]}", store)


def _job_store(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    if place not in _stores:
        if place.rank:  # rank 0 is the master, or a launcher that is there already
            obstacle = reach(place.master_address, place.master_port, timeout.total_seconds())
            if obstacle is not None:
                raise _cannot_meet(place, obstacle)
        with _meeting(place):
            _stores[place] = next(dist.rendezvous("env://", timeout=timeout))[0]
    store = _stores[place]
    store.set_timeout(timeout)
    return store


def _check_shared(backend: str, device: torch.device, place: RankEnvironment) -> None:
    """NCCL's own error of two ranks on a GPU comes with the first operation and says less."""
    if "nccl" not in backend:
        return
    gpus = gpus_of_host(device.type, place)
    if gpus < place.local_world_size:
        raise MachineError(
            f"the {place.local_world_size} ranks of this host share {gpus} GPU(s), and NCCL joins one rank of each; "
            f"set parallel.ddp_dist_backend to auto or shardwise, or start {gpus} rank(s) a host"
        )


def agree(store: dist.Store, place: RankEnvironment, backend: str, device_type: str) -> str:
    """The backend that every rank can join with: each brings what its host can use.

    On CPUs that is Gloo, where one has no engine; on GPUs the engine, where ranks of a host share a GPU.

    Raises:
        MachineError: ranks were told to use different backends.
    """
    store.set(f"backend/{place.rank}", backend)
    if place.rank == 0:  # one rank asks all, and all ask one
        store.set("backends", " ".join(store.get(f"backend/{rank}").decode() for rank in range(place.world_size)))
    names = store.get("backends").decode().split()
    if len(set(names)) == 1:
        return backend
    engine_for_all = accelerator.is_accelerator(device_type)
    proposals = {
        name: rank for rank, name in reversed([*enumerate(names)]) if (registration.BACKEND in name) == engine_for_all
    }
    if len(proposals) != 1:
        raise MachineError(f"the ranks ask for different backends: {', '.join(names)}; give all hosts one job file")
    [(name, rank)] = proposals.items()
    if place.rank == 0:
        print(f"note: the ranks talk over {(SHARED if engine_for_all else NO_ENGINE).format(rank)}", file=sys.stderr)
    return name


@contextmanager
def _meeting(place: RankEnvironment) -> Iterator[None]:
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        lines = str(error).strip().splitlines()  # a stack of C++ frames stands behind the first
        raise _cannot_meet(place, lines[0] if lines else type(error).__name__) from error


def _cannot_meet(place: RankEnvironment, why: str) -> MachineError:
    return MachineError(
        f"rank {place.rank} of {place.world_size} could not meet the others at MASTER_ADDR={place.master_address} "
        f"MASTER_PORT={place.master_port} (set by {place.launcher}): {why.rstrip('.')}; check that rank 0 runs there, "
        "that the port is free, and that hosts reach each other"
    )
