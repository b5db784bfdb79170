"""The display of a running training: a live bar on a terminal, plain lines anywhere else.

Only the process that owns the terminal (rank 0) makes one. The plain lines hold no control characters, one line every
`observe.log_every` steps, so that they can be read in a log file and cut by column.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.observe.standard_streams import leave_stream
from shardwise.words import say_note

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan

OPEN_MPI = "OMPI_COMM_WORLD_RANK"  # which ranks of it have
_RECENT = 0.2  # weight of the newest step in the time left; the first, slow step is soon forgotten
_RANKS_SHOWN = 4
_NUMBERS = {  # name shown: key of the record and format
    "loss": ("loss", ".4f"),
    "validation": ("validation_loss", ".4f"),
    "chosen": ("rewards_chosen", ".3f"),
    "rejected": ("rewards_rejected", ".3f"),
    "margin": ("rewards_margin", ".3f"),
    "accuracy": ("rewards_accuracy", ".0%"),
    "norm": ("grad_norm", ".3g"),
    "lr": ("learning_rate", ".2e"),
    "length": ("sequence_length", "d"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "TFLOPs/rank": ("tflops_per_rank", ".3g"),
    "MFU": ("mfu", ".1%"),
    "scale": ("loss_scale", "g"),
    "expert load": ("expert_load", ".2f"),
}
LOSSES = ("step", "validation_loss", "training_loss")  # of an evaluation's record
_SHOWN = [*_NUMBERS, "passes", "memory/rank", "skipped"]
_PASSES = "passes/"  # before the name of a source


class DisplayConsole(Console):
    """A console that lets its caller know that its reader is gone; rich's own would end the process.

    Open MPI gives each rank a terminal, whatever reads the output of mpirun, which may tag each line: none has a bar.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"force_terminal": False if OPEN_MPI in os.environ else None} | options)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise


class Display(Callback):
    """Progress of one run: a bar or lines, and sentences among them."""

    rank_zero_only = True

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        self._console = console or DisplayConsole()
        self._is_on_stdout = console is None
        self._steps = plan.steps
        self._log_every = plan.job.observe.log_every
        self._title = _title(plan)
        self._compiles = plan.job.model.compile
        self._first_seconds = 0.0
        self._live: Live | None = None
        self._step = 0
        self._steps_shown = 0
        self._figures: dict[str, str] = {}
        self._seconds_a_step: float | None = None
        self._last_time = time.monotonic()

    def on_start(self, session: ObservedSession) -> None:
        """Begin to show; on a terminal the bar stays at the bottom until the end."""
        self._last_time = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, redirect_stdout=True)
            with self._while_shown():
                self._live.start()
        else:
            self._line(self._title)
        for note in session.notes:
            self.say(note)

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Show the figures of a step."""
        figures = self._take(record)
        self._measure_pace()
        self._say_compilation()
        due = self._step % self._log_every == 0 or self._step in (1, self._steps)
        if self._live is None and due:
            self._line(f"step {self._step}/{self._steps}  {_joined(figures)}  {self._time_left()}")

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Show the validation loss."""
        self._take(record)
        self._figures.update({name: f"{value:.4f}" for name, value in evaluation_metrics(record).items()})
        if self._live is None:
            self._line(f"step {self._step}/{self._steps}  {_evaluation(record)}")

    def on_note(self, session: ObservedSession, text: str, record: Record | None) -> None:
        """Show a sentence."""
        self.say(text)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Leave the last state of the bar on the screen."""
        self._finish()

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Leave the last state of the bar on the screen, above the error."""
        self._finish()

    def say(self, text: str) -> None:
        """Print a sentence above the bar, or as a line of its own; markup in it is not interpreted."""
        if self._live is None:
            self._line(text)
        else:
            with self._while_shown():
                self._console.print(text, markup=False, highlight=False)

    def _take(self, record: Record) -> dict[str, str]:
        """Keep a record's figures for the bar, and return them."""
        self._step = int(record.get("step", self._step))
        figures = _figures(record)
        self._figures.update(figures)
        return figures

    def _finish(self) -> None:
        if self._live is not None:
            with self._while_shown():
                self._live.stop()
            self._live = None

    def __rich__(self) -> RenderableType:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, style="dim", overflow="ellipsis", no_wrap=True), Text(self._time_left()))
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        progress = ProgressBar(self._steps, self._step, complete_style="cyan", finished_style="green")
        bar.add_row(progress, Text(f"step {self._step}/{self._steps}", style="bold"))
        return Group(head, bar, _styled(self._figures))

    def _measure_pace(self) -> None:
        now = time.monotonic()
        seconds, self._last_time = now - self._last_time, now
        self._steps_shown += 1
        if (
            self._seconds_a_step is None or self._steps_shown == 2
        ):  # the first step connects and allocates: no measure of more
            self._seconds_a_step = seconds
        else:
            self._seconds_a_step += _RECENT * (seconds - self._seconds_a_step)

    def _say_compilation(self) -> None:
        """Say what the compiler took of the first step, once the second has shown how long a step is without it."""
        if not self._compiles or self._seconds_a_step is None or self._steps_shown > 2:
            return
        if self._steps_shown == 1:
            self._first_seconds = self._seconds_a_step
        else:
            share = max(0.0, self._first_seconds - self._seconds_a_step)
            self.say(f"compilation: {share:.1f} s of the first step's {self._first_seconds:.1f} s")

    def _time_left(self) -> str:
        if self._seconds_a_step is None:
            return "compiling in the first step" if self._compiles else "starting"
        return f"{duration((self._steps - self._step) * self._seconds_a_step)} left"

    def _line(self, text: str) -> None:
        """Print exactly these characters: no wrapping, no markup, no styles."""
        with self._while_shown():
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _while_shown(self) -> Iterator[None]:
        """Let a run go on whose reader or terminal is gone: it has a model to write."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._live, self._console = None, Console(file=io.StringIO())
            if self._is_on_stdout:
                leave_stream("stdout")
            with suppress(OSError, ValueError):
                say_note(f"stdout cannot be written any more ({error}); the run goes on without its display")


def _title(plan: Plan) -> str:
    degrees = [f"{axis} {degree}" for axis, degree in plan.degrees.items() if degree > 1]
    ranks = f"{plan.world.size} {plan.world.accelerator or plan.world.device_type} rank{'s' * (plan.world.size > 1)}"
    return "shardwise  " + " · ".join([ranks, *degrees, plan.dtypes.compute])


def _figures(record: Record) -> dict[str, str]:
    """Return the record as short words and numbers, in the order in which they are shown; absent ones left out."""
    figures = {name: format(record[key], form) for name, (key, form) in _NUMBERS.items() if record.get(key) is not None}
    figures["passes"] = _passes(record)
    figures["memory/rank"] = _memory(record.get("peak_memory_bytes"))
    if "loss" in record:
        why = "not finite" if record.get("tokens_per_second") else "no label"
        figures["skipped"] = why if record.get("skipped") else ""
    return {name: value for name, value in figures.items() if value or name == "skipped"}


def _evaluation(record: Record) -> str:
    """Return the losses of an evaluation: that of training is of as many sequences, where it has had so many."""
    training = record.get("training_loss")
    compared = "" if training is None else f"  training loss {training:.4f} of the last steps"
    metrics = "".join(f"  {name} {value:.4f}" for name, value in evaluation_metrics(record).items())
    return f"validation loss {record['validation_loss']:.4f}{metrics}{compared}"


def evaluation_metrics(record: Record) -> Mapping[str, float]:
    """Return what an evaluation has besides the losses of every run: `validation_loss/NAME` as `NAME`."""
    numbers = {key: value for key, value in record.items() if key not in LOSSES and isinstance(value, int | float)}
    return {key.removeprefix("validation_loss/"): value for key, value in numbers.items()}


def _joined(figures: dict[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items() if value)


def _styled(figures: dict[str, str]) -> Columns:
    """Put the figures side by side; a narrow terminal breaks between two of them, never inside of one."""
    styles = {"loss": "bold", "validation": "bold", "skipped": "bold red"}
    ordered = sorted(figures, key=lambda name: _SHOWN.index(name) if name in _SHOWN else len(_SHOWN))
    texts = [
        Text.assemble((f"{name} ", "dim"), (figures[name], styles.get(name, ""))) for name in ordered if figures[name]
    ]
    return Columns(texts, padding=(0, 3))


def _passes(record: Record) -> str:
    """Return `web 0.12 · code 1.50`: how often each source of a mixture has been read; of many the first."""
    passes = [f"{key.removeprefix(_PASSES)} {value:.2f}" for key, value in record.items() if key.startswith(_PASSES)]
    more = f" and {len(passes) - _RANKS_SHOWN} more" if len(passes) > _RANKS_SHOWN else ""
    return " · ".join(passes[:_RANKS_SHOWN]) + more


def _memory(sizes: list[int] | None) -> str:
    """Return `412 · 415 MiB` for a few ranks, `402 – 415 MiB` for many."""
    if not sizes:
        return ""
    unit, name = (2**30, "GiB") if max(sizes) >= 10 * 2**30 else (2**20, "MiB")
    form = "{:.1f}" if name == "GiB" else "{:.0f}"
    shown = sizes if len(sizes) <= _RANKS_SHOWN else [min(sizes), max(sizes)]
    dash = "·" if len(sizes) <= _RANKS_SHOWN else "–"
    return f" {dash} ".join(form.format(size / unit) for size in shown) + f" {name}"


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:00:10`."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
