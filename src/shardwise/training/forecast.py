"""What the planner expects of a run, printed at its start, and what is measured, beside it, after the first steps.

Memory is compared with what `peak_memory_bytes` counts: on CUDA the allocator's peak, which the closed form predicts as
it is; on a CPU the resident set, of which the process itself, less the model's state, is measured before step one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
import torch

from shardwise.errors import CapacityError
from shardwise.job.axes import Axis
from shardwise.observe.metrics import Record
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.local import cluster_of, growth, is_calibrated, stack_here, step_factor
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.predict import predict
from shardwise.planner.search.remedies import remedies
from shardwise.training.setup import Run

WATCHED = 10  # steps before the comparison; the first of them connects and allocates, and does not count
GIB, MIB = 2**30, 2**20
HEADROOM = 0.92  # of a device's memory that a remedy may fill


@dataclass
class Forecast:
    """The prediction for one run, and the steps seen so far.

    Attributes:
        seconds: of a step; None where there is nothing to predict from, and `reason` says what.
        interval: 80 % of steps are expected between.
        memory: the closed form, on this rank's pipeline rank.
        resident: bytes of this process besides, on a CPU.
    """

    memory: MemoryEstimate
    seconds: float | None = None
    interval: tuple[float, float] = (0.0, 0.0)
    reason: str = ""
    resident: int = 0
    seen: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> Forecast:
        """The forecast of a run whose model is built and has not trained yet."""
        plan, facts = run.plan, run.facts
        memory = estimate(plan, facts, pipeline=run.layout.index(Axis.PIPELINE))
        resident = _resident(run, memory.activations) if plan.world.device_type == "cpu" else 0
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
        prediction = predict(configuration_of(plan, facts, cluster, stack_here(plan.world)))
        factor = step_factor(plan.world)
        low, high = prediction.interval
        return cls(memory, prediction.step_seconds * factor, (low * factor, high * factor), resident=resident)

    @property
    def peak(self) -> float:
        """Predicted bytes, as `peak_memory_bytes` counts them."""
        return self.memory.total + self.resident

    def sentence(self) -> str:
        """What the trainer prints at the start."""
        causes = sorted(self.memory.causes().items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{cause} {_size(size)}" for cause, size in causes)
        besides = f", the process {_size(self.resident)}" if self.resident else ""
        memory = f"peak memory {_size(self.peak)} a rank at the {self.memory.moment} ({largest}{besides})"
        if self.seconds is None:
            return f"predicted: {memory}; no step time: {self.reason}"
        low, high = self.interval
        return f"predicted: step {self.seconds:.3g} s (80 % between {low:.3g} and {high:.3g}), {memory}"

    def to_dict(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "step_seconds": self.seconds,
            "interval": list(self.interval) if self.seconds is not None else None,
            "peak_memory_bytes": self.peak,
            "memory": self.memory.causes(),
            "process_bytes": self.resident,
            "moment": self.memory.moment,
            "reason": self.reason,
        }

    def watch(self, record: Record, index: int) -> Record | None:
        """Take note of a step; after `WATCHED` of them the comparison, as a record of metrics.jsonl.

        `index` is this rank's number in the record's list of peaks.
        """
        self.seen.append(record["seconds"])
        if len(self.seen) != WATCHED:
            return None
        compared: Record = {"step": record["step"], "predicted_peak_memory_bytes": self.peak}
        compared["measured_peak_memory_bytes"] = record["peak_memory_bytes"][index]
        compared["measured_step_seconds"] = median(self.seen[1:])
        return compared if self.seconds is None else compared | {"predicted_step_seconds": self.seconds}


def compared(record: Record) -> str:
    """The sentence of a comparison."""
    said = [f"step {record['measured_step_seconds']:.3g} s measured"]
    if "predicted_step_seconds" in record:
        said[0] += _against(f"{record['predicted_step_seconds']:.3g} s", record, "step_seconds")
    peak, predicted = (record[f"{word}_peak_memory_bytes"] for word in ("measured", "predicted"))
    said.append(f"peak memory {_size(peak)} measured" + _against(_size(predicted), record, "peak_memory_bytes"))
    return f"after {WATCHED} steps: {'; '.join(said)}"


def _against(shown: str, record: Record, name: str) -> str:
    error = record[f"predicted_{name}"] / record[f"measured_{name}"] - 1
    return f", {shown} predicted ({error:+.1%})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def out_of_memory(run: Run, forecast: Forecast, error: BaseException) -> CapacityError:
    """The error that says by cause what was predicted, what was held, and which changes would fit."""
    plan, device = run.plan, run.model.device
    lines = [f"out of memory: {str(error).splitlines()[0]}"]
    causes = (f"{cause} {_size(size)}" for cause, size in forecast.memory.causes().items() if size >= MIB)
    lines.append(f"predicted at the {forecast.memory.moment}: {_size(forecast.memory.total)} ({', '.join(causes)})")
    held = state_bytes(run)
    lines.append("held: " + ", ".join(f"{cause} {_size(size)}" for cause, size in held.items()))
    room = float(psutil.virtual_memory().total / plan.world.local_size)
    if device.type == "cuda":
        room = float(torch.cuda.mem_get_info(device)[1])
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
        lines.append(f"the allocator's peak {_size(peak)}, reserved {_size(reserved)}, of {_size(room)} on the device")
    cluster = cluster_of(plan.world)
    found = [] if cluster is None else remedies(plan, run.facts, cluster, HEADROOM * room)
    lines += ["would fit, cheapest first:", *(f"  {remedy}" for remedy in found)] if found else [
        "no change of one or two keys fits; `shardwise plan` searches all layouts"
    ]  # fmt: skip
    return CapacityError("\n".join(lines))


def state_bytes(run: Run) -> dict[str, int]:
    """What this rank holds between steps, measured, by the causes of the prediction."""
    gradients = sum(gradient.numel() * gradient.element_size() for _, gradient in run.optimizer.gradients())
    return {
        "parameters": sum(entry.local.numel() * entry.local.element_size() for entry in run.model.tensor_map),
        "gradients": gradients,
        "optimizer": run.optimizer.state_bytes(),
    }


def _resident(run: Run, activations: float) -> int:
    """Of this process, less the model's state, with what a process takes in its first steps besides."""
    held = psutil.Process().memory_info().rss - sum(state_bytes(run).values())
    return max(0, round(held + growth(activations)))


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 4 * GIB else f"{size / MIB:,.0f} MiB"
