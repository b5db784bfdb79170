"""What rank 0 shows and keeps of a run: display, metrics.jsonl, trackers, run.json, report."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from shardwise.checkpoint.save import versions
from shardwise.job.schema import Job
from shardwise.job.sources import job_to_yaml
from shardwise.observe.display import Display
from shardwise.observe.metrics import MetricsWriter, Record
from shardwise.observe.report import write_report
from shardwise.observe.trackers import make_trackers
from shardwise.training.forecast import Forecast
from shardwise.training.output import METRICS_FILE, SAMPLE_FILE, clear_output, job_fingerprint, write_run, writing
from shardwise.training.setup import Run


class Recorder:
    """Observers of one run that goes on from `step`, on rank 0; `enabled=False` makes every call do nothing.

    Use as a context manager: the display and files are closed whatever happens.
    """

    def __init__(self, run: Run, step: int, enabled: bool) -> None:
        self.enabled, self.run = enabled, run
        if not enabled:
            return
        job: Job = run.plan.job
        self.output = Path(job.output)
        self.display, self.description = Display(run.plan), _describe(run)
        with writing(self.output):
            clear_output(self.output, step)
            self.trackers = make_trackers(job, self.output)
            self.metrics = MetricsWriter(self.output / METRICS_FILE, resume_step=step)
            (self.output / "job.yaml").write_text(job_to_yaml(job))
        write_run(self.output, self.description)

    def __enter__(self) -> Recorder:
        if self.enabled:
            self.display.start()
            for note in self.run.plan.notes:
                self.display.say(f"note: {note}")
        return self

    def __exit__(self, *error: object) -> None:
        if not self.enabled:
            return
        with writing(self.output), ExitStack() as closing:  # the rest too where one fails, from the last to the first
            for tracker in self.trackers:
                closing.callback(tracker.close)
            closing.callback(self.metrics.close)
            closing.callback(self.display.finish)

    def say(self, text: str) -> None:
        """A sentence for the user."""
        if self.enabled:
            self.display.say(text)

    def record(self, record: Record) -> None:
        """A step or an evaluation."""
        if self.enabled:
            self._keep(record)
            self.display.step(record)

    def note(self, record: Record, text: str) -> None:
        """A record that is no step's, and its sentence."""
        if self.enabled:
            self._keep(record)
            self.display.say(text)

    def _keep(self, record: Record) -> None:
        with writing(self.output):
            self.metrics.write(record)
            for tracker in self.trackers:
                tracker.log(record)

    def expect(self, forecast: Forecast) -> None:
        """What the planner predicts, for the user and for run.json."""
        if self.enabled:
            self.description["prediction"] = forecast.to_dict()
            write_run(self.output, self.description)
            self.display.say(forecast.sentence())

    def sample(self, text: str) -> None:
        """The generated sample."""
        if self.enabled:
            with writing(self.output):
                (self.output / SAMPLE_FILE).write_text(text)

    def finish(self, result: dict[str, Any]) -> Path | None:
        """Write the result and the report; returns the report's path on rank 0."""
        if not self.enabled:
            return None
        self.description["result"] = result
        write_run(self.output, self.description)
        with writing(self.output):
            return write_report(self.output)


def state_table(run: Run) -> Table:
    """Dtypes and measured bytes of what this rank holds between steps."""
    dtypes = run.plan.dtypes
    parameters = sum(entry.local.numel() * entry.local.element_size() for entry in run.model.tensor_map)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in run.model.module.buffers())
    table = Table(title="state of rank 0", title_justify="left", box=None)
    for column in ("", "dtype", "bytes, measured"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    table.add_row("parameters (master)", dtypes.parameters, f"{parameters:,}")
    table.add_row("buffers", "as the model", f"{buffers:,}")
    table.add_row("compute", dtypes.compute, "gathered a block at a time" if run.model.fsdp_modules else "in place")
    table.add_row("gradients", dtypes.reduction, f"{run.optimizer.gradient_bytes:,}")
    table.add_row(f"optimizer ({run.plan.job.optimizer.name})", dtypes.optimizer, f"{run.optimizer.state_bytes():,}")
    table.add_row("loss", dtypes.loss, "")
    return table


def _describe(run: Run) -> dict[str, Any]:
    """What run.json says from the start."""
    plan, facts = run.plan, run.facts
    return {
        "job_fingerprint": job_fingerprint(plan.job),
        "job": plan.job.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "facts": {
            "family": facts.family,
            "parameters": facts.parameters,
            "layers": facts.layers,
            "hidden_size": facts.hidden_size,
            "model_flops_per_token (6P + 12Lsh)": facts.model_flops_per_token(plan.sequence_length),
            "smp_flops_per_token (8P)": facts.smp_flops_per_token(),
        },
        "data": run.data.describe(),
        "versions": versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
