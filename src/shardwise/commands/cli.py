"""The command line: `shardwise train`, `verify`, `data`, `run`, `export`, `checkpoint`, `plan`, `bench` and more.

Words of the form `--section.key value` are keys of the job and are taken out before argparse sees the rest. A user's
mistake ends as one message on stderr and the error's exit code, never as a traceback. Heavy imports happen inside the
commands, so that `shardwise --help` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shardwise import __version__
from shardwise.commands import data as data_cli
from shardwise.commands import data_prepare as prepare_cli
from shardwise.commands import data_stats as stats_cli
from shardwise.commands import engine as engine_cli
from shardwise.commands import evaluate as evaluate_cli
from shardwise.commands import inspect as inspect_cli
from shardwise.commands import launch as launch_cli
from shardwise.commands import plan as search_cli
from shardwise.commands import plan_accuracy as plan_cli
from shardwise.commands import recipe as recipe_cli
from shardwise.commands import run as run_cli
from shardwise.commands.arguments import whole_number
from shardwise.errors import ConfigError, OutputError, ShardwiseError
from shardwise.errors.exit_codes import DONE, INTERRUPTED, MISTAKE, STOPPED
from shardwise.observe.standard_streams import flush_or_leave, secure_streams
from shardwise.sagemaker.failure import leave_failure
from shardwise.words import nearest, output_console, say_note

if TYPE_CHECKING:
    from shardwise.job.schema import Job
    from shardwise.sagemaker.container import Container

SPECIAL = (
    "output",
    "print-plan",
    "profile",
    "blocks",
    "against",
    "cluster",
    "tokens",
    "explain",
    "write",
    "html",
    "instance-type",
    "to",
    "submit",
)  # options of some commands that are no keys
WIDTH = 100
PLACE = "a checkpoint, a directory of them, or a run's output directory; a path or URL"


class Command(NamedTuple):
    """A command: its line in the overview, its help page, options and work, and whether it takes keys of a job."""

    summary: str
    description: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, dict[str, Any]], int]
    takes_job: bool = True


class StoreOnce(argparse.Action):
    """argparse's storing of a value, which refuses an option that is given twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault("given_options", {})
        if option_string is not None and self.dest in given:
            parser.error(f"{option_string} is given twice, as {given[self.dest]} and as {values}; keep one")
        given[self.dest] = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, and whose pages end with the keys of a job where it takes them."""

    def __init__(self, takes_keys: bool = False, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _formatter, **settings})
        self.takes_keys = takes_keys
        for action in (None, "store"):
            self.register("action", action, StoreOnce)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def format_help(self) -> str:
        page = super().format_help()
        return f"{page}\n{_key_page()}" if self.takes_keys else page


def _formatter(prog: str) -> argparse.HelpFormatter:
    made = argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=WIDTH)
    made._action_max_length = 18  # argparse forgets the indent of commands, and puts the longest one's line below it
    return made


def _key_page() -> str:
    """Every key of a job by section, wrapped."""
    from shardwise.job.keys import leaf_keys

    grouped: dict[str, list[str]] = {}
    for key in leaf_keys():
        section, dot, name = key.rpartition(".")
        if dot:
            grouped.setdefault(section, []).append(name)
    lines = ["keys of the job, each as --section.key VALUE (YAML or JSON; a switch alone is true):"]
    for section, names in grouped.items():
        lines += textwrap.wrap(
            " ".join(names), WIDTH, initial_indent=f"  --{section + '.':<22}", subsequent_indent=" " * 26
        )
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------- commands


def _train_options(parser: argparse.ArgumentParser) -> None:
    _job_argument(parser)
    parser.add_argument("--output", metavar="DIR", help="directory of everything the run writes")
    parser.add_argument("--print-plan", action="store_true", help="show what would run and why, and stop")
    parser.add_argument("--profile", metavar="FIRST,LAST", help="write a torch profiler trace of these steps")


def _train(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.job.sources import read_job, read_value
    from shardwise.sagemaker.container import enter_container

    container = enter_container()
    if container is not None and options.job is None and container.has_script:
        return run_cli.run_in_container(container)
    if options.output is not None:
        keys["output"] = options.output
    if options.profile is not None:
        keys["observe.profile"] = read_value("observe.profile", f"[{options.profile}]")
    if container is not None:
        options.job, keys = options.job or container.enter_job(), {**container.keys(), **keys}
    job, notes = read_job(options.job, keys)
    if container is not None:
        job, more = container.placed(job)
        notes += tuple(more)
    if not options.print_plan:
        return _run_training(job, notes, container)
    from shardwise.commands import train as entry
    from shardwise.plan.table import plan_table
    from shardwise.planner.search.stage_table import stage_table

    plan, facts = entry.plan_with_facts(job)
    _say_notes(notes)
    console = output_console()
    console.print(plan_table(plan))
    if plan.stages:
        console.print(stage_table(plan, facts))
    return 0


def _run_training(job: Job, notes: Sequence[str], container: Container | None) -> int:
    """Train, leave the model where a container's service takes it from, and return the exit code."""
    from shardwise.commands import train as entry
    from shardwise.launch.environment import is_first_process
    from shardwise.launch.interrupt import asked_by_signal
    from shardwise.training.output import ADAPTER_DIRECTORY, MODEL_DIRECTORY

    result = entry.train(job, notes)
    if container is not None and is_first_process():
        said = container.keep_model(Path(job.output), (MODEL_DIRECTORY, ADAPTER_DIRECTORY))
        _say_notes([said] if said else [])
    return STOPPED if asked_by_signal(result.stopped) else DONE


def _verify_options(parser: argparse.ArgumentParser) -> None:
    _job_argument(parser)
    parser.add_argument("--blocks", type=whole_number, metavar="N", help="keep only the first N blocks of the model")
    parser.add_argument(
        "--against", metavar="PLAN.yaml", help="compare with this layout (keys on top of JOB's) instead of one process"
    )
    parser.add_argument("--steps", type=whole_number, default=3, metavar="N", help="steps to compare (default: 3)")


def _verify(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.job.sources import overlay, read_job

    job, notes = read_job(options.job, keys)
    against = None
    if options.against is not None:
        against, more = overlay(job, options.against)
        notes += more
    _say_notes(notes)
    from shardwise.commands.verify import run_verify

    return run_verify(job, blocks=options.blocks, against=against, steps=options.steps)


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help=f"{PLACE}; of several, the newest complete one is taken"
    )
    parser.add_argument("out", metavar="OUT", help="the model directory to make; it must not be there yet")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), metavar="DTYPE", help="bf16, fp16 or fp32; unset: as stored"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a model with adapters: the whole model, with them in its weights"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the moving averages of the weights, where training.ema_decay kept them"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the directory of the model that was trained run its own code, where it is read",
    )


def _export(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.checkpoint.export import export_checkpoint
    from shardwise.smp.v1.exporting import export_v1_checkpoint, is_v1_checkpoint
    from shardwise.smp.v2.exporting import export_v2_checkpoint, is_v2_checkpoint

    kinds = ((is_v2_checkpoint, export_v2_checkpoint), (is_v1_checkpoint, export_v1_checkpoint))
    export = next((export for asks, export in kinds if asks(options.checkpoint)), export_checkpoint)
    lacking = {"merge": "adapters", "ema": "averaged weights", "trust_remote_code": "model beside it"}
    more = {key: True for key in lacking if getattr(options, key)}
    if more and export is not export_checkpoint:
        key = next(iter(more))
        option = key.replace("_", "-")
        raise OutputError(f"--{option}: a checkpoint of SMP has no {lacking[key]}; leave it out")
    path = export(options.checkpoint, options.out, options.dtype, say=say_note, **more)
    print(f"exported to {path}")
    return 0


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("ls", "show", "verify"),
        metavar="ls|show|verify",
        help="list the checkpoints, show what is in one, or compare every byte with its hash (exit code 1: damaged)",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help=f"{PLACE}; of several, show takes the newest complete one, verify the newest one, damaged or not",
    )
    parser.add_argument("--tensors", action="store_true", help="show: every tensor, not the largest alone")
    parser.add_argument("--json", action="store_true", help="ls, show: print JSON")


def _checkpoint(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    for name, actions in (("tensors", ("show",)), ("json", ("ls", "show"))):
        if getattr(options, name) and options.action not in actions:
            raise ConfigError(f"--{name} is an option of {' and '.join(actions)}, not of {options.action}")
    from shardwise.checkpoint import inspect, verification

    if options.action == "ls":
        return inspect.run_ls(options.path, options.json)
    if options.action == "show":
        return inspect.run_show(options.path, options.tensors, options.json, say=say_note)
    return verification.verify_checkpoint(options.path, say=say_note)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="show instead on which axes a model can be split: its directory or config.json"
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="say instead what is wrong on the hosts of a launcher, a line each; exit code 1 where anything is",
    )
    parser.add_argument("--output", metavar="DIR", help="with --preflight: where the run is to write; unset: here")


def _doctor(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.commands.doctor import examine, examine_model

    if options.preflight:
        from shardwise.commands.doctor import run_preflight

        if options.model is not None:
            raise ConfigError("--model does nothing with --preflight, which asks about hosts; leave one out")
        return run_preflight(Path(options.output or "."))
    if options.output is not None:
        raise ConfigError("--output is an option of doctor --preflight; leave it out")

    table = examine() if options.model is None else examine_model(options.model)
    if table is not None:
        output_console().print(table)
    return 0


def _job_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; left out: the embedded default")


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say_note(note)


COMMANDS = {
    "train": Command(
        "train a model, sharded over the workers",
        "Train a model, its parameters, gradients and optimizer state sharded over the workers.\n"
        "Outside of torchrun, Slurm and Open MPI the local workers are started here.",
        _train_options,
        _train,
    ),
    "verify": Command(
        "prove a job's numbers against one process",
        "Run a few steps of a job on its layout and in one plain process, from the same weights and data, and compare\n"
        "loss, every gradient, the gradient norm and every parameter. Exit code 1 where they disagree.",
        _verify_options,
        _verify,
    ),
    "data show": Command(
        "show samples as the model gets them",
        "Show the first samples of a job's training as the model gets them: tokens, which of them are trained on,\n"
        "where rows or documents begin, padding. Tokenizes the corpus, unless the cache has it; trains nothing.",
        data_cli.show_options,
        data_cli.run_data_show,
    ),
    "data prepare": Command(
        "tokenize a job's corpus, for other machines too",
        "Tokenize the corpus of a job into the cache, by a process for each core. With --output: also as a directory\n"
        "with the tokenizer and a hash of each file, which `data.path` takes on any machine. Killed, it goes on.",
        prepare_cli.prepare_options,
        prepare_cli.run_data_prepare,
    ),
    "data stats": Command(
        "count the documents and tokens of a job's corpus",
        "Count the documents or rows of a job's corpus and their tokens: lengths, what is cut or left out at\n"
        "data.sequence_length, the share of the vocabulary that occurs, documents that are equal.",
        stats_cli.stats_options,
        stats_cli.run_data_stats,
    ),
    "evaluate": Command(
        "give a checkpoint's model the tasks of lm-eval",
        "Give the model of a checkpoint tasks of lm-eval: YAML files, with their data in files. The model stands on\n"
        "the layout of its run, or as keys of parallel and memory say. Needs the extra lm-eval; fetches nothing.",
        evaluate_cli.task_options,
        evaluate_cli.run_tasks,
    ),
    "export": Command(
        "write a checkpoint's model for Hugging Face",
        "Write the model of a checkpoint as a directory of safetensors files that `from_pretrained` opens, with\n"
        "config and tokenizer; a module of your own as safetensors alone. One process, one tensor at a time.\n"
        "Checkpoints of SMP's scripts are read too, of both versions: partial, sharded, local, async, full.",
        _export_options,
        _export,
        takes_job=False,
    ),
    "checkpoint": Command(
        "list, show or verify checkpoints",
        "List the checkpoints of a directory, show what is in one, or verify the hash of each of its bytes.",
        _checkpoint_options,
        _checkpoint,
        takes_job=False,
    ),
    "plan": Command(
        "find the fastest layout of a job on a cluster",
        "Predict step time and memory of every legal layout of a job on a cluster, rank them, explain the best one.\n"
        "Keys that the job sets stay. Reads no data and no weights, starts nothing.\n"
        "See also `shardwise plan evaluate` and `shardwise plan calibrate`.",
        search_cli.plan_options,
        search_cli.run_plan,
    ),
    "plan evaluate": Command(
        "score the planner on tables of measurements",
        "Predict every row of the tables from its configuration alone, and compare with what was measured: error\n"
        "a row, median, 90th percentile and maximum a table, rows that could not be mapped, memory, ranking.",
        plan_cli.evaluate_options,
        plan_cli.run_evaluate,
        takes_job=False,
    ),
    "plan calibrate": Command(
        "refit the planner's constants from measurements",
        "Fit the constants of accelerators and software stacks on the rows of the tables whose fit_role is calibrate;\n"
        "without a table, measure this machine's CPU and keep the constants in the cache.",
        plan_cli.calibrate_options,
        plan_cli.run_calibrate,
    ),
    "recipe": Command(
        "turn a recipe of HyperPod into a job",
        "Turn a recipe of SageMaker HyperPod into a job: SMP's and others of branch v1, or LLMFT's (SFT, DPO, LoRA).\n"
        "Shows what became of each of its keys, or the job, or its plan. Asks no hub, reads no weights.",
        recipe_cli.recipe_options,
        recipe_cli.run_recipe,
    ),
    "launch": Command(
        "write what starts a job on a cluster",
        "Write the files that start a job somewhere else into a directory, and show what was derived with the rule\n"
        "behind each value; with --submit hand them to the target's own client. Without it nothing leaves this\n"
        "machine. Targets: slurm, trainjob, pytorchjob, jobset, hyperpod, skypilot, sagemaker, ssh, local.",
        launch_cli.launch_options,
        launch_cli.launch_job,
    ),
    "jobs": Command(
        "list, show or stop launched jobs",
        "Ask the client of each launch's target about its job: its state, or what its ranks print; or stop it.",
        launch_cli.jobs_options,
        launch_cli.manage_jobs,
        takes_job=False,
    ),
    "inspect": Command(
        "show where each rank of a live run is",
        "Show each rank's step, phase, the collective that it waits in and its line of code, and say in one sentence\n"
        "who holds the others up. Of a run whose workers shardwise has started on this host; stops nothing.",
        inspect_cli.inspect_options,
        inspect_cli.run_inspect,
        takes_job=False,
    ),
    "run": Command(
        "run a script written for SMP, unchanged",
        "Run a script written for SageMaker's model parallel library or for torch.distributed, on local workers or as\n"
        "a rank of torchrun, Slurm or Open MPI. Its imports of Amazon's libraries lead to shardwise.smp.",
        run_cli.run_options,
        run_cli.run_script,
        takes_job=False,
    ),
    "doctor": Command(
        "show what this machine offers, or a model",
        "Show versions, devices, backends, extras and, under a launcher, which ranks share a host or a\n"
        "device; or of a Hugging Face model on which axes it can be split, with which degrees, and why not\n"
        "on the others. Reads no weights. With --preflight: what is wrong on the hosts before a long run.",
        _doctor_options,
        _doctor,
        takes_job=False,
    ),
    "bench": Command(
        "measure this host's collectives",
        "Measure all-gather, reduce-scatter and all-reduce of 2, 4 and 8 CPU ranks on this host: the native engine\n"
        "beside Gloo, and beside what plain copies would take. Takes about a minute.",
        engine_cli.bench_options,
        engine_cli.run_bench,
        takes_job=False,
    ),
    "build": Command(
        "compile the native collective engine",
        "Compile the native engine for CPU ranks (parallel.ddp_dist_backend) into the cache, unless it is there.\n"
        "Without this command the first run that uses it does the same.",
        engine_cli.build_options,
        engine_cli.run_build,
        takes_job=False,
    ),
}


def build_parser() -> Parser:
    """The whole command line without the keys of the job."""
    parser = Parser(
        prog="shardwise",
        description="Train models too large for one accelerator, with the same numbers on every layout.",
        epilog="`shardwise train` alone trains a small model on the standard library's sources.\n"
        "`shardwise COMMAND --help` shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, command in COMMANDS.items():
        page = commands.add_parser(
            name, help=command.summary, description=command.description, takes_keys=command.takes_job
        )
        command.options(page)
    return parser


def as_command(words: Sequence[str]) -> Sequence[str]:
    """`words` with the two of a command such as `plan evaluate` as one."""
    pair = " ".join(words[:2])
    return [pair, *words[2:]] if len(words) > 1 and pair in COMMANDS else words


def run(words: Sequence[str]) -> int:
    """Carry out a command line. Raises ShardwiseError for a user's mistake."""
    parser = build_parser()
    if not words:
        parser.print_help()
        return MISTAKE
    words = as_command(words)
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        raise ConfigError(f"unknown command {words[0]!r}.{nearest(words[0], COMMANDS)}")
    keys: dict[str, Any] = {}
    if words[0] in COMMANDS and COMMANDS[words[0]].takes_job:
        from shardwise.job.sources import read_value, take_overrides

        words, overrides = take_overrides(words)
        keys = {key: read_value(key, text) for key, text in overrides}
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(_explain_unknown(unknown[0], options.command))
    return COMMANDS[options.command].run(options, keys)


def _explain_unknown(word: str, command: str) -> str:
    if not word.startswith("-"):
        takes = "takes one job" if COMMANDS[command].takes_job else "does not take so many words"
        return f"unexpected {word!r}: {command} {takes}; see `shardwise {command} --help`"
    if not COMMANDS[command].takes_job:
        return f"unknown option {word}; see `shardwise {command} --help`"
    from shardwise.job.schema import Job
    from shardwise.job.section import suggestion

    name = word.lstrip("-").partition("=")[0]
    if name in SPECIAL:
        return f"{command} has no option {word}; see `shardwise {command} --help`"
    close = difflib.get_close_matches(name, SPECIAL, n=1, cutoff=0.8)
    if close:
        return f"unknown option {word}. Did you mean '--{close[0]}'?"
    hint = suggestion(Job, name.replace("-", "_"))
    return f"unknown option {word}.{hint} Keys of the job are given as --section.key VALUE."


def main(words: Sequence[str] | None = None) -> int:
    """Entry point of the `shardwise` command: the exit code."""
    secure_streams()
    try:
        return run(sys.argv[1:] if words is None else list(words))
    except ShardwiseError as error:
        _complain(str(error))
        leave_failure(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _complain(f"{str(error.filename)[:80]}… is longer than a file's name may be")
        return OutputError.exit_code
    except KeyboardInterrupt:
        with _deaf_to_interrupts():
            _complain("interrupted")
        return INTERRUPTED
    finally:
        flush_or_leave("stdout")


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let another Ctrl-C meanwhile pass: the command ends already."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message))


if __name__ == "__main__":
    sys.exit(main())
