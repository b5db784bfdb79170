"""A cache of what follows from the class and the config of a transformers model alone, and takes a while to find.

Each rank finds it, and a process may build one model many times: for the plan, for its check, for training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from transformers import PreTrainedModel

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MOST_RESULTS = 64  # of each function; the oldest is dropped


def once_a_config(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Cache the results of a function whose first argument is a model; its others follow from the model."""
    results: dict[tuple[Any, ...], Result] = {}

    @wraps(function)
    def cached(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        key = _key(args[0])
        if key not in results:
            if len(results) >= MOST_RESULTS:
                del results[next(iter(results))]
            results[key] = function(*args, **kwargs)
        return results[key]

    return cached


def _key(model: Any) -> tuple[Any, ...]:
    """Return what tells models apart: a module that was put into one changes its names and shapes."""
    assert isinstance(model, PreTrainedModel)
    config: Any = model.config
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    shapes = tuple((name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters())
    kernels = config._attn_implementation, config._experts_implementation
    return type(model), config.to_json_string(use_diff=False), *kernels, modules, shapes
