"""Of several hosts the first says where all ranks are."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.launch.test_host_runs import KEYS, run_hosts

HERE = Path(__file__).parent
WATCHED = [
    "--training.steps", "12", "--training.callbacks", "[late_rank:LateRank]", "--observe.hang_seconds", "1.5",
    "--observe.hang_medians", "5",
]  # fmt: skip


@pytest.mark.slow
def test_a_rank_of_another_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 300)
    steps = KEYS.index("--training.steps")
    keys = [*KEYS[:steps], *KEYS[steps + 2 :], *WATCHED, "--data.path", str(corpus)]
    ended = run_hosts(tmp_path, 2, 2, "train", *keys, "--output", str(tmp_path / "out"))
    assert [code for code, _ in ended] == [0, 0], ended
    place = r"callback late_rank:LateRank\.on_step_begin \(late_rank\.py:\d+ in on_step_begin\)"
    said = r"note: step 9 has taken \d+ s.*: "
    assert re.search(rf"{said}rank 3 \(host-1\) is in {place} since \d+ s, the others wait in all_reduce", ended[0][1])
    assert "has taken" not in ended[1][1]
    assert ended[0][1].count("has taken") <= 3
