"""Hangs that are planted in a run of four ranks are each named rightly, and healthy runs are not."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.collectives.rank_record import RankRecord, WorkUnit
from shardwise.launch.watch.announced import SUFFIX, AnnouncedRank
from shardwise.launch.watch.watcher import Watcher, WatchSettings
from tests.parity.jobs import write_tokens

HERE = Path(__file__).parent
CONFIG = "{model_type: gpt2, n_embd: 26, n_head: 2, n_layer: 3, n_inner: 13, n_positions: 16, vocab_size: 97}"
JOB = f"""
model: {{config: {CONFIG}}}
data: {{path: TOKENS, format: tokens, sequence_length: 16}}
training: {{steps: 42, sequences_per_step: 8, callbacks: ["planted:Planted"], evaluate_every: 36, evaluate_batches: 2}}
parallel: {{workers: 4, device: cpu, ddp_dist_backend: gloo}}
checkpoint: {{every: 30, asynchronous: false}}
observe: {{tensorboard: false, sample: false, hang_seconds: 1.2, hang_medians: 5, log_every: 100}}
"""
HOOK = r"callback planted:Planted\.on_step_begin \(planted\.py:\d+ in "
WAIT = r"the others wait in \w+ of .*since"
EXPECTED = {  # what has taken long -> the sentence
    "step 7": rf"rank 2 is stopped \(SIGSTOP or a debugger\) in callback planted:Planted\.on_step_begin since.*{WAIT}",
    "step 10": rf"rank 1 is in {HOOK}waits_for_a_lock\).*{WAIT}",
    "step 13": rf"rank 3 is in {HOOK}computes_for_ever\).*{WAIT}",
    "step 16": rf"rank 2 is in {HOOK}holds_the_interpreter\).*{WAIT}",
    "step 19": rf"rank 3 is in data \(planted\.py:\d+ in dead_loader\).*{WAIT}",
    "step 22": rf"rank 2 is in forward \(planted\.py:\d+ in once\).*{WAIT}",
    "step 24": rf"rank 1 is in backward \(planted\.py:\d+ in once\).*{WAIT}",
    "step 26": rf"rank 3 is in optimizer \(planted\.py:\d+ in once\).*{WAIT}",
    "step 28": rf"rank 1 waits in barrier at planted\.py:\d+ since.*{WAIT}.*different collectives",
    "checkpoint.save after step 30": r"rank 1 is in checkpoint\.save \(planted\.py:\d+ in slow_disk\) since.*wait in",
    "evaluation after step 36": rf"rank 0 is in evaluation \(planted\.py:\d+ in once\).*{WAIT}",
    "step 40": r"all 4 ranks wait in all_reduce of the step's control message .*none of them is behind",
}


def planted_run(directory: Path) -> str:
    """Run the job to its end; return what the launcher has said."""
    write_tokens(directory)
    (directory / "job.yaml").write_text(JOB.replace("TOKENS", str(directory / "tokens.jsonl")))
    words = [sys.executable, "-m", "shardwise", "train", "job.yaml", "--output", "out"]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.slow
def test_planted_hangs_are_named(tmp_path: Path) -> None:
    said = planted_run(tmp_path)
    notes = re.findall(r"note: (.+?) has taken (\d+) s.*?: (.*)", said)
    for what, sentence in EXPECTED.items():
        told = [(int(seconds), text) for slow, seconds, text in notes if slow == what]
        assert told, f"nothing was said of {what}:\n{said}"
        assert re.search(sentence, told[0][1]), f"{what}: {told[0][1]}"
        threshold = 6 if "after" in what else 2
        assert told[0][0] <= threshold + 15
    assert {slow for slow, _, _ in notes} <= EXPECTED.keys(), said
    assert "planted.py" in (tmp_path / "out" / "stacks.txt").read_text()


@pytest.mark.slow
def test_healthy_runs_with_uneven_steps_are_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    draw = random.Random(5)
    for run in range(20):
        directory = tmp_path / str(run)
        directory.mkdir()
        records = [RankRecord(rank) for rank in range(4)]
        for rank, record in enumerate(records):
            announced = AnnouncedRank(rank, os.getpid(), record.path, record.path)
            text = json.dumps(vars(announced))
            (directory / f"rank-{rank}{SUFFIX}").write_text(text)
        watcher = Watcher(WatchSettings(seconds=0.15), lambda place=directory: place, say=said.append)  # type: ignore[misc]
        for step in range(60):
            for record in records:
                record.begin_unit(WorkUnit.STEP, step)
            end = time.monotonic() + min(0.1, draw.lognormvariate(-5.0, 1.0))
            while time.monotonic() < end:
                watcher.look()
    assert said == []
