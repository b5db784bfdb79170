"""What becomes of a directory of HyperPod's recipes: `python -m tools.recipe_report DIRECTORY [--no-plan] [--keys]`.

One line a recipe: how many of its keys act, have no effect and are refused, and whether its job's plan is legal on the
nodes that it names. Then the totals, and what was refused, by reason. Exit code 1 where a recipe has no plan.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwise.commands.recipe import recipe_plan, settle_cluster
from shardwise.errors import ShardwiseError
from shardwise.job.recipes.recipe_file import read_recipe
from shardwise.job.recipes.translation import RecipeTranslation, translate_recipe

EFFECTS = ("acts", "no effect", "refused")


class ReportRow(NamedTuple):
    """What became of one recipe: keys by effect, and why it has no plan, empty where it has one."""

    name: str
    effects: Counter[str]
    complaint: str


def report_row(path: Path, plans: bool = True, instance_type: str | None = None) -> ReportRow:
    """Return what becomes of a recipe; without `plans` a job is enough."""
    effects: Counter[str] = Counter()
    try:
        result = translate_recipe(read_recipe(path))
        effects.update(outcome.effect for outcome in result.outcomes if not outcome.is_default)
        settle_cluster(result, instance_type)
        result.job()
        if plans:
            recipe_plan(result)
    except ShardwiseError as error:
        return ReportRow(path.stem, effects, str(error))
    return ReportRow(path.stem, effects, "")


def key_effects(results: list[RecipeTranslation]) -> dict[str, Counter[str]]:
    """Return how often each key of some recipes acts, has no effect and is refused."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for outcome in result.outcomes:
            if not outcome.is_default:
                counts.setdefault(outcome.name, Counter())[outcome.effect] += 1
    return dict(sorted(counts.items()))


def lines(rows: list[ReportRow], plans: bool = True) -> Iterator[str]:
    """Yield the report; without `plans` of jobs alone."""
    width = max(len(row.name) for row in rows)
    yield f"{'recipe':<{width}}  acts  no effect  refused  {'plan' if plans else 'job'}"
    for row in rows:
        acts, idle, refused = (row.effects[effect] for effect in EFFECTS)
        verdict = "no: " + " ".join(row.complaint.split()) if row.complaint else "yes"
        yield f"{row.name:<{width}}  {acts:4}  {idle:9}  {refused:7}  {verdict}"
    total = sum((row.effects for row in rows), Counter())
    planned = sum(not row.complaint for row in rows)
    of_what = "jobs with a plan on their nodes" if plans else "jobs"
    yield f"{planned} of {len(rows)} recipes ({planned / len(rows):.0%}) are {of_what}"
    yield f"{total.total()} keys: " + ", ".join(f"{total[effect]} {effect}" for effect in EFFECTS)


def main() -> int:
    """Print the report of a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-plan", action="store_true", help="stop at the job; imports no torch")
    parser.add_argument("--keys", action="store_true", help="count each key instead")
    parser.add_argument("--instance-type", help="of all recipes; unset: each one's own")
    options = parser.parse_args()
    paths = sorted(options.directory.rglob("*.yaml"))
    if not paths:
        parser.error(f"{options.directory} holds no .yaml file")
    if options.keys:
        for name, counts in key_effects([translate_recipe(read_recipe(path)) for path in paths]).items():
            print(f"{name:<80} " + "  ".join(f"{effect} {counts[effect]}" for effect in EFFECTS if counts[effect]))
        return 0
    rows = [report_row(path, not options.no_plan, options.instance_type) for path in paths]
    print(*lines(rows, not options.no_plan), sep="\n")
    return int(any(row.complaint for row in rows))


if __name__ == "__main__":
    sys.exit(main())
