"""The planner's forecast of a run, said at its start, and what is measured, beside it, after the first steps.

Memory is compared with what `peak_memory_bytes` counts: on CUDA the allocator's peak, which the closed form predicts as
it is; on a CPU the resident set, of which the process itself, less the model's state, is measured before step one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
import torch

from shardwise._torch_compat import accelerator
from shardwise.errors import CapacityError, LegalityError
from shardwise.job.axes import Axis
from shardwise.job.devices import Feature, device_kind
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.local import cluster_of, growth, is_calibrated, stack_here
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.predict import predict
from shardwise.planner.search.remedies import remedies
from shardwise.training.recorder import Recorder
from shardwise.training.setup import AssembledJob
from shardwise.training.state_table import state_bytes

WATCHED = 10  # steps before the comparison; the first of them connects and allocates, and does not count
GIB, MIB = 2**30, 2**20
HEADROOM = 0.92  # of a device's memory that a remedy may fill


@dataclass
class Forecast:
    """The prediction for one run, and the steps so far.

    Attributes:
        seconds: of a step; None where there is nothing to predict from, and `reason` says what.
        interval: 80 % of steps are expected between.
        memory: the closed form, on the fullest pipeline rank.
        resident: bytes of a process besides, on a CPU.
    """

    memory: MemoryEstimate
    seconds: float | None = None
    interval: tuple[float, float] = (0.0, 0.0)
    reason: str = ""
    resident: int = 0
    step_seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, assembled: AssembledJob) -> Forecast:
        """Return the forecast of a run whose model is built and has not trained yet."""
        plan, facts = assembled.plan, assembled.facts
        memory = estimate(plan, facts)
        resident = _resident(assembled, memory.activations) if plan.world.device_type == "cpu" else 0
        cluster = cluster_of(plan.world)
        if not facts.attention_heads:
            return cls(memory, reason="the model's blocks are not known", resident=resident)
        if cluster is None:
            unknown = f"{plan.world.accelerator!r} is not in the planner's table of accelerators"
            shared = "ranks share a GPU, which the planner does not know"
            return cls(memory, reason=shared if plan.world.shares_gpus else unknown, resident=resident)
        if not is_calibrated(plan.world):
            reason = "this CPU has not been measured; `shardwise plan calibrate` does it"
            return cls(memory, reason=reason, resident=resident)
        try:
            prediction = predict(configuration_of(plan, facts, cluster, stack_here(plan.world)))
        except LegalityError as error:
            return cls(memory, reason=str(error), resident=resident)
        return cls(memory, prediction.step_seconds, prediction.interval, resident=resident)

    @property
    def peak(self) -> float:
        """Predicted bytes, as `peak_memory_bytes` counts them."""
        return self.memory.total + self.resident

    def sentence(self) -> str:
        """Return the sentence for the user at the start."""
        causes = sorted(self.memory.causes().items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{cause} {_size(size)}" for cause, size in causes)
        besides = f", the process {_size(self.resident)}" if self.resident else ""
        memory = f"peak memory {_size(self.peak)} on the fullest rank at the {self.memory.moment} ({largest}{besides})"
        if self.seconds is None:
            return f"predicted: {memory}; no step time: {self.reason}"
        low, high = self.interval
        return f"predicted: step {self.seconds:.3g} s (80 % between {low:.3g} and {high:.3g}), {memory}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for run.json."""
        return {
            "step_seconds": self.seconds,
            "interval": list(self.interval) if self.seconds is not None else None,
            "peak_memory_bytes": self.peak,
            "memory": self.memory.causes(),
            "process_bytes": self.resident,
            "moment": self.memory.moment,
            "reason": self.reason,
        }

    def watch(self, record: Record) -> Record | None:
        """Take note of a step; after `WATCHED` of them return the comparison, as a record of metrics.jsonl."""
        self.step_seconds.append(record["seconds"])
        if len(self.step_seconds) != WATCHED:
            return None
        compared: Record = {"step": record["step"], "predicted_peak_memory_bytes": self.peak}
        compared["measured_peak_memory_bytes"] = max(peak for peak in record["peak_memory_bytes"] if peak is not None)
        compared["measured_step_seconds"] = median(self.step_seconds[1:])
        return compared if self.seconds is None else compared | {"predicted_step_seconds": self.seconds}


class ForecastReport(Callback):
    """Says the forecast before the first step, and the comparison with what was measured."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob, recorder: Recorder) -> None:
        self._assembled, self._recorder = assembled, recorder
        self._forecast: Forecast | None = None

    def on_start(self, session: ObservedSession) -> None:
        """Say and keep the forecast."""
        self._forecast = Forecast.of(self._assembled)
        self._recorder.describe("prediction", self._forecast.to_dict())
        session.note(self._forecast.sentence())

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Say the comparison when enough steps have been measured."""
        assert self._forecast is not None
        plan = self._assembled.plan
        is_smaller = plan.step_sizes.of(record["step"] - 1) < plan.sequences_per_step  # than the step that is predicted
        if is_smaller or record.get("sequence_length", plan.sequence_length) < plan.sequence_length:
            return
        comparison = self._forecast.watch(record)
        if comparison is not None:
            session.note(compared(comparison), comparison)


def compared(record: Record) -> str:
    """Return the sentence of a comparison."""
    parts = [f"step {record['measured_step_seconds']:.3g} s measured"]
    if "predicted_step_seconds" in record:
        parts[0] += _against(f"{record['predicted_step_seconds']:.3g} s", record, "step_seconds")
    peak, predicted = (record[f"{word}_peak_memory_bytes"] for word in ("measured", "predicted"))
    parts.append(f"peak memory {_size(peak)} measured" + _against(_size(predicted), record, "peak_memory_bytes"))
    return f"after {WATCHED} steps: {'; '.join(parts)}"


def _against(shown: str, record: Record, name: str) -> str:
    error = record[f"predicted_{name}"] / record[f"measured_{name}"] - 1
    return f", {shown} predicted ({error:+.1%})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the CPU's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def out_of_memory(assembled: AssembledJob, error: BaseException) -> CapacityError:
    """Return the error that says by cause what was predicted, what was held, and which changes would fit."""
    plan, device, memory = assembled.plan, assembled.model.device, _estimate(assembled)
    lines = [f"out of memory: {str(error).splitlines()[0]}"]
    causes = (f"{cause} {_size(size)}" for cause, size in memory.causes().items() if size >= MIB)
    lines.append(f"predicted at the {memory.moment}: {_size(memory.total)} ({', '.join(causes)})")
    state = state_bytes(assembled)
    lines.append("held: " + ", ".join(f"{cause} {_size(size)}" for cause, size in state.items()))
    room = float(psutil.virtual_memory().total / plan.world.local_size)
    if device_kind(device.type).supports(Feature.PEAK).ok:
        room = float(accelerator.total_memory(device))
        peak, reserved = accelerator.peak_memory(device), accelerator.reserved_memory(device)
        lines.append(f"the allocator's peak {_size(peak)}, reserved {_size(reserved)}, of {_size(room)} on the device")
    cluster = cluster_of(plan.world)
    fitting = [] if cluster is None else remedies(plan, assembled.facts, cluster, HEADROOM * room)
    lines += ["would fit, cheapest first:", *(f"  {remedy}" for remedy in fitting)] if fitting else [
        "no change of one or two keys fits; `shardwise plan` searches all layouts"
    ]  # fmt: skip
    return CapacityError("\n".join(lines))


def _estimate(assembled: AssembledJob) -> MemoryEstimate:
    """Return the closed form of this rank's peak."""
    return estimate(assembled.plan, assembled.facts, pipeline=assembled.layout.index(Axis.PIPELINE))


def _resident(assembled: AssembledJob, activations: float) -> int:
    """Return the bytes of this process less the model's state, with what a process takes in its first steps besides."""
    process = psutil.Process().memory_info().rss - sum(state_bytes(assembled).values())
    return max(0, round(process + growth(activations)))


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 4 * GIB else f"{size / MIB:,.0f} MiB"
