"""Preflight: hosts report what they find before a long run, and each thing that is wrong becomes a line.

The ranks of a launcher meet over Gloo, one of each host reports, and rank 0 judges. Reports are JSON in the job's
store.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise._torch_compat.groups import default_store
from shardwise.launch.environment import RankEnvironment, detect
from shardwise.launch.host_report import HostReport, report_of_host
from shardwise.launch.process_group import ALONE, process_group

GIB = 1 << 30
MEETING_SECONDS = 120
MOST_CLOCK_SECONDS = 1.0  # between two hosts, beyond which tokens, logs and file times mislead
LEAST_DISK, LEAST_DISK_RATE = 20 * GIB, 50e6
LEAST_MEMORY_SHARE, LEAST_SHARED = 0.5, GIB
LINK_SHARE = 0.5  # of what an interface promises
LINK_BYTES = 1 << 26
HOTTEST = 85  # degrees Celsius
REPORT = "shardwise/preflight/{}"


def preflight(output: Path) -> list[str] | None:
    """Return a line for each thing that is wrong on any host; None on ranks other than 0. Collective.

    Args:
        output: directory that the run is to write into.

    Raises:
        MachineError: the ranks cannot meet.
    """
    place = detect() or ALONE
    with process_group("cpu", "gloo", MEETING_SECONDS):
        reports = _exchange(place, output)
        dist.barrier()  # nobody ends the store that others still read
    return list(wrong_things(reports)) if place.rank == 0 else None


def _exchange(place: RankEnvironment, output: Path) -> list[HostReport]:
    """Return the reports of all hosts, the first host's first; empty on ranks other than 0."""
    if place.world_size == 1:
        return [replace(report_of_host(output, place.master_address), clock=time.time())]
    store = default_store()
    own = report_of_host(output, place.master_address) if place.local_rank == 0 else None
    dist.barrier()
    clock = time.time()
    if own is not None:
        store.set(REPORT.format(place.rank), json.dumps(asdict(replace(own, clock=clock))))
    dist.barrier()
    reporters = [rank for rank in range(place.world_size) if store.check([REPORT.format(rank)])]
    measured = _measure_links(place.rank, reporters)
    if place.rank:
        return []
    reports = [HostReport(**json.loads(store.get(REPORT.format(rank)))) for rank in reporters]
    return [replace(report, link_measured=rate) for report, rate in zip(reports, measured, strict=True)]


def _measure_links(rank: int, reporters: Sequence[int]) -> list[float]:
    """Return how quickly rank 0 sends to each of these ranks, bytes a second; 0 to itself. One after the other."""
    message, rates = torch.zeros(LINK_BYTES, dtype=torch.uint8), [0.0]
    for other in reporters[1:]:
        began = time.perf_counter()
        if rank == 0:
            dist.send(message, other)
            dist.recv(message[:1], other)
        elif rank == other:
            dist.recv(message, 0)
            dist.send(message[:1], 0)
        rates.append(LINK_BYTES / (time.perf_counter() - began))
    return rates


def wrong_things(reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield a line for each thing that is wrong."""
    yield from _versions(reports)
    first = reports[0]
    for report in reports:
        apart = report.clock - first.clock
        if abs(apart) > MOST_CLOCK_SECONDS:
            yield f"{report.host}: its clock is {apart:+.1f} s off that of {first.host}; run a time service on both"
        if 0 < report.link_measured < LINK_SHARE * report.link_promised:
            yield (
                f"{report.host}: {report.link_measured / 1e9:.2f} GB/s arrive from {first.host}, its interface "
                f"promises {report.link_promised / 1e9:.2f}; look at cables, drivers and who else sends"
            )
        yield from _own_things(report)
        yield from _gpus(report)


def _versions(reports: Sequence[HostReport]) -> Iterator[str]:
    """Name the hosts whose versions are not those of most."""
    for name in sorted({name for report in reports for name in report.versions}):
        versions = [report.versions.get(name, "none") for report in reports]
        usual = Counter(versions).most_common(1)[0][0]
        for report, version in zip(reports, versions, strict=True):
            if version != usual:
                yield f"{report.host}: {name} is {version}, {usual} on most hosts; install the same"


def _own_things(report: HostReport) -> Iterator[str]:
    if report.disk_free < LEAST_DISK:
        free, total = report.disk_free / GIB, report.disk_total / GIB
        yield f"{report.host}: the disk of the output has {free:.1f} of {total:.0f} GiB free; checkpoints need room"
    if report.disk_rate == 0:
        yield f"{report.host}: the disk of the output cannot be written"
    elif report.disk_rate < LEAST_DISK_RATE:
        yield f"{report.host}: the disk of the output takes {report.disk_rate / 1e6:.0f} MB/s; saves will be slow"
    if report.memory_available < LEAST_MEMORY_SHARE * report.memory_total:
        available, total = report.memory_available / GIB, report.memory_total / GIB
        yield f"{report.host}: {available:.1f} of {total:.1f} GiB of memory are free; see what else runs there"
    if report.swap_used > GIB:
        yield f"{report.host}: {report.swap_used / GIB:.1f} GiB lie in swap; ranks that swap hold all others up"
    if 0 <= report.shared_free < LEAST_SHARED:
        yield f"{report.host}: /dev/shm has {report.shared_free / GIB:.2f} GiB free; ranks of a host share memory there"


def _gpus(report: HostReport) -> Iterator[str]:
    for index, name, used, _total, temperature, errors, slow, hot in report.gpus:
        what = f"{report.host}: GPU {index} ({name})"
        if errors.isdecimal() and int(errors):
            yield f"{what} has {errors} uncorrected memory errors; replace it"
        if "Active" in (slow, hot):
            yield f"{what} is slowed down by its hardware; look at power and cooling"
        if temperature.isdecimal() and int(temperature) > HOTTEST:
            yield f"{what} has {temperature} °C before the run; look at cooling"
        if used.isdecimal() and int(used) > 1024:
            yield f"{what} holds {used} MiB of somebody else's; see what else runs there"
