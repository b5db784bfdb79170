"""The callbacks that every job's training has, in the order in which they are called."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.callback import Callback
from shardwise.observe.display import Display
from shardwise.observe.profile import Profiler
from shardwise.observe.progress import make_progress
from shardwise.observe.stragglers import StragglerReport
from shardwise.observe.trackers import make_trackers
from shardwise.training.forecast import ForecastReport
from shardwise.training.prompts import PromptSamples
from shardwise.training.recorder import Recorder
from shardwise.training.run_end import ModelExport, Summary, TextSample
from shardwise.training.setup import AssembledJob
from shardwise.training.state_table import StateReport
from shardwise.training.stream_report import StreamReport


def observers(assembled: AssembledJob) -> list[Callback]:
    """Return what shows and keeps a job's training.

    The report reads the sample; the last words come when it is written, and the display is the last to end.
    """
    job = assembled.plan.job
    recorder = Recorder(assembled)
    return [
        Profiler(job),
        ModelExport(assembled),
        PromptSamples(assembled),
        TextSample(assembled),
        StreamReport(assembled),
        recorder,
        *make_trackers(job, Path(job.output)),
        *make_progress(),
        Summary(assembled),
        Display(assembled.plan),
        ForecastReport(assembled, recorder),
        StateReport(assembled),
        StragglerReport(),
    ]
