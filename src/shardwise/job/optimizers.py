"""Torch's optimizer classes: their names, the options they take, and those that can update a shard alone.

The legality table and the training room's optimizer read it. torch is imported on first use, so that reading a job does
not need it.
"""

from __future__ import annotations

import inspect
import json
from functools import cache

from shardwise.job.schema import OptimizerSection

# The update of an element reads that element's own history only, so that a shard can be updated alone. A class that is
# not listed is taken to need whole tensors.
ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
UNUSABLE = {
    "LBFGS": "calls the model again inside of its step (a closure)",
    "Muon": "takes two-dimensional parameters only",
    "SparseAdam": "takes sparse gradients only",
}


@cache
def classes() -> dict[str, type]:
    """Return the optimizers of the installed torch, by name."""
    from torch import optim

    found = inspect.getmembers(optim, lambda item: inspect.isclass(item) and issubclass(item, optim.Optimizer))
    return {name: item for name, item in found if item is not optim.Optimizer}


@cache
def options(name: str) -> list[str]:
    """Return the arguments of an optimizer class that a job's `optimizer.options` may set."""
    arguments = inspect.signature(classes()[name]).parameters
    return [argument for argument in arguments if argument not in ("params", "lr", "weight_decay")]


def decays(name: str) -> bool:
    """Return whether an optimizer class has weight decay."""
    return "weight_decay" in inspect.signature(classes()[name]).parameters


def unknown_options(section: OptimizerSection) -> list[str]:
    """Return the options that the class does not take, or that have a key of their own."""
    return sorted(set(section.options) - set(options(section.name)))


def complaint(section: OptimizerSection) -> str:
    """Return what the class itself says against the values of its arguments; empty when it takes them."""
    arguments = {"lr": section.learning_rate, **section.options}
    if decays(section.name):
        arguments["weight_decay"] = section.weight_decay
    return _complaint(section.name, json.dumps(arguments, sort_keys=True, default=repr))


@cache  # a search judges thousands of jobs that differ in other keys
def _complaint(name: str, arguments: str) -> str:
    from torch import nn, zeros

    try:
        classes()[name]([nn.Parameter(zeros(1))], **json.loads(arguments))
    except Exception as error:  # each class has its own way to refuse a value
        return f"{name} says {str(error)!r}"
    return ""
