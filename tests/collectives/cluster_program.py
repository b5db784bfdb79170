"""A rank of the cluster's fault tests: all-reduces in a loop until it is told of an error, then says which and when.

    python -m tests.collectives.cluster_program BYTES TIMEOUT_SECONDS

Prints `ready PID` after its first round and, at the end, a line of JSON: the error, when it came (Unix time), how long
the last operation took until then, and how many sockets are open after the group was destroyed beyond those before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.collectives import registration


def sockets() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


def main() -> None:
    size, timeout = int(sys.argv[1]), float(sys.argv[2])
    registration.register()
    dist.init_process_group("gloo")
    before = sockets()
    group = dist.new_group(backend="shardwise", timeout=timedelta(seconds=timeout))
    data = torch.ones(size // 4)
    dist.all_reduce(data, group=group)
    assert (data == dist.get_world_size()).all()
    print("ready", os.getpid(), flush=True)
    while True:
        began = time.time()
        try:
            dist.all_reduce(data.fill_(1), group=group)
        except dist.DistBackendError as error:
            told = {"error": str(error), "when": time.time(), "after": time.time() - began}
            break
    dist.destroy_process_group(group)
    del group
    told["sockets"] = sockets() - before
    print(json.dumps(told), flush=True)
    os._exit(0)  # Gloo's group cannot be left in order once a rank is gone


if __name__ == "__main__":
    main()
