"""The slow disk of the checkpoint benchmark: it takes files, is limited, and nothing of it stays."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import checkpoint, slow_disk


def _loop_devices() -> str:
    return subprocess.run(["losetup", "--list"], capture_output=True, text=True).stdout


@pytest.mark.skipif(bool(slow_disk.obstacle()), reason=slow_disk.obstacle())
def test_it_takes_files_and_is_gone_afterwards_with_its_limit(tmp_path: Path) -> None:
    before = slow_disk.THROTTLE.read_text()

    def use() -> None:
        with slow_disk.slow_disk(tmp_path, 50_000_000, 64 << 20) as place:
            assert str(tmp_path) in _loop_devices()
            assert " 50000000\n" in slow_disk.THROTTLE.read_text()
            (place / "file").write_bytes(b"content")
            raise KeyError("whatever happens inside")

    with pytest.raises(KeyError):
        use()
    assert str(tmp_path) not in _loop_devices()
    assert slow_disk.THROTTLE.read_text() == before
    assert not list(tmp_path.iterdir())


def test_where_there_can_be_none_the_benchmark_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow_disk, "obstacle", lambda: "a slow disk needs Linux and root")
    assert checkpoint.main(["--disk", "125"]) == 2
    assert "--disk 125.0: a slow disk needs Linux and root" in capsys.readouterr().out
