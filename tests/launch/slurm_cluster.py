"""A Slurm cluster on one machine: a login node with the controller, and compute nodes, each in a network namespace.

Every node has an address, a host name and a /etc/hosts of its own, and a slurmd that it knows by its name. Nothing is
read from the machine's own configuration of Slurm or munge. `SlurmCluster.tear_down` ends what was started here, by
process number, with what jobs have left in the namespaces.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import obstacle as namespace_obstacle
from tests.launch.named_hosts import ROOT, NamedHosts, kill, wait_until, write_program

CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
PROGRAMS = ("munged", "slurmctld", "slurmd", *CLIENTS)
LOGIN, PROCESSORS = "login", 4  # a node says that it has so many


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
        hosts: the nodes; number 0 is the login node.
    """

    def __init__(self, directory: Path, nodes: int = 2) -> None:
        self.directory = directory
        self.names = [LOGIN, *(f"node{index}" for index in range(1, nodes + 1))]
        self.hosts = NamedHosts(directory, self.names)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def build(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        for name in ("state", "munge", "logs"):
            (self.directory / name).mkdir()
        self._write_files()
        self.hosts.build()
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
        (self.directory / "slurm.conf").write_text(self._configuration())
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        write_program(self.directory / "bin" / "shardwise", f"exec {sys.executable} -m shardwise")
        for client in CLIENTS:
            words = shlex.join(self.hosts.inside(0, [client]))
            path = shlex.quote(self.variables()["PATH"])
            write_program(self.directory / "clients" / client, f"PATH={path} exec {words}")

    def _configuration(self) -> str:
        nodes = "".join(
            f"NodeName={name} NodeAddr={self.hosts.spaces.address(index)} CPUs={PROCESSORS} State=UNKNOWN\n"
            for index, name in enumerate(self.names)
            if index
        )
        return f"""\
ClusterName=tests
SlurmctldHost={LOGIN}({self.hosts.spaces.address(0)})
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
        self.daemons[name] = self._popen(self.hosts.inside(node, words), name)

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
            self.hosts.inside(0, words),
            env=self.variables(),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
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
        for process in self.hosts.processes(node):
            kill(process)
        self.daemons.pop(f"slurmd-{self.names[node]}").wait()

    def daemon_logs(self) -> str:
        """Return the last lines of every daemon's log."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def tear_down(self) -> None:
        """End everything that runs on the nodes, then the nodes."""
        for daemon in self.daemons.values():
            kill(daemon.pid)
            daemon.wait()
        self.hosts.tear_down()
