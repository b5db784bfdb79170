"""`ssh`: hosts that are reached by ssh, without a scheduler.

Files go to the same directory of every host, below the home directory, which the hosts may share: a host's log and the
number of its process carry its place among the hosts. Where a host cannot be reached those that were started are
stopped again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from shardwise.errors import ConfigError, LaunchError
from shardwise.job.schema import Job
from shardwise.launch.client import HalfSubmittedError, require_client, run_client
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import JOB_FILE, LaunchTarget, job_text, script_exports
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.formulas.prediction import Cluster

SCRIPT = "run.sh"
REMOTE = "shardwise-jobs"  # below the home directory
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
AT_ONCE = 32  # hosts that are asked
HOST = re.compile(r"[A-Za-z0-9_.@:\[\]-]+")


class SshTarget(LaunchTarget):
    """Hosts that are reached by ssh."""

    name = "ssh"
    summary = "hosts that are reached by ssh"
    keys = ("hosts", "secrets", "setup", "port", "least_nodes")
    secret_form = re.compile(r"file:/\S+")
    secret_example = "file:/home/me/.token, a file of every host"

    def check(self, job: Job) -> None:
        """Refuse a job without hosts, and names that ssh would read as options."""
        super().check(job)
        hosts = job.launch.hosts
        if not hosts:
            raise ConfigError("launch.hosts is not set; ssh needs the hosts, e.g. --launch.hosts '[host1, host2]'")
        for host in hosts:
            if not HOST.fullmatch(host) or host.startswith("-"):
                raise ConfigError(f"launch.hosts: {host!r} is no name of a host; use e.g. me@host1")
        if len(set(hosts)) != len(hosts):
            raise ConfigError(f"launch.hosts={hosts}: a host is named twice; leave one out")

    def find_cluster(self, job: Job) -> Cluster:
        """Return the hosts: of the cluster's kind, as many as there are."""
        count = len(job.launch.hosts)
        given = cluster(job.launch.cluster) if job.launch.cluster is not None else None
        if given is None:
            if job.parallel.workers is None or job.parallel.workers % count:
                raise ConfigError(
                    f"launch.cluster is not set; say what the {count} host(s) of launch.hosts have, e.g. "
                    f"--launch.cluster h100:{8 * count}, or cpu:2 for a host's two processes"
                )
            given = cluster(f"cpu:{job.parallel.workers // count}")
        if given.nodes == 1:
            return replace(given, nodes=count)
        if given.nodes != count:
            raise ConfigError(
                f"launch.cluster={job.launch.cluster} has {given.nodes} nodes, and launch.hosts names {count}; name as "
                "many hosts"
            )
        return given

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Note restarts, which nobody does over several hosts."""
        if plan.max_restarts and plan.nodes > 1 and not plan.is_elastic:
            note = f"parallel.max_restarts={plan.max_restarts} is not used: nobody starts {plan.nodes} hosts again"
            plan = replace(plan, notes=(*plan.notes, note))
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, meeting point and place of the files."""
        yield DerivedValue("start", "shardwise train", "on every host, in the background, in the order of launch.hosts")
        rule = "the first of launch.hosts; launch.port" if plan.settings.port else "the first of launch.hosts"
        yield DerivedValue("rank 0", f"{_address(plan.settings.hosts[0])}:{plan.port}", rule)
        yield DerivedValue("files", f"~/{REMOTE}/{plan.name}", "of every host; the launch's name")

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job and the script of a host, whose argument is the host's place among the others."""
        setup = "".join(f"{line}\n" for line in plan.settings.setup)
        are_counted = plan.max_restarts and (plan.nodes == 1 or plan.is_elastic)
        restarts = f" --parallel.max_restarts {plan.max_restarts}" if are_counted else ""
        text = f"""#!/usr/bin/env bash
# {plan.name}: bash {SCRIPT} PLACE, from 0, on each of the hosts.
set -eo pipefail
{script_exports(plan)}
export PET_NNODES={_nodes(plan)} PET_NPROC_PER_NODE={plan.ranks_of_node} PET_NODE_RANK="$1"
export PET_MASTER_ADDR={_address(plan.settings.hosts[0])} PET_MASTER_PORT={plan.port}
shardwise_job=$PWD/{JOB_FILE}
{setup}exec shardwise train "$shardwise_job"{restarts}
"""
        return {SCRIPT: text, JOB_FILE: job_text(plan)}

    def record(self, plan: LaunchPlan) -> dict[str, object]:
        """Return the hosts."""
        return {"hosts": list(plan.settings.hosts)}

    def check_client(self, record: LaunchRecord) -> None:
        """Log in to every host, and refuse one that has a job of this name."""
        require_client("ssh")
        for host in record.details["hosts"]:
            there = _remote(host, ["sh", "-c", f"if [ -e {_directory(record)} ]; then echo there; fi"])
            if "there" in there.splitlines():  # beside what the host's own start-up files print
                raise LaunchError(
                    f"{host} has a directory ~/{_directory(record)} already, and nothing is overwritten; give another "
                    "launch.name"
                )

    def submit(self, record: LaunchRecord) -> str:
        """Copy the files to all hosts, then start them in their order; where one fails, take all of it back."""
        hosts, place = record.details["hosts"], _directory(record)
        reached: list[str] = []
        try:
            for host in hosts:
                reached.append(host)
                _remote(host, ["mkdir", "-p", place])
                for name in (SCRIPT, JOB_FILE):
                    text = (record.directory / name).read_text(encoding="utf-8")
                    _remote(host, ["sh", "-c", f"cat > {place}/{name}"], text)
            for index, host in enumerate(hosts):
                run = f"setsid bash {SCRIPT} {index} > {_log(index)} 2>&1 < /dev/null & {_note('$!', index)}"
                _remote(host, ["sh", "-c", f"cd {place} && ({run})"])
        except LaunchError as error:
            _take_back(reached, place, error)
            raise
        return f"{record.name} on {', '.join(hosts)}"

    def status(self, record: LaunchRecord) -> str:
        """Return of every host whether its process runs, or that it does not answer.

        Raises:
            LaunchError: no host answers.
        """
        check = "if {}; then echo running; else echo ended; fi"
        answers = _ask_all(record, lambda index: ["sh", "-c", check.format(_runs(_directory(record), index))])
        return "  ".join(f"{host}: {answer.strip()}" for host, answer in _with_silent(answers))

    def logs(self, record: LaunchRecord) -> str:
        """Return the logs, each line with its host; one line of a host that does not answer.

        Raises:
            LaunchError: no host answers.
        """
        answers = _ask_all(record, lambda index: ["cat", f"{_directory(record)}/{_log(index)}"])
        lines = [f"{host} | {line}\n" for host, text in _with_silent(answers) for line in text.splitlines()]
        return "".join(lines)

    def stop(self, record: LaunchRecord) -> None:
        """Send SIGTERM to every host's ranks, upon which all save their state.

        Raises:
            LaunchError: with the hosts that do not answer; the others were told.
        """
        answers = _ask_all(record, lambda index: ["sh", "-c", _stop(_directory(record), index)])
        silent = [f"{host} ({answer})" for host, answer in answers if isinstance(answer, LaunchError)]
        if silent:
            raise LaunchError(f"not stopped, since it does not answer: {', '.join(silent)}; the others were told to")


def _nodes(plan: LaunchPlan) -> str:
    """Return the hosts of a job as torchrun takes them: how many, or the fewest and the most."""
    return f"{plan.least_nodes}:{plan.nodes}" if plan.is_elastic else str(plan.nodes)


def _address(host: str) -> str:
    """Return a host without the user that ssh logs in as."""
    return host.rpartition("@")[2]


def _directory(record: LaunchRecord) -> str:
    return f"{REMOTE}/{record.name}"


def _remote(host: str, words: list[str], given: str | None = None) -> str:
    """Run words on a host; ssh hands them to a shell there, so they are quoted for it."""
    return run_client([*SSH, host, shlex.join(words)], given)


def _ask_all(record: LaunchRecord, words_of: Callable[[int], list[str]]) -> list[tuple[str, str | LaunchError]]:
    """Run the words for its place on every host, at once; return (host, what it printed or why it does not answer)."""

    def ask(index: int, host: str) -> str | LaunchError:
        try:
            return _remote(host, words_of(index))
        except LaunchError as error:
            return error

    hosts = record.details["hosts"]
    with ThreadPoolExecutor(min(len(hosts), AT_ONCE)) as pool:
        return list(zip(hosts, pool.map(ask, range(len(hosts)), hosts), strict=True))


def _with_silent(answers: Sequence[tuple[str, str | LaunchError]]) -> Iterator[tuple[str, str]]:
    """Yield (host, what it printed), with a line for those that do not answer; raise where none does."""
    errors = [answer for _, answer in answers if isinstance(answer, LaunchError)]
    if len(errors) == len(answers):
        raise errors[0]
    for host, answer in answers:
        yield host, f"does not answer ({answer})" if isinstance(answer, LaunchError) else answer


def _log(index: int) -> str:
    return f"log-{index}.txt"


def _process(index: int) -> str:
    return f"process-{index}.txt"


def _born(process: str) -> str:
    """Return a shell's words that print when a process began: its number may be another one's later."""
    return f"sed 's/.*) //' /proc/{process}/stat | cut -d' ' -f20"


def _note(process: str, index: int) -> str:
    """Return a shell's words that note a process that was just started."""
    return f'echo {process} "$({_born(process)})" > {_process(index)}'


def _runs(place: str, index: int) -> str:
    """Return a condition of a shell: the process that was noted in `place` is there; it is `$process` then."""
    same = f'[ -n "$born" ] && [ "$born" = "$({_born("$process")})" ]'
    return f"read -r process born < {place}/{_process(index)} && {same}"


def _stop(place: str, index: int) -> str:
    """Return a shell's words that send SIGTERM to the process that was noted in `place`, if it is there."""
    return f"if {_runs(place, index)}; then kill -TERM $process; fi"


def _take_back(hosts: list[str], place: str, reason: LaunchError) -> None:
    """Stop what was started, then remove what was copied. Raises HalfSubmittedError where a host does not answer."""
    files = f"{SCRIPT} {JOB_FILE} log-*.txt process-*.txt"
    remove = f"[ ! -d {place} ] || {{ cd {place} && rm -f {files}; cd; rmdir {place}; }}"
    stops = [_stop(place, index) for index in range(len(hosts))]
    for host, words in [*zip(hosts, stops, strict=True), *((host, remove) for host in hosts)]:
        try:
            _remote(host, ["sh", "-c", words])
        except LaunchError as error:
            said = f"{reason}; on {host} something may be left of it, since it does not answer ({error}); look there"
            raise HalfSubmittedError(said) from None
