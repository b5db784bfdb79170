"""The records of a run on disk: metrics.jsonl, run.json, job.yaml and report.html in its output directory."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.checkpoint.description import versions
from shardwise.errors import OutputError
from shardwise.job.sources import job_to_yaml
from shardwise.observe.callback import Callback, ObservedSession, reported
from shardwise.observe.metrics import MetricsWriter, Record
from shardwise.observe.output_disk import writing
from shardwise.observe.report import write_report
from shardwise.training.output import METRICS_FILE, clear_output, job_fingerprint, write_run
from shardwise.training.setup import AssembledJob


class Recorder(Callback):
    """Writes what a run does into its output directory, and the report at its end."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob) -> None:
        self.output = Path(assembled.plan.job.output)
        self.description = _describe(assembled)
        self._metrics: MetricsWriter | None = None
        self._first_step = 0

    def on_start(self, session: ObservedSession) -> None:
        """Make room for the run that goes on from here, and say what it is."""
        self._first_step = session.steps_done
        with writing(self.output):
            clear_output(self.output, session.steps_done)
            self._metrics = MetricsWriter(self.output / METRICS_FILE, resume_step=session.steps_done)
            (self.output / "job.yaml").write_text(job_to_yaml(session.job), encoding="utf-8")
        write_run(self.output, self.description)

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Write the record of a step."""
        self._write(record)

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Write the record of an evaluation, in the place of that of a run that has been resumed at its last step."""
        if session.steps_done == self._first_step and self._metrics is not None:
            with writing(self.output):
                self._metrics.drop_evaluation(session.steps_done)
        self._write(record)

    def on_note(self, session: ObservedSession, text: str, record: Record | None) -> None:
        """Write the record that a note is about."""
        if record is not None:
            self._write(record)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Write the result and the report."""
        self.describe("result", result)
        with reported(session, "no report"), writing(self.output):
            write_report(self.output)
        with writing(self.output):
            self._close()

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Close what is open; of a disk that is full the error is known."""
        with suppress(OutputError), writing(self.output):
            self._close()

    def describe(self, key: str, value: Any) -> None:
        """Add to run.json."""
        self.description[key] = value
        write_run(self.output, self.description)

    def _write(self, record: Record) -> None:
        assert self._metrics is not None
        with writing(self.output):
            self._metrics.write(record)

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


def _describe(assembled: AssembledJob) -> dict[str, Any]:
    """Return what run.json says from the start."""
    plan, facts = assembled.plan, assembled.facts
    return {
        "job_fingerprint": job_fingerprint(plan.job),
        "job": plan.job.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "facts": {
            "family": facts.family,
            "parameters": facts.parameters,
            "layers": facts.layers,
            "hidden_size": facts.hidden_size,
            "model_flops_per_token (6P + 12Lsh)": facts.model_flops_per_token(facts.positions(plan.sequence_length)),
            "smp_flops_per_token (8P)": facts.smp_flops_per_token(),
        },
        "data": {} if assembled.given_data is None else assembled.given_data.describe(),
        "versions": versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
