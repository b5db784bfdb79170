"""The report of a host before a long run: its versions, clock, disk, memory, network interface and GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import torch

from shardwise.collectives.topology import host_name
from shardwise.errors import OutputError

PACKAGES = ("shardwise", "torch", "transformers", "safetensors")
WRITTEN_BYTES = 1 << 26  # to the disk, to see how quick it is
GPU_FIELDS = (
    "index", "name", "memory.used", "memory.total", "temperature.gpu", "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_slowdown", "clocks_event_reasons.hw_thermal_slowdown",
)  # fmt: skip


@dataclass(frozen=True)
class HostReport:
    """Facts that a host finds of itself. Sizes in bytes, rates in bytes a second.

    Attributes:
        host: its name.
        versions: of Python, packages, CUDA and driver.
        clock: seconds since the epoch, read at the moment at which all hosts do.
        disk_free, disk_total, disk_rate: of the output directory's disk.
        memory_available, memory_total, swap_used, shared_free: of the host; the last of /dev/shm, -1 without it.
        link_promised: of the interface that leads to the first host; 0 where the system does not say.
        link_measured: from the first host to this one; 0 on the first.
        gpus: a row of nvidia-smi each, as `GPU_FIELDS`.
    """

    host: str
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0
    disk_free: int = 0
    disk_total: int = 0
    disk_rate: float = 0.0
    memory_available: int = 0
    memory_total: int = 0
    swap_used: int = 0
    shared_free: int = -1
    link_promised: float = 0.0
    link_measured: float = 0.0
    gpus: list[list[str]] = field(default_factory=list)


def report_of_host(output: Path, address: str) -> HostReport:
    """Return the report of this host, without what hosts find together: clock and measured link.

    Args:
        output: directory that a run would write into; it need not be there.
        address: of the first host.

    Raises:
        OutputError: a file is in the place of a directory.
    """
    place = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not place.is_dir():
        raise OutputError(f"output={str(output)!r} cannot be made: {place} is a file; use another --output")
    disk, memory = shutil.disk_usage(place), psutil.virtual_memory()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else -1
    return HostReport(
        host=host_name(),
        versions=_versions(),
        disk_free=disk.free,
        disk_total=disk.total,
        disk_rate=_write_rate(place),
        memory_available=memory.available,
        memory_total=memory.total,
        swap_used=psutil.swap_memory().used,
        shared_free=shared,
        link_promised=promised_rate(address),
        gpus=_gpus(),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "CUDA": str(torch.version.cuda)}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    driver = Path("/sys/module/nvidia/version")
    if driver.is_file():
        versions["driver"] = driver.read_text().strip()
    return versions


def _write_rate(directory: Path) -> float:
    """Return how quickly a file is written through to the disk; 0 where it cannot be."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".shardwise-preflight-") as file:
            began = time.perf_counter()
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError:
        return 0.0


def promised_rate(address: str) -> float:
    """Return what the interface on the way to an address promises, bytes a second; 0 where the system does not say."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address == own for one in addresses):
                speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
                return max(speed, 0) * 1e6 / 8
    return 0.0


def _gpus() -> list[list[str]]:
    """Return a row of each GPU; none where there is no nvidia-smi, or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
        return [gpu_row(line) for line in said.splitlines() if line.strip()]
    return []


def gpu_row(line: str) -> list[str]:
    """Return the fields of a line of nvidia-smi."""
    return [part.strip() for part in line.split(",")]
