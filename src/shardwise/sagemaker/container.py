"""The container of a SageMaker training job, from inside: what the service has put into `/opt/ml`, and what it takes.

SageMaker writes `input/config/*.json` and the channels below `input/data`, starts the image with the argument `train`,
and uploads `model`, `output` and, as they change, `checkpoints`. A `Container` says so in the variables that scripts
know (those of the training toolkit and those of version 3 of the SDK, which differ little), as keys of a job, and as
the arguments of a script. SAGEMAKER_BASE_DIR is another place of `/opt/ml`, as for the toolkit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError, MachineError, WorkerError
from shardwise.job.keys import leaf_keys
from shardwise.job.schema import Job
from shardwise.sagemaker.failure import BASE, RESOURCES, base_directory
from shardwise.words import listed, nearest

CODE_CHANNEL, JOB_CHANNEL = "code", "job"
SOURCE_ARCHIVE = "sourcedir.tar.gz"
PROGRAM = "sagemaker_program"
ARGUMENT_FORM = "sagemaker_argument_form"  # "json": as version 3 of the SDK writes a script's arguments
COMMAND = "sagemaker_command"  # a line of a shell, in place of an entry point
REQUIREMENTS = "sagemaker_requirements"  # a file of the code, in place of requirements.txt
CHECKPOINTS = "sagemaker_checkpoint_local_path"  # the directory of checkpoints, where it is not the service's own
OPTIONS = "mp_parameters"
DISTRIBUTIONS = ("sagemaker_mpi_enabled", "sagemaker_torch_distributed_enabled", "sagemaker_pytorch_ddp_enabled",
              "sagemaker_distributed_dataparallel_enabled")  # fmt: skip
JOB_SUFFIXES = (".yaml", ".yml", ".json")
PORT = 7777


@dataclass(frozen=True)
class Container:
    """The container of this process.

    Attributes:
        base: `/opt/ml`.
        hyperparameters: the user's, decoded.
        framework: those that start with `sagemaker_`, by which the SDK speaks to the container.
        resources: resourceconfig.json.
        inputs: inputdataconfig.json.
    """

    base: Path
    hyperparameters: Mapping[str, Any]
    framework: Mapping[str, Any]
    resources: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """All hosts, sorted as words: algo-1, algo-10, algo-2."""
        return sorted(self.resources.get("hosts", []))

    @property
    def current_host(self) -> str:
        """The name of this host."""
        return str(self.resources.get("current_host", "localhost"))

    @property
    def model_directory(self) -> Path:
        """The directory whose content becomes the job's model."""
        return self.base / "model"

    @property
    def checkpoint_directory(self) -> Path:
        """The directory that the service keeps equal to the job's prefix of checkpoints in S3."""
        return below_base(self.base, str(self.framework.get(CHECKPOINTS, f"{BASE}/checkpoints")))

    @property
    def channels(self) -> dict[str, Path]:
        """The directory of each input."""
        return {name: self.base / "input" / "data" / name for name in sorted(self.inputs)}

    @cached_property
    def code(self) -> Path:
        """The directory of the user's files: unpacked from the channel `code`, or put there by the image.

        Raises:
            DataError: the archive of the channel is none.
        """
        code, channel = self.base / "code", self.base / "input" / "data" / CODE_CHANNEL
        archives = sorted(channel.glob("*.tar.gz"))  # one, by whatever name it has in S3
        if len(archives) == 1:
            code.mkdir(parents=True, exist_ok=True)
            try:
                with tarfile.open(archives[0]) as packed:
                    _unpack(packed, code)
            except (tarfile.TarError, OSError) as error:
                raise DataError(f"{archives[0]} cannot be unpacked: {error}; upload source_dir again") from error
        elif not code.is_dir() and channel.is_dir():
            return channel  # version 3 of the SDK puts the files themselves there
        return code

    @property
    def program(self) -> Path | None:
        """The entry point that the job names: a script, or the file of a job.

        Raises:
            ConfigError: it is not among the files.
        """
        name = self.framework.get(PROGRAM)
        if name is None:
            return None
        path = self.code / str(name)
        if not path.is_file():
            files = [entry.name for entry in self.code.iterdir()] if self.code.is_dir() else []
            raise ConfigError(f"{PROGRAM}={name!r} is not in {self.code}; there are {listed(sorted(files)) or 'none'}")
        return path

    @property
    def script(self) -> Path | None:
        """The entry point, where it is a script."""
        program = self.program
        return program if program is not None and program.suffix not in JOB_SUFFIXES else None

    @property
    def has_script(self) -> bool:
        """True where the job names a script or a command of a shell, rather than a job of shardwise."""
        return self.command is not None or self.script is not None

    def run_command(self) -> None:
        """Run the job's command in the directory of the user's files.

        Raises:
            WorkerError: it ends with another exit code than 0.
        """
        done = subprocess.run(["/bin/bash", "-c", str(self.command)], cwd=self.code if self.code.is_dir() else None)
        if done.returncode:
            raise WorkerError(f"{self.command!r} ended with exit code {done.returncode}")

    @property
    def job_file(self) -> Path | None:
        """The file of the job: the entry point, or the one in the channel `job`; None: the embedded job."""
        program = self.program
        if program is not None and program.suffix in JOB_SUFFIXES:
            return program
        directory = self.channels.get(JOB_CHANNEL)
        files = sorted(path for path in directory.iterdir() if path.suffix in JOB_SUFFIXES) if directory else []
        if len(files) > 1:
            raise ConfigError(f"channel {JOB_CHANNEL} holds {listed(path.name for path in files)}; give it one file")
        return files[0] if files else None

    @property
    def command(self) -> str | None:
        """The line of a shell that the job asks for in place of an entry point."""
        return self.framework.get(COMMAND)

    def enter_job(self) -> Path | None:
        """Return the file of the job, with its directory the current one: its paths are relative to it."""
        path = self.job_file
        if path is not None:
            os.chdir(path.parent)
        return path

    @property
    def is_distributed(self) -> bool:
        """True where a script is to run in several processes; else the toolkit starts it once on each host."""
        return any(self.framework.get(name) for name in DISTRIBUTIONS)

    def keys(self) -> dict[str, Any]:
        """Return the hyperparameters that are keys of a job, such as `training.steps`.

        Raises:
            ConfigError: one is no key.
        """
        keys = {name: value for name, value in self.hyperparameters.items() if name != OPTIONS}
        for name, value in keys.items():
            if name not in leaf_keys() and "." not in name:
                raise ConfigError(f"hyperparameter {name}={value!r} is no key of a job.{nearest(name, leaf_keys())}")
        return keys

    def placed(self, job: Job) -> tuple[Job, list[str]]:
        """Return `job` with its output where the service looks for it, as far as the job does not say, and notes."""
        changes: dict[str, Any] = {}
        notes = []
        if "output" not in job.model_fields_set:
            changes["output"] = str(self.base / "output" / "data")
        checkpoints = self.checkpoint_directory
        given = job.checkpoint.model_fields_set
        if "directory" not in given and checkpoints.is_dir():
            if len(self.hosts) == 1:
                settings = {"directory": str(checkpoints)} | ({} if "resume" in given else {"resume": "auto"})
                changes["checkpoint"] = job.checkpoint.model_copy(update=settings)
            else:
                notes.append(
                    f"{checkpoints} is another directory on each of {len(self.hosts)} hosts; set checkpoint.directory "
                    "to a URL (s3://...) or a file system that they share to keep checkpoints"
                )
        return (job.model_copy(update=changes) if changes else job), notes

    def keep_model(self, output: Path, directories: tuple[str, ...]) -> str | None:
        """Move what a run has exported to where the service takes the model from; return what to say of it.

        The first of `directories` that `output` holds becomes the model itself, others stand in it by their names.
        """
        written = [output / name for name in directories if (output / name).is_dir()]
        if not written:
            return None
        self.model_directory.mkdir(parents=True, exist_ok=True)
        first, *others = written
        for path in [*first.iterdir(), *others]:
            shutil.move(str(path), self.model_directory / path.name)
        first.rmdir()
        return f"the model is in {self.model_directory}, which the service uploads"

    # ---------------------------------------------------------------------------------------------- for scripts

    def arguments(self) -> list[str]:
        """Return the hyperparameters as the arguments of a script, in the form that its SDK writes."""
        if self.framework.get(ARGUMENT_FORM) == "json":
            pairs = [(f"--{name}", _json_text(value)) for name, value in self.hyperparameters.items()]
        else:
            pairs = [
                (f"{'--' if len(name) > 1 else '-'}{name}", _toolkit_text(value))
                for name, value in sorted(self.hyperparameters.items())
            ]
        return [word for pair in pairs for word in pair]

    def variables(self) -> dict[str, str]:
        """Return the variables that scripts know, of both kinds of start."""
        hosts, inputs = self.hosts, self.base / "input"
        groups = {group["instance_group_name"]: group for group in self.resources.get("instance_groups", [])}
        program = self.framework.get(PROGRAM)
        values: dict[str, Any] = {
            "SM_MODEL_DIR": self.model_directory,
            "SM_INPUT_DIR": inputs,
            "SM_INPUT_CONFIG_DIR": inputs / "config",
            "SM_INPUT_DATA_DIR": inputs / "data",
            "SM_OUTPUT_DIR": self.base / "output",
            "SM_OUTPUT_DATA_DIR": self.base / "output" / "data",
            "SM_OUTPUT_INTERMEDIATE_DIR": self.base / "output" / "intermediate",
            "SM_OUTPUT_FAILURE": self.base / "output" / "failure",
            "SM_HOSTS": hosts,
            "SM_CURRENT_HOST": self.current_host,
            "SM_HOST_COUNT": len(hosts),
            "SM_CURRENT_HOST_RANK": hosts.index(self.current_host) if self.current_host in hosts else 0,
            "SM_MASTER_ADDR": hosts[0] if hosts else self.current_host,
            "SM_MASTER_PORT": PORT,
            "SM_NETWORK_INTERFACE_NAME": self.resources.get("network_interface_name", "eth0"),
            "SM_CURRENT_INSTANCE_TYPE": self.resources.get("current_instance_type"),
            "SM_CURRENT_INSTANCE_GROUP": self.resources.get("current_instance_group"),
            "SM_INSTANCE_GROUPS": list(groups),
            "SM_INSTANCE_GROUPS_DICT": groups,
            "SM_DISTRIBUTION_INSTANCE_GROUPS": self.framework.get("sagemaker_distribution_instance_groups", []),
            "SM_IS_HETERO": len({group["instance_type"] for group in groups.values()}) > 1,
            "SM_HPS": dict(self.hyperparameters),
            "SM_FRAMEWORK_PARAMS": dict(self.framework),
            "SM_RESOURCE_CONFIG": dict(self.resources),
            "SM_INPUT_DATA_CONFIG": dict(self.inputs),
            "SM_CHANNELS": list(self.channels),
            "SM_LOG_LEVEL": self.framework.get("sagemaker_container_log_level", 20),
            "SM_NUM_CPUS": os.cpu_count() or 1,
            "SM_NUM_GPUS": count_gpus(),
            "SM_NUM_NEURONS": 0,
            "SM_MODULE_DIR": self.base / "code",
            "SM_SOURCE_DIR": self.base / "code",
            "SM_USER_ENTRY_POINT": program,
            "SM_MODULE_NAME": Path(str(program)).stem if program else None,
            "SM_USER_ARGS": self.arguments(),
        }
        values |= {f"SM_CHANNEL_{name.upper()}": path for name, path in self.channels.items()}
        for name, value in self.hyperparameters.items():
            values |= dict.fromkeys((f"SM_HP_{name.upper()}", f"SM_HP_{name.upper().replace('-', '_')}"), value)
        options = self.hyperparameters.get(OPTIONS)
        if isinstance(options, str):
            values[f"SM_HP_{OPTIONS.upper()}"] = _decoded(options)
        return {name: _variable_text(value) for name, value in values.items()}

    def install_requirements(self) -> None:
        """Install the `requirements.txt` of the user's files, as the toolkit does.

        Raises:
            MachineError: pip fails.
        """
        named = self.framework.get(REQUIREMENTS)
        path = self.code / str(named or "requirements.txt")
        if not path.is_file():
            return
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-r", str(path)], text=True)
        if done.returncode:
            raise MachineError(f"pip install -r {path} ended with exit code {done.returncode}; its output stands above")


def find_container(variables: Mapping[str, str] | None = None) -> Container | None:
    """Return the container of this process, or of other `variables`; None outside of SageMaker.

    Raises:
        MachineError: a file of the service is no JSON.
    """
    base = base_directory(variables)
    if base is None:
        return None
    config = base / "input" / "config"
    given = {name: _decoded(value) for name, value in _read(config / "hyperparameters.json").items()}
    return Container(
        base=base,
        hyperparameters={name: value for name, value in given.items() if not name.startswith("sagemaker_")},
        framework={name: value for name, value in given.items() if name.startswith("sagemaker_")},
        resources=_read(base / RESOURCES),
        inputs=_read(config / "inputdataconfig.json"),
    )


def below_base(base: Path, path: str) -> Path:
    """Return where a path of the container lies, whose `/opt/ml` is `base`."""
    return base / Path(path).relative_to(BASE) if Path(path).is_relative_to(BASE) else Path(path)


def enter_container() -> Container | None:
    """Return the container of this process, with the variables that scripts know set where they are not yet."""
    container = find_container()
    if container is not None:
        for directory in (container.model_directory, container.base / "output" / "data"):
            with suppress(OSError):  # whoever writes there says so
                directory.mkdir(parents=True, exist_ok=True)
        for name, value in container.variables().items():
            os.environ.setdefault(name, value)
        interface = os.environ["SM_NETWORK_INTERFACE_NAME"]
        if len(container.hosts) > 1 and interface in (name for _, name in socket.if_nameindex()):
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SHARDWISE_SOCKET_IFNAME"):
                os.environ.setdefault(name, interface)
    return container


def count_gpus() -> int:
    """Return the GPUs that `nvidia-smi` lists, as the toolkit counts them; torch is not imported for that."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    done = subprocess.run([program, "--list-gpus"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _unpack(packed: tarfile.TarFile, directory: Path) -> None:
    """Unpack an archive into a directory, and nothing beside it.

    Raises:
        tarfile.TarError: a member lies outside, or is neither a file nor a directory.
    """
    if hasattr(tarfile, "data_filter"):
        packed.extractall(directory, filter="data")
        return
    for member in packed:  # Python 3.11.3 and older, Debian 12's too
        place = (directory / member.name).resolve()
        if not (member.isfile() or member.isdir()) or not place.is_relative_to(directory.resolve()):
            raise tarfile.TarError(f"{member.name!r} is no file inside of it")
        member.mode &= 0o755
    packed.extractall(directory)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8") or "{}")
    except (OSError, ValueError) as error:
        raise MachineError(f"{path} is not the JSON that SageMaker writes there: {error}") from error
    if not isinstance(value, dict):
        raise MachineError(f"{path} holds a {type(value).__name__}, not the JSON object that SageMaker writes there")
    return value


def _decoded(value: Any) -> Any:
    """Return a hyperparameter as it was given: the SDK sends JSON text; what is none was sent by other clients."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _variable_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _toolkit_text(value: Any) -> str:
    """Return an argument as the training toolkit writes it: Python's text, a mapping as `k=v,k=v`."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={part}" for name, part in sorted(value.items()))
    return "" if value is None else str(value)


def _json_text(value: Any) -> str:
    """Return an argument as version 3 of the SDK writes it: JSON, a string bare."""
    return value if isinstance(value, str) else json.dumps(value)
