"""`smp.step`: a function that runs once for every microbatch, whatever stage of a pipeline this rank is.

The body gets what pipeline rank 0 was given, sent to the others beforehand; theirs is never looked at. What it returns
on the last stage is sent to all. `step_run.py` has what happens in between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.job.axes import Axis
from shardwise.smp.exceptions import NotInitializedError, SMPValidationError, StepUsageError
from shardwise.smp.nesting import broadcast_nested, to_device
from shardwise.smp.v1.model import DistributedModel
from shardwise.smp.v1.session import SmpSessionV1, state
from shardwise.smp.v1.step_outputs import collect_outputs, is_split, microbatch_of
from shardwise.smp.v1.step_run import CallArguments, StepRun
from shardwise.words import nearest

ArgumentKey = str | int  # keyword or position


class StepSettings(NamedTuple):
    """The names of arguments that are not cut, the axes of the others, and if outputs leave autograd's graph."""

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
        SMPValidationError: a batch does not divide by the microbatches, or the body has no argument of a given name.
        StepUsageError: the body calls the model twice, or not at all, where there are stages, or these call different
            steps; or `loss.backward()`.
    """
    settings = StepSettings(tuple(non_split_inputs or ()), dict(input_split_axes or {}), detach_outputs)

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        _check_names(body, settings)

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _run_step(body, settings, _without_instance(body, args, kwargs), kwargs)

        return run

    return decorate if function is None else decorate(function)


def _check_names(body: Callable[..., Any], settings: StepSettings) -> None:
    """Refuse names of arguments that the body does not take: theirs would be cut like all others."""
    parameters = inspect.signature(body).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    given = [("non_split_inputs", name) for name in settings.non_split_inputs]
    for key, name in (*given, *(("input_split_axes", name) for name in settings.input_split_axes)):
        if name not in known:
            raise SMPValidationError(
                f"{key}: {name!r} is no argument of the step {body.__name__!r}, which takes {', '.join(known)}."
                f"{nearest(name, known)}"
            )


def _without_instance(body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Leave out the instance where the body does not take it: SMP's steps are no methods."""
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
    calls, seed = _microbatches(state, body, settings, args, kwargs)
    model = state.model
    if not isinstance(model, DistributedModel):
        return collect_outputs([body(*args, **kwargs) for args, kwargs in calls], settings.detach_outputs)
    runner = model._smp.runner
    results = runner.run_step(StepRun(state, runner.forward, body, calls, seed), model.training)
    return collect_outputs(results, settings.detach_outputs)


def _microbatches(
    session: SmpSessionV1, body: Callable[..., Any], settings: StepSettings, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[CallArguments], int]:
    """Return the arguments of every microbatch, on this rank's device, and a seed for what the bodies draw.

    With stages both are those of pipeline rank 0, so that random numbers are equal on all of them.
    """
    count, stages = int(session.cfg.microbatches), session.layout.size(Axis.PIPELINE)
    calls: list[CallArguments] = [(list(args), dict(kwargs)) for _ in range(count)]
    cut, problem, cause, seed = [dict[ArgumentKey, Any]() for _ in range(count)], "", None, 0
    if session.layout.index(Axis.PIPELINE) == 0:
        try:
            _cut(cut, body, settings, args, kwargs)
        except Exception as error:  # of an argument's own `smp_slice` too: for all stages, which would wait
            problem, cause = str(error) or repr(error), error
    if stages > 1:
        problem, cut, seed = _share_first_stage(session, body, problem, cut)
    if problem:
        raise cause or SMPValidationError(problem)
    for (positional, named), values in zip(calls, to_device(cut, session.device)):
        for key, value in values.items():
            if isinstance(key, int):
                positional[key] = value
            else:
                named[key] = value
    return calls, seed


def _share_first_stage(
    session: SmpSessionV1, body: Callable[..., Any], problem: str, cut: list[dict[ArgumentKey, Any]]
) -> tuple[str, list[dict[ArgumentKey, Any]], int]:
    """Return (`problem`, `cut`, seed of the bodies) of pipeline rank 0, on all stages.

    Raises:
        StepUsageError: on all of them, where they are in different steps.
    """
    layout, device = session.layout, session.device
    first_rank, group = layout.ranks(Axis.PIPELINE)[0], layout.group(Axis.PIPELINE)
    called = body.__qualname__, torch.is_grad_enabled()
    sent = called, problem, [] if problem else cut, _seed(session.step_count)
    first_called, problem, cut, seed = broadcast_nested(sent, first_rank, group, device)
    agreed = torch.tensor([int(called == first_called)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if not agreed:
        first, own = (f"{name!r} {'with' if grad else 'without'} gradients" for name, grad in (first_called, called))
        raise StepUsageError(
            f"pipeline rank 0 is in the step {first}, and other stages are not (pipeline rank "
            f"{layout.index(Axis.PIPELINE)}: {own}); all stages have to call the same steps in the same order, "
            "under the same torch.no_grad()"
        )
    return problem, cut, seed


def _seed(step_count: int) -> int:
    """Draw a seed that leaves the script's own random numbers as they are: its loaders shuffle and augment by them."""
    with torch.random.fork_rng(devices=[]):
        return int(torch.randint(0, 2**31, (1,))) + step_count


def _cut(
    cut: list[dict[ArgumentKey, Any]], body: Callable[..., Any], settings: StepSettings, args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Put each microbatch's part of the arguments that are cut into `cut`, by position or keyword."""
    for key, name, value in _named(body, args, kwargs):
        if is_split(value):
            axis, whole = settings.input_split_axes.get(name, 0), name in settings.non_split_inputs
            for index, values in enumerate(cut):
                values[key] = value if whole else microbatch_of(value, name, len(cut), index, axis)


def _named(
    body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[ArgumentKey, str, Any]]:
    """Yield (position or keyword, name, value) of every argument."""
    parameters = list(inspect.signature(body).parameters.values())
    for index, value in enumerate(args):
        plain = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
        yield index, parameters[index].name if plain else str(index), value
    yield from ((name, name, value) for name, value in kwargs.items())
