"""Reports to a TrainJob's controller, which is played by a server of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.observe.progress import TOKEN, URL, KubeflowProgress, make_progress, status

Reports = list[tuple[str | None, dict[str, Any]]]


@pytest.fixture
def controller() -> Iterator[tuple[str, Reports]]:
    """Address of a controller, and what it was told with which authorization."""
    told: Reports = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Controller)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/status", told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def session(step: int) -> Any:
    return SimpleNamespace(steps_done=step, plan=SimpleNamespace(steps=10))


def test_nobody_asks() -> None:
    assert make_progress({}) == []


def test_the_newest_figures_are_reported(controller: tuple[str, Reports], tmp_path: Path) -> None:
    url, told = controller
    (tmp_path / "token").write_text("secret-1\n")
    [progress] = make_progress({URL: url, TOKEN: str(tmp_path / "token")})
    progress.on_start(session(0))
    progress.on_step_end(session(5), {"step": 5, "loss": 2.5, "data_hash": "x", "mfu": None})
    progress.on_evaluation(session(5), {"step": 5, "validation_loss": 2.25})
    progress.on_end(session(5), {})
    authorization, body = told[-1]
    figures = {entry["name"]: entry["value"] for entry in body["trainerStatus"]["metrics"]}
    assert authorization == "Bearer secret-1" and body["trainerStatus"]["progressPercentage"] == 50
    assert figures == {"step": "5", "loss": "2.5", "validation_loss": "2.25"}


def test_a_controller_that_is_gone_costs_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    progress = KubeflowProgress({URL: "http://127.0.0.1:9/status"})
    progress.on_start(session(0))
    progress.on_step_end(session(1), {"step": 1, "loss": 1.0})
    progress.on_end(session(1), {})
    assert capsys.readouterr().err.count("progress is not reported to http://127.0.0.1:9/status") == 1


def test_the_time_left_is_that_of_the_steps_left() -> None:
    body = status(4, 10, 1.5, {})["trainerStatus"]
    assert (body["progressPercentage"], body["estimatedRemainingSeconds"]) == (40, 9)
    assert body["lastUpdatedTime"].endswith("Z")
