"""Output directories: whose they are, and what a later version may still go on from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint.load import check_data, check_sample_length
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError, OutputError
from shardwise.job.schema import Job
from shardwise.training import output
from shardwise.training.output import check_output

FACTS = {"corpus": "text: here", "content": "abc", "order": "seed 0, 12 sequences"}


def directory_of(path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an earlier version: its run.json, and a checkpoint whose job lacks the keys that came later."""
    (path / "metrics.jsonl").touch()
    (path / "run.json").write_text(json.dumps({"job_fingerprint": "of an earlier version"}))
    monkeypatch.setattr(output, "complete", lambda store: iter([("step-00000002", SimpleNamespace(job=job))]))


def earlier(**model: Any) -> dict[str, Any]:
    job = Job().model_dump(mode="json")
    del job["data"]["validation_split"]
    job["optimizer"]["warmup_steps"] = 0
    return job | {"model": job["model"] | model}


@pytest.mark.parametrize("split", ["auto", "place"])
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    directory_of(tmp_path, earlier(), monkeypatch)
    check_output(Job(output=str(tmp_path), checkpoint={"resume": "auto"}, data={"validation_split": split}))


def test_a_run_goes_on_with_what_no_number_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_of(tmp_path, earlier(), monkeypatch)
    data = {"path": str(tmp_path), "cache_directory": "elsewhere"}  # the tokens are compared when it is read
    model = {"compile": True, "attention": "eager"}
    check_output(Job(output=str(tmp_path), checkpoint={"resume": "auto"}, data=data, model=model))
    stream = {"streaming": True, "num_workers": 1, "cache_limit": 1 << 20, "on_bad_files": "skip"}
    directory_of(tmp_path, {**earlier(), "data": {**earlier()["data"], "streaming": True}}, monkeypatch)
    check_output(Job(output=str(tmp_path), checkpoint={"resume": "auto"}, data=stream))


def test_a_run_may_go_on_with_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint says which may differ, and `checkpoint.change_sources` whether."""
    directory_of(tmp_path, earlier(), monkeypatch)
    sources = {"sources": [{"path": "elsewhere/a.jsonl", "weight": 2.0}], "curriculum": [{"samples": 9, "weights": {}}]}
    check_output(Job(output=str(tmp_path), checkpoint={"resume": "auto", "change_sources": True}, data=sources))


def test_what_has_changed_is_named_with_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_of(tmp_path, earlier(), monkeypatch)
    with pytest.raises(OutputError) as refused:
        check_output(
            Job(
                output=str(tmp_path), checkpoint={"resume": "auto"}, model={"dropout": 0.5}, data={"sequence_length": 8}
            )
        )
    assert "model.dropout was None, is 0.5, data.sequence_length was 256, is 8;" in str(refused.value)
    assert (
        f"start anew with --output NEW_DIRECTORY; with --checkpoint.resume {tmp_path}/checkpoints/step-00000002 "
        in (str(refused.value))
    )


def test_another_models_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_of(tmp_path, earlier(factory="a:b"), monkeypatch)
    with pytest.raises(OutputError, match="another job"):
        check_output(Job(output=str(tmp_path), checkpoint={"resume": "auto"}))


def test_a_checkpoint_of_an_earlier_version_keeps_its_split() -> None:
    manifest = Manifest.model_construct(data=FACTS)
    check_data(manifest, FACTS | {"split": "place"}, "step-00000002")
    with pytest.raises(CheckpointError, match=r"held out by place.*by documents.*set data\.validation_split to place"):
        check_data(manifest, FACTS | {"split": "documents"}, "step-00000002")


def test_a_checkpoint_of_an_earlier_version_goes_on_with_rows_of_files() -> None:
    """It does not say which rows they were; a factory's samples never do, and are no rows of files."""
    rows = FACTS | {"corpus": "data.path='rows.jsonl'", "content": None, "split": "place"}
    check_data(Manifest.model_construct(data=rows), rows | {"content": "abc"}, "step-00000002")
    with pytest.raises(CheckpointError, match="on other data"):
        check_data(Manifest.model_construct(data=rows), rows | {"order": "seed 1"}, "step-00000002")
    factory = rows | {"corpus": "data.factory='a:b'"}
    with pytest.raises(CheckpointError, match="on other data"):
        check_data(Manifest.model_construct(data=factory), rows | {"content": "abc"}, "step-00000002")


def test_other_data_is_refused_with_the_keys_that_differ() -> None:
    manifest = Manifest.model_construct(data=FACTS)
    changes = ["data.field was 'text' in the checkpoint, is 'body' now"]
    with pytest.raises(
        CheckpointError, match=r"on other data: data\.field was 'text' .* is 'body' now \(text: here: abc"
    ):
        check_data(manifest, FACTS | {"content": "def"}, "step-00000002", changes)


def test_a_stream_goes_on_with_samples_of_the_same_length() -> None:
    stream, job = {"shards": {"a.jsonl": "9 1"}}, {"data": {"sequence_length": 32}}
    mixture = {"sources": {"a": stream, "b": {"sequences": 9}}}
    for facts, now in ((stream, stream), (mixture, mixture)):
        manifest = Manifest.model_construct(data=facts, job=job)
        check_sample_length(manifest, 32, now, "step")
        with pytest.raises(CheckpointError, match=r"=32, the job has 64 .* set data.sequence_length to 32"):
            check_sample_length(manifest, 64, now, "step")
    manifest = Manifest.model_construct(data=mixture, job=job)
    check_sample_length(manifest, 64, {"sources": {"c": stream, "b": {"sequences": 9}}}, "step")  # a new stream
    check_sample_length(Manifest.model_construct(data=stream, job={}), 64, stream, "step")  # it does not say


@pytest.mark.parametrize("is_claimed", [False, True])
def test_launchers_of_hosts_do_not_make_a_directory_somebodys(tmp_path: Path, is_claimed: bool) -> None:
    """One comes before the first host has claimed the directory, or was killed before its run began."""
    for name in (".launcher-host1.json", output.LOCK_FILE, "run.json.new"):
        (tmp_path / name).touch()
    if is_claimed:  # by a job that came to nothing
        output.write_run(tmp_path, {"job_fingerprint": "another"})
    job = Job.model_validate({"output": str(tmp_path)})
    output.claim_output(job).release()
    assert json.loads((tmp_path / "run.json").read_text())["job_fingerprint"] == output.job_fingerprint(job)
    (tmp_path / "mine.txt").touch()
    (tmp_path / "run.json").unlink()
    with pytest.raises(OutputError, match="holds files that are not a run of shardwise"):
        check_output(job)
