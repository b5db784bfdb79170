"""A dry run: one rank of a job of any size, traced on this machine without allocating or computing anything.

The rank runs its real code - parallelize, two training steps, the optimizer - on fake tensors (shapes only) and in a
fake process group, whose collectives return at once. What stays alive between operators is counted, which is the peak
that the closed form (`shardwise.planner.formulas.memory`) has to meet; the report shows both.

The trace has one device, a CPU: attention is the CPU's fused kernel, and nothing tells a host from a device. What it
cannot see is refused by name (`REFUSALS`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from shardwise._torch_compat.groups import fake_store
from shardwise._torch_compat.operators import grouped_product, new_empty, read_scalar
from shardwise._torch_compat.tracing import DataDependentOutputException, FakeTensorMode, asks_for_values
from shardwise.data.batch import Batch
from shardwise.errors import ConfigError, MachineError
from shardwise.job.axes import Axis
from shardwise.job.objects import in_parentheses, is_users_file, raised_at
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.facts import ModelFacts
from shardwise.observe.memory import LiveBytes
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.reference import frozen_copy, needs_copy

FAKE = "fake"
STEPS = 2  # the first makes the optimizer's state
MICROBATCHES = 2  # without a pipeline, more of them hold no more; with one, for each of its ranks
MIB = 2**20
TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class DryRun:
    """Peak memory of one traced rank in bytes, beside that of the closed forms.

    Attributes:
        rank: the rank that was traced, of `plan.world.size`.
        peak: traced, in the second step.
        traced: the closed form of what was traced, on that rank's pipeline rank.
        planned: the closed form of the plan on its own device.
        operators: how many were dispatched.
        coordinates: of the rank, by axis.
    """

    plan: Plan
    rank: int
    peak: int
    traced: MemoryEstimate
    planned: MemoryEstimate
    operators: int
    coordinates: dict[str, int]

    @property
    def error(self) -> float:
        """The closed form against the trace, as a share of the trace."""
        return self.traced.total / self.peak - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "world": self.plan.world.size,
            "rank": self.rank,
            "coordinates": self.coordinates,
            "operators": self.operators,
            "traced_peak_bytes": self.peak,
            "closed_form_bytes": self.traced.total,
            "error_percent": 100 * self.error,
            "moment": self.traced.moment,
            "causes": self.traced.causes(),
            "planned": {"bytes": self.planned.total, "moment": self.planned.moment, "causes": self.planned.causes()},
        }


REFUSALS: tuple[tuple[Callable[[Plan, ModelFacts], Any], str], ...] = (
    (lambda plan, facts: not facts.takes_token_ids, "model.factory: the inputs of a module of your own are not known"),
    (
        lambda plan, facts: plan.stages and facts.stages.traced,
        "parallel.pipeline_parallel_degree above 1: torch traces this model's forward to cut it, in no other trace",
    ),
    (
        lambda plan, facts: plan.job.model.task == "seq2seq_lm",
        "model.task=seq2seq_lm: encoder and decoder get sequences of two lengths, which the closed form does not know",
    ),
    (
        lambda plan, facts: plan.world.device_type == "cuda" and plan.job.memory.offload_activations,
        "memory.offload_activations=True: the trace has one device and cannot tell what is on the host",
    ),
    (
        lambda plan, facts: plan.world.device_type == "cuda" and plan.job.memory.offload_parameters,
        "memory.offload_parameters=True: the trace has one device and cannot tell what is on the host",
    ),
    (
        lambda plan, facts: plan.world.device_type == "cuda" and plan.offloaded_optimizer,
        "memory.offload_optimizer: the trace has one device and cannot tell what is on the host",
    ),
)


def dry_run(job: Job, world: World, facts: ModelFacts, rank: int = 0) -> DryRun:
    """Trace rank `rank` of `job` on `world`.

    Raises:
        LegalityError: the job cannot run on that world.
        ConfigError: the rank is not there, or the trace cannot follow the job; the message says which key.
        MachineError: this process is in a process group already.
    """
    plan = resolve(job, world, facts)
    if not 0 <= rank < world.size:
        raise ConfigError(f"--rank={rank} is not among the {world.size} ranks; use 0 to {world.size - 1}")
    for refuses, why in REFUSALS:
        if refuses(plan, facts):
            raise ConfigError(
                f"--dry-run cannot trace {why}; leave it out, or take the closed form of `shardwise plan`"
            )
    traced = _traceable(plan)
    layout = Layout.from_plan(traced, rank)
    with _alone(rank, world.size):
        peak, operators = _trace(traced, layout, facts)
    stage = layout.index(Axis.PIPELINE)
    return DryRun(
        plan,
        rank,
        peak,
        estimate(traced, facts, pipeline=stage, imbalance=1.0),  # its rows are even
        estimate(plan, facts, pipeline=stage),
        operators,
        {str(axis): index for axis, index in layout.coordinates().items()},
    )


def _traceable(plan: Plan) -> Plan:
    """The same work where the trace can follow it."""
    count = min(plan.accumulation, MICROBATCHES * plan.degrees[Axis.PIPELINE])
    world = replace(plan.world, device_type="cpu", accelerator="")
    model = plan.job.model.model_copy(update={"compile": False})
    job = plan.job.model_copy(update={"model": model})
    return replace(plan, job=job, world=world, backend=FAKE, accumulation=count)


@contextmanager
def _alone(rank: int, size: int) -> Iterator[None]:
    """A world in which this process is the only one."""
    if dist.is_initialized():
        raise MachineError("a dry run makes a process group of its own, and this process is in one; run it elsewhere")
    dist.init_process_group(FAKE, rank=rank, world_size=size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _trace(plan: Plan, layout: Layout, facts: ModelFacts) -> tuple[int, int]:
    """(peak bytes of the last step, dispatched operators)."""
    device = torch.device("cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = parallelize(build_model(plan.job), plan, layout, facts, device, lambda: fake)
    if needs_copy(plan):
        model.reference = frozen_copy(model, lambda: fake)
    modules = [part.module for built in (model, model.reference) if built is not None for part in built.parts]
    with fake:
        optimizer, objective = ShardedOptimizer.of(model), make_objective(model)
        with _values_refused(), _Trace(*modules, optimizer.inner) as trace:
            for step in range(STEPS):
                trace.measuring = step == STEPS - 1
                _step(model, objective, optimizer)
    return trace.peak, trace.operators


@contextmanager
def _values_refused() -> Iterator[None]:
    """Name the place of code that needs values of tensors: none has any here.

    Raises:
        ConfigError: with the file and the line that are not torch's or ours.
    """
    try:
        yield
    except RuntimeError as error:
        if not asks_for_values(error):
            raise
        raise ConfigError(
            f"--dry-run cannot trace code that asks for the values of tensors{in_parentheses(raised_at(error))}; leave "
            "it out, or take the closed form of `shardwise plan`"
        ) from error


def _step(model: ParallelModel, objective: Objective, optimizer: ShardedOptimizer) -> None:
    """Run `train_step` less what only moves numbers: control, norm, and their all-reduces."""
    batches = [_batch(model.plan) for _ in range(model.plan.accumulation)]
    model.run(objective, batches, 0, torch.empty((), dtype=model.accumulation_dtype))
    optimizer.step()
    optimizer.zero_grad()


def _batch(plan: Plan) -> Batch:
    rows, length = plan.microbatch, plan.sequence_length
    tokens = torch.empty(rows, length, dtype=torch.int64)
    isolated = plan.job.isolates_documents
    inputs = {"input_ids": tokens} | ({"position_ids": torch.empty_like(tokens)} if isolated else {})
    documents = torch.empty_like(tokens) if isolated else None
    completions = torch.empty_like(tokens) if plan.job.reads_pairs else None
    counters = torch.empty(rows, dtype=torch.int64)
    return Batch(inputs, torch.empty_like(tokens), counters, documents, completions=completions)


class _Trace(LiveBytes):
    """Counts fake tensors as if they had storage."""

    def __init__(self, *roots: Any) -> None:
        self.operators, self.measuring = 0, False
        super().__init__(*roots, counts_meta=True)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        if func is read_scalar:
            if is_users_file(_caller()):
                raise DataDependentOutputException(func)
            return 1  # no value is known; the one that we read is the vote of torch stages, where 1 is yes
        if func is grouped_product:  # torch knows its shape for bf16 alone
            func, args, kwargs = new_empty, (args[0], _grouped_shape(*args, **(kwargs or {}))), {}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _sample(self) -> None:
        """The peak alone, and in the measured step alone: after every operator, this is most of a trace's time."""
        if self.measuring:
            alive = (reference() for reference in list(self._storages.values()))
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))


def _caller() -> str:
    """Return the file that has called an operator: the first below that is neither torch's nor of a mode."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return frame.f_code.co_filename


def _grouped_shape(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> tuple[int, ...]:
    """Return the shape of a grouped product: `offs` cuts the dimension that is not there thrice."""
    if left.dim() == right.dim() == 2:
        assert offs is not None
        return (offs.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 2:
        return (left.shape[0], right.shape[2])
    return (left.shape[1], right.shape[1]) if right.dim() == 2 else (left.shape[0], left.shape[1], right.shape[2])


def describe(run: DryRun) -> Group:
    """Trace and closed form side by side, by cause."""
    world, where = run.plan.world, ", ".join(f"{axis} {index}" for axis, index in run.coordinates.items() if index)
    table = Table(title=f"Dry run of rank {run.rank} of {world.size}{f' ({where})' if where else ''}, MiB")
    table.title_justify, table.title_style = "left", "bold"
    table.add_column("cause")
    table.add_column("as traced", justify="right")
    table.add_column(f"planned on {world.device_type}", justify="right")
    for cause, size in run.traced.causes().items():
        planned = run.planned.causes()[cause]
        if size or planned:
            table.add_row(cause, f"{size / MIB:,.1f}", f"{planned / MIB:,.1f}")
    table.add_section()
    table.add_row("closed form", f"{run.traced.total / MIB:,.1f}", f"{run.planned.total / MIB:,.1f}", style="bold")
    table.add_row("at", run.traced.moment, run.planned.moment)
    table.add_row("traced peak", f"{run.peak / MIB:,.1f}", "", style="bold")
    table.add_row("closed form against trace", f"{run.error:+.1%}", "")
    return Group(table, *(Text(f"note: {note}", style="yellow") for note in _notes(run)))


def _notes(run: DryRun) -> Iterator[str]:
    yield f"{run.operators:,} operators were traced on a CPU without allocating; attention is the CPU's fused kernel."
    count = MICROBATCHES * run.plan.degrees[Axis.PIPELINE]
    if run.plan.accumulation > count:
        more = "hold more only under `pipeline: simple`" if run.plan.stages else "hold no more"
        yield f"{count} of {run.plan.accumulation} microbatches were traced and counted; further ones {more}."
    if run.plan.job.model.compile:
        yield "model.compile: the blocks were traced uncompiled; compiled ones keep less."
