"""`shardwise launch`: options and work, for the command line to register."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.words import output_console, say_note

if TYPE_CHECKING:
    from shardwise.job.schema import Job


def launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; left out: the embedded default")
    parser.add_argument("--to", metavar="TARGET", help="where to")
    parser.add_argument("--output", metavar="DIR", help="directory of the files; unset: NAME-TARGET here")
    parser.add_argument("--print-plan", action="store_true", help="show what would be started and why, and stop")
    parser.add_argument("--submit", action="store_true", help="hand the files to the target's own client")


def launch_job(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Write the files that start a job, and submit them if asked to. Raises ShardwiseError for a user's mistake."""
    from shardwise.job.sources import read_job
    from shardwise.launch.launch_plan import name_of
    from shardwise.launch.launcher import BY_NAME

    if options.to is None:
        raise ConfigError(f"--to is not given; it says where to: {', '.join(BY_NAME)}")
    if options.print_plan and (options.submit or options.output):
        raise ConfigError("--print-plan writes and submits nothing; leave --output and --submit out")
    job, notes = read_job(options.job, keys)
    name = name_of(options.job)
    output = None if options.output is None else Path(options.output)
    show_launch(job, options.to, name, notes)
    return 0 if options.print_plan else write_launch(job, options.to, output, options.submit, name)


def show_launch(job: Job, target: str, default_name: str, notes: Sequence[str] = ()) -> None:
    """Print what would be started where, with the rule behind each value, then notes."""
    from shardwise.launch.launcher import plan_for_target
    from shardwise.plan.table import RuleTable

    plan = plan_for_target(job, target, default_name)
    output_console().print(RuleTable(f"Launch {plan.name}", plan.derived))
    for note in (*notes, *plan.notes):
        say_note(note)


def write_launch(job: Job, target: str, output: Path | None, submit: bool, default_name: str) -> int:
    """Write the files that start a job, name them, and submit them if asked to; returns the exit code."""
    from shardwise.launch.launcher import launch

    launched = launch(job, target, output, submit, default_name)
    directory = Path(os.path.relpath(launched.directory))
    for file in launched.files:
        print(directory / file)
    if launched.identifier:
        print(f"submitted as {launched.identifier}; see `shardwise jobs status {directory}`")
    return 0


def jobs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("list", "status", "logs", "stop"),
        metavar="list|status|logs|stop",
        help="list the launches of a directory with their states; show one's state or what its ranks print; stop it",
    )
    parser.add_argument("path", nargs="?", default=".", metavar="DIR", help="what `shardwise launch` wrote")


def manage_jobs(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Ask the target's client about a launched job, or stop it. Raises ShardwiseError for a user's mistake."""
    from shardwise.launch import jobs

    path = Path(options.path).expanduser()
    if options.action == "list":
        output_console().print(jobs.launch_table(path))
    elif options.action == "status":
        print(jobs.job_status(path))
    elif options.action == "logs":
        print(jobs.job_logs(path), end="")
    else:
        print(jobs.stop_job(path))
    return 0
