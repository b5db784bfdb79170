"""From a Job to running workers: what `shardwise train` and `shardwise.train` do.

Everything a user can get wrong is checked here, in one process, before a worker starts or a file is written. Outside of
a launcher the job's own local workers are started, and likewise where a scheduler starts one process a host; under
torchrun, Slurm or Open MPI this process is one of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler

from shardwise.checkpoint.host_memory import HostMemory
from shardwise.commands.versions import untested_versions
from shardwise.data.corpus import with_format
from shardwise.errors import LegalityError, WorkerError
from shardwise.job.schema import Job
from shardwise.job.sources import require_job
from shardwise.kernels.precision import without_instructions
from shardwise.launch.elastic_hosts import ENDED, PAUSED, ElasticHosts, failed_outcome, is_pause
from shardwise.launch.elastic_round import ElasticRound
from shardwise.launch.environment import RankEnvironment, detect, is_first_process
from shardwise.launch.expected_world import engine_problem, expected_world, world_size
from shardwise.launch.hosts import HostEnvironment, detect_host
from shardwise.launch.job_group import Say, job_group, usable_backend
from shardwise.launch.local import refuse_unguarded_script, run_local
from shardwise.launch.rendezvous import failure_told
from shardwise.launch.signals import Forwarding
from shardwise.launch.watch.watcher import WatchSettings
from shardwise.model.adapter_config import with_adapter
from shardwise.model.facts import ModelFacts
from shardwise.observe.callback import Callback
from shardwise.observe.trackers import require_extras
from shardwise.plan.draft import changed
from shardwise.plan.fixed_batch import with_fixed_batch
from shardwise.plan.plan import Plan, precheck, resolve
from shardwise.training.checkpoints import HostMemoryState, after_restart, going_on, refuse_memory, resume_hint
from shardwise.training.output import check_output, check_resume, claim_output
from shardwise.training.session import TrainingResult
from shardwise.training.setup import prepare_data, study
from shardwise.training.trainer import train_rank
from shardwise.training.user_code import check_can_be_sent, check_user_code


def plan_job(job: Job) -> Plan:
    """The Plan of `job` on this machine, or in the world that a launcher has made.

    Reads no corpus, except to know how long an epoch is.
    """
    return plan_with_facts(job)[0]


def plan_with_facts(job: Job) -> tuple[Plan, ModelFacts]:
    """`plan_job` and the facts of the job's model."""
    place, host, job = detect(), detect_host(), with_format(job)
    plan, facts = _plan(job, place, host, _silent)
    return replace(plan, notes=(*plan.notes, *_launcher_notes(job, place, host), *_machine_notes(plan))), facts


def train(job: Job, notes: Iterable[str] = (), say: Say = print, callbacks: Sequence[Callback] = ()) -> TrainingResult:
    """Train `job`; returns when it has finished.

    `callbacks` are called after those that the job names, on every rank; local workers get copies of them.

    Raises:
        ShardwiseError: whatever a user can mend; before training starts nothing has been overwritten.
    """
    refuse_unguarded_script("shardwise.train")
    place, host, job = detect(), detect_host(), with_adapter(with_format(after_restart(require_job(job, "train"))))
    say = say if is_first_process() else _silent
    with ExitStack() as stack:
        with failure_told(host):
            _check(job, place, host, notes, say, callbacks)
            is_elastic = host is not None and host.least_hosts is not None
            if not is_elastic:
                plan, backend = _made_ready(job, place, host, say)
                stack.enter_context(claim_output(job) if is_first_process() else nullcontext())
        if host is not None and is_elastic:
            return _train_on_elastic_hosts(job, say, callbacks, host)
        if place is not None:
            return _worker(job, plan.world.device_type, backend, callbacks)
        restarts = 0 if host is not None and host.hosts > 1 else job.parallel.max_restarts
        return _run_workers(job, plan, backend, say, callbacks, host=host, max_restarts=restarts)


def _check(
    job: Job,
    place: RankEnvironment | None,
    host: HostEnvironment | None,
    notes: Iterable[str],
    say: Say,
    callbacks: Sequence[Callback],
) -> None:
    """Refuse what can be refused without a plan, and say what a user is to know."""
    check_user_code(job, callbacks)
    is_elastic = host is not None and host.least_hosts is not None
    if not is_elastic:
        refuse_memory(job)
    if is_first_process():
        if not is_elastic:  # a host that comes back finds the run's own checkpoints
            check_output(job)
        require_extras(job)
        for note in (*notes, *untested_versions(), *_launcher_notes(job, place, host)):
            say(f"note: {note}")
    if place is None:  # the ranks of a launcher find out together: one that ended early would leave the others waiting
        check_resume(job)
        check_can_be_sent(callbacks)


def _made_ready(job: Job, place: RankEnvironment | None, host: HostEnvironment | None, say: Say) -> tuple[Plan, str]:
    """Return the plan, and the backend to join with, once data and engine are there."""
    plan, facts = _plan(job, place, host, say)
    for note in _machine_notes(plan):
        say(f"note: {note}")
    prepare_data(
        job, facts, say if job.training.epochs is None else _silent
    )  # before the engine, which may have to be compiled
    return plan, usable_backend(plan, say)


def _train_on_elastic_hosts(job: Job, say: Say, callbacks: Sequence[Callback], host: HostEnvironment) -> TrainingResult:
    """Train in rounds, each with the hosts that are there, from where the one before has come to."""
    job, note = with_fixed_batch(job, expected_world(job, None, host))
    say(f"note: {host.least_hosts} to {host.hosts} hosts may take part; {note or 'the batch is the same on all.'}")
    _check_numbers_of_hosts(job, host)
    plan, _ = _made_ready(job, None, host, say)  # what takes long, before others wait for this host
    with ExitStack() as stack:
        memory = stack.enter_context(HostMemory(plan.world.local_size if job.checkpoint.memory_every else 0))
        hosts = stack.enter_context(ElasticHosts(host, job.parallel.max_restarts))
        run = _ElasticRun(job, say, callbacks, hosts, memory, stack)
        while True:
            result = run.train_round(hosts.next_round())
            if result is not None:
                return result


@dataclass
class _ElasticRun:
    """One host's part in a run whose hosts come and go.

    Attributes:
        stack: ended with the run; holds the claim on the output.
        signals: that this host has got; the first ends its part.
    """

    job: Job
    say: Say
    callbacks: Sequence[Callback]
    hosts: ElasticHosts
    memory: HostMemory
    stack: ExitStack
    signals: Forwarding = field(default_factory=Forwarding)

    def train_round(self, current: ElasticRound) -> TrainingResult | None:
        """Train with the hosts of a round, and tell them how it has ended here; None where another round follows."""
        hosts = self.hosts
        try:
            result = self._train(current, hosts.place_in(current))
        except Exception as error:
            hosts.report(failed_outcome(error), is_leaving=bool(self.signals.received), snapshots=self.memory.steps())
            return None
        if self.signals.received or not is_pause(result.stopped):
            hosts.report(PAUSED if is_pause(result.stopped) else ENDED)
            return result
        hosts.report(PAUSED, snapshots=self.memory.steps())
        return None

    def _train(self, current: ElasticRound, place: HostEnvironment) -> TrainingResult:
        """Train with the hosts of a round until one goes, comes or fails, or to the end."""
        job, hosts = going_on(self.job) if current.goes_on else self.job, self.hosts
        if current.goes_on:
            why = f"{current.reason}: " if current.reason else ""
            self.say(f"note: {why}the run goes on with {place.hosts} of {hosts.host.hosts} hosts")
        if hosts.host.index == 0 and current.number == hosts.first_round:
            self.stack.enter_context(claim_output(job))
        plan, backend = _made_ready(job, None, place, _silent)
        places = self.memory.places
        return _run_workers(
            job, plan, backend, _silent, self.callbacks, host=place, signals=self.signals,
            rendezvous=hosts.rendezvous(current), request_file=hosts.request_file,
            memory=HostMemoryState(places, current.snapshot) if places else None,
        )  # fmt: skip


def _check_numbers_of_hosts(job: Job, host: HostEnvironment) -> None:
    """Refuse a layout that some number of hosts cannot have.

    Raises:
        LegalityError: with that number, and the rule.
    """
    facts = study(job)
    for count in range(host.least_hosts or 1, host.hosts + 1):
        world = expected_world(job, None, replace(host, index=0, hosts=count, least_hosts=None))
        try:
            resolve(job, world, facts, None)
        except LegalityError as error:
            raise LegalityError(
                f"PET_NNODES={host.least_hosts}:{host.hosts}: with {count} hosts, {world.size} ranks: {error}",
                error.rule,
            ) from error


def _run_workers(
    job: Job,
    plan: Plan,
    backend: str,
    say: Say,
    callbacks: Sequence[Callback],
    *,
    host: HostEnvironment | None,
    max_restarts: int = 0,
    signals: Forwarding | None = None,
    rendezvous: RendezvousHandler | None = None,
    request_file: Path | None = None,
    memory: HostMemoryState | None = None,
) -> TrainingResult:
    try:
        return run_local(
            _worker,
            (job, plan.world.device_type, backend, callbacks, request_file, memory),
            plan.world.local_size,
            device_type=plan.world.device_type,
            forward_signals=signals or True,
            max_restarts=max_restarts,
            host=host,
            rendezvous=rendezvous,
            watch=_watch_settings(job),
        )[0]
    except WorkerError:
        if hint := resume_hint(job):
            say(f"note: {hint}")
        raise


def _watch_settings(job: Job) -> WatchSettings:
    """Return when the launcher says where the ranks are."""
    observe = job.observe
    medians = observe.hang_medians if observe.hang_report else None
    return WatchSettings(medians, observe.hang_seconds, Path(job.output))


def _plan(job: Job, place: RankEnvironment | None, host: HostEnvironment | None, say: Say) -> tuple[Plan, ModelFacts]:
    world = expected_world(job, place, host)
    precheck(job, world)  # what can be refused without looking at the model
    facts = study(job)
    sequences = None if job.training.epochs is None else len(prepare_data(job, facts, say).train)
    return resolve(job, world, facts, sequences), facts


def _launcher_notes(job: Job, place: RankEnvironment | None, host: HostEnvironment | None) -> Iterator[str]:
    """Name the keys of the job that another launcher decides. The plan cannot tell: in a worker all launchers are one.

    `parallel.workers` is not among them, since the plan sees how many there are. Also why `auto` is not the engine.
    """
    problem = engine_problem(job, world_size(job, place, host))
    if problem:
        yield f"the ranks talk over Gloo, the native engine is not usable: {problem}."
    restarts = job.parallel.max_restarts
    if place is not None and restarts:
        how = "torchrun --max-restarts" if place.launcher == "torchrun" else "its own options"
        yield f"parallel.max_restarts={restarts} is not used: {place.launcher} started the ranks; see {how}."
    if place is not None:
        for key in ("observe.hang_medians", "observe.hang_seconds"):
            if changed(job, key):
                yield f"{key} is not used: {place.launcher} started the ranks, and our launcher watches its own."
    if host is None:
        return
    workers = job.parallel.workers
    if host.hosts > 1 and restarts and host.least_hosts is None:
        yield f"parallel.max_restarts={restarts} is not used on {host.hosts} hosts: {host.launcher} starts them again."
    if workers and host.processes not in (None, workers):
        yield f"parallel.workers={workers} is not used: {host.launcher} asks for {host.processes} ranks a host."


def _machine_notes(plan: Plan) -> Iterator[str]:
    """Say what this machine cannot do well; a plan may be of another."""
    compute = plan.job.precision.compute
    if why := without_instructions(compute, plan.world.device_type):
        yield f"precision.compute={compute}: {why}."


def _silent(text: str) -> None:
    pass


def _worker(
    job: Job,
    device_type: str,
    backend: str,
    callbacks: Sequence[Callback] = (),
    request_file: Path | None = None,
    memory: HostMemoryState | None = None,
) -> TrainingResult:
    """Train on one rank."""
    with job_group(job, device_type, backend) as device:
        return train_rank(after_restart(job), device, callbacks, request_file, memory)
