"""The backend that carries a script's collectives: `ddp_dist_backend`, as far as this machine can do what it asks."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.collectives import carriers, engine, hierarchical, registration
from shardwise.errors import MachineError
from shardwise.job.schema import ParallelSection
from shardwise.plan.plan import World, collective_algorithm
from shardwise.words import say_note


def choose_backend(parallel: ParallelSection, world: World, notes: list[str]) -> str:
    """Return the name of the backend to join with, as for `shardwise train`.

    NCCL for CUDA, but the engine where ranks share a GPU; for the CPU the engine, or Gloo with a note.

    Args:
        parallel: with `ddp_dist_backend`, which SMP's documents know as `auto` and `nccl`.
        world: as the launcher describes it.
        notes: to which is added what the user should know.

    Raises:
        MachineError: the engine is asked for and cannot be used.
    """
    for_cuda = registration.BACKEND if world.shares_gpus else carriers.NCCL
    carrier = for_cuda if world.device_type == "cuda" else _for_cpu(parallel.ddp_dist_backend, world, notes)
    algorithm, _ = collective_algorithm(parallel, carrier, world)
    return hierarchical.backend_name(algorithm, carrier, carrier)


def fsdp_backend(world: World) -> str:
    """Return the name of the backend for torch's own FSDP: the engine where ranks share a GPU, else torch's."""
    if world.device_type != "cuda":
        return carriers.GLOO
    return registration.BACKEND if world.shares_gpus else carriers.NCCL


def _for_cpu(asked: str, world: World, notes: list[str]) -> str:
    if asked == carriers.GLOO or world.size == 1:
        return carriers.GLOO
    problem = engine.obstacle()
    try:
        if not problem:
            engine.build(say_note)
            return registration.BACKEND
    except MachineError as error:
        problem = str(error)
    if asked == registration.BACKEND:
        raise MachineError(f"ddp_dist_backend='{asked}': {problem}; use gloo or auto")
    notes.append(f"the ranks talk over Gloo, the native engine is not usable: {problem}.")
    return carriers.GLOO


def joined_backend_note(asked: str) -> str:
    """Return a note where the script has joined its ranks itself by another backend than `asked`; else nothing."""
    joined = hierarchical.parts_of(dist.get_backend())[1]
    if asked == "auto" or asked in joined:
        return ""
    return f"smp_options: ddp_dist_backend={asked!r} has no effect here: the ranks are joined over {joined} already."
