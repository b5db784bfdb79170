"""An S3 server of this process on loopback, for the tests that write to a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SECRET = "not-to-be-found-anywhere"
BUCKET = "shardwise-test"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server of this process, with one bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket; botocore reads the rest from the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import fsspec

    system = fsspec.filesystem("s3")
    system.mkdir(BUCKET)
    yield f"s3://{BUCKET}/runs/one"
    system.rm(BUCKET, recursive=True)
