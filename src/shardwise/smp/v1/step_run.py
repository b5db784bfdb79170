"""One call of a step function: its microbatches, led through the engine's schedule.

The body is run inside of the schedule, once on each stage: its call of the model runs the stage that is here. Before
the last stage the body ends at that call, by an exception that leaves it, and the hidden states go on to the next rank.
On the last one the call returns the model's output and the body runs to its end. `model.backward(loss)` notes the loss:
the schedule runs backward when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.nesting import broadcast_nested, map_leaves, nested_tensors
from shardwise.smp.v1.forward import MicrobatchForward
from shardwise.smp.v1.own_backward import OwnBackward
from shardwise.smp.v1.session import SmpSessionV1

CallArguments = tuple[list[Any], dict[str, Any]]


class BodyLeft(BaseException):
    """Leaves a step's body at its call of the model, on stages that do not make the output.

    No Exception: a body's own `except Exception` is for its errors.
    """


class StepRun:
    """The microbatches of one call, and what became of them on this rank.

    Args:
        session: the session of this process.
        forward: runs the model's parts.
        body: the step's function.
        calls: its arguments, for every microbatch.
        seed: of the random numbers that the bodies draw, equal on all stages.
    """

    def __init__(
        self,
        session: SmpSessionV1,
        forward: MicrobatchForward,
        body: Callable[..., Any],
        calls: list[CallArguments],
        seed: int,
    ) -> None:
        self.body, self.calls = body, calls
        self.backward = torch.is_grad_enabled()
        self.staged = session.layout.size(Axis.PIPELINE) > 1
        self.results: list[Any] = [None] * len(calls)
        self._session, self._forward = session, forward
        self._index = 0
        self._part: ModelPart | None = None
        self._arrived: Tensor | None = None
        self._outcome: Any = None
        self._called = False
        self._losses: list[Tensor] = []
        self._own_backward = OwnBackward(
            f"the step {body.__name__!r} runs backward itself, which reaches no other stage and leaves out the means "
            "over microbatches and ranks"
        )
        self._seed = seed

    def run_microbatch(self, parallel: ParallelModel, number: int, index: int, arrived: Tensor | None) -> Tensor:
        """Run the body for microbatch `index` on stage `number`; return its loss, or the hidden states that go on."""
        self._part, self._index, self._arrived = parallel.parts[number], index, arrived
        self._called, self._losses = False, []
        args, kwargs = self.calls[index]
        with self._random_numbers(index):
            self._own_backward.refused = True
            try:
                self.results[index] = self.body(*args, **kwargs)
            except BodyLeft:
                left: Tensor = self._outcome
                self._outcome = None
                return left
            finally:
                self._own_backward.refused = False
        if self.staged and not self._called:
            raise StepUsageError(
                f"the step {self.body.__name__!r} did not call the model; with pipeline_parallel_degree "
                f"{self._session.layout.size(Axis.PIPELINE)} it has to, once for each microbatch"
            )
        return self._loss(parallel.accumulation_dtype)

    def _random_numbers(self, index: int) -> AbstractContextManager[None]:
        return _same_random_numbers(self._seed + index, self._session.device) if self.staged else nullcontext()

    def _loss(self, dtype: torch.dtype) -> Tensor:
        """Return what the microbatch's backward starts from: the noted losses, or zero."""
        total = torch.stack([loss.to(dtype) for loss in self._losses]).sum() if self._losses else None
        if total is None:
            total = _zero_loss(self._outcome if self.staged else None, dtype, self._session.device)
        self._outcome = None
        return total

    def first_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments that the body gives the model first, without running the model."""
        args, kwargs = self.calls[0]
        self._part = None
        with _same_random_numbers(self._seed, self._session.device):
            try:
                self.body(*args, **kwargs)
            except BodyLeft:
                inputs: dict[str, Any] = self._outcome
                self._outcome, self._called = None, False
                return inputs
        raise StepUsageError(f"the step {self.body.__name__!r} did not call the model")

    def call_model(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward, as the body sees it."""
        if self._part is None:
            self._outcome = self._forward.bind(args, kwargs)
            raise BodyLeft
        if not self.staged:
            output = self._forward.run(self._part, args, kwargs, self._index, len(self.calls))
            return self._own_backward.watch(output)
        if self._called:
            raise StepUsageError(
                f"the step {self.body.__name__!r} calls the model more than once for a microbatch, which stages of a "
                "pipeline cannot; use one call, or pipeline_parallel_degree 1"
            )
        self._called = True
        self._outcome = self._forward.run(self._part, args, kwargs, self._index, len(self.calls), self._arrived)
        if not self._part.is_last:
            raise BodyLeft
        return self._own_backward.watch(self._outcome)

    def note_loss(self, loss: Tensor) -> None:
        """Keep a loss times its seed, to run backward from when the microbatch's turn comes."""
        self._losses.append(loss)

    def shared_results(self, parallel: ParallelModel) -> list[Any]:
        """Return the body's results by microbatch, on every rank of the pipeline."""
        if not self.staged:
            return self.results
        assert parallel.pipeline is not None
        detached = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, self.results)
        last_rank, group = parallel.pipeline.last_rank, parallel.pipeline.group
        results: list[Any] = broadcast_nested(detached, last_rank, group, self._session.device)
        return results


class _ZeroLoss(torch.autograd.Function):
    """0 that hangs on a tensor; its backward brings zeros, so that the schedule's backward has something to run."""

    @staticmethod
    def forward(context: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        context.save_for_backward(value)
        return value.new_zeros((), dtype=dtype)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (value,) = context.saved_tensors
        return torch.zeros_like(value), None


def _zero_loss(output: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with_gradient = [tensor for tensor in nested_tensors(output) if tensor.requires_grad]
    if with_gradient:
        zero: Tensor = _ZeroLoss.apply(with_gradient[0], dtype)
        return zero
    return torch.zeros((), dtype=dtype, device=device)


@contextmanager
def _same_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
