"""The meeting of the hosts of a job before their ranks start: one host that meets nobody, or hosts that are known.

Torch's own dynamic rendezvous unpickles what any peer writes into its store. Here a scheduler has said which hosts
there are, so nothing is agreed on: host 0 serves the store, the others come to it, and the ranks use it then.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardwise import errors
from shardwise.errors import MachineError, ShardwiseError, WorkerError
from shardwise.launch import loopback
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.reach import reach
from shardwise.launch.watch.hosts import HostExchange

MEETING_SECONDS = 15 * 60  # a scheduler may start hosts and their names minutes apart
FAILURE_KEY = "shardwise/failure"
LAST_LOOK_SECONDS = 1.0  # for which host 0 keeps the store after its failure, so that others read why


def rendezvous_of(host: HostEnvironment | None) -> RendezvousHandler:
    """Return how the agent of this host meets those of the others."""
    if host is None or host.hosts == 1:
        return LoopbackRendezvous(uuid.uuid4().hex)
    return HostRendezvous(host)


def exchange_of(rendezvous: RendezvousHandler) -> HostExchange | None:
    """Return how watchers of several hosts exchange where their ranks are; None on one host."""
    if not isinstance(rendezvous, HostRendezvous):
        return None
    return HostExchange(lambda: rendezvous.store, rendezvous.host.index, rendezvous.host.hosts)


class KnownRendezvous(RendezvousHandler):
    """A rendezvous of hosts that are known and stay."""

    _store: dist.Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


class LoopbackRendezvous(KnownRendezvous):
    """One host that meets nobody: a store on the loopback interface, which the workers then use as theirs."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "shardwise-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = store = loopback.serve_store()
        address = RendezvousStoreInfo(loopback.ADDRESS, store.port)
        return RendezvousInfo(dist.PrefixStore(self._run_id, store), 0, 1, address)


class HostRendezvous(KnownRendezvous):
    """Several hosts: host 0 serves a store at the address that the scheduler gave, the others come to it."""

    def __init__(self, host: HostEnvironment) -> None:
        self.host = host

    @property
    def store(self) -> dist.Store | None:
        """The store of the launchers; None while the hosts have not met."""
        return self._store

    def get_backend(self) -> str:
        return "shardwise-hosts"

    def get_run_id(self) -> str:
        return "shardwise"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts.

        Raises:
            MachineError: host 0 does not come in time, or its port is taken.
        """
        host = self.host
        self._store = store = self._meet()
        address = RendezvousStoreInfo(host.master_address, host.master_port)
        return RendezvousInfo(dist.PrefixStore("hosts", store), host.index, host.hosts, address)

    def tell_failure(self, error: ShardwiseError) -> None:
        """Tell the other hosts that this one has failed, and why; the first to say so is heard."""
        if self._store is None:
            return
        text = json.dumps(
            {"kind": type(error).__name__, "message": str(error), "code": error.exit_code, "host": self.host.index}
        )
        try:
            self._store.compare_set(FAILURE_KEY, "", text)
        except dist.DistError:
            return  # host 0 is gone, and with it whoever would listen
        if self.host.index == 0:
            time.sleep(LAST_LOOK_SECONDS)

    def raise_others_failure(self) -> None:
        """Raise the error of another host that has failed.

        Raises:
            ShardwiseError: as that host ends with.
        """
        if self._store is None:
            return
        try:
            text = self._store.get(FAILURE_KEY) if self._store.check([FAILURE_KEY]) else b""
        except dist.DistError as error:
            raise WorkerError(f"host 0 ({self.host.master_address}) is gone: its store does not answer") from error
        if text:
            raise _error_of(json.loads(text))

    def _meet(self) -> dist.Store:
        host, timeout = self.host, timedelta(seconds=MEETING_SECONDS)
        if host.index:
            obstacle = reach(host.master_address, host.master_port, MEETING_SECONDS)
            if obstacle is not None:
                raise self._cannot_meet(obstacle)
        try:
            return dist.TCPStore(
                host.master_address,
                host.master_port,
                is_master=host.index == 0,
                wait_for_workers=False,
                timeout=timeout,
            )
        except (dist.DistError, RuntimeError) as error:
            raise self._cannot_meet((str(error).strip().splitlines() or [type(error).__name__])[0]) from error

    def _cannot_meet(self, why: str) -> MachineError:
        host = self.host
        return MachineError(
            f"host {host.index} of {host.hosts} could not meet host 0 at {host.master_address}:{host.master_port} "
            f"(from {host.launcher}): {why.rstrip('.')}; check that host 0 runs, that the port is free, and that hosts "
            "reach each other"
        )


def _error_of(said: dict[str, str]) -> ShardwiseError:
    """Return the error of another host."""
    return error_named(said["kind"], f"host {said['host']} failed: {said['message']}", int(said["code"]))


def error_named(name: str, message: str, exit_code: int) -> ShardwiseError:
    """Return an error that another process had; of the same class where it is one of ours."""
    kind = getattr(errors, name, WorkerError)
    if not (isinstance(kind, type) and issubclass(kind, ShardwiseError)):
        kind = WorkerError
    error: ShardwiseError = kind(message)
    error.exit_code = exit_code
    return error
