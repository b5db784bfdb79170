"""`shardwise launch --to ssh --submit` and `shardwise jobs` through OpenSSH: an sshd on each host, keys of their own.

The hosts share a home directory, as those of a cluster do. Needs root and Debian's packages openssh-server and -client.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import obstacle as namespace_obstacle
from shardwise.errors import LaunchError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.launch import jobs
from shardwise.launch.client import HalfSubmittedError
from shardwise.launch.launcher import launch
from shardwise.launch.record import read_record
from tests.launch.named_hosts import ROOT, NamedHosts, kill, wait_until, write_program

MISSING = [program for program in ("sshd", "ssh", "ssh-keygen") if not shutil.which(program, path="/usr/sbin:/usr/bin")]
OBSTACLE = f"no {', '.join(MISSING)}: OpenSSH is not installed" if MISSING else namespace_obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE or "there can be hosts"),
    pytest.mark.timeout(1200),
]
PORT = 2222
SERVER = """\
Port {port}
HostKey {place}/host_key
AuthorizedKeysFile {place}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
"""
CLIENT = """\
Host *
  User root
  Port {port}
  IdentityFile {place}/user_key
  UserKnownHostsFile {place}/known_hosts
  StrictHostKeyChecking accept-new
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedHosts]:
    """A desk and two hosts with an sshd; the desk's ssh is the one on the PATH."""
    made = NamedHosts(tmp_path, ["desk", "host1", "host2"])
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)], check=True)
    for name, text in (("sshd_config", SERVER), ("ssh_config", CLIENT)):
        (tmp_path / name).write_text(text.format(port=PORT, place=tmp_path))
    for name in ("home", "run/sshd"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "passwd").write_text(_users(tmp_path / "home"))
    binds = {"/etc/passwd": tmp_path / "passwd", "/run": tmp_path / "run"}
    servers = []
    try:
        made.build()
        for host in (1, 2):
            words = made.inside(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(tmp_path / "sshd_config")], binds)
            log = (tmp_path / f"sshd-{host}.log").open("wb")
            servers.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            log.close()
        for host in (1, 2):
            said = tmp_path / f"sshd-{host}.log"
            wait_until(lambda said=said: "Server listening" in said.read_text(), "sshd listens", said.read_text)
        client = made.inside(0, ["/usr/bin/ssh", "-F", str(tmp_path / "ssh_config")])
        write_program(tmp_path / "clients" / "ssh", f"exec {shlex.join(client)}")
        monkeypatch.setenv("PATH", f"{tmp_path}/clients{os.pathsep}{os.environ['PATH']}")
        yield made
    finally:
        for server in servers:
            kill(server.pid)
            server.wait()
        made.tear_down()


def _users(home: Path) -> str:
    """Return the machine's users, root with another home."""
    lines = Path("/etc/passwd").read_text().splitlines()
    return "".join(f"root:x:0:0:root:{home}:/bin/bash\n" if line.startswith("root:") else f"{line}\n" for line in lines)


def job_of(directory: Path, name: str, program: str) -> Job:
    """Return a job of many steps on both hosts, a rank each."""
    write_program(directory / "bin" / "shardwise", program)
    (directory / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 300)
    setup = [f"export PATH={directory}/bin:$PATH PYTHONPATH={ROOT / 'src'} XDG_CACHE_HOME={directory}/cache"]
    setup.append(f"export SHARDWISE_ENGINE_DIRECTORY={os.environ['SHARDWISE_ENGINE_DIRECTORY']} OMP_NUM_THREADS=1")
    return load_job({
        "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}},
        "training": {"steps": 1_000_000, "sequences_per_step": 8, "evaluate_batches": 1},
        "data": {"path": str(directory / "corpus.txt"), "sequence_length": 16, "vocabulary_size": 300},
        "observe": {"tensorboard": False, "sample": False}, "checkpoint": {"every": 100_000},
        "parallel": {"workers": 2}, "output": str(directory / f"{name}-run"),
        "launch": {"name": name, "hosts": ["host1", "host2"], "setup": setup},
    }, environ={})  # fmt: skip


def test_hosts_train_together_are_seen_and_stop(hosts: NamedHosts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(job_of(tmp_path, "run", f"exec {sys.executable} -m shardwise"), "ssh", out, submit=True)
    assert jobs.job_status(out) == "host1: running  host2: running"
    wait_until(lambda: "host1 | step 3/" in jobs.job_logs(out), "it trains", lambda: jobs.job_logs(out))
    assert "2 cpu ranks" in jobs.job_logs(out)
    jobs.stop_job(out)
    wait_until(lambda: jobs.job_status(out) == "host1: ended  host2: ended", "it ends", lambda: jobs.job_logs(out))
    assert "SIGTERM received by rank" in jobs.job_logs(out)
    # The number of the process may be another one's by now.
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as other:
        (tmp_path / "home" / "shardwise-jobs" / "run" / "process-0.txt").write_text(f"{other.pid} 1")
        assert jobs.job_status(out) == "host1: ended  host2: ended"
        jobs.stop_job(out)
        assert other.poll() is None
        kill(other.pid)
    assert list((tmp_path / "run-run" / "checkpoints").glob("step*"))


def test_a_host_that_cannot_be_reached_is_named(hosts: NamedHosts, tmp_path: Path) -> None:
    out, waiting = tmp_path / "out", "exec sleep 600 #"
    launch(job_of(tmp_path, "run", waiting), "ssh", out, submit=True)
    hosts.spaces.cut(2)
    silent = r"does not answer \(.*exit code 255: .*host2.*(timed out|No route).*\)"
    assert re.fullmatch(rf"host1: running  host2: {silent}", jobs.job_status(out))
    assert re.search(rf"^host2 \| {silent}$", jobs.job_logs(out), re.MULTILINE)
    with pytest.raises(LaunchError, match=r"not stopped, since it does not answer: host2 .*the others were told to"):
        jobs.stop_job(out)
    wait_until(lambda: not _runs(hosts, 1, "sleep"), "the job of the host that answers has ended")
    with pytest.raises(LaunchError, match="host2") as raised:
        launch(job_of(tmp_path, "next", waiting), "ssh", tmp_path / "next", submit=True)
    assert not isinstance(raised.value, HalfSubmittedError) and read_record(tmp_path / "next").state == "written"
    assert not (tmp_path / "home" / "shardwise-jobs" / "next").exists()


def _runs(hosts: NamedHosts, host: int, program: str) -> bool:
    names = [Path(f"/proc/{process}/cmdline") for process in hosts.processes(host)]
    return any(program in name.read_text() for name in names if name.exists())
