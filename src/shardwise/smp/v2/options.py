"""`tsm.init`'s configuration: SMP's version 2 parameters from code, file, launcher and `tsm.state`, in that order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.smp_options import BY_NAME, bare_parameters, translate
from shardwise.smp.options import launched_options
from shardwise.words import nearest

# SMP's own defaults. Offloading is on unless it is turned off: scripts ask for it and then wrap their model.
DEFAULTS: dict[str, Any] = {
    "hybrid_shard_degree": 0, "sm_activation_offloading": True, "activation_loading_horizon": 2,
    "fsdp_cache_flush_warnings": True, "allow_empty_shards": False, "tensor_parallel_degree": 1,
    "context_parallel_degree": 1, "expert_parallel_degree": 1, "random_seed": 12345,
}  # fmt: skip
DEGREES = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
# What acts in a script; the engine's notes on them are of jobs.
ACT = ("hybrid_shard_degree", "sm_activation_offloading", "activation_loading_horizon", "random_seed", *DEGREES)
WHY = {
    "fsdp_cache_flush_warnings": "torch.cuda.memory_stats tells of retries",
    "allow_empty_shards": "FSDP pads shards, so that empty ones always work",
}


def read_parameters(config: Any, assigned: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all parameters by name, and what the user should know of those that have no effect.

    Args:
        config: a dict, the path of a JSON file, or None.
        assigned: parameters that the script has set on `tsm.state` before.

    Raises:
        ConfigError: no JSON object, or a parameter is unknown, of the wrong type or refused.
    """
    around: list[str] = []  # of the forms in which parameters are given
    given = _mapping(config, around) | bare_parameters(launched_options(), around) | dict(assigned)
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in BY_NAME or "v2" not in BY_NAME[name].versions:
            known = [option for option in BY_NAME if "v2" in BY_NAME[option].versions]
            raise ConfigError(f"tsm.init: {name!r} is no parameter of SMP version 2.{nearest(name, known)}")
    translated = translate(given)
    for name in ("hybrid_shard_degree", "activation_loading_horizon", *DEGREES):
        least = 0 if name == "hybrid_shard_degree" else 1
        if given.get(name, least) < least:
            raise ConfigError(f"tsm.init: {name}={given[name]} must be at least {least}")
    notes = [note for note in translated.notes if not note.startswith(tuple(f"smp_options: {name}=" for name in ACT))]
    notes = [note for note in notes if not note.startswith(tuple(f"smp_options: {name}=" for name in WHY))]
    notes += [f"{name}={given[name]!r} has no effect here: {WHY[name]}." for name in WHY if name in given]
    return DEFAULTS | given, [*around, *notes]


def _mapping(config: Any, notes: list[str]) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"tsm.init: {config!r} is not a file of JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"tsm.init takes a dict or the path of a JSON file of one, not {config!r}")
    return bare_parameters(config, notes)
