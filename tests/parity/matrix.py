"""The layout matrix: dimensions, which combinations are jobs, and small sets of cases that cover it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.job.schema import Job
from tests.parity.jobs import make_job

# Layouts are (shard, replica), or "zero1" and the number of ranks.
DIMENSIONS: dict[str, list[Any]] = {
    "layout": [(1, 1), (2, 1), (1, 2), (2, 2), ("zero1", 2)],
    "accumulation": [1, 2, 3],
    "checkpointing": ["none", "full", "selective", "group_2"],
    "offload": ["none", "activations", "parameters", "both"],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
    "model": ["gpt2", "gpt_neox", "bert"],
    "tied": [True, False],
    "dropout": [0.0, 0.1],
    "isolate": [False, True],
}
# For `-m slow`, beside those above.
MORE: dict[str, list[Any]] = {
    "layout": [(3, 1), (4, 1), (8, 1), (2, 4), (1, 4), (3, 2), (4, 2), (1, 8), ("zero1", 5), ("zero1", 8)],
    "checkpointing": ["every 2", "contiguous"],
}
ALL = {name: values + MORE.get(name, []) for name, values in DIMENSIONS.items()}
Case = dict[str, Any]


def is_job(case: Case) -> bool:
    """What legality refuses is no case: offload without what is offloaded."""
    if case["offload"] in ("activations", "both") and case["checkpointing"] == "none":
        return False
    return not (case["layout"][0] == "zero1" and case["offload"] in ("parameters", "both"))


def cover(seed: int, strength: int, dimensions: dict[str, list[Any]], tries: int = 60) -> list[Case]:
    """Cases that together hold every combination of `strength` values that some job holds.

    Greedy, as AETG (Cohen et al., IEEE Transactions on Software Engineering 23, 1997): of random cases around a missing
    combination the one that covers most.
    """
    draw = random.Random(seed)
    wanted = [c for c in _combinations(dimensions, strength) if _completed(dict(c), dimensions, draw) is not None]
    draw.shuffle(wanted)
    missing, cases = set(wanted), []
    for combination in wanted:
        if combination not in missing:
            continue
        candidates = [_completed(dict(combination), dimensions, draw) for _ in range(tries)]
        best = max((case for case in candidates if case), key=lambda case: len(missing & _held(case, strength)))
        missing -= _held(best, strength)
        cases.append(best)
    return cases


def _combinations(dimensions: dict[str, list[Any]], strength: int) -> Iterator[tuple[tuple[str, Any], ...]]:
    for chosen in itertools.combinations(dimensions, strength):
        for values in itertools.product(*(dimensions[name] for name in chosen)):
            yield tuple(zip(chosen, values))


def _held(case: Case, strength: int) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(case.items(), strength))


def _completed(part: Case, dimensions: dict[str, list[Any]], draw: random.Random) -> Case | None:
    """`part` with random values for the rest, or None where no legal case was found."""
    for _ in range(50):
        case = {name: part.get(name, draw.choice(values)) for name, values in dimensions.items()}
        if is_job(case):
            return case
    return None


def world_size(case: Case) -> int:
    shard, replica = case["layout"]
    return replica if shard == "zero1" else shard * replica


def job_of(case: Case, corpora: Path) -> Job:
    """The job of a case; with several ranks the last microbatches of the last ranks hold padding."""
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
    sequences = 2 * ranks * case["accumulation"] - (ranks - 1)
    fp64 = case["precision"] == "fp64"
    return make_job(
        corpora,
        case["model"],
        tied=case["tied"],
        dropout=case["dropout"],
        memory=memory,
        parallel=parallel,
        precision={"compute": case["precision"]},
        training={"sequences_per_step": sequences, "gradient_accumulation": case["accumulation"]},
        data={"isolate_documents": case["isolate"]},
        optimizer={"clip_norm": 0.5} if fp64 else {"name": "SGD", "learning_rate": 0.1, "clip_norm": 0.5},
    )
