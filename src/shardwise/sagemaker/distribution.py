"""An estimator's `distribution`: SMP's options, ranks a host, and the hyperparameters that say so.

The forms are those of version 2 of SageMaker's SDK. Its hyperparameters (`sagemaker_mpi_enabled` …) are sent as it
sends them, so that scripts and transformers, which look for them, find them. How ranks are started is the container's:
MPI's own options have no program to go to, but its `-x NAME=VALUE` is a variable of the ranks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.smp_options import bare_parameters
from shardwise.sagemaker.container import DISTRIBUTIONS, OPTIONS
from shardwise.words import nearest

FORMS = ("smdistributed", "torch_distributed", "pytorchddp", "mpi", "instance_groups")
LIBRARIES = ("modelparallel", "dataparallel")


@dataclass
class EstimatorDistribution:
    """Settings that a `distribution` comes to.

    Attributes:
        options: SMP's parameters; None without SMP.
        processes: ranks a host; None: a rank a GPU.
        hyperparameters: of the SDK, `mp_parameters` among them.
        environment: variables of the ranks.
        groups: names of the instance groups that are trained on.
        notes: what has no effect, and why.
    """

    options: dict[str, Any] | None = None
    processes: int | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_distribution(distribution: Mapping[str, Any] | None, instance_type: str = "") -> EstimatorDistribution:
    """Return what an estimator's `distribution` asks for.

    Raises:
        ConfigError: a key is unknown, `enabled` is no bool, or two ways exclude each other.
    """
    result = EstimatorDistribution()
    if not distribution:
        return result
    for name, settings in distribution.items():
        if name not in FORMS:
            raise ConfigError(f"distribution: unknown key {name!r}.{nearest(name, FORMS)}")
        if name != "instance_groups":
            _enabled_form(result, name, _mapping(settings, f"distribution.{name}"), instance_type)
    for group in distribution.get("instance_groups", []):
        result.groups.append(str(getattr(group, "instance_group_name", group)))
    if len(result.groups) > 1:
        raise ConfigError(f"distribution.instance_groups={result.groups}: one group is trained on; give one")
    if result.groups:
        result.hyperparameters["sagemaker_distribution_instance_groups"] = result.groups
    starts = [name for name in result.hyperparameters if name in DISTRIBUTIONS]
    if result.options is not None and not starts:
        result.hyperparameters["sagemaker_torch_distributed_enabled"] = True
        result.notes.append("distribution: nothing says how ranks are started; a rank a GPU is, as torchrun does it.")
    return result


def _enabled_form(result: EstimatorDistribution, name: str, settings: dict[str, Any], instance_type: str) -> None:
    if name == "smdistributed":
        return _library(result, settings, instance_type)
    if not _is_enabled(settings, f"distribution.{name}"):
        result.notes.append(f"distribution.{name}: enabled is False, so it is not used.")
        return None
    if name == "mpi":
        return _mpi(result, settings)
    flag = {"torch_distributed": "sagemaker_torch_distributed_enabled", "pytorchddp": "sagemaker_pytorch_ddp_enabled"}
    _only(settings, ("enabled", "custom_mpi_options"), f"distribution.{name}")
    result.hyperparameters[flag[name]] = True
    _mpi_options(result, settings, f"distribution.{name}")
    return None


def _library(result: EstimatorDistribution, settings: dict[str, Any], instance_type: str) -> None:
    """Read `smdistributed`: model or data parallelism, one of them."""
    _only(settings, LIBRARIES, "distribution.smdistributed")
    if len(settings) != 1:
        raise ConfigError(f"distribution.smdistributed={sorted(settings)}: give one of {' and '.join(LIBRARIES)}")
    [(name, given)] = settings.items()
    where = f"distribution.smdistributed.{name}"
    library = _mapping(given, where)
    if not _is_enabled(library, where):
        result.notes.append(f"{where}: enabled is False, so it is not used.")
        return
    if name == "modelparallel":
        _only(library, ("enabled", "parameters"), where)
        result.options = bare_parameters(_parameters(library.get("parameters", {}), where))
        result.hyperparameters[OPTIONS] = result.options
        return
    _only(library, ("enabled", "custom_mpi_options"), where)
    result.hyperparameters["sagemaker_distributed_dataparallel_enabled"] = True
    if instance_type:
        result.hyperparameters["sagemaker_instance_type"] = instance_type
    _mpi_options(result, library, where)


def _parameters(parameters: Any, where: str) -> dict[str, Any]:
    """Return SMP's parameters, of a mapping or the path of a JSON file."""
    if isinstance(parameters, str | Path):
        try:
            parameters = json.loads(Path(parameters).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}.parameters={str(parameters)!r} is no file of JSON: {error}") from error
    return _mapping(parameters, f"{where}.parameters")


def _mpi(result: EstimatorDistribution, settings: dict[str, Any]) -> None:
    _only(settings, ("enabled", "processes_per_host", "custom_mpi_options"), "distribution.mpi")
    result.hyperparameters["sagemaker_mpi_enabled"] = True
    count = settings.get("processes_per_host")
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"distribution.mpi.processes_per_host={count!r}: must be a whole number from 1; use 8")
        result.processes = count
        result.hyperparameters["sagemaker_mpi_num_of_processes_per_host"] = count
    _mpi_options(result, settings, "distribution.mpi")


def _mpi_options(result: EstimatorDistribution, settings: Mapping[str, Any], where: str) -> None:
    """Take the variables of mpirun's options; the others have nobody to go to."""
    text = settings.get("custom_mpi_options")
    if not text:
        return
    try:
        words = shlex.split(str(text))
    except ValueError as error:
        raise ConfigError(f"{where}.custom_mpi_options={text!r}: {error}; close the quotes") from None
    variables, rest = read_mpi_options(words)
    result.environment |= variables
    if rest:
        result.notes.append(
            f"{where}.custom_mpi_options: {' '.join(rest)} has no effect here: ranks are started without mpirun."
        )


def read_mpi_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that `-x NAME=VALUE` sets in options of mpirun, and the other words."""
    variables: dict[str, str] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "-x" and queue and "=" in queue[0]:
            name, _, value = queue.pop(0).partition("=")
            variables[name] = value
        else:
            rest.append(word)
    return variables, rest


def _is_enabled(settings: Mapping[str, Any], where: str) -> bool:
    enabled = settings.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{where}.enabled={enabled!r}: must be True or False; use True")
    return enabled


def _only(settings: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in settings:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}.{nearest(str(name), known)}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: must be a mapping, e.g. {{'enabled': True}}")
    return dict(value)
