"""Callbacks: their order, what a wrong one says, and that one rank's failure ends the run on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.catalog import checkpoints
from shardwise.checkpoint.stores import checkpoint_store
from shardwise.errors import ConfigError, ShardwiseError, UserCodeError
from shardwise.job.schema import Job
from shardwise.observe.callback import CallbackList, check_callback, load_callbacks
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.trainer import train_rank
from shardwise.training.user_code import check_can_be_sent, check_user_code
from tests.parity.jobs import make_job, make_module_job
from tests.training import user_code

CODE = "tests.training.user_code"
FILE = Path(user_code.__file__)


def line_of(text: str) -> str:
    """Return `file:line` of a line of the user's code."""
    return f"{FILE}:{next(n for n, line in enumerate(FILE.read_text().splitlines(), 1) if text in line)}"


IS_NO_CALLBACK = "; a callback is a subclass of shardwise.Callback"
WRONG_CALLBACKS = {
    f"{CODE}:NoSuchThing": "has no 'NoSuchThing'",
    "no_such_package:Thing": "module 'no_such_package' cannot be imported",
    f"{CODE}.Calls": "is not of the form 'package.module:name'",
    "tests.training.broken_module:NUMBER": f"division by zero ({FILE.parent / 'broken_module.py'}:3)",
    f"{CODE}:ANSWER": f"is a int{IS_NO_CALLBACK}",
    f"{CODE}:NoCallback": f"is a NoCallback{IS_NO_CALLBACK} ({line_of('class NoCallback')})",
    f"{CODE}:MisspeltHook": "on_step_ended is no hook and would never be called. Did you mean 'on_step_end'? "
    f"({line_of('on_step_ended')})",
    f"{CODE}:TakesTooLittle": "takes (session) and is called with (session, record) "
    f"({line_of('def on_step_end(self, session: Any) ->')})",
    f"{CODE}:loss_of_one_argument": "takes (output) and is called with ()",
}


@pytest.mark.parametrize(("reference", "words"), WRONG_CALLBACKS.items())
def test_a_wrong_callback_is_named_before_anything_starts(reference: str, words: str) -> None:
    job = Job.model_validate({"training": {"callbacks": [f"{CODE}:Calls", reference]}})
    with pytest.raises((ConfigError, UserCodeError)) as raised:
        check_user_code(job)
    assert words in str(raised.value) and "training.callbacks[1]=" in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("loss_of_one_argument", f"is called with (output, batch) ({line_of('def loss_of_one_argument')})"),
        ("ANSWER", "is a int, not a function or class"),
    ],
)
def test_a_loss_that_cannot_be_called_is_named_before_anything_starts(loss: str, words: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        check_user_code(Job.model_validate({"model": {"loss": f"{CODE}:{loss}"}}))
    assert words in str(raised.value)


def test_a_callback_that_cannot_be_sent_to_workers_is_named() -> None:
    callback = check_callback(user_code.Calls(), "callbacks[0]")
    callback.handle = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match=r"callbacks\[0\]: a Calls cannot be sent to the workers"):
        check_can_be_sent([callback])


def test_rank_zero_only_callbacks_are_on_rank_0_alone() -> None:
    for rank, failed in ((0, True), (1, False)):
        callbacks = CallbackList(load_callbacks([f"{CODE}:FailsAtTheStart"]), rank)
        callbacks.call("on_start", None)
        assert (callbacks.failure is not None) is failed


def calls_of_a_run(job: Job) -> list[str]:
    calls = user_code.Calls()
    with Session(job, callbacks=[calls]) as session:
        calls.names.clear()  # the check has looked at each
        for batches in session.batches():
            session.step(batches)
        session.evaluate()
        session.save()
    return calls.names


def test_hooks_are_called_in_the_documented_order(world_pool: WorldPool, tmp_path: Path) -> None:
    job = make_module_job(tmp_path, training={"steps": 2}).model_copy(update={"output": str(tmp_path / "run")})
    step = ["on_step_begin", "on_step_end"]
    [names] = world_pool.run(1, calls_of_a_run, job)
    assert names == ["on_start", *step, *step, "on_evaluation", "on_save", "on_end"]


def failure_of_a_run(job: Job) -> tuple[str, str]:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    try:
        train_rank(job, torch.device("cpu"))
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_one_ranks_failing_callback_ends_the_run_on_all_and_leaves_the_checkpoint(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = make_job(
        corpora, layers=1, checkpoint={"every": 2}, observe={"tensorboard": False},
        training={"steps": 8, "callbacks": [f"{CODE}:FailsInTheMiddle"]},
    ).model_copy(update={"output": str(tmp_path / "run")})  # fmt: skip
    message = f"{CODE}:FailsInTheMiddle.on_step_end raised ValueError: the sky fell ({line_of('the sky fell')})"
    found: Any = world_pool.run(2, failure_of_a_run, job)
    assert found == [("UserCodeError", f"rank 1: {message}"), ("UserCodeError", message)]
    assert checkpoints(checkpoint_store(job)) == ["step-00000002"]


def test_a_callback_that_fails_at_the_start_fails_before_the_first_step(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = make_job(corpora, layers=1, training={"callbacks": [f"{CODE}:FailsAtTheStart"]})
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    for name, message in world_pool.run(2, failure_of_a_run, job):
        assert name == "UserCodeError" and f"'no such place' ({line_of('no such place')})" in message
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("loss_that_raises", f"has no attribute 'no_such_attribute' ({line_of('no_such_attribute')})"),
        ("loss_that_is_a_mean", "model.loss returned a tensor of shape []; it must return (sum, count)"),
    ],
)
def test_a_loss_that_fails_is_named(loss: str, words: str, world_pool: WorldPool, tmp_path: Path) -> None:
    job = make_module_job(tmp_path, model={"loss": f"{CODE}:{loss}"})
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    [(name, message)] = world_pool.run(1, failure_of_a_run, job)
    assert name == "UserCodeError" and words in message
