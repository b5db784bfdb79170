"""`shardwise bench` and `shardwise build`: the native engine's options and work, for the command line to register."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.errors import MachineError
from shardwise.words import say_note


def bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("collectives",), metavar="collectives", help="the native engine beside Gloo on this host"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too")


def run_bench(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.commands.bench import run_collectives

    return run_collectives(options.json, say=say_note)


def build_options(parser: argparse.ArgumentParser) -> None:
    pass


def run_build(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.collectives import engine

    path = engine.build(say_note)
    problem = engine.obstacle()
    if problem:
        raise MachineError(f"the native engine is built ({path}) but cannot be used: {problem}")
    print(f"the native engine is ready: {path}")
    return 0
