"""The result of a search, in words: where the time and the bytes go, why one layout loses to another, days and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shardwise.job.axes import Axis
from shardwise.plan.draft import lookup
from shardwise.plan.rules import rules
from shardwise.planner.formulas.axis_traffic import AXIS_TRAFFIC
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.search.search import Candidate, SearchResult

TRAFFIC = tuple(map(str, AXIS_TRAFFIC))  # exposed communication, by axis
SCHEDULES = {  # said beside a layout; 1F1B is not
    "simple": "GPipe",
    "zero_bubble": "zero bubble",
    "zbv": "ZB-V",
    "dualpipev": "DualPipeV",
}
TIMES = ("matmul", "attention", "memory_bound", "recomputation", *TRAFFIC, "bubble", "launch", "optimizer", "offload")
DAY = 86400.0
GIB = 2**30
SAID = {
    "matmul": "matrix products",
    "memory_bound": "memory-bound work",
    "launch": "launching kernels",
    "copies": "copies of the state to hosts' memory",
    **{axis: f"exposed traffic of {axis}" for axis in TRAFFIC},
}
BYTES_SAID = {
    "unsharded_gradients": "whole gradients",
    "slack": "context and allocator",
    "pending": "freed, not yet to be had",
}


@dataclass(frozen=True)
class Budget:
    """Tokens to train on, and dollars an hour of one accelerator, where they are known."""

    tokens: float | None = None
    price: float | None = None

    def days(self, candidate: Candidate) -> float | None:
        return None if self.tokens is None else training_seconds(candidate, self.tokens) / DAY

    def cost(self, candidate: Candidate) -> float | None:
        """Dollars."""
        days = self.days(candidate)
        return None if days is None or self.price is None else days * 24 * candidate.prediction.ranks * self.price


def training_seconds(candidate: Candidate, tokens: float) -> float:
    """Return the seconds of so many tokens; smaller steps of a warm-up take longer for them, shorter sequences less."""
    plan, length, seconds = candidate.plan, candidate.configuration.sequence, 0.0
    samples = tokens / length
    starts = {stage.first_sample for stage in plan.step_sizes.stages}
    starts |= {stage.first_sample for stage in plan.sequence_lengths.stages}
    for start, end in pairwise(sorted(starts)):
        steps = max(0.0, min(end, samples) - start) / plan.step_sizes.after(start)
        seconds += steps * predict(_warming_up(candidate, start)).step_seconds
    rest = max(0.0, samples - max(starts))
    return seconds + rest * length / candidate.tokens_per_second


def _warming_up(candidate: Candidate, samples: int) -> TrainingConfiguration:
    """Return the configuration of the step that follows so many samples."""
    plan = candidate.plan
    return replace(
        candidate.configuration,
        accumulation=plan.accumulation_for(plan.step_sizes.after(samples)),
        sequence=candidate.configuration.sequence // plan.sequence_lengths.sequences_per_sample(samples),
        microbatch=plan.microbatch * plan.sequence_lengths.sequences_per_sample(samples),
    )


def layout_of(candidate: Candidate) -> str:
    """`tensor 8 · pipeline 15 · replica 8`; a world of one rank is `one rank`."""
    plan, job = candidate.plan, candidate.job
    parts = [f"{axis} {degree}" for axis, degree in plan.degrees.items() if degree > 1]
    stages = len(plan.stages) // plan.degrees[Axis.PIPELINE] if plan.stages else 1
    parts = [f"{part} × {stages} stages" if part.startswith(Axis.PIPELINE) and stages > 1 else part for part in parts]
    parts += ["sequence parallel"] if plan.sequence_parallel else []
    parts += [SCHEDULES[job.parallel.pipeline]] if plan.stages and job.parallel.pipeline in SCHEDULES else []
    return " · ".join(parts) or "one rank"


def memory_policy(candidate: Candidate) -> str:
    """`full, every 2nd block, offloaded`."""
    memory, parallel = candidate.job.memory, candidate.job.parallel
    words: list[str] = [memory.activation_checkpointing]
    words += [f"1 of {memory.checkpoint_every} blocks"] if memory.checkpoint_every > 1 else []
    words += ["rows of experts kept"] if memory.keep_expert_rows else []
    words += ["activations offloaded"] if memory.offload_activations else []
    words += ["parameters offloaded"] if memory.offload_parameters else []
    share = float(memory.offload_optimizer)
    words += [f"{'' if share == 1 else f'{share:.0%} of '}optimizer state offloaded"] if share else []
    every = candidate.job.checkpoint.memory_every
    words += [f"state in hosts' memory every {every} step{'s' * (every > 1)}"] if every else []
    words += ["blocks stay gathered"] if not parallel.reshard_after_forward else []
    return ", ".join(words)


def times_of(candidate: Candidate) -> dict[str, float]:
    """Seconds of a step by cause, those that are not zero, in the order of `TIMES`."""
    seconds = candidate.prediction.seconds
    return {cause: seconds[cause] for cause in [*TIMES, *(seconds.keys() - set(TIMES))] if seconds.get(cause, 0) > 0}


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """The causes that cost `candidate` most against `best`."""
    slower = best.tokens_per_second / candidate.tokens_per_second - 1
    per_token = [
        {cause: value / layout.prediction.tokens for cause, value in times_of(layout).items()}
        for layout in (candidate, best)
    ]
    more = {cause: value - per_token[1].get(cause, 0.0) for cause, value in per_token[0].items()}
    whole = best.prediction.step_seconds / best.prediction.tokens
    worst = sorted(more, key=lambda cause: -more[cause])[:2]
    named = [f"{SAID.get(cause, cause)} {more[cause] / whole:+.0%}" for cause in worst if more[cause] / whole >= 0.005]
    return f"{slower:.1%} slower" + (f": {', '.join(named)}" if named else "") if slower >= 0.0005 else "as fast"


def why_not_fit(candidate: Candidate) -> str:
    """Return how many bytes are missing, and what most of them are."""
    room = candidate.configuration.cluster.accelerator.memory_bytes
    if not candidate.fits_host:
        needed, share = candidate.prediction.host_bytes / GIB, candidate.configuration.cluster.host_bytes / GIB
        return f"keeps {needed:.1f} GiB a rank in the host's memory, whose share of it is {share:.1f} GiB"
    causes = sorted(candidate.memory.items(), key=lambda item: -item[1])[:2]
    largest = " and ".join(f"{BYTES_SAID.get(cause, cause)} {size / GIB:.1f}" for cause, size in causes)
    return f"needs {candidate.memory_bytes / GIB:.1f} of {room / GIB:.1f} GiB: {largest}"


def may_not_fit(candidate: Candidate, result: SearchResult) -> str | None:
    """Return a warning for a layout that fits as predicted but whose interval of memory ends beyond the device's."""
    if not candidate.fits or candidate.fits_surely:
        return None
    room, high = candidate.configuration.cluster.accelerator.memory_bytes, candidate.memory_interval[1]
    said = f"may not fit: the interval of its memory ends at {high / GIB:.1f} of {room / GIB:.1f} GiB"
    if result.surest is None:
        return f"{said}, as that of every layout"
    sure = f"{layout_of(result.surest)}, {memory_policy(result.surest)}: {why_slower(result.surest, candidate)}"
    return f"{said}; the fastest that ends within, for `--explain sure`, is {sure}"


def refusals(result: SearchResult, most: int = 5) -> Iterator[tuple[int, str, str]]:
    """(how many combinations, rule's id, rule's sentence) of the legality table, the commonest first."""
    sentences = {rule.id: rule.sentence for rule in rules()}
    for rule, count in result.illegal.most_common(most):
        yield count, rule, sentences.get(rule, "")


def chosen_keys(candidate: Candidate, result: SearchResult) -> dict[str, Any]:
    """Dotted key -> value of what the search chose, or was asked for, where the job says otherwise."""
    job = result.question.job
    changed = {key: value for key, value in candidate.changes.items() if value != lookup(job, key)}
    settled = {
        "training.sequences_per_step": candidate.job.training.sequences_per_step,
        "precision.compute": candidate.plan.dtypes.compute,
    }
    return changed | {key: value for key, value in settled.items() if value is not None}


def candidate_data(candidate: Candidate, budget: Budget = Budget()) -> dict[str, Any]:
    """A candidate as plain data: times in seconds, memory in bytes, rates of one accelerator."""
    prediction, plan = candidate.prediction, candidate.plan
    return {
        "layout": layout_of(candidate),
        "degrees": plan.degrees,
        "keys": {key: value for key, value in candidate.changes.items() if value is not None},
        "microbatch": plan.microbatch,
        "accumulation": plan.accumulation,
        "stages": [len(blocks) for blocks in plan.stages],
        "fits": candidate.fits,
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": list(prediction.interval),
        "seconds": times_of(candidate),
        "tokens_per_second": candidate.tokens_per_second,
        "tokens_per_second_per_accelerator": prediction.tokens_per_second,
        "tflops": prediction.tflops,
        "mfu": prediction.mfu,
        "memory_bytes": candidate.memory_bytes,
        "memory_interval": list(candidate.memory_interval),
        "fits_surely": candidate.fits_surely,
        "memory": candidate.memory,
        "stage_memory": list(candidate.stage_memory),
        "days": budget.days(candidate),
        "cost_dollars": budget.cost(candidate),
    }
