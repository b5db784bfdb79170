"""The meeting of the hosts of a job before their ranks start: one host that meets nobody, or hosts that are known.

Torch's own dynamic rendezvous unpickles what any peer writes into its store. Here a scheduler has said which hosts
there are, so nothing is agreed on: host 0 serves the store, the others come to it, and the ranks use it then.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardwise import errors
from shardwise.errors import MachineError, ShardwiseError, WorkerError
from shardwise.launch import loopback
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.reach import reach
from shardwise.launch.said_wait import SaidWait
from shardwise.launch.watch.hosts import HostExchange
from shardwise.words import listed

FAILURE_KEY = "shardwise/failure"
ARRIVED_KEY = "shardwise/arrived/{}"  # of a host
LOOK_SECONDS = 0.1
EARLY_SECONDS = 2.0  # that a host which has failed looks for host 0
LAST_LOOK_SECONDS = 1.0  # for which host 0 keeps the store after its failure, so that others read why


def rendezvous_of(host: HostEnvironment | None) -> RendezvousHandler:
    """Return how the agent of this host meets those of the others."""
    if host is None or host.hosts == 1:
        return LoopbackRendezvous(uuid.uuid4().hex)
    return HostRendezvous(host)


@contextmanager
def failure_told(host: HostEnvironment | None) -> Iterator[None]:
    """Tell the other hosts of a job why this one fails before it has met them; hosts that come and go do without it."""
    try:
        yield
    except ShardwiseError as error:
        if host is not None and host.hosts > 1 and host.least_hosts is None:
            HostRendezvous(host).tell_early_failure(error)
        raise


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

    of_absent_host: type[ShardwiseError] = MachineError

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
        """Meet the other hosts, all of them.

        Raises:
            MachineError: a host does not come in time, or the port of host 0 is taken.
            ShardwiseError: a host has failed; as that host ends with.
        """
        host, wait = self.host, SaidWait(self.host)
        self._store = store = self._meet(wait)
        store.set(ARRIVED_KEY.format(host.index), "")
        self._await_others(store, wait)
        address = RendezvousStoreInfo(host.master_address, host.master_port)
        return RendezvousInfo(dist.PrefixStore("hosts", store), host.index, host.hosts, address)

    def _await_others(self, store: dist.Store, wait: SaidWait) -> None:
        while missing := self._missing(store):
            self.raise_others_failure()
            whom = f"host{'s' * (len(missing) > 1)} {listed(map(str, missing))} of {self.host.hosts}"
            if wait.left <= 0:
                error = self.of_absent_host(
                    f"{whom} did not come to {self.host.master_address}:{self.host.master_port} within "
                    f"{self.host.join_seconds:.0f} s of host {self.host.index}; see what ended there, or wait longer "
                    "with PET_RDZV_CONF=join_timeout=SECONDS"
                )
                self.tell_failure(error)
                raise error
            wait.say(whom)
            time.sleep(LOOK_SECONDS)

    def _missing(self, store: dist.Store) -> list[int]:
        """Return the hosts that have not come."""
        keys = {host: ARRIVED_KEY.format(host) for host in range(self.host.hosts)}
        try:
            return [] if store.check([*keys.values()]) else [host for host in keys if not store.check([keys[host]])]
        except dist.DistError as error:
            raise self._host_0_is_gone() from error

    def tell_early_failure(self, error: ShardwiseError) -> None:
        """Tell the hosts that wait already, where this one fails before it has met them. Those that come later wait."""
        host = self.host
        with suppress(MachineError):
            if host.index == 0 or reach(host.master_address, host.master_port, EARLY_SECONDS) is None:
                self._store = self._meet(SaidWait(host))
                self.tell_failure(error)

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
            raise self._host_0_is_gone() from error
        if text:
            raise _error_of(json.loads(text))

    def _host_0_is_gone(self) -> WorkerError:
        return WorkerError(f"host 0 ({self.host.master_address}) is gone: its store does not answer")

    def _meet(self, wait: SaidWait) -> dist.Store:
        host, timeout = self.host, timedelta(seconds=self.host.join_seconds)
        if host.index:
            where = f"host 0 at {host.master_address}:{host.master_port}"
            obstacle = reach(host.master_address, host.master_port, host.join_seconds, lambda: wait.say(where))
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
