"""The measurement of a row in its own unit, and the prediction in that unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.planner.formulas.prediction import Prediction
from shardwise.planner.published.row import LAYER_METRIC, Row, Unmapped


@dataclass(frozen=True)
class Measured:
    """The measurement of a row, in its own unit: step_s, tok_s_gpu, tflops_gpu in a FLOP convention, or mfu_pct."""

    unit: str
    value: float
    convention: str = ""


def measured(row: Row) -> Measured | None:
    """The row's measurement of time, None where it has none. Raises Unmapped for TFLOPs of an unknown convention."""
    for unit in ("step_s", "tok_s_gpu"):
        if unit in row.numbers:
            return Measured(unit, row.numbers[unit])
    if "tflops_gpu" in row.numbers:
        return Measured("tflops_gpu", row.numbers["tflops_gpu"], _convention(row.text.get("flops_convention", "")))
    if "mfu_pct" in row.numbers:
        return Measured("mfu_pct", row.numbers["mfu_pct"])
    return None


def _convention(text: str) -> str:
    words = text.lower()
    for pattern, name in (
        ("palm", "palm"),  # whose paper is of a year too
        (r"8p|\(a\)", "8P"),
        (r"2021|96|\(b\)", "megatron-2021"),
        (r"2022|72|\(d\)", "megatron-2022"),
        (r"6p|model|\(c\)|^$", "palm"),
    ):
        if re.search(pattern, words):
            return name
    raise Unmapped(f"flops_convention={text!r} is not known")


def is_of_one_block(row: Row) -> bool:
    """Return whether the row has the time of one block, without an optimizer's step."""
    return row.text["metric"].startswith(LAYER_METRIC)


def predicted(row: Row, prediction: Prediction) -> float:
    """The prediction in the unit of the row's measurement; step seconds where it has none."""
    measurement = measured(row)
    if measurement is None or measurement.unit == "step_s":
        if is_of_one_block(row):
            return prediction.step_seconds - prediction.seconds["optimizer"]
        return prediction.step_seconds
    if measurement.unit == "tok_s_gpu":
        return prediction.tokens_per_second
    if measurement.unit == "mfu_pct":
        return 100 * prediction.mfu
    return prediction.tflops[measurement.convention]
