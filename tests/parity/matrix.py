"""The layout matrix: dimensions, which combinations are jobs, and a pairwise cover of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.config import Job
from tests.parity.jobs import make_job

# The first value of each is the simplest. (shard, replica) with "zero1" for shard_optimizer_state.
DIMENSIONS: dict[str, list[Any]] = {
    "layout": [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8), ("zero1", 2), ("zero1", 8)],
    "accumulation": [1, 2, 3],
    "checkpointing": ["none", "full", "selective", "every 2", "group_2", "contiguous"],
    "offload": ["none", "activations", "parameters", "both"],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
    "model": ["gpt2", "gpt_neox", "bert"],
    "tied": [True, False],
    "dropout": [0.0, 0.1],
    "isolate": [False, True],
}
Case = dict[str, Any]


def is_job(case: Case) -> bool:
    """What legality refuses is no case: offload without what is offloaded."""
    if case["offload"] in ("activations", "both") and case["checkpointing"] == "none":
        return False
    return not (case["layout"][0] == "zero1" and case["offload"] in ("parameters", "both"))


def whole() -> Iterator[Case]:
    """The full cross product."""
    for values in itertools.product(*DIMENSIONS.values()):
        case = dict(zip(DIMENSIONS, values))
        if is_job(case):
            yield case


def pairwise(seed: int, tries: int = 30) -> list[Case]:
    """Cases that together hold every pair of values that some job holds; greedy (AETG, Cohen et al. 1997)."""
    draw = random.Random(seed)
    missing = {pair for pair in _all_pairs() if _completed(dict(pair), draw) is not None}
    cases = []
    while missing:
        first = draw.choice(sorted(missing, key=repr))
        candidates = [case for _ in range(tries) if (case := _completed(dict(first), draw)) is not None]
        best = max(candidates, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        cases.append(best)
    return cases


def _all_pairs() -> Iterator[tuple[tuple[str, Any], ...]]:
    for (a, many), (b, others) in itertools.combinations(DIMENSIONS.items(), 2):
        for x, y in itertools.product(many, others):
            yield ((a, x), (b, y))


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations([(name, case[name]) for name in DIMENSIONS], 2))


def _completed(part: Case, draw: random.Random) -> Case | None:
    """`part` with random values for the rest, or None where no legal case was found."""
    for _ in range(50):
        case = {name: part.get(name, draw.choice(values)) for name, values in DIMENSIONS.items()}
        if is_job(case):
            return case
    return None


def world_size(case: Case) -> int:
    shard, replica = case["layout"]
    return replica if shard == "zero1" else shard * replica


def job_of(case: Case, corpora: Path) -> Job:
    """The job of a case. 13 samples a step where that divides nothing: the last microbatches hold padding."""
    shard = case["layout"][0]
    ranks = world_size(case)
    memory: dict[str, Any] = {"loss_chunk_tokens": 24}
    checkpointing = case["checkpointing"]
    if checkpointing != "none":
        memory["activation_checkpointing"] = "selective" if checkpointing == "selective" else "full"
    if checkpointing == "every 2":
        memory["checkpoint_every"] = 2
    elif checkpointing in ("group_2", "contiguous"):
        memory["checkpoint_strategy"] = checkpointing
    memory["offload_activations"] = case["offload"] in ("activations", "both")
    memory["offload_parameters"] = case["offload"] in ("parameters", "both")
    parallel = {"shard_optimizer_state": True} if shard == "zero1" else {"sharded_data_parallel_degree": shard}
    size = ranks * case["accumulation"]
    fp64 = case["precision"] == "fp64"
    return make_job(
        corpora,
        case["model"],
        tied=case["tied"],
        dropout=case["dropout"],
        memory=memory,
        parallel=parallel,
        precision={"compute": case["precision"]},
        training={"sequences_per_step": size + (size - 1) // 2, "gradient_accumulation": case["accumulation"]},
        data={"isolate_documents": case["isolate"]},
        optimizer={"clip_norm": 0.5} if fp64 else {"name": "SGD", "learning_rate": 0.1, "clip_norm": 0.5},
    )
