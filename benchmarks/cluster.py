"""Four hosts on one machine: network namespaces joined by a bridge, every link limited to 1 Gbit/s.

    python -m benchmarks.cluster --json result.json          # the collectives' table, as root

`Cluster` builds the namespaces and takes them down whatever happens; its names carry the process's number, so that
several may live side by side. Each namespace holds two ranks by default. The limit is a token bucket (`tc tbf`) at both
ends of each link, so sending and receiving are limited alike. Their TCP uses CUBIC, Linux's default, whatever the
machine's own is set to: BBR, for one, paces by estimates and leaves 3 to 10 % more of such a link idle. Needs root and
iproute2.

A row is the median of rounds in which the engine and Gloo take turns on the same ranks; the slowest rank's time counts.
The link limit is what has to go through one host's link, at 1 Gbit/s with nothing off for headers: (H-1)/H of the full
buffer for all-gather and reduce-scatter, twice that for all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import MachineError, cleaning_up_when_terminated, do
from benchmarks.record import header, write_json

HOSTS, LOCAL_RANKS = 4, 2
RATE = 1_000_000_000  # bit/s of each link
CONGESTION = "cubic"  # how TCP finds its rate
PREFIX = "10.77.0"  # of the hosts' addresses
PORT = 29_500  # of rank 0's host, which is a namespace of its own
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
BYTES = 16 << 20
ROUNDS = 7


class ClusterError(MachineError):
    """Namespaces cannot be made here, or a rank in one failed."""


def obstacle() -> str:
    """Why there can be no cluster here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"iproute2 is not installed: no {' and no '.join(missing)}" if missing else ""


@dataclass
class Cluster:
    """`hosts` namespaces on a bridge; use it as `with cluster(...) as it`."""

    hosts: int
    congestion: str = CONGESTION  # one of net.ipv4.tcp_available_congestion_control
    name: str = field(default_factory=lambda: f"sw{os.getpid() % 1_000_000:x}")
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        return f"{PREFIX}.{host + 1}"

    def link(self, host: int) -> str:
        """The bridge's end of a host's link; the host's own is `eth0`."""
        return f"{self.name}v{host}"

    def build(self, rate: int = RATE) -> None:
        do("ip", "link", "add", self.name, "type", "bridge")
        do("ip", "link", "set", self.name, "up")
        for host in range(self.hosts):
            space, link = self.namespace(host), self.link(host)
            do("ip", "netns", "add", space)
            do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            do("ip", "link", "set", link, "master", self.name, "up")
            for words in (("addr", "add", f"{self.address(host)}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                do("ip", "-n", space, *words)
            do("ip", "-n", space, "link", "set", "lo", "up")
            do("ip", "-n", space, "route", "change", f"{PREFIX}.0/24", "dev", "eth0", "congctl", self.congestion)
            self.limit(host, rate)

    def limit(self, host: int, rate: int) -> None:
        """Limit a host's link to `rate` bit/s, in both directions."""
        bucket = ("root", "tbf", "rate", str(rate), "burst", "80kb", "limit", "4mb")
        do("tc", "qdisc", "replace", "dev", self.link(host), *bucket)
        do("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", *bucket)

    def cut(self, host: int) -> None:
        """Take a host's link away, silently: what is sent goes nowhere."""
        do("ip", "link", "set", self.link(host), "nomaster")

    def start(self, host: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Run a command on a host; its output is kept for whoever waits for it."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_ranks(
        self, command: Sequence[str], environment: dict[str, str], local_ranks: int = LOCAL_RANKS
    ) -> list[subprocess.Popen[str]]:
        """One process a rank, with torchrun's variables; ranks of a host follow each other."""
        size = self.hosts * local_ranks
        shared = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": local_ranks,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        ranks = []
        for rank in range(size):
            own = shared | {"RANK": rank, "LOCAL_RANK": rank % local_ranks}
            words = {key: str(value) for key, value in own.items()} | environment
            ranks.append(self.start(rank // local_ranks, command, words))
        return ranks

    def tear_down(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for host in range(self.hosts):
            _try("ip", "netns", "del", self.namespace(host))
            _try("ip", "link", "del", self.link(host))
        _try("ip", "link", "del", self.name)


@contextmanager
def cluster(hosts: int = HOSTS, rate: int = RATE, congestion: str = CONGESTION) -> Iterator[Cluster]:
    """A built cluster, taken down at the end, SIGTERM's too; from the main thread.

    Raises:
        ClusterError: it cannot be built here.
    """
    problem = obstacle()
    if problem:
        raise ClusterError(problem)
    made = Cluster(hosts, congestion)
    with cleaning_up_when_terminated():
        try:
            made.build(rate)
            yield made
        finally:
            made.tear_down()


def _try(*words: str) -> None:
    subprocess.run(words, capture_output=True)


def outputs(ranks: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    """What the ranks printed, once all have ended well.

    Raises:
        ClusterError: one failed; its output is in the message.
    """
    until = time.monotonic() + timeout
    texts = [process.communicate(timeout=max(1.0, until - time.monotonic()))[0] for process in ranks]
    for rank, (process, text) in enumerate(zip(ranks, texts, strict=True)):
        if process.returncode != 0:
            raise ClusterError(f"rank {rank} ended with {process.returncode}:\n{text}")
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of a row (default {ROUNDS})")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        return _rank(options.rounds)
    problem = obstacle()
    if problem:
        print(f"no cluster here: {problem}")
        return 2
    from shardwise.collectives import engine

    engine.build()
    rows = measure(options.rounds)
    for row in rows:
        print(
            f"{row['operation']:<15} {row['bytes'] >> 20} MiB  engine {row['seconds']['shardwise'] * 1e3:7.1f} ms"
            f"  Gloo {row['seconds']['gloo'] * 1e3:7.1f} ms  {row['ratio_to_gloo']:.2f} x"
            f"  {row['share_of_link_limit']:.3f} of the link"
        )
    if options.json:
        write_json(options.json, header(("torch", "shardwise")) | {"rows": rows})
    return 0


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The table's rows."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.cluster", "--rank", "--rounds", str(rounds)]
    with cluster() as made:
        ranks = made.start_ranks(command, {"PYTHONPATH": path})
        texts = outputs(ranks, timeout=300)
    times = json.loads(texts[0].splitlines()[-1])
    return [_row(operation, times[operation]) for operation in OPERATIONS]


def _row(operation: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    seconds = {name: statistics.median(each[name] for each in rounds) for name in ("shardwise", "gloo")}
    through_link = BYTES * (HOSTS - 1) / HOSTS * (2 if operation == "all_reduce" else 1)
    return {
        "operation": operation,
        "bytes": BYTES,
        "congestion": CONGESTION,
        "hosts": HOSTS,
        "ranks": HOSTS * LOCAL_RANKS,
        "seconds": seconds,
        "ratio_to_gloo": statistics.median(each["gloo"] / each["shardwise"] for each in rounds),
        "share_of_link_limit": through_link * 8 / RATE / seconds["shardwise"],
    }


# --- on each rank


def _rank(rounds: int) -> int:
    import torch
    import torch.distributed as dist

    from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
    from shardwise.collectives import registration

    registration.register()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    groups = {"shardwise": dist.new_group(backend="shardwise"), "gloo": dist.new_group(backend="gloo")}
    whole, part = torch.ones(BYTES // 4), torch.ones(BYTES // 4 // size)
    run = {
        "all_gather": lambda group: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda group: reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
    }
    times: dict[str, list[dict[str, float]]] = {}
    for operation in OPERATIONS:
        whole.fill_(1e-3), part.fill_(1e-3)
        for group in groups.values():
            run[operation](group)
        times[operation] = [timed_round(run[operation], groups, groups["gloo"]) for _ in range(rounds)]
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()
    return 0


def timed_round(run: Callable[[Any], object], contenders: Mapping[str, Any], control: Any) -> dict[str, float]:
    """Seconds of the slowest rank for `run` of each contender in turn; the ranks meet in the group `control`."""
    import torch
    import torch.distributed as dist

    seconds = {}
    for name, contender in contenders.items():
        dist.barrier(control)
        began = time.perf_counter()
        run(contender)
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=control)
        seconds[name] = spent.item()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
