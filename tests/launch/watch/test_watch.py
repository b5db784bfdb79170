"""Ranks that hang are named with their place, whatever they do, and healthy ones are not."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardwise.collectives.names import CollectiveName
from shardwise.collectives.rank_record import UNITS, IssuedCollective, RankRecord, RecordedPlace, WorkUnit
from shardwise.launch.watch import flight_recorder
from shardwise.launch.watch.announced import announced_ranks
from shardwise.launch.watch.flight_recorder import PendingCollective, issued_name, pending_collective
from shardwise.launch.watch.hosts import HostExchange
from shardwise.launch.watch.position import RankPosition
from shardwise.launch.watch.process import DISK, GONE, STOPPED, SWAPPED, ProcessSample, state_between
from shardwise.launch.watch.sentence import describe_positions
from shardwise.launch.watch.stack import collective_of, parse_stacks, telling_frame, telling_stack
from shardwise.launch.watch.watcher import Watcher, WatchSettings
from tests.fork_server import started

HERE = Path(__file__).parent
WAITS = RankPosition(0, "", 7, "", "forward", "all_gather of layers.7 over shard", "", 94.2)
SAVES = RankPosition(0, "", 7, "", "checkpoint.save", "", "shardwise/checkpoint/writing.py:88 in write", 95.0)


def test_a_stopped_and_a_reading_rank_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    watcher = Watcher(WatchSettings(seconds=0.01), lambda: tmp_path, say=said.append)
    with ExitStack() as stack:
        for rank, how in enumerate(("waits", "waits", "stops", "reads")):
            stack.enter_context(started(HERE / "rank_at.py", tmp_path, rank, how))
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("*.ready"))) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        watcher.look()
        watcher.look()  # says nothing again so soon
        assert [rank.rank for rank in announced_ranks(tmp_path)] == [0, 1, 2, 3]
    (sentence,) = said
    assert re.search(r"^step 4 has taken \d+ s, the median is \S+ s: ", sentence)
    assert "rank 2 is stopped (SIGSTOP or a debugger) in forward since" in sentence
    assert re.search(r"rank 3 is in data \(rank_at.py:\d+ in read_slowly\) since", sentence)
    assert re.search(r"the others wait in all_gather of layers.7 over shard since \d+ s$", sentence)


def test_the_collective_of_a_gpu_is_named() -> None:
    """The entries are as torch's documentation of the flight recorder shows them."""
    entry = {
        "record_id": 0, "pg_id": 1, "process_group": ["3", "shard"], "collective_seq_id": 41, "p2p_seq_id": 0,
        "op_id": 41, "profiling_name": "nccl:_all_gather_base", "time_created_ns": 1000, "state": "completed",
        "time_discovered_started_ns": None, "time_discovered_completed_ns": 2000, "retired": True, "is_p2p": False,
    }  # fmt: skip
    waiting = {**entry, "record_id": 1, "collective_seq_id": 42, "time_created_ns": 3050, "state": "scheduled"}
    later = {**waiting, "record_id": 2, "collective_seq_id": 43, "time_created_ns": 4050}
    dump = {"version": "2.10", "entries": [later, entry, waiting]}
    pending = pending_collective(dump)
    assert pending == PendingCollective("all_gather_base", "shard", 42, 3050)
    issued = [
        IssuedCollective("all_gather of layers.6 over shard", "shard", 900, 1100),
        IssuedCollective("all_gather of layers.7 over shard", "shard", 3000, 3100),
        IssuedCollective("all_gather of layers.8 over shard", "shard", 4000, 4100),
    ]
    assert issued_name(pending, issued) == "all_gather of layers.7 over shard"
    assert issued_name(pending, issued[:1]) == "all_gather_base 42 of the group shard"
    assert pending_collective({"entries": [entry]}) is None


def test_a_rank_answers_with_the_collective_its_gpu_waits_in(tmp_path: Path) -> None:
    """A question that torch's record does not suit has no answer; the thread ends with the run's directory."""
    pipe, answer, record = tmp_path / "pipe", tmp_path / "run" / "answer", RankRecord(0)
    answer.parent.mkdir()
    entry = {
        "record_id": 0, "process_group": ["3", "shard"], "collective_seq_id": 41, "state": "started",
        "profiling_name": "nccl:_all_gather_base", "time_created_ns": 1000,
    }  # fmt: skip
    assert not flight_recorder.ask(pipe)  # there is no pipe yet
    dumps = [{"entries": [entry]}, {"entries": [{}]}, {}, {}]
    with mock.patch.object(flight_recorder, "flight_record", side_effect=dumps):
        flight_recorder.answer_questions(pipe, answer, record)
        assert ask_until(pipe, answer) == {"collective": "all_gather_base 41 of the group shard", "created": 1000}
        assert ask_until(pipe, answer) == {"collective": "", "created": 0}  # the second is passed over
        shutil.rmtree(answer.parent)
        end = time.monotonic() + 20
        while any(thread.name == "shardwise-flight" for thread in threading.enumerate()) and time.monotonic() < end:
            flight_recorder.ask(pipe)
            time.sleep(0.02)
    assert not any(thread.name == "shardwise-flight" for thread in threading.enumerate())


def ask_until(pipe: Path, answer: Path) -> dict[str, Any]:
    """Ask until there is an answer, and take it away."""
    end = time.monotonic() + 20
    while not answer.exists() and time.monotonic() < end:
        flight_recorder.ask(pipe)
        time.sleep(0.05)
    told: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return told


def test_a_collective_inside_of_another_ends_before_it() -> None:
    record = RankRecord(0)
    record.keep_issued()
    outer, inner = (CollectiveName(unit, "shard", "all_gather") for unit in ("layers.0", "layers.1"))
    record.enter(0, outer, None)
    record.enter(0, inner, outer)
    record.leave(0, outer)
    within, ended = record.issued()
    assert within.name == str(outer) and within.entered < ended.entered < ended.left < within.left  # it is still in it
    record.leave(0, None)
    left = record.issued()[0].left
    assert ended.left < left == record.issued()[0].left


def test_host_0_hears_of_the_ranks_of_all_hosts() -> None:
    store = dist.HashStore()
    hosts = [HostExchange(lambda: store, index, 3) for index in range(3)]
    assert [host.pending() for host in hosts] == [0, 0, 0]
    hosts[1].request()
    for index, host in enumerate(hosts[:2]):
        host.answer(host.pending(), [replace(WAITS, rank=1 - index, host=f"node{index}")])
    with mock.patch("shardwise.launch.watch.hosts.ANSWER_SECONDS", 0.2):
        positions, missing = hosts[0].collect(1)
    assert [(position.rank, position.host) for position in positions] == [(0, "node1"), (1, "node0")]
    assert missing == [2] and hosts[0].pending() == 0 and hosts[2].pending() == 1


def test_the_ranks_that_hold_the_others_up_come_first() -> None:
    positions = [replace(SAVES if rank in (5, 13) else WAITS, rank=rank) for rank in range(16)]
    assert describe_positions(positions) == (
        "ranks 5 and 13 are in checkpoint.save (shardwise/checkpoint/writing.py:88 in write) since 95 s, "
        "the others wait in all_gather of layers.7 over shard since 94 s"
    )
    other = replace(WAITS, collective="all_reduce of loss and gradient norm over world", rank=1)
    apart = describe_positions([WAITS, other, replace(WAITS, rank=2)])
    assert apart.startswith("rank 1 waits in all_reduce of loss") and apart.endswith(
        "in different collectives, or the network between them is slow"
    )
    assert "none of them is behind" in describe_positions([replace(WAITS, rank=rank) for rank in range(4)])
    everywhere = replace(WAITS, collective="all_reduce of loss and gradient norm over world")
    behind = [replace(everywhere, rank=rank, sequence=40 - 2 * (rank == 2)) for rank in range(4)]
    assert describe_positions(behind).endswith("since 94 s, and rank 2 is 2 calls behind")
    gone = describe_positions([replace(WAITS, rank=3, host="node7", state=GONE), WAITS, replace(WAITS, rank=1)])
    assert gone.startswith("rank 3 (node7) is gone, the others wait in")


def test_each_kind_of_work_is_judged_by_its_own_median() -> None:
    seconds = dict.fromkeys(UNITS, ())
    seconds |= {
        WorkUnit.STEP: (1.0, 7.0, 9.0, 8.0),
        WorkUnit.EVALUATION: (2.0, 3.0),
        WorkUnit.SAVE: (60.0, 70.0, 80.0),
    }
    place = RecordedPlace(1, 0, 0, WorkUnit.STEP, 4, 0, "forward", 0, (), seconds)
    settings = WatchSettings(medians=10.0, seconds=30.0)
    assert settings.threshold(place) == 75.0
    assert settings.threshold(replace(place, unit=WorkUnit.SAVE)) == 700.0
    assert settings.threshold(replace(place, unit=WorkUnit.EVALUATION)) == 150.0  # two are no median
    assert settings.threshold(replace(place, unit=WorkUnit.START)) == 150.0
    quick = replace(place, unit=WorkUnit.SAVE, seconds={**seconds, WorkUnit.SAVE: (0.1, 0.1, 0.1)})
    assert settings.threshold(quick) == 150.0  # a save that is waited for
    assert WatchSettings(medians=None).threshold(place) == float("inf")


def test_the_kernel_says_what_a_process_cannot() -> None:
    resident = ProcessSample("", 1.0, 100, 2 << 30, 2 << 30)
    assert state_between(resident, replace(resident, faults=400), 1.0) == SWAPPED
    assert state_between(resident, resident, 1.0) == ""  # it lies in swap and is not missed
    assert state_between(resident, replace(resident, state=STOPPED), 1.0) == STOPPED
    disk = replace(resident, state=DISK, swapped=0)
    assert state_between(disk, disk, 1.0) == DISK
    assert state_between(resident, disk, 1.0) == ""


def test_the_line_that_tells_is_the_users_or_ours() -> None:
    import torch.distributed.distributed_c10d as c10d

    from shardwise.checkpoint import save, storage_write

    text = f"""Thread 0x00000000000000aa (most recent call first):
  File "{storage_write.__file__}", line 12 in write_data
  File "{threading_file()}", line 982 in run
Current thread 0x00000000000000bb (most recent call first):
  File "{threading_file()}", line 1119 in join
  File "{save.__file__}", line 109 in wait
"""
    stacks = parse_stacks(text)
    frame = telling_frame(telling_stack(stacks, 0xBB))
    assert frame is not None and str(frame) == "shardwise/checkpoint/storage_write.py:12 in write_data"
    waiting = parse_stacks(
        f"""Current thread 0x01 (most recent call first):
  File "{c10d.__file__}", line 3000 in all_reduce
  File "{c10d.__file__}", line 4000 in barrier
  File "/home/me/train.py", line 4 in main
"""
    )[1]
    assert collective_of(waiting) == "barrier"
    assert str(telling_frame(waiting)) == "train.py:4 in main"


def threading_file() -> str:
    import threading

    return threading.__file__
