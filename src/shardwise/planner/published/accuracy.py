"""The accuracy tables of docs/explanations/planner.md, made again from tables of measurements.

    python -m shardwise.planner.published.accuracy tests/data/perf-tables docs/explanations/planner.md

writes them between their markers; a test holds the page against what the code gives.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.planner.constants.inventory import cluster, presets, stack_of
from shardwise.planner.formulas.communication import RankGroup, all_reduce_seconds, gather_seconds
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.published.evaluate import RowResult, error_summary, evaluate_rows, summary_over_tables
from shardwise.planner.published.tables import read_table

PROBES = 3  # rows of a stack on which its factor is fitted
SEEDS = 10  # draws of such rows
KEYS = ("median_percent", "p90_percent", "inside_interval_percent")


def tables(directory: Path) -> list[Path]:
    """The tables of training runs in a directory: those with roles of rows."""
    return [path for path in sorted(directory.glob("*.csv")) if "fit_role" in path.open().readline()]


def known(directory: Path) -> str:
    """Markdown: accuracy with the shipped constants."""
    summaries = {path.stem: error_summary(evaluate_rows(read_table(path))) for path in tables(directory)}
    head = ("table", "scored", "median", "p90", "max", "in 80 % interval", "mapped", "memory median", "memory p90")
    lines = [
        (
            name,
            str(summary["scored"]),
            *_figures(
                summary, "median_percent", "p90_percent", "max_percent", "inside_interval_percent", "mapped_percent"
            ),
            *_figures(summary["memory"], "median_percent", "p90_percent"),
        )
        for name, summary in summaries.items()
    ]
    middle = ("median over tables", "", *_middle(summaries), "", "", "", "")
    return _markdown(head, [*lines, middle, ("mean over tables", "", "", "", "", _inside(summaries), "", "", "")])


def _middle(scores: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    middle = summary_over_tables(scores)["median_over_tables"]
    return (*_figures(middle, "median_percent", "p90_percent"), "")


def _inside(scores: dict[str, dict[str, Any]]) -> str:
    return _figures(summary_over_tables(scores)["mean_over_tables"], "inside_interval_percent")[0]


def ranked(directory: Path) -> str:
    """Markdown: ranking and feasibility with the shipped constants."""
    head = (
        "table",
        "groups",
        "pairs",
        "ordered rightly",
        "median regret",
        "ran, called feasible",
        "crashed, called not",
    )
    lines = []
    for path in tables(directory):
        summary = error_summary(evaluate_rows(read_table(path)))
        order, memory = summary["ranking"], summary["memory"]
        figures = _figures(order, "ordered_percent", "regret_median_percent")
        called = _figures(memory, "ran_called_feasible_percent", "crashed_called_infeasible_percent")
        lines.append((path.stem, str(order["groups"]), str(order["pairs"]), *figures, *called))
    return _markdown(head, lines)


def unknown(directory: Path) -> str:
    """Markdown: accuracy for software and models that nobody has measured, without and with three rows of each stack
    (means over seeds); of the rows that are then left also what they have without. Tables of experts do not count among
    the others."""
    head = ("table", "median", "p90", "in 80 % interval", f"median with {PROBES} rows", "p90", "in 80 % interval")
    rows = {path.stem: read_table(path) for path in tables(directory)}
    blind = {name: evaluate_rows(own, leave_table_out=True) for name, own in rows.items()}
    probed = [
        {name: evaluate_rows(own, None, PROBES, seed, leave_table_out=True) for name, own in rows.items()}
        for seed in range(SEEDS)
    ]
    left = {name: error_summary(results) for name, results in blind.items()}
    drawn = [{name: error_summary(results) for name, results in draw.items()} for draw in probed]
    same = {name: [_of_same_rows(blind[name], draw[name]) for draw in probed] for name in rows}
    lines = [
        (name, *_figures(left[name], *KEYS), *_means([score[name] for score in drawn]), *_means(same[name])[:2])
        for name in rows
    ]
    dense = [name for name, own in rows.items() if not any(row.has_experts for row in own)]
    middles = [summary_over_tables({name: score[name] for name in dense})["median_over_tables"] for score in drawn]
    means = [summary_over_tables(summaries)["mean_over_tables"]["inside_interval_percent"] for summaries in drawn]
    inside = f"{statistics.mean(means):.1f}"
    of_dense = _middle({name: left[name] for name in dense})
    middle = ("median over tables without experts", *of_dense, *_means(middles)[:2], "", "", "")
    mean = ("mean over tables", "", "", _inside(left), "", "", inside, "", "")
    return _markdown((*head, "same rows without", "p90"), [*lines, middle, mean])


def _of_same_rows(blind: Sequence[RowResult], probed: Sequence[RowResult]) -> dict[str, Any]:
    """Return the summary of results without probes, of the rows that are scored with them."""
    return error_summary([replace(result, probe=other.probe) for result, other in zip(blind, probed, strict=True)])


def _means(scores: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{statistics.mean(score[key] for score in scores):.1f}" for key in KEYS)


def fabric(directory: Path) -> str:
    """Markdown: bandwidth of p5's collectives by the model of `communication.py` against the measured one; that of
    reduce-scatter is all-gather's in both."""
    lines = []
    with (directory / "fabric_bandwidth.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if "p5" in row["fabric"] and row["collective"] != "ReduceScatter"]
    for row in rows:
        nodes, size = int(row["nodes"]), float(row["size_MB"]) * 1e6
        if nodes == 1:
            continue
        p5 = cluster(f"p5.48xlarge:{nodes}")
        inter = p5.inter * 1e9
        over = RankGroup(
            p5.size, p5.per_node, p5.intra * 1e9 * p5.link.bandwidth, inter * p5.fabric.bandwidth,
            p5.link.hop_seconds, p5.fabric.hop_seconds, inter, (0.0, 0.0),
        )  # fmt: skip
        twice = row["collective"] == "AllReduce"
        seconds = all_reduce_seconds(size, over) if twice else gather_seconds(size, over)
        bus = (2 if twice else 1) * (p5.size - 1) / p5.size * size / seconds  # as NCCL's own tests count it
        lines.append((row["collective"], str(nodes), f"{bus / 1e9:.0f}", f"{float(row['GBps']):.0f}"))
    return _markdown(("collective of 256 MB", "nodes", "predicted bus GB/s", "measured GB/s"), lines)


def example(directory: Path) -> str:
    """Markdown: GPT-3 175B on p4d nodes as SMP's announcement describes it, with what it leaves out filled in."""
    head = (
        "nodes",
        "samples a step",
        "seconds a step",
        "samples/s",
        "80 % interval",
        "TFLOPs/GPU (8P)",
        "days for 300B",
    )
    lines = []
    for nodes, accumulation in ((120, 48), (240, 24), (240, 48)):
        given = published_175b(nodes, accumulation)
        prediction = predict(given)
        slow, fast = (given.sequences / seconds for seconds in reversed(prediction.interval))
        days = 300e9 / given.tokens * prediction.step_seconds / 86400
        speed = given.sequences / prediction.step_seconds
        cells = (nodes, given.sequences, f"{prediction.step_seconds:.1f}", f"{speed:.1f}", f"{slow:.1f} to {fast:.1f}")
        lines.append((*map(str, cells), f"{prediction.tflops['8P']:.0f}", f"{days:.0f}"))
    return _markdown(head, lines)


def published_175b(nodes: int, accumulation: int) -> TrainingConfiguration:
    """8 tensor ranks, 6 stages, the rest data ranks with sharded optimizer state; microbatches of one sequence."""
    return TrainingConfiguration(
        model=presets()["gpt3-175b"],
        cluster=cluster(f"p4d.24xlarge:{nodes}"),
        stack=stack_of("SMP1.13/PT1.12"),
        sequence=2048,
        microbatch=1,
        accumulation=accumulation,
        shard=nodes // 6,
        tensor=8,
        pipeline=6,
        zero=1,
        precision="fp16",
        reduction="fp16",
        checkpointing="full",
        flash=False,
    )


def _figures(score: dict[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple("" if score[key] is None else f"{score[key]:.1f}" for key in keys)


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


PARTS = {"known": known, "ranked": ranked, "unknown": unknown, "fabric": fabric, "example": example}


def part(page: str, name: str) -> str:
    """Return what stands between the markers of a part."""
    match = re.search(f"<!-- {name} -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert match is not None, name
    return match.group(1)


def update_accuracy_page(words: Sequence[str]) -> int:
    """Write the parts of a page anew: those named behind directory and page, or all of them."""
    directory, page, names = Path(words[0]), Path(words[1]), words[2:] or list(PARTS)
    made = {name: PARTS[name](directory) for name in names}
    text = page.read_text()
    for name, table in made.items():
        text = text.replace(f"<!-- {name} -->\n{part(text, name)}\n", f"<!-- {name} -->\n{table}\n")
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(update_accuracy_page(sys.argv[1:]))
