"""A step of a Mamba-2 on context ranks: mixers that hand on their state, beside mixers that see whole sequences.

    python -m benchmarks.carried_state_cpu --ranks 2 --json result.json

Both train the same weights on the same rows, in turns; the slowest rank's time counts. Bytes are of the tensors that
the forward of a step keeps for backward on one rank, weights among them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.muon_cpu import run_ranks
from benchmarks.record import header, write_json
from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import resolve
from shardwise.training.init import initialize
from shardwise.training.objectives.choose import make_objective
from shardwise.training.setup import current_world

LENGTH, VOCABULARY = 2048, 512
WAYS = ("handed on", "whole")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return compare("carried_state_cpu", __doc__, measure, arguments, WAYS)


def compare(
    name: str, doc: str | None, measured: Callable[..., Any], arguments: Sequence[str] | None, ways: Sequence[str]
) -> int:
    """Run the benchmark `name` of two ways, and print their times and the bytes that they keep."""
    options, by_rank = run_ranks(name, doc, measured, arguments, rounds=5)
    slowest = {way: [max(each) for each in zip(*(rank["seconds"][way] for rank in by_rank))] for way in ways}
    first, second = (slowest[way] for way in ways)
    for way in ways:
        kept = max(rank["bytes"][way] for rank in by_rank) / 1e6
        print(f"{way}: {statistics.median(slowest[way]):.3f} s a step, {kept:.1f} MB kept for backward")
    ratios = sorted(own / other for own, other in zip(first, second))
    print(f"{ways[0]} takes {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of the other's time")
    if options.json:
        write_json(options.json, {**header(("torch", "transformers", "shardwise")), "ranks": by_rank})
    return 0


def measure(layers: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return what this rank measured. Collective."""
    parallel = {"context_parallel_degree": dist.get_world_size()}
    changes = (lambda facts: facts, without_states)
    return interleaved(
        {way: mamba(layers, width, parallel, change) for way, change in zip(WAYS, changes, strict=True)}, rounds
    )


def interleaved(models: Mapping[str, ParallelModel], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of each round of each model, which take turns, and the bytes that each keeps. Collective."""
    seconds: dict[str, list[float]] = {way: [] for way in models}
    kept: dict[str, int] = {}
    for _ in range(rounds + 1):
        for way, model in models.items():
            dist.barrier()
            began = time.perf_counter()
            kept[way] = step(model)
            dist.barrier()
            seconds[way].append(time.perf_counter() - began)
    return {"seconds": {way: each[1:] for way, each in seconds.items()}, "bytes": kept}


def mamba(
    layers: int, width: int, parallel: dict[str, Any], change: Callable[[ModelFacts], ModelFacts]
) -> ParallelModel:
    """Return a Mamba-2 whose facts are changed, on ranks of this parallel section."""
    config = {
        "model_type": "mamba2", "hidden_size": width, "num_hidden_layers": layers, "vocab_size": VOCABULARY,
        "expand": 2, "head_dim": 64, "num_heads": 2 * width // 64, "state_size": 64, "n_groups": 1,
    }  # fmt: skip
    sections = {
        "model": {"config": config}, "data": {"sequence_length": LENGTH},
        "parallel": {"ddp_dist_backend": "gloo", **parallel},
        "training": {"sequences_per_step": 1, "microbatch_size": 1}, "precision": {"compute": "fp32"},
    }  # fmt: skip
    job, device = Job.model_validate(sections), torch.device("cpu")
    built = build_model(job)
    facts = change(discover(built, job))
    plan = resolve(job, current_world(device), facts)
    model = parallelize(built, plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, 0)
    return model


def without_states(facts: ModelFacts) -> ModelFacts:
    """Return the facts of a model of which nothing goes on from a state."""
    assert facts.split_forward is not None
    gathered = tuple(replace(module, carries=None) for module in facts.split_forward.gathered)
    return replace(facts, split_forward=replace(facts.split_forward, gathered=gathered))


def step(model: ParallelModel) -> int:
    """Run forward and backward of a sequence; return the bytes that the forward kept."""
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = Batch({"input_ids": tokens}, tokens, torch.zeros(1, dtype=torch.int64))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.run(make_objective(model), [batch], 0, torch.ones((), dtype=model.accumulation_dtype))
    for parameter in model.module.parameters():
        parameter.grad = None
    return sum(kept.values())


if __name__ == "__main__":
    sys.exit(main())
