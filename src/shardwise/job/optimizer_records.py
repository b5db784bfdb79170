"""Optimizers of this package that `optimizer.name` can name: one record each, plain data.

They stand beside those of torch. Each knows where its slices stand in whole tensors, so it trains on every layout, and
what it keeps is a pure function of a tensor's whole shape: the planner, checkpoints and the class itself read it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Options = Mapping[str, Any]  # of `optimizer.options`

# Moments of 8 bits: torchao's and bitsandbytes' blocks and least size. Blocks lie along a tensor's last dim, so that
# rows that are multiples of a block have theirs; of shorter rows than LEAST_ROW the scales would weigh too much.
BLOCK = 256
LEAST_ELEMENTS = 4096
LEAST_ROW = 64
BETAS = (0.9, 0.999)  # of schedule-free AdamW, unless the job says otherwise


class StateTensor(NamedTuple):
    """Optimizer state beside a parameter: its shape and its dtype; "" is the plan's for optimizer state."""

    shape: Shape
    dtype: str = ""


State = Mapping[str, StateTensor]  # by key, such as `exp_avg`
StateRule = Callable[[Options, Shape, Shape], State]


class Average(NamedTuple):
    """The weights evaluated and exported in a parameter's place: it, and `factor` times the way to state `key`."""

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
        fixed: options on which the meaning of stored state depends, and their defaults.
        elementwise: the update of an element reads its own history alone, as those of torch's elementwise classes.
    """

    does: str
    reference: str
    state: StateRule
    average: Callable[[Options], Average] | None = None
    fixed: Options = field(default_factory=dict)
    elementwise: bool = False


def is_quantized(whole: Shape) -> bool:
    """Return whether moments of a tensor of this shape are kept in 8 bits."""
    return len(whole) > 1 and math.prod(whole) >= LEAST_ELEMENTS and whole[-1] >= LEAST_ROW


def like_parameter(*keys: str, dtype: str = "") -> StateRule:
    """Return the state of optimizers that keep tensors of the parameter's shape under `keys`."""
    return lambda options, whole, part: {key: StateTensor(part, dtype) for key in keys}


def _in_blocks(options: Options, whole: Shape, part: Shape) -> State:
    """Codes of a byte and a scale a block, or moments as they are."""
    moments = ("exp_avg", "exp_avg_sq")
    if not is_quantized(whole):
        return {key: StateTensor(part) for key in moments}
    scales = (*part[:-1], _most_blocks(whole[-1], part[-1], options.get("block_size", BLOCK)))
    codes = {key: StateTensor(part, "uint8") for key in moments}
    return codes | {f"{key}_scale": StateTensor(scales, "fp32") for key in moments}


def _most_blocks(whole: int, part: int, block: int) -> int:
    """Return the blocks of `whole` columns in the part of them that touches most; parts stand side by side."""
    if not part:
        return 0
    return max(math.ceil(min(start + part, whole) / block) - start // block for start in range(0, whole, part))


def _factored(options: Options, whole: Shape, part: Shape) -> State:
    """A row and a column of each matrix, or squares of a vector; torch's own names."""
    if len(whole) < 2:
        return {"variance": StateTensor(part)}
    return {"row_var": StateTensor((*part[:-1], 1)), "col_var": StateTensor((*part[:-2], 1, part[-1]))}


def _schedule_free_average(options: Options) -> Average:
    """The average x of y = (1 - beta1) z + beta1 x, the parameters while training."""
    return Average("z", 1 - 1 / options.get("betas", BETAS)[0])


RECORDS: dict[str, OptimizerRecord] = {
    "AdamW8bit": OptimizerRecord(
        "AdamW with moments in 8 bits of a dynamic map and a scale for each block (arXiv 2110.02861)",
        "adamw_blocks:AdamW8bit",
        _in_blocks,
        fixed={"block_size": BLOCK},
    ),
    "AdamWFp8": OptimizerRecord(
        "AdamW with moments in float8 (e4m3) and a scale for each block",
        "adamw_blocks:AdamWFp8",
        _in_blocks,
        fixed={"block_size": BLOCK},
    ),
    "AdamWBf16": OptimizerRecord(
        "AdamW with moments in bf16, rounded to the nearest",
        "adamw_bf16:AdamWBf16",
        like_parameter("exp_avg", "exp_avg_sq", dtype="bf16"),
        elementwise=True,
    ),
    "Adafactor": OptimizerRecord(
        "squares kept as a row and a column of each matrix (arXiv 1804.04235), as torch's class computes",
        "adafactor:Adafactor",
        _factored,
    ),
    "Muon": OptimizerRecord(
        "momentum of hidden matrices, orthogonalized, as torch's class computes; AdamW for the rest",
        "muon:Muon",
        like_parameter("momentum_buffer"),
    ),
    "Lion": OptimizerRecord(
        "sign of a momentum (arXiv 2302.06675)", "lion:Lion", like_parameter("exp_avg"), elementwise=True
    ),
    "ScheduleFreeAdamW": OptimizerRecord(
        "AdamW whose average of weights takes the place of a schedule (arXiv 2405.15682)",
        "schedule_free:ScheduleFreeAdamW",
        like_parameter("z", "exp_avg_sq"),
        _schedule_free_average,
        fixed={"betas": list(BETAS)},
        elementwise=True,
    ),
}
