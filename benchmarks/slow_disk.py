"""A disk of a chosen speed: an ext4 file system on a loop device whose writes the kernel holds back.

`slow_disk` makes it and takes it down whatever happens. A cloud's network disk writes 125 to 1000 MB/s, this machine's
own may be faster, and how long a save holds up training hangs on it. The limit is the block layer's throttle
(`blkio.throttle`, control groups of version 1), set for the loop device alone. Needs Linux, root and those groups;
elsewhere a limit can be given from outside (`systemd-run -p IOWriteBandwidthMax=...`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import MachineError, do

THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def obstacle() -> str:
    """Why there can be no slow disk here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a slow disk needs Linux and root"
    if not THROTTLE.exists():
        return f"{THROTTLE} is not there: no control groups of version 1"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@contextmanager
def slow_disk(directory: Path, bytes_per_second: int, size: int) -> Iterator[Path]:
    """A mounted file system of `size` bytes below `directory` that writes `bytes_per_second`; gone afterwards.

    Raises:
        MachineError: it cannot be made here.
    """
    if why := obstacle():
        raise MachineError(why)
    image, place = directory / "disk.img", directory / "disk"
    with _loop_device(image, size) as device:
        do("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        place.mkdir()
        do("mount", device, str(place))
        try:
            _throttle(device, bytes_per_second)
            yield place
        finally:
            _throttle(device, 0)
            do("umount", str(place))
            place.rmdir()


@contextmanager
def _loop_device(image: Path, size: int) -> Iterator[str]:
    with image.open("wb") as file:
        file.truncate(size)
    try:
        device = do("losetup", "--find", "--show", "--direct-io=on", str(image))
        try:
            yield device
        finally:
            do("losetup", "--detach", device)
    finally:
        image.unlink()


def _throttle(device: str, bytes_per_second: int) -> None:
    """Limit what is written to the device; 0 takes the limit away."""
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    THROTTLE.write_text(f"{number} {bytes_per_second}")
