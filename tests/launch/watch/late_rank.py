"""A callback that holds rank 3 up before a step."""

from __future__ import annotations

import time
from typing import Any

import shardwise


class LateRank(shardwise.Callback):
    """Sleeps on rank 3 before step 9."""

    def on_step_begin(self, session: Any) -> None:
        if session.rank == 3 and session.steps_done == 8:
            time.sleep(10.0)
