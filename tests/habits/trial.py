"""Trains a module with shardwise and with torch alone, from the same weights and samples, and compares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise.data.batch import Batch
from shardwise.errors import ShardwiseError
from shardwise.job.objects import load_object
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.schema import Job
from shardwise.model.construct import drawing_from
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import train_step
from tests.habits import modules

STEPS, ROWS, DECAY, RATE, CLIP = 3, 8, 0.1, 0.05, 0.5
FLOOR = 0.1  # of what errors are relative to: AdamW makes 1e-10 of a gradient that is nothing but rounding
HERE = "tests.habits"


@dataclass(frozen=True)
class Trial:
    """Outcome of one trial on one rank.

    Attributes:
        parameters: largest error of a parameter after all steps, relative to its largest element or to FLOOR, and
            before the first of those that the constructor computes.
        worst: name of the parameter with that error after all steps.
        losses: largest relative error of a step's loss.
        refusal: message of the error that refused the module.
        steps: taken by then.
    """

    parameters: float = float("inf")
    losses: float = float("inf")
    worst: str = ""
    refusal: str = ""
    steps: int = 0


def make_job(directory: str, module: str, sections: dict[str, dict[str, Any]]) -> Job:
    """Return the job that trains `module`, a name in `modules` or `keeping`, in fp64 with AdamW."""
    file = "modules" if hasattr(modules, module) else "keeping"
    base: dict[str, dict[str, Any]] = {
        "model": {"factory": f"{HERE}.{file}:{module}", "loss": f"{HERE}.building:squared_error"},
        "data": {"factory": f"{HERE}.building:Rows", "cache_directory": f"{directory}/cache"},
        "parallel": {"device": "cpu"},
        "precision": {"compute": "fp64"},
        "training": {"steps": STEPS, "sequences_per_step": ROWS, "microbatch_size": 2},
        "optimizer": {"name": "AdamW", "learning_rate": RATE, "weight_decay": DECAY, "schedule": "constant",
                      "clip_norm": CLIP, "warmup_steps": 0},
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Job.model_validate(base)


def try_module(job: Job) -> Trial:
    """Train the module of `job` in both ways; called on every rank of a world."""
    torch.manual_seed(0)
    losses: list[tuple[float, float]] = []
    try:
        run = set_up(job, torch.device("cpu"))
        module, start_error = plain_module(run)
        losses.extend(_train(run, module))
    except ShardwiseError as error:
        return Trial(refusal=str(error), steps=len(losses))
    worst, error = _largest_error(run, module)
    loss_error = max(_number_or_inf(abs(ours - theirs) / abs(theirs)) for ours, theirs in losses)
    return Trial(max(error, start_error), loss_error, worst, steps=len(losses))


def plain_module(run: AssembledJob) -> tuple[nn.Module, float]:
    """Return the module built by its factory alone, in fp64, with the start of `run`, and the error of that start.

    The error is that of the tensors that the module says it computes.
    """
    model = run.plan.job.model
    with drawing_from(run.plan.job.training.seed):
        module: nn.Module = load_object(str(model.factory), "model.factory")(**model.factory_arguments)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = _in_double(tensor.data)  # `module.double()` would drop imaginary parts
    start = {name: _in_double(value.detach()).clone() for name, value in run.model.whole_tensors()}
    constructed = module.state_dict()
    errors = [float(_relative(start[name], constructed[name])) for name in getattr(module, "computed", ())]
    start |= {name: value.double() for name, value in run.model.module.named_buffers() if value.is_floating_point()}
    module.load_state_dict(start, strict=False)
    return module, max(errors, default=0.0)


def _in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _train(run: AssembledJob, module: nn.Module) -> Iterator[tuple[float, float]]:
    """Yield the losses of shardwise and of plain torch, a step at a time."""
    optimizer = _plain_optimizer(module, run.plan.job.optimizer)
    for step in range(STEPS):
        batches = list(run.stream.batches(step))
        run.optimizer.set_learning_rate(RATE)
        result = train_step(run.model, run.objective, batches, run.optimizer, run.scaler, step)
        yield result.loss, _plain_step(run, module, optimizer, batches)


def _plain_optimizer(module: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    kind: type[Any] = getattr(torch.optim, section.name)
    optimizer: torch.optim.Optimizer = kind(groups, lr=RATE, **section.options)
    return optimizer


def _plain_step(run: AssembledJob, module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> float:
    """Take a step with one backward for all samples; return their mean loss."""
    optimizer.zero_grad()
    everyone = [batch for reader in gather_batches(run, batches) for batch in reader]
    losses = [_summed_loss(run.plan.job, module, batch) for batch in everyone]
    loss = torch.stack(losses).sum() / sum(batch.count() for batch in everyone)
    loss.backward()
    if run.plan.job.optimizer.clip_norm is not None:
        clip_grad_norm_(module.parameters(), run.plan.job.optimizer.clip_norm)
    optimizer.step()
    return float(loss.detach())


def _summed_loss(job: Job, module: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: value.double() for name, value in batch.inputs.items()}
    if job.model.loss is None:
        mean: Tensor = module(**inputs, labels=batch.labels.double())
        return mean * batch.count()
    summed: Tensor = load_object(job.model.loss, "model.loss")(module(**inputs), batch)[0]
    return summed


def gather_batches(run: AssembledJob, batches: list[Batch]) -> list[list[Batch]]:
    """Return the microbatches of each rank that reads rows of its own, in order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (run.layout.data_rank, batches))
    return [batches for _, batches in sorted(dict(everyone).items())]


def _largest_error(run: AssembledJob, module: nn.Module) -> tuple[str, float]:
    """Return the parameter that differs most, and by how much."""
    expected: dict[str, Tensor] = dict(module.named_parameters())
    errors = {
        name: _number_or_inf(float(_relative(value, expected[name])))
        for name, value in run.model.whole_tensors()
        if value.numel()
    }
    return max(errors.items(), key=lambda item: item[1])


def _number_or_inf(error: float) -> float:
    return inf if isnan(error) else error  # `max` passes over NaN


def _relative(value: Tensor, expected: Tensor) -> Tensor:
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=FLOOR)).double()
