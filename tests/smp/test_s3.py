"""Version 2's checkpoint functions in S3, on a server of loopback; the names by which scripts take addresses apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.v2.distributed.checkpoint import s3_filesystem
from shardwise.smp.v2.distributed.checkpoint.filesystem import DistributedFileSystemWriter, path_to_file_system
from shardwise.smp.v2.distributed.checkpoint.metadata import FILE
from shardwise.smp.v2.distributed.checkpoint.s3_filesystem import (
    S3FileSystem,
    format_s3_path,
    get_s3_region_from_uri,
    is_s3_uri,
    parse_s3_uri,
    retry_with_jitter,
)
from shardwise.smp.v2.distributed.checkpoint.state_dict_loader import load
from shardwise.smp.v2.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values() -> dict[str, Any]:
    return {"weight": torch.arange(12.0).view(3, 4), "step": 7}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [save, async_save])
def test_what_is_saved_in_s3_is_loaded_again(s3: str, alone: None, kind: Any) -> None:
    saved = values()
    kind(saved, checkpoint_id=f"{s3}/tp0", s3_region="us-east-1")
    if kind is async_save:
        saved["weight"].zero_()  # training goes on
        maybe_finalize_async_calls(blocking=True)
    names = {Path(name).name for name in fsspec.filesystem("s3").ls(f"{s3}/tp0", detail=False, refresh=True)}
    assert {FILE, "__0_0.distcp"} <= names
    found = {"weight": torch.zeros(3, 4), "step": 0}
    load(found, checkpoint_id=f"{s3}/tp0", s3_region="us-east-1", s3client_config=SimpleNamespace(part_size=5 * 2**20))
    assert torch.equal(found["weight"], values()["weight"]) and found["step"] == 7


def test_a_save_that_fails_on_the_way_leaves_no_checkpoint(s3: str, alone: None) -> None:
    def refuse(writer: DistributedFileSystemWriter) -> None:
        raise OSError("no more")

    writer = DistributedFileSystemWriter(f"{s3}/broken", post_write_hooks=[refuse])
    with pytest.raises(CheckpointError, match="broken cannot be written: no more"):
        save(values(), storage_writer=writer)
    with pytest.raises(CheckpointError, match=r"broken cannot be loaded: .* cannot be read"):
        load(values(), checkpoint_id=f"{s3}/broken")


def test_a_stream_that_breaks_off_leaves_no_file(s3: str) -> None:
    files = path_to_file_system(s3)
    with pytest.raises(RuntimeError, match="half"), files.create_stream(f"{s3}/half", "wb") as stream:
        stream.write(b"x" * 100)
        raise RuntimeError("half")
    assert not files.exists(f"{s3}/half")


def test_a_bucket_that_is_not_there_is_named(s3: str, alone: None) -> None:
    with pytest.raises(CheckpointError, match=r"s3://shardwise-missing/one cannot be written: .*(?i:bucket)"):
        save(values(), checkpoint_id="s3://shardwise-missing/one")
    assert "shardwise-missing" not in fsspec.filesystem("s3").ls("", refresh=True)


def test_hooks_get_the_writer_and_write_beside_the_checkpoint(s3: str, tmp_path: Path, alone: None) -> None:
    """As an adapter does that keeps each node's checkpoints: a file of its own beside the data, found by listing."""

    def note(writer: Any) -> None:
        assert writer.is_coordinator
        with writer.fs.create_stream(writer.fs.concat_path(writer.path, ".local.metadata"), "wb") as stream:
            torch.save({"step": 3}, stream)

    for root in (s3, tmp_path):
        started: list[Any] = []
        writer = DistributedFileSystemWriter(
            os.path.join(root, "tp0_fsdp0"), pre_write_hooks=[started.append], post_write_hooks=[note]
        )
        save(values(), storage_writer=writer)
        assert started == [writer]
        files = path_to_file_system(root)
        with files.create_stream(files.concat_path(files.concat_path(root, "tp0_fsdp0"), ".local.metadata"), "rb") as f:
            assert torch.load(f, weights_only=True) == {"step": 3}
    remote = path_to_file_system(s3)
    assert isinstance(remote, S3FileSystem) and not isinstance(path_to_file_system(tmp_path), S3FileSystem)
    assert [f"s3://{name}" for name in remote.fs.listdir(s3, detail=False)] == [f"{s3}/tp0_fsdp0"]


def test_files_are_moved_and_removed(s3: str) -> None:
    files = path_to_file_system(s3)
    with files.create_stream(f"{s3}/one", "wb") as stream:
        stream.write(b"one")
    files.rename(f"{s3}/one", f"{s3}/two")
    assert files.exists(f"{s3}/two") and not files.exists(f"{s3}/one")
    files.rm_file(f"{s3}/two")
    assert not files.exists(f"{s3}/two")


def test_addresses(s3: str) -> None:
    collapsed = Path("s3://bucket/a/b")  # pathlib leaves one slash
    assert is_s3_uri("s3://bucket") and is_s3_uri(collapsed) and not is_s3_uri("/s3/bucket")
    assert format_s3_path(collapsed) == "s3://bucket/a/b" and format_s3_path("s3://bucket") == "s3://bucket"
    assert parse_s3_uri(collapsed) == ("bucket", "a/b") and parse_s3_uri("s3://bucket") == ("bucket", "")
    assert get_s3_region_from_uri(s3) == "us-east-1"
    with pytest.raises(ConfigError, match="BUCKET/KEY"):
        parse_s3_uri("bucket/a")
    with pytest.raises(ConfigError, match="gs://bucket/a is neither"):
        path_to_file_system("gs://bucket/a")


def test_settings_of_the_client() -> None:
    config = SimpleNamespace(part_size=8, max_attempts=2, profile="me", unsigned=True, force_path_style=True)
    assert S3FileSystem("eu-west-1", config)._settings == {
        "default_block_size": 8,
        "anon": True,
        "profile": "me",
        "config_kwargs": {"retries": {"max_attempts": 2}, "s3": {"addressing_style": "path"}},
        "client_kwargs": {"region_name": "eu-west-1"},
    }
    assert S3FileSystem()._settings == {"default_block_size": 64 * 2**20}


def test_calls_again_after_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(s3_filesystem.time, "sleep", waited.append)

    class Reader:
        failures = 0

        @retry_with_jitter
        @staticmethod
        def twice(value: int) -> int:
            Reader.failures += 1
            if Reader.failures < 3:
                raise OSError("again")
            return value

        @staticmethod
        @retry_with_jitter
        def wrong() -> None:
            raise ValueError("once")

    assert Reader().twice(5) == 5 and 0.5 <= waited[0] <= 1 <= waited[1] <= 2
    with pytest.raises(ValueError, match="once"):
        Reader.wrong()
    assert len(waited) == 2
