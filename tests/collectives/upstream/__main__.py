"""Run torch's own tests on the engine and on Gloo: `python -m tests.collectives.upstream [--tests DIR] [--part WORD]`.

Without --tests, those that torch installs. DIR is `test/distributed` of torch's sources, or a folder or script in it.
What comes out is a table: how many pass on both, and each test that passes on one alone with the reason. The exit code
is 1 where a test passes on Gloo alone and no reason is known.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.collectives.upstream.comparison import Comparison, Results, read_results

BACKENDS = ("gloo", "shardwise")
ROOT = Path(__file__).parents[3]
SCRIPT_SECONDS = 3600  # for all tests of a script on a backend


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print and write the table."""
    options = _parse(arguments)
    comparison = run(scripts(options.tests), options.part)
    print(text := comparison.table())
    if options.table:
        options.table.write_text(text + "\n")
    return int(bool(comparison.unexplained))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.collectives.upstream")
    parser.add_argument("--tests", type=Path, help="a directory or script of torch's test/distributed")
    parser.add_argument("--part", default="", help="run tests alone whose name has this part")
    parser.add_argument("--table", type=Path, help="write the table, in Markdown")
    return parser.parse_args(arguments)


def scripts(tests: Path | None) -> list[str]:
    """The scripts of `tests`, or those that torch installs."""
    if tests is None:
        return ["installed"]
    return [str(path) for path in ([tests] if tests.is_file() else sorted(tests.rglob("test_*.py")))]


def run(sources: Sequence[str], part: str = "") -> Comparison:
    """Run the tests of each source on both backends, one after the other."""
    results: dict[str, Results] = {backend: {} for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as directory:
        for source in sources:
            for backend in BACKENDS:
                lines = Path(directory) / f"{Path(source).stem}.{backend}"
                print(f"{source} on {backend}", file=sys.stderr, flush=True)
                _run_worker(backend, lines, source, part)
                results[backend] |= {f"{Path(source).stem}: {name}": each for name, each in read_results(lines).items()}
    return Comparison(results["gloo"], results["shardwise"])


def _run_worker(backend: str, lines: Path, source: str, part: str) -> None:
    """Run the tests of a source on a backend, in a process of their own with a temporary directory of its own."""
    command = [sys.executable, "-m", "tests.collectives.upstream.worker", backend, str(lines), source, part]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *_import_path()])
    with tempfile.TemporaryDirectory() as directory, open(lines.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path, "TMPDIR": directory}, stdout=log, stderr=log, cwd=directory
        )
        try:
            process.wait(SCRIPT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{source} on {backend} did not end within {SCRIPT_SECONDS} s", file=sys.stderr)
        finally:
            process.kill()
            process.wait()


def _import_path() -> Iterator[str]:
    return filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


if __name__ == "__main__":
    sys.exit(main())
