"""The Python functions of the package: the checks and words of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.commands.train import train
from shardwise.commands.verify import verify
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.parallel.layout import Layout

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "train('x')": (lambda: train("x"), "train takes a Job, not 'x'; shardwise.load_job makes one"),  # type: ignore[arg-type]
    "verify({})": (lambda: verify({}), "verify takes a Job, not {}; shardwise.load_job makes one"),  # type: ignore[arg-type]
    "against": (lambda: verify(Job(), against="x"), "verify's `against` takes a Job, not 'x'"),  # type: ignore[arg-type]
    "steps": (lambda: verify(Job(), steps=0), "steps=0: must be a whole number from 1"),
    "blocks": (lambda: verify(Job(), blocks=True), "blocks=True: must be a whole number from 1"),
    "load_job(5)": (lambda: load_job(5), "a job cannot be read from 5; give the path of a YAML file"),  # type: ignore[arg-type]
    "overrides": (lambda: load_job({}, 5), "overrides=5 must be words of a command line"),  # type: ignore[arg-type]
    "overrides' keys": (lambda: load_job({}, {3: 4}), "overrides={3: 4} must be words"),  # type: ignore[dict-item]
    "overrides' text": (lambda: load_job({}, "training.steps=3"), "overrides='training.steps=3' must be words"),
    "twice": (lambda: load_job({}, ["training.steps=3", "training.steps=4"]), "--training.steps is given twice"),
    "Job(trainin)": (lambda: Job(trainin={}), "unknown key trainin={}. Did you mean 'training'?"),  # type: ignore[call-arg]
    "Job(training)": (lambda: Job(training={"stps": 3}), "unknown key training.stps=3. Did you mean 'training.steps'?"),
    "switch": (lambda: Job(training={"steps": True}), "training.steps=True: must be a number, not true or false"),
    "Layout": (lambda: Layout({"foo": 2}), "degrees['foo']=2: no such axis."),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(ConfigError) as raised:
        call()
    assert words in str(raised.value)
