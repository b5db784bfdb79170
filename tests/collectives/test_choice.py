"""The table that chooses, how it is measured and kept, and the turns in which composed operations run."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import carriers, choice, hierarchical, topology
from shardwise.collectives.carriers import GroupMember
from shardwise.collectives.choice import AlgorithmTable
from shardwise.collectives.turns import Turns
from shardwise.errors import ConfigError
from shardwise.testing.world import WorldPool

# --- the table


def test_a_table_is_read_by_bytes() -> None:
    table = AlgorithmTable(dict.fromkeys(choice.OPERATIONS, ((1024, "flat"), (4096, "two_level"), (0, "direct"))))
    found = [table.algorithm("all_reduce", size) for size in (1, 1024, 1025, 4096, 4097, 10**9)]
    assert found == ["flat", "flat", "two_level", "two_level", "direct", "direct"]
    assert AlgorithmTable.from_json(table.to_json()) == table
    assert table.describe().startswith("all_gather flat to 1 KiB, then two_level to 4 KiB, then direct; ")
    assert AlgorithmTable.given("direct").algorithm("all_gather", 0) == "direct"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "nonsense",
        '{"all_gather": [[0, "flat"]], "reduce_scatter": [], "all_reduce": [[0, "flat"]]}',
        '{"all_gather": [[0, "flat"]], "reduce_scatter": [[0, "ring"]], "all_reduce": [[0, "flat"]]}',
        '{"all_gather": [0], "reduce_scatter": [[0, "flat"]], "all_reduce": [[0, "flat"]]}',
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert choice.read_algorithm_table(path) is None
    choice.keep_algorithm_table(path, AlgorithmTable.given("direct"))
    assert choice.read_algorithm_table(path) == AlgorithmTable.given("direct")
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choice.keep_algorithm_table(tmp_path / "file" / "table.json", AlgorithmTable.given("flat"))
    assert choice.read_algorithm_table(tmp_path / "file" / "table.json") is None


def test_the_fastest_has_to_be_clearly_faster_than_flat() -> None:
    assert choice._fastest([1.0, 0.97, 0.96]) == "flat"
    assert choice._fastest([1.0, 0.9, 0.5]) == "direct"
    assert choice._merged_rows([(100, "flat"), (400, "flat"), (1600, "direct")]) == ((800, "flat"), (0, "direct"))


def test_a_ladder_ends_where_a_step_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def times(run: Any, operation: str, whole: Tensor) -> list[float]:
        sizes.append(whole.nbytes)
        return [1.0, 0.1, 0.5] if whole.nbytes > 2**17 else [0.1, 0.2, 0.3]

    monkeypatch.setattr(choice, "_times", times)
    seat = GroupMember(dist.HashStore(), 0, (0,), timedelta(seconds=10))
    table = choice.measure_algorithms(lambda *_: None, carriers.make("gloo", seat), torch.device("cpu"))
    assert sizes == [2**14, 2**18] * 3  # 1 s at the second size is more than the patience
    assert table.rows["all_gather"] == ((2**16, "flat"), (0, "two_level"))


def measured(directory: str) -> tuple[list[str], int]:
    """Two groups after each other: the second finds what the first has measured."""
    ladder, choice.LADDER = choice.LADDER, (2**12, 2**14)
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    topology_before = topology.of_identities(["a", "a", "b", "b"])
    hierarchical.discover_topology = lambda store, rank, size: topology_before  # type: ignore[assignment]
    texts, calls = [], []
    inner = choice.measure_algorithms
    choice.measure_algorithms = lambda *arguments: calls.append(1) or inner(*arguments)  # type: ignore[func-returns-value]
    try:
        for name in ("first", "second"):
            store = dist.PrefixStore(f"{directory}-{name}", world.get_group_store())
            seat = GroupMember(store, rank, (0, 1, 2, 3), timedelta(seconds=60))
            flat = carriers.make("gloo", seat.among("flat", [0, 1, 2, 3]))
            hierarchy = hierarchical._hierarchy(seat, flat, "measured", "gloo", "gloo")
            assert hierarchy is not None
            texts.append(hierarchy.table.to_json())
            dist.barrier()
            hierarchy.close()
    finally:
        # A worker serves other tests, beside workers that have not seen this one.
        choice.measure_algorithms, hierarchical.discover_topology, choice.LADDER = (
            inner,
            topology.discover_topology,
            ladder,
        )
    return texts, len(calls)


def measured_at_once(directory: str) -> str:
    """The table of this rank's group; ranks 0 and 2 make one, ranks 1 and 3 another that finds another algorithm best.

    They are on other hosts, and neither finds what is kept.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    own = AlgorithmTable.given("direct" if rank % 2 else "flat")
    seat = GroupMember(
        dist.PrefixStore(f"{directory}-{rank % 2}", world.get_group_store()), rank // 2, (0, 1), timedelta(seconds=60)
    )
    inner, kept = choice.measure_algorithms, choice.read_algorithm_table

    def measure(*arguments: Any) -> AlgorithmTable:
        dist.barrier()  # all have begun
        return own

    choice.measure_algorithms, choice.read_algorithm_table = measure, lambda path: None
    try:
        levels = SimpleNamespace(hosts=2, locals=2)
        table = hierarchical._measured(seat, None, levels, ["gloo", directory], [f"host {rank % 2}"], None)  # type: ignore[arg-type]
        return table.to_json()
    finally:
        choice.measure_algorithms, choice.read_algorithm_table = inner, kept


def test_groups_that_measure_at_once_take_one_table(
    world_pool: WorldPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(set(world_pool.run(4, measured_at_once, str(tmp_path)))) == 1


def test_a_measurement_is_kept_for_the_hosts(
    world_pool: WorldPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = world_pool.run(4, measured, str(tmp_path))
    assert len({text for texts, _ in results for text in texts}) == 1  # the same table on all ranks, both times
    assert [calls for _, calls in results] == [1] * 4
    assert len(list((tmp_path / "shardwise" / "collectives").iterdir())) == 1


def test_names_of_backends() -> None:
    assert hierarchical.backend_name("two_level", "gloo", "shardwise") == "two_level_gloo_shardwise"
    assert hierarchical.parts_of("two_level_gloo_shardwise") == ("two_level", "gloo", "shardwise")
    assert hierarchical.backend_name("flat", "nccl", "nccl") == "nccl"
    assert hierarchical.parts_of("nccl") == ("flat", "nccl", "nccl")
    with pytest.raises(ConfigError, match="'ring' is none of measured, flat, two_level, direct"):
        hierarchical.register_two_levels("ring", "gloo", "gloo")
    with pytest.raises(ConfigError, match="'mpi' is none of gloo, nccl, shardwise"):
        hierarchical.register_two_levels("direct", "mpi", "gloo")


# --- turns


def test_turns_keep_their_order_on_one_thread_at_a_time() -> None:
    turns, seen, gate = Turns(), [], threading.Event()
    tensor = torch.zeros(1)
    works = [turns.run(lambda: gate.wait(10) and seen.append(0), [tensor], [tensor], blocking=False)]  # type: ignore[func-returns-value]
    works += [turns.run(lambda n=n: seen.append(n), [tensor], [tensor], blocking=False) for n in (1, 2)]
    assert not works[0].is_completed()
    gate.set()
    turns.run(lambda: seen.append(3), [tensor], [tensor], blocking=True)
    assert seen == [0, 1, 2, 3] and all(work.is_completed() for work in works)
    here = threading.current_thread()
    turns.run(lambda: seen.append(threading.current_thread()), [tensor], [tensor], blocking=True)
    assert seen[-1] is here  # nothing pending: no thread has to be woken
    turns.close()


def test_a_turn_that_fails_fails_its_work_alone() -> None:
    turns, tensor = Turns(), torch.zeros(1)

    def fails() -> None:
        raise ValueError("the link is on fire")

    work = turns.run(fails, [tensor], [tensor], blocking=False)
    with pytest.raises(ValueError, match="the link is on fire"):
        work.wait()
    with pytest.raises(Exception, match="the link is on fire"):
        torch.futures.wait_all([work.get_future()])  # as C++ sees it, which DDP does
    with pytest.raises(ValueError, match="the link is on fire"):
        turns.run(fails, [tensor], [tensor], blocking=True)
    assert turns.run(lambda: None, [tensor], [tensor], blocking=False).wait()
    turns.close()
