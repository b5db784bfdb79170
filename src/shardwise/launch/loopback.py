"""Everything that keeps a run of one host on that host: its store, its network interface and its processes' lives.

Torch's own stores listen on every interface and its default elastic rendezvous unpickles what it finds there. Workers
that share a host need neither: `serve_store` listens on the loopback address only, on a port that the kernel picks and
that stays bound from then on, so no other process can take it in between. `die_with_parent` ends a worker together
with the process that started it, however that one died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from multiprocessing import connection, parent_process

import torch.distributed as dist

ADDRESS = "127.0.0.1"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def serve_store(timeout_seconds: float = 600) -> dist.TCPStore:
    """A key-value store served from this process on `127.0.0.1`; its `.port` is free of races."""
    listener = socket.socket()
    listener.bind((ADDRESS, 0))
    listener.listen()
    return dist.TCPStore(
        ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )


def connect_store(port: int, timeout_seconds: float) -> dist.TCPStore:
    """A client of `serve_store` of another process."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=timeout)


def interface() -> str | None:
    """Name of the loopback interface (`lo`, `lo0`), which Gloo wants instead of an address."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), None)


def die_with_parent() -> None:
    """Kills this multiprocessing child as soon as its parent is gone, also when that one was killed with SIGKILL.

    On Linux the kernel does it, even while this process hangs inside a C call. Where the parent in the sense of
    multiprocessing is not the process that forked us (a fork server), or there is no such call, a thread watches.
    """
    parent = parent_process()
    if parent is None:
        raise RuntimeError("die_with_parent is for processes started by multiprocessing")
    direct = sys.platform == "linux" and os.getppid() == parent.pid
    if direct:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not parent.is_alive():  # it died before the kernel was told, so no signal will come
        os._exit(1)
    if not direct:
        threading.Thread(target=_kill_after, args=(parent.sentinel,), daemon=True, name="parent-watch").start()


def _kill_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
