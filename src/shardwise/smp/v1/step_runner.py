"""Forward and backward of a distributed model, in steps and outside of them.

`StepRunner` is the part of `DistributedModel` that drives the engine. It distributes the module before the first
forward, scales losses, and completes gradients after the last backward before an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.fsdp2 import drop_left_gradients
from shardwise.collectives.rank_record import WorkUnit, begin_unit, mark_phase
from shardwise.job.axes import Axis
from shardwise.parallel.gradient_sync import begin_microbatch
from shardwise.parallel.model import ParallelModel
from shardwise.plan.normalisation import SMP_MEAN, LossCounts
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.nesting import to_device, tree_leaves
from shardwise.smp.session import print_notes
from shardwise.smp.v1.building import MicrobatchSize, build_parallel_model, microbatch_size, on_meta
from shardwise.smp.v1.forward import MicrobatchForward
from shardwise.smp.v1.hooks import ModelHooks
from shardwise.smp.v1.own_backward import OutsideBackward
from shardwise.smp.v1.rows import merge_rows
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.step_outputs import argument_form
from shardwise.smp.v1.step_run import StepRun
from shardwise.smp.v1.weights import ModelWeights

KNOWN_SHAPES = 64  # of steps' arguments that are kept at once: one may hold the number of the step


@dataclass(frozen=True)
class BackwardSettings:
    """The way in which a model's gradients are put together.

    Attributes:
        passes: step calls whose gradients are summed before an optimizer step.
        average: gradients are the mean over microbatches, not their sum.
        share_buffers: buffers are the first data rank's after each step that has run backward.
    """

    passes: int
    average: bool
    share_buffers: bool


class StepRunner:
    """Runs the steps of one model.

    Args:
        session: the session of this process.
        weights: the model's weights.
        hooks: the model's hooks.
        forward: runs the model's parts.
        settings: how gradients are put together.
    """

    def __init__(
        self,
        session: SmpSessionV1,
        weights: ModelWeights,
        hooks: ModelHooks,
        forward: MicrobatchForward,
        settings: BackwardSettings,
    ) -> None:
        self.forward = forward
        self._session, self._weights, self._hooks, self._settings = session, weights, hooks, settings
        self._run: StepRun | None = None
        self._passes_run = 0
        self._synchronise = True
        self._held_back = self._has_noted = False
        self._left = False  # backwards have run whose gradients are not reduced
        self._last = True  # the backward outside of a step that runs completes the gradients
        self._outside = OutsideBackward(self._begin_outside, lambda: self._finish_backward(self._last))
        self._shapes: dict[Any, tuple[MicrobatchSize, dict[str, Any]]] = {}

    # ---- forward

    def call_model(self, args: Any, kwargs: Any, training: bool) -> Any:
        """Run the model's forward: its part on this rank, inside of a step; without stages also outside of one.

        Raises:
            StepUsageError: outside of a step, where there are stages.
        """
        self._weights.return_from_host()
        args, kwargs = to_device(args, self._session.device), to_device(kwargs, self._session.device)
        if self._run is not None:
            return self._run.call_model(args, kwargs)
        self._needs_step("model(...)")
        parallel = self.distribute(self.forward.bind(args, kwargs))
        output = self.forward.run(parallel.parts[0], args, kwargs, 0, 1)
        self._session.step_count += training and torch.is_grad_enabled()  # the next one's dropout is another
        return self._outside.watch(output)

    def run_step(self, run: StepRun, training: bool) -> list[Any]:
        """Run all microbatches of a step, forward and, unless under `no_grad`, backward; return the body's results."""
        begin_unit(WorkUnit.STEP if run.backward else WorkUnit.EVALUATION, self._session.step_count)
        self._weights.return_from_host()
        self._run = run
        try:
            if self._weights.parallel is None or run.staged:
                self._prepare(run, training)
            parallel = self._weights.require_parallel()
            last = run.backward and self._completes()
            parallel.drive(partial(run.run_microbatch, parallel), len(run.calls), run.backward, last=last)
        finally:
            self._run = None
        self._session.step_count += 1
        if run.backward:
            self._finish_backward(last)
        self._hooks.stepped()
        results = run.shared_results(parallel)
        begin_unit(WorkUnit.OUTSIDE, self._session.step_count)
        mark_phase(WorkUnit.OUTSIDE)
        return results

    def _prepare(self, run: StepRun, training: bool) -> None:
        """Build the model for the first step, and its stages' traffic for microbatches of another shape."""
        key = training, run.body, *map(argument_form, tree_leaves(run.calls[0]))
        if key not in self._shapes:
            if len(self._shapes) == KNOWN_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            inputs = run.first_inputs()
            merged = inputs if self._session.cfg.prescaled_batch else merge_rows(inputs, self._session.layout)
            self.distribute(merged)
            self._shapes[key] = microbatch_size(merged), on_meta(merged)
        shape, inputs = self._shapes[key]
        parallel = self._weights.require_parallel()
        if parallel.pipeline is not None:
            parallel.pipeline.reshape(*shape)
            parallel.prepare(inputs)

    def distribute(self, inputs: Mapping[str, Any]) -> ParallelModel:
        """Distribute the module, if that has not happened; `inputs` are its keyword arguments. Collective."""
        if self._weights.parallel is None:
            module = self._weights.module
            originals = list(module.parameters())
            with self._session.cfg.own_words():
                parallel = build_parallel_model(self._session, module, inputs)
            self._weights.adopt(parallel, originals)
            self._hooks.partitioned()
        return self._weights.require_parallel()

    # ---- backward

    def backward(self, tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None) -> None:
        """Run backward from a loss, or from several tensors with the gradients they get.

        Inside of a step the loss is noted for the schedule.

        Raises:
            StepUsageError: outside of a step, where there are stages; or a tensor has no gradient of its shape, and is
                no scalar.
        """
        total = _total(tensors, grad_tensors)
        if self._run is not None:
            self._run.note_loss(total * self._seed(len(self._run.calls)))
            return
        self._needs_step("model.backward(...)")
        seed = self._begin_outside()
        with self._outside.library():
            if total.requires_grad:
                (total * seed).backward()
        self._finish_backward(self._last)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backward passes inside on their ranks; the first one outside reduces them all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _seed(self, microbatches: int) -> float:
        """Return the gradient of each microbatch's loss.

        SMP averages over microbatches and over data-parallel ranks, or leaves both to a communication hook.
        """
        session = self._session
        scale = session.optimizer.loss_scale if session.optimizer is not None else 1.0
        scale /= 1 if session.cfg.prescaled_batch else session.layout.size(Axis.TENSOR)
        if self._hooks.communication is not None:
            return scale
        averaged = microbatches if self._settings.average else 1
        return SMP_MEAN.seed(LossCounts(microbatches=averaged, data_ranks=session.layout.data_ranks), scale)

    def _begin_outside(self) -> float:
        """Prepare a backward outside of a step, without stages; return the factor of its loss."""
        parallel = self._weights.require_parallel()
        self._weights.return_from_host()
        self._last = self._completes()
        begin_microbatch(parallel.parts[0].fsdp_modules, parallel.plan, self._last)
        return self._seed(1)

    def _needs_step(self, call: str) -> None:
        degree = self._session.layout.size(Axis.PIPELINE)
        if degree > 1:
            raise StepUsageError(
                f"{call} outside of a step cannot reach the other stages of pipeline_parallel_degree {degree}; call it "
                "in a function decorated with @smp.step"
            )

    def _completes(self) -> bool:
        """Count the backward that comes, and tell if gradients are complete after it."""
        self._passes_run += 1
        if not self._synchronise:
            self._held_back = self._left = True
            return False
        # What no_sync has held back goes out with this one.
        complete = self._held_back or self._passes_run % self._settings.passes == 0
        self._held_back, self._left = False, not complete
        return complete

    def complete_gradients(self) -> None:
        """Reduce what is left on the ranks where an optimizer does not wait for the passes it was to. Collective."""
        left, passes = self._left, self._passes_run
        self._begin_passes()
        if not left:
            return
        if not self._has_noted:
            self._has_noted = True
            print_notes([
                f"optimizer.step() after {passes} of {max(passes, self._settings.passes)} backward passes: their "
                "gradients are reduced now, and whoever clipped gradients before saw none of these; "
                "optimizer.clip_master_grads clips the reduced ones."
            ])  # fmt: skip
        if self._hooks.communication is None:
            self._weights.require_parallel().complete_gradients()
        self._share_complete()

    def drop_gradients(self) -> None:
        """Forget what is left on the ranks, as gradients are dropped: the next pass is the first of its step."""
        if self._left:
            drop_left_gradients(self._weights.require_parallel().fsdp_modules)
        self._begin_passes()

    def _begin_passes(self) -> None:
        self._passes_run, self._left, self._held_back = 0, False, False

    def _share_complete(self) -> None:
        """Share what follows complete gradients: buffers, and what a communication hook makes of the gradients."""
        if self._settings.share_buffers:
            self._weights.share_buffers()
        if self._hooks.communication is not None:
            self._hooks.communication.reduce(self._weights.require_parallel())

    def _finish_backward(self, complete: bool) -> None:
        weights, optimizer = self._weights, self._session.optimizer
        self._hooks.backward_has_run = True
        if complete:
            self._share_complete()
        weights.unsettled, weights.gathered = True, False
        if optimizer is not None and complete and optimizer.reads_gradients:
            optimizer.settle()
        elif optimizer is not None:
            optimizer.show_gradients()


def _total(tensors: Tensor | Sequence[Tensor], grad_tensors: Any) -> Tensor:
    """Return the scalar whose backward is that of `tensors` with these gradients, as torch's own takes them."""
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    gradients = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(several))
    if len(gradients) != len(several):
        raise StepUsageError(
            f"model.backward got {len(several)} tensors and {len(gradients)} grad_tensors; give one, or None, for each"
        )
    for number, (tensor, gradient) in enumerate(zip(several, gradients)):
        if gradient is None and tensor.numel() != 1:
            raise StepUsageError(
                f"model.backward: tensor {number} of shape {list(tensor.shape)} is no scalar; take its mean() or sum() "
                "or give grad_tensors"
            )
        if gradient is not None and gradient.shape != tensor.shape:
            raise StepUsageError(
                f"model.backward: grad_tensors[{number}] has the shape {list(gradient.shape)}, and its tensor "
                f"{list(tensor.shape)}; give one of the tensor's shape"
            )
    return torch.stack([t.sum() if g is None else (t * g).sum() for t, g in zip(several, gradients)]).sum()
