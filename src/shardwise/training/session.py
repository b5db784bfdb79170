"""Session: a job's model, optimizer and data on this rank, and how a step, an evaluation and a checkpoint are done.

The trainer knows when, the session how; a loop of one's own uses a session as the trainer does. It joins the process
group itself: under a launcher (torchrun, Slurm, Open MPI) or in a worker of `shardwise.run_local` it is one rank of
several, in a process of its own the only one.

    with shardwise.Session("job.yaml") as session:
        session.restore()
        for batches in session.batches():
            result = session.step(batches)
        session.evaluate()
        session.save()
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.manifest import Progress
from shardwise.collectives.rank_record import WorkUnit, begin_unit, mark_phase, open_record
from shardwise.data.batch import Batch
from shardwise.data.corpus import with_format
from shardwise.data.state import OF_SOURCE, SAMPLES, DataState
from shardwise.data.streaming.loader import state_of_stream
from shardwise.errors import ConfigError, require_type
from shardwise.job.schema import Job
from shardwise.job.sources import Source, load_job
from shardwise.launch.environment import detect
from shardwise.launch.expected_world import expected_world
from shardwise.launch.job_group import job_group, usable_backend
from shardwise.launch.peer_failure import error_of_rank
from shardwise.launch.process_group import ALONE
from shardwise.model.adapter_config import with_adapter
from shardwise.model.facts import ModelFacts
from shardwise.observe.callback import Callback, CallbackList, check_callbacks, load_callbacks
from shardwise.observe.memory import reset_peak
from shardwise.observe.metrics import Record
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan, resolve
from shardwise.training.answers import exact_matches
from shardwise.training.best_metric import early_stop, is_judged, judged, metric_of
from shardwise.training.checkpoints import RunCheckpoints, after_restart, refuse_memory
from shardwise.training.collective_calls import CollectiveCalls, collective
from shardwise.training.forecast import is_out_of_memory, out_of_memory
from shardwise.training.given_model import GivenModel, ModelSource, model_reference
from shardwise.training.loss_trial import LossTrials
from shardwise.training.objectives.own_loss import LossFunction
from shardwise.training.optimizer import ShardedOptimizer, learning_rate
from shardwise.training.own_batches import Microbatch, as_batches, objective_for
from shardwise.training.recent_loss import RecentLoss
from shardwise.training.setup import AssembledJob, assemble, prepare_data, study
from shardwise.training.step import EvaluationResult, StepResult, evaluate, train_step
from shardwise.training.step_record import sources_read, step_record


@dataclass
class TrainingResult:
    """The result of a finished run, equal on every rank.

    `training_loss` is the mean of the last `averaged_steps` steps, as many as one evaluation has batches, each before
    its update. `stopped` is why the run was ended before its last step, and `early_stop` why it came to its end there,
    if one of them was. `metrics` are the numbers of its last evaluation, with those that callbacks added on this rank.
    `sources` are the samples, share and passes of each source of the data; of one corpus under the name `data`.
    """

    validation_loss: float | None
    unigram_entropy: float | None
    training_loss: float | None
    averaged_steps: int
    steps: int
    tokens: int
    seconds: float
    skipped: int
    stopped: str | None = None
    early_stop: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sources: dict[str, dict[str, float]] = field(default_factory=dict)


class Session:
    """One rank's training, a step at a time. Every method but `note` and `request_stop` is collective.

    Args:
        job: a Job, the path of a YAML file or a dict; unset: the default job.
        model: a module, or a function that makes one, in the place of the job's own model. The values of its
            parameters are the start, rank 0's on every rank; a function's are drawn from the job's seed.
        example: keyword arguments of one forward of `model` for one microbatch of a rank, where it has no data and does
            not take `input_ids`.
        callbacks: called after those that the job names.
        device: of a process group that exists; unset: the one that the session joins, or the group's own.
        sections: keys of the job by section, on top of `job`, such as `optimizer={"learning_rate": 1e-3}`.

    Raises:
        ShardwiseError: whatever a user can mend.
    """

    def __init__(
        self,
        job: Source = None,
        *,
        model: ModelSource | None = None,
        example: Mapping[str, Tensor] | None = None,
        callbacks: Sequence[Callback] = (),
        device: torch.device | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        self._begin()
        with ExitStack() as opening:
            opening.push(self._exit.__exit__)
            self._open(_job_of(job, model, example, sections), model, example, callbacks, device)
            opening.pop_all()
        weakref.finalize(self, self._exit.close)  # the interpreter's end would leave the group too late

    @classmethod
    def of(cls, assembled: AssembledJob) -> Session:
        """Return a session of a job that is assembled already, without callbacks, in the group that exists."""
        session = cls.__new__(cls)
        session._begin()
        session.device = assembled.model.device
        session._take(assembled, [])
        return session

    def _begin(self) -> None:
        self._exit = ExitStack()
        self.calls = CollectiveCalls()
        self._loss_trials = LossTrials(self.note)
        self._started = self._ended = False
        self._began = time.perf_counter()
        self._fetched: float | None = None  # when the batches of the next step were asked for
        self._requested: str | None = None
        self.progress = Progress()
        self.evaluated: Record = {}  # what the last evaluation has come to
        self.notes: list[str] = []
        self.stopped: str | None = None
        self.early_stop: str | None = None  # why the run has come to its end before its last step

    def _open(
        self,
        job: Job,
        model: ModelSource | None,
        example: Mapping[str, Tensor] | None,
        callbacks: Sequence[Callback],
        device: torch.device | None,
    ) -> None:
        """Join the group, build and shard the model, open the data."""
        if device is None:  # no launcher of ours keeps the state
            refuse_memory(job)
        own = check_callbacks(callbacks)
        named = load_callbacks(job.training.callbacks)
        given = None if model is None else GivenModel.of(model, job.training.seed, example)
        facts = study(job) if given is None else given.study(job)
        has_data = given is None or _names_data(job)
        if not has_data:  # a loop that brings the batches may bring the loss, too: `as_batches` asks for it
            facts = replace(facts, computes_own_loss=False)
        data = prepare_data(job, facts) if has_data else None
        if data is None and job.training.epochs is not None:
            raise ConfigError(
                f"training.epochs={job.training.epochs} are passes through the data, and this session has none; set "
                "training.steps"
            )
        if data is None and job.training.batch_size_schedule:
            raise ConfigError(
                "training.batch_size_schedule says how many samples of the data a step reads, and this session has "
                "none; leave it out, and bring as many microbatches to each step as you want"
            )
        if data is None and job.training.sequence_length_schedule:
            raise ConfigError(
                "training.sequence_length_schedule cuts samples of the data, and this session has none; leave it out, "
                "and bring microbatches of the length that you want"
            )
        if data is None and (job.evaluation.sets or job.evaluation.answers):
            raise ConfigError("evaluation.sets and evaluation.answers are of a job's data, and this session has none")
        self.device = self._exit.enter_context(_joined(job, facts)) if device is None else device
        reset_peak(self.device)
        self._take(assemble(job, self.device, facts, data, given), [*named, *own])

    def _take(self, assembled: AssembledJob, callbacks: Sequence[Callback]) -> None:
        """Make ready to train what is assembled."""
        has_data = assembled.given_data is not None
        self.assembled = assembled
        open_record(self.rank)
        self._rates = self.optimizer.rates()
        self.callbacks = CallbackList(callbacks, self.rank)
        self.checkpoints = RunCheckpoints(assembled)
        self._exit.callback(self.checkpoints.close)
        self._data_state: DataState | None = state_of_stream(assembled.stream) if has_data else None
        for stream in assembled.data.streams.values() if has_data else ():
            stream.say = self.note
            self._exit.callback(stream.close)
        self._recent = RecentLoss(assembled.evaluation_batches if has_data else self.job.training.evaluate_batches)
        notes = [*self.plan.notes, *(assembled.data.notes() if has_data else [])]
        self.notes += [f"note: {note}" for note in notes]

    # ---- what a loop works with

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return dist.get_rank()

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, those before a resume included."""
        return self.progress.step

    @property
    def job(self) -> Job:
        """The job, whose keys hold."""
        return self.plan.job

    @property
    def plan(self) -> Plan:
        """The plan of what runs, with the rule behind each derived value."""
        return self.assembled.plan

    @property
    def layout(self) -> Layout:
        """The place of this rank on each axis."""
        return self.assembled.layout

    @property
    def facts(self) -> ModelFacts:
        """The structure of the model."""
        return self.assembled.facts

    @property
    def model(self) -> ParallelModel:
        """This rank's part of the model; `model.module` is the module itself as far as it is here."""
        return self.assembled.model

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer of this rank's elements; `optimizer.inner` is torch's."""
        return self.assembled.optimizer

    def batches(self) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches of each step that is left, until a stop has been agreed on or comes early.

        Raises:
            ConfigError: the session has no data.
        """
        self.assembled.data  # noqa: B018  # raises before the first item is asked for
        return self._batches()

    def _batches(self) -> Iterator[list[Batch]]:
        assert self._data_state is not None
        while self.progress.step < self.plan.steps and self.stopped is None and self.early_stop is None:
            self._fetched = time.perf_counter()
            self._begin_step()
            yield self._data_state.next_step()

    def _begin_step(self) -> None:
        begin_unit(WorkUnit.STEP, self.progress.step)
        mark_phase("data")

    # ---- how things are done

    def start(self) -> None:
        """Call the callbacks' `on_start`, once; the first step does it where nobody has."""
        if not self._started:
            self._started, self._began = True, time.perf_counter()
            self.callbacks.call("on_start", self)
            self._agree_on_failure()

    @collective
    def step(
        self,
        batch: Microbatch | Iterable[Microbatch],
        loss_function: LossFunction | None = None,
        learning_rate: float | None = None,
    ) -> StepResult:
        """Train one step.

        Args:
            batch: this rank's microbatch, or several whose gradients are accumulated; every rank brings equally many.
                Ranks of one context, tensor or pipeline group bring the same.
            loss_function: (model output, batch) -> (summed loss, count), in the place of the job's loss; it is called
                where the model's outputs are made, on the last pipeline stage. The count is `batch.count()`.
            learning_rate: of this step, in the place of the schedule's.

        Raises:
            ConfigError: there is no microbatch, or one without labels whose loss needs them, or no such learning rate.
            ShardwiseError: a callback, a checkpoint or the caller's loss failed, on this rank or another.
            CapacityError: there is not enough memory; the message says which changes would fit.
        """
        if learning_rate is not None and not 0 <= learning_rate < math.inf:
            raise ConfigError(f"step(learning_rate={learning_rate}): must be a finite number of 0 or more")
        self.start()
        if self._fetched is None:
            self._begin_step()
        began, self._fetched = self._fetched or time.perf_counter(), None
        self.callbacks.call("on_step_begin", self)
        batches = as_batches(batch, self.assembled, self._samples, loss_function is None)
        if learning_rate is None:
            self._check_rates()
        rate = self.scheduled_rate() if learning_rate is None else learning_rate
        self.optimizer.set_learning_rate(rate)
        result = self._train(batches, loss_function)
        self._rates = self.optimizer.rates()
        if self.model.ema is not None and not result.skipped:
            self.model.ema.update()
        mark_phase("records")
        self._advance(result)
        length = self.plan.sequence_length // batches[0].sequences_per_sample
        record = step_record(self.assembled, self.progress, result, rate, length, time.perf_counter() - began)
        self.callbacks.call("on_step_end", self, record)
        if result.failed:  # before this step; it is over now, and a save that was under way can end
            self._raise_failure()
        if result.stop:
            self.stopped = self._agreed_reason()
        self._end_unit()
        return result

    def _end_unit(self) -> None:
        """Note that what comes next is nobody's step: the loop's own code."""
        begin_unit(WorkUnit.OUTSIDE, self.progress.step)
        mark_phase(WorkUnit.OUTSIDE)

    @collective
    def evaluate(
        self,
        batches: Iterable[Microbatch | Iterable[Microbatch]] | None = None,
        loss_function: LossFunction | None = None,
    ) -> float:
        """Return the mean loss of the validation split, or of the caller's steps of microbatches, at this point.

        With the validation split the job's sets are evaluated too, and what follows from its metric is decided; the
        loss of others is recorded and decides nothing.
        """
        self.start()
        begin_unit(WorkUnit.EVALUATION, self.progress.step)
        mark_phase(WorkUnit.EVALUATION)
        assembled = self.assembled
        is_own = batches is None
        splits = assembled.data.sets if is_own else {}
        if batches is None:
            batches = assembled.evaluation(assembled.data.validation)
        trials = self._loss_trials if self.layout.data_ranks > 1 else None
        with self.averaged(), objective_for(assembled, loss_function, trials) as objective:
            validation = self._evaluated(objective, batches, loss_function is None)
            sets = {name: self._evaluated(objective, assembled.evaluation(split)) for name, split in splits.items()}
            sets |= self._of_ema(objective) if is_own else {}
            begin_unit(WorkUnit.OUTSIDE, self.progress.step)  # answers that are written take as long as they take
            matches = self._exact_matches() if is_own else {}
        if is_own:
            self.progress = self.progress.model_copy(update={"validation_loss": validation.loss})
        compared = {} if self._recent.mean is None else {"training_loss": self._recent.mean}
        numbers = _named("", validation)
        for name, result in sets.items():
            numbers |= _named(f"/{name}", result)
        self.evaluated = {"step": self.progress.step, **numbers, **matches, **compared}
        self.callbacks.call("on_evaluation", self, self.evaluated)
        if is_own:
            self._judge(self.evaluated)
        self._end_unit()
        return validation.loss

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the weights that are evaluated and exported inside: averages, where some are kept."""
        if self.optimizer.average is None:
            yield
            return
        self.checkpoints.settle()
        self.model.reshard()
        with self.optimizer.averaged():
            yield
            self.model.reshard()

    @contextmanager
    def ema_in_place(self) -> Iterator[None]:
        """Let the model have the moving averages of its weights inside."""
        self.checkpoints.settle()
        with self.model.ema_in_place():
            yield

    def _exact_matches(self) -> dict[str, float]:
        """Return what the job's `evaluation.answers` come to."""
        count = self.job.evaluation.answers
        return exact_matches(self.model, self.assembled.data, count) if count and self.job.data.has_rows else {}

    def _of_ema(self, objective: Objective) -> dict[str, EvaluationResult]:
        """Return what the averaged weights come to on the validation split, by the name `ema`, if the job has them."""
        if self.model.ema is None:
            return {}
        with self.ema_in_place():
            return {"ema": self._evaluated(objective, self.assembled.evaluation(self.assembled.data.validation))}

    def _evaluated(
        self, objective: Objective, batches: Iterable[Microbatch | Iterable[Microbatch]], has_own_loss: bool = True
    ) -> EvaluationResult:
        steps = [as_batches(microbatches, self.assembled, self._samples, has_own_loss) for microbatches in batches]
        if not steps:
            raise ConfigError("evaluate() got no batches, which have no loss; every rank brings equally many")
        with self.calls.final_if_it_fails():
            return evaluate(self.model, objective, steps)

    def _judge(self, record: Record) -> None:
        """Compare the evaluation's metric with those before, and end the run where it has waited long enough."""
        settings, before = self.job.evaluation, self.progress
        is_known = before.metric is not None and before.judged_by == settings.metric  # of a run resumed at its end
        if is_judged(self.job) and not is_known:
            metric = metric_of(record, settings, self.device)
            self.progress = judged(self.progress, metric, settings)
            self.early_stop = early_stop(self.progress, settings)

    @collective
    def save(self, wait: bool = False) -> str:
        """Save the state and return the checkpoint's path; it is written beside training unless it is waited for.

        Raises:
            CheckpointError: this save where it is waited for, or the last one, failed on some rank.
        """
        self.start()
        begin_unit(WorkUnit.SAVE, self.progress.step)
        mark_phase(WorkUnit.SAVE)
        path = self.checkpoints.save(self.progress, wait)
        self.callbacks.call("on_save", self, {"step": self.progress.step, "checkpoint": path})
        self._end_unit()
        return path

    @collective
    def restore(self) -> int:
        """Go on from the checkpoint that `checkpoint.resume` names, and return the number of steps done.

        Raises:
            CheckpointError: it is damaged, incomplete, or of another model or data.
        """
        self.progress, notes = self.checkpoints.restore()
        self.early_stop = early_stop(self.progress, self.job.evaluation)
        self.notes += notes
        if self._data_state is not None and self.progress.samples:
            of_sources = {f"{OF_SOURCE}{name}": count for name, count in self.progress.sources.items()}
            self._data_state.load_state_dict({SAMPLES: self.progress.samples, **of_sources, **self.progress.position})
        return self.progress.step

    @collective
    def end(self, stopped: str | None = None) -> TrainingResult:
        """End the run: saves come to their end, then the callbacks' `on_end` is called.

        Args:
            stopped: why the run ends before its last step, if it does.
        """
        result = self.result(stopped)
        if not self._ended:
            self._ended = True
            self.checkpoints.wait()
            self._agree_on_failure()
            with self.averaged():
                self.callbacks.call("on_end", self, vars(result))
            self._agree_on_failure()
        return result

    def result(self, stopped: str | None = None) -> TrainingResult:
        """Return what the run has come to so far."""
        assembled, data = self.assembled, self.assembled.given_data
        return TrainingResult(
            validation_loss=self.progress.validation_loss,
            unigram_entropy=None if data is None else data.entropy_of(assembled.evaluated_sequences),
            training_loss=self._recent.mean,
            averaged_steps=self._recent.steps,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            seconds=time.perf_counter() - self._began,
            skipped=self.progress.skipped,
            stopped=stopped,
            early_stop=self.early_stop,
            metrics={key: value for key, value in self.evaluated.items() if isinstance(value, float)},
            sources={} if data is None else sources_read(data, self.progress),
        )

    def note(self, text: str, record: Record | None = None) -> None:
        """Say a sentence to the user, and keep `record`, which is no step's, if there is one."""
        self.callbacks.call("on_note", self, text, record)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to end the run after the next step. Any rank may, by itself."""
        self._requested = self._requested or reason

    def close(self) -> None:
        """Let saves come to their end and leave the group that the session has joined."""
        self._exit.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.calls.failure is not None:  # the caller has seen it
            self.calls.leave_others()
            error = self.calls.failure
        elif error is None and self._started:
            try:
                self.end()
            except BaseException as failure:
                self._leave(failure)
                raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the group, which hears of an error that ends the run."""
        if error is None:
            self._exit.close()
            return
        self.callbacks.clean_up(self, error)
        self._exit.__exit__(type(error), error, error.__traceback__)

    # ---- inside of a step

    @property
    def _samples(self) -> int:
        return self.progress.samples

    def scheduled_rate(self) -> float:
        """Return the learning rate of the next step by the job's schedule."""
        return learning_rate(self.job.optimizer, self.progress.step, self.plan.steps, self.plan.warmup_steps)

    def _check_rates(self) -> None:
        """Refuse a learning rate that a scheduler of torch or the caller has set, and the job's schedule would not."""
        rates = self.optimizer.rates()
        if rates != self._rates:
            raise ConfigError(
                f"the learning rates of session.optimizer.inner were changed from {self._rates} to {rates}, and the "
                "schedule of the job sets those of each step; give step(learning_rate=...), such as get_last_lr()[0] "
                "of a scheduler, or set optimizer.schedule"
            )

    def _train(self, batches: list[Batch], loss_function: LossFunction | None) -> StepResult:
        assembled = self.assembled
        failed = self.callbacks.failure is not None or self.checkpoints.failed
        trials = self._loss_trials if len(batches) * self.layout.data_ranks > 1 else None
        is_own = self._data_state is None or not all(batch.is_numbered for batch in batches)
        try:
            with objective_for(assembled, loss_function, trials) as objective, self.calls.final_if_it_fails():
                return train_step(
                    assembled.model, objective, batches, assembled.optimizer, assembled.scaler, self.progress.step,
                    stop=self._requested is not None, failed=failed, samples=self._samples if is_own else None,
                )  # fmt: skip
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise out_of_memory(assembled, error) from error
            raise

    def _advance(self, result: StepResult) -> None:
        """Count what the step has consumed."""
        before = self.progress
        self._recent.add(result)
        samples, state = before.samples + result.rows, dict[str, int]()
        if self._data_state is not None:
            state = self._data_state.state_dict()
            samples = state.pop(SAMPLES)
        sources = {key.removeprefix(OF_SOURCE): state.pop(key) for key in list(state) if key.startswith(OF_SOURCE)}
        self.progress = Progress(
            step=before.step + 1,
            samples=samples,
            sources=sources,
            position=state,
            tokens=before.tokens + result.count,
            skipped=before.skipped + result.skipped,
            skipped_in_a_row=before.skipped_in_a_row + 1 if result.skipped else 0,
            judged_by=before.judged_by,
            best_metric=before.best_metric,
            best_step=before.best_step,
            evaluations_since_best=before.evaluations_since_best,
            data_hash=f"{(int(before.data_hash, 16) + result.data_hash) % (1 << 64):016x}",
        )

    def _agreed_reason(self) -> str:
        """Return the lowest rank's reason to stop, told to all."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, self._requested)
        return next(reason for reason in reasons if reason)

    # ---- failures

    def _agree_on_failure(self) -> None:
        """Raise on every rank where a callback or a save has failed on one. Collective."""
        failed = self.callbacks.failure is not None or self.checkpoints.failed
        flag = torch.tensor(int(failed), device=self.device)
        dist.all_reduce(flag)
        if int(flag):
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise this rank's failure, or the first failing rank's where it has none. Collective, on a failing run."""
        own = self._own_failure()
        failures: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, None if own is None else (type(own).__name__, str(own)))
        if own is not None:
            raise own
        rank, (name, message) = next((rank, failure) for rank, failure in enumerate(failures) if failure)
        raise error_of_rank(rank, name, message)

    def _own_failure(self) -> Exception | None:
        """Return what has failed here, once a save that is under way has come to its end."""
        try:
            self.checkpoints.wait()
        except Exception as error:
            return self.callbacks.failure or error
        return self.callbacks.failure


def _job_of(
    source: Source, model: ModelSource | None, example: Mapping[str, Tensor] | None, sections: Mapping[str, Any]
) -> Job:
    """Return the job of a session; a caller's model is named in it, and its example says how large a microbatch is."""
    keys: dict[str, Any] = {}
    for section, content in sections.items():
        has_keys = isinstance(content, Mapping) and (content or section in Job.model_fields)
        keys |= {f"{section}.{key}": value for key, value in content.items()} if has_keys else {section: content}
    if example is not None:
        require_type(example, Mapping, "example", "give the keyword arguments of one forward of the model")
    if model is not None:
        keys["model.factory"] = model_reference(model)
    job = load_job(source, keys) if keys or not isinstance(source, Job) else source
    first = next(iter(example.values()), None) if example else None
    if first is not None:
        sizes: dict[str, Any] = {}
        if job.training.microbatch_size is None:
            sizes["training.microbatch_size"] = len(first)
        if first.dim() > 1 and "sequence_length" not in job.data.model_fields_set:
            sizes["data.sequence_length"] = first.shape[1]
        job = load_job(job, sizes)
    return with_adapter(with_format(after_restart(job)))


def _named(suffix: str, result: EvaluationResult) -> Record:
    """Return the numbers of an evaluation as its record has them."""
    numbers = {"loss": result.loss, **result.metrics}
    return {f"validation_{name}{suffix}": value for name, value in numbers.items()}


def _names_data(job: Job) -> bool:
    """Return whether the data section says where data is, rather than only how long sequences are."""
    return bool({"path", "format", "factory", "sources", "dataset"} & job.data.model_fields_set)


def _joined(job: Job, facts: ModelFacts) -> Any:
    """Return the context of the group that this process joins, which may exist already."""
    if dist.is_initialized():
        return job_group(job, expected_world(job, detect() or ALONE).device_type, "")
    place = detect() or ALONE
    plan = resolve(job, expected_world(job, place), facts)
    return job_group(job, plan.world.device_type, usable_backend(plan, _say_nothing))


def _say_nothing(text: str) -> None:
    pass
