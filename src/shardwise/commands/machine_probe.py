"""This machine's own probe: what its CPU, memory and collectives do, and how long short trainings take.

On 1, 2 and 4 processes that share the cores, as a job's workers would: a ladder of fp32 matrix products, a copy, a
ladder of all-gathers (time = hops + bytes / bandwidth, by least squares), and a few steps of the default job, against
whose predicted time every later prediction is corrected. All of it is done in several rounds that go through the
numbers of processes in turn, and medians over the rounds are kept: a machine is slower and faster from one minute to
the next, and whatever else ran during one round should not stand for one number of processes alone. The constants are
kept in the cache (`shardwise.planner.formulas.local`), with when and how they were measured. A machine with other work
gives worse constants.

Collectives are those that training takes by default: the native engine's where it can run, else Gloo's.

A process grows in its first steps beside what the closed form of memory counts: libraries make buffers, and the C
allocator keeps holes between what was freed. The first is a constant and the second goes with the activations, so two
trainings of one process, with little and with much in a microbatch, tell both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise._torch_compat.groups import all_gather_single
from shardwise.collectives import engine, registration
from shardwise.data.batch import Batch
from shardwise.errors import MachineError
from shardwise.job.schema import Job
from shardwise.kernels.precision import LossScaler
from shardwise.kernels.products import quick_products
from shardwise.launch.local import run_local
from shardwise.launch.process_group import process_group
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.observe.memory import peak_memory_bytes, reset_peak
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.local import MachineConstants, cpu_cluster
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.predict import predict
from shardwise.training.init import initialize
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.setup import current_world
from shardwise.training.step import train_step

PROCESSES = (1, 2, 4)
PRODUCTS = ((2048, 256, 1024), (2048, 384, 384), (1024, 384, 4096))  # rows, inner, columns, as of the default model
COPIED = 64 << 20  # bytes
GATHERED = (1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes of each rank
ROUNDS = 2  # through the numbers of processes
REPEATS = 9
STEPS = 4  # of the short trainings; the first does not count, in which buffers are made
ROWS = (2, 8)  # sequences of a microbatch of the trainings that tell how a process grows
TIMEOUT = 600

Say = Callable[[str], None]


@dataclass(frozen=True)
class Growth:
    """Memory of a training: bytes of activations by the closed form, and bytes by which the process outgrew it."""

    activations: float
    size: float


@dataclass(frozen=True)
class RankProbe:
    """Measurements of one process: TFLOP/s, GB/s, (bytes, seconds) of all-gathers, seconds of a step."""

    tflops: float
    bandwidth: float
    gathers: list[tuple[int, float]]
    step_seconds: float


def probe(say: Say = print) -> MachineConstants:
    """Measure this machine. Starts and ends processes of its own; takes some two minutes where nothing else runs."""
    rounds: dict[int, list[RankProbe]] = {ranks: [] for ranks in PROCESSES}
    backend = _backend(say)
    for number in range(1, ROUNDS + 1):
        for ranks, probes in rounds.items():
            say(f"round {number} of {ROUNDS}: measuring with {ranks} process{'es' if ranks > 1 else ''}")
            probes.append(slowest(run_local(_rank, (probe_job(ranks).model_dump(), backend), ranks)))
    medians = {ranks: middle(probes) for ranks, probes in rounds.items()}
    say("measuring how a process grows")
    growth, share = fitted_growth(
        *(run_local(_grown, (growing_job(rows).model_dump(), backend), 1)[0] for rows in ROWS)
    )
    gathers = {ranks: measured.gathers for ranks, measured in medians.items() if ranks > 1}
    hop, link = fitted(gathers)
    constants = MachineConstants(
        tflops={ranks: measured.tflops for ranks, measured in medians.items()},
        bandwidth={ranks: measured.bandwidth for ranks, measured in medians.items()},
        link=link,
        hop_seconds=hop,
        step_factor=dict.fromkeys(medians, 1.0),
        growth=growth,
        growth_share=share,
        source=_source(backend),
    )
    factors = {
        ranks: measured.step_seconds / predicted_seconds(constants, ranks) for ranks, measured in medians.items()
    }
    return replace(constants, step_factor=factors)


def _backend(say: Say) -> str:
    """The collectives of training by default, made ready."""
    try:
        engine.build(say)
        return registration.BACKEND
    except MachineError as error:
        say(f"note: measuring Gloo. {error}")
        return "gloo"


def fitted_growth(little: Growth, much: Growth) -> tuple[float, float]:
    """(bytes, share of the activations) that a process grows by, from two trainings with different activations."""
    more = much.activations - little.activations
    share = min(1.0, max(0.0, (much.size - little.size) / more)) if more > 0 else 0.0
    return max(0.0, little.size - share * little.activations), share


def _source(backend: str) -> str:
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    when = datetime.now(UTC).isoformat(timespec="minutes")
    return f"probe of {when}, torch {torch.__version__}, {os.cpu_count()} cores, {backend} collectives, load {load}"


def slowest(ranks: Sequence[RankProbe]) -> RankProbe:
    """The step waits for every rank: lowest rates, longest times."""
    return RankProbe(
        min(rank.tflops for rank in ranks),
        min(rank.bandwidth for rank in ranks),
        [(size, max(rank.gathers[number][1] for rank in ranks)) for number, (size, _) in enumerate(ranks[0].gathers)],
        max(rank.step_seconds for rank in ranks),
    )


def middle(rounds: Sequence[RankProbe]) -> RankProbe:
    """The median of each measurement over the rounds."""
    sizes = [size for size, _ in rounds[0].gathers]
    return RankProbe(
        median(measured.tflops for measured in rounds),
        median(measured.bandwidth for measured in rounds),
        [(size, median(measured.gathers[number][1] for measured in rounds)) for number, size in enumerate(sizes)],
        median(measured.step_seconds for measured in rounds),
    )


def fitted(gathers: dict[int, list[tuple[int, float]]]) -> tuple[float, float]:
    """(seconds of a hop, GB/s) of rings: (n - 1) hops, each of one rank's bytes; least squares of relative errors."""
    import numpy as np

    rows, weights = [], []
    for ranks, measured in gathers.items():
        for size, seconds in measured:
            rows.append([(ranks - 1) / seconds, (ranks - 1) * size / 1e9 / seconds])
            weights.append(1.0)
    (hop, inverse), *_ = np.linalg.lstsq(np.array(rows), np.array(weights), rcond=None)
    return max(float(hop), 1e-7), 1.0 / max(float(inverse), 1e-6)


def probe_job(ranks: int) -> Job:
    """The default job on so many processes."""
    return Job.model_validate({"parallel": {"workers": ranks, "device": "cpu"}})


def growing_job(rows: int) -> Job:
    """The default model on one process, with so many sequences in a microbatch."""
    return Job.model_validate(
        {
            "parallel": {"workers": 1, "device": "cpu"},
            "training": {"sequences_per_step": max(ROWS), "microbatch_size": rows},
        }
    )


def predicted_seconds(constants: MachineConstants, ranks: int) -> float:
    """Return the seconds of a step of `probe_job` that these constants alone give."""
    job = probe_job(ranks)
    facts = discover(build_model(job), job)
    plan = resolve(job, World(ranks, "cpu", ranks, engine=not engine.obstacle()), facts)
    return predict(configuration_of(plan, facts, cpu_cluster(ranks, constants))).step_seconds


# ------------------------------------------------------------------------------------------------------- in a process


def _rank(settings: dict[str, Any], backend: str) -> RankProbe:
    job = Job.model_validate(settings)
    with quick_products("cpu", "fp32"), process_group("cpu", backend, TIMEOUT) as device:
        tflops, bandwidth, gathers = _products(), _copies(), _gathers()
        return RankProbe(tflops, bandwidth, gathers, _training(job, device)[0])


def _grown(settings: dict[str, Any], backend: str) -> Growth:
    """Return the growth of a process that has done nothing else, as a worker's."""
    with quick_products("cpu", "fp32"), process_group("cpu", backend, TIMEOUT) as device:
        return _training(Job.model_validate(settings), device)[1]


def _timed(work: Callable[[], Any]) -> float:
    """Median seconds, all ranks at the same time."""
    work()
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _products() -> float:
    """TFLOP/s over the ladder: all its operations in all its time."""
    operations, seconds = 0.0, 0.0
    for rows, inner, columns in PRODUCTS:
        left, right = torch.randn(rows, inner), torch.randn(inner, columns)
        operations += 2.0 * rows * inner * columns
        seconds += _timed(lambda a=left, b=right: a @ b)  # type: ignore[misc]
    return operations / seconds / 1e12


def _copies() -> float:
    """GB/s read and written."""
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    return 2 * COPIED / _timed(lambda: target.copy_(source)) / 1e9


def _gathers() -> list[tuple[int, float]]:
    """(bytes of a rank, seconds) of all-gathers."""
    ranks, measured = dist.get_world_size(), []
    for size in GATHERED if ranks > 1 else ():
        own, whole = torch.ones(size // 4), torch.empty(ranks * size // 4)
        measured.append((size, _timed(lambda a=own, b=whole: all_gather_single(b, a))))  # type: ignore[misc]
    return measured


def _training(job: Job, device: torch.device) -> tuple[float, Growth]:
    """(median seconds of a step of random tokens, how the process grew)."""
    facts = discover(build_model(job), job)
    plan = resolve(job, current_world(device), facts)
    model = parallelize(build_model(job), plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, seed=0)
    optimizer, objective = ShardedOptimizer.of(model), make_objective(model)
    scaler, seconds = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale), []
    states = sum(entry.local.numel() * entry.local.element_size() for entry in model.tensor_map)
    before = psutil.Process().memory_info().rss - states
    reset_peak(device)
    for step in range(STEPS):
        batches = [_random_batch(plan, facts.vocabulary_size) for _ in range(plan.accumulation)]
        began = time.perf_counter()
        train_step(model, objective, batches, optimizer, scaler, step)
        seconds.append(time.perf_counter() - began)
    counted = estimate(plan, facts)
    grown = float(peak_memory_bytes(device) - before - counted.total)
    return median(seconds[1:]), Growth(counted.activations, grown)


def _random_batch(plan: Plan, vocabulary: int) -> Batch:
    tokens = torch.randint(0, vocabulary, (plan.microbatch, plan.sequence_length + 1))
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    return Batch(inputs, tokens[:, 1:].contiguous(), torch.arange(plan.microbatch))
