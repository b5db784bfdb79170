"""The day a GPU is there: every line that docs/benchmarks/gpu.md asks for, in order of worth, in slices of minutes.

    python -m benchmarks.gpu_day --results gpu_day --seconds 900 --write
    python -m benchmarks.gpu_day --results rehearsal --rehearse

A line that has its result in the directory is passed over, and none starts that what is left of `--seconds` does not
hold: carry the directory to the next machine, and it goes on. `--write` puts what was measured into the page's table.
`--rehearse` runs every line without a GPU: the cases on the device that plays CUDA, the training at toy size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import header, write_json

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
CASES = ROOT / "tests" / "cuda_on_cpu"
TOY = ("--device", "cpu", "--toy", "--ladder", "1", "--rounds", "1", "--steps", "1", "--warmup", "1")
# What fails in a rehearsal alone: what runs on a GPU, and C++ that torch's generator writes for some CPUs (2.13, bf16
# with AVX-512: one name twice).
ON_CPU_ALONE = (
    "Liger's kernels run on a GPU",
    "No module named 'litgpt'",
    "No module named 'torchtitan'",
    "CppCompileError",
)


class Line(Protocol):
    """One line of the page's table.

    Attributes:
        name: of its file in the directory of results.
        title, asked: its cells in the table.
        seconds: that it takes on an H100.
    """

    name: str
    title: str
    asked: str
    seconds: int

    def run(self, path: Path, rehearse: bool) -> None:
        """Measure, and write the result as JSON to `path`."""

    def cell(self, result: dict[str, Any]) -> str:
        """Return what was measured, as the table shows it."""

    def problems(self, result: dict[str, Any], rehearse: bool) -> list[str]:
        """Return what went wrong, a sentence each."""


@dataclass(frozen=True)
class TrainingLine:
    """A run of `benchmarks.training_gpu`; `contender` is the row that the table speaks of."""

    name: str
    title: str
    asked: str
    seconds: int
    contender: str
    arguments: tuple[str, ...]

    def run(self, path: Path, rehearse: bool) -> None:
        limit = ("--budget-seconds", str(self.seconds))
        command = [sys.executable, "-m", "benchmarks.training_gpu", *self.arguments, *limit, *(TOY if rehearse else ())]
        subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=False, timeout=None if rehearse else 600)

    def cell(self, result: dict[str, Any]) -> str:
        return "; ".join(f"{case['name']}: {self._figures(case)}" for case in result["cases"])

    def _figures(self, case: dict[str, Any]) -> str:
        rows = {row["contender"]: row for row in case["rows"]}
        row = rows.get(self.contender, {})
        base = rows.get(case["case"]["base"] or "shardwise-compile", {})
        if "base_ratio" not in row or "mfu" not in base:
            return "not measured"
        return f"MFU {base['mfu']:.1%}, {row['base_ratio']['median']:.2f} times"

    def problems(self, result: dict[str, Any], rehearse: bool) -> list[str]:
        found = []
        for case in result["cases"]:
            found += [f"{case['name']}: {case['ended']}"] if case["ended"] else []
            for row in case["rows"]:
                reason = row.get("failed") or ("" if "tokens_per_second" in row else "not measured")
                if reason and not (rehearse and any(part in reason for part in ON_CPU_ALONE)):
                    found.append(f"{case['name']}: {row['contender']}: {reason.strip().splitlines()[-1]}")
        return found


@dataclass(frozen=True)
class CasesLine:
    """The tests of one file of tests/cuda_on_cpu on the GPU."""

    name: str
    title: str
    asked: str
    seconds: int
    chosen: str = ""

    def run(self, path: Path, rehearse: bool) -> None:
        report = path.with_suffix(".xml")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [str(CASES / f"{self.name.partition('-')[0]}.py"), *(["-k", self.chosen] if self.chosen else [])]
        limit = None if rehearse else self.seconds * 2
        subprocess.run(command, cwd=ROOT, env=_environment(rehearse), check=False, timeout=limit)
        write_json(path, {**header(("torch", "transformers", "shardwise")), **_counts(report)})
        report.unlink()

    def cell(self, result: dict[str, Any]) -> str:
        return f"{result['passed']} passed, {len(result['failed'])} failed"

    def problems(self, result: dict[str, Any], rehearse: bool) -> list[str]:
        return [f"{test} failed" for test in result["failed"]] + ([] if result["passed"] else ["no case has run"])


def _environment(rehearse: bool) -> dict[str, str]:
    """Return the variables under which the cases run; rehearsed on the device that plays CUDA."""
    if not rehearse:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    from tests.cuda_on_cpu.test_cuda_on_cpu import BUILD, python

    site = os.pathsep.join([str(CASES / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PLAYED_CUDA": python("-c", BUILD).splitlines()[-1], "PYTHONPATH": site}


def _counts(report: Path) -> dict[str, Any]:
    tests = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {test.get("name", ""): {child.tag for child in test} for test in tests}
    failed = [name for name, tags in outcomes.items() if tags & {"failure", "error"}]
    return {"passed": sum(not tags & {"failure", "error", "skipped"} for tags in outcomes.values()), "failed": failed}


ONE_SIZE = ("--families", "llama", "--sequences", "2048")
LINES: tuple[Line, ...] = (
    CasesLine("cases_scripts", "scripts of SMP, versions 1 and 2", "all pass", 100),
    CasesLine("cases_layouts-axes", "every axis in fp32 and fp16", "all pass", 120, "test_axes"),
    CasesLine("cases_layouts-kernels", "families and kernels of attention", "all pass", 90, "not test_axes"),
    CasesLine("cases_training", "optimizers, offload, resumed runs", "all pass", 180),
    CasesLine("cases_commands", "`doctor`, `train`, `run`", "all pass", 100),
    TrainingLine(
        "bf16", "bf16, Llama 1B, beside transformers with compile", "MFU ≥ 65 %, ≥ 1.1 times", 110, "torch-compile",
        (*ONE_SIZE, "--sizes", "1B", "--ladder", "8", "--rounds", "2", "--steps", "10",
         "--contenders", "shardwise-compile", "torch-compile"),
    ),
    TrainingLine(
        "float8", "float8 at 3B beside bf16", "≥ 1.25 times", 200, "shardwise-compile",
        (*ONE_SIZE, "--sizes", "3B", "--ladder", "4", "--rounds", "2",
         "--contenders", "shardwise-compile", "shardwise-fp8-compile", "--base", "shardwise-fp8-compile"),
    ),
    TrainingLine(
        "flash", "FlashAttention beside eager, 10 layers of a 13B NeoX, 40 GB", "≥ 1.2 times", 120,
        "shardwise-checkpointed-eager",
        ("--families", "neox", "--sizes", "13B-10L", "--sequences", "2048", "--ladder", "1", "2", "4", "--rounds", "2",
         "--contenders", "shardwise-checkpointed", "shardwise-checkpointed-eager", "--base", "shardwise-checkpointed",
         "--memory-gb", "40"),
    ),
    TrainingLine(
        "offload", "checkpointing beside offload", "the cost is shown", 120, "shardwise-offloaded",
        (*ONE_SIZE, "--sizes", "1B", "--ladder", "8", "--rounds", "2",
         "--contenders", "shardwise-checkpointed", "shardwise-offloaded", "--base", "shardwise-checkpointed"),
    ),
    TrainingLine(
        "neox", "bf16, NeoX 3B, beside transformers with compile", "MFU ≥ 65 %, ≥ 1.1 times", 200, "torch-compile",
        ("--families", "neox", "--sizes", "3B", "--sequences", "2048", "--ladder", "4", "--rounds", "2",
         "--contenders", "shardwise-compile", "torch-compile"),
    ),
    TrainingLine(
        "llama3b", "bf16, Llama 3B, beside transformers with compile", "MFU ≥ 65 %, ≥ 1.1 times", 200, "torch-compile",
        (*ONE_SIZE, "--sizes", "3B", "--ladder", "4", "--rounds", "2",
         "--contenders", "shardwise-compile", "torch-compile"),
    ),
    TrainingLine(
        "peers", "bf16, Llama 1B, beside litgpt", "≥ 1.1 times", 150, "litgpt-compile",
        (*ONE_SIZE, "--sizes", "1B", "--ladder", "8", "--rounds", "2",
         "--contenders", "shardwise-compile", "litgpt-compile", "torchtitan-compile"),
    ),
    TrainingLine(
        "liger", "eager beside Liger's kernels, Llama 1B", "-", 100, "shardwise-liger",
        (*ONE_SIZE, "--sizes", "1B", "--ladder", "8", "--rounds", "2",
         "--contenders", "shardwise", "shardwise-liger", "--base", "shardwise"),
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lines that have no result; 1 where something went wrong, 2 without a GPU."""
    options = _parse(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu_day needs a CUDA device; `--rehearse` runs its lines without one.", file=sys.stderr)
        return 2
    chosen = [line for line in LINES if not options.lines or line.name in options.lines]
    problems = run_lines(chosen, options.results, options.seconds, options.rehearse)
    results = read_results(options.results)
    Console().print(render(results))
    if options.write and not options.rehearse:
        PAGE.write_text(with_results(PAGE.read_text(), results))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_day", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="directory of results, one file a line")
    parser.add_argument("--seconds", type=float, default=1e9, help="of the GPU that may be used")
    parser.add_argument("--lines", nargs="+", choices=[line.name for line in LINES], help="these alone")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy size")
    parser.add_argument("--write", action="store_true", help=f"put what was measured into {PAGE.relative_to(ROOT)}")
    return parser.parse_args(arguments)


def run_lines(lines: Sequence[Line], results: Path, seconds: float, rehearse: bool) -> list[str]:
    """Run the lines without a result that the time left holds; return what went wrong."""
    results = results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    end, problems = time.monotonic() + seconds, []
    for line in lines:
        path = results / f"{line.name}.json"
        if path.exists() or (not rehearse and time.monotonic() + line.seconds > end):
            continue
        print(f"{line.name}: {line.title}", flush=True)
        try:
            line.run(path, rehearse)
            problems += [f"{line.name}: {problem}" for problem in line.problems(json.loads(path.read_text()), rehearse)]
        except (OSError, subprocess.TimeoutExpired, ElementTree.ParseError) as error:
            problems.append(f"{line.name}: {error}")
    return problems


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the results by the lines' names."""
    paths = {line.name: directory / f"{line.name}.json" for line in LINES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def render(results: dict[str, dict[str, Any]]) -> Table:
    """Return the lines with what was measured."""
    table = Table("line", "asked", "measured")
    for line in LINES:
        table.add_row(line.title, line.asked, line.cell(results[line.name]) if line.name in results else "")
    return table


def with_results(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page's text with the rows of its table that were measured; the others stay."""
    by_title = {line.title: line for line in LINES}
    rows = []
    for row in page.splitlines():
        line = by_title.get(row.strip("| ").partition(" | ")[0])
        if line is not None and line.name in results:
            row = f"| {line.title} | {line.asked} | {line.cell(results[line.name])} |"
        rows.append(row)
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
