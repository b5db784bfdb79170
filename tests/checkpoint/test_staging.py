"""A snapshot on its way to the disk: the staging ring, and files that go around the page cache."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from shardwise.checkpoint.manifest import BLOCK_BYTES
from shardwise.checkpoint.save import SYNCHRONOUS_BYTES, Checkpointer
from shardwise.checkpoint.staging import Broken, Staging, Straight, _aligned
from shardwise.checkpoint.storage_write import hashed
from shardwise.checkpoint.stores import NewFile
from shardwise.errors import CheckpointError
from shardwise.job.schema import CheckpointSection

HALF = BLOCK_BYTES // 2


def numbers(*sizes: int) -> list[Tensor]:
    """Tensors of that many bytes each, all bytes different from their neighbours in other tensors."""
    return [(torch.arange(size) * 7 + number).to(torch.uint8) for number, size in enumerate(sizes)]


def eventually(condition: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


@contextmanager
def filling(staging: Staging, parts: list[Tensor]) -> Iterator[threading.Thread]:
    """The training thread, about to change `parts`."""
    staging.begin(parts)
    thread = threading.Thread(target=staging.settle, daemon=True)
    thread.start()
    yield thread
    thread.join(100)
    assert not thread.is_alive()


STATES: list[tuple[str, list[Tensor]]] = [
    ("nothing", []),
    ("empty tensors", numbers(0, 0)),
    ("empty among others", numbers(3, 0, BLOCK_BYTES, 0, 1)),
    ("one block", numbers(BLOCK_BYTES)),
    ("a byte more", numbers(BLOCK_BYTES, 1)),
    ("the ring", numbers(*[HALF] * 6)),
    ("more than the ring", numbers(*[HALF + 1] * 9)),
    ("one tensor larger than the ring", numbers(5 * BLOCK_BYTES + 17)),
    ("numbers and strides", [torch.tensor(3.5), torch.arange(24.0).view(4, 6).t()]),
]


@pytest.mark.parametrize("parts", [pytest.param(parts, id=name) for name, parts in STATES])
def test_the_stream_arrives_whole_through_a_ring_of_three_blocks(parts: list[Tensor]) -> None:
    staging = Staging(3 * BLOCK_BYTES + 5)
    expected = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    for _ in range(2):  # it is used again
        with filling(staging, parts):
            blocks = [(bytes(block), staging.bytes) for block in staging.drain()]
        assert b"".join(block for block, _ in blocks) == expected
        assert all(len(block) == BLOCK_BYTES for block, _ in blocks[:-1])
        assert max((held for _, held in blocks), default=0) <= 3 * BLOCK_BYTES


@pytest.mark.parametrize("parts", [pytest.param(parts, id=name) for name, parts in STATES])
def test_the_same_stream_without_a_ring(parts: list[Tensor]) -> None:
    expected = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    hashes: list[str] = []
    assert b"".join(bytes(run) for run in hashed(Straight(parts).drain(), hashes)) == expected
    starts = range(0, len(expected), BLOCK_BYTES)
    assert hashes == [xxh3_128_hexdigest(expected[start : start + BLOCK_BYTES]) for start in starts]


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("sizes", [(), (5,), (PAGE,), (4 * PAGE, 2 * PAGE, 17), (3, PAGE, 9), (PAGE, 5, PAGE, 0)])
@pytest.mark.parametrize("shift", [0, 1])  # of the memory, which a disk cannot take as it lies if it is not aligned
@pytest.mark.parametrize("memory", ["disk", "tmpfs"])
def test_a_file_has_what_was_written_whether_or_not_it_goes_around_the_page_cache(
    tmp_path: Path, sizes: tuple[int, ...], shift: int, memory: str
) -> None:
    directory = Path("/dev/shm") if memory == "tmpfs" else tmp_path
    if not directory.is_dir():
        pytest.skip("no tmpfs here")
    buffer = _aligned(False)
    buffer.copy_(numbers(BLOCK_BYTES)[0])
    assert buffer.data_ptr() % PAGE == 0
    path, expected, at = directory / f"shardwise-test-{uuid4().hex}", b"", shift
    try:
        with NewFile(path) as file:
            for size in sizes:
                block = memoryview(buffer.numpy())[at : at + size]  # type: ignore[arg-type]
                assert file.write(block) == size
                expected, at = expected + bytes(block), at + size
        assert path.read_bytes() == expected
    finally:
        path.unlink()


def test_blocks_of_the_ring_go_around_the_page_cache_where_they_can(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("this file system goes through the page cache")
    staging = Staging(2 * BLOCK_BYTES)
    staging.begin(numbers(BLOCK_BYTES + 100))
    staging.settle()
    with NewFile(tmp_path / "file") as file:
        direct = [file.write(block) and file._direct for block in staging.drain()]
    assert direct == [True, False]  # the tail is no whole page


def test_training_is_held_up_while_the_ring_is_full() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    with filling(staging, numbers(4 * BLOCK_BYTES)) as thread:
        eventually(lambda: staging._full.qsize() == 2)
        assert thread.is_alive() and staging.bytes == 2 * BLOCK_BYTES
        stream = staging.drain()
        next(stream)
        next(stream)  # the first is free again
        eventually(lambda: staging._full.qsize() == 1)
        assert thread.is_alive() and staging.bytes == 2 * BLOCK_BYTES
        assert len(list(stream)) == 2


def test_training_goes_on_at_once_where_the_ring_holds_the_state() -> None:
    staging = Staging(3 * BLOCK_BYTES)
    staging.begin(numbers(3 * BLOCK_BYTES))
    staging.settle()  # nobody takes a block
    assert staging.bytes == 3 * BLOCK_BYTES
    assert sum(len(block) for block in staging.drain()) == 3 * BLOCK_BYTES


def test_a_writer_that_fails_sets_the_waiting_training_free_and_the_ring_is_used_again() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    with filling(staging, numbers(5 * BLOCK_BYTES)) as thread:
        stream = staging.drain()
        next(stream)
        eventually(lambda: staging._full.qsize() == 1)
        assert thread.is_alive()
        staging.cancel()
    with pytest.raises(Broken):
        next(stream)
    with filling(staging, numbers(3 * BLOCK_BYTES)):
        assert sum(len(block) for block in staging.drain()) == 3 * BLOCK_BYTES
    assert staging.bytes <= 2 * BLOCK_BYTES


def test_a_writer_that_failed_before_the_first_block() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    staging.begin(numbers(5 * BLOCK_BYTES))
    staging.cancel()
    staging.settle()
    assert staging.bytes == 0


def test_a_stream_that_nobody_disturbs_needs_one_block() -> None:
    staging, parts = Staging(8 * BLOCK_BYTES), numbers(*[HALF + 1] * 9)
    staging.begin(parts)
    assert b"".join(bytes(block) for block in staging.drain()) == b"".join(part.numpy().tobytes() for part in parts)
    assert staging.bytes == BLOCK_BYTES
    staging.settle()  # too late to matter


def test_what_is_copied_before_a_change_is_what_was_there() -> None:
    staging, parts = Staging(4 * BLOCK_BYTES), numbers(*[BLOCK_BYTES] * 4)
    expected = [part.numpy().tobytes() for part in parts]
    staging.begin(parts)
    stream = staging.drain()
    first = bytes(next(stream))  # copied by the writer
    staging.settle()
    for part in parts:
        part.zero_()
    assert [first, *(bytes(block) for block in stream)] == expected


def collect(staging: Staging, blocks: list[bytes]) -> None:
    blocks.extend(bytes(block) for block in staging.drain())


def collect_late(staging: Staging, blocks: list[bytes]) -> None:
    """Keep the first block until there is a second: a quick writer would hand it back, and leave the ring at one."""
    for block in staging.drain():
        eventually(lambda: staging.bytes == 2 * BLOCK_BYTES)
        blocks.append(bytes(block))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What staging asks of a GPU, where none is."""
    monkeypatch.setattr("shardwise.checkpoint.staging._aligned", lambda pinned: _aligned(False))
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=int), synchronize=int)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)


@pytest.mark.usefixtures("gpu")
def test_of_a_gpu_the_training_thread_fills_all() -> None:
    """The writing thread has another device and another stream than what computed the tensors."""
    staging, parts = Staging(2 * BLOCK_BYTES, pinned=True), numbers(5 * BLOCK_BYTES)
    expected = parts[0].numpy().tobytes()
    staging.begin(parts)
    blocks: list[bytes] = []
    writer = threading.Thread(target=collect_late, args=(staging, blocks), daemon=True)
    writer.start()
    writer.join(0.5)
    assert staging.bytes == 0
    staging.settle()
    parts[0].zero_()
    writer.join(100)
    assert b"".join(blocks) == expected and staging.bytes == 2 * BLOCK_BYTES


def test_what_keeps_the_training_thread_from_filling_sets_the_writer_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.staging._aligned", lambda pinned: 1 // 0)  # no memory could be pinned
    staging = Staging(2 * BLOCK_BYTES)
    staging.begin(numbers(3 * BLOCK_BYTES))
    with pytest.raises(ZeroDivisionError):
        staging.settle()
    with pytest.raises(Broken):
        next(staging.drain())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("settings", [{"asynchronous": False}, {"staging_bytes": 2 * BLOCK_BYTES}])
def test_a_gpus_state_may_be_larger_than_the_ring(settings: dict[str, Any]) -> None:
    saver: Any = Checkpointer.__new__(Checkpointer)
    saver.settings, saver._staging = CheckpointSection(**settings), None
    saver.model = SimpleNamespace(device=torch.device("cuda"))
    blocks: list[bytes] = []
    saver._write = lambda name, planner, staging, describe: collect(staging, blocks)
    parts = numbers(SYNCHRONOUS_BYTES + 3 * BLOCK_BYTES)
    planner = SimpleNamespace(chunks=[SimpleNamespace(bytes=parts[0].numel())])
    saving = threading.Thread(target=saver._write_beside, args=("step", planner, parts, None), daemon=True)
    saving.start()
    saving.join(20)
    assert not saving.is_alive()
    saver._thread.join(20)
    assert b"".join(blocks) == parts[0].numpy().tobytes()


def test_both_threads_fill_and_neither_waits_for_the_other() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    for number in range(30):
        parts = [torch.full((HALF + size,), number, dtype=torch.uint8) for size in range(1 + number % 9)]
        staging.begin(parts)
        blocks: list[bytes] = []
        writer = threading.Thread(target=collect, args=(staging, blocks), daemon=True)
        writer.start()
        time.sleep(number % 7 / 5000)  # the update comes early or late
        staging.settle()
        for part in parts:
            part.fill_(255)
        writer.join(100)
        assert not writer.is_alive() and b"".join(blocks) == bytes([number]) * sum(part.numel() for part in parts)


def test_a_change_that_nobody_announced_is_refused_by_whoever_sees_it() -> None:
    for sees in ("the writer", "training"):
        staging, parts = Staging(4 * BLOCK_BYTES), numbers(*[BLOCK_BYTES] * 4)
        staging.begin(parts)
        stream = staging.drain()
        next(stream)
        parts[2][:1].zero_()  # through a view
        if sees == "training":
            staging.settle()
        with pytest.raises(CheckpointError, match="changed while they were being saved"):
            list(stream)
