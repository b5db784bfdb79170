"""The Python functions of the package: the checks and words of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.commands.train import train
from shardwise.commands.verify import verify
from shardwise.errors import ConfigError, ModelError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.launch.local import run_local
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.training.init import initialize
from shardwise.training.session import Session

WORLD = World(1, "cpu", 1)
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
    "resolve's job": (lambda: resolve({}, None, None), "resolve takes a Job, not {}"),  # type: ignore[arg-type]
    "resolve's world": (lambda: resolve(Job(), 2, None), "world=2: must be a World; "),  # type: ignore[arg-type]
    "resolve's facts": (lambda: resolve(Job(), WORLD, 3), "facts=3: must be a ModelFacts; "),  # type: ignore[arg-type]
    "parallelize": (lambda: parallelize(5, 5, 5, 5), "model=5: must be a Module; "),  # type: ignore[arg-type]
    "initialize": (lambda: initialize(5, 0), "model=5: must be a ParallelModel; shardwise.parallelize"),  # type: ignore[arg-type]
    "callbacks": (lambda: train(Job(), callbacks=5), "callbacks=5: must be a Sequence; give a list"),  # type: ignore[arg-type]
    "Session's callbacks": (lambda: Session(Job(), callbacks=5), "callbacks=5: must be a Sequence"),  # type: ignore[arg-type]
    "Session's model": (lambda: Session(Job(), model=5), "model=5: must be a torch.nn.Module, or a function"),  # type: ignore[arg-type]
    "Session's example": (lambda: Session(Job(), example=5), "example=5: must be a Mapping; "),  # type: ignore[arg-type]
    "Session's section": (lambda: Session(optimizer=5), "optimizer is a section; set one of its keys"),  # type: ignore[arg-type]
    "Session's sections": (lambda: Session(optimiser={}), "unknown key optimiser. Did you mean 'optimizer'?"),
    "run_local's function": (lambda: run_local(5, (), 1), "function=5: must be callable"),  # type: ignore[arg-type]
    "run_local's args": (lambda: run_local(print, 5, 1), "args=5: must be a tuple"),  # type: ignore[arg-type]
    "run_local's workers": (lambda: run_local(print, (), 0), "workers=0: must be a whole number of at least 1"),
    "run_local's lambda": (lambda: run_local(lambda: None, (), 1), "cannot be sent to the workers"),
    "Layout's degrees": (lambda: Layout(5), "degrees=5: must be a Mapping; "),  # type: ignore[arg-type]
    "Layout": (lambda: Layout({"foo": 2}), "degrees['foo']=2: no such axis."),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises((ConfigError, ModelError)) as raised:
        call()
    assert words in str(raised.value)
