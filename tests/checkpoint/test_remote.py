"""Checkpoints on fsspec's memory file system and on an S3 server of loopback: saved, resumed, inspected, exported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise.checkpoint.catalog import checkpoints, complete, read_manifest
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.inspect import list_checkpoints
from shardwise.checkpoint.manifest import FILE, OWNER
from shardwise.checkpoint.remote import RemoteStore
from shardwise.checkpoint.save import claim
from shardwise.checkpoint.stores import Store, open_store, split
from shardwise.checkpoint.verification import verify_files
from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.observe.metrics import read_metrics
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.trainer import train_rank
from tests.checkpoint.made import save_steps
from tests.parity.jobs import make_job
from tests.s3 import BUCKET, SECRET

NEWEST = "step-00000004"


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://runs/one"
    fsspec.filesystem("memory").store.clear()


def a_job(corpora: Path, output: Path, directory: str, **checkpoint: Any) -> Job:
    observe = {"tensorboard": False, "sample": False}
    settings = {"every": 2, "directory": directory, **checkpoint}
    training = {"steps": 4, "sequences_per_step": 8, "evaluate_batches": 1}
    job = make_job(corpora, "gpt2", layers=1, training=training, checkpoint=settings, observe=observe)
    return job.model_copy(update={"output": str(output)})


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(output / "metrics.jsonl") if "loss" in record]


def train_twice(job: Job, exported: Path) -> dict[str, Any]:
    """Train, lose the newest checkpoint, go on from the one before; what is there then. Run on every rank."""
    output, first = Path(job.output), dist.get_rank() == 0
    if first:
        output.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    train_rank(job, torch.device("cpu"))
    undisturbed, store = losses(output) if first else [], open_store(str(job.checkpoint.directory))
    if first:
        store.remove(NEWEST)
        (output / "model").rename(output / "undisturbed")
    dist.barrier()
    train_rank(
        job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})}), torch.device("cpu")
    )
    if not first:
        return {}
    root, found = list_checkpoints(store.root)
    return {
        "undisturbed": undisturbed,
        "losses": losses(output),
        "root": root,
        "found": found,
        "damages": [report.damages for report in verify_files(store, NEWEST)],
        "exported": export_checkpoint(store.root, exported),
        "manifest": store.read(NEWEST, FILE),
        "files": sorted(store.sizes(NEWEST)),
    }


def check(result: dict[str, Any], job: Job, ranks: int) -> None:
    assert result["losses"] == result["undisturbed"] and len(result["losses"]) == 4
    assert [(each.name, each.problem, each.ranks) for each in result["found"]] == [
        ("step-00000002", None, ranks),
        (NEWEST, None, ranks),
    ]
    assert result["root"] == job.checkpoint.directory
    assert result["damages"] == [[]] * ranks
    assert result["files"] == [FILE, *(f"rank-{rank:05d}.safetensors" for rank in range(ranks))]
    trained, exported = (
        load_file(path / "model.safetensors") for path in (Path(job.output) / "model", result["exported"])
    )
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)


def test_memory_file_system(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run", f"memory://{tmp_path.name}")
    check(world_pool.run(1, train_twice, job, tmp_path / "exported")[0], job, 1)


def test_s3(world_pool: WorldPool, corpora: Path, tmp_path: Path, s3: str) -> None:
    job = a_job(corpora, tmp_path / "run", s3)
    result = world_pool.run(2, train_twice, job, tmp_path / "exported")[0]
    check(result, job, 2)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in [*written, result["manifest"]])
    store = open_store(s3)
    assert sorted(fsspec.filesystem("s3").ls(s3.removeprefix("s3://"))) == [
        f"{BUCKET}/runs/one/{name}" for name in (OWNER, "step-00000002", NEWEST)
    ]
    store.remove(NEWEST)
    assert checkpoints(store) == ["step-00000002"]


def save_again(job: Job, path: str) -> list[dict[str, int]]:
    """Save a step, fail to save it again, and save it once more; the files after each. Run on every rank."""
    store, found, real = open_store(path), list[dict[str, int]](), RemoteStore.commit

    def fails(store: RemoteStore, name: str, manifest: bytes) -> None:
        raise OSError("out of reach")

    for commit in (real, fails, real):
        with pytest.MonkeyPatch.context() as patch, suppress(CheckpointError):
            patch.setattr(RemoteStore, "commit", commit)
            save_steps(job, [4])
        dist.barrier()
        read_manifest(store, NEWEST)
        assert [report.damages for report in verify_files(store, NEWEST)] == [[]] * dist.get_world_size()
        found.append(store.sizes(NEWEST))
        dist.barrier()
    return found


def test_a_complete_checkpoint_stays_until_its_step_is_saved_again(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, s3: str
) -> None:
    first, failed, last = world_pool.run(2, save_again, a_job(corpora, tmp_path / "run", s3), s3)[0]
    assert sorted(first) == [FILE, "rank-00000.safetensors", "rank-00001.safetensors"]
    assert first.items() < failed.items()
    assert sorted(last) == [FILE, "rank-00000-3.safetensors", "rank-00001-3.safetensors"]


def save_while_the_owner_is_out_of_reach(job: Job) -> str:
    """Run on every rank: what is said when the fence cannot be looked at."""
    calls, real = iter([True]), RemoteStore.owner

    def owner(store: RemoteStore) -> str:
        if next(calls, False):  # at the claim
            return real(store)
        raise PermissionError("access denied")

    RemoteStore.owner = owner  # type: ignore[method-assign]
    try:
        save_steps(job, [1])
    except CheckpointError as error:
        return str(error)
    finally:
        RemoteStore.owner = real  # type: ignore[method-assign]
    return ""


def test_a_store_out_of_reach_is_not_called_another_run(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run", f"memory://{tmp_path.name}")
    said = world_pool.run(1, save_while_the_owner_is_out_of_reach, job)[0]
    assert "access denied" in said and "another run" not in said


# --- the store alone -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(request.getfixturevalue(request.param))


def written(store: Store, name: str, *files: str) -> None:
    store.begin(name)
    for file in files:
        with store.create(name, file) as handle:
            handle.write(file.encode())


def test_a_file_that_fails_is_not_there(store: Store) -> None:
    store.claim("somebody")
    written(store, NEWEST, "rank-00000.safetensors")
    with pytest.raises(ZeroDivisionError), store.create(NEWEST, "rank-00001.safetensors") as handle:
        handle.write(b"half of it")
        raise ZeroDivisionError
    assert store.owner() == "somebody"
    assert store.names() == [NEWEST]
    with pytest.raises(CheckpointError, match=r"no manifest.json"):
        read_manifest(store, NEWEST)
    assert list(complete(store)) == []
    assert list_checkpoints(store.root)[1][0].problem is not None


def test_begin_clears_what_a_killed_run_left(store: Store) -> None:
    written(store, NEWEST, "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors")
    written(store, NEWEST, "rank-00000.safetensors")
    store.commit(NEWEST, b"{}")
    assert store.sizes(NEWEST) == {"rank-00000.safetensors": 22, FILE: 2}
    store.abandon(NEWEST)  # of what was committed nothing is abandoned
    assert store.read(NEWEST, FILE) == b"{}"
    store.remove(NEWEST)
    store.remove(NEWEST)
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.sizes(NEWEST)


def test_listings_are_never_old(store: Store) -> None:
    written(store, NEWEST, "a")
    assert store.names() == [NEWEST] and store.sizes(NEWEST) == {"a": 1}
    other = open_store(store.root)
    other._system = type(other._system)(skip_instance_cache=True)  # type: ignore[attr-defined]  # another process's
    with other.create(NEWEST, "b") as handle:
        handle.write(b"bb")
    assert store.sizes(NEWEST) == {"a": 1, "b": 2}
    store.abandon(NEWEST)
    assert other.names() == []


def test_reads_are_seekable(store: Store) -> None:
    with store.create("x", "file") as handle:
        handle.write(bytes(range(200)))
    file: Any = store.open("x", "file")
    target = bytearray(10)
    file.seek(100)
    assert file.readinto(memoryview(target)) == 10 and target == bytes(range(100, 110))
    file.close()
    with pytest.raises(OSError):
        store.open("x", "none")


def _claim(root: str) -> None:
    claim(open_store(root))


def test_a_bucket_that_is_not_there_is_not_made(world_pool: WorldPool, s3: str) -> None:
    with pytest.raises(WorldError, match=r"checkpoint.directory='s3://shardwise-tset/run' cannot be written"):
        world_pool.run(1, _claim, "s3://shardwise-tset/run")
    assert fsspec.filesystem("s3").ls("", refresh=True) == [BUCKET]
    assert open_store("s3://shardwise-tset/run").names() == []


def test_an_unreachable_server_is_an_os_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store: Any = open_store(s3)
    store._system = type(store._system)(
        skip_instance_cache=True, endpoint_url="http://127.0.0.1:9", config_kwargs={"connect_timeout": 2}
    )
    with pytest.raises(OSError):
        store.read(NEWEST, FILE)


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3x://bucket/run", r"fsspec knows no scheme 's3x'\. Did you mean 's3'\?"),
        ("gs://bucket/run", r"pip install 'shardwise\[gcs\]'"),
        ("s3://bucket/run", r"pip install 'shardwise\[s3\]'"),
        ("abfs://bucket/run", "adlfs"),
    ],
)
def test_a_scheme_that_is_not_there_is_named(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gcsfs", "s3fs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for scheme in ("gs", "s3", "abfs"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    with pytest.raises(CheckpointError, match=says):
        open_store(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(CheckpointError, match="holds a password") as caught:
        open_store("sftp://me:hunter2@host/runs")
    assert "hunter2" not in str(caught.value)
    assert open_store("memory://bucket@host/run").root == "memory://bucket@host/run"


@pytest.mark.parametrize(
    ("path", "root", "name"),
    [
        ("run/checkpoints/step-1", "run/checkpoints", "step-1"),
        ("/step-1/", "/", "step-1"),
        ("step-1", ".", "step-1"),
        ("s3://bucket/run/step-1/", "s3://bucket/run", "step-1"),
        ("memory://step-1", "memory://", "step-1"),
    ],
)
def test_split(path: str, root: str, name: str) -> None:
    assert split(path) == (root, name)
