"""`smp.step`: a function that runs once for every microbatch, whatever stage of a pipeline this rank is.

The body is run inside of the engine's schedule, once on each stage: its call of the model runs the stage that is here.
Before the last stage the body ends at that call, by an exception that leaves it, and the hidden states go on to the
next rank; on the last one the call returns the model's output and the body runs to its end. `model.backward(loss)`
notes the loss: the schedule runs backward when its turn comes. What the body gets is what pipeline rank 0 was given,
sent to the others beforehand; theirs is never looked at. What it returns on the last stage is sent to all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.smp.v1.exceptions import NotInitializedError, SMPValidationError, StepUsageError
from shardwise.smp.v1.nesting import collect, map_leaves, piece, share, splits, tensors, to_device
from shardwise.smp.v1.own_backward import OwnBackward
from shardwise.smp.v1.process import state

if TYPE_CHECKING:
    from shardwise.parallel.model import ModelPart
    from shardwise.smp.v1.model import DistributedModel

Call = tuple[list[Any], dict[str, Any]]


class StepSettings(NamedTuple):
    """How the arguments of a step are cut, and whether its outputs keep their graph."""

    non_split_inputs: Sequence[str]
    input_split_axes: dict[str, int]
    detach_outputs: bool


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorate a function (or method) that calls the model on one microbatch; bare or with arguments.

    A call cuts the tensors among its arguments into `microbatches` pieces along axis 0, runs the body once for each,
    and returns what the bodies returned: of a tensor a `StepOutput`, of another value a list.

    Args:
        function: the body.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: name of an argument -> axis along which it is cut.
        detach_outputs: take returned tensors out of autograd's graph.

    Raises:
        NotInitializedError: a call came before `smp.init()`.
        SMPValidationError: a batch does not divide by the microbatches.
        StepUsageError: the body calls the model twice, or not at all, where there are stages, or these call different
            steps; or `loss.backward()`.
    """
    settings = StepSettings(tuple(non_split_inputs or ()), dict(input_split_axes or {}), detach_outputs)

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _run_step(body, settings, _without_instance(body, args, kwargs), kwargs)

        return run

    return decorate if function is None else decorate(function)


def _without_instance(body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """SMP's steps are no methods: a body in a class that does not take the instance does not get it."""
    if not args or not hasattr(type(args[0]), body.__name__):
        return args
    for given in (args, args[1:]):
        with suppress(TypeError):
            inspect.signature(body).bind(*given, **kwargs)
            return given
    return args


def _run_step(body: Callable[..., Any], settings: StepSettings, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not state.initialized:
        raise NotInitializedError(f"the step {body.__name__!r} is called before smp.init(); call smp.init() first")
    calls, seed = _microbatches(body, settings, args, kwargs)
    model = state.model
    if model is None:
        return collect([body(*args, **kwargs) for args, kwargs in calls], settings.detach_outputs)
    run = StepRun(model, body, calls, seed)
    model.stepping(run)
    return collect(run.shared_results(), settings.detach_outputs)


def _microbatches(
    body: Callable[..., Any], settings: StepSettings, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Call], int]:
    """The arguments of every microbatch, on this rank's device; with stages, those of pipeline rank 0, and a seed for
    what the bodies draw, so that it is equal on all of them."""
    count, stages = int(state.cfg.microbatches), state.layout.size(Axis.PIPELINE)
    calls: list[Call] = [(list(args), dict(kwargs)) for _ in range(count)]
    cut, problem, seed = [dict[str | int, Any]() for _ in range(count)], "", 0
    if state.layout.index(Axis.PIPELINE) == 0:
        try:
            _cut(cut, body, settings, args, kwargs)
        except SMPValidationError as error:
            problem = str(error)  # for all stages, which would wait
    if stages > 1:
        problem, cut, seed = _of_first_stage(body, problem, cut)
    if problem:
        raise SMPValidationError(problem)
    for (positional, named), values in zip(calls, to_device(cut, state.device)):
        for place, value in values.items():
            if isinstance(place, int):
                positional[place] = value
            else:
                named[place] = value
    return calls, seed


def _of_first_stage(
    body: Callable[..., Any], problem: str, cut: list[dict[str | int, Any]]
) -> tuple[str, list[dict[str | int, Any]], int]:
    """(`problem`, `cut`, seed of the bodies) of pipeline rank 0, on all stages.

    Raises:
        StepUsageError: on all of them, where they are in different steps.
    """
    ranks, group = state.layout.ranks(Axis.PIPELINE), state.layout.group(Axis.PIPELINE)
    mine = body.__qualname__, torch.is_grad_enabled()
    theirs, problem, cut, seed = share((mine, problem, [] if problem else cut, _seed()), ranks[0], group, state.device)
    agreed = torch.tensor([int(mine == theirs)], device=state.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if not agreed:
        first, here = (f"{name!r} {'with' if grad else 'without'} gradients" for name, grad in (theirs, mine))
        raise StepUsageError(
            f"pipeline rank 0 is in the step {first}, and other stages are not (pipeline rank "
            f"{state.layout.index(Axis.PIPELINE)}: {here}); all stages have to call the same steps in the same order, "
            "under the same torch.no_grad()"
        )
    return problem, cut, seed


def _cut(
    cut: list[dict[str | int, Any]], body: Callable[..., Any], settings: StepSettings, args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Put each microbatch's part of the arguments that are cut into `cut`, by position or keyword."""
    for place, name, value in _named(body, args, kwargs):
        if splits(value):
            axis, whole = settings.input_split_axes.get(name, 0), name in settings.non_split_inputs
            for index, values in enumerate(cut):
                values[place] = value if whole else piece(value, name, len(cut), index, axis)


def _named(
    body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str | int, str, Any]]:
    """(position or keyword, name, value) of every argument."""
    parameters = list(inspect.signature(body).parameters.values())
    for index, value in enumerate(args):
        plain = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
        yield index, parameters[index].name if plain else str(index), value
    yield from ((name, name, value) for name, value in kwargs.items())


class BodyLeft(BaseException):
    """Leaves a step's body at its call of the model, on stages that do not make the output.

    No Exception: a body's own `except Exception` is for its errors.
    """


class StepRun:
    """One call of a step function: its microbatches, and what became of them on this rank."""

    def __init__(self, model: DistributedModel, body: Callable[..., Any], calls: list[Call], seed: int) -> None:
        self.model, self.body, self.calls = model, body, calls
        self.backward = torch.is_grad_enabled()
        self.staged = state.layout.size(Axis.PIPELINE) > 1
        self.results: list[Any] = [None] * len(calls)
        self.index = 0
        self.part: ModelPart | None = None
        self._arrived: Tensor | None = None
        self._outcome: Any = None
        self._called = False
        self._losses: list[Tensor] = []
        self._own = OwnBackward(
            f"the step {body.__name__!r} runs backward itself, which reaches no other stage and leaves out the means "
            "over microbatches and ranks"
        )
        self._seed = seed

    def work(self, number: int, index: int, arrived: Tensor | None) -> Tensor:
        """Run the body for one microbatch on one stage; as `parallel.pipeline.Work`."""
        assert self.model.parallel is not None
        self.part, self.index, self._arrived = self.model.parallel.parts[number], index, arrived
        self._called, self._losses = False, []
        args, kwargs = self.calls[index]
        with _same_random_numbers(self._seed + index) if self.staged else nullcontext():
            self._own.refused = True
            try:
                self.results[index] = self.body(*args, **kwargs)
            except BodyLeft:
                left: Tensor = self._outcome
                self._outcome = None
                return left
            finally:
                self._own.refused = False
        if self.staged and not self._called:
            raise StepUsageError(
                f"the step {self.body.__name__!r} did not call the model; with pipeline_parallel_degree "
                f"{state.layout.size(Axis.PIPELINE)} it has to, once for each microbatch"
            )
        return self._loss()

    def _loss(self) -> Tensor:
        """What the microbatch's backward starts from: the noted losses, or nothing that has a gradient."""
        dtype = self.model.require_parallel().accumulation_dtype
        total = torch.stack([loss.to(dtype) for loss in self._losses]).sum() if self._losses else None
        if total is None:
            total = _without_gradient(self._outcome if self.staged else None, dtype, state.device)
        self._outcome = None
        return total

    def first_inputs(self) -> dict[str, Any]:
        """The keyword arguments that the body gives the model for the first microbatch, without running the model."""
        args, kwargs = self.calls[0]
        self.part = None
        with _same_random_numbers(self._seed):
            try:
                self.body(*args, **kwargs)
            except BodyLeft:
                inputs: dict[str, Any] = self._outcome
                self._outcome, self._called = None, False
                return inputs
        raise StepUsageError(f"the step {self.body.__name__!r} did not call the model")

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The model's forward, as the body sees it."""
        if self.part is None:
            self._outcome = self.model.bind(args, kwargs)
            raise BodyLeft
        if not self.staged:
            return self._own.watch(self.model.compute(self.part, args, kwargs, self.index, len(self.calls)))
        if self._called:
            raise StepUsageError(
                f"the step {self.body.__name__!r} calls the model more than once for a microbatch, which stages of a "
                "pipeline cannot; use one call, or pipeline_parallel_degree 1"
            )
        self._called = True
        self._outcome = self.model.compute(self.part, args, kwargs, self.index, len(self.calls), self._arrived)
        if not self.part.is_last:
            raise BodyLeft
        return self._own.watch(self._outcome)

    def note(self, loss: Tensor) -> None:
        """A loss times its seed, to run backward from when the microbatch's turn comes."""
        self._losses.append(loss)

    def shared_results(self) -> list[Any]:
        """The body's results by microbatch, on every rank of the pipeline."""
        if not self.staged:
            return self.results
        assert self.model.parallel is not None and self.model.parallel.pipeline is not None
        pipeline = self.model.parallel.pipeline
        detached = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, self.results)
        results: list[Any] = share(detached, pipeline.last_rank, pipeline.group, state.device)
        return results


class _WithoutGradient(torch.autograd.Function):
    """0 that hangs on a tensor; its backward brings zeros, so that the schedule's backward has something to run."""

    @staticmethod
    def forward(context: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        context.save_for_backward(value)
        return value.new_zeros((), dtype=dtype)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (value,) = context.saved_tensors
        return torch.zeros_like(value), None


def _without_gradient(output: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if found:
        zero: Tensor = _WithoutGradient.apply(found[0], dtype)
        return zero
    return torch.zeros((), dtype=dtype, device=device)


def _seed() -> int:
    """A random number that leaves the script's own stream where it is: what loaders shuffle and augment by that is as
    with one worker."""
    with torch.random.fork_rng(devices=[]):
        return int(torch.randint(0, 2**31, (1,))) + state.step_count


@contextmanager
def _same_random_numbers(seed: int) -> Iterator[None]:
    devices = [state.device] if state.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
