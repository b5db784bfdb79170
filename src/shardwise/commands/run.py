"""`shardwise run`: options and work, for the command line to register."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.commands.arguments import whole_number
from shardwise.errors import ConfigError


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
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def run_script(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    import torch

    from shardwise.smp.script import Script, launch_script, read_run_options

    variables = {"SM_MODEL_DIR": options.model_dir, "SM_OUTPUT_DATA_DIR": options.output_dir}
    for channel in options.channel:
        name, equals, directory = channel.partition("=")
        if not (name.isidentifier() and equals and directory):
            raise ConfigError(f"--channel={channel} must be NAME=DIR, e.g. --channel train=data/train")
        variables[f"SM_CHANNEL_{name.upper()}"] = directory
    parameters, processes = (None, None) if options.smp_options is None else read_run_options(options.smp_options)
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: value for name, value in variables.items() if value is not None}
    launch_script(
        Script(options.script, options.arguments, device_type, given, parameters), options.workers or processes
    )
    return 0
