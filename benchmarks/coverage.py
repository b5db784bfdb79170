"""Toys of every model type of transformers against one process, on every axis.

    python -m benchmarks.coverage --record coverage.jsonl --processes 2
    python -m benchmarks.coverage --record coverage.jsonl --sample 12 --seed 5
    python -m benchmarks.coverage --record coverage.jsonl --again "raw error" --page docs/reference/coverage.md

A cell is a model type with a task, on a layout. Studying the toy and judging its job, as `doctor`, `--print-plan` and
`train` do before anything starts, refuses what cannot be, by name and with its reason. What is left runs: `shardwise
verify` says whether it agrees. Everything else is a fault of shardwise: wrong numbers, an error without a name, a hang,
a refusal that comes only when ranks run. A type of which transformers itself cannot run a toy has no other cells.

Popular types come first; the tasks of a type follow each other. Cells are appended to the record as they end, and a run
goes on where the record of the same version of transformers ends; of two lines of one cell the later counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor

from benchmarks.record import header
from shardwise.commands.verify import verify_rank
from shardwise.errors import MissingTokenError, ModelError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS as TASK_RECORDS
from shardwise.model.build import check_head, load_config, prepare_for_training
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import VOCABULARY, language_model_types, toy_config
from shardwise.testing.toy_inputs import toy_of_files
from shardwise.testing.toy_samples import inputs_of_files
from shardwise.testing.world import PRELOAD, WorldError, WorldPool
from shardwise.training.setup import study

TASKS = tuple(TASK_RECORDS)
# Mappings of transformers without a task of ours, by a name for it; their types are refused, or have one of TASKS.
OTHER_MAPPINGS = {
    "ctc": "MODEL_FOR_CTC_MAPPING",
}
VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size")
TENSOR, STAGES = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
# Ranks and parallel section by the name of a layout; the first is the control.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "sharded 2": (2, {"sharded_data_parallel_degree": 2}),
    "pipeline 2": (2, STAGES),
    "context 2": (2, {"context_parallel_degree": 2}),
    "tensor 2": (2, TENSOR),
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "tensor 2 x pipeline 2": (4, TENSOR | STAGES),
}
CONTROL = next(iter(LAYOUTS))
NO_TOY, AGREES, REFUSED = "no toy", "agrees", "refused"
WRONG, RAW, HANG, LATE = "wrong", "raw error", "hang", "refused late"
FAULTS = (WRONG, RAW, HANG, LATE)
LENGTH, SECONDS = 16, 180.0  # of a sequence, and of a cell
FEW_TYPES = 50  # up to so many, workers import the modules themselves
FORMS = 2  # in which a model is studied, for all its cells: whole and cut into stages
CLASSES, FIRST_TOKEN = 3, 10  # of a head, and the first that no toy config has as a special one
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
    commit: str = ""  # of shardwise
    seconds: float = 0.0  # that it took; the studies of a type, for all its cells, are counted as the first one's

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is of."""
        return self.task, self.model_type, self.layout


@dataclass(frozen=True)
class JudgedToy:
    """A job of a cell as it is known before ranks start: with facts it may run, else `outcome` and `reason` say why."""

    job: Job
    facts: ModelFacts | None
    outcome: str = ""
    reason: str = ""


class ClassifiedTokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, each with a class, or one for each token; the last token ends the row.

    Args:
        for_tokens: whether tokens have classes.
        last: the token that ends a row, where there is one.
        with_boxes: whether a model has to know where on a page each token stands.
        rows: how many.
    """

    def __init__(self, for_tokens: bool, last: int | None, with_boxes: bool = False, rows: int = 40) -> None:
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(FIRST_TOKEN, VOCABULARY, (rows, LENGTH), generator=draw)
        if last is not None:
            self.ids[:, -1] = last
        self.labels = torch.randint(0, CLASSES, (rows, LENGTH) if for_tokens else (rows,), generator=draw)
        self.boxes = torch.rand(rows, LENGTH, 4, generator=draw) if with_boxes else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int | slice) -> dict[str, Tensor]:
        boxes = {} if self.boxes is None else {"bbox": self.boxes[index]}
        return {"input_ids": self.ids[index], "labels": self.labels[index], **boxes}


def write_corpora(directory: Path) -> None:
    """Write documents of tokens and of text into a directory."""
    draw = random.Random(1)
    with (directory / "tokens.jsonl").open("w") as file:
        for _ in range(60):
            ids = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(3, 40))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    lines = ("".join(chr(draw.randrange(97, 123)) for _ in range(60)) for _ in range(40))
    (directory / "text.txt").write_text("\n".join(lines))


def toy_job(directory: Path, task: str, model_type: str, layout: str, precision: str = "fp64") -> Job:
    """Return the job of a cell, of which two microbatches of two sequences make a step."""
    reads_files = TASK_RECORDS[task].reads_files
    config, arguments = toy_of_files(task, model_type) if reads_files else (toy_config(model_type), {})
    model: dict[str, Any] = {"config": config, "task": task}
    data: dict[str, Any] = {"sequence_length": LENGTH}
    if TASK_RECORDS[task].classifies:
        model["labels"] = [f"class {number}" for number in range(CLASSES)]
    if reads_files:
        data |= {"factory": "shardwise.testing.toy_samples:ToySamples", "factory_arguments": arguments}
    elif TASK_RECORDS[task].samples == "factory":
        if hasattr(transformers.CONFIG_MAPPING[model_type](), "pad_token_id"):
            config.setdefault("pad_token_id", 0)
        arguments = {"for_tokens": task == "token_classification", "last": _end_token(config)}
        arguments |= {"with_boxes": True} if model_type == "bros" else {}
        data |= {"factory": "benchmarks.coverage:ClassifiedTokens", "factory_arguments": arguments}
    else:
        data["cache_directory"] = str(directory / "cache")
        if task in TRAINED:
            data |= {"path": str(directory / "text.txt"), "format": "text", **TRAINED[task]}
            config["vocab_size"] = data["vocabulary_size"]
            _set_vocabularies(config, data["vocabulary_size"])
        else:
            data |= {"path": str(directory / "tokens.jsonl"), "format": "tokens"}
    return Job.model_validate(
        {
            "model": model,
            "data": data,
            "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 2},
            "precision": {"compute": precision},
            "parallel": {"device": "cpu", **LAYOUTS[layout][1]},
        }
    )


def _set_vocabularies(config: dict[str, Any], size: int) -> None:
    """Give a config and those inside of it another size of vocabulary."""
    config |= {name: size for name in config if name in VOCABULARIES}
    for value in config.values():
        if isinstance(value, dict):
            _set_vocabularies(value, size)


def _end_token(config: dict[str, Any]) -> int | None:
    """Return the token with which some families find the end of a sample."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    token = getattr(transformers.CONFIG_MAPPING[config["model_type"]](**values), "eos_token_id", None)
    return token if isinstance(token, int) else None


# --- on a rank -------------------------------------------------------------------------------------------------------


def run_plain(job: Job) -> str:
    """Return why transformers itself cannot run the toy of a job; empty where it can."""
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if job.model.task == "seq2seq_lm" else {})
    if TASK_RECORDS[job.model.task].samples == "factory":
        inputs = ClassifiedTokens(**job.data.factory_arguments)[:2]
        del inputs["labels"]
    elif TASK_RECORDS[job.model.task].reads_files:
        inputs = inputs_of_files(job)
    try:
        make = TASK_RECORDS[job.model.task].model_class().from_config
        model = make(load_config(job), dtype=torch.float32, attn_implementation="eager")
        prepare_for_training(model)(**inputs).logits.sum().backward()
    except Exception as error:  # each type has its own way to refuse values
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def judge_toys(directory: Path, task: str, model_type: str, layouts: Sequence[str]) -> str | dict[str, JudgedToy]:
    """Return what is known of a type's jobs before ranks start, by layout, or why transformers cannot run the toy."""
    try:
        unable = run_plain(toy_job(directory, task, model_type, CONTROL))
    except Exception as error:  # the config's class refuses the toy's values
        unable = first_line(error)
    if unable and (refusal := refusal_of_head(task, model_type)) is not None:
        return dict.fromkeys(layouts, refusal)
    if unable:
        return unable
    studied: dict[bool, ModelFacts] = {}
    return {layout: judge_toy(toy_job(directory, task, model_type, layout), layout, studied) for layout in layouts}


def refusal_of_head(task: str, model_type: str) -> JudgedToy | None:
    """Return how a type is refused whose code, inputs or labels are not those of a task that transformers lists it for.

    A default config lacks some tokens that a toy's has; what is asked for then is no refusal of the type.
    """
    job = Job.model_validate({"model": {"config": {"model_type": model_type}, "task": task}})
    try:
        check_head(transformers.CONFIG_MAPPING[model_type](), job.model)
    except MissingTokenError:
        return None
    except ModelError as error:
        return JudgedToy(job, None, REFUSED, str(error))
    except Exception:  # the class refuses its own defaults
        return None
    return None


def judge_toy(job: Job, layout: str, studied: dict[bool, ModelFacts]) -> JudgedToy:
    """Study the model of a job and judge its layout, as is done before ranks start.

    Args:
        job: its cell's.
        layout: the cell's, by name.
        studied: what is known of the same model, by whether it is cut into stages; this study is added.
    """
    ranks, staged = LAYOUTS[layout][0], job.parallel.pipeline_parallel_degree > 1
    try:
        facts = studied[staged] = studied.get(staged) or study(job, studied.get(False))
        if "fp64" in facts.unfit_dtypes:
            job = job.model_copy(update={"precision": job.precision.model_copy(update={"compute": "fp32"})})
        resolve(job, World(ranks, "cpu", ranks), facts)
    except ShardwiseError as error:
        return JudgedToy(job, None, REFUSED, str(error))
    except Exception as error:  # whatever it is: it has no name of ours
        return JudgedToy(job, None, RAW, f"{last_line(error)} ({place_of(error)})")
    return JudgedToy(job, facts)


def verify_toy(job: Job, facts: ModelFacts) -> tuple[str, str]:
    """Return the outcome of verify in a world, and why; what rank 0 returns counts."""
    try:
        report = verify_rank(job, torch.device("cpu"), 1, facts)
    except ShardwiseError as error:
        return LATE, str(error)
    if report is None or report.agrees:
        return AGREES, ""
    return WRONG, f"{report.first}: {report.diagnosis}"


def first_line(error: object) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def last_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def place_of(error: BaseException) -> str:
    """Return file, line and function where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


# --- the sweep -------------------------------------------------------------------------------------------------------


def fault_of(error: WorldError) -> tuple[str, str]:
    """Return the outcome of a world that failed, and the last line of the rank that failed first."""
    report = error.reports[error.first]
    lines = [line for line in report.text.strip().splitlines() if line.strip()] or [""]
    return HANG if report.what == "hangs" else RAW, f"{report.what}: {lines[-1].strip()[:300]}"


def outcome_of(pool: WorldPool, toy: JudgedToy, ranks: int) -> tuple[str, str]:
    """Return the outcome of one cell and its reason."""
    if toy.facts is None:
        return toy.outcome, toy.reason
    try:
        outcome: tuple[str, str] = pool.run(ranks, verify_toy, toy.job, toy.facts, timeout=SECONDS)[0]
    except WorldError as error:
        return fault_of(error)
    return outcome


def cells_of(
    pool: WorldPool, directory: Path, task: str, model_type: str, layouts: Sequence[str], commit: str = ""
) -> Iterator[CoverageCell]:
    """Yield the cells of one type; of one that transformers cannot run a toy of, the control says why."""
    start = time.perf_counter()

    def cell(layout: str, outcome: str, reason: str) -> CoverageCell:
        nonlocal start
        before, start = start, time.perf_counter()
        words = " ".join(reason.split())
        seconds = round(start - before, 1)
        return CoverageCell(task, model_type, layout, outcome, words, transformers.__version__, commit, seconds)

    if task in OTHER_MAPPINGS:
        yield cell(CONTROL, *refusal_of(model_type))
        return
    try:
        toys = pool.run(1, judge_toys, directory, task, model_type, layouts, timeout=FORMS * SECONDS)[0]
    except WorldError as error:
        yield cell(CONTROL, *fault_of(error))
        return
    if isinstance(toys, str):
        yield cell(CONTROL, NO_TOY, toys)
        return
    for layout, toy in toys.items():
        yield cell(layout, *outcome_of(pool, toy, LAYOUTS[layout][0]))


def refusal_of(model_type: str) -> tuple[str, str]:
    """Return how a type is refused for which there is no task."""
    try:
        study(Job.model_validate({"model": {"config": {"model_type": model_type}}}))
    except ShardwiseError as error:
        return REFUSED, str(error)
    except Exception as error:  # as in `judge_toy`
        return RAW, f"{last_line(error)} ({place_of(error)})"
    return WRONG, "it is not refused"


def read_record(path: Path) -> list[CoverageCell]:
    """Return the cells of a record that are of the installed transformers."""
    return read_versions(path).get(transformers.__version__, [])


def read_versions(path: Path) -> dict[str, list[CoverageCell]]:
    """Return the cells of a record by version of transformers, each in the order in which it ran first."""
    lines = path.read_text().splitlines() if path.exists() else []
    versions: dict[str, dict[tuple[str, str, str], CoverageCell]] = {}
    for cell in (CoverageCell(**json.loads(line)) for line in lines):
        versions.setdefault(cell.transformers, {})[cell.key] = cell
    return {version: list(cells.values()) for version, cells in versions.items()}


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


def popular_types() -> list[tuple[str, str]]:
    """Return tasks and types that are counted as popular."""
    names = json.loads(Path(__file__).with_name("popular_types.json").read_text())
    return [tuple(name.split("/", 1)) for name in names]


def all_types(tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Return tasks and types of the installed transformers, the popular ones first."""
    languages = {task: language_model_types(task) for task in TASKS}
    known = {model_type for types in languages.values() for model_type in types}
    others = {task: sorted(_types_of(mapping) - known) for task, mapping in OTHER_MAPPINGS.items()}
    found = [(task, model_type) for task in tasks for model_type in (languages | others)[task]]
    popular = [case for case in popular_types() if case in set(found)]
    return list(dict.fromkeys(popular + found))


def _types_of(mapping: str) -> set[str]:
    """Return the types of one of transformers' mappings, by its name."""
    return {config.model_type for config in getattr(transformers, mapping)}


def drawn_types(sample: int | None, seed: int, tasks: Sequence[str] = TASKS) -> list[tuple[str, str]]:
    """Return tasks and types, all in order or so many by chance."""
    types = all_types(tasks)
    return types if sample is None else random.Random(seed).sample(types, min(sample, len(types)))


def lacking(
    record: Path, types: Sequence[tuple[str, str]], layouts: Sequence[str], again: Collection[str]
) -> dict[tuple[str, str], list[str]]:
    """Return the layouts of each type that a record lacks, or whose outcome is to be had `again`."""
    known = {cell.key for cell in read_record(record) if cell.outcome not in again}
    without = {cell.key[:2] for cell in read_record(record) if cell.outcome == NO_TOY and NO_TOY not in again}
    left = {
        case: [layout for layout in layouts if (*case, layout) not in known]
        for case in types
        if case not in without and not (case[0] in OTHER_MAPPINGS and (*case, CONTROL) in known)
    }
    return {case: names for case, names in left.items() if names}


def sweep(
    types: Sequence[tuple[str, str]], layouts: Sequence[str], record: Path, processes: int, again: Collection[str] = ()
) -> list[CoverageCell]:
    """Run the cells of `types` that the record lacks; return all of them."""
    lock, own, commit = threading.Lock(), threading.local(), current_commit()
    with tempfile.TemporaryDirectory(prefix="shardwise-coverage-") as place:
        directory = Path(place)
        write_corpora(directory)
        pools: list[WorldPool] = []
        cases = by_type(lacking(record, types, layouts, again))
        # Those of all types are imported in seconds, but each of a dozen workers would import them anew.
        modules = modules_of(types) if len(cases) > FEW_TYPES else []

        def run(of_type: dict[tuple[str, str], list[str]]) -> None:
            if not hasattr(own, "pool"):
                own.pool = WorldPool(preload=(*PRELOAD, *modules))
                pools.append(own.pool)
            for case, names in of_type.items():
                for cell in cells_of(own.pool, directory, *case, names, commit):
                    with lock, record.open("a") as file:
                        file.write(json.dumps(asdict(cell)) + "\n")

        executor = ThreadPoolExecutor(processes)
        try:
            list(executor.map(run, cases))
        finally:
            executor.shutdown(cancel_futures=True)  # Ctrl-C ends the sweep with the types that run
            for pool in pools:
                pool.close()
    return [cell for cell in read_record(record) if cell.key[:2] in set(types)]


def modules_of(types: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of the modules that hold transformers' models of some types."""
    configs = (transformers.CONFIG_MAPPING[model_type] for _, model_type in types)
    return sorted({config.__module__.replace(".configuration_", ".modeling_") for config in configs})


def by_type(cases: dict[tuple[str, str], list[str]]) -> list[dict[tuple[str, str], list[str]]]:
    """Return cases with those of one type together: a worker imports its modules once."""
    types: dict[str, dict[tuple[str, str], list[str]]] = {}
    for case, layouts in cases.items():
        types.setdefault(case[1], {})[case] = layouts
    return list(types.values())


def current_commit() -> str:
    """Return the checkout's commit in short, with a `+` where the working tree differs from it."""
    commit: str = header(())["commit"]
    return commit[:8] + "+" * commit.endswith("+changes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and print its table; 1 where a cell is a fault."""
    options = parsed(arguments)
    types = drawn_types(options.sample, options.seed, options.tasks)
    types = [case for case in types if not options.types or case[1] in options.types]
    types = [case for case in types if not options.popular or case in set(popular_types())]
    print(f"transformers {transformers.__version__}, {len(types)} types, seed {options.seed}")
    start = time.perf_counter()
    cells = sweep(types, options.layouts, options.record, options.processes, options.again)
    print(table(cells))
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes, {options.processes} processes")
    if options.page:
        from benchmarks.coverage_page import page

        options.page.write_text(page(read_versions(options.record)), encoding="utf-8")
    return int(any(cell.outcome in FAULTS for cell in cells))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    tasks = (*TASKS, *OTHER_MAPPINGS)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, a cell each; what is there is not run")
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--types", nargs="+", help="model types; all where it is left out")
    parser.add_argument("--popular", action="store_true", help="only types that are counted as popular")
    parser.add_argument("--again", nargs="+", default=[], help="outcomes of the record whose cells run again")
    parser.add_argument("--sample", type=int, help="so many types, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="worlds that run at the same time")
    parser.add_argument("--page", type=Path, help="write the reference page of all cells of the record")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
