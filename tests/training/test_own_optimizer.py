"""An optimizer class and a schedule of the user's own: the same numbers on two layouts, and what wrong ones say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, ShardwiseError, UserCodeError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.plan.plan import resolve
from shardwise.testing.world import WorldPool
from shardwise.training.optimizer import learning_rate
from shardwise.training.session import Session
from shardwise.training.user_code import check_user_code
from tests.parity.jobs import make_job
from tests.plan.rules.jobs import CPU4, FACTS
from tests.training.test_callbacks import CODE, line_of


def job_with(**optimizer: Any) -> Job:
    return Job.model_validate({"optimizer": optimizer, "training": {"steps": 4}})


def losses_of(job: Job) -> tuple[list[float], str]:
    with Session(job) as session:
        losses = [session.step(batches).loss for batches in session.batches()]
        return losses, type(session.optimizer.inner).__name__


def test_ones_own_optimizer_and_schedule_train_alike_on_any_ranks(world_pool: WorldPool, corpora: Path) -> None:
    settings = {"name": f"{CODE}:SignDescent", "schedule": f"{CODE}:halved", "options": {"slack": 1e-9}}
    job = make_job(corpora, layers=1, optimizer={"learning_rate": 0.01, **settings})
    [(expected, name)] = world_pool.run(1, losses_of, job)
    assert name == "SignDescent" and len(set(expected)) == 4
    for losses, _ in world_pool.run(2, losses_of, job):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_a_schedule_of_ones_own_is_a_factor_of_the_peak_and_has_its_own_warm_up() -> None:
    job = job_with(schedule=f"{CODE}:halved", learning_rate=0.8)
    plan = resolve(job, CPU4, FACTS)
    rates = [learning_rate(job.optimizer, step, 4, plan.warmup_steps) for step in range(4)]
    assert plan.warmup_steps == 0 and rates == [0.4, 0.2, 0.1, 0.05]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": f"{CODE}:NoSuchThing"}, "has no 'NoSuchThing'"),
    ({"name": f"{CODE}:ANSWER"}, "is no subclass of torch.optim.Optimizer"),
    (
        {"name": f"{CODE}:WithoutRate"},
        f"by which the learning rate is set ({line_of('class WithoutRate')})",
    ),
    ({"schedule": f"{CODE}:schedule_of_one_argument"}, "takes (step) and is called with (step, steps)"),
    ({"schedule": f"{CODE}:schedule_that_raises"}, f"list index out of range ({line_of('[1.0][step]')})"),
    ({"schedule": f"{CODE}:schedule_below_zero"}, "returned -5.0 at step 3 of 4; it must return a factor"),
]


@pytest.mark.parametrize(("optimizer", "words"), WRONG)
def test_wrong_ones_are_named_before_anything_starts(optimizer: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UserCodeError)) as raised:
        check_user_code(job_with(**optimizer))
    assert words in str(raised.value) and "optimizer." in str(raised.value)


def test_a_value_that_ones_own_class_refuses_is_the_plans_error() -> None:
    job = job_with(name=f"{CODE}:SignDescent", options={"slack": -1.0}, weight_decay=0)
    with pytest.raises(ConfigError) as raised:
        resolve(job, CPU4, FACTS)
    assert f"slack -1.0 is negative' ({line_of('raise ValueError(f')})" in str(raised.value)


def test_a_schedule_that_is_neither_known_nor_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'piecewise' or package\.module:name of your own; use cosine"):
        load_job({"optimizer": {"schedule": "cosin"}})


def failure_of(job: Job) -> str:
    try:
        losses_of(job)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_step_that_raises_is_named(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, optimizer={"name": f"{CODE}:FailingStep"})
    [message] = world_pool.run(1, failure_of, job)
    assert message == (
        f"UserCodeError: optimizer.name='{CODE}:FailingStep': step raised RuntimeError: no way forward "
        f"({line_of('no way forward')})"
    )
