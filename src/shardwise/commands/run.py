"""`shardwise run`: options and work, for the command line to register."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from shardwise.commands.arguments import whole_number
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.sagemaker.container import Container


def run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=whole_number, metavar="N", help="local workers; unset: all GPUs, or 2 on a CPU"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), metavar="cpu|cuda", help="unset: CUDA where there is any")
    parser.add_argument("--smp-options", metavar="JSON", help="SMP's parameters, or a file of them")
    parser.add_argument(
        "--channel", action="append", default=[], metavar="NAME=DIR", help="input directory: SM_CHANNEL_NAME"
    )
    parser.add_argument("--model-dir", metavar="DIR", help="SM_MODEL_DIR; unset: shardwise-run/model")
    parser.add_argument("--output-dir", metavar="DIR", help="SM_OUTPUT_DATA_DIR; unset: shardwise-run/output")
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="the script; left out in a container of SageMaker: its entry point"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def run_script(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.sagemaker.container import enter_container
    from shardwise.smp.options import OPTIONS_VARIABLE, options_of_arguments
    from shardwise.smp.script import Script, default_device, launch_script, read_run_options

    container = enter_container()
    if options.script is None:
        return _run_entry_point(container)
    variables = {"SM_MODEL_DIR": options.model_dir, "SM_OUTPUT_DATA_DIR": options.output_dir}
    for channel in options.channel:
        name, equals, directory = channel.partition("=")
        if not (name.isidentifier() and equals and directory):
            raise ConfigError(f"--channel={channel} must be NAME=DIR, e.g. --channel train=data/train")
        variables[f"SM_CHANNEL_{name.upper()}"] = directory
    parameters, processes = None, None
    if options.smp_options is not None:
        parameters, processes, notes = read_run_options(options.smp_options)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if parameters is None and OPTIONS_VARIABLE not in os.environ:
        parameters = options_of_arguments(options.arguments)
    device_type = options.device or default_device()
    given = {name: value for name, value in variables.items() if value is not None}
    launch_script(
        Script(options.script, options.arguments, device_type, given, parameters), options.workers or processes
    )
    return 0


def _run_entry_point(container: Container | None) -> int:
    """Run the script of a container of SageMaker that was started without words of its own.

    Raises:
        ConfigError: this is none, or its job names no script.
    """
    if container is None or not container.has_script:
        raise ConfigError("no SCRIPT is given, and this is no SageMaker container whose job names one; give its path")
    return run_in_container(container)


def run_in_container(container: Container) -> int:
    """Run the script or the command that the job of a container names, as the SDK's own containers start it.

    Raises:
        WorkerError: it failed.
    """
    from shardwise.smp.script import Script, default_device, launch_script

    if container.code.is_dir():
        os.chdir(container.code)
    container.install_requirements()
    if container.command is not None:
        container.run_command()
        return 0
    assert container.script is not None
    script = Script(str(container.script), container.arguments(), default_device())
    launch_script(script, None if container.is_distributed else 1, is_joined=container.is_distributed)
    return 0
