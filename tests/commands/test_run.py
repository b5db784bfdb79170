"""How `shardwise run` starts a script: from the command line, and in a container of SageMaker that names one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.commands.cli import main
from shardwise.commands.run import run_in_container
from shardwise.sagemaker import container as containers
from shardwise.smp import script as scripts


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Scripts that would be started, each with the ranks that were asked for."""
    calls: list[Any] = []
    monkeypatch.setattr(scripts, "launch_script", lambda script, ranks, **more: calls.append((script, ranks, more)))
    monkeypatch.setattr(containers, "enter_container", lambda: None)
    monkeypatch.chdir(tmp_path)
    return calls


def test_directories_are_what_sagemaker_s_variables_name(
    started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--workers",
        "2",
        "--device",
        "cpu",
        "--model-dir",
        "m",
        "--channel",
        "train=data/train",
        "train.py",
        "--epochs",
        "3",
    ]
    assert main(["run", *words]) == 0
    ((script, ranks, _),) = started
    assert (script.path, list(script.arguments), ranks) == ("train.py", ["--epochs", "3"], 2)
    assert script.variables == {"SM_MODEL_DIR": "m", "SM_CHANNEL_TRAIN": "data/train"}
    for channel in ("train", "=data", "a-b=data", "train="):
        assert main(["run", "--channel", channel, "train.py"]) == 2
        assert f"--channel={channel} must be NAME=DIR" in capsys.readouterr().err
    assert len(started) == 1


def test_without_a_script_a_container_has_to_name_one(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert "no SCRIPT is given, and this is no SageMaker container whose job names one" in capsys.readouterr().err
    assert not started


def made_container(tmp_path: Path, **changes: Any) -> Any:
    """Return a container with a directory of code."""
    (tmp_path / "code").mkdir()
    done: list[str] = []
    given = {
        "code": tmp_path / "code", "script": Path("train.py"), "command": None, "is_distributed": False, "done": done,
        "has_script": True, "arguments": lambda: ["--epochs", "3"],
        "install_requirements": lambda: done.append("requirements"), "run_command": lambda: done.append("command"),
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


@pytest.mark.parametrize(("is_distributed", "ranks"), [(False, 1), (True, None)])
def test_a_container_starts_its_script_where_its_code_lies(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_distributed: bool, ranks: int | None
) -> None:
    made = made_container(tmp_path, is_distributed=is_distributed)
    monkeypatch.setattr(containers, "enter_container", lambda: made)
    assert main(["run"]) == 0
    ((script, given_ranks, more),) = started
    assert (script.path, list(script.arguments), given_ranks) == ("train.py", ["--epochs", "3"], ranks)
    assert more == {"is_joined": is_distributed} and made.done == ["requirements"]
    assert Path.cwd() == tmp_path / "code"


def test_a_command_runs_in_the_place_of_a_script(started: list[Any], tmp_path: Path) -> None:
    made = made_container(tmp_path, command="echo")
    assert run_in_container(made) == 0
    assert made.done == ["requirements", "command"] and not started
