"""Outputs of every module of a rank in one step, and the gradients that reach them in backward, by microbatch.

A step that disagreed is run once more, from the weights that it began with, so that nothing is kept of steps that
agree. Samples of the elements are enough to tell where two runs part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.dropout import active_scope
from shardwise.plan.normalisation import NORMALISATIONS
from shardwise.testing.capture import Captured, gather
from shardwise.training.session import Session
from shardwise.training.setup import AssembledJob
from shardwise.training.step import weighted

MOST = 4096  # elements that are kept of an output
Rows = tuple[int, ...]


@dataclass
class ModuleTrace:
    """The outputs of modules on one rank, and the gradients that reached them.

    Attributes:
        outputs: (module, sample counters of the microbatch) -> its first output.
        gradients: the same of gradients, without the loss scale.
        awaited: keys of outputs that a gradient should reach.
    """

    outputs: dict[tuple[str, Rows], SampledOutput] = field(default_factory=dict)
    gradients: dict[tuple[str, Rows], SampledOutput] = field(default_factory=dict)
    awaited: set[tuple[str, Rows]] = field(default_factory=set)


@dataclass(frozen=True)
class SampledOutput:
    """Evenly spaced elements of a tensor.

    Attributes:
        shape: of the tensor.
        elements: fp64, every so many of the flattened tensor.
        positions: of its rows in whole sequences; None where it has them all.
    """

    shape: tuple[int, ...]
    elements: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, positions: Tensor | None, divisor: float, whole: bool) -> SampledOutput:
        """Sample a tensor, or take it whole."""
        elements = tensor.detach().reshape(-1).double().cpu() if whole else sampled(tensor)
        return cls(tuple(tensor.shape), elements / divisor, positions)


def sampled(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements of a tensor, at most MOST, in fp64 on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MOST))].double().cpu()


def trace_step(session: Session, batches: Sequence[Any], ours: Captured) -> tuple[ModuleTrace, dict[str, Tensor]]:
    """Run a step again, from the weights that it began with: what its modules make, and then without dropout.

    Returns this rank's trace, and on rank 0 whole gradients of the summed loss in evaluation mode. Collective.
    """
    run, trace = session.assembled, ModuleTrace()
    with torch.no_grad():
        for entry in run.model.tensor_map:
            entry.local.copy_(ours.weights[entry.name])
    run.model.reshard()
    scale = ours.loss_scale / max(ours.count, 1)  # as in training, within the range of fp16
    # A reference runs ahead, without hooks: it may be this model.
    batches = weighted(batches, NORMALISATIONS[run.plan.normalisation])
    batches = run.objective.prepared([batch.to(run.model.device) for batch in batches], ours.step)
    with ExitStack() as stack:
        for part in run.model.parts if not run.plan.job.model.compile else ():
            absent = part.boundary.absent if part.boundary is not None else ()
            stack.enter_context(traced(part.module, trace, scale, absent=absent))
        _run_backward(run, batches, ours.step, scale)
    run.optimizer.zero_grad()
    run.model.train(False)
    _run_backward(run, batches, ours.step, scale)
    undropped = gather(run, gradients=True, divisor=scale)
    run.optimizer.zero_grad()
    return trace, undropped


def _run_backward(run: AssembledJob, batches: Sequence[Any], step: int, scale: float) -> None:
    """Run forward and backward of the summed loss, times `scale`."""
    model = run.model
    seed = torch.tensor(scale, dtype=model.accumulation_dtype, device=model.device)
    model.run(run.objective, batches, step, seed)


@contextmanager
def traced(
    root: nn.Module,
    trace: ModuleTrace,
    divisor: float = 1.0,
    rows: Rows | None = None,
    whole: bool = False,
    absent: Collection[str] = (),
) -> Iterator[None]:
    """Keep what all modules below `root` make inside.

    Args:
        divisor: of gradients.
        absent: names of modules that are on other stages; theirs is no output.
        rows: sample counters of a forward outside of a training step.
        whole: keep every element.
    """

    below = tuple(f"{name}." for name in absent)

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor, scope = first_tensor(output), active_scope()
        own = rows if rows is not None else (None if scope is None else tuple(scope.rows.tolist()))
        if tensor is None or own is None or (name, own) in trace.outputs:  # recomputed in backward
            return
        positions = None if scope is None else _positions(scope)
        trace.outputs[name, own] = SampledOutput.of(tensor, positions, 1.0, whole)

        def keep_gradient(gradient: Tensor) -> None:
            trace.gradients.setdefault((name, own), SampledOutput.of(gradient, positions, divisor, whole))

        if tensor.requires_grad:
            trace.awaited.add((name, own))
            tensor.register_hook(keep_gradient)

    with ExitStack() as stack:
        for name, module in root.named_modules():
            if name not in absent and not name.startswith(below):
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        yield


def _positions(scope: Any) -> Tensor | None:
    """Return which positions of whole sequences run now."""
    positions = None if scope.sequences is None else scope.sequences.positions
    if scope.positions is None:
        return positions
    own = slice(*scope.positions)
    return torch.arange(own.start, own.stop) if positions is None else positions[own]


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((tensor for value in output if (tensor := first_tensor(value)) is not None), None)
    return None
