"""From a Job to everything one rank needs for its steps; a session, verify and the benchmarks start here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from shardwise._torch_compat import accelerator
from shardwise.checkpoint.adapters import open_adapter
from shardwise.collectives import hierarchical, registration, topology
from shardwise.data.batch import Batch
from shardwise.data.factory import Samples, content_hash
from shardwise.data.file_samples import gives_samples
from shardwise.data.loader import Split, Stream
from shardwise.data.prepare import prepare
from shardwise.data.streaming.loader import InOrder
from shardwise.data.streaming.tokens import StreamedTokens
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.kernels.precision import LossScaler, has_float8
from shardwise.model.build import build_model, construct_user_module, user_factory
from shardwise.model.class_loss import NEXT, labels_of_class
from shardwise.model.construct import drawing_from
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.probe import ROWS
from shardwise.model.traced_cut import cut_by_trace
from shardwise.model.weight_dtypes import with_file_dtypes
from shardwise.parallel.apply import parallelize
from shardwise.parallel.averaged_weights import AveragedWeights
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan, World, resolve
from shardwise.training.adapter_start import start_adapters
from shardwise.training.given_model import GivenModel, place_weights, take_constructed_values
from shardwise.training.init import initialize, match_weight_file, match_weights, read_weight_file
from shardwise.training.objectives.choose import make_objective
from shardwise.training.objectives.classification import Classification
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.objectives.preference import DirectPreference
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.precomputed_reference import with_reference
from shardwise.training.reference import frozen_copy, needs_copy
from shardwise.training.row_trial import call_arguments, with_row_coupling

TRACED_ROWS = 2  # of a trial cut; some models loop over the images of all rows


@dataclass
class AssembledJob:
    """One rank's side of a job, ready for its first step.

    Attributes:
        given_data: the job's data; None where the caller brings the batches.
    """

    plan: Plan
    layout: Layout
    facts: ModelFacts
    given_data: TokenData | None
    model: ParallelModel
    objective: Objective
    optimizer: ShardedOptimizer
    scaler: LossScaler

    @property
    def data(self) -> TokenData:
        """The job's data.

        Raises:
            ConfigError: there is none.
        """
        if self.given_data is None:
            raise ConfigError("this session has no data: it was made of a model without a data section; give data={…}")
        return self.given_data

    @cached_property
    def stream(self) -> Stream:
        """This rank's batches of the training split."""
        return make_stream(self.plan, self.layout, self.data)

    @cached_property
    def given_labels(self) -> str:
        """The place of labels in a loop of one's own, as in `ModelFacts`; of a model of the job its class is asked."""
        job, facts = self.plan.job, self.facts
        is_asked = job.model.factory is not None or job.data.factory is not None
        if is_asked or facts.classifies or TASKS[job.model.task].reads_files:
            return facts.given_labels
        model = build_model(job)
        return labels_of_class(model, job) if isinstance(model, PreTrainedModel) else facts.given_labels

    @property
    def evaluation_batches(self) -> int:
        """Global batches of one evaluation of the validation split."""
        return self._batches_of(self.data.validation)

    def evaluation(self, split: Split) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches of one evaluation of a split, global batch by global batch."""
        return self.stream.evaluation(split, self._batches_of(split))

    def _batches_of(self, split: Split) -> int:
        """Return the batches of an evaluation; the ragged last one is left out where the loss cannot count its rows."""
        step, wanted = self.plan.sequences_per_step, self.plan.job.training.evaluate_batches
        whole = len(split) // step if self.objective.needs_whole_batches else -(-len(split) // step)
        return min(wanted, whole)

    @property
    def evaluated_sequences(self) -> int:
        """Validation sequences that one evaluation covers."""
        return min(len(self.data.validation), self.evaluation_batches * self.plan.sequences_per_step)


def current_world(device: torch.device) -> World:
    """Return the world of the process group that this process has joined."""
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
    name = accelerator.vendor_name(device)
    gpus = _gpus(device, local_size) if accelerator.is_accelerator(device) else 0
    uses_engine = hierarchical.parts_of(dist.get_backend())[1] == registration.BACKEND
    hosts = -(-size // local_size)
    return World(size, device.type, local_size, name, hosts, engine=uses_engine, float8=has_float8(device), gpus=gpus)


def _gpus(device: torch.device, local_size: int) -> int:
    """Count the GPUs of this host's ranks. Where one sees fewer than ranks it may have its own, so they compare."""
    visible = accelerator.count(device.type)
    if visible >= local_size:
        return visible
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    local_rank = int(os.environ.get("LOCAL_RANK") or dist.get_rank())
    topology.tell_device(store, local_rank, topology.gpu_identity(device.type, device.index))
    return topology.count_devices(store, local_size)


def study(job: Job, unstaged: ModelFacts | None = None) -> ModelFacts:
    """Return the structure of the job's model; its weights, where it has some, are there and fit.

    Reads no corpus. Any process may call it. Facts of the job without stages, where a caller has them, are not found
    again.
    """
    data = prepare(job) if gives_samples(job) else None
    model = build_model(job)
    facts = unstaged or discover(model, job, None if data is None else _example(job, data))
    if job.model.factory is not None:
        facts = with_row_coupling(job, model, facts, data, partial(_constructed_weights, job))
    if job.parallel.pipeline_parallel_degree > 1:
        few = None if data is None else _example(job, data, TRACED_ROWS)
        facts = cut_by_trace(model, facts, job.data.sequence_length, few)
    if job.model.path is not None:
        weights, names = match_weights(model, facts, job)
        facts = replace(facts, unread_weights=weights.unread)
        if job.model.dtype == "file":
            facts = with_file_dtypes(facts, lambda name: weights.dtype(names[name]) if name in names else None)
    if job.model.weights is not None:
        match_weight_file(job.model.weights, model, facts)
    if job.adapter.path is not None:
        open_adapter(facts, job.adapter.path)
    return facts


def prepare_data(job: Job, facts: ModelFacts, say: Callable[[str], None] = lambda text: None) -> TokenData:
    """Return the job's data for a model of these facts, tokenized where the cache does not hold it."""
    return prepare(job, facts.vocabulary_size or None, say)


def set_up(job: Job, device: torch.device) -> AssembledJob:
    """Build, shard and initialize the model of `job` on this rank. Collective over the world."""
    facts = study(job)
    return assemble(job, device, facts, prepare_data(job, facts))


def assemble(
    job: Job, device: torch.device, facts: ModelFacts, data: TokenData | None, given: GivenModel | None = None
) -> AssembledJob:
    """Do the same for facts and data that are there already, and for a model that the caller has built."""
    if data is not None:
        check_same_data(data, device)
        for stream in data.streams.values():
            share_stream(stream, device)
    world = current_world(device)
    plan = resolve(job, world, facts, None if data is None else len(data.train))
    facts = facts.for_degrees(plan.degrees[Axis.TENSOR], plan.degrees[Axis.CONTEXT])
    if data is not None:
        check_passes(plan, data)
    layout = Layout.from_plan(plan, dist.get_rank())
    seed = job.training.seed
    choose_algorithms(job.training.deterministic)
    torch.manual_seed(seed * world.size + dist.get_rank())  # read by fused attention dropout alone
    if given is None and job.model.factory is not None:
        given = GivenModel.of_constructed(construct_user_module(job))
    if given is None:
        model = parallelize(build_model(job), plan, layout, facts, device)
        initialize(model, seed)
    else:
        model = _place_given(given, plan, layout, facts, device)
    if needs_copy(plan):
        model.reference = frozen_copy(model)
        initialize(model.reference, seed)
    if job.training.ema_decay is not None:
        model.ema = AveragedWeights(model.tensor_map, job.training.ema_decay)
    objective = make_objective(model)
    if isinstance(objective, DirectPreference) and objective.is_precomputed and data is not None:
        data = with_reference(objective, make_stream(plan, layout, data), data)
    if data is not None and job.data.factory is not None and isinstance(objective, LanguageModelling):
        data = _with_labels(data, objective, facts, job)
    if objective.needs_whole_batches and data is not None:
        check_whole_batches(plan, data)
    optimizer = ShardedOptimizer.of(model)
    scaler = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale)
    return AssembledJob(plan, layout, facts, data, model, objective, optimizer, scaler)


def _with_labels(data: TokenData, objective: LanguageModelling, facts: ModelFacts, job: Job) -> TokenData:
    """Return samples of `data.factory` with labels where and as `objective` counts them."""
    classes = None
    if isinstance(objective, Classification):
        classes = objective.classes, int(job.model.task == "token_classification")
    return data.with_labels(facts.given_labels == NEXT, classes)


def _place_given(
    given: GivenModel, plan: Plan, layout: Layout, facts: ModelFacts, device: torch.device
) -> ParallelModel:
    """Return a module of the user's own on this rank, with its values. Collective."""
    path, seed = plan.job.model.weights, plan.job.training.seed
    file = None if path is None else match_weight_file(path, given.module, facts)
    model = parallelize(given.module, plan, layout, facts, device)
    take_constructed_values(given, seed)
    place_weights(model, given.weights, seed, given.buffers, () if file is None else file.names)
    if file is not None:
        read_weight_file(model, file)
        start_adapters(model)
    return model


def choose_algorithms(deterministic: bool) -> None:
    """Let operators that have several algorithms take one that gives the same numbers each time, or fail.

    On a GPU torch then refuses every matrix product unless cuBLAS is told so, which listens until its first one.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def check_same_data(data: TokenData, device: torch.device) -> None:
    """Every host builds its own token cache, every rank its own data set; refuse those that differ. Collective.

    Raises:
        DataError: some rank has other tokens, or samples, than the rest.
    """
    if dist.get_world_size() == 1:
        return
    if isinstance(data.train, Samples):
        return _check_same_samples(data, device)
    _agree(data.content, device, f"{data.corpus}; the corpus and tokenizer must be the same on every host")
    if data.sets:
        _agree(
            data.content_of_sets, device, f"evaluation.sets {', '.join(data.sets)}; they must be the same on every host"
        )


def _check_same_samples(data: TokenData, device: torch.device) -> None:
    assert isinstance(data.train, Samples)
    assert isinstance(data.validation, Samples)
    remedy = (
        "it must return the same samples in the same order on every rank; seed what it draws, and sort what it lists"
    )
    where = f"{data.corpus}, {data.documents} samples; {remedy}"
    _agree(content_hash(data.train, data.validation), device, where)


def share_stream(stream: StreamedTokens, device: torch.device) -> None:
    """Let the ranks of each host read the same blocks of a stream. Collective."""
    number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(number, 0)
    world, rank = dist.get_world_size(), dist.get_rank()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    stream.join(f"{int(number):016x}", int(os.environ.get("LOCAL_RANK") or rank % local_ranks), local_ranks)


def _agree(content: str, device: torch.device, where: str) -> None:
    number = torch.tensor([int(content[:15] or "0", 16)], dtype=torch.int64, device=device)
    least, most = number.clone(), number.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if int(least) != int(most):
        raise DataError(f"ranks read different data: this one has {content} ({where})")


def check_whole_batches(plan: Plan, data: TokenData) -> None:
    """Refuse padding rows for a module that returns its own mean loss.

    Raises:
        ModelError: a step's samples do not divide, or the validation set is smaller than one step.
    """
    remedy = "give model.loss=package.module:function(output, batch) -> (sum, count)"
    for size, count in zip(plan.step_sizes.sizes, plan.accumulations, strict=True):
        rows = plan.data_ranks * plan.microbatch * count
        if rows != size:
            where = "" if size == plan.sequences_per_step else " of training.batch_size_schedule"
            raise ModelError(
                f"the module returns a mean loss, which cannot leave out {rows - size} padding rows of "
                f"training.sequences_per_step={size}{where}; use {rows}, or {remedy}"
            )
    size, left = plan.step_sizes.of(plan.steps - 1), plan.sequences_of(plan.steps - 1)
    if left < size:
        raise ModelError(
            f"training.epochs={plan.job.training.epochs}: the last step holds {left} of {size} samples, and a mean "
            f"loss cannot leave out padding; use training.steps, or {remedy}"
        )
    for name, split in {"the validation set": data.validation, **data.sets}.items():
        if len(split) < plan.sequences_per_step:
            raise ModelError(
                f"{name} has {len(split)} samples, fewer than training.sequences_per_step={plan.sequences_per_step}, "
                f"and a mean loss cannot leave out padding; raise data.validation_fraction, or {remedy}"
            )


def check_passes(plan: Plan, data: TokenData) -> None:
    """Refuse more steps than the passes of `data.sources` have samples for.

    Raises:
        ConfigError: with the steps that they have.
    """
    job, samples, needed = plan.job, len(data.train), plan.step_sizes.samples_before(plan.steps)
    if job.training.epochs is None and any(source.repeat for source in job.data.sources) and needed > samples:
        raise ConfigError(
            f"training.steps={plan.steps} needs {needed:,} samples, and repeat of data.sources gives {samples:,}; use "
            f"training.epochs 1, at most {plan.step_sizes.steps_for(samples + 1) - 1} steps, or weight in the place of "
            "repeat"
        )


def make_stream(plan: Plan, layout: Layout, data: TokenData) -> Stream:
    """Return this rank's batches of the training split."""
    kind = InOrder if data.streams else Stream
    return kind(
        data.train,
        plan.job.training.seed,
        plan.sequences_per_step,
        plan.microbatch,
        plan.accumulation,
        layout.data_ranks,
        layout.data_rank,
        total=plan.total_sequences,
        sizes=plan.step_sizes,
        lengths=plan.sequence_lengths,
    )


def _constructed_weights(job: Job) -> dict[str, Tensor]:
    with drawing_from(job.training.seed):
        return {name: parameter.detach() for name, parameter in user_factory(job)().named_parameters()}


def study_shapes(job: Job) -> ModelFacts:
    """Return the structure of the job's model, as the first rows of its samples show it; no weights are looked for."""
    return discover(build_model(job), job, _example(job, prepare(job)))


def _example(job: Job, data: TokenData, rows: int = ROWS) -> dict[str, Tensor]:
    """Return what the model is called with for a sample in so many rows; ROWS tell their dim from others."""
    return call_arguments(job, data.train.batch([0] * rows, [0] * rows, 0))
