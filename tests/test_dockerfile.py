"""The Dockerfile: its instructions are well formed, and its install steps install."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from shardwise.commands.versions import NEWEST_TESTED, is_newer

ROOT = Path(__file__).parents[1]
# What builds the image: https://docs.docker.com/reference/dockerfile
KEYWORDS = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD", "LABEL", "USER", "EXPOSE", "SHELL"}


class Instruction(NamedTuple):
    """A keyword and what stands behind it, continued lines joined."""

    keyword: str
    text: str


def instructions() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines()]


def arguments() -> dict[str, str]:
    pairs = [each.text.partition("=") for each in instructions() if each.keyword == "ARG"]
    return {name: value for name, _, value in pairs}


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file of the repository's root out: all but what it names with `!`."""
    lines = (ROOT / ".dockerignore").read_text().split()
    return lines[0] != "*" or f"!{path}" not in lines


def test_instructions_are_known_and_in_order() -> None:
    found = instructions()
    assert {each.keyword for each in found} <= KEYWORDS
    assert found[0].keyword == "FROM" and ":" in found[0].text and not found[0].text.endswith(":latest")
    assert [each.keyword for each in found[-2:]] == ["ENTRYPOINT", "CMD"]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = [word for each in instructions() if each.keyword == "COPY" for word in each.text.split()[:-1]]
    assert copied and [path for path in copied if not (ROOT / path).exists() or ignored(path)] == []
    assert "src" in copied and "pyproject.toml" in copied


def test_variables_are_declared_before_they_are_used() -> None:
    declared: set[str] = set()
    for keyword, text in instructions():
        assert set(re.findall(r"\$\{(\w+)\}", text)) <= declared
        if keyword in ("ARG", "ENV"):
            declared |= set(re.findall(r"(\w+)=", text))


def test_commands_are_in_the_form_that_hands_signals_on() -> None:
    started = {each.keyword: json.loads(each.text) for each in instructions() if each.keyword in ("ENTRYPOINT", "CMD")}
    assert started["ENTRYPOINT"] == ["tini", "--", "shardwise"] and started["CMD"] == ["--help"]


def test_layers_leave_no_caches_and_ask_nobody() -> None:
    for text in (each.text for each in instructions() if each.keyword == "RUN"):
        subprocess.run(["bash", "-n", "-c", text], check=True)
        if "apt-get install" in text:
            assert "--yes" in text and "--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(arguments()["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    version = Version(arguments()["TORCH"])
    torch = next(word for word in project["dependencies"] if word.startswith("torch"))
    assert version in Requirement(torch).specifier and not is_newer(str(version), NEWEST_TESTED["torch"])
    assert f"torch=={version}" in (ROOT / "constraints" / "cpu.txt").read_text().split()


@pytest.mark.slow  # pip installs torch
def test_install_steps_install(tmp_path: Path) -> None:
    """In a fresh virtual environment in place of the image; torch is the one that is here, if pip cannot reach it."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    programs = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": programs, "VIRTUAL_ENV": str(environment), "PIP_CACHE_DIR": str(tmp_path / "pip")}
    variables.pop("PYTHONPATH", None)
    values = arguments() | {"INDEX": "https://download.pytorch.org/whl/cpu"}
    steps = [each.text for each in instructions() if each.keyword == "RUN" and "apt-get" not in each.text]
    assert len(steps) == 3
    for step in steps:
        words = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], step)
        done = subprocess.run(shlex.split(words), cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode and "torch==" in words:
            # No index of torch's: PyPI's own, as the image for CUDA has it.
            words = words.replace(values["INDEX"], arguments()["INDEX"])
            done = subprocess.run(shlex.split(words), cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    done = subprocess.run(["shardwise", "--version"], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("shardwise ")
