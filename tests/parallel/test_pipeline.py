"""The traffic of a pipeline's forward, as NCCL runs it: between two ranks one message after the other, either way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from shardwise._torch_compat.pipelining import waiting_in
from shardwise.job.schema import ParallelSection
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.stage_boundary import StageBoundary
from shardwise.plan.draft import stage_ranks

Message = tuple[int, int]  # from, to


def messages(rank: int, stages: tuple[int, ...], count: int, patch: pytest.MonkeyPatch) -> list[Message]:
    """What a rank sends and receives in one forward of `count` microbatches, in its order."""
    found: list[Message] = []
    done = SimpleNamespace(wait=lambda: None)
    patch.setattr(dist, "get_rank", lambda: rank)
    patch.setattr(dist, "isend", lambda value, to, group: (found.append((rank, to)), done)[1])
    patch.setattr(dist, "recv", lambda value, source, group: found.append((source, rank)))
    pipeline: Any = Pipeline.__new__(Pipeline)
    pipeline.plan, pipeline.group = SimpleNamespace(stage_ranks=stages), None
    pipeline.ranks, pipeline.dtype, pipeline.device = sorted(set(stages)), torch.float32, torch.device("meta")
    pipeline.boundaries = [
        StageBoundary(stage, len(stages), shapes=((2,), (2,))) for stage, at in enumerate(stages) if at == rank
    ]
    made = pipeline.evaluate(lambda part, index, arrived: torch.tensor(index), count)
    assert [int(value) for value in made] == (list(range(count)) if stages[-1] == rank else [])
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind, virtual", [("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)])
def test_no_rank_waits_for_a_message_that_another_would_send_later(
    ranks: int, kind: Any, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ParallelSection(pipeline_parallel_degree=ranks, pipeline=kind, virtual_pipeline_degree=virtual)
    stages = stage_ranks(settings)
    of_rank = [messages(rank, stages, 3, monkeypatch) for rank in range(ranks)]
    for one in range(ranks):
        for other in range(one + 1, ranks):
            orders = [[m for m in of_rank[rank] if set(m) == {one, other}] for rank in (one, other)]
            assert orders[0] == orders[1]


def test_waits_for_messages_are_in_a_context() -> None:
    said: list[str] = []

    class Scope(AbstractContextManager[None]):
        def __enter__(self) -> None:
            said.append("enter")

        def __exit__(self, *_: object) -> None:
            said.append("leave")

    message = mock.Mock()
    message.wait.side_effect = lambda: said.append("wait")
    before = schedules._wait_batch_p2p
    with waiting_in(Scope()):
        schedules._wait_batch_p2p([message])
        schedules._wait_batch_p2p([message])
    assert said == ["enter", "wait", "leave"] * 2 and schedules._wait_batch_p2p is before
