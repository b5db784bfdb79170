"""A process that announces itself as a rank, and then waits, stops or reads: `rank_at.py DIRECTORY RANK HOW`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shardwise.collectives.names import CollectiveName
from shardwise.collectives.rank_record import WorkUnit, begin_unit, mark_phase
from shardwise.launch.watch.announced import announce_rank


def read_slowly() -> None:
    time.sleep(600)


def main(directory: Path, rank: int, how: str) -> None:
    announce_rank(directory, rank)
    for step in range(4):
        begin_unit(WorkUnit.STEP, step)
    mark_phase("forward")
    (directory / f"{rank}.ready").touch()
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "reads":
        mark_phase("data")
        read_slowly()
    with CollectiveName("layers.7", "shard", "all_gather"):
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
