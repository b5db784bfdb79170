"""From a Job to running workers: what `shardwise train` and `shardwise.train` do.

Everything a user can get wrong is checked here, in one process, before a worker starts or a file is written. Outside of
a launcher the job's own local workers are started; under torchrun, Slurm or Open MPI this process is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from shardwise.collectives import engine, hierarchical
from shardwise.errors import MachineError, WorkerError
from shardwise.job.schema import Job
from shardwise.kernels.precision import without_instructions
from shardwise.kernels.products import quick_products
from shardwise.kernels.sums import fp32_sums
from shardwise.launch.environment import RankEnvironment, detect
from shardwise.launch.local import run_local
from shardwise.launch.session import gpus_of_host, session
from shardwise.model.facts import ModelFacts
from shardwise.observe.trackers import require_extras
from shardwise.plan.plan import Plan, World, collective_algorithm, precheck, resolve
from shardwise.training.keeper import after_restart, way_on
from shardwise.training.output import check_output, check_resume, claim_output
from shardwise.training.setup import prepare_data, study
from shardwise.training.trainer import TrainingResult, train_rank

CPU_WORKERS = 2

Say = Callable[[str], None]


def plan_job(job: Job) -> Plan:
    """The Plan of `job` on this machine, or in the world that a launcher has made. Reads no corpus."""
    return plan_with_facts(job)[0]


def plan_with_facts(job: Job) -> tuple[Plan, ModelFacts]:
    """`plan_job` and the facts of the job's model."""
    place = detect()
    plan, facts = _plan(job, place)
    return replace(plan, notes=(*plan.notes, *_launcher_notes(job, place), *_machine_notes(plan))), facts


def train(job: Job, notes: Iterable[str] = (), say: Say = print) -> TrainingResult:
    """Train `job`; returns when it has finished.

    Raises:
        ShardwiseError: whatever a user can mend; before training starts nothing has been overwritten.
    """
    place, job = detect(), after_restart(job)
    speaks = place is None or place.rank == 0
    say = say if speaks else _silent
    if speaks:
        check_output(job)
        require_extras(job)
        for note in (*notes, *_launcher_notes(job, place)):
            say(f"note: {note}")
    if place is None:  # the ranks of a launcher find out together: one that ended early would leave the others waiting
        check_resume(job)
    plan, facts = _plan(job, place)
    for note in _machine_notes(plan):
        say(f"note: {note}")
    prepare_data(job, facts, say)  # before the engine, which may have to be compiled
    backend = usable_backend(plan, say)
    with claim_output(job) if speaks else nullcontext():
        if place is not None:
            return _worker(job, plan.world.device_type, backend)
        return _run_workers(job, plan, backend, say)


def _run_workers(job: Job, plan: Plan, backend: str, say: Say) -> TrainingResult:
    try:
        return run_local(
            _worker,
            (job, plan.world.device_type, backend),
            plan.world.size,
            device_type=plan.world.device_type,
            forward_signals=True,
            max_restarts=job.parallel.max_restarts,
        )[0]
    except WorkerError:
        if way := way_on(job):
            say(f"note: {way}")
        raise


def _plan(job: Job, place: RankEnvironment | None) -> tuple[Plan, ModelFacts]:
    world = _world(job, place)
    precheck(job, world)  # what can be refused without looking at the model
    facts = study(job)
    return resolve(job, world, facts), facts


def _launcher_notes(job: Job, place: RankEnvironment | None) -> Iterator[str]:
    """Which keys of the job are another launcher's to decide. The plan cannot tell: in a worker all launchers are one.

    `parallel.workers` is not among them, since the plan sees how many there are. Also why `auto` is not the engine.
    """
    problem = _engine_problem(job, _size(job, place))
    if problem:
        yield f"the ranks talk over Gloo, the native engine is not usable: {problem}."
    restarts = job.parallel.max_restarts
    if place is not None and restarts:
        how = "torchrun --max-restarts" if place.launcher == "torchrun" else "its own options"
        yield f"parallel.max_restarts={restarts} is not used: {place.launcher} started the ranks; see {how}."


def _machine_notes(plan: Plan) -> Iterator[str]:
    """What this machine cannot do well; a plan may be of another."""
    compute = plan.job.precision.compute
    if why := without_instructions(compute, plan.world.device_type):
        yield f"precision.compute={compute}: {why}."


def usable_backend(plan: Plan, say: Say) -> str:
    """The backend to join with: the plan's, and how its collectives cross hosts (`collectives/hierarchical.py`).

    The engine is compiled; where that fails and the job leaves the choice to us, Gloo takes its place, on several hosts
    for all ranks, as they agree when they meet. Inside the hosts of two-level collectives over Gloo that choice is the
    engine too.

    Raises:
        MachineError: the engine fails and the job asks for it.
    """
    between = _built_backend(plan, say)
    if between != plan.backend:
        algorithm, _ = collective_algorithm(plan.job.parallel, between, plan.world)
        return hierarchical.name_of(algorithm, between, between)
    inside = between
    if plan.collectives != "flat" and between == "gloo" and plan.job.parallel.ddp_dist_backend == "auto":
        inside = _built_backend(replace(plan, backend=engine.BACKEND), say)
    return hierarchical.name_of(plan.collectives, between, inside)


def _built_backend(plan: Plan, say: Say) -> str:
    if plan.backend != engine.BACKEND:
        return plan.backend
    try:
        engine.build(say)
        return plan.backend
    except MachineError as error:
        if plan.world.device_type == "cuda":
            raise MachineError(f"{error}. The ranks share GPUs, which NCCL refuses; use a rank a GPU") from error
        if plan.job.parallel.ddp_dist_backend != "auto":
            raise
        say(f"note: the ranks talk over Gloo. {error}")
        return "gloo"


def _silent(text: str) -> None:
    pass


def _worker(job: Job, device_type: str, backend: str) -> TrainingResult:
    """One rank of a training."""
    compute = job.precision.compute
    with (
        fp32_sums(device_type, compute),
        quick_products(device_type, compute),
        session(device_type, backend, job.parallel.timeout_seconds) as device,
    ):
        return train_rank(after_restart(job), device)


def _world(job: Job, place: RankEnvironment | None) -> World:
    """The world to come. The accelerator's name is left to the workers: asking would put a CUDA context here."""
    size = _size(job, place)
    return replace(size, engine=_may_use_engine(job, size) and not _engine_problem(job, size))


def _size(job: Job, place: RankEnvironment | None) -> World:
    device_type = job.parallel.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if place is not None:
        hosts = -(-place.world_size // place.local_world_size)
        gpus = gpus_of_host(device_type, place)
        return World(place.world_size, device_type, place.local_world_size, hosts=hosts, gpus=gpus)
    gpus = gpus_of_host(device_type, None)
    workers = job.parallel.workers or (gpus if device_type == "cuda" else CPU_WORKERS)
    return World(workers, device_type, workers, gpus=gpus)


def _may_use_engine(job: Job, world: World) -> bool:
    """Whether `auto` would take it: it moves CPU tensors, and one rank has nobody to talk to."""
    return world.device_type == "cpu" and world.size > 1 and job.parallel.ddp_dist_backend == "auto"


def _engine_problem(job: Job, world: World) -> str:
    """Why `auto` is Gloo. On several hosts a rank knows of its own host alone: all plan with the engine, then agree."""
    return engine.obstacle() if world.hosts == 1 and _may_use_engine(job, world) else ""
