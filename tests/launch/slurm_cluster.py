"""A Slurm cluster on one machine: a login node with the controller, and compute nodes, each in a network namespace.

Every node has an address, a host name and a /etc/hosts of its own, and a slurmd that it knows by its name. Nothing is
read from the machine's own configuration of Slurm or munge. `SlurmCluster.tear_down` ends what was started here, by
process number, with what jobs have left in the namespaces.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import Cluster
from benchmarks.cluster import obstacle as namespace_obstacle

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
PROGRAMS = ("munged", "slurmctld", "slurmd", *CLIENTS)
LOGIN, PROCESSORS = "login", 4  # a node says that it has so many
SECONDS = 300  # for what takes a few on a quiet machine


def obstacle() -> str:
    """Return why there can be no cluster here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: Debian's packages slurm-wlm and munge are not installed"
    return namespace_obstacle()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin"


class SlurmCluster:
    """A login node and compute nodes `node1`, `node2` …

    Attributes:
        directory: files of the daemons, and of whoever uses the cluster.
        spaces: the network namespaces; number 0 is the login node's.
    """

    def __init__(self, directory: Path, nodes: int = 2) -> None:
        self.directory = directory
        self.spaces = Cluster(nodes + 1, name=f"sl{os.getpid() % 1_000_000:x}")
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.names = [LOGIN, *(f"node{index}" for index in range(1, nodes + 1))]

    def build(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        for name in ("state", "munge", "logs", "bin", "clients"):
            (self.directory / name).mkdir()
        self._write_files()
        self.spaces.build()
        self._start_munge()
        self.start_daemon(0, "slurmctld", "-D", "-c")
        for node in range(1, len(self.names)):
            self.start_node(node)
        wait_until(self._is_ready, "all nodes are idle")

    def _is_ready(self) -> bool:
        ended = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
        assert not ended, f"{', '.join(ended)} ended: {self.daemon_logs()}"
        return self.states() == {"idle"}

    def _write_files(self) -> None:
        hosts = "".join(f"{self.spaces.address(index)} {name}\n" for index, name in enumerate(self.names))
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (self.directory / "slurm.conf").write_text(self._configuration())
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        _write_program(self.directory / "bin" / "shardwise", f"exec {sys.executable} -m shardwise")
        for client in CLIENTS:
            words = shlex.join(self.inside(0, [client]))
            path = shlex.quote(self.variables()["PATH"])
            _write_program(self.directory / "clients" / client, f"PATH={path} exec {words}")

    def _configuration(self) -> str:
        nodes = "".join(
            f"NodeName={name} NodeAddr={self.spaces.address(index)} CPUs={PROCESSORS} State=UNKNOWN\n"
            for index, name in enumerate(self.names)
            if index
        )
        return f"""\
ClusterName=tests
SlurmctldHost={LOGIN}({self.spaces.address(0)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.directory}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={self.directory}/state
SlurmdSpoolDir={self.directory}/spool-%n
SlurmctldPidFile={self.directory}/slurmctld.pid
MailProg=/bin/true
SlurmdPidFile={self.directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=30
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""

    def _start_munge(self) -> None:
        place = self.directory / "munge"
        (place / "key").write_bytes(os.urandom(128))
        (place / "key").chmod(0o400)
        files = [f"--{each}-file={place}/{each}" for each in ("key", "pid", "log", "seed")]
        words = ["munged", "--foreground", "--force", f"--socket={place}/socket", *files]
        self.daemons["munged"] = self._popen(words, "munged")
        wait_until(lambda: (place / "socket").exists(), "munged listens")

    def start_node(self, node: int) -> None:
        """Start a compute node's daemon."""
        self.start_daemon(node, "slurmd", "-D", "-N", self.names[node])

    def start_daemon(self, node: int, *words: str) -> None:
        """Start a daemon in a node's namespace, under the node's host name."""
        name = f"{words[0]}-{self.names[node]}"
        self.daemons[name] = self._popen(self.inside(node, words), name)

    def inside(self, node: int, words: Sequence[str]) -> list[str]:
        """Return the words that run others on a node, where it has its host name and knows those of the others."""
        become = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        own = ["bash", "-c", become, "bash", str(self.directory / "hosts"), self.names[node], *words]
        return ["ip", "netns", "exec", self.spaces.namespace(node), "unshare", "--uts", *own]

    def _popen(self, words: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.directory / "logs" / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self.variables(), start_new_session=True
            )

    def variables(self) -> dict[str, str]:
        """Return the environment of a user of the cluster."""
        own = {
            "PATH": f"{self.directory}/bin:{_path()}",
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return inherited | own

    def run(self, *words: str) -> str:
        """Run a command on the login node; return what it printed."""
        ended = subprocess.run(
            self.inside(0, words), env=self.variables(), cwd=self.directory, capture_output=True, text=True, timeout=60
        )
        return ended.stdout + ended.stderr

    def states(self) -> set[str]:
        """Return the states of the compute nodes."""
        return set(self.run("sinfo", "--noheader", "--Node", "--format", "%t").split())

    def job(self, number: str) -> Mapping[str, str]:
        """Return what the controller says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, **fields: str) -> Mapping[str, str]:
        """Wait until the controller says these fields of a job; return all of them."""
        said: dict[str, str] = {}

        def holds() -> bool:
            said.update(self.job(number))
            return said | fields == said

        wait_until(holds, f"job {number} has {fields}", lambda: f"{said}{self.daemon_logs()}")
        return said

    def lose_node(self, node: int) -> None:
        """Kill a node's daemon and all that it has started, as a power cut would."""
        for process in self.processes(node):
            os.kill(process, signal.SIGKILL)
        self.daemons.pop(f"slurmd-{self.names[node]}").wait()

    def processes(self, node: int) -> list[int]:
        """Return the processes in a node's namespace."""
        listed = subprocess.run(["ip", "netns", "pids", self.spaces.namespace(node)], capture_output=True, text=True)
        return [int(number) for number in listed.stdout.split()]

    def daemon_logs(self) -> str:
        """Return the last lines of every daemon's log."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def tear_down(self) -> None:
        """End everything that runs on the nodes, then the nodes."""
        for node in range(len(self.names)):
            for process in self.processes(node):
                _kill(process)
        for daemon in self.daemons.values():
            _kill(daemon.pid)
            daemon.wait()
        self.spaces.tear_down()


def wait_until(holds: Callable[[], bool], what: str, why: Callable[[], str] = str) -> None:
    """Wait for what the cluster does by itself."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"after {SECONDS} s it is not so that {what}: {why()}"
        time.sleep(0.2)


def _write_program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
