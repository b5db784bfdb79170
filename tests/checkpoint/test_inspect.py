"""`shardwise checkpoint ls | show | verify`: what is there, what is in it, and which file is damaged where."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shardwise.checkpoint import inspect
from shardwise.checkpoint.catalog import find, read_manifest
from shardwise.checkpoint.inspect import list_checkpoints, run_ls, run_show
from shardwise.checkpoint.manifest import BLOCK_BYTES, FILE, seal
from shardwise.checkpoint.stores import open_store
from shardwise.checkpoint.verification import verify_checkpoint, verify_files
from shardwise.commands.cli import main
from shardwise.errors import CheckpointError
from shardwise.testing.world import WorldPool
from tests.checkpoint.made import save_steps
from tests.parity.jobs import make_job

NEWEST = "step-00000020"
SHARD = "rank-00001.safetensors"


@pytest.fixture(scope="module")
def run(world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of two ranks with steps 10 and 20, files of several blocks."""
    directory = tmp_path_factory.mktemp("inspect") / "run"
    job = make_job(corpora, "gpt2", layers=1)
    wide = (job.model.config or {}) | {"vocab_size": 30_000}
    job = job.model_copy(update={"output": str(directory), "model": job.model.model_copy(update={"config": wide})})
    world_pool.run(2, save_steps, job, [10, 20])
    return directory


@pytest.fixture
def place(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints that may be damaged."""
    return Path(shutil.copytree(run / "checkpoints", tmp_path / "checkpoints"))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 4]))


# --- ls --------------------------------------------------------------------------------------------------------------


def test_ls_says_what_is_there_and_why_it_is_not_complete(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / NEWEST, place / "step-00000030")
    os.truncate(place / "step-00000030" / SHARD, 1000)
    shutil.copytree(place / NEWEST, place / "step-00000040", ignore=shutil.ignore_patterns(FILE))
    (place / ".step-00000050.partial").mkdir()
    (place / "something else").mkdir()
    assert run_ls(str(place), as_json=False) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip().startswith("step-")}
    assert lines["step-00000010"][1:4] == ["10", "80", "1,280"]
    assert lines[NEWEST][1:5] == ["20", "160", "2,560", "3.2500"] and lines[NEWEST][7] == "2"
    assert all(lines[f"step-000000{step}"][-1] == "incomplete" for step in (30, 50))
    size = (place / NEWEST / SHARD).stat().st_size
    assert f"step-00000030: {SHARD} has 1000 of {size} bytes; it holds" in shown
    assert "step-00000040: is not a complete checkpoint: it has no manifest.json" in shown
    assert ".step-00000050.partial: it is being written, or was when its run was killed" in shown
    assert "something else" not in shown


def test_ls_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ls(str(run), as_json=True) == 0  # the run's output directory
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["complete"], each["step"], each["validation_loss"]) for each in found] == [
        ("step-00000010", True, 10, None),
        (NEWEST, True, 20, 3.25),
    ]
    assert found[0]["ranks"] == 2 and found[0]["written"].endswith("+00:00")
    assert found[0]["bytes"] == sum(f.stat().st_size for f in (run / "checkpoints/step-00000010").glob("rank-*"))


def test_ls_of_one_checkpoint_and_of_none(run: Path, tmp_path: Path) -> None:
    assert [each.name for each in list_checkpoints(f"{run}/checkpoints/{NEWEST}/")[1]] == [NEWEST]
    with pytest.raises(CheckpointError, match="holds no checkpoints; give a checkpoint, the directory"):
        list_checkpoints(str(tmp_path))


def test_a_run_that_keeps_its_checkpoints_elsewhere(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "run.json").write_text(json.dumps({"job": {"checkpoint": {"directory": str(place)}}}))
    assert list_checkpoints(str(output))[0] == str(place)
    for broken in ("{", "[]", '{"job": {"checkpoint": {"directory": 3}}}'):
        (output / "run.json").write_text(broken)
        with pytest.raises(CheckpointError, match="holds no checkpoints"):
            list_checkpoints(str(output))


def test_a_renamed_checkpoint_is_found_by_its_manifest(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / NEWEST).rename(place / "good one")
    store, name = find(str(place / "good one"))
    assert (name, read_manifest(store, name).progress.step) == ("good one", 20)
    monkeypatch.chdir(place)
    assert find("good one")[1] == "good one"
    assert find(".")[1] == "step-00000010"


# --- show ------------------------------------------------------------------------------------------------------------


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    assert run_show(str(run), every_tensor=False, as_json=False, say=said.append) == 0
    shown = capsys.readouterr().out
    assert said == [f"the newest complete checkpoint of {run}/checkpoints is {NEWEST}"]
    for words in (
        "20: 160 samples, 2,560 tokens",
        "3.2500",
        "GPT2LMHeadModel",
        "ranks 2 (replica 1, shard 2",
        "AdamW",
        "transformer.wte.weight = lm_head.weight",
        "torch ",
        "30000 x 26",
    ):
        assert words in shown
    tensors = read_manifest(open_store(f"{run}/checkpoints"), NEWEST).tensors
    assert f"the 10 largest of {len(tensors)} tensors" in shown
    rows = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.startswith("│")}
    assert rows.keys() >= {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "random"}
    count = sum(name.startswith("model/") for name in tensors)
    assert rows["model"].split("│")[2].strip() == rows["optimizer/exp_avg"].split("│")[2].strip() == str(count)


def test_show_every_tensor(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_show(f"{run}/checkpoints/step-00000010", every_tensor=True, as_json=False, say=print)
    shown = capsys.readouterr().out
    assert all(name in shown for name in read_manifest(open_store(f"{run}/checkpoints"), NEWEST).tensors)
    assert "largest" not in shown


def test_show_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_show(f"{run}/checkpoints/{NEWEST}", every_tensor=False, as_json=True, say=print)
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["ranks"], found["optimizer"]) == (20, 2, "AdamW")
    rows = {row["name"]: row for row in found["tensors"]}
    row = rows["model/transformer.wte.weight"]
    assert (row["dtype"], row["shape"], row["bytes"]) == ("F64", [30_000, 26], 30_000 * 26 * 8)
    assert [part["shape"] for part in row["slices"]] == [[15_000, 26]] * 2
    assert sum(found["files"].values()) == found["bytes"]


def test_what_looks_like_markup_is_shown_as_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((place / NEWEST / FILE).read_text())
    del manifest["hash"]
    manifest |= {"written": "[/red]", "optimizer": "[/b]"}
    manifest["config"]["architectures"] = 7  # which is no list of names
    manifest["tensors"]["[/i]/x"] = {"dtype": "F32", "shape": [0], "slices": []}
    (place / NEWEST / FILE).write_bytes(seal(json.dumps(manifest).encode()))
    assert run_ls(str(place), as_json=False) == 0
    assert run_show(str(place), every_tensor=True, as_json=False, say=print) == 0
    shown = capsys.readouterr().out
    assert "gpt2" in shown and shown.count("[/red]") == 2 and "[/b]" in shown and "[/i]/x" in shown


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_is_content_with_what_was_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_checkpoint(str(run), say=print) == 0
    assert "every block is as it was written" in capsys.readouterr().out


def test_verify_looks_at_every_file_and_block(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = place / NEWEST
    flip(checkpoint / "rank-00000.safetensors", 40)  # its header
    flip(checkpoint / SHARD, BLOCK_BYTES + 9)
    size = (checkpoint / SHARD).stat().st_size
    assert size > 2 * BLOCK_BYTES
    flip(checkpoint / SHARD, size - 1)
    assert verify_checkpoint(str(checkpoint), say=print) == 1
    shown = capsys.readouterr().out
    assert f"other bytes than were written at {BLOCK_BYTES} to {min(2 * BLOCK_BYTES, size)}" in shown
    assert "2 of 2 files damaged" in shown
    reports = {report.name: report for report in verify_files(open_store(str(place)), NEWEST)}
    assert len(reports["rank-00000.safetensors"].damages) == 1 and len(reports[SHARD].damages) == 2
    manifest = read_manifest(open_store(str(place)), NEWEST)
    last = manifest.tensors_at(SHARD, size - 1, size)
    assert set(last) <= set(reports[SHARD].tensors) and last
    assert f"{SHARD} is damaged there; it holds {reports[SHARD].tensors[0]}" in shown


@pytest.mark.parametrize("kept", [0, 100, BLOCK_BYTES, BLOCK_BYTES + 100])
def test_verify_names_what_a_truncated_file_held(place: Path, kept: int) -> None:
    file = place / NEWEST / SHARD
    size = file.stat().st_size
    os.truncate(file, kept)
    report = verify_files(open_store(str(place)), NEWEST)[1]
    assert report.damages == [f"has {kept} of {size} bytes"]
    manifest = read_manifest(open_store(str(place)), "step-00000010")
    assert report.tensors == manifest.tensors_at(SHARD, kept, size)


def test_verify_goes_on_behind_a_file_that_is_not_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / NEWEST / "rank-00000.safetensors").unlink()
    assert verify_checkpoint(str(place / NEWEST), say=print) == 1
    shown = capsys.readouterr().out
    assert "is missing" in shown and "1 of 2 files damaged" in shown
    flip(place / NEWEST / SHARD, 5000)
    assert [len(each.damages) for each in verify_files(open_store(str(place)), NEWEST)] == [1, 1]


@pytest.mark.parametrize("at", [700, 3, 60, 75])  # among them its hash, and the words "format" and "version"
def test_a_damaged_manifest_is_damage(place: Path, capsys: pytest.CaptureFixture[str], at: int) -> None:
    flip(place / NEWEST / FILE, at)
    assert main(["checkpoint", "verify", str(place / NEWEST)]) == 1
    shown = capsys.readouterr().out
    assert "is damaged" in shown and "1 of 1 files damaged" in shown and FILE in shown


def test_verify_of_what_is_no_checkpoint_is_a_mistake(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / NEWEST / FILE).unlink()
    assert main(["checkpoint", "verify", str(place / NEWEST)]) == 2
    assert "it has no manifest.json" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(place / "nowhere")]) == 2
    assert "nowhere holds no checkpoints" in capsys.readouterr().err
    (place / NEWEST / FILE).write_text('{"format": "of something else"}')
    assert main(["checkpoint", "verify", str(place / NEWEST)]) == 2


def test_of_several_the_newest_is_verified_damaged_or_not(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(place / NEWEST / SHARD, 1000)
    shutil.copytree(place / NEWEST, place / "step-00000040", ignore=shutil.ignore_patterns(FILE))
    assert main(["checkpoint", "verify", str(place)]) == 1
    shown = capsys.readouterr()
    assert "has 1000 of" in shown.out and NEWEST in shown.out and "step-00000040 is passed over" in shown.err
    flip(place / NEWEST / FILE, 700)
    assert main(["checkpoint", "verify", str(place)]) == 1
    assert FILE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072.0 TiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert inspect.size_text(size) == text
