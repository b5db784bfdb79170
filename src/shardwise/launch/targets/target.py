"""The protocol of a launch target: which keys it uses, which files it writes, and its cluster's client.

A target is stateless. What `jobs` needs of a launched job later stands in its record (`shardwise.launch.record`).
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan, check_length, given_cluster
from shardwise.launch.record import LaunchRecord
from shardwise.launch.secrets import check_reference
from shardwise.planner.formulas.prediction import Cluster
from shardwise.words import one_of

EVERYWHERE = ("name", "cluster", "environment")
JOB_FILE = "job.yaml"
OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR"}
PORT, OF_TORCHRUN = "MASTER_PORT", "PET_"  # the prefix of torchrun's options


class LaunchTarget(ABC):
    """Somewhere that a job can be started.

    Attributes:
        name: as `--to` takes it.
        summary: what it is, in a line.
        keys: of the `launch` section, beside those that act everywhere.
        needs_image: True where nodes start containers only.
        names_jobs: True where the cluster knows a job by the name that it was given, so that one whose submit has no
            known end can be found.
        secret_form: what a reference of `launch.secrets` looks like; None where the target has none.
        secret_example: such a reference.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    needs_image: ClassVar[bool] = False
    names_jobs: ClassVar[bool] = False
    secret_form: ClassVar[re.Pattern[str] | None] = None
    secret_example: ClassVar[str] = ""

    def check(self, job: Job) -> None:
        """Refuse keys that do nothing here, and what is missing.

        Raises:
            ConfigError: with the key and the targets' own word on it.
        """
        settings = job.launch
        used = (*EVERYWHERE, *self.keys)
        for key in settings.model_fields_set:
            value = getattr(settings, key)
            if key not in used and value != type(settings).model_fields[key].get_default(call_default_factory=True):
                raise ConfigError(
                    f"launch.{key}={value!r} does nothing on {self.name}; leave it out. Keys that act there: "
                    f"{', '.join(used)}"
                )
        if self.needs_image and settings.image is None:
            raise ConfigError(f"launch.image is not set; {self.name} starts containers: give an image with shardwise")
        for variable, reference in settings.secrets.items():
            assert self.secret_form is not None  # `secrets` is among its keys
            check_reference(variable, reference, self.secret_form, self.secret_example)
        for variable in {*settings.environment, *settings.secrets}:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise ConfigError(f"launch.environment: {variable!r} is no name of a variable; use letters, digits, _")
            if variable in (PORT, *OF_RANKS) or variable.startswith(OF_TORCHRUN):
                way = "give launch.port" if variable == PORT and "port" in self.keys else "leave it out"
                raise ConfigError(f"launch.environment.{variable}: {self.name} says it to each rank; {way}")

    def find_cluster(self, job: Job) -> Cluster:
        """Return the nodes of a job.

        Raises:
            ConfigError: they are not said, or not known.
        """
        return given_cluster(job, self.name)

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return what is put behind the name in the longest host name that the target makes."""
        return ""

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan with what this target changes in it.

        Raises:
            ConfigError: the plan does not suit the target.
        """
        check_length(plan.name, self.longest_suffix(plan))
        return plan

    @abstractmethod
    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield the values that are this target's own, with their rules."""

    @abstractmethod
    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the files of a launch, relative names to texts; `directory` is where they will lie."""

    def record(self, plan: LaunchPlan) -> dict[str, object]:
        """Return what the target's client needs later, beside the name."""
        return {}

    @abstractmethod
    def check_client(self, record: LaunchRecord) -> None:
        """Refuse where the client is missing or has no credentials, before anything is submitted.

        Raises:
            LaunchError: with what is missing.
        """

    @abstractmethod
    def submit(self, record: LaunchRecord) -> str:
        """Submit the files of a record's directory; returns the target's own name of the job.

        Raises:
            LaunchError: nothing is left of it on the cluster; `HalfSubmittedError`: something may be.
        """

    @abstractmethod
    def status(self, record: LaunchRecord) -> str:
        """Return the state of a submitted job in the cluster's own word."""

    @abstractmethod
    def logs(self, record: LaunchRecord) -> str:
        """Return what the ranks have printed so far."""

    @abstractmethod
    def stop(self, record: LaunchRecord) -> None:
        """Stop a submitted job; where the target can, it saves its state first."""


def job_text(plan: LaunchPlan) -> str:
    """Return the job file of the nodes: what is set in it, and nothing else."""
    data = plan.job.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


# Text without quotes that kubectl's YAML reads as a bool or a number, and PyYAML's does not: y, 1e3, 0o17.
MISREAD = re.compile(r"[yYnN]|[-+]?(0[xob][0-9a-fA-F_]+|\.?[0-9][0-9_.]*([eE][-+]?[0-9]+)?)")


class _ManifestDumper(yaml.SafeDumper):
    """Writes what people read and change: files inside as blocks of lines, and a template twice instead of an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if MISREAD.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


def manifest_text(*objects: Mapping[str, Any]) -> str:
    """Return objects as YAML documents."""
    documents = (
        yaml.dump(dict(content), Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True) for content in objects
    )
    return "---\n".join(documents)


def split_mount(source: str, kinds: Sequence[str], key: str) -> tuple[str, str]:
    """Return the kind and the rest of a value of `launch.mounts`, such as `pvc:data`.

    Raises:
        ConfigError: it is of another kind.
    """
    for kind in kinds:
        if source.startswith(kind) and len(source) > len(kind):
            return kind, source.removeprefix(kind)
    raise ConfigError(f"{key}={source!r}: must begin with {one_of(kinds)} and name what is mounted")


def local_paths(plan: LaunchPlan) -> dict[str, str]:
    """Return the directories, no URLs, that a run writes to, by their keys."""
    written = {"output": plan.job.output, "checkpoint.directory": plan.job.checkpoint.directory}
    return {key: path for key, path in written.items() if path is not None and "://" not in path}


def lies_in(path: str, directories: Iterable[str]) -> bool:
    """True where a path is one of the directories or below it."""
    return any(PurePosixPath(path).is_relative_to(directory) for directory in directories)


def kept_outside(plan: LaunchPlan) -> Iterator[str]:
    """Note what a run would write into a container, and lose with it."""
    for key, path in local_paths(plan).items():
        if not lies_in(path, plan.settings.mounts):
            yield (
                f"{key}={path} lies inside of the container and ends with it; mount a volume there (launch.mounts), or "
                "give a directory of one"
            )


def setup_lines(plan: LaunchPlan) -> list[str]:
    """Return the lines that go before the start: the first that fails ends it. Conda's scripts have unset variables."""
    return ["set -eo pipefail", *plan.settings.setup] if plan.settings.setup else []


def script_exports(plan: LaunchPlan) -> str:
    """Return the lines of a bash script that set the variables of the ranks."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    for name, reference in plan.settings.secrets.items():
        path = shlex.quote(reference.removeprefix("file:"))
        lines.append(f'{name}="$(< {path})" || exit 1; export {name}  # a reference: its value is read on the node')
    return "\n".join(lines)
