"""One rank of a job of any size, traced on this machine without allocating or computing anything.

The rank runs its real code - parallelize, a training step, the optimizer - on fake tensors (shapes only) and in a fake
process group, whose collectives return at once. Its optimizer's state is made ahead, so that the step is any one.

A rank of accelerators computes on a simulated one (`testing/simulated`): torch tells it from its host, so that a mix of
both is an error, memory is counted apart, and copies between them are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch_compat.fsdp2 import units_made_in
from shardwise._torch_compat.groups import fake_store
from shardwise._torch_compat.remembered_fakes import RememberedFakeMode
from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.errors import MachineError
from shardwise.job.axes import Axis
from shardwise.job.devices import CPU, Feature, add_device_kind
from shardwise.kernels.attention import row_positions
from shardwise.model.build import build_model
from shardwise.model.facts import ModelFacts
from shardwise.parallel.apply import parallelize
from shardwise.parallel.averaged_weights import AveragedWeights
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan, World
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.simulated.device import simulated_device
from shardwise.testing.simulated.streams import SIMULATED
from shardwise.testing.trace.kernel_packages import packages_stood_for
from shardwise.testing.trace.program import Entry, Partition
from shardwise.testing.trace.recorder import RankRecorder
from shardwise.testing.trace.refusals import unseen_refused
from shardwise.testing.trace.storages import STATE, WEIGHTS, Storages
from shardwise.testing.trace.traced_batch import TracedBatch
from shardwise.training import host_updates
from shardwise.training import step as training_step
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.reference import frozen_copy, needs_copy

FAKE = "fake"
WHOLE = 1 << 62


@dataclass(frozen=True)
class RankTrace:
    """One rank's memory and program in a step.

    Attributes:
        rank: that was traced.
        coordinates: of the rank, by axis.
        peak: bytes.
        owners: whose they are.
        closed_form: of what was traced, on that rank's pipeline rank.
        operators: how many were dispatched.
        program: what it does, in order.
        partitions: that the program's calls name.
        traced_as: the rank that was traced at full depth, where that is another.
        faults: of the use of the accelerator, each with its line.
    """

    rank: int
    coordinates: dict[str, int]
    peak: int
    owners: dict[str, int]
    closed_form: MemoryEstimate
    operators: int
    program: tuple[Entry, ...]
    partitions: tuple[Partition, ...]
    traced_as: int | None = None
    faults: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The closed form against the trace, as a share of the trace."""
        return self.closed_form.total / self.peak - 1


def trace_rank(plan: Plan, facts: ModelFacts, rank: int, microbatch: TracedBatch) -> RankTrace:
    """Trace rank `rank` of `plan`, whose microbatches have the shapes of `microbatch`.

    Raises:
        ConfigError: the trace cannot follow the job; the message says what and where.
        MachineError: this process is in a process group already.
    """
    traced = traceable(plan)
    layout = Layout.from_plan(traced, rank)
    storages = Storages(traced.world.device_type)
    with device_of(traced.world) as (device, fake), alone(rank, plan.world.size, device), _plain_norm():
        model = traced_model(traced, layout, facts, device, fake)
        recorder = _trace(model, microbatch, storages, fake)
    counted = replace(plan, accumulation=traced.accumulation)
    return RankTrace(
        rank,
        {str(axis): index for axis, index in layout.coordinates().items()},
        storages.peak,
        storages.owners(),
        estimate(counted, facts, pipeline=layout.index(Axis.PIPELINE), imbalance=1.0),  # its rows are even
        recorder.operators,
        recorder.program(),
        tuple(recorder.partitions),
        faults=tuple(dict.fromkeys(map(str, recorder.discipline.faults))),
    )


def exempt(plan: Plan) -> tuple[str, ...]:
    """Return the functions of a step in which a host waits for its accelerator, or gives it values, because it has to.

    Updates in host memory wait for their gradients, and FSDP2, where it offloads parameters, for what it has reduced.
    So does the host for every copy where none goes on aside.
    """
    aside = plan.world.kind.supports(Feature.ASIDE).ok
    functions = [] if aside else ["moved", "CopyStream.copy", "ActivationOffload.copy"]
    if plan.stages:  # torch's own: losses stay until the next step
        functions.append("_MicrobatchRunner.forward")
    if plan.offloaded_optimizer:
        functions.append("HostParameter.arrive")
    if plan.job.memory.offload_parameters:
        functions += ["ParallelModel.drive", "squared_share"]
    return tuple(functions)


def traced_microbatches(plan: Plan) -> int:
    """Return how many of a step's microbatches are traced: one more than are under way at once, which hold no more.

    Schedules of several stages a rank go round by twice as many as there are ranks.
    """
    ranks = plan.degrees[Axis.PIPELINE]
    return min(plan.accumulation, 2 * ranks if len(plan.stages) > ranks else ranks + 1)


def traceable(plan: Plan) -> Plan:
    """The same work where the trace can follow it."""
    world = plan.world
    if world.device_type != CPU:
        add_device_kind(replace(world.kind, name=SIMULATED, like=world.kind.name, backend=FAKE))
        world = replace(world, device_type=SIMULATED, accelerator="")
    model = plan.job.model.model_copy(update={"compile": False})
    job = plan.job.model_copy(update={"model": model})
    return replace(plan, job=job, world=world, backend=FAKE, accumulation=traced_microbatches(plan))


@contextmanager
def device_of(world: World) -> Iterator[tuple[torch.device, FakeTensorMode]]:
    """Give what a rank computes on: the host, or a simulated accelerator; with the mode of its fake tensors."""
    if world.device_type == CPU:
        yield torch.device(CPU), RememberedFakeMode(allow_non_fake_inputs=True)
        return
    with simulated_device(world.kind) as simulation, packages_stood_for():
        yield simulation.device, simulation.fakes


@contextmanager
def alone(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """A world in which this process is the only one."""
    if dist.is_initialized():
        raise MachineError("a trace makes a process group of its own, and this process is in one; run it elsewhere")
    devices = {FAKE: [*dist.Backend.backend_capability[FAKE], device.type]}
    with mock.patch.dict(dist.Backend.backend_capability, devices):
        dist.init_process_group(FAKE, rank=rank, world_size=size, store=fake_store())
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def _plain_norm() -> Iterator[None]:
    """Let a CPU sum the squares of gradients as a GPU does: it takes them in thousands."""
    with mock.patch.object(training_step, "NORM_CHUNK", WHOLE):
        yield


def _trace(model: ParallelModel, microbatch: TracedBatch, storages: Storages, fake: FakeTensorMode) -> RankRecorder:
    modules = traced_modules(model)
    recorder = recorder_of(model, modules, storages)
    with fake, microbatch.given(recorder), threads_seen(recorder):
        optimizer, objective = ShardedOptimizer.of(model), make_objective(model)
        storages.own(WEIGHTS, *modules)
        with unseen_refused(), recorder.recording(), one_document(model.plan, recorder):
            _make_state(model, objective, optimizer, recorder, microbatch)
            state = (optimizer.inner, {} if model.ema is None else model.ema.values)
            storages.own(STATE, *state)
            recorder.begin()
            sums = [vars(owner) for owner in (objective, model.routers) if owner is not None]  # for metrics
            with recorder.discipline.step(*modules, *state, sums):
                step_of(model, objective, optimizer, recorder, microbatch)
    return recorder


def traced_model(
    plan: Plan, layout: Layout, facts: ModelFacts, device: torch.device, fake: FakeTensorMode
) -> ParallelModel:
    """Return the rank's model, of fake parameters."""
    with units_made_in(fake):
        model = parallelize(_without_values(build_model(plan.job)), plan, layout, facts, device, lambda: fake)
        if needs_copy(plan):
            model.reference = frozen_copy(model, lambda: fake)
        if plan.job.training.ema_decay is not None:
            model.ema = AveragedWeights(model.tensor_map, plan.job.training.ema_decay)
    return model


def _without_values(module: nn.Module) -> nn.Module:
    """Move the buffers of a module of one's own to the meta device, where its parameters are."""
    for inner in module.modules():
        for name, buffer in list(inner.named_buffers(recurse=False)):
            setattr(inner, name, buffer.to("meta"))
    return module


def traced_modules(model: ParallelModel) -> list[nn.Module]:
    """Return the modules of its parts, and of those of the model that it is compared with."""
    return [part.module for built in (model, model.reference) if built is not None for part in built.parts]


def recorder_of(model: ParallelModel, modules: Iterable[nn.Module], storages: Storages) -> RankRecorder:
    """Return what sees the operators of the rank."""
    named = {name: module for whole in modules for name, module in whole.named_modules()}
    return RankRecorder(model.layout, named, storages, exempt(model.plan))


@contextmanager
def one_document(plan: Plan, recorder: RankRecorder) -> Iterator[None]:
    """Answer transformers where it reads whether positions start anew inside a sequence, as in isolated documents.

    It does not read that from fake tensors.
    """
    if plan.job.isolates_documents:
        yield
        return

    def never(positions: torch.Tensor) -> None:
        recorder.note_read(positions, f"transformers/masking_utils.py:{row_positions.QUESTION}")

    with mock.patch.object(row_positions, "from_values", never):
        yield


class _SeenThread:
    """A pool of one thread, of whose work the trace sees the operators: it is done where it is handed over."""

    def __init__(self, recorder: RankRecorder, *settings: Any) -> None:
        self._recorder = recorder

    def submit(self, function: Callable[..., None], *args: Any) -> _SeenWork:
        with self._recorder.beside():
            function(*args)
        return _SeenWork(self._recorder)


class _SeenWork(NamedTuple):
    recorder: RankRecorder

    def result(self) -> None:
        self.recorder.join()


@contextmanager
def threads_seen(recorder: RankRecorder) -> Iterator[None]:
    """Let updates in host memory be made where their thread is given them."""
    with mock.patch.object(host_updates, "ThreadPoolExecutor", partial(_SeenThread, recorder)):
        yield


def _make_state(
    model: ParallelModel,
    objective: Objective,
    optimizer: ShardedOptimizer,
    recorder: RankRecorder,
    microbatch: TracedBatch,
) -> None:
    """Let the optimizer make its state, as the first step does; what is in host memory needs a whole step."""
    if optimizer.host is not None:
        step_of(model, objective, optimizer, recorder, microbatch)
        return
    for entry in optimizer.entries:
        if entry.parameter.requires_grad:
            entry.parameter.grad = torch.empty_like(entry.parameter)
    _update(model, optimizer)


def _update(model: ParallelModel, optimizer: ShardedOptimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    if model.ema is not None:
        model.ema.update()


def step_of(
    model: ParallelModel,
    objective: Objective,
    optimizer: ShardedOptimizer,
    recorder: RankRecorder,
    microbatch: TracedBatch,
) -> None:
    """Run `train_step` with numbers that are nobody's."""
    batches = [microbatch.fakes(recorder).to(model.device) for _ in range(model.plan.accumulation)]
    with recorder.answering(0):
        control = training_step.exchange_control(model, training_step.ControlMessage(0, 0, 0, 0, 0))
    model.scale_router_losses(1.0)
    optimizer.begin(1.0)
    totals = model.run(objective, batches, 0, control.seed(model, 1.0))
    recorder.own_gradients(entry.parameter.grad for entry in optimizer.entries)
    with recorder.answering(0):
        training_step.reduce_loss_and_norm(model, optimizer, totals, 1.0, control, objective.measured())
    with recorder.update():
        if model.plan.job.optimizer.clip_norm is not None:
            optimizer.scale_gradients(0.5)
        _update(model, optimizer)
