"""torch profiler traces of chosen steps, for `--profile` (`observe.profile: [first, last]`).

Steps count from 1, as in metrics.jsonl. Every rank writes `profile/rankR-steps-FIRST-LAST.json.gz` in the output
directory; open it at https://ui.perfetto.dev or in chrome://tracing. Operators, shapes and memory are recorded on every
device, kernels besides on CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from shardwise.job.schema import Job


class Profiler:
    """Records steps `first` to `last`; `step()` is called after each training step. Does nothing without a window."""

    def __init__(self, directory: Path, window: tuple[int, int] | None, done: int = 0) -> None:
        self._directory = directory
        self._window = window
        self._done = done  # steps finished before this run, when it resumes another
        self._profile: profile | None = None

    def step(self) -> None:
        """A training step has ended."""
        self._done += 1
        self._turn()

    def __enter__(self) -> Profiler:
        self._turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:  # stopped inside of the window: keep what there is
            self._write()

    def _turn(self) -> None:
        """Start before the first step of the window, stop after the last."""
        if self._window is None:
            return
        first, last = self._window
        if self._profile is None and first <= self._done + 1 <= last:
            known = supported_activities()
            activities = [a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in known]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            with _quiet():
                self._profile.start()
        elif self._profile is not None and self._done >= last:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None and self._window is not None
        with _quiet():
            self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        first, last = self._window
        self._profile.export_chrome_trace(str(self._directory / f"rank{_rank()}-steps-{first}-{last}.json.gz"))
        self._profile = None


def profiler(job: Job, output: Path, done: int = 0) -> Profiler:
    """The profiler that the job asks for; `done` steps came before this run, when it resumes another."""
    asked = job.observe.profile
    return Profiler(output / "profile", (asked[0], asked[-1]) if asked else None, done)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without standard error, to which Kineto reports its start and stop past Python and breaks up the live display."""
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
