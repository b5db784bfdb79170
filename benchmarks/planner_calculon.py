"""Calculon beside the planner, on the rows of published tables that Calculon can express.

    python -m benchmarks.planner_calculon --calculon DIRECTORY [--unmeasured] TABLE.csv ...

DIRECTORY is a checkout of github.com/calculon-ai/calculon (Apache-2.0), which is not on PyPI; its system files for A100
and H100 are read from there, with nothing of them changed. Calculon has tensor, pipeline and data parallelism with
ZeRO-1, full and selective recomputation, and dense blocks of two matrices in the MLP with scores that are written. Rows
with sharded parameters, context parallelism, other recomputation, tensor groups over nodes or other accelerators are
not its rows. Gated MLPs are given to it as ungated ones with as many FLOPs (3/2 of the width), and flash attention as
its own attention; such rows are counted apart. Of its two ways to reduce gradients (beside backward or behind it) the
better one on the table counts. Times are of blocks alone in Calculon; the planner's have head and embeddings.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.published.evaluate import RowResult, evaluate_rows
from shardwise.planner.published.mapping import configuration
from shardwise.planner.published.measurement import measured
from shardwise.planner.published.row import LAYER_METRIC, Row, Unmapped
from shardwise.planner.published.tables import read_table

SYSTEMS = {"A100 80GB": "a100_80g.json", "H100 SXM": "h100_80g_nvl8.json"}
RECOMPUTED = {"none": "none", "full": "full", "attention": "attn_only"}
Seconds = Callable[
    [TrainingConfiguration, bool, bool], float
]  # of a configuration, whether a layer alone, reduction beside


class NotItsRow(Exception):
    """What Calculon cannot express, and why."""


def load(directory: Path) -> Seconds:
    """Calculon's own prediction. Needs its checkout on the path."""
    sys.path.insert(0, str(directory))
    from calculon.llm import Llm
    from calculon.system import System

    log = logging.getLogger("calculon")
    build = getattr(Llm.Execution, "from_json", Llm.Execution)

    def seconds(given: TrainingConfiguration, layer: bool, beside: bool) -> float:
        system = System(json.loads((directory / "systems" / SYSTEMS[given.cluster.accelerator.name]).read_text()))
        run = Llm(Llm.Application(application(given)), log)
        try:
            run.compile(system, build(execution(given, beside)))
            run.run(system)
        except (AssertionError, Llm.Error) as error:
            raise NotItsRow(str(error) or "refused") from error
        return float(run.get_total_time() - (run.get_optim_step_time() if layer else 0.0))

    return seconds


def check(given: TrainingConfiguration) -> None:
    """Raises NotItsRow."""
    reasons = {
        "accelerator": given.cluster.accelerator.name not in SYSTEMS,
        "sharded parameters or gradients": given.zero > 1,
        "context parallelism": given.context > 1,
        f"recomputation {given.checkpointing}": given.checkpointing not in RECOMPUTED
        or given.checkpointed not in (0, 1),
        "tensor ranks over nodes": given.tensor > given.cluster.per_node,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotItsRow(reason)


def approximate(given: TrainingConfiguration) -> bool:
    """Whether Calculon has to be given something else that is near."""
    return given.model.gated or given.flash or given.model.key_value_heads != given.model.heads


def application(given: TrainingConfiguration) -> dict[str, int]:
    """Calculon's description of the model."""
    model = given.model
    return {
        "hidden": model.hidden,
        "feedforward": model.intermediate * 3 // 2 if model.gated else model.intermediate,
        "seq_size": given.sequence,
        "attn_heads": model.heads,
        "attn_size": model.hidden // model.heads,
        "num_blocks": model.layers,
    }


def execution(given: TrainingConfiguration, beside: bool) -> dict[str, Any]:
    """Calculon's description of the run, with the settings of its own validation where a row leaves a choice."""
    data = given.replica * given.shard
    inside = given.ranks <= given.cluster.per_node
    scattered = given.sequence_parallel
    return {
        "training": True,
        "num_procs": given.ranks,
        "tensor_par": given.tensor,
        "pipeline_par": given.pipeline,
        "data_par": data,
        "tensor_par_net": 0,
        "pipeline_par_net": 0 if inside else 1,
        "data_par_net": 0 if inside else 1,
        "batch_size": given.sequences,
        "microbatch_size": given.microbatch,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTED[given.checkpointing],
        "pipeline_interleaving": given.virtual,
        "optimizer_sharding": given.zero == 1 and data > 1,
        "tensor_par_comm_type": "rs_ag" if scattered else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": scattered and given.checkpointing == "attention",
        "data_par_overlap": beside and data > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
    }


def compared(rows: Sequence[Row], theirs: Seconds, unmeasured: bool) -> dict[str, Any]:
    """Errors in per cent of both on the rows that Calculon runs; the planner's with the shipped constants, or refitted
    without any row of the software."""
    kept, refused = _runnable(rows, theirs)
    ours = evaluate_rows(rows, leave_one_stack_out=unmeasured)
    found: dict[str, Any] = {"refused": refused}
    for kind in ("exact", "approximate"):
        numbers = [number for number, given in kept.items() if approximate(given) == (kind == "approximate")]
        if numbers:
            ways = [
                [_error(rows[number], kept[number], theirs, beside) for number in numbers] for beside in (True, False)
            ]
            found[kind] = {
                "rows": len(numbers),
                "calculon": min((_summary(errors) for errors in ways), key=lambda each: each["median"]),
                "planner": _summary([_ours(ours[number]) for number in numbers]),
            }
    return found


def _runnable(rows: Sequence[Row], theirs: Seconds) -> tuple[dict[int, TrainingConfiguration], dict[str, int]]:
    kept: dict[int, TrainingConfiguration] = {}
    refused: dict[str, int] = {}
    for number, row in enumerate(rows):
        try:
            if row.text["fit_role"] == "context" or not measured(row):
                continue
            given = configuration(row)
            check(given)
            _error(row, given, theirs, beside=False)
            kept[number] = given
        except (NotItsRow, Unmapped) as reason:
            refused[str(reason)[:60]] = refused.get(str(reason)[:60], 0) + 1
    return kept, refused


def _error(row: Row, given: TrainingConfiguration, theirs: Seconds, beside: bool) -> float:
    """Calculon's, in the unit of the measurement."""
    layer = row.text["metric"].startswith(LAYER_METRIC)
    seconds, found = theirs(given, layer, beside), measured(row)
    assert found is not None
    if found.unit == "step_s":
        return 100 * abs(seconds / found.value - 1)
    speed = given.tokens / seconds / given.ranks
    flops = given.model.flops_per_token(given.sequence)
    peak = given.cluster.accelerator.peak(given.precision) or math.nan
    value = {
        "tok_s_gpu": speed,
        "tflops_gpu": speed * flops.get(found.convention, math.nan) / 1e12,
        "mfu_pct": 100 * speed * flops["palm"] / 1e12 / peak,
    }[found.unit]
    return 100 * abs(value / found.value - 1)


def _ours(result: RowResult) -> float:
    """An error in per cent; a row that was kept has one."""
    if result.error_percent is None:
        raise ValueError(f"the planner does not score a row that Calculon runs: {result}")
    return result.error_percent


def _summary(errors: Sequence[float]) -> dict[str, float]:
    ordered = sorted(errors)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calculon", type=Path, required=True, metavar="DIRECTORY", help="checkout of Calculon")
    parser.add_argument("--unmeasured", action="store_true", help="the planner knows no row of the software")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    options = parser.parse_args(words)
    theirs = load(options.calculon)
    print(
        json.dumps(
            {path.stem: compared(read_table(path), theirs, options.unmeasured) for path in options.tables}, indent=1
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
