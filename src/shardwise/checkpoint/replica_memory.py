"""Copies of the state that a host lacks, taken from the memory of another.

Each host holds the whole state, so any of them will do: for one that was started anew, one that joins, and one whose
copy is damaged. Every rank checks the file that it wrote itself; what is missing then comes over the ranks' own group,
from the first host that has it whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.checkpoint.host_memory import MemoryPlace, MemoryStore
from shardwise.checkpoint.storage_write import write_all
from shardwise.collectives.names import CollectiveName
from shardwise.errors import CheckpointError
from shardwise.words import listed

PIECE_BYTES = 1 << 26  # most of a file that travels at once
WHOLE = CollectiveName("copies of the state in memory", "world", "all_reduce")
COPY = CollectiveName("copies of the state in memory", "world", "broadcast")


def completed_memory(
    places: Sequence[Sequence[MemoryPlace]], step: int, device: torch.device
) -> tuple[MemoryStore | None, list[str]]:
    """Return this host's memory of the state after a step, and what there is to say of it; None: no host has it whole.

    Collective.

    Raises:
        CheckpointError: there is no room for a copy.
    """
    whole, size = _whole_hosts(places, step, device), len(places)
    if not any(whole):
        return None, [f"no host has the state after step {step} whole in its memory"]
    lacking = [host for host, is_whole in enumerate(whole) if not is_whole]
    if not lacking:
        return MemoryStore(places, step), []
    source = whole.index(True)
    for local_rank, copies in enumerate(places):
        try:
            _copy(copies, step, source * size + local_rank, {host * size + local_rank for host in lacking}, device)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.memory_every: the state cannot be copied into this host's memory ({error.strerror}); "
                "leave it out"
            ) from error
    to = listed([_ranks(host, size) for host in lacking])
    note = f"the state after step {step} was copied from the memory of {_ranks(source, size)} to that of {to}"
    return MemoryStore(places, step), [note]


def _ranks(host: int, size: int) -> str:
    first, last = host * size, host * size + size - 1
    return f"rank {first}" if size == 1 else f"ranks {first} to {last}"


def _whole_hosts(places: Sequence[Sequence[MemoryPlace]], step: int, device: torch.device) -> list[bool]:
    """Return for each host whether its files hold what was written after `step`. Collective."""
    rank, size = dist.get_rank(), len(places)
    own = _place_of(places[rank % size], step)
    is_whole = own is not None and MemoryStore(places, step).is_whole and own.is_sound()
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    ranks[rank] = int(is_whole)
    with WHOLE:
        dist.all_reduce(ranks)
    return [bool(host.all()) for host in ranks.view(-1, size).cpu()]


def _place_of(copies: Sequence[MemoryPlace], step: int) -> MemoryPlace | None:
    return next((place for place in copies if place.step == step), None)


def _copy(copies: Sequence[MemoryPlace], step: int, source: int, targets: set[int], device: torch.device) -> None:
    """Copy what rank `source` holds of a step to ranks that lack it; the record comes last. Collective."""
    rank, place = dist.get_rank(), None
    if rank == source:
        place = _place_of(copies, step)
    elif rank in targets:
        place = _place_of(copies, step) or min(copies, key=lambda copy: copy.step)
        place.discard()
    _copy_file(None if place is None else place.content, source, device)
    _copy_file(None if place is None else place.record, source, device)


def _copy_file(path: str | None, source: int, device: torch.device) -> None:
    """Copy a file of rank `source` to the others that name one; the world hears it. Collective."""
    is_source = dist.get_rank() == source
    is_target = path is not None and not is_source
    bytes_of_file = torch.tensor(os.path.getsize(path) if path and is_source else 0, device=device)
    with COPY:
        dist.broadcast(bytes_of_file, source)
    size, nothing = int(bytes_of_file), os.devnull
    read_path, written_path = (path or nothing if uses_it else nothing for uses_it in (is_source, is_target))
    with open(read_path, "rb") as read, open(written_path, "r+b") as write:
        for start in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8)
            if is_source:
                read.readinto(piece.numpy().data)
            piece = piece.to(device)
            with COPY:
                dist.broadcast(piece, source)
            if is_target:
                write_all(write, piece.cpu().numpy().data)
        if is_target:
            write.truncate(size)
