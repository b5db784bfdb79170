"""Errors of a user's module name its line; errors of collectives on the way are none of the module's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import UserCodeError
from shardwise.parallel.model import ParallelModel
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.parallel.test_unit_use import job


def raised_in_forward(error: Exception) -> Exception:
    """Return what becomes of an error that a user's forward meets."""
    facts: Any = SimpleNamespace(has_config=False, definition="Net (net.py:1)")
    model: Any = SimpleNamespace(facts=facts)
    with pytest.raises(Exception) as raised, ParallelModel._users_code(model, "forward"):
        raise error
    return raised.value


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("gate"), "raised KeyError: 'gate'"), (AssertionError(), "raised AssertionError")],
)
def test_an_error_has_its_class_message_and_line(error: Exception, said: str) -> None:
    place = rf"{__file__}:\d+"
    with pytest.raises(UserCodeError, match=rf"^the forward of Net \(net.py:1\) {said} \({place}\)$"):
        raise raised_in_forward(error)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("shardwise engine: rank 1 has left the group"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
)
def test_a_collective_that_loses_a_rank_is_no_mistake_of_the_module(error: Exception) -> None:
    assert raised_in_forward(error) is error


def error_of_step(directory: str) -> str:
    run = set_up(job(directory, "FailsInBackward"), torch.device("cpu"))
    with pytest.raises(UserCodeError) as raised:
        train_step(run.model, run.objective, list(run.stream.batches(0)), run.optimizer, run.scaler, 0)
    return str(raised.value)


def test_an_error_in_backward_is_named(world_pool: WorldPool, corpora: Path) -> None:
    [said] = world_pool.run(1, error_of_step, str(corpora))
    assert said.startswith("the backward of FailsInBackward (") and "raised KeyError: 'gate'" in said
    assert said.count("own_modules.py:") == 2
