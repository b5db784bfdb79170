"""The reference pages, written from the code: `python -m tools.reference.pages docs/reference`.

Each page is a function of the tables that the program itself reads, so that it cannot say what the code does not do; a
test writes the pages again and compares. What code cannot tell (metrics, environment) stands in `reference_tables`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import shardwise
from shardwise import errors
from shardwise.commands.cli import COMMANDS
from shardwise.errors import ShardwiseError
from shardwise.errors.exit_codes import EXIT_CODES, RESTART_POLICIES
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.devices import KINDS, Feature
from shardwise.job.keys import leaf_keys, sections
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizers import ELEMENTWISE, UNUSABLE
from shardwise.job.schema import Job
from shardwise.job.section import Section, item_sections_of
from shardwise.job.smp_options import ANY, MAPPED, MPI_NOTES, OPTIONS, Option, translate
from shardwise.job.sources import ENVIRONMENT, SMP_KEY
from shardwise.job.values import MOST
from shardwise.model.facts import BlockFacts, ModelFacts
from shardwise.observe.metrics import __doc__ as METRICS_DOC
from shardwise.parallel.layout import SMP_LETTERS, Layout, smp_axes
from shardwise.plan.plan import Dtypes, World, resolve
from shardwise.plan.rules import rules
from shardwise.smp.api import api_page
from tools.reference.attention import FAMILY_HEAD, KERNEL_HEAD, family_rows, kernel_rows
from tools.reference.recipes import RECIPE_HEAD, model_names, recipe_tables
from tools.reference.sagemaker import ARGUMENT_HEAD, estimator_rows, trainer_rows
from tools.reference.tables import COMMON_OPTIONS, ENVIRONMENT_VARIABLES, FILES, METRICS, SUBJECTS

GENERATED = "<!-- Written by `python -m tools.reference.pages docs/reference` from the code; do not edit. -->"
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
FACTS = ModelFacts(
    "", 1, 0, (BlockFacts("block", 1),), dict.fromkeys(Axis, SUPPORTED)
)  # a model of which nothing matters here
SPLIT = ("shard", "pipeline", "tensor")
KEY_HEAD = ("key", "values", "default", "meaning")
PLACEMENTS = ("DPT", "DTP", "PDT", "PTD", "TDP", "TPD")


def pages(root: Path) -> dict[str, str]:
    """Every page by file name; `root` is the directory of pyproject.toml."""
    made = {name: page() for name, page in PAGES.items()} | {"package.md": package_page(root)}
    return {name: "\n".join([GENERATED, "", *lines]).rstrip() + "\n" for name, lines in made.items()}


def write(directory: Path, root: Path) -> list[Path]:
    """Write the pages into `directory`, making it where it is missing; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    found = pages(root)
    for name, text in found.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in found]


# --- markdown --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, with an empty one behind it."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(_cell(text) for text in row)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{value}`"


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


# --- the job ---------------------------------------------------------------------------------------------------------


def job_page() -> Iterator[str]:
    yield "# Keys of a job\n"
    yield "In YAML a key stands in its section (`training: {steps: 30}`), on the command line it is dotted"
    yield "(`--training.steps 30`). Weakest first: the default, the file, the environment variable"
    yield f"`{ENVIRONMENT}`, the command line. An unknown key, a wrong type or a value out of range ends with"
    yield "exit code 2 and the nearest known key or value; [legality.md](legality.md) has what cannot be combined.\n"
    for section, model in sections().items():
        keys = [key for key in leaf_keys() if key.rpartition(".")[0] == section]
        yield f"## {section or 'top level'}\n"
        yield f"{first_paragraph(model.__doc__)}\n"
        yield from table(KEY_HEAD, (_key_row(key) for key in keys))
        for key in keys:
            if item := item_sections_of(Job).get(key):
                yield f"### An item of {key}\n"
                yield f"{first_paragraph(item.__doc__)}\n"
                yield from table(KEY_HEAD, (_row(item, name, name) for name in item.model_fields))


def _key_row(key: str) -> tuple[str, str, str, str]:
    section, _, name = key.rpartition(".")
    return _row(sections()[section], name, key)


def _row(section: type[Section], name: str, shown: str) -> tuple[str, str, str, str]:
    """Return the row of a section's field, which the page calls `shown`."""
    schema, info = section.model_json_schema()["properties"][name], section.model_fields[name]
    default = "required" if info.is_required() else code(json.dumps(info.get_default(call_default_factory=True)))
    return code(shown), values_of(schema), default, info.description or ""


def values_of(schema: dict[str, Any]) -> str:
    """What a JSON schema accepts, in words."""
    if "anyOf" in schema:
        return " or ".join(values_of(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "mapping"
    if "enum" in schema:
        return ", ".join(code(word) for word in schema["enum"])
    bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    # What every integer stays below says nothing of a key.
    limits = [f"{sign} {schema[bound]:g}" for bound, sign in bounds if schema.get(bound, MOST) != MOST]
    kind = {"boolean": "true or false", "object": "mapping", "array": "list"}.get(schema["type"], schema["type"])
    if "items" in schema:
        kind = f"list of {values_of(schema['items'])}"
    return f"{kind} {', '.join(limits)}".strip()


def attention_page() -> Iterator[str]:
    yield "# Attention kernels\n"
    yield "`model.attention` names one; `auto` takes the first that can do what model, data and device ask for.\n"
    yield from table(KERNEL_HEAD, kernel_rows())
    yield "A family's row asks for all that its models may have (window, bias, soft cap), trained, with heads of 64, in"
    yield "fp32 on a CPU and bf16 on CUDA. Isolated documents and padding are masks. Other families: `eager`, `sdpa`.\n"
    yield from table(FAMILY_HEAD, family_rows())


def legality_page() -> Iterator[str]:
    yield "# What can be combined\n"
    yield "Each row is a rule that has to hold. Rows are judged in this order before any worker starts, and the first"
    yield "one broken ends the run with exit code 2; the message gives the job's own values, and where there is a"
    yield "nearest value that works, that one.\n"
    rows = ((code(r.id), ", ".join(code(k) for k in r.keys), r.sentence, r.fix) for r in rules())
    yield from table(("rule", "keys", "what has to hold, or why the key is refused", "way out"), rows)
    yield "Optimizers of this package, for every layout:\n"
    yield from (f"- `{name}`: {record.does}" for name, record in RECORDS.items())
    yield f"\nElementwise ones of torch, whose state can be sharded: {', '.join(map(code, ELEMENTWISE))}. Not usable:\n"
    yield from (f"- `{name}`: {because}" for name, because in UNUSABLE.items() if name not in RECORDS)


# --- SMP -------------------------------------------------------------------------------------------------------------


def smp_page() -> Iterator[str]:
    yield "# SageMaker's options\n"
    yield f"They are read from the key `{SMP_KEY}` of a job file, from a file or dict that holds nothing else, and from"
    yield f"the environment variable `{ENVIRONMENT}` (JSON). Three forms are accepted: the bare parameters,"
    yield "`{enabled, parameters}`, and an estimator's whole `distribution`"
    yield "(`{smdistributed: {modelparallel: {...}}, mpi: {...}}`). What has no effect here gives a note; an unknown"
    yield "option is an error that names the nearest one.\n"
    head = ("option", "SMP", "type or words", "what happens here")
    yield from table(head, ((code(o.name), o.versions, _accepts(o), what_happens(o)) for o in OPTIONS))
    yield "Around the parameters:\n"
    around = {"mpi.processes_per_host": "sets `parallel.workers`"}
    around |= {f"mpi.{name}": f"no effect: {because}" for name, because in MPI_NOTES.items()}
    around["torch_distributed"] = "no effect: torch.distributed is always used"
    yield from table(("key", "what happens here"), ((code(key), text) for key, text in around.items()))
    yield "SMP's own defaults, where a job's differ:\n"
    for key, (value, note) in translate({"offload_activations": True}).defaults.items():
        yield f"- `{key}: {value}`: {note.removeprefix('smp_options: ')}"


def recipe_page() -> Iterator[str]:
    yield "# Keys of HyperPod's recipes\n"
    yield "`shardwise recipe` reads them ([how](../how-to/recipes.md)). A key that stands in no table is refused, with"
    yield "the nearest one; null and empty text are as if the key were left out.\n"
    for title, rows in recipe_tables():
        yield f"## {title}\n"
        yield from table(RECIPE_HEAD, rows)
    yield "## Models whose dimensions are known\n"
    yield "They stand in the package, so that no hub is asked:"
    yield f"{model_names()}."


def _accepts(option: Option) -> str:
    if isinstance(option.accepts, tuple):
        return ", ".join(code(str(word)) for word in option.accepts)
    return "anything" if option.accepts is ANY else option.accepts.__name__


def what_happens(option: Option) -> str:
    """Mapped to which key, without effect because of what, or refused and why."""
    high: Any = {int: 2, float: 2.0, bool: True, str: "cluster", ANY: True}.get(option.accepts, option.accepts)  # type: ignore[arg-type]
    high = high[0] if isinstance(high, tuple) else high
    low: Any = {int: 1, bool: False}.get(option.accepts, high)  # type: ignore[arg-type]
    if option.refused(high):
        return f"refused{'' if option.refused(low) else f' unless {low}'}: {option.because}"
    if not (mapped := option.keys(high)):
        return f"no effect: {option.because}"
    text = " and ".join(f"sets `{key}`" + (f" to `{v}`" if v != high else "") for key, v in mapped.items())
    if not option.keys(low):
        return f"{text}; `false`: no effect, {option.because}"
    return text if option.because == MAPPED else f"{text}; {option.because}"


# --- a run -----------------------------------------------------------------------------------------------------------


def run_page() -> Iterator[str]:
    yield "# What a run writes\n"
    yield "## Files of the output directory\n"
    yield from table(("file", "what it is"), ((code(name), text) for name, text in FILES.items()))
    yield "The directory belongs to one job: the same job may run there again and replaces its files, another job is"
    yield "refused. Jobs are the same when everything but `output` and `observe` is.\n"
    yield "## metrics.jsonl\n"
    yield f"{first_paragraph(METRICS_DOC).partition(': ')[2]} An evaluation has `step` and"
    yield "`validation_loss`. JSON has no NaN or infinity; such a number is written as null.\n"
    yield from table(("key", "meaning"), ((code(key), text) for key, text in METRICS.items()))
    yield "## FLOPs conventions\n"
    for name, method in (
        ("tflops_per_rank and mfu", ModelFacts.model_flops_per_token),
        ("smp_tflops_per_rank", ModelFacts.smp_flops_per_token),
    ):
        yield f"**{name}.** " + " ".join(inspect.cleandoc(method.__doc__ or "").split()) + "\n"
    yield "MFU divides by `observe.peak_tflops`, or by the vendor's dense peak for the compute dtype where the"
    yield "accelerator is known (`shardwise/planner/hardware.py` lists them with their sources); otherwise it is null."


def precision_page() -> Iterator[str]:
    yield "# Dtypes\n"
    yield "One row for each `precision.compute`; `auto` is bf16 on CUDA and fp32 on a CPU. Nothing is cast by autocast."
    yield "The table that a run prints after its first step has the measured bytes of rank 0.\n"
    names = [field.name for field in fields(Dtypes)]
    yield from table(("precision.compute", *names, "AdamW bytes a parameter"), map(_dtype_row, BYTES))
    yield "Bytes a parameter: master weight, gradient and AdamW's two states, divided by the shard degree on each rank."
    yield "Beside them a block at a time exists gathered in the compute dtype. fp16 scales its loss"
    yield "([keys](job.md#precisionloss_scale)); a step whose gradients are not finite on any rank is skipped on all.\n"


def _dtype_row(compute: str) -> tuple[str, ...]:
    job = Job.model_validate({"precision": {"compute": compute}})
    dtypes = resolve(job, World(2, "cpu", 2), FACTS).dtypes
    size = BYTES[dtypes.parameters] + BYTES[dtypes.reduction] + 2 * BYTES[dtypes.optimizer]
    return compute, *(getattr(dtypes, field.name) for field in fields(Dtypes)), str(size)


def devices_page() -> Iterator[str]:
    yield "# What devices can do\n"
    yield "`parallel.device` names the kind; `shardwise doctor` shows what is missing on the machine that it runs on."
    yield "What a job asks for and its device has not is refused before anything starts. Where a feature has a"
    yield "condition, as float8 has (compute capability 8.9, or CDNA 3), the device that is there is asked.\n"
    yield "## Kinds\n"
    yield from table(
        ("`parallel.device`", "what", "`auto` takes it", "backend", "`precision.compute` auto", "what has run there"),
        ((code(kind.name), kind.means, "yes" if kind.is_default else "by name alone", code(kind.backend),
          code(kind.compute), kind.tried) for kind in KINDS),
    )  # fmt: skip
    yield "## Features\n"
    yield from table(
        ("", *(code(kind.name) for kind in KINDS)),
        ((feature, *(kind.supports(feature).reason or "yes" for kind in KINDS)) for feature in Feature),
    )


def layout_page() -> Iterator[str]:
    yield "# Ranks and axes\n"
    yield "The letters of `parallel.placement_strategy` are nested loops over D (data), P (pipeline) and T (tensor);"
    yield "the right-most varies fastest with the rank. `cluster` is DPT, `spread` is TPD. D is"
    yield "replica x shard x context, context innermost. The arithmetic is that of `shardwise.Layout`.\n"
    yield "Indices (d, p, t) of eight ranks with D = P = T = 2:\n"
    yield from table(("rank", *PLACEMENTS), (_placement_row(rank) for rank in range(8)))
    yield "SMP's notions, from `Layout.smp(notion)` as (rank, size, member ranks):\n"
    rows = [(code("local"), "ranks of one host")]
    rows += [(code(notion), "ranks that differ along " + ", ".join(smp_axes(notion))) for notion in SMP_LETTERS]
    yield from table(("notion", "group"), rows)


def _placement_row(rank: int) -> list[str]:
    indices = [Layout(dict.fromkeys(SPLIT, 2), placement, rank).coordinates() for placement in PLACEMENTS]
    return [str(rank), *(", ".join(str(index[axis]) for axis in SPLIT) for index in indices)]


# --- the program -----------------------------------------------------------------------------------------------------


class _Arguments:
    """Stands in for argparse's parser and keeps what a command adds to it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def add_argument(self, *names: str, **settings: Any) -> None:
        shown = f"{names[0]} {settings.get('metavar', '')}".strip()
        self.rows.append((code(shown if names[0].startswith("-") else settings["metavar"]), settings.get("help", "")))


def command_page() -> Iterator[str]:
    yield "# Command line\n"
    yield from table(("", ""), ((code(f"shardwise {name}"), text) for name, text in COMMON_OPTIONS.items()))
    for name, command in COMMANDS.items():
        arguments = _Arguments()
        command.options(arguments)  # type: ignore[arg-type]
        yield f"## shardwise {name}\n"
        yield f"{' '.join(command.description.split())}\n"
        if arguments.rows:
            keys = [(code("--SECTION.KEY VALUE"), "any [key of the job](job.md); a switch is true")]
            rows = arguments.rows + (keys if command.takes_job else [])
            yield from table(("argument", "meaning"), rows)


def error_page() -> Iterator[str]:
    yield "# Errors and exit codes\n"
    yield "A mistake that a user can mend is one message on stderr, without a traceback. From Python it is raised.\n"
    known = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, ShardwiseError)]
    bases = {item: item.__bases__[0].__name__ for item in known}
    rows = ((code(e.__name__), code(bases[e]), str(e.exit_code), first_paragraph(e.__doc__)) for e in known)
    yield from table(("error", "is a", "exit code", "when"), rows)
    rows = ((str(c.number), c.name, c.meaning, "yes" if c.is_restarted else "no") for c in EXIT_CODES)
    yield from table(("exit code", "name", "meaning", "worth another try"), rows)
    yield "Other signals that end a process give 128 and their number. What restart policies make of the codes:\n"
    yield from table(("target", "setting", "reads"), RESTART_POLICIES)


def sagemaker_page() -> Iterator[str]:
    yield "# Arguments of SageMaker's SDK\n"
    yield "What becomes of them in `shardwise.sagemaker`. In local mode some have no effect, with a note.\n"
    yield "## PyTorch\n"
    yield "The estimator of version 2, the arguments of its bases included.\n"
    yield from table(ARGUMENT_HEAD, estimator_rows())
    yield "## ModelTrainer\n"
    yield "The trainer of version 3; what its `with_` methods set stands here too.\n"
    yield from table(ARGUMENT_HEAD, trainer_rows())


def environment_page() -> Iterator[str]:
    yield "# Environment variables\n"
    head = ("variable", "what it does")
    yield from table(head, ((code(name), text) for name, text in ENVIRONMENT_VARIABLES.items()))


def python_page() -> Iterator[str]:
    yield "# Python\n"
    yield "Names are imported on first use: `import shardwise` imports neither torch nor transformers.\n"
    for name in shardwise.__all__:
        if name != "__version__":
            yield from _object(name, getattr(import_module(shardwise._HOMES[name]), name))


def _object(name: str, item: Any) -> Iterator[str]:
    yield f"## shardwise.{name}\n"
    if item is Job:
        yield f"{first_paragraph(item.__doc__)} Its sections and keys are in [job.md](job.md).\n"
        return
    if not is_dataclass(item):
        yield f"```python\n{signature(name, item)}\n```\n"
    yield f"{first_paragraph(item.__doc__)}\n"
    if is_dataclass(item):
        yield from table(("field", "type"), ((code(f.name), code(f.type)) for f in fields(item)))
    if inspect.isclass(item):
        rows = ((code(signature(member, value)), first_paragraph(_doc(value))) for member, value in _members(item))
        yield from table(("member", ""), rows)


def _members(item: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(item).items():
        if not name.startswith("_") and _doc(value) and (inspect.isroutine(value) or hasattr(value, "__get__")):
            yield name, value


def _doc(value: Any) -> str | None:
    return getattr(value, "__doc__", None)


class _Shown:
    """Prints as its text inside a signature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(name: str, item: Any) -> str:
    """`name(arguments) -> result` with annotations as they are written; a property is its name."""
    item = item.__func__ if isinstance(item, classmethod) else item
    if not callable(item):
        return name
    found = inspect.signature(item)
    shown = [
        each.replace(annotation=_shown(each.annotation), default=_named(each.default))
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]
    return f"{name}{found.replace(parameters=shown, return_annotation=_shown(found.return_annotation))}"


def _shown(annotation: Any) -> Any:
    return _Shown(annotation) if isinstance(annotation, str) else annotation


def _named(default: Any) -> Any:
    return _Shown(default.__name__) if inspect.isbuiltin(default) else default


def package_page(root: Path) -> Iterator[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield "# The package\n"
    yield f"Python {project['requires-python']}, {project['license']}. `pip install .` installs what training needs;"
    yield "an extra is asked for by name: `pip install '.[wandb]'`.\n"
    wanted = {"always": project["dependencies"]}
    wanted |= {code(extra): packages for extra, packages in project["optional-dependencies"].items()}
    yield from table(
        ("extra", "packages"), ((e, ", ".join(map(code, sorted(packages)))) for e, packages in wanted.items())
    )


def index_page() -> Iterator[str]:
    yield "# Reference\n"
    yield "These pages are written from the code. What to do with it is in the [tutorial](../tutorial.md) and the"
    yield "[how-to pages](../how-to/README.md).\n"
    yield from table(("subject", "where"), ((name, where) for name, where in SUBJECTS))


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": index_page,
    "command-line.md": command_page,
    "job.md": job_page,
    "legality.md": legality_page,
    "attention.md": attention_page,
    "devices.md": devices_page,
    "smp-options.md": smp_page,
    "recipes.md": recipe_page,
    "smp-api.md": lambda: iter(api_page()),
    "layout.md": layout_page,
    "precision.md": precision_page,
    "run.md": run_page,
    "errors.md": error_page,
    "environment.md": environment_page,
    "python.md": python_page,
    "sagemaker.md": sagemaker_page,
}


def main(words: Sequence[str] | None = None) -> int:
    """Entry point, in the root of the repository: writes the pages, says which."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference.pages", description="Write the reference pages.")
    parser.add_argument("directory", type=Path)
    for path in write(parser.parse_args(words).directory, Path.cwd()):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
