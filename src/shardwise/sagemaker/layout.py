"""SMP's options against the instances that they are for, before anything is uploaded.

A script's batch is its own and known at its first step, so it is left open; the model is the script's too. What can be
judged are the degrees, their product, placement and schedule, by the same rules as a job's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import ConfigError, LegalityError
from shardwise.job.devices import CPU
from shardwise.job.smp_options import translate
from shardwise.job.sources import load_job
from shardwise.plan.plan import World, precheck
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.search.search import world_of

BATCH = {"training.microbatch_size": 1, "training.gradient_accumulation": 1}  # stands for a script's own
SHARDS, STATE = "parallel.sharded_data_parallel_degree", "parallel.shard_optimizer_state"
# What only the script can tell: what it checkpoints, and what an offload acts on.
OF_SCRIPTS = ("memory.offload_activations", "memory.activation_loading_horizon", "memory.activation_checkpointing")


def world_of_instances(instance_type: str, count: int, processes: int | None) -> World:
    """Return the ranks that so many instances make.

    Raises:
        ConfigError: the type is not known, or has fewer GPUs than `processes`.
    """
    world = world_of(cluster(f"{instance_type}:{count}"))
    if processes is None or processes == world.local_size:
        return world
    if world.device_type != CPU and processes > world.local_size:
        raise ConfigError(
            f"processes_per_host={processes}: {instance_type} has {world.local_size} GPUs; use at most as many"
        )
    return replace(world, size=processes * count, local_size=processes)


def check_smp_options(options: Mapping[str, Any], world: World) -> list[str]:
    """Refuse options of SMP that cannot run in `world`; return what has no effect.

    Raises:
        ConfigError: an option is unknown, wrong or refused.
        LegalityError: the degrees do not fit the ranks; the message names the options, the rule and the fix.
    """
    translated = translate(options)
    values = {key: value for key, (value, _) in translated.defaults.items()} | translated.values
    values = BATCH | {key: value for key, value in values.items() if key not in OF_SCRIPTS}
    if values.get(STATE):
        values.pop(SHARDS, None)
    if world.device_type == CPU:
        values.pop("parallel.ddp_dist_backend", None)
    values.pop("parallel.workers", None)
    try:
        precheck(load_job({}, values, environ={}), world)
    except LegalityError as error:
        given = [origin for key, origin in translated.origins.items() if key in str(error)]
        hosts = f"{world.hosts} x {world.local_size} ranks"
        raise LegalityError(f"{', '.join(given) or 'the options'} on {hosts}: {error}", error.rule) from error
    return translated.notes
