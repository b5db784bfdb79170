"""Facts that the kernel knows of a process: stopped, swapped out, waiting for a disk, or computing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GONE, STOPPED, DISK, SWAPPED = "gone", "stopped", "disk", "swapped"
STATES = {"T": STOPPED, "t": STOPPED, "D": DISK, "Z": GONE, "X": GONE}
SWAPPED_SHARE = 0.2  # of a process's memory, from which it counts as swapped out
FAULTS_PER_SECOND = 50.0  # of pages read from a disk


@dataclass(frozen=True)
class ProcessSample:
    """Counters of a process at one moment.

    Attributes:
        state: `gone`, `stopped`, `disk`, or empty.
        processor_seconds: of all its threads so far.
        faults: pages that it had to read from a disk so far.
        resident, swapped: bytes in memory and in swap.
    """

    state: str
    processor_seconds: float = 0.0
    faults: int = 0
    resident: int = 0
    swapped: int = 0


def sample_process(pid: int, proc: Path = Path("/proc")) -> ProcessSample:
    """Return the counters of a process."""
    try:
        # The name, in parentheses, may hold anything.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return ProcessSample(GONE)
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessSample(
        STATES.get(fields[0], ""),
        (int(fields[11]) + int(fields[12])) / ticks,
        int(fields[9]),
        _kilobytes(status, "VmRSS"),
        _kilobytes(status, "VmSwap"),
    )


def state_between(before: ProcessSample, after: ProcessSample, seconds: float) -> str:
    """Return `gone`, `stopped`, `swapped`, `disk`, or nothing, of a process that was sampled twice."""
    if after.state in (GONE, STOPPED):
        return after.state
    memory = after.resident + after.swapped
    reads = (after.faults - before.faults) / max(seconds, 1e-3)
    if memory and after.swapped > SWAPPED_SHARE * memory and reads > FAULTS_PER_SECOND:
        return SWAPPED
    return DISK if before.state == after.state == DISK else ""


def _kilobytes(status: str, key: str) -> int:
    """Return a line of /proc/PID/status in bytes; 0 where there is none."""
    for line in status.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
