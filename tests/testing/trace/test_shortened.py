"""A kind of rank shares another's trace only where both were seen to do the same; else it is traced at full depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.layout import Layout
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.testing.trace.job import SHORT, WHOLE, _of_kinds
from shardwise.testing.trace.kinds import first_of_stage, ranks_of_kinds
from shardwise.testing.trace.program import Call
from shardwise.testing.trace.rank import RankTrace
from shardwise.testing.trace.shortened import blocks_are_alike
from tests.testing.trace.test_trace import NEOX, PAIRS, settings, traced_job

LAYOUT = Layout({Axis.TENSOR: 4, Axis.PIPELINE: 2, Axis.SHARD: 2})
DEEP = settings(64, model={"config": NEOX | {"num_hidden_layers": 12}}, parallel=PAIRS)


def drawn_trace(number: int, rank: int, operation: str) -> RankTrace:
    call = Call(0, operation, "tensor", 0, 8 * (1 + number), "", "", "line")
    coordinates = {str(axis): index for axis, index in LAYOUT.coordinates(rank).items()}
    return RankTrace(rank, coordinates, 1, {}, MemoryEstimate("loss"), 1, (call,), ())


def test_a_kind_that_differs_is_traced_at_full_depth() -> None:
    tasks: list[tuple[int, int]] = []

    def traced(asked: Sequence[tuple[int, int]]) -> list[RankTrace]:
        tasks.extend(asked)
        last = {rank for rank in range(16) if LAYOUT.coordinates(rank)[Axis.TENSOR] == 3}
        return [drawn_trace(number, rank, "broadcast" if rank in last else "all_reduce") for number, rank in asked]

    kinds = ranks_of_kinds(LAYOUT)
    traces = _of_kinds(kinds, traced, has_short=True)
    whole = {rank for number, rank in tasks if number == WHOLE}
    assert [rank for number, rank in tasks if number == SHORT] == [*kinds.values()]
    assert whole == {rank for kind, rank in kinds.items() if kind.tensor == "last" or kind == first_of_stage(kind)}
    for kind, trace in traces.items():
        assert trace.rank == kinds[kind] and trace.program[0].bytes == 8
        assert (trace.traced_as is None) == (trace.rank in whole)
        first = traces[first_of_stage(kind)]
        assert trace.traced_as in (None, first.rank)


def test_blocks_of_two_kinds_are_not_alike() -> None:
    job = Job.model_validate(DEEP)
    facts = discover(build_model(job), job)
    assert blocks_are_alike(facts)
    name = f"{facts.blocks[3].name}.mlp.dense_h_to_4h.weight"
    assert not blocks_are_alike(replace(facts, parameter_shapes=facts.parameter_shapes | {name: (1, 1)}))
    call = replace(facts.attention[5], window=64)
    assert not blocks_are_alike(replace(facts, attention=(*facts.attention[:5], call, *facts.attention[6:])))


@pytest.mark.slow
def test_what_a_short_job_shows_is_true_at_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = traced_job(DEEP, 8)
    assert shown.short_blocks == 6 and sum(rank.traced_as is not None for rank in shown.ranks) == 4
    monkeypatch.setattr("shardwise.testing.trace.job.short_job", lambda *_: None)
    traced = traced_job(DEEP, 8)
    assert [replace(rank, traced_as=None) for rank in shown.ranks] == [*traced.ranks]
    assert shown.met == traced.met
