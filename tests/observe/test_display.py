"""The display on a terminal and into a file."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from shardwise.observe import display as display_module
from shardwise.observe.display import Display, DisplayConsole, duration
from tests.observe.plans import SESSION, make_plan, step_record


class Clock:
    """A clock that tests turn by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(display_module.time, "monotonic", lambda: self.now)


def plain_lines(
    steps: list[dict[str, Any]], clock: Clock | None = None, pace: float = 0.0, **sections: Any
) -> list[str]:
    file = io.StringIO()
    display = Display(make_plan(**sections), Console(file=file, width=40))
    display.on_start(SESSION)
    for record in steps:
        if clock:
            clock.now += pace
        show(display, record)
    display.on_end(SESSION, {})
    return file.getvalue().splitlines()


def show(display: Display, record: dict[str, Any]) -> None:
    (display.on_step_end if "loss" in record else display.on_evaluation)(SESSION, record)


def on_terminal(width: int = 120) -> tuple[Display, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=20, record=True)
    return Display(make_plan(training={"steps": 300}), console), console


class ClosedPipe(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_reader_that_goes_does_not_end_the_run(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(make_plan(), DisplayConsole(file=ClosedPipe(), force_terminal=is_terminal))
    display.on_start(SESSION)
    display.on_step_end(SESSION, step_record(1))
    display.on_note(SESSION, "a note", None)
    display.on_end(SESSION, {})
    assert capsys.readouterr().err.count("stdout cannot be written any more ([Errno 32] Broken pipe)") == 1


def test_plain_lines_hold_the_figures_and_no_control_characters() -> None:
    evaluation = {"step": 1, "validation_loss": 4.0, "training_loss": 4.5}
    of_sets = evaluation | {
        "validation_loss/books": 3.5,
        "exact_match": 0.25,
        "samples": [{"prompt": "a", "text": "b"}],
    }
    lines = plain_lines([step_record(1), evaluation, of_sets], training={"steps": 300})
    assert lines[0] == "shardwise  2 cpu ranks · shard 2 · fp32"
    assert lines[1].startswith("step 1/300  loss 7.9")  # one line, although the console is 40 wide
    assert "tokens/s 12581" in lines[1] and "TFLOPs/rank 0.125" in lines[1]
    assert "memory/rank 412 · 415 MiB" in lines[1]
    assert "MFU" not in lines[1]  # unknown peak
    assert lines[2] == "step 1/300  validation loss 4.0000  training loss 4.5000 of the last steps"
    assert lines[3].startswith("step 1/300  validation loss 4.0000  books 3.5000  exact_match 0.2500  training loss")
    assert not re.search(r"[\x00-\x1f\x7f]", "".join(lines))


def test_ranks_of_mpirun_have_no_bar_though_it_gives_them_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal does
    assert DisplayConsole().is_terminal
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert not DisplayConsole().is_terminal


def test_log_every_thins_the_lines_but_keeps_first_and_last() -> None:
    records = [step_record(step) for step in range(1, 8)]
    lines = plain_lines(records, training={"steps": 7}, observe={"log_every": 3})
    assert [line.split()[1] for line in lines[1:]] == ["1/7", "3/7", "6/7", "7/7"]


def test_what_compilation_took_is_said_after_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(monkeypatch), io.StringIO()
    display = Display(make_plan(model={"compile": True}), Console(file=file))
    display.on_start(SESSION)
    assert display._time_left() == "compiling in the first step"
    for step, seconds in ((1, 31.5), (2, 1.25), (3, 1.0)):
        clock.now += seconds
        show(display, step_record(step))
    said = [line for line in file.getvalue().splitlines() if "compilation" in line]
    assert said == ["compilation: 30.2 s of the first step's 31.5 s"]
    assert not [line for line in plain_lines([step_record(step) for step in (1, 2)]) if "compil" in line]


def test_time_left_forgets_the_slow_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    display = Display(make_plan(training={"steps": 101}), Console(file=io.StringIO()))
    display.on_start(SESSION)
    clock.now += 500
    show(display, step_record(1))
    for step in range(2, 42):
        clock.now += 2
        show(display, step_record(step))
    assert display._time_left() == "2:00 left"


def test_skipped_steps_scale_and_known_peaks_are_shown() -> None:
    (_, line) = plain_lines([step_record(1, skipped=True, loss=float("nan"), loss_scale=65536.0, mfu=0.412)])
    assert "loss nan" in line and "skipped not finite" in line
    assert "scale 65536" in line and "MFU 41.2%" in line


def test_many_ranks_show_the_range_of_memory() -> None:
    (_, line) = plain_lines([step_record(1, ranks=8)])
    assert "memory/rank 412 – 433 MiB" in line
    (_, line) = plain_lines([step_record(1, peak_memory_bytes=[79 * 2**30, 80 * 2**30])])
    assert "memory/rank 79.0 · 80.0 GiB" in line


@pytest.mark.parametrize("width", [60, 120])
def test_terminal_shows_bar_figures_and_sentences(width: int) -> None:
    display, console = on_terminal(width)
    display.on_start(SESSION)
    display.say("first step compiles [not markup] 12")
    show(display, step_record(150))
    show(display, {"step": 150, "validation_loss": 3.5})
    display.on_end(SESSION, {})
    display.on_end(SESSION, {})
    assert console.file.getvalue().count("\x1b[?25h") >= 1  # type: ignore[attr-defined]  # the cursor is back
    text = console.export_text()
    assert "first step compiles [not markup] 12" in text
    assert "step 150/300" in text and "━" in text
    assert "loss 3.3" in text and "validation 3.5000" in text
    assert "left" in text


def test_cuda_ranks_are_named_by_their_accelerator() -> None:
    file = io.StringIO()
    plan = make_plan(workers=4, accelerator="NVIDIA H200")
    Display(plan, Console(file=file, width=40)).on_start(SESSION)
    assert file.getvalue() == "shardwise  4 NVIDIA H200 ranks · shard 4 · bf16\n"


def test_one_rank_is_not_ranks() -> None:
    file = io.StringIO()
    Display(make_plan(workers=1), Console(file=file, width=40)).on_start(SESSION)
    assert file.getvalue() == "shardwise  1 cpu rank · fp32\n"


def test_durations() -> None:
    assert [duration(s) for s in (-1, 41.6, 725, 10810)] == ["0:00", "0:42", "12:05", "3:00:10"]
