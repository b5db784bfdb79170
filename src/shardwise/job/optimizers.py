"""Optimizer classes of this package, of torch and of the user's own: their options, and which can update slices.

A class of the user's own says so by an attribute `elementwise = True`. The legality table and the training room's
optimizer read this file. torch is imported on first use, so that reading a job does not need it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from shardwise.errors import UserCodeError
from shardwise.job.objects import defined_at, in_parentheses, is_reference, load_object, raised_at
from shardwise.job.optimizer_records import RECORDS, Average
from shardwise.job.optimizer_section import OptimizerSection

# The update of an element reads that element's own history only, so that a shard can be updated alone. A class that is
# not listed is taken to need whole tensors.
ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
UNUSABLE = {
    "LBFGS": "calls the model again inside of its step (a closure)",
    "SparseAdam": "takes sparse gradients only",
}


@cache
def classes() -> dict[str, type]:
    """Return the optimizers of the installed torch, by name."""
    from torch import optim

    members = inspect.getmembers(optim, lambda item: inspect.isclass(item) and issubclass(item, optim.Optimizer))
    return {name: item for name, item in members if item is not optim.Optimizer}


def names() -> list[str]:
    """Return the names of this package's optimizers and of torch's."""
    return sorted({*RECORDS, *classes()})


@cache
def optimizer_class(name: str) -> Any:
    """Return the class that `optimizer.name` names: this package's, torch's, or `package.module:name` of the user's.

    Raises:
        ConfigError: the reference names nothing.
        UserCodeError: what it names is no optimizer, or takes no learning rate.
    """
    if name in RECORDS:
        file, _, leaf = RECORDS[name].reference.partition(":")
        return getattr(import_module(f"shardwise.training.optimizers.{file}"), leaf)
    if not is_reference(name):
        return classes()[name]
    from torch.optim import Optimizer

    what, loaded = f"optimizer.name={name!r}", load_object(name, "optimizer.name")
    if not (inspect.isclass(loaded) and issubclass(loaded, Optimizer)):
        raise UserCodeError(f"{what} is no subclass of torch.optim.Optimizer{in_parentheses(defined_at(loaded))}")
    if "lr" not in inspect.signature(loaded).parameters:
        place = in_parentheses(defined_at(loaded))
        raise UserCodeError(f"{what} takes no argument lr, by which the learning rate is set{place}")
    return loaded


def is_known(name: str) -> bool:
    """Return whether a class is there: this package's and torch's by name, the user's own by being loaded."""
    return name in names() if not is_reference(name) else optimizer_class(name) is not None


def takes_slices(name: str) -> bool:
    """Return whether slices of a tensor can be updated apart: elementwise classes can, and those of this package."""
    if name in RECORDS or name in ELEMENTWISE:
        return True
    return is_reference(name) and getattr(optimizer_class(name), "elementwise", False) is True


def is_elementwise(name: str) -> bool:
    """Return whether the update of an element reads its own history alone, so that any rank or host can do it."""
    return RECORDS[name].elementwise if name in RECORDS else takes_slices(name)


def average_of(name: str, options: Mapping[str, Any]) -> Average | None:
    """Return what an optimizer evaluates and exports in the place of parameters; None where they are themselves."""
    record = RECORDS.get(name)
    return None if record is None or record.average is None else record.average(options)


@cache
def options(name: str) -> list[str]:
    """Return the arguments of an optimizer class that a job's `optimizer.options` may set."""
    arguments = inspect.signature(optimizer_class(name)).parameters
    return [argument for argument in arguments if argument not in ("params", "lr", "weight_decay")]


def decays(name: str) -> bool:
    """Return whether an optimizer class has weight decay."""
    return "weight_decay" in inspect.signature(optimizer_class(name)).parameters


def unknown_options(section: OptimizerSection) -> list[str]:
    """Return options that the class does not take, or that have a key of their own."""
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
        optimizer_class(name)([nn.Parameter(zeros(1))], **json.loads(arguments))
    except Exception as error:  # each class has its own way to refuse a value
        place = raised_at(error)
        return f"{name} says {str(error)!r}{in_parentheses(place)}"
    return ""
