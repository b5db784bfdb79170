"""torch profiler traces of chosen steps, for `--profile` (`observe.profile: [first, last]`).

Steps count from 1, as in metrics.jsonl. Every rank writes `profile/rankR-steps-FIRST-LAST.json.gz` in the output
directory; open it at https://ui.perfetto.dev or in chrome://tracing. Operators, shapes, memory and
collectives by name are recorded on every device, kernels besides on CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from shardwise.collectives.names import trace_collectives
from shardwise.job.schema import Job
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record


class Profiler(Callback):
    """Records the steps of `observe.profile`; does nothing where the job asks for none."""

    def __init__(self, job: Job) -> None:
        window = job.observe.profile
        self._directory = Path(job.output) / "profile"
        self._window = (window[0], window[-1]) if window else None
        self._steps_done = 0
        self._profile: profile | None = None

    def on_start(self, session: ObservedSession) -> None:
        """Begin, where the window begins with the first step."""
        self._steps_done = session.steps_done
        self._turn()

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Begin or end the trace, where the window does."""
        self._steps_done = session.steps_done
        self._turn()

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Keep what there is of a window that the run has not come to the end of."""
        self._keep()

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Keep what there is."""
        self._keep()

    def _keep(self) -> None:
        if self._profile is not None:
            self._write()

    def _turn(self) -> None:
        """Start before the first step of the window, stop after the last."""
        if self._window is None:
            return
        first, last = self._window
        if self._profile is None and first <= self._steps_done + 1 <= last:
            known = supported_activities()
            activities = [a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in known]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            with _quiet():
                self._profile.start()
            trace_collectives(True)
        elif self._profile is not None and self._steps_done >= last:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None and self._window is not None
        trace_collectives(False)
        with _quiet():
            self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        first, last = self._window
        self._profile.export_chrome_trace(str(self._directory / f"rank{_rank()}-steps-{first}-{last}.json.gz"))
        self._profile = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Close standard error inside: Kineto reports there past Python, which breaks up the live display."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
