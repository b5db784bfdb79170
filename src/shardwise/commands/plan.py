"""`shardwise plan`: options and work of the search, for the command line to register."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shardwise.commands.arguments import whole_number
from shardwise.errors import CapacityError, ConfigError, OutputError
from shardwise.words import nearest, output_console

if TYPE_CHECKING:
    from shardwise.job.schema import Job
    from shardwise.planner.formulas.prediction import Cluster
    from shardwise.planner.search.explain import Budget
    from shardwise.planner.search.search import Candidate, Changes, SearchQuestion, SearchResult

PRESET_POSITIONS = 2048  # tokens in a sequence of a preset, where the job does not say
TOP, LIMIT = 8, 10_000  # layouts that are shown, combinations that are looked at
OF_CLUSTER = ("parallel.workers", "parallel.device")  # keys that follow from the cluster
UNMEASURED = (
    "a CPU has no datasheet: times are those of an assumed one and rank layouts alone; after `shardwise plan "
    "calibrate`, a plan without --cluster has this machine's"
)
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; what it sets stays, the rest is searched")
    parser.add_argument("--model", metavar="MODEL", help="a preset (llama3-8b, gpt3-175b …), config.json or directory")
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="p5.48xlarge:16, dgx-h100:4, h200:8, cpu:4 or a YAML file; unset: this machine",
    )
    parser.add_argument("--tokens", type=_amount, metavar="N", help="tokens to train on (300B): days and cost of them")
    parser.add_argument("--price", type=_amount, metavar="USD", help="dollars an hour of one accelerator, for the cost")
    parser.add_argument("--top", type=whole_number, metavar="N", help=f"layouts to show (default: {TOP})")
    parser.add_argument("--limit", type=whole_number, metavar="N", help=f"combinations to look at (default: {LIMIT})")
    parser.add_argument(
        "--explain",
        metavar="WHICH",
        help="a number of the table, `sure` (the fastest whose interval of memory fits), or keys: "
        "tensor_parallel_degree=8,microbatch_size=2",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts of memory, time, schedule and scaling")
    parser.add_argument("--write", metavar="JOB.yaml", help="write the best (or the explained) layout as a job")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="trace JOB itself instead, one rank of every kind: memory, time, and whether all collectives meet",
    )
    parser.add_argument("--timeline", metavar="FILE", help="with --trace: write the step for https://ui.perfetto.dev")
    parser.add_argument("--rank", type=_whole, metavar="R", help="with --trace: this rank alone")


def run_plan(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Search, or trace the job. Raises ShardwiseError for a user's mistake."""
    _check(options)
    question, notes = _question(options, keys)
    if options.trace:
        return _trace(question, options)
    from shardwise.planner.search.explain import Budget
    from shardwise.planner.search.search import SHOWN, search

    budget, top = Budget(options.tokens, options.price), options.top or TOP
    result = search(question, options.limit or LIMIT, shown=max(SHOWN, top))
    if result.best is None:
        raise CapacityError(_too_large(result))
    asked = result.best if options.explain is None else _asked(result, options.explain)
    if options.html:  # files first: who reads what is printed may stop before its end
        from shardwise.observe.plan_page import write_page

        _save(options.html, "--html", lambda path: write_page(path, result, asked, budget))
    if options.write:
        _save(options.write, "--write", lambda path: path.write_text(job_file(asked, result), encoding="utf-8"))
    if options.json:
        print(json.dumps(_as_json(result, asked, budget, top, notes), indent=1))
    else:
        _print(result, asked, budget, top, notes)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.rank is not None and not options.trace:
        raise ConfigError(f"--rank={options.rank} does nothing without --trace; give both")
    if options.timeline is not None and (options.rank is not None or not options.trace):
        raise ConfigError(f"--timeline={options.timeline} needs --trace of all ranks; leave --rank out")
    if options.write is not None and Path(options.write).exists():
        raise OutputError(f"--write={options.write} is there already; name a new file")
    if options.write is not None and options.write == options.html:
        raise ConfigError(f"--write={options.write} is --html's file too; name two files")
    for name in ("tokens", "price", "explain", "html", "write", "top", "limit"):
        if options.trace and getattr(options, name) is not None:
            raise ConfigError(f"--{name} does nothing with --trace, which traces the job as it is; leave one out")
    if options.explain is not None:
        _check_explain(options.explain)
    if options.price is not None and options.tokens is None:
        raise ConfigError(f"--price={options.price:g} does nothing without --tokens; give both")


# ------------------------------------------------------------------------------------------------------------- inputs


def _question(options: argparse.Namespace, keys: dict[str, Any]) -> tuple[SearchQuestion, list[str]]:
    from shardwise.data.file_samples import gives_samples
    from shardwise.job.sources import read_job
    from shardwise.job.tasks import TASKS
    from shardwise.model.build import build_model
    from shardwise.model.discover import discover
    from shardwise.planner.constants.inventory import cluster
    from shardwise.planner.formulas.local import is_calibrated, stack_here
    from shardwise.planner.search.search import SearchQuestion, world_of
    from shardwise.training.setup import study, study_shapes

    notes: list[str] = []
    if options.model is not None:
        keys = {**_model_keys(options.model), **keys}
    where = cluster(options.cluster) if options.cluster else None
    job, more = read_job(options.job, keys)
    job = _with_known_format(job)
    notes += more
    if options.trace and gives_samples(job):
        facts = study(job)
    elif TASKS[job.model.task].reads_files and _is_here(job):
        facts = study_shapes(job)
    else:
        facts = discover(build_model(job), job)
    if options.model is not None and "sequence_length" not in job.data.model_fields_set:
        length = min(PRESET_POSITIONS, facts.max_positions or PRESET_POSITIONS)
        job = job.model_copy(update={"data": job.data.model_copy(update={"sequence_length": length})})
        notes.append(f"data.sequence_length is not set: {length} is assumed")
    if facts.sample_positions:
        notes.append(f"a sample is counted as {facts.sample_positions} tokens, which the blocks see of the first rows")
    elif gives_samples(job):
        notes.append(
            f"samples are counted as data.sequence_length={job.data.sequence_length} tokens; --trace takes their own "
            "shapes from the data"
        )
    there = where or _here(job)
    world, workers = world_of(there), job.parallel.workers
    if workers not in (None, there.size):
        notes.append(f"parallel.workers={workers} is not used: the cluster has {there.size} ranks")
    notes += [UNMEASURED] * (world.device_type == "cpu" and (where is not None or not is_calibrated(world)))
    return SearchQuestion(job, facts, there, stack_here(world) if where is None else None), notes


def _here(job: Job) -> Cluster:
    """Return this machine, with its own memory. Raises ConfigError where ranks would share its accelerators."""
    import psutil

    from shardwise.launch.expected_world import local_cluster, world_size

    there, world = local_cluster(job), world_size(job, None)
    if world.shares_gpus:
        raise ConfigError(
            f"parallel.workers={world.size}: ranks would share the {world.gpus} GPU(s) of this machine, which the "
            f"planner does not know; use at most {world.gpus}, or say with --cluster where the job will run"
        )
    on_cpu = there.accelerator.name == "CPU"
    return there if on_cpu else replace(there, host_gb=psutil.virtual_memory().total / 2**30)


def _with_known_format(job: Job) -> Job:
    """Return the job with the format of its rows, where they are here: a plan needs no data."""
    from shardwise.data.corpus import with_format

    return with_format(job) if _is_here(job) else job


def _is_here(job: Job) -> bool:
    paths = [source.path for source in job.data.sources] or [job.data.path]
    return all(path is not None and Path(path).exists() for path in paths)


def _model_keys(name: str) -> dict[str, Any]:
    """The keys of a job for a preset, or for a config on disk."""
    from shardwise.planner.constants.inventory import presets
    from shardwise.planner.constants.presets import preset_config

    if name in presets():
        return {"model.config": preset_config(presets()[name])}
    if Path(name).exists():
        return {"model.config": name}
    raise ConfigError(f"--model={name!r} is neither a file or directory nor a preset.{nearest(name, presets())}")


# ------------------------------------------------------------------------------------------------------------ outputs


def _print(result: SearchResult, asked: Candidate, budget: Budget, top: int, notes: list[str]) -> None:
    from rich.text import Text

    from shardwise.planner.search.search_report import layout_explanation, ranking_table, search_remarks

    console = output_console()
    console.print(ranking_table(result, top, budget))
    console.print(layout_explanation(asked, result, budget))
    for note in [*search_remarks(result), *notes]:
        console.print(Text(f"note: {note}", style="yellow"))


def _as_json(result: SearchResult, asked: Candidate, budget: Budget, top: int, notes: list[str]) -> dict[str, Any]:
    from shardwise.planner.search.expert_remarks import expert_remarks
    from shardwise.planner.search.explain import candidate_data, why_not_fit, why_slower
    from shardwise.planner.search.probe_remarks import probe_remark
    from shardwise.planner.search.search import distinct

    question, best = result.question, result.ranked[0]
    return {
        "model": question.facts.family,
        "parameters": question.facts.parameters,
        "cluster": {"name": question.cluster.name, "accelerators": question.cluster.size},
        "sequence_length": question.job.data.sequence_length,
        "looked_at": result.looked_at,
        "left_out": result.left_out,
        "search_seconds": result.seconds,
        "illegal": dict(result.illegal),
        "explained": candidate_data(asked, budget),
        "ranked": [
            candidate_data(candidate, budget) | {"against_best": why_slower(candidate, best)}
            for candidate in distinct(result.ranked, top)
        ],
        "do_not_fit": [
            candidate_data(candidate) | {"why": why_not_fit(candidate)} for candidate in distinct(result.unfit, top)
        ],
        "notes": [*expert_remarks(result), *probe_remark(result), *result.notes, *notes],
    }


def _too_large(result: SearchResult) -> str:
    from shardwise.plan.plan import resolve
    from shardwise.planner.search.explain import layout_of, memory_policy, why_not_fit
    from shardwise.planner.search.search import smallest_cluster, world_of

    cluster = result.question.cluster
    where = f"{cluster.nodes} x {cluster.per_node} {cluster.accelerator.name}"
    if not result.misfits:
        resolve(
            result.question.job, world_of(cluster), result.question.facts
        )  # what the job itself sets is refused best
        rule, count = result.illegal.most_common(1)[0]
        return f"no layout of this job is legal on {where}: {count:,} of {result.looked_at:,} break the rule {rule!r}"
    least = result.misfits[0]
    said = (
        f"no layout of {result.question.facts.parameters:,} parameters fits on {where}; the smallest, "
        f"{layout_of(least)} with checkpointing {memory_policy(least)}, {why_not_fit(least)}"
    )
    enough = smallest_cluster(result.question)
    if enough is None or enough.best is None:
        return f"{said}; more of these nodes do not help, use accelerators with more memory or set fewer keys"
    best = enough.best
    nodes = enough.question.cluster.nodes
    return f"{said}; {nodes} nodes would do, with {layout_of(best)} and checkpointing {memory_policy(best)}"


def _asked(result: SearchResult, text: str) -> Candidate:
    from shardwise.planner.search.search import distinct, matching, of_changes, with_exact_memory

    if text.isdecimal():
        shown = distinct(result.ranked, int(text))
        if int(text) > len(shown):
            raise ConfigError(f"--explain={text}: the table has {len(shown)} layouts; use 1 to {len(shown)}")
        return shown[-1]
    if text == "sure":
        if result.surest is None:
            raise ConfigError("--explain=sure: of no layout does the interval of memory fit; use a number of the table")
        return result.surest
    wanted = _wanted(text)
    candidate = matching(result, wanted)
    return with_exact_memory(candidate, result.question.facts) if candidate else of_changes(result, wanted)


def _check_explain(text: str) -> None:
    """Refuse what names no layout, before any is searched for."""
    if text.isdecimal() and not int(text):
        raise ConfigError("--explain=0: layouts of the table have numbers from 1")
    if not text.isdecimal() and text != "sure":
        _wanted(text)


def _wanted(text: str) -> Changes:
    """`tensor_parallel_degree=8,memory.checkpoint_every=2` as dotted keys and values."""
    from shardwise.job.keys import leaf_keys
    from shardwise.job.recipes.translation import nested
    from shardwise.job.sources import read_value, validate
    from shardwise.plan.draft import lookup

    known = {
        key.rpartition(".")[2]: key for key in leaf_keys() if key.startswith(("parallel.", "memory.", "training."))
    }
    wanted: Changes = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        key = known.get(name.rpartition(".")[2])
        if not equals:
            raise ConfigError(f"--explain={text!r}: {word!r} is no number of the table, nor `sure`, nor key=value")
        if key is None or (name != key and "." in name):
            raise ConfigError(f"--explain={text!r}: unknown key {name}.{nearest(name, known)}")
        if key in OF_CLUSTER:
            raise ConfigError(f"--explain={text!r}: {key} follows from the cluster; name another with --cluster")
        wanted[key] = read_value(key, value)
    job = validate(nested(wanted))
    return {key: lookup(job, key) for key in wanted}


def job_file(candidate: Candidate, result: SearchResult) -> str:
    """A job that `shardwise train` runs as planned: the given one with what the search chose."""
    from shardwise.planner.search.explain import chosen_keys, layout_of

    job, cluster = result.question.job, result.question.cluster
    data: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
    changes = {**chosen_keys(candidate, result), "data.sequence_length": job.data.sequence_length}
    changes["parallel.device"] = candidate.plan.world.device_type
    if cluster.nodes == 1:
        changes["parallel.workers"] = cluster.size
    else:  # what starts the ranks says how many, and `shardwise launch` refuses another number
        data.get("parallel", {}).pop("workers", None)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data.setdefault(section, {})[name] = value
    data.get("training", {}).pop("tokens_per_step", None)
    ranks = f"{cluster.nodes} x {cluster.per_node} {cluster.accelerator.name}"
    start = "shardwise train" if cluster.nodes == 1 else (
        f"torchrun --no-python --nnodes {cluster.nodes} --nproc-per-node {cluster.per_node} --rdzv-backend c10d "
        "--rdzv-endpoint FIRST_HOST:29500 shardwise train"
    )  # fmt: skip
    head = (
        f"# {layout_of(candidate)} on {ranks}: {candidate.prediction.step_seconds:.3g} s a step and "
        f"{candidate.memory_bytes / 2**30:.1f} GiB predicted by shardwise plan.\n# {start} THIS_FILE\n"
    )
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _save(path: str, option: str, write: Any) -> None:
    try:
        write(Path(path))
    except OSError as error:
        raise OutputError(f"{option}={path}: {error.strerror}") from error


def _trace(question: SearchQuestion, options: argparse.Namespace) -> int:
    from shardwise.planner.search.search import sized_job, world_of
    from shardwise.testing.trace.job import trace_job
    from shardwise.testing.trace.report import describe
    from shardwise.testing.trace.step_time import step_time
    from shardwise.testing.trace.timeline_file import write_timeline

    job, _ = sized_job(question)
    trace = trace_job(job, world_of(question.cluster), question.facts, options.rank)
    time = None if options.rank is not None else step_time(trace, question.facts, question.cluster)
    if options.json:
        print(json.dumps(trace.to_dict() | ({} if time is None else {"time": time.to_dict()}), indent=1))
    else:
        output_console().print(describe(trace, time))
    if time is not None and options.timeline:
        _save(options.timeline, "--timeline", partial(write_timeline, trace=trace, time=time))
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _amount(text: str) -> float:
    """`300B`, `1.4T`, `3e11` or a plain number."""
    unit = SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if unit != 1.0 else text) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 300B or 1.5")
    return value
