"""The meeting of hosts in one process: the store that they share, what a failed host says, and meetings that fail."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from shardwise.errors import DataError, MachineError, ShardwiseError, WorkerError
from shardwise.launch import rendezvous
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.rendezvous import HostRendezvous, LoopbackRendezvous, failure_told, rendezvous_of


def host(index: int, port: int, hosts: int = 2, join_seconds: float = 60.0) -> HostEnvironment:
    return HostEnvironment(index, hosts, 1, "127.0.0.1", port, "a test", join_seconds=join_seconds)


def all_at_once(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Return what calls of several hosts, which wait for one another, have come to."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [threads.submit(call) for call in calls]


def meet(hosts: list[HostRendezvous]) -> list[RendezvousInfo]:
    return [met.result() for met in all_at_once(*(handler.next_rendezvous for handler in hosts))]


@pytest.fixture
def port() -> int:
    """A port that is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def hosts(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostRendezvous]]:
    """Two hosts that have not met yet."""
    monkeypatch.setattr(rendezvous, "LAST_LOOK_SECONDS", 0.0)
    made = [HostRendezvous(host(index, port)) for index in range(2)]
    yield made
    for handler in reversed(made):
        assert handler.shutdown()


def test_one_host_meets_nobody(port: int) -> None:
    alone = rendezvous_of(None)
    assert isinstance(alone, LoopbackRendezvous) and isinstance(rendezvous_of(host(0, port, hosts=1)), type(alone))
    met = alone.next_rendezvous()
    assert (met.rank, met.world_size, met.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    met.store.set("key", "value")
    assert met.store.get("key") == b"value"
    assert alone.get_run_id() != rendezvous_of(None).get_run_id()
    assert alone.use_agent_store and not alone.is_closed() and alone.num_nodes_waiting() == 0
    assert alone.shutdown()


def test_hosts_meet_at_host_0(hosts: list[HostRendezvous], port: int) -> None:
    assert isinstance(rendezvous_of(host(1, port)), HostRendezvous)
    first, second = meet(hosts)
    assert [(met.rank, met.world_size) for met in (first, second)] == [(0, 2), (1, 2)]
    assert second.bootstrap_store_info.master_port == port
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert len({handler.get_run_id() for handler in hosts}) == len({handler.get_backend() for handler in hosts}) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(DataError("no corpus"), DataError), (WorkerError("died"), WorkerError)]
)  # fmt: skip
def test_the_first_failure_is_heard_on_all_hosts(
    hosts: list[HostRendezvous], error: ShardwiseError, kind: type[ShardwiseError]
) -> None:
    meet(hosts)
    hosts[0].raise_others_failure()  # nobody has failed
    error.exit_code = 77
    hosts[1].tell_failure(error)
    hosts[0].tell_failure(MachineError("a consequence"))
    for handler in hosts:
        with pytest.raises(kind, match=f"host 1 failed: {error}") as caught:
            handler.raise_others_failure()
        assert caught.value.exit_code == 77


def test_a_host_that_has_met_nobody_says_and_hears_nothing(hosts: list[HostRendezvous]) -> None:
    hosts[0].tell_failure(WorkerError("died"))
    hosts[0].raise_others_failure()
    meet(hosts)
    hosts[1].raise_others_failure()


def test_host_0_may_be_gone(hosts: list[HostRendezvous]) -> None:
    meet(hosts)
    hosts[0].shutdown()
    hosts[1].tell_failure(WorkerError("died"))  # nobody is left who would listen
    with pytest.raises(WorkerError, match=r"host 0 \(127\.0\.0\.1\) is gone: its store does not answer"):
        hosts[1].raise_others_failure()


def test_hosts_say_for_whom_they_wait_and_for_how_long(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Host 2 of three never comes."""
    made = [HostRendezvous(host(index, port, hosts=3, join_seconds=1.0 + index)) for index in range(2)]
    for waited in all_at_once(*(handler.next_rendezvous for handler in made)):
        with pytest.raises(MachineError, match=r"host 2 of 3 did not come to 127\.0\.0\.1:\d+ within 1 s of host 0"):
            waited.result()
    said = r"note: host 0 waits for hosts? (1, )?2 of 3: since 0 s, for 1 s more at most \(PET_RDZV_CONF=join_timeout"
    assert re.search(said, capfd.readouterr().err)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_host_that_fails_before_the_meeting_is_heard(port: int, failed: int) -> None:
    error = DataError("its disk is full")
    waiting = HostRendezvous(host(1 - failed, port))

    def fail() -> None:
        with failure_told(host(failed, port)):
            raise error

    waited, told = all_at_once(waiting.next_rendezvous, fail)
    assert told.exception() is error
    with pytest.raises(DataError, match=f"host {failed} failed: its disk is full"):
        waited.result()


def test_hosts_that_do_not_meet_say_where_they_tried(port: int) -> None:
    with pytest.raises(MachineError, match=f"host 1 of 2 could not meet host 0 at 127.0.0.1:{port} .from a test.:"):
        HostRendezvous(host(1, port, join_seconds=0.1)).next_rendezvous()
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(MachineError, match=r"host 0 of 2 could not meet .*check that host 0 runs") as caught:
            HostRendezvous(host(0, port)).next_rendezvous()
    assert "address already in use" in str(caught.value) and "\n" not in str(caught.value)
