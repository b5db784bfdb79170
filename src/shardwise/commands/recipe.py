"""`shardwise recipe`: a recipe of HyperPod as a job, with what became of each of its keys."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, OutputError
from shardwise.words import output_console, say_note

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.job.recipes.translation import RecipeTranslation
    from shardwise.plan.plan import Plan

USUAL_INSTANCE = "p5.48xlarge"  # of Amazon's launcher, where nothing says another
IN_NAMES = {r"(^|_)p4(_|x\d)": "p4d.24xlarge", r"(^|_)p5(_|x\d)": USUAL_INSTANCE}  # of recipes of branch v1


def recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="a recipe: SMP and others of branch v1, or LLMFT")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="values of the recipe by dotted key, such as trainer.num_nodes=2",
    )
    parser.add_argument("--instance-type", metavar="TYPE", help="unset: the recipe's first, else p5.48xlarge")
    parser.add_argument("--print", action="store_true", help="print the job as YAML instead of what became of the keys")
    parser.add_argument("--print-plan", action="store_true", help="print its plan on the recipe's nodes instead")
    parser.add_argument("--output", metavar="JOB.yaml", help="write the job into a new file")
    parser.add_argument("--to", metavar="TARGET", help="write what starts it there, as `shardwise launch` does")
    parser.add_argument("--submit", action="store_true", help="with --to: hand it to the target's own client")


def run_recipe(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Translate a recipe, and print or write what is asked for. Raises ShardwiseError for a user's mistake."""
    from shardwise.commands.launch import show_launch, write_launch
    from shardwise.job.recipes.recipe_file import read_recipe
    from shardwise.job.recipes.translation import translate_recipe
    from shardwise.launch.launch_plan import name_of

    _check(options, keys)
    result = translate_recipe(read_recipe(options.recipe, options.overrides), keys)
    result.require()
    settle_cluster(result, options.instance_type)
    for note in result.notes:
        say_note(note)
    job = result.job()
    if options.print:
        print(result.job_text(), end="")
    if options.print_plan:
        _print_plan(recipe_plan(result))
    if options.output is not None:
        _write(Path(options.output), result.job_text())
        print(f"wrote {options.output}")
    if options.to is not None:
        show_launch(job, options.to, name_of(options.recipe))
        return write_launch(job, options.to, None, options.submit, name_of(options.recipe))
    if not (options.print or options.print_plan or options.output):
        output_console().print(outcome_table(result))
        print(counted(result))
    return 0


def _check(options: argparse.Namespace, keys: dict[str, Any]) -> None:
    if options.submit and options.to is None:
        raise ConfigError("--submit does nothing without --to; name the target")
    if options.instance_type is not None and "launch.cluster" in keys:
        raise ConfigError(f"--instance-type={options.instance_type} and --launch.cluster both name nodes; keep one")


def settle_cluster(result: RecipeTranslation, instance_type: str | None = None) -> None:
    """Put the nodes that a recipe asks for into its job, unless `launch.cluster` is given.

    Raises:
        ConfigError: the instance type is unknown, or has other devices than the recipe.
    """
    from shardwise.planner.constants.inventory import cluster

    name = (instance_type or _instance_type(result)).removeprefix("ml.")
    where = result.keys.setdefault("launch.cluster", f"{name}:{result.nodes.get('count', 1)}")
    nodes = cluster(where)
    devices = result.nodes.get("devices", nodes.per_node)
    if devices != nodes.per_node:
        raise ConfigError(
            f"trainer.devices={devices}: a node of {where} has {nodes.per_node}; use trainer.devices={nodes.per_node}, "
            "or another --instance-type"
        )


def _instance_type(result: RecipeTranslation) -> str:
    """Return the first instance type of a recipe that has its devices, else what its name says, else the usual one."""
    from shardwise.planner.constants.inventory import instance_row

    stated = [str(name) for name in result.nodes.get("instance_types", [])]
    fitting = (name for name in stated if instance_row(name)["per_node"] == result.nodes.get("devices"))
    named = (instance for pattern, instance in IN_NAMES.items() if re.search(pattern, result.recipe.name))
    return next(fitting, None) or next(iter(stated), None) or next(named, USUAL_INSTANCE)


def recipe_plan(result: RecipeTranslation) -> Plan:
    """Return the plan of a recipe's job on its nodes. Raises ShardwiseError where it cannot run there."""
    from shardwise.model.build import build_model
    from shardwise.model.discover import discover
    from shardwise.plan.plan import resolve
    from shardwise.planner.constants.inventory import cluster
    from shardwise.planner.search.search import world_of

    job = result.job()
    world = world_of(cluster(result.keys["launch.cluster"]))
    return resolve(job, world, discover(build_model(job), job))


def _print_plan(plan: Plan) -> None:
    from shardwise.plan.table import plan_table

    output_console().print(plan_table(plan))


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputError(f"--output={path} is there already; name a new file") from None
    except OSError as error:
        raise OutputError(f"--output={path}: {error.strerror}") from error


def outcome_table(result: RecipeTranslation) -> Table:
    """Return what became of each key of a recipe, as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Recipe {result.recipe.name}", title_justify="left", title_style="bold")
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("effect", no_wrap=True)
    table.add_column("becomes, or why not", style="dim", overflow="fold")
    for outcome in result.outcomes:
        value = f"{outcome.shown} (left out)" if outcome.is_default else outcome.shown
        table.add_row(outcome.name, Text(value), outcome.effect, Text(outcome.says))
    return table


def counted(result: RecipeTranslation) -> str:
    """Return how many keys act, have no effect and are refused."""
    given = [outcome for outcome in result.outcomes if not outcome.is_default]
    effects = [outcome.effect for outcome in given]
    return (
        f"{len(given)} keys: {effects.count('acts')} act, {effects.count('no effect')} have no effect, "
        f"{effects.count('refused')} are refused"
    )
