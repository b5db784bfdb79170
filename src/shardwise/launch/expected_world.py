"""The world that a job's ranks will make, said before they meet: a launcher's, or the job's own local workers."""

from __future__ import annotations

from dataclasses import replace

from shardwise._torch_compat import accelerator
from shardwise.collectives import engine
from shardwise.job.devices import CPU, default_device_type
from shardwise.job.schema import Job
from shardwise.launch.environment import RankEnvironment
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.process_group import gpus_of_host
from shardwise.plan.plan import World
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.formulas.local import cpu_cluster
from shardwise.planner.formulas.prediction import Cluster

CPU_WORKERS = 2


def expected_world(job: Job, place: RankEnvironment | None, host: HostEnvironment | None = None) -> World:
    """Return the world of `job`'s ranks; `place` is where a launcher has put this one.

    `host` is this host's place where its ranks are to be started here.

    The accelerator's name is left to the workers: asking would put a context of CUDA here.
    """
    world = world_size(job, place, host)
    return replace(world, engine=may_use_engine(job, world) and not engine_problem(job, world))


def world_size(job: Job, place: RankEnvironment | None, host: HostEnvironment | None = None) -> World:
    """Return the number of ranks, hosts and GPUs, without a look at the engine."""
    asked = job.parallel.device
    device_type = default_device_type() if asked == "auto" else asked
    if place is not None:
        hosts = -(-place.world_size // place.local_world_size)
        gpus = gpus_of_host(device_type, place)
        return World(place.world_size, device_type, place.local_world_size, hosts=hosts, gpus=gpus)
    gpus = gpus_of_host(device_type, None)
    workers = job.parallel.workers or (CPU_WORKERS if device_type == CPU else gpus)
    if host is None:
        return World(workers, device_type, workers, gpus=gpus)
    workers = host.processes or workers
    return World(workers * host.hosts, device_type, workers, hosts=host.hosts, gpus=gpus)


def may_use_engine(job: Job, world: World) -> bool:
    """Return whether `auto` would take it: it moves CPU tensors, and one rank has nobody to talk to."""
    return world.device_type == CPU and world.size > 1 and job.parallel.ddp_dist_backend == "auto"


def engine_problem(job: Job, world: World) -> str:
    """Return why `auto` is Gloo; empty where it is not.

    On several hosts a rank knows of its own host alone: all plan with the engine, then agree.
    """
    return engine.obstacle() if world.hosts == 1 and may_use_engine(job, world) else ""


def local_cluster(job: Job) -> Cluster:
    """Return this machine: its accelerators, or the job's workers on its CPU."""
    device_type = default_device_type()
    if device_type != CPU and job.parallel.device != CPU:
        ranks = job.parallel.workers or accelerator.count(device_type)
        return cluster(f"{accelerator.vendor_name(device_type)}:{ranks}")
    return cpu_cluster(job.parallel.workers or CPU_WORKERS)
