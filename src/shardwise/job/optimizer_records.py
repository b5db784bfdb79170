"""Optimizers of this package that `optimizer.name` can name: one record each, plain data.

They stand beside those of torch. Each knows where its slices stand in whole tensors, so it trains on every layout, and
what it keeps is a pure function of a tensor's whole shape: the planner, checkpoints and the class itself read it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Options = Mapping[str, Any]  # of `optimizer.options`


class StateTensor(NamedTuple):
    """Optimizer state beside a parameter: its shape and its dtype; "" is the plan's for optimizer state."""

    shape: Shape
    dtype: str = ""


State = Mapping[str, StateTensor]  # by key, such as `exp_avg`


class Average(NamedTuple):
    """What is evaluated and exported in the place of a parameter: it, and `factor` times the way to state `key`."""

    key: str
    factor: float


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer of this package.

    Attributes:
        does: a sentence for the documentation.
        reference: `file:class` under shardwise.training.optimizers.
        state: (options, whole shape of a parameter, shape of a part of it) -> the state of that part. The part is the
            whole, or what a rank has of it.
        average: options -> the average that is evaluated; None where the parameters are.
    """

    does: str
    reference: str
    state: Callable[[Options, Shape, Shape], State]
    average: Callable[[Options], Average] | None = None


def like_parameter(*keys: str, dtype: str = "") -> Callable[[Options, Shape, Shape], State]:
    """Return the state of optimizers that keep tensors of the parameter's shape under `keys`."""
    return lambda options, whole, part: {key: StateTensor(part, dtype) for key in keys}


RECORDS: dict[str, OptimizerRecord] = {
    "AdamWBf16": OptimizerRecord(
        "AdamW that keeps both moments in bf16, rounded to the nearest",
        "adamw_bf16:AdamWBf16",
        like_parameter("exp_avg", "exp_avg_sq", dtype="bf16"),
    ),
    "Lion": OptimizerRecord("sign of a momentum (arXiv 2302.06675)", "lion:Lion", like_parameter("exp_avg")),
}
