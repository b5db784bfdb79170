"""Toys of every model type of transformers against one process, on every axis.

    python -m benchmarks.coverage --record coverage.jsonl --processes 2
    python -m benchmarks.coverage --record coverage.jsonl --sample 12 --seed 5

A cell is a model type with a task, on a layout. `shardwise verify` says whether it agrees; what a job cannot be is
refused by name, with its reason. Everything else is a fault of shardwise: wrong numbers, an error without a name, a
hang. A type of which transformers itself cannot run a toy has no cells. Cells are appended to the record as they end,
and a run goes on where the record of the same version of transformers ends.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from shardwise.commands.verify import verify_rank
from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.model.build import load_config
from shardwise.model.facts import ModelFacts
from shardwise.testing.oracle_start import AUTO
from shardwise.testing.toy_configs import VOCABULARY, language_model_types, toy_config
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.setup import study

TASKS = ("causal_lm", "masked_lm", "seq2seq_lm")
TENSOR, STAGES = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
# Ranks and parallel section by the name of a layout; the first is the control.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "sharded 2": (2, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, TENSOR),
    "pipeline 2": (2, STAGES),
    "context 2": (2, {"context_parallel_degree": 2}),
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "tensor 2 x pipeline 2": (4, TENSOR | STAGES),
}
NO_TOY, AGREES, REFUSED, WRONG, RAW, HANG = "no toy", "agrees", "refused", "wrong", "raw error", "hang"
FAULTS = (WRONG, RAW, HANG)
LENGTH, SECONDS = 16, 90.0  # of a sequence, and of a cell
# Vocabularies of a tokenizer that is trained: bytes, special tokens and the marks of spans.
TRAINED = {"masked_lm": {"vocabulary_size": 262}, "seq2seq_lm": {"vocabulary_size": 360, "mean_span_length": 2.0}}


@dataclass(frozen=True)
class CoverageCell:
    """The outcome of one type on one layout; `reason` is that of a refusal, or what was wrong."""

    task: str
    model_type: str
    layout: str
    outcome: str
    reason: str
    transformers: str


def write_corpora(directory: Path) -> None:
    """Write documents of tokens and of text into a directory."""
    draw = random.Random(1)
    with (directory / "tokens.jsonl").open("w") as file:
        for _ in range(120):
            ids = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(3, 40))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    lines = ("".join(chr(draw.randrange(97, 123)) for _ in range(60)) for _ in range(80))
    (directory / "text.txt").write_text("\n".join(lines))


def toy_job(directory: Path, task: str, model_type: str, layout: str, precision: str = "fp64") -> Job:
    """Return the job of a cell, of which four sequences make a step."""
    data: dict[str, Any] = {"sequence_length": LENGTH, "cache_directory": str(directory / "cache")}
    config = toy_config(model_type, experts_implementation="eager")
    if task in TRAINED:
        data |= {"path": str(directory / "text.txt"), "format": "text", **TRAINED[task]}
        config["vocab_size"] = data["vocabulary_size"]
    else:
        data |= {"path": str(directory / "tokens.jsonl"), "format": "tokens"}
    return Job.model_validate(
        {
            "model": {"config": config, "task": task, "attention": "eager"},
            "data": data,
            "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 1},
            "precision": {"compute": precision},
            "parallel": {"device": "cpu", **LAYOUTS[layout][1]},
        }
    )


def run_plain(job: Job) -> str:
    """Return why transformers itself cannot run the toy of a job; empty where it can."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if job.model.task == "seq2seq_lm" else {})
    try:
        model = AUTO[job.model.task].from_config(load_config(job), dtype=torch.float32, attn_implementation="eager")
        model(**inputs).logits.sum().backward()
    except Exception as error:  # each type has its own way to refuse values
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def study_toy(job: Job) -> ModelFacts | str:
    """Return the facts of a job's model, or why it is refused."""
    try:
        return study(job)
    except ShardwiseError as error:
        return str(error)


def verify_toy(job: Job, facts: ModelFacts) -> tuple[str, str]:
    """Return the outcome of verify in a world, and why; what rank 0 returns counts."""
    try:
        report = verify_rank(job, torch.device("cpu"), 1, facts)
    except ShardwiseError as error:
        return REFUSED, str(error)
    if report is None or report.agrees:
        return AGREES, ""
    return WRONG, f"{report.first}: {report.diagnosis}"


def first_line(error: object) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def fault_of(error: WorldError) -> tuple[str, str]:
    """Return the outcome of a world that failed, and the last line of the rank that failed first."""
    report = error.reports[error.first]
    lines = [line for line in report.text.strip().splitlines() if line.strip()] or [""]
    return HANG if report.what == "hangs" else RAW, f"{report.what}: {lines[-1].strip()[:300]}"


def outcome_of(pool: WorldPool, job: Job, ranks: int) -> tuple[str, str]:
    """Return the outcome of one cell and its reason."""
    try:
        facts = pool.run(1, study_toy, job, timeout=SECONDS)[0]
        if isinstance(facts, str):
            return REFUSED, facts
        if "fp64" in facts.unfit_dtypes:
            job = job.model_copy(update={"precision": job.precision.model_copy(update={"compute": "fp32"})})
        outcome: tuple[str, str] = pool.run(ranks, verify_toy, job, facts, timeout=SECONDS)[0]
    except WorldError as error:
        return fault_of(error)
    return outcome


def cells_of(
    pool: WorldPool, directory: Path, task: str, model_type: str, layouts: Iterable[str]
) -> list[CoverageCell]:
    """Return the cells of one type; of one that transformers cannot run a toy of, the control says why."""

    def cell(layout: str, outcome: str, reason: str) -> CoverageCell:
        return CoverageCell(task, model_type, layout, outcome, " ".join(reason.split()), transformers.__version__)

    control = next(iter(LAYOUTS))
    try:
        unable = pool.run(1, run_plain, toy_job(directory, task, model_type, control), timeout=SECONDS)[0]
    except (WorldError, Exception) as error:  # the config's class refuses the toy's values
        unable = first_line(error)
    if unable:
        return [cell(control, NO_TOY, unable)]
    return [
        cell(layout, *outcome_of(pool, toy_job(directory, task, model_type, layout), LAYOUTS[layout][0]))
        for layout in layouts
    ]


def read_record(path: Path) -> list[CoverageCell]:
    """Return the cells of a record that are of the installed transformers."""
    lines = path.read_text().splitlines() if path.exists() else []
    cells = [CoverageCell(**json.loads(line)) for line in lines]
    return [cell for cell in cells if cell.transformers == transformers.__version__]


def table(cells: Sequence[CoverageCell]) -> str:
    """Return a Markdown table of outcomes by layout, and the faults, one a line."""
    counts = Counter((cell.layout, cell.outcome) for cell in cells)
    outcomes = (AGREES, REFUSED, *FAULTS)
    rows = ["| layout | " + " | ".join(outcomes) + " |", "|---" * (len(outcomes) + 1) + "|"]
    for layout in LAYOUTS:
        rows.append(f"| {layout} | " + " | ".join(str(counts[layout, outcome]) for outcome in outcomes) + " |")
    faults = [cell for cell in cells if cell.outcome in FAULTS]
    rows += [f"- {cell.task} {cell.model_type}, {cell.layout}: {cell.outcome}: {cell.reason}" for cell in faults]
    return "\n".join(rows)


def drawn_types(sample: int | None, seed: int, tasks: Sequence[str] = TASKS) -> list[tuple[str, str]]:
    """Return tasks and types, all in order or so many by chance."""
    types = [(task, model_type) for task in tasks for model_type in language_model_types(task)]
    return types if sample is None else random.Random(seed).sample(types, min(sample, len(types)))


def sweep(types: Sequence[tuple[str, str]], layouts: Sequence[str], record: Path, processes: int) -> list[CoverageCell]:
    """Run the cells of `types` that the record lacks; return all of them."""
    known = {(cell.task, cell.model_type) for cell in read_record(record)}
    left = [case for case in types if case not in known]
    lock, own = threading.Lock(), threading.local()
    with tempfile.TemporaryDirectory(prefix="shardwise-coverage-") as place:
        directory = Path(place)
        write_corpora(directory)
        pools: list[WorldPool] = []

        def run(case: tuple[str, str]) -> None:
            if not hasattr(own, "pool"):
                own.pool = WorldPool()
                pools.append(own.pool)
            cells = cells_of(own.pool, directory, *case, layouts)
            with lock, record.open("a") as file:
                file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)

        try:
            with ThreadPoolExecutor(processes) as executor:
                list(executor.map(run, left))
        finally:
            for pool in pools:
                pool.close()
    return [cell for cell in read_record(record) if (cell.task, cell.model_type) in set(types)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and print its table; 1 where a cell is a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, a cell each; what is there is not run")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--types", nargs="+", help="model types; all where it is left out")
    parser.add_argument("--sample", type=int, help="so many types, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="worlds that run at the same time")
    options = parser.parse_args(arguments)
    types = drawn_types(options.sample, options.seed, options.tasks)
    types = [case for case in types if not options.types or case[1] in options.types]
    print(f"transformers {transformers.__version__}, {len(types)} types, seed {options.seed}")
    cells = sweep(types, options.layouts, options.record, options.processes)
    print(table(cells))
    return int(any(cell.outcome in FAULTS for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
