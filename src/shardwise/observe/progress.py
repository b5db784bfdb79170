"""Progress of a run for Kubeflow's Trainer, which shows it in the status of a TrainJob (v2.2, gate TrainJobStatus).

The controller gives each pod an address, a certificate and a token that is renewed. A thread posts the newest figures,
at most once in five seconds, so that no step waits for the network. A controller that does not answer costs the run a
note and nothing else.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record, plain
from shardwise.words import say_note

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
PAUSE_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
METRICS = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")


def make_progress(variables: Mapping[str, str] | None = None) -> list[Callback]:
    """Return the callback that reports progress, where a controller asks for it in the environment."""
    variables = os.environ if variables is None else variables
    return [KubeflowProgress(variables)] if variables.get(URL) else []


class KubeflowProgress(Callback):
    """Posts the share of steps done, the time left and the newest figures to a TrainJob's controller."""

    rank_zero_only = True

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._url = variables[URL]
        self._certificate, self._token = variables.get(CERTIFICATE), variables.get(TOKEN)
        self._newest: dict[str, Any] | None = None
        self._figures: dict[str, str] = {}
        self._is_told = False  # that nobody answers
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._began, self._first_step = 0.0, 0

    def on_start(self, session: ObservedSession) -> None:
        """Begin to report."""
        self._began, self._first_step = time.monotonic(), session.steps_done
        self._thread = threading.Thread(target=self._report, name="kubeflow-progress", daemon=True)
        self._thread.start()

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Take the figures of a step."""
        self._take(session, record)

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Take the figures of an evaluation."""
        self._take(session, record)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Report the last figures."""
        self._finish()

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Report the last figures."""
        self._finish()

    def _take(self, session: ObservedSession, record: Record) -> None:
        figures = {name: value for name, value in plain(record).items() if name in METRICS and value is not None}
        self._figures |= {name: str(value) for name, value in figures.items()}
        done, steps = session.steps_done, session.plan.steps
        fresh = done - self._first_step
        pace = (time.monotonic() - self._began) / fresh if fresh else 0.0
        self._newest = status(done, steps, pace, self._figures)
        self._wake.set()

    def _finish(self) -> None:
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * TIMEOUT_SECONDS)

    def _report(self) -> None:
        """Post the newest figures until the end, a pause between two."""
        while True:
            self._wake.wait()
            self._wake.clear()
            newest, self._newest = self._newest, None
            if newest is not None:
                self._post(newest)
            if self._ended.is_set():
                return
            self._ended.wait(PAUSE_SECONDS)

    def _post(self, content: dict[str, Any]) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {Path(self._token).read_text(encoding='utf-8').strip()}"
            request = urllib.request.Request(self._url, json.dumps(content).encode(), headers, method="POST")
            context = None
            if self._url.startswith("https"):
                context = ssl.create_default_context(cafile=self._certificate)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context):
                pass
        except (OSError, ValueError) as error:
            if not self._is_told:
                self._is_told = True
                say_note(f"progress is not reported to {self._url}: {error}; the run goes on")


def status(done: int, steps: int, seconds_a_step: float, figures: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a report, as Kubeflow's guide on the progress of TrainJobs has it; metrics are text."""
    return {
        "trainerStatus": {
            "progressPercentage": 100 * done // max(steps, 1),
            "estimatedRemainingSeconds": round((steps - done) * seconds_a_step),
            "metrics": [{"name": name, "value": value} for name, value in figures.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
    }
