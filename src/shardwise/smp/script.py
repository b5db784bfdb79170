"""`shardwise run SCRIPT`: a script written for SMP or for torch.distributed, unchanged, on this machine's workers.

Each worker sets the variables that such scripts read, installs the import hook and runs the script as `__main__`.
Workers are started as for `shardwise train`; under torchrun, Slurm or Open MPI this process is one of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise._torch_compat import accelerator
from shardwise.errors import ConfigError, MachineError, WorkerError
from shardwise.job.smp_options import bare_parameters, translate
from shardwise.launch import failure
from shardwise.launch.environment import detect
from shardwise.launch.hosts import detect_host
from shardwise.launch.local import run_local
from shardwise.smp.doors import import_hook
from shardwise.smp.options import DEVICE_VARIABLE, OPTIONS_VARIABLE

CPU_WORKERS = 2


@dataclass(frozen=True)
class Script:
    """A script, and what it finds in its environment.

    Attributes:
        path: the script.
        arguments: its command line.
        device_type: torch's word for what the ranks compute on.
        variables: set where the user's environment does not have them.
        options: SMP's parameters; none leaves the environment's.
    """

    path: str
    arguments: Sequence[str]
    device_type: str
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None


def read_run_options(text: str) -> tuple[dict[str, Any], int | None, list[str]]:
    """Read SMP's parameters from JSON or a file of it.

    Returns:
        The bare parameters; `mpi.processes_per_host`, where it stands around them; what else does and has no effect.

    Raises:
        ConfigError: it is no JSON object, or a key is unknown, wrong or refused.
    """
    is_file = not text.lstrip().startswith("{")
    try:
        source = json.loads(Path(text).read_text(encoding="utf-8") if is_file else text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--smp-options={text!r} is neither a JSON object nor a file of one: {error}") from error
    if not isinstance(source, dict):
        raise ConfigError(f"--smp-options={text!r} holds a {type(source).__name__}, not a JSON object")
    translated = translate(source)
    notes: list[str] = []
    parameters = bare_parameters(source, notes)
    if "pipeline_parallel_degree" in parameters:  # transformers looks for the older name
        parameters.setdefault("partitions", parameters["pipeline_parallel_degree"])
    return parameters, translated.values.get("parallel.workers"), notes


def launch_script(script: Script, workers: int | None, is_joined: bool = True) -> None:
    """Run `script` on local workers, or as the rank that a launcher has made of this process.

    On several hosts each starts its own workers, which are joined unless `is_joined` is False: then each host runs the
    script by itself.

    Raises:
        ConfigError: there is no such script, or a launcher has decided on the number of workers.
        MachineError: it asks for CUDA, and there is no GPU.
        WorkerError: the script failed on a rank.
    """
    if not Path(script.path).is_file():
        raise ConfigError(f"{script.path!r} is not a file; give the path of a Python script")
    environment = detect()
    if environment is not None:
        if workers not in (None, environment.local_world_size):
            raise ConfigError(
                f"--workers={workers}: {environment.launcher} has started {environment.local_world_size} here; "
                "leave it out"
            )
        _execute(script, environment.local_world_size)
        return
    host = detect_host() if is_joined else None
    if host is not None:
        host.refuse_elastic("a script")
    gpus = accelerator.count(script.device_type)
    count = (None if host is None else host.processes) or workers or gpus or CPU_WORKERS
    if script.device_type == "cuda" and not gpus:
        raise MachineError("--device cuda: this host shows no GPU; use --device cpu")
    if 0 < gpus < count:
        raise ConfigError(
            f"--workers={count} needs as many GPUs, this host shows {gpus}: scripts take the GPU of their local rank; "
            f"use --workers={gpus} or less, or --device cpu"
        )
    run_local(_worker, (script, count), count, device_type=script.device_type, host=host)


def default_device() -> str:
    """Return what scripts run on unless they are told: they are written for CUDA."""
    return "cuda" if accelerator.available() == "cuda" else "cpu"


def _worker(script: Script, count: int) -> None:
    _execute(script, count)
    from shardwise.smp.v1.session import state

    state.leave()  # elastic keeps a worker that has returned until all have: who waits for this one learns it now


def _execute(script: Script, workers: int) -> None:
    """The script as `__main__`, in its own surroundings; what it raises is this rank's error."""
    _set_variables(script, workers)
    # A local worker is itself spawned and would hand that on: the script's data loaders would import the script anew,
    # in a process without the hook. Under launchers, and when such scripts were written, processes are forked.
    multiprocessing.set_start_method("fork", force=True)
    import_hook.install_import_hook()
    if script.device_type == "cpu":
        from shardwise.smp.doors.cpu_for_cuda import redirect

        redirect(workers, str(Path(script.path).resolve().parent))
        if os.environ.get("RANK", "0") == "0":
            print("note: --device cpu: what the script asks of CUDA is done on the CPU.", file=sys.stderr)
    from shardwise.smp.safe_reading import load_for_scripts

    torch.load = load_for_scripts(torch.load)

    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(Path(script.path).resolve().parent))
    try:
        runpy.run_path(script.path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            _end_processes()
            raise WorkerError(f"the script ended with exit code {end.code}") from end
    except BaseException as error:
        failure.report(error)  # before other ranks see this one leave and fail themselves
        _end_processes()
        raise


def _end_processes() -> None:
    """End what a failed script has forked. Its process pools wait for work, and this process, which was forked or
    spawned itself, would wait for them at its end: Python shuts pools down at the end of a main process alone."""
    for process in multiprocessing.active_children():
        process.terminate()


def _set_variables(script: Script, workers: int) -> None:
    base = os.path.join(os.getcwd(), "shardwise-run")
    defaults = {
        "SM_NUM_GPUS": str(workers),
        "SM_HOSTS": '["localhost"]',
        "SM_CURRENT_HOST": "localhost",
        "SM_MODEL_DIR": os.path.join(base, "model"),
        "SM_OUTPUT_DATA_DIR": os.path.join(base, "output"),
        "SM_CHANNEL_TRAIN": os.path.join(os.getcwd(), "data"),
        "SM_CHANNEL_TEST": os.path.join(os.getcwd(), "data"),
        "SM_MODULE_DIR": str(Path(script.path).resolve().parent),
    }
    os.environ.update(script.variables)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    channels = [name.removeprefix("SM_CHANNEL_").lower() for name in os.environ if name.startswith("SM_CHANNEL_")]
    os.environ.setdefault("SM_CHANNELS", json.dumps(channels))
    os.environ[DEVICE_VARIABLE] = script.device_type
    if script.options is not None:
        os.environ[OPTIONS_VARIABLE] = json.dumps(dict(script.options))
        framework = json.loads(os.environ.get("SM_FRAMEWORK_PARAMS") or "{}")
        os.environ["SM_FRAMEWORK_PARAMS"] = json.dumps({**framework, "sagemaker_mpi_enabled": True})
