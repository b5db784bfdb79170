"""The tests under the lowest and the newest torch and transformers: `python tools/versions.py tests/plan -k placement`.

Makes a fresh environment for each pair of versions that `pyproject.toml` allows at its ends, installs the package with
its tests there, runs pytest with the given words and prints a Markdown table. Needs pip and a registry.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "transformers")
INSTALLED = "from importlib.metadata import version; print(*map(version, {packages!r}))"


class Outcome(NamedTuple):
    """Versions that were installed, and the last line of pytest or of what failed before it."""

    versions: tuple[str, ...]
    passed: bool
    said: str


def lowest_pins(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return package -> a requirement of its lowest version, from `name>=version` among the dependencies."""
    pins = {}
    for requirement in tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]:
        if bound := re.match(r"([\w-]+)>=([\d.]+)", requirement):
            pins[bound[1]] = f"{bound[1]}=={bound[2]}.*"
    return {package: pins[package] for package in PACKAGES}


def pin_sets(pyproject: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """Return the requirements of each environment beside the package's own: every pair of lowest and newest."""
    pairs = itertools.product(*((pin, None) for pin in lowest_pins(pyproject).values()))
    return [[pin for pin in pins if pin] for pins in pairs]


def run_tests(pins: Sequence[str], words: Sequence[str], directory: Path) -> Outcome:
    """Return the outcome of pytest in a fresh environment below `directory`."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    # Processors of images are torchvision's in transformers 5.17.
    command = [python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[test]", "torchvision", *pins]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        return Outcome(tuple(pins), False, _last_line(installed.stderr))
    shown = subprocess.run([python, "-c", INSTALLED.format(packages=PACKAGES)], capture_output=True, text=True)
    tests = subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    said = _last_line(tests.stdout) or _last_line(tests.stderr)
    return Outcome(tuple(shown.stdout.split()), tests.returncode == 0, said)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def markdown_table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table, one row an environment."""
    rows = [(*outcome.versions, "yes" if outcome.passed else "no", outcome.said) for outcome in outcomes]
    lines = [(*PACKAGES, "passed", "pytest"), ("---",) * (len(PACKAGES) + 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the tests in every environment; return 0 where all pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, words = parser.parse_known_args()
    outcomes = []
    for pins in pin_sets():
        with tempfile.TemporaryDirectory() as directory:
            outcomes.append(run_tests(pins, words, Path(directory)))
    print(markdown_table(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
