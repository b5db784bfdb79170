"""Peak memory of a training step: live tensor storages, counted, beside the planner's closed form.

    python -m benchmarks.memory_cpu --degrees 1 2 4 8 --json result.json

Each row is one shard degree and one policy of activation checkpointing on that many CPU ranks over Gloo. A rank trains
two real steps (the first makes the optimizer state) and the second one's peak is what it held; the rank that differs
most from the formulas counts. The run fails when one differs by more than a tenth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.record import header, write_json
from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.kernels.precision import LossScaler
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.observe.memory import LiveBytes
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import Plan, resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.world import WorldPool
from shardwise.training.init import initialize
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.setup import current_world
from shardwise.training.step import train_step

TOLERANCE = 0.10
POLICIES = ("none", "full", "selective")
PACKAGES = ("torch", "transformers", "shardwise")
MB = 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every degree and policy; 1 when a prediction is off by more than the tolerance."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    with WorldPool(limit=max(options.degrees), timeout=600.0) as pool:
        rows = [
            measure_row(pool, job_settings(options, degree, policy), degree, policy)
            for degree in options.degrees
            for policy in options.policies
        ]
    console.print(render(rows, options))
    if options.json:
        write_json(options.json, {**header(PACKAGES), "options": {**vars(options), "json": None}, "rows": rows})
        console.print(f"Written to {options.json}")
    wrong = [row for row in rows if abs(row["error"]) > TOLERANCE]
    for row in wrong:
        console.print(f"[bold red]degree {row['degree']}, {row['policy']}: off by {row['error']:+.1%}[/]")
    return 1 if wrong else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.memory_cpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--degrees", type=int, nargs="+", default=[1, 2, 4, 8], help="shard degrees, as many ranks each"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    sizes = {"layers": 4, "width": 256, "heads": 8, "vocabulary": 2048, "sequence": 128, "microbatch": 2}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="of the GPT-NeoX; default %(default)s")
    return parser.parse_args(arguments)


def job_settings(options: argparse.Namespace, degree: int, policy: str) -> dict[str, Any]:
    """A GPT-NeoX of the options' sizes, one microbatch a step on each rank."""
    config = {
        "model_type": "gpt_neox",
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "intermediate_size": 4 * options.width,
        "vocab_size": options.vocabulary,
        "max_position_embeddings": options.sequence,
    }
    return {
        "model": {"config": config},
        "data": {"sequence_length": options.sequence},
        "parallel": {"workers": degree},
        "memory": {"activation_checkpointing": policy},
        "training": {
            "microbatch_size": options.microbatch,
            "gradient_accumulation": 1,
            "sequences_per_step": options.microbatch * degree,
        },
    }


def measure_row(pool: WorldPool, settings: dict[str, Any], degree: int, policy: str) -> dict[str, Any]:
    """The row of the table: the rank whose peak differs most from the prediction."""
    results = pool.run(degree, measure, settings)
    peak, predicted = max(results, key=lambda result: abs(result[1].total / result[0] - 1))
    return {
        "degree": degree,
        "policy": policy,
        "measured": peak,
        "predicted": predicted.total,
        "error": predicted.total / peak - 1,
        "moment": predicted.moment,
        "causes": predicted.causes(),
        "peaks": [measured for measured, _ in results],
    }


def measure(settings: dict[str, Any], steps: int = 2) -> tuple[int, MemoryEstimate]:
    """On one rank: peak live bytes of the last of `steps` real training steps, and what the formulas say.

    The formulas are asked for the rows that came to this rank's experts, since a router that is drawn anew is uneven.
    """
    torch.set_num_threads(1)
    job, device = Job.model_validate(settings), torch.device("cpu")
    facts = discover(build_model(job), job)
    plan = resolve(job, current_world(device), facts)
    model = parallelize(build_model(job), plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, seed=0)
    optimizer, objective = ShardedOptimizer.of(model), make_objective(model)
    scaler = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale)
    with LiveBytes(model.module, optimizer.inner) as memory:
        for step in range(steps):
            batches = [random_batch(plan, facts.vocabulary_size) for _ in range(plan.accumulation)]
            memory.reset_peak()
            train_step(model, objective, batches, optimizer, scaler, step)
    return memory.peak, estimate(plan, facts, pipeline=model.layout.index("pipeline"), imbalance=imbalance_of(model))


def imbalance_of(model: ParallelModel) -> float:
    """Return the rows of this rank's experts over the mean of the ranks that share them, over its layers of a step."""
    routers, view = model.routers, model.layout.experts
    if routers is None or view.degree == 1:
        return 1.0
    names = [entry.name for entry in model.tensor_map]
    own = [number for number, stack in enumerate(routers.stacks) if any(name.startswith(f"{stack}.") for name in names)]
    rows = routers.routed[own].double().view(len(own), view.degree, -1).sum(2)
    return float((rows[:, view.expert] / rows.mean(1)).mean())


def random_batch(plan: Plan, vocabulary: int) -> Batch:
    """One microbatch of random tokens."""
    tokens = torch.randint(0, vocabulary, (plan.microbatch, plan.sequence_length + 1))
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    return Batch(inputs, tokens[:, 1:].contiguous(), torch.arange(plan.microbatch))


def render(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Measured and predicted MB of each row, then the prediction by cause."""
    table = Table(
        title=f"GPT-NeoX, {options.layers} layers x {options.width}, vocabulary {options.vocabulary}, "
        f"{options.microbatch} x {options.sequence} tokens a rank, fp32: peak MB of a rank"
    )
    causes = [cause for cause in rows[0]["causes"] if any(row["causes"][cause] for row in rows)]
    for column in ("degree", "policy", "measured", "predicted", "error", *(name.replace("_", "\n") for name in causes)):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in rows:
        numbers = [f"{row['causes'][cause] / MB:.1f}" for cause in causes]
        measured, predicted = (f"{row[key] / MB:.2f}" for key in ("measured", "predicted"))
        table.add_row(str(row["degree"]), row["policy"], measured, predicted, f"{row['error']:+.1%}", *numbers)
    return table


if __name__ == "__main__":
    sys.exit(main())
