"""`shardwise evaluate CHECKPOINT --tasks FILE`: lm-eval's tasks on the sharded model of a checkpoint.

The model stands on the layout of the job that wrote the checkpoint, or on another that keys give, and is never whole.
lm-eval runs on rank 0; tasks and their data are files, nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from shardwise.commands.arguments import check_writable, whole_number
from shardwise.errors import ConfigError, DataError, ShardwiseError
from shardwise.words import nearest_file, output_console, say_note

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.job.schema import Job

# Keys that act: where the model stands, and files that have moved.
TRUST = "model.trust_remote_code"  # which a command line says, and not the checkpoint that is asked
KEYS = ("parallel.", "memory.", "precision.compute", "model.path", TRUST, "data.tokenizer", "data.chat_template")
STDERR = "_stderr"
UNFILTERED = "none"  # lm-eval's name of the filter that leaves answers as they are
RESAMPLES = 1000  # for the standard error of a metric that has no closed form of it


class Questions(NamedTuple):
    """The tasks that a model is given, and how.

    Attributes:
        files: of the tasks.
        tokenizer: a directory.
        limit: documents of each task; None: all.
        as_chats: prompts go through the chat template.
        template: text of one that takes the place of the tokenizer's own.
    """

    files: tuple[str, ...]
    tokenizer: str
    limit: int | None
    as_chats: bool
    template: str | None


def task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shardwise evaluate`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, a directory of them, or a run's output")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="FILE", help="lm-eval's YAML files of tasks")
    parser.add_argument("--limit", type=whole_number, metavar="N", help="only the first N documents of each task")
    parser.add_argument("--apply-chat-template", action="store_true", help="ask through the chat template")
    parser.add_argument("--json", metavar="FILE", help="write lm-eval's results there too")


def run_tasks(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Evaluate, and print a table of the tasks' metrics."""
    from shardwise.checkpoint.catalog import find, read_manifest
    from shardwise.commands.workers import in_workers

    _check_keys(keys)
    _require_lm_eval()
    _check_tasks(options.tasks)
    if options.json is not None:
        check_writable(Path(options.json))
    store, name = find(options.checkpoint, say_note)
    manifest = read_manifest(store, name)
    job = job_of_checkpoint(manifest, keys)
    questions = _questions(options, job, manifest)
    results = in_workers(job, evaluate_rank, f"{store.root}/{name}", questions)
    if results is None:  # a rank of a launcher other than the first
        return 0
    if options.json is not None:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    output_console().print(_table(results))
    return 0


# --- before workers start


def _check_keys(keys: Mapping[str, Any]) -> None:
    for key in keys:
        if not any(key == known or (known.endswith(".") and key.startswith(known)) for known in KEYS):
            raise ConfigError(
                f"--{key} is not used by evaluate, whose model is the checkpoint's; it takes keys of parallel and "
                f"memory, and {', '.join(known for known in KEYS if not known.endswith('.'))}"
            )


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluate needs the package lm-eval, which is not installed; run `pip install 'shardwise[lm-eval]'`"
        )


def _check_tasks(files: Sequence[str]) -> None:
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"--tasks {file!r} is no file.{nearest_file(Path(file), '.yaml', '.yml')}")
    _load_tasks(files)


def _load_tasks(files: Sequence[str]) -> dict[str, Any]:
    """Return the tasks of some files by name, with their data.

    Raises:
        ConfigError: lm-eval refuses one.
    """
    from lm_eval.tasks import TaskManager

    tasks: dict[str, Any] = {}
    for file in files:
        try:
            of_file: dict[str, Any] = TaskManager(include_defaults=False).load([file])["tasks"]
        except Exception as error:  # whatever a file, its data or its functions come to
            raise ConfigError(f"--tasks {file!r}: lm-eval says {type(error).__name__}: {error}") from error
        if twice := tasks.keys() & of_file.keys():
            raise ConfigError(f"--tasks {file!r}: another file has a task {min(twice)!r} too; rename one")
        tasks |= of_file
    return tasks


def job_of_checkpoint(manifest: Manifest, keys: Mapping[str, Any]) -> Job:
    """Return the job that wrote a checkpoint, as a model to be asked: without what only training needs.

    Raises:
        ConfigError: its model writes no text.
    """
    from shardwise.job.optimizer_section import OptimizerSection
    from shardwise.job.schema import CheckpointSection, EvaluationSection, TrainingSection
    from shardwise.job.sources import read_job

    job = read_job(_without_trust(manifest.job), keys, environ={}).job
    if job.model.factory is not None or job.model.task != "causal_lm":
        what = f"model.task={job.model.task}" if job.model.factory is None else f"model.factory={job.model.factory!r}"
        raise ConfigError(f"evaluate asks causal language models of transformers, and this checkpoint's is {what}")
    objective = "sft" if job.reads_pairs else job.objective  # a preference loss would hold its reference too
    return job.model_copy(
        update={
            "adapter": job.adapter.model_copy(update={"path": None}),  # the checkpoint has its values
            "training": TrainingSection(steps=1, seed=job.training.seed).model_copy(update={"objective": objective}),
            "optimizer": OptimizerSection(),
            "evaluation": EvaluationSection(),
            "checkpoint": CheckpointSection(),
        }
    )


def _without_trust(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's job without the leave to run the code of its base."""
    model = {key: value for key, value in job.get("model", {}).items() if f"model.{key}" != TRUST}
    return {**job, "model": model}


def _questions(options: argparse.Namespace, job: Job, manifest: Manifest) -> Questions:
    """Return what the ranks are asked; the tokenizer can be opened, and has a chat template where one is asked for.

    Raises:
        DataError: the tokenizer is gone.
        ConfigError: there is no chat template.
    """
    from shardwise.data.chat_template import read_template

    directory = job.data.tokenizer or manifest.data.get("tokenizer")
    if directory is None:
        raise DataError("the checkpoint was trained on token ids without a tokenizer; give --data.tokenizer DIRECTORY")
    if not Path(directory).is_dir():
        raise DataError(
            f"the checkpoint's tokenizer {directory} is not there any more; give --data.tokenizer DIRECTORY"
        )
    template = read_template(job.data) if options.apply_chat_template else None
    questions = Questions(tuple(options.tasks), str(directory), options.limit, options.apply_chat_template, template)
    if questions.as_chats and _open_tokenizer(questions).chat_template is None:
        raise ConfigError(
            f"--apply-chat-template: the tokenizer {directory} has no chat template; give --data.chat_template FILE"
        )
    return questions


def _open_tokenizer(questions: Questions) -> PreTrainedTokenizerBase:
    from shardwise.data.tokenizer import TokenizerSource, load_tokenizer

    tokenizer = load_tokenizer(TokenizerSource(Path(questions.tokenizer), "", key="data.tokenizer"))
    if questions.template is not None:
        tokenizer.chat_template = questions.template
    return tokenizer


# --- on every rank


def evaluate_rank(job: Job, device: torch.device, checkpoint: str, questions: Questions) -> dict[str, Any] | None:
    """Return lm-eval's results on rank 0, None elsewhere. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
        ConfigError: a task asks for what is not answered here.
    """
    import torch.distributed as dist

    from shardwise.checkpoint.catalog import find
    from shardwise.checkpoint.load import read_model
    from shardwise.training.rank_calls import answer_calls, calls_on_all_ranks
    from shardwise.training.setup import assemble, study

    model = assemble(job, device, study(job), None).model
    read_model(model, *find(checkpoint))
    if dist.get_rank() != 0:
        answer_calls(model)
        return None
    with calls_on_all_ranks(model) as calls:
        from shardwise.commands.lm_eval_model import ShardedLanguageModel

        return _results(ShardedLanguageModel(calls, _open_tokenizer(questions)), questions)


def _results(model: Any, questions: Questions) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # processes that it would fork have the ranks' connections
    try:
        results = simple_evaluate(
            model,
            tasks=list(_load_tasks(questions.files).values()),
            limit=questions.limit,
            apply_chat_template=questions.as_chats,
            log_samples=False,
            bootstrap_iters=RESAMPLES,
        )
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"--tasks {', '.join(questions.files)}: {type(error).__name__}: {error}") from error
    assert results is not None
    kept = ("results", "n-samples", "versions", "n-shot")
    plain: dict[str, Any] = json.loads(json.dumps({key: results[key] for key in kept if key in results}, default=str))
    return plain


def _table(results: Mapping[str, Any]) -> Table:
    """Return a table with a line for each metric of each task, and for each filter of its answers."""
    table = Table(box=None)
    for heading in ("task", "documents", "metric", "value", "± standard error"):
        table.add_column(heading, no_wrap=True)
    for task, values in results["results"].items():
        documents = str(results["n-samples"][task]["effective"])
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith(STDERR):
                error = values.get(f"{metric}{STDERR},{filtered}", "")
                named = metric if filtered == UNFILTERED else f"{metric}, {filtered}"
                shown = [f"{number:.4f}" if isinstance(number, float) else str(number) for number in (value, error)]
                table.add_row(task, documents, named, *shown)
    return table
